"""`<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`: Kimi K2 and later.

Within `<|tool_calls_section_begin|>` and `<|tool_calls_section_end|>`. What stands before the arguments is
the id of the call; the number in it counts calls. Format: the tool call guidance that is published with
moonshotai/Kimi-K2-Instruct.
"""

import re
from collections.abc import Sequence
from typing import Any

from rollstream.chat.parsers.base import ParsedOutput, register_parser
from rollstream.chat.parsers.sections import CallHead, SectionFormat, read_sections
from rollstream.chat.parsers.strict_json import UnreadableError
from rollstream.chat.parsers.turn import TurnReader

_ARGUMENTS = "<|tool_call_argument_begin|>"
_COUNTER = re.compile(r":\d+\Z")


def _read_head(turn: TurnReader, start: int, stop: int) -> CallHead:
    position = turn.find(_ARGUMENTS, start)
    if position >= stop:
        raise UnreadableError(f"no {_ARGUMENTS} in the call")
    call_id = turn.text[start:position].strip()
    name = _COUNTER.sub("", call_id).removeprefix("functions.")
    return CallHead(name, position + len(_ARGUMENTS), call_id)


_FORMAT = SectionFormat(
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    _read_head,
)


@register_parser("kimi")
@register_parser("kimi_k2")
class KimiK2Parser:
    """Sections of calls with ids."""

    stop_tokens: tuple[str, ...] = ("<|im_end|>",)

    def parse(
        self, text: str, *, in_thinking: bool = False, tools: Sequence[dict[str, Any]] = ()
    ) -> ParsedOutput:
        turn = TurnReader(text)
        turn.read_thinking(in_thinking)
        read_sections(turn, _FORMAT)
        return turn.finish()
