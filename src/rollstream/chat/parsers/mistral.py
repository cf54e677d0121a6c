"""`[TOOL_CALLS]`, then a JSON list of calls, or name and arguments of one: Mistral models.

Tokenizers v2 to v7: `[TOOL_CALLS] [{"name": ..., "arguments": {...}, "id": ...}]`. From v11 on:
`[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}`, once for each call, the id only in v11. Where `[ARGS]` is hidden,
arguments directly after the name are read, too. Thinking: `[THINK]...[/THINK]` (v13), or `<think>` (Magistral
2506). Formats: mistral_common's instruct tokenizers.
"""

import re
from collections.abc import Sequence
from typing import Any

from rollstream.chat.parsers.base import register_parser
from rollstream.chat.parsers.json_call import UnreadableError
from rollstream.chat.parsers.turn import END_TOKENS, THINK_TAGS, CallParser, OpenCall, TurnReader

_CALLS = "[TOOL_CALLS]"
_HEAD = re.compile(
    r"\s*(?P<name>[^\s<>{}\[\]\"']+)\s*"
    r"(?:\[CALL_ID\](?P<id>[^\[\]{}<>]*))?"
    r"(?:\[ARGS\]|(?=\{))"
)


@register_parser("mistral")
class MistralParser(CallParser):
    """All generations of the format, and both ways to mark thinking."""

    markers = (_CALLS,)
    end_tokens = (*END_TOKENS, "</s>")
    thinking = {**THINK_TAGS, "[THINK]": "[/THINK]"}  # noqa: RUF012

    call_marks = (_CALLS, (), (_CALLS,))

    def take_call(self, turn: TurnReader, tools: Sequence[dict[str, Any]]) -> None:
        body = turn.skip_space(turn.position + len(_CALLS))
        if turn.at("[", body) and not turn.at(_CALLS, body):
            _take_list(turn, body)
        else:
            super().take_call(turn, tools)

    def read_call(self, turn: TurnReader, call: OpenCall, tools: Sequence[dict[str, Any]]) -> None:
        head = _HEAD.match(turn.text, call.position, call.stop)
        if head is None:
            raise UnreadableError("neither a list of calls nor a name and [ARGS] after [TOOL_CALLS]")
        call.name, call.call_id = head["name"], head["id"] and head["id"].strip()
        call.position = head.end()
        call.take_arguments(*turn.decode(call.position, call.stop, "the arguments are"))


def _take_list(turn: TurnReader, bracket: int) -> None:
    """Takes the calls of a list, as far as it can be read; the rest of a broken list is one broken call."""
    position = turn.skip_space(bracket + 1)
    if turn.at("]", position):
        turn.take("markup", position + 1)
        return
    following, more = turn.position, True
    while more:
        more = False
        with OpenCall(turn, _CALLS, others=(_CALLS,)) as call:
            value, end = turn.decode(position, call.stop, "the list of calls is")
            turn.take("markup", position)
            following = turn.skip_space(end)
            more, position = turn.at(",", following), turn.skip_space(following + 1)
            call.take_object(value, end)
    turn.take("markup", turn.past("]", following))
