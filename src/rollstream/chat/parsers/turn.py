"""One pass over a turn: a cursor that can only move on, so that no character is lost."""

import re
from typing import Any

from rollstream.chat.parsers.base import ParsedOutput, Segment, SegmentKind, ToolCall
from rollstream.chat.parsers.strict_json import UnreadableError, decode_value, place

END_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "</s>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",
    "<|observation|>",
    "<|user|>",
    "<|end|>",
    "<end_of_turn>",
    "[EOS]",
)
"""Tokens that end a turn, of all models: a format is used with more models than its own. At the very end of
a turn they are never meant as text."""

_SPACE = re.compile(r"\s*")
_LONG_TRIES = 16
"""How often, in one turn, JSON may be tried beyond the next marker. Each try can read to the end of the turn,
so this keeps the whole linear; a turn that needs more is noise."""


class TurnReader:
    """A turn, its cursor, and what was made of the text before the cursor.

    Positions are indices into `text`; none is beyond `end`, where the end tokens begin.
    """

    def __init__(self, text: str, end_tokens: tuple[str, ...] = END_TOKENS) -> None:
        self.text = text
        self.end = _end_of_body(text, end_tokens)
        self.position = 0
        self._spans: list[tuple[SegmentKind, int, int]] = []
        self._calls: list[ToolCall] = []
        self._found: dict[str, tuple[int, int]] = {}
        self._region: tuple[int, int, str] = (0, 0, "")
        self._long_tries = _LONG_TRIES

    def take(self, kind: SegmentKind, end: int) -> None:
        """Moves the cursor to `end`; the text passed is of this kind."""
        if end <= self.position:
            return
        start = self.position
        if self._spans and self._spans[-1][0] == kind != "call":
            start = self._spans.pop()[1]
        self._spans.append((kind, start, end))
        self.position = end

    def take_call(self, end: int, call: ToolCall) -> None:
        """Moves the cursor to `end`; the text passed is one call."""
        self.take("call", end)
        self._calls.append(call)

    def finish(self) -> ParsedOutput:
        """Takes the rest as content, the end tokens as markup."""
        self.take("content", self.end)
        self.take("markup", len(self.text))
        segments = tuple(Segment(kind, self.text[start:end]) for kind, start, end in self._spans)
        return ParsedOutput(segments, tuple(self._calls))

    def at(self, marker: str, position: int) -> bool:
        """Whether a marker stands there."""
        return self.text.startswith(marker, position, self.end)

    def past(self, marker: str, position: int) -> int:
        """The position behind a marker, or the same position if it is not there."""
        return position + len(marker) if self.at(marker, position) else position

    def find(self, marker: str, start: int | None = None) -> int:
        """Where a marker stands next, from `start` (the cursor); `end` if nowhere.

        No stretch is searched twice for the same marker as long as starts go forward.
        """
        start = self.position if start is None else start
        searched, position = self._found.get(marker, (1, 0))
        if not searched <= start <= position:
            position = self.text.find(marker, start, self.end)
            position = self.end if position < 0 else position
            self._found[marker] = (start, position)
        return position

    def skip_space(self, position: int) -> int:
        """The next position that is no white space."""
        match = _SPACE.match(self.text, position, self.end)
        return match.end() if match else position

    def read_thinking(self, in_thinking: bool, opening: str = "<think>", closing: str = "</think>") -> None:
        """Takes a leading thinking block, as far as it goes; also a closing marker that nothing opened."""
        start = self.skip_space(self.position)
        if self.at(opening, start):
            self.take("markup", start + len(opening))
            in_thinking = True
        if in_thinking:
            self.take("thinking", self.find(closing))
            self.take("markup", self.past(closing, self.position))
        elif self.at(closing, start):
            self.take("markup", start + len(closing))

    def decode(self, start: int, stop: int) -> tuple[Any, int]:
        """The JSON value that begins at `start`, and where it ends.

        Args:
            start: white space before the value is skipped.
            stop: where the next marker stands. If that marker is inside a string, the value ends behind it.

        Raises:
            UnreadableError: there is none.
        """
        try:
            return self._decode_region(start, stop)
        except UnreadableError as error:
            if not (error.open_string and stop < self.end and self._long_tries):
                raise
            self._long_tries -= 1
            try:
                return self._decode_region(start, self.end)
            except UnreadableError:
                raise error from None

    def decode_between(
        self, start: int, stop: int, closings: tuple[str, ...], tail: re.Pattern[str] = _SPACE
    ) -> tuple[Any, int]:
        """The JSON value that fills the text from `start` to a marker, and where that marker stands.

        Args:
            start: white space before the value is skipped.
            stop: where the next marker stands, or the end: a closing marker may be missing.
            closings: what closes the call, if the marker at `stop` turns out to be inside a string.
            tail: what may stand between the value and the marker. Matches the empty string, too.

        Raises:
            UnreadableError: there is none, or it is followed by something else.
        """
        value, value_end = self.decode(start, stop)
        match = tail.match(self.text, value_end, self.end if value_end > stop else stop)
        end = match.end() if match else value_end
        if end == stop or (end > stop and (end == self.end or any(self.at(mark, end) for mark in closings))):
            return value, end
        if end > stop:
            raise UnreadableError(f"a string in it is not closed before {self.text[stop : stop + 20]!r}")
        raise UnreadableError(f"Extra data: {place(self.text, self.skip_space(start), end)}")

    def _decode_region(self, start: int, stop: int) -> tuple[Any, int]:
        # A slice and not the whole text: an error counts the lines before it. Kept, because a list or chain
        # of values is read from the same region.
        region_start, region_stop, region = self._region
        if not (region_start <= start and region_stop == stop):
            region_start, region = start, self.text[start:stop]
            self._region = (start, stop, region)
        value, end = decode_value(region, start - region_start)
        return value, region_start + end


def _end_of_body(text: str, end_tokens: tuple[str, ...]) -> int:
    """Where the run of end tokens begins that closes the text, white space between and behind included."""
    end = len(text)
    while True:
        stripped = end
        while stripped and text[stripped - 1].isspace():
            stripped -= 1
        token = next((token for token in end_tokens if text.endswith(token, 0, stripped)), None)
        if token is None:
            return end
        end = stripped - len(token)
