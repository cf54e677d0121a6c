"""`<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`: Kimi K2 and later.

Within `<|tool_calls_section_begin|>` and `<|tool_calls_section_end|>`. What stands before the arguments is
the id of the call; the number in it counts calls. Format: the tool call guidance that is published with
moonshotai/Kimi-K2-Instruct.
"""

import re

from rollstream.chat.parsers.base import register_parser
from rollstream.chat.parsers.json_call import UnreadableError
from rollstream.chat.parsers.sections import CallHead, SectionFormat, SectionParser
from rollstream.chat.parsers.turn import END_TOKENS, TurnReader

_ARGUMENTS = "<|tool_call_argument_begin|>"
_COUNTER = re.compile(r":\d+\Z")


def _read_head(turn: TurnReader, start: int, stop: int) -> CallHead:
    position = turn.find(_ARGUMENTS, start)
    if position >= stop:
        raise UnreadableError(f"no {_ARGUMENTS} in the call")
    call_id = turn.text[start:position].strip()
    name = _COUNTER.sub("", call_id).removeprefix("functions.")
    return CallHead(name, position + len(_ARGUMENTS), call_id)


@register_parser("kimi")
@register_parser("kimi_k2")
class KimiK2Parser(SectionParser):
    """Sections of calls with ids."""

    form = SectionFormat(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        _read_head,
    )
    end_tokens = (*END_TOKENS, "[EOS]")
    stop_tokens: tuple[str, ...] = ("<|im_end|>",)
