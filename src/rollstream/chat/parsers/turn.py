"""One pass over a turn: a cursor that can only move on, so that no character is lost."""

import re
from typing import Any

from rollstream.chat.parsers.base import ParsedOutput, Segment, SegmentKind, ToolCall
from rollstream.chat.parsers.json_call import UnreadableError, decode_value, place

END_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|eot|>",
    "<|eom|>",
    "<|end_of_text|>",
    "<|end_of_turn|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|end|>",
    "<|return|>",
    "<|observation|>",
    "<|user|>",
    "<｜end▁of▁sentence｜>",
    "<turn|>",
    "<end_of_turn>",
    "<end_of_utterance>",
)
"""Tokens that end a turn, of all models: a format is used with more models than its own. Only such as are no
ordinary text anywhere. `</s>`, `<eos>` and `[EOS]` are text to the models that do not have them, so they are
left to the parsers of the families that do. A fallback: who has the ids takes end tokens off before decoding.
"""

THINK_TAGS = ("<think>", "</think>")
"""The markers of a thinking block that most families share."""

_SPACE = re.compile(r"\s*")
_LONG_TRIES = 16
"""How often, in one turn, JSON may be tried beyond the next marker. Each try can read to the end of the turn,
so this keeps the whole linear; a turn that needs more is noise."""


class TurnReader:
    """A turn, its cursor, and what was made of the text before the cursor.

    Positions are indices into `text`; none is beyond `end`, where the end tokens begin.
    """

    def __init__(
        self,
        text: str,
        end_tokens: tuple[str, ...] = END_TOKENS,
        thinking: tuple[tuple[str, str], ...] = (THINK_TAGS,),
    ) -> None:
        """Begins a turn.

        Args:
            text: the turn.
            end_tokens: what is markup at its very end.
            thinking: opening and closing markers of thinking blocks.
        """
        self.text = text
        self.thinking = thinking
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
        """Takes the rest as content and thinking, the end tokens as markup."""
        self.take_content()
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

    def find_thinking(self, start: int | None = None) -> int:
        """Where a thinking block begins next, from `start` (the cursor); `end` if nowhere."""
        return min((self.find(opening, start) for opening, _ in self.thinking), default=self.end)

    def read_thinking(self, in_thinking: bool) -> None:
        """Takes the thinking that leads the turn; also a closing marker that nothing opened.

        Args:
            in_thinking: the prompt opened a block, by whichever marker: any closing marker ends it.
        """
        start = self.skip_space(self.position)
        if in_thinking:
            if (end := self._past_any(0, start)) > start:
                self.take("markup", end)
            self._take_thought(tuple(closing for _, closing in self.thinking))
        elif (end := self._past_any(1, start)) > start:
            self.take("markup", end)
        while self.find_thinking() == (start := self.skip_space(self.position)) < self.end:
            self.take("markup", start)
            self._take_block()

    def take_content(self, *markers: str) -> bool:
        """Takes content and thinking blocks up to the first marker that stands outside of these, or the end.

        Returns:
            Whether the cursor stands at a marker.
        """
        while True:
            marker = min((self.find(marker) for marker in markers), default=self.end)
            thinking = self.find_thinking()
            self.take("content", min(marker, thinking))
            if marker <= thinking:
                return marker < self.end
            self._take_block()

    def end_of_broken(self, start: int, stop: int, closing: str | None = None) -> int:
        """Where a call ends that cannot be read.

        A call that is closed ends there, and a thinking marker before is its text. One that is not closed
        must not hide that thinking begins, or calls in there would count: it ends where that begins.

        Args:
            start: how far the call could be read.
            stop: where the next marker stands, its own closing one or another.
            closing: its closing marker, if the format has one.
        """
        if closing is not None and self.at(closing, stop):
            return stop + len(closing)
        return min(stop, self.find_thinking(start))

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
            stop: where the next marker stands, or the end: a closing marker may be missing, also before a
                thinking block.
            closings: what closes the call, if the marker at `stop` turns out to be inside a string.
            tail: what may stand between the value and the marker. Matches the empty string, too.

        Raises:
            UnreadableError: there is none, or it is followed by something else.
        """
        value, value_end = self.decode(start, stop)
        match = tail.match(self.text, value_end, self.end if value_end > stop else stop)
        end = match.end() if match else value_end
        if end in (stop, self.end) or self.find_thinking(end) == end:
            return value, end
        if end > stop and any(self.at(mark, end) for mark in closings):
            return value, end
        if end > stop:
            raise UnreadableError(f"a string in it is not closed before {self.text[stop : stop + 20]!r}")
        raise UnreadableError(f"Extra data: {place(self.text, self.skip_space(start), end)}")

    def _take_block(self) -> None:
        """Takes the thinking block at the cursor, up to its own closing marker or the end."""
        opening, closing = next(pair for pair in self.thinking if self.at(pair[0], self.position))
        self.take("markup", self.position + len(opening))
        self._take_thought((closing,))

    def _take_thought(self, closings: tuple[str, ...]) -> None:
        self.take("thinking", min((self.find(closing) for closing in closings), default=self.end))
        self.take(
            "markup", max((self.past(closing, self.position) for closing in closings), default=self.end)
        )

    def _past_any(self, side: int, position: int) -> int:
        """The position behind an opening (side 0) or closing (side 1) marker; the same if there is none."""
        return max((self.past(pair[side], position) for pair in self.thinking), default=position)

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
