"""`[TOOL_CALLS]`, then a JSON list of calls, or name and arguments of one: Mistral models.

Tokenizers v2 to v7: `[TOOL_CALLS] [{"name": ..., "arguments": {...}, "id": ...}]`. From v11 on:
`[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}`, once for each call, the id only in v11. Where `[ARGS]` is hidden,
arguments directly after the name are read, too. Thinking: `[THINK]...[/THINK]` (v13), or `<think>` (Magistral
2506). Formats: mistral_common's instruct tokenizers.
"""

import re
from collections.abc import Sequence
from typing import Any

from rollstream.chat.parsers.base import ParsedOutput, register_parser
from rollstream.chat.parsers.json_call import UnreadableError, broken_call, call_of_arguments, call_of_object
from rollstream.chat.parsers.turn import END_TOKENS, THINK_TAGS, TurnReader

_CALLS = "[TOOL_CALLS]"
_END_TOKENS = (*END_TOKENS, "</s>")
_THINKING = (THINK_TAGS, ("[THINK]", "[/THINK]"))
_HEAD = re.compile(
    r"\s*(?P<name>[^\s<>{}\[\]\"']+)\s*"
    r"(?:\[CALL_ID\](?P<id>[^\[\]{}<>]*))?"
    r"(?:\[ARGS\]|(?=\{))"
)


@register_parser("mistral")
class MistralParser:
    """All generations of the format, and both ways to mark thinking."""

    stop_tokens: tuple[str, ...] = ()

    def parse(
        self, text: str, *, in_thinking: bool = False, tools: Sequence[dict[str, Any]] = ()
    ) -> ParsedOutput:
        turn = TurnReader(text, _END_TOKENS, _THINKING)
        turn.read_thinking(in_thinking)
        while turn.take_content(_CALLS):
            _read_calls(turn)
        return turn.finish()


def _read_calls(turn: TurnReader) -> None:
    body = turn.skip_space(turn.position + len(_CALLS))
    stop = turn.find(_CALLS, turn.position + len(_CALLS))
    if turn.at("[", body) and body < stop:
        _read_list(turn, body, stop)
    else:
        _read_named(turn, body, stop)


def _read_list(turn: TurnReader, bracket: int, stop: int) -> None:
    """Takes the calls of a list, as far as it can be read; the rest of a broken list is one broken call."""
    position = turn.skip_space(bracket + 1)
    if turn.at("]", position):
        turn.take("markup", position + 1)
        return
    while True:
        try:
            value, end = turn.decode(position, stop)
        except UnreadableError as error:
            stop = turn.end_of_broken(turn.position, stop)
            broken = turn.text[turn.position : stop]
            turn.take_call(stop, broken_call(broken, f"the list of calls is not valid JSON: {error}"))
            return
        turn.take("markup", position)
        turn.take_call(end, call_of_object(value, turn.text[position:end]))
        stop = turn.find(_CALLS, end)  # the value may have reached past a marker in a string
        following = turn.skip_space(end)
        if not turn.at(",", following):
            turn.take("markup", turn.past("]", following))
            return
        position = turn.skip_space(following + 1)


def _read_named(turn: TurnReader, body: int, stop: int) -> None:
    start = turn.position
    head = _HEAD.match(turn.text, body, stop)
    if head is None:
        stop = turn.end_of_broken(start, stop)
        reason = "neither a list of calls nor a name and [ARGS] after [TOOL_CALLS]"
        turn.take_call(stop, broken_call(turn.text[start:stop], reason))
        return
    name, call_id = head["name"], head["id"] and head["id"].strip()
    try:
        arguments, end = turn.decode(head.end(), stop)
    except UnreadableError as error:
        stop = turn.end_of_broken(head.end(), stop)
        reason = f"the arguments are not valid JSON: {error}"
        turn.take_call(stop, broken_call(turn.text[start:stop], reason, name=name, call_id=call_id))
        return
    turn.take_call(end, call_of_arguments(name, arguments, turn.text[start:end], call_id=call_id))
