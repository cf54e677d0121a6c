"""`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`: GLM-4.5, 4.6 and later.

Format: the chat template of zai-org/GLM-4.5; strings are written as they are, everything else as JSON.
"""

from collections.abc import Sequence
from typing import Any

from rollstream.chat.parsers.base import ParsedOutput, register_parser
from rollstream.chat.parsers.json_call import UnreadableError, is_bare_name
from rollstream.chat.parsers.tagged_call import (
    CLOSING,
    OPENING,
    TaggedCall,
    declared_types,
    json_or_text,
    read_value,
)
from rollstream.chat.parsers.turn import TurnReader

_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"


@register_parser("glm")
@register_parser("glm45")
class Glm45Parser:
    """Tags for keys and values. A value without a declared type is JSON if it reads as JSON, else text."""

    stop_tokens: tuple[str, ...] = ("<|observation|>",)

    def parse(
        self, text: str, *, in_thinking: bool = False, tools: Sequence[dict[str, Any]] = ()
    ) -> ParsedOutput:
        turn = TurnReader(text)
        turn.read_thinking(in_thinking)
        while turn.take_content(OPENING):
            _Call(turn).take(tools)
        return turn.finish()


class _Call(TaggedCall):
    def read_name(self) -> None:
        turn = self.turn
        end = min(turn.find(mark, self.position) for mark in (_KEY, CLOSING, OPENING))
        name = turn.text[self.position : end].strip()
        if not is_bare_name(name):
            raise UnreadableError("no name of a tool where the call begins")
        self.name, self.position = name, end

    def read_arguments(self, parameters: dict[str, Any]) -> dict[str, Any]:
        turn, arguments = self.turn, {}
        while turn.at(_KEY, self.position):
            key = self._read_between(_KEY, _KEY_END, "a key").strip()
            if not turn.at(_VALUE, self.position):
                raise UnreadableError(f"no {_VALUE} for the key {key[:40]!r}")
            value = self._read_between(_VALUE, _VALUE_END, f"the value of {key[:40]!r}")
            types = declared_types(parameters, key)
            arguments[key] = read_value(value, types) if types else json_or_text(value)
        if not turn.at(CLOSING, self.position):
            raise UnreadableError(f"the call is not closed by {CLOSING}")
        self.position += len(CLOSING)
        return arguments

    def _read_between(self, opening: str, closing: str, what: str) -> str:
        turn = self.turn
        start = self.position + len(opening)
        end = turn.find(closing, start)
        # What runs into the next key or value lost its own end: taking both would be a guess.
        if end == turn.end or turn.find(_KEY, start) < end or turn.find(_VALUE, start) < end:
            raise UnreadableError(f"{what} is not closed by {closing}")
        self.position = turn.skip_space(end + len(closing))
        return turn.text[start:end]
