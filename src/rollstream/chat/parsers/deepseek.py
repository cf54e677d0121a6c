"""Calls of DeepSeek models, between special tokens.

`deepseek_v3`, of V3 and R1-0528: `<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, a line break, the
arguments in a ```json block, `<｜tool▁call▁end｜>`. `deepseek_v3_1`, of V3.1:
`<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`. Both within `<｜tool▁calls▁begin｜>` and
`<｜tool▁calls▁end｜>`. Formats: the chat templates and model cards of deepseek-ai/DeepSeek-V3-0324 and -V3.1.
"""

import re

from rollstream.chat.parsers.base import register_parser
from rollstream.chat.parsers.json_call import UnreadableError
from rollstream.chat.parsers.sections import CallHead, SectionFormat, SectionParser
from rollstream.chat.parsers.turn import TurnReader

_SEPARATOR = "<｜tool▁sep｜>"
_MARKERS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
)
_TYPE = re.compile(r"\s*+\w*+\s*+")
_NAME_AND_FENCE = re.compile(r"([^\n]*)\n[ \t]*```(?:json)?[ \t]*\n")
_FENCE_END = re.compile(r"\s*(?:```\s*)?")


def _separator(turn: TurnReader, start: int, stop: int) -> int:
    position = turn.find(_SEPARATOR, start)
    if position >= stop:
        raise UnreadableError(f"no {_SEPARATOR} in the call")
    return position


def _read_v3_head(turn: TurnReader, start: int, stop: int) -> CallHead:
    separator = _separator(turn, start, stop)
    if not _TYPE.fullmatch(turn.text, start, separator):
        raise UnreadableError(f"no type of a call before {_SEPARATOR}")
    head = _NAME_AND_FENCE.match(turn.text, separator + len(_SEPARATOR), stop)
    if head is None:
        raise UnreadableError("no name and ```json block in the call")
    return CallHead(head[1].strip(), head.end())


def _read_v3_1_head(turn: TurnReader, start: int, stop: int) -> CallHead:
    separator = _separator(turn, start, stop)
    return CallHead(turn.text[start:separator].strip(), separator + len(_SEPARATOR))


@register_parser("deepseek_v3")
class DeepSeekV3Parser(SectionParser):
    """Arguments in a ```json block."""

    form = SectionFormat(*_MARKERS, _read_v3_head, _FENCE_END)


@register_parser("deepseek_v3_1")
class DeepSeekV31Parser(SectionParser):
    """Name and arguments, a separator between them."""

    form = SectionFormat(*_MARKERS, _read_v3_1_head)
