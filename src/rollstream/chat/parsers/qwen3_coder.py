"""`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`: Qwen3-Coder, Qwen3.5.

Format: the chat templates of Qwen/Qwen3-Coder-30B-A3B-Instruct and Qwen3.5, and the parser published with the
former, which also takes a `<function=` without `<tool_call>`: that model leaves it out at times.
"""

import re
from collections.abc import Sequence
from typing import Any

from rollstream.chat.parsers.base import ParsedOutput, register_parser
from rollstream.chat.parsers.json_call import UnreadableError, is_bare_name
from rollstream.chat.parsers.tagged_call import CLOSING, OPENING, TaggedCall, declared_types, read_value
from rollstream.chat.parsers.turn import TurnReader

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
        while turn.take_content(OPENING, _FUNCTION):
            _Call(turn).take(tools)
        return turn.finish()


class _Call(TaggedCall):
    def read_name(self) -> None:
        start = self.turn.skip_space(self.position)
        tag = _FUNCTION_TAG.match(self.turn.text, start, self.turn.end)
        if tag is None or not is_bare_name(tag[1].strip()):
            raise UnreadableError("no <function=name> where the call begins")
        self.name = tag[1].strip()
        self.position = tag.end()

    def read_arguments(self, parameters: dict[str, Any]) -> dict[str, Any]:
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
        closing = turn.skip_space(self.position)
        if turn.at(CLOSING, closing):
            self.position = closing + len(CLOSING)
        return arguments
