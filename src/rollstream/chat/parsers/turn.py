"""One pass over a turn: a cursor that can only move on, so that no character is lost.

`CallParser` is what most formats share: content and thinking up to the marker of a call, the call, and so on.
"""

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

from rollstream.chat.parsers.base import ParsedOutput, SegmentKind, Stretch, ToolCall
from rollstream.chat.parsers.json_call import (
    UnreadableError,
    can_be_stored,
    decode_value,
    place,
    read_arguments,
)

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

THINK_TAGS = {"<think>": "</think>"}
"""What opens a thinking block, and what closes it; most families share these."""

_SPACE = re.compile(r"\s*")
_LONG_TRIES = 16
"""How often, in one turn, JSON may be tried beyond the next marker. Each try can read to the end of the turn,
so this keeps the whole linear; a turn that needs more is noise."""


class TurnReader:
    """A turn, its cursor, and what was made of the text before the cursor.

    Positions are indices into `text`; none is beyond `end`, where the end tokens begin. No stretch is searched
    twice for the same marker as long as searches go forward.
    """

    def __init__(
        self,
        text: str,
        end_tokens: tuple[str, ...] = END_TOKENS,
        thinking: Mapping[str, str] = THINK_TAGS,
    ) -> None:
        """`end_tokens` are markup at its very end; `thinking`: what opens a block, and what closes it."""
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
        start = self.position
        if end <= start:
            return
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
        segments = tuple(Stretch(kind, self.text[start:end]) for kind, start, end in self._spans)
        return ParsedOutput(segments, tuple(self._calls))

    def at(self, marker: str, position: int) -> bool:
        """Whether a marker stands there."""
        return self.text.startswith(marker, position, self.end)

    def past(self, marker: str, position: int) -> int:
        """The position behind a marker, or the same position if it is not there."""
        return position + len(marker) if self.at(marker, position) else position

    def past_any(self, markers: Iterable[str], position: int) -> int:
        return max((self.past(marker, position) for marker in markers), default=position)

    def find(self, marker: str, start: int | None = None) -> int:
        """Where a marker stands next, from `start` (the cursor); `end` if nowhere."""
        start = self.position if start is None else start
        searched, position = self._found.get(marker, (1, 0))
        if not searched <= start <= position:
            position = self.text.find(marker, start, self.end)
            position = self.end if position < 0 else position
            self._found[marker] = (start, position)
        return position

    def find_any(self, markers: Iterable[str], start: int | None = None) -> int:
        return min((self.find(marker, start) for marker in markers), default=self.end)

    def find_thinking(self, start: int | None = None) -> int:
        """Where a thinking block begins next; `end` if nowhere."""
        return self.find_any(self.thinking, start)

    def skip_space(self, position: int) -> int:
        """The next position that is no white space."""
        match = _SPACE.match(self.text, position, self.end)
        return match.end() if match else position

    def read_thinking(self, in_thinking: bool) -> None:
        """Takes the thinking that leads the turn; also a closing marker that nothing opened.

        A block that the prompt has opened, by whichever marker, ends at any closing marker.
        """
        start, closings = self.skip_space(self.position), self.thinking.values()
        end = self.past_any(self.thinking if in_thinking else closings, start)
        if end > start:
            self.take("markup", end)
        if in_thinking:
            self._take_thought(closings)
        while self.find_thinking() == (start := self.skip_space(self.position)) < self.end:
            self.take("markup", start)
            self._take_block()

    def take_content(self, *markers: str) -> bool:
        """Takes content and thinking blocks up to the first marker outside of these; whether there is one."""
        while True:
            marker, thinking = self.find_any(markers), self.find_thinking()
            self.take("content", min(marker, thinking))
            if marker <= thinking:
                return marker < self.end
            self._take_block()

    def decode(self, start: int, stop: int, what: str) -> tuple[Any, int]:
        """The JSON value that begins at `start`, and where it ends.

        Args:
            start: white space before the value is skipped.
            stop: where the next marker stands. If that marker is inside a string, the value ends behind it.
            what: such as "the arguments are", for the message.

        Raises:
            UnreadableError: there is none.
        """
        try:
            return self._decode_region(start, stop)
        except UnreadableError as error:
            if error.open_string and stop < self.end and self._long_tries:
                self._long_tries -= 1
                with contextlib.suppress(UnreadableError):
                    return self._decode_region(start, self.end)
            raise UnreadableError(f"{what} not valid JSON: {error}") from None

    def decode_between(
        self, start: int, stop: int, what: str, closings: Sequence[str], tail: re.Pattern[str] = _SPACE
    ) -> tuple[Any, int]:
        """The JSON value that fills the text from `start` to a marker, and where that marker stands.

        Args:
            start: as for `decode`.
            stop: where the next marker stands, or the end: a closing marker may be missing, also before a
                thinking block.
            what: as for `decode`.
            closings: what closes the call, if the marker at `stop` turns out to be inside a string.
            tail: what may stand between the value and the marker. Matches the empty string, too.

        Raises:
            UnreadableError: there is none, or it is followed by something else.
        """
        value, value_end = self.decode(start, stop, what)
        is_long = value_end > stop
        match = tail.match(self.text, value_end, self.end if is_long else stop)
        end = match.end() if match else value_end
        is_closed = is_long and any(self.at(mark, end) for mark in closings)
        if is_closed or end in (stop, self.end) or self.find_thinking(end) == end:
            return value, end
        reason = f"Extra data: {place(self.text, self.skip_space(start), end)}"
        if end > stop:
            reason = f"a string in it is not closed before {self.text[stop : stop + 20]!r}"
        raise UnreadableError(f"{what} not valid JSON: {reason}")

    def _take_block(self) -> None:
        """Takes the thinking block at the cursor, up to its own closing marker or the end."""
        opening = next(mark for mark in self.thinking if self.at(mark, self.position))
        self.take("markup", self.position + len(opening))
        self._take_thought([self.thinking[opening]])

    def _take_thought(self, closings: Iterable[str]) -> None:
        self.take("thinking", self.find_any(closings))
        self.take("markup", self.past_any(closings, self.position))

    def _decode_region(self, start: int, stop: int) -> tuple[Any, int]:
        # A slice and not the whole text: an error counts the lines before it. Kept, because a list or chain
        # of values is read from the same region.
        region_start, region_stop, region = self._region
        if not (region_start <= start and region_stop == stop):
            region_start, region = start, self.text[start:stop]
            self._region = (start, stop, region)
        value, end = decode_value(region, start - region_start)
        return value, region_start + end


class OpenCall:
    """The call at a turn's cursor, as a context in which it is read.

    The call is taken when the context is left: whole, or broken by the `UnreadableError` that was raised in it.
    """

    def __init__(
        self, turn: TurnReader, opening: str, closings: Sequence[str] = (), others: Sequence[str] = ()
    ) -> None:
        """A call that begins at the cursor by `opening`, which may be missing; it ends before `others`, too."""
        self.turn = turn
        self.position = turn.past(opening, turn.position)
        """How far the call could be read."""
        self.name = ""
        self.call_id: str | None = None
        self._closings = closings
        self._stops = (*closings, *others)
        self._arguments: dict[str, Any] | None = None
        self._end: int | None = None

    @property
    def stop(self) -> int:
        """Where the next marker stands that may end the call, from `position`."""
        return self.turn.find_any(self._stops, self.position)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if error is not None and not isinstance(error, UnreadableError):
            return False
        turn, name, call_id = self.turn, self.name, self.call_id
        end = self._broken_end() if self._end is None else self._end
        if error is not None:  # what cannot be stored is left out
            name = name if can_be_stored(name) else ""
            call_id = call_id if can_be_stored(call_id) else None
        arguments, why = (self._arguments, None) if error is None else (None, str(error))
        turn.take_call(end, ToolCall(name, arguments, turn.text[turn.position : end], why, call_id))
        return True

    def _broken_end(self) -> int:
        """Where a call ends that cannot be read.

        One that is closed ends there, and a thinking marker before is its text. One that is not closed must not
        hide that thinking begins, or calls in there would count: it ends where that begins.
        """
        stop = self.stop
        end = self.turn.past_any(self._closings, stop)
        return end if end > stop else min(stop, self.turn.find_thinking(self.position))

    def take_object(self, value: Any, end: int, keys: Sequence[str] = ("arguments",)) -> None:
        """The call is one JSON object with `name` and arguments, and perhaps an `id`, and ends at `end`.

        `keys` are where arguments may stand, the preferred one first. Raises `UnreadableError`.
        """
        self._end = end
        if not isinstance(value, dict):
            raise UnreadableError("the call is not a JSON object")
        name, call_id = value.get("name"), value.get("id")
        self.call_id = call_id if isinstance(call_id, str) else None
        if not isinstance(name, str) or not name:
            raise UnreadableError('the call has no "name" that is a string')
        self.name = name
        key = next((key for key in keys if key in value), None)
        if key is None:
            raise UnreadableError(f'the call has no "{keys[0]}"')
        self.take_arguments(value[key], end)

    def take_arguments(self, arguments: Any, end: int) -> None:
        """The call, whose name is known, has these arguments and ends at `end`. Raises `UnreadableError`."""
        self._end = end
        if not self.name:
            raise UnreadableError("the call has no name of a tool")
        self._arguments = read_arguments(arguments)
        if not can_be_stored([self.name, self._arguments, self.call_id]):
            raise UnreadableError("the call holds half a surrogate pair or is nested too deeply")


class CallParser:
    """Reads a format in which a marker begins each call. A subclass says which, and how a call is read."""

    markers: ClassVar[tuple[str, ...]]
    """Before them is content."""
    call_marks: tuple[str, Sequence[str], Sequence[str]]
    """What opens a call, what closes it, and before what it ends, too; see `OpenCall`."""
    thinking: ClassVar[Mapping[str, str]] = THINK_TAGS
    end_tokens: ClassVar[tuple[str, ...]] = END_TOKENS
    stop_tokens: tuple[str, ...] = ()

    def parse(
        self, text: str, *, in_thinking: bool = False, tools: Sequence[dict[str, Any]] = ()
    ) -> ParsedOutput:
        turn = TurnReader(text, self.end_tokens, self.thinking)
        turn.read_thinking(in_thinking)
        self.begin(turn)
        while turn.take_content(*self.markers):
            self.take_call(turn, tools)
        return turn.finish()

    def begin(self, turn: TurnReader) -> None:
        """Takes what may begin an answer without a marker."""

    def take_call(self, turn: TurnReader, tools: Sequence[dict[str, Any]]) -> None:
        """Moves the cursor, which stands at a marker, behind what that begins."""
        with OpenCall(turn, *self.call_marks) as call:
            self.read_call(turn, call, tools)

    def read_call(self, turn: TurnReader, call: OpenCall, tools: Sequence[dict[str, Any]]) -> None:
        """Reads a call by `take_object` or `take_arguments`. Raises `UnreadableError`."""
        raise NotImplementedError


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
