"""Calls in a section, each with a head and JSON arguments: how DeepSeek and Kimi models write them."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rollstream.chat.parsers.base import ParsedOutput
from rollstream.chat.parsers.json_call import UnreadableError, broken_call, call_of_arguments, is_bare_name
from rollstream.chat.parsers.turn import END_TOKENS, TurnReader


@dataclass(frozen=True, slots=True)
class CallHead:
    """What stands before the arguments of a call."""

    name: str
    arguments_start: int
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class SectionFormat:
    """Special tokens around a section of calls and around each call, and what is between the latter."""

    section_begin: str
    section_end: str
    call_begin: str
    call_end: str
    read_head: Callable[[TurnReader, int, int], CallHead]
    """Reads the head between two positions of a turn. Raises `UnreadableError`."""
    tail: re.Pattern[str] = re.compile(r"\s*")
    """What may follow the arguments within a call. Matches the empty string, too."""


class SectionParser:
    """Reads a format of sections. A subclass says which, and its name."""

    form: ClassVar[SectionFormat]
    end_tokens: ClassVar[tuple[str, ...]] = END_TOKENS
    stop_tokens: tuple[str, ...] = ()

    def parse(
        self, text: str, *, in_thinking: bool = False, tools: Sequence[dict[str, Any]] = ()
    ) -> ParsedOutput:
        turn = TurnReader(text, self.end_tokens)
        turn.read_thinking(in_thinking)
        _read_sections(turn, self.form)
        return turn.finish()


def _read_sections(turn: TurnReader, form: SectionFormat) -> None:
    """Takes the turn up to its end: content, thinking, sections, calls.

    A call outside a section counts. A section without a call is a call that was begun.
    """
    markers = (form.call_begin, form.section_begin, form.section_end)
    in_section = False
    while True:
        gap = turn.skip_space(turn.position)
        if in_section and (gap == turn.end or any(turn.at(mark, gap) for mark in markers)):
            turn.take("markup", gap)
        if not turn.take_content(*markers):
            return
        here = turn.position
        call, section_end = turn.find(form.call_begin), turn.find(form.section_end)
        if here == call:
            _take_call(turn, form)
        elif here == section_end:
            turn.take("markup", here + len(form.section_end))
            in_section = False
        elif min(call, turn.find_thinking()) < section_end:
            turn.take("markup", here + len(form.section_begin))
            in_section = True
        else:
            end = turn.past(form.section_end, section_end)
            turn.take_call(end, broken_call(turn.text[here:end], "a section of tool calls without a call"))


def _take_call(turn: TurnReader, form: SectionFormat) -> None:
    start, body = turn.position, turn.position + len(form.call_begin)
    stop = min(turn.find(mark, body) for mark in (form.call_end, form.call_begin, form.section_end))
    head = CallHead("", body)
    try:
        head = form.read_head(turn, body, stop)
        if not is_bare_name(head.name):
            head = CallHead("", body, head.call_id)
            raise UnreadableError("the call has no name of a tool")
        arguments, stop = _decode_arguments(turn, form, head, stop)
    except UnreadableError as error:
        end = turn.end_of_broken(body, stop, form.call_end)
        broken = broken_call(turn.text[start:end], str(error), name=head.name, call_id=head.call_id)
        turn.take_call(end, broken)
        return
    end = turn.past(form.call_end, stop)
    call = call_of_arguments(head.name, arguments, turn.text[start:end], call_id=head.call_id)
    turn.take_call(end, call)


def _decode_arguments(turn: TurnReader, form: SectionFormat, head: CallHead, stop: int) -> tuple[Any, int]:
    """The arguments, and where the body ends: behind `stop` if the marker there was inside a string."""
    try:
        return turn.decode_between(head.arguments_start, stop, (form.call_end,), form.tail)
    except UnreadableError as error:
        raise UnreadableError(f"the arguments are not valid JSON: {error}") from None
