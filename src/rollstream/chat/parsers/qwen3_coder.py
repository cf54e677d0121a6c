"""`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`: Qwen3-Coder, Qwen3.5.

Format: the chat templates of Qwen/Qwen3-Coder-30B-A3B-Instruct and Qwen3.5, and the parser published with the
former, which also takes a `<function=` without `<tool_call>`: that model leaves it out at times.
"""

import re
from collections.abc import Sequence
from typing import Any

from rollstream.chat.parsers.base import ParsedOutput, register_parser
from rollstream.chat.parsers.calls import broken_call, call_of_arguments, is_bare_name
from rollstream.chat.parsers.parameter_types import declared_types, parameters_of, read_value
from rollstream.chat.parsers.strict_json import UnreadableError
from rollstream.chat.parsers.turn import TurnReader

OPENING, CLOSING = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_FUNCTION_TAG = re.compile(r"<function=([^<>\n]*)>")
_PARAMETER_TAG = re.compile(r"<parameter=([^<>\n]*)>")


@register_parser("qwen3_coder")
class Qwen3CoderParser:
    """Tags with values as text; their types are read from the tool's schema."""

    stop_tokens: tuple[str, ...] = ()

    def parse(
        self, text: str, *, in_thinking: bool = False, tools: Sequence[dict[str, Any]] = ()
    ) -> ParsedOutput:
        turn = TurnReader(text)
        turn.read_thinking(in_thinking)
        while (start := min(turn.find(OPENING), turn.find(_FUNCTION))) < turn.end:
            turn.take("content", start)
            _Call(turn).read(tools)
        return turn.finish()


class _Call:
    """The call at the cursor, and how far it could be read."""

    def __init__(self, turn: TurnReader) -> None:
        self.turn = turn
        self.start = turn.position
        self.position = turn.skip_space(turn.past(OPENING, turn.position))
        self.name = ""

    def read(self, tools: Sequence[dict[str, Any]]) -> None:
        turn = self.turn
        try:
            self._read_name()
            arguments = self._read_arguments(parameters_of(tools, self.name))
        except UnreadableError as error:
            end = min(
                turn.past(CLOSING, turn.find(CLOSING, self.position)), turn.find(OPENING, self.position)
            )
            turn.take_call(end, broken_call(turn.text[self.start : end], str(error), name=self.name))
            return
        closing = turn.skip_space(self.position)
        end = turn.past(CLOSING, closing) if turn.at(CLOSING, closing) else self.position
        turn.take_call(end, call_of_arguments(self.name, arguments, turn.text[self.start : end]))

    def _read_name(self) -> None:
        tag = _FUNCTION_TAG.match(self.turn.text, self.position, self.turn.end)
        if tag is None or not is_bare_name(tag[1].strip()):
            raise UnreadableError("no <function=name> where the call begins")
        self.name = tag[1].strip()
        self.position = tag.end()

    def _read_arguments(self, parameters: dict[str, Any]) -> dict[str, Any]:
        turn, arguments = self.turn, {}
        while True:
            self.position = turn.skip_space(self.position)
            tag = _PARAMETER_TAG.match(turn.text, self.position, turn.end)
            if tag is None:
                break
            self.position = tag.end()
            key = tag[1].strip()
            end = turn.find(_PARAMETER_END, self.position)
            # A value that runs into the next parameter lost its own end: taking both would be a guess.
            if end == turn.end or turn.find(_PARAMETER, self.position) < end:
                raise UnreadableError(f"parameter {key[:40]!r} is not closed by {_PARAMETER_END}")
            value = turn.text[self.position : end].removeprefix("\n").removesuffix("\n")
            arguments[key] = read_value(value, declared_types(parameters, key))
            self.position = end + len(_PARAMETER_END)
        if not turn.at(_FUNCTION_END, self.position):
            raise UnreadableError(f"the call is not closed by {_FUNCTION_END}")
        self.position += len(_FUNCTION_END)
        return arguments
