"""Calls in a section, each with a head and JSON arguments: how DeepSeek and Kimi models write them."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from rollstream.chat.parsers.base import ToolCall
from rollstream.chat.parsers.calls import broken_call, call_of_arguments, is_bare_name
from rollstream.chat.parsers.strict_json import UnreadableError
from rollstream.chat.parsers.turn import TurnReader


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


def read_sections(turn: TurnReader, form: SectionFormat) -> None:
    """Takes the turn up to its end: content, sections, calls.

    A call outside a section counts. A section without a call is a call that was begun.
    """
    in_section = False
    while turn.position < turn.end:
        call = turn.find(form.call_begin)
        section, section_end = turn.find(form.section_begin), turn.find(form.section_end)
        here = min(call, section, section_end)
        between = turn.text[turn.position : here]
        turn.take("markup" if in_section and between.isspace() else "content", here)
        if here == turn.end:
            return
        if here == call:
            _take_call(turn, form)
        elif here == section_end:
            turn.take("markup", here + len(form.section_end))
            in_section = False
        elif call < section_end:
            turn.take("markup", here + len(form.section_begin))
            in_section = True
        else:
            end = turn.past(form.section_end, section_end)
            turn.take_call(end, broken_call(turn.text[here:end], "a section of tool calls without a call"))


def _take_call(turn: TurnReader, form: SectionFormat) -> None:
    start, body = turn.position, turn.position + len(form.call_begin)
    stop = min(turn.find(mark, body) for mark in (form.call_end, form.call_begin, form.section_end))
    call, stop = _read_call(turn, form, start, body, stop)
    turn.take_call(turn.past(form.call_end, stop), call)


def _read_call(
    turn: TurnReader, form: SectionFormat, start: int, body: int, stop: int
) -> tuple[ToolCall, int]:
    """The call, and where its body ends: behind `stop` if the marker there was inside a string."""

    def text() -> str:
        return turn.text[start : turn.past(form.call_end, stop)]

    try:
        head = form.read_head(turn, body, stop)
    except UnreadableError as error:
        return broken_call(text(), str(error)), stop
    if not is_bare_name(head.name):
        return broken_call(text(), "the call has no name of a tool", call_id=head.call_id), stop
    try:
        arguments, stop = turn.decode_between(head.arguments_start, stop, (form.call_end,), form.tail)
    except UnreadableError as error:
        reason = f"the arguments are not valid JSON: {error}"
        return broken_call(text(), reason, name=head.name, call_id=head.call_id), stop
    return call_of_arguments(head.name, arguments, text(), call_id=head.call_id), stop
