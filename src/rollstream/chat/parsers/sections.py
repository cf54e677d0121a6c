"""Calls in a section, each a head and JSON arguments between special tokens: DeepSeek and Kimi models.

- `deepseek_v3`, of V3 and R1-0528: `<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, a line break, the
  arguments in a ```json block, `<｜tool▁call▁end｜>`.
- `deepseek_v3_1`, of V3.1: `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`. Formats: the chat
  templates and model cards of deepseek-ai/DeepSeek-V3-0324 and -V3.1.
- `kimi_k2`: `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`. What stands
  before the arguments is the id of the call; the number in it counts calls. Format: the tool call guidance
  that is published with moonshotai/Kimi-K2-Instruct.
"""

import re
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from rollstream.chat.parsers.base import ToolCall, register_parser
from rollstream.chat.parsers.json_call import UnreadableError, is_bare_name
from rollstream.chat.parsers.turn import END_TOKENS, CallParser, OpenCall, TurnReader

_SPACE = re.compile(r"\s*")
_TYPE = re.compile(r"\s*+\w*+\s*+")
_NAME_AND_FENCE = re.compile(r"([^\n]*)\n[ \t]*```(?:json)?[ \t]*\n")
_FENCE_END = re.compile(r"\s*(?:```\s*)?")
_COUNTER = re.compile(r":\d+\Z")


class _SectionParser(CallParser):
    """A call outside a section counts. A section without a call is a call that was begun."""

    markers: ClassVar[tuple[str, str, str]]
    """What begins a call, begins a section, ends a section."""
    separator: ClassVar[str]
    """Between the head and what follows it."""
    tail: ClassVar[re.Pattern[str]] = _SPACE
    """What may follow the arguments within a call. Matches the empty string, too."""

    @abstractmethod
    def read_head(self, turn: TurnReader, call: OpenCall, separator: int) -> int:
        """Reads a call's name, and its id if it has one; returns where its arguments begin."""

    def take_call(self, turn: TurnReader, tools: Sequence[dict[str, Any]]) -> None:
        begin, section, section_end = self.markers
        here, following = turn.position, turn.find(section_end)
        if here == following:
            turn.take("markup", here + len(section_end))
            return
        if turn.at(begin, here):
            super().take_call(turn, tools)
        elif min(turn.find(begin), turn.find_thinking()) < following:
            turn.take("markup", here + len(section))
        else:
            end = turn.past(section_end, following)
            text = turn.text[here:end]
            turn.take_call(end, ToolCall("", None, text, "a section of tool calls without a call"))
        gap = turn.skip_space(turn.position)
        if gap == turn.end or any(turn.at(mark, gap) for mark in self.markers):
            turn.take("markup", gap)

    def read_call(self, turn: TurnReader, call: OpenCall, tools: Sequence[dict[str, Any]]) -> None:
        separator = turn.find(self.separator, call.position)
        if separator >= call.stop:
            raise UnreadableError(f"no {self.separator} in the call")
        start = self.read_head(turn, call, separator)
        if not is_bare_name(call.name):
            call.name = ""
            raise UnreadableError("the call has no name of a tool")
        _, closings, _ = self.call_marks
        arguments, stop = turn.decode_between(start, call.stop, "the arguments are", closings, self.tail)
        call.take_arguments(arguments, turn.past_any(closings, stop))


class _DeepSeekParser(_SectionParser):
    markers = ("<｜tool▁call▁begin｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    call_marks = (markers[0], ("<｜tool▁call▁end｜>",), (markers[0], markers[2]))
    separator = "<｜tool▁sep｜>"


@register_parser("deepseek_v3")
class DeepSeekV3Parser(_DeepSeekParser):
    """Arguments in a ```json block."""

    tail = _FENCE_END

    def read_head(self, turn: TurnReader, call: OpenCall, separator: int) -> int:
        if not _TYPE.fullmatch(turn.text, call.position, separator):
            raise UnreadableError(f"no type of a call before {self.separator}")
        head = _NAME_AND_FENCE.match(turn.text, separator + len(self.separator), call.stop)
        if head is None:
            raise UnreadableError("no name and ```json block in the call")
        call.name = head[1].strip()
        return head.end()


@register_parser("deepseek_v3_1")
class DeepSeekV31Parser(_DeepSeekParser):
    """Name and arguments, a separator between them."""

    def read_head(self, turn: TurnReader, call: OpenCall, separator: int) -> int:
        call.name = turn.text[call.position : separator].strip()
        return separator + len(self.separator)


@register_parser("kimi")
@register_parser("kimi_k2")
class KimiK2Parser(_SectionParser):
    """Calls with ids."""

    markers = ("<|tool_call_begin|>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    call_marks = (markers[0], ("<|tool_call_end|>",), (markers[0], markers[2]))
    separator = "<|tool_call_argument_begin|>"
    end_tokens = (*END_TOKENS, "[EOS]")
    stop_tokens: tuple[str, ...] = ("<|im_end|>",)

    def read_head(self, turn: TurnReader, call: OpenCall, separator: int) -> int:
        call.call_id = turn.text[call.position : separator].strip()
        call.name = _COUNTER.sub("", call.call_id).removeprefix("functions.")
        return separator + len(self.separator)
