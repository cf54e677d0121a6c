"""`{"name": ..., "parameters": {...}}`, bare or after `<|python_tag|>`: Llama 3.1, 3.2, 3.3.

Several calls are separated by `;`. Format: the prompt formats of Llama 3.1, and the chat template of
meta-llama/Llama-3.1-8B-Instruct.
"""

import re
from collections.abc import Sequence
from typing import Any

from rollstream.chat.parsers.base import ParsedOutput, register_parser
from rollstream.chat.parsers.json_call import UnreadableError, broken_call, call_of_object
from rollstream.chat.parsers.turn import TurnReader

_TAG = "<|python_tag|>"
_KEYS = ("parameters", "arguments")
_BEGUN = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"[^"\\]*"\s*,\s*"(?:parameters|arguments)"\s*:'
)
"""What only a call begins with; the rest of it may be broken."""


@register_parser("llama3_json")
class Llama3JsonParser:
    """JSON without tags: it is a call only at the start of the answer, after a tag, or after another call."""

    stop_tokens: tuple[str, ...] = ("<|eom_id|>",)

    def parse(
        self, text: str, *, in_thinking: bool = False, tools: Sequence[dict[str, Any]] = ()
    ) -> ParsedOutput:
        turn = TurnReader(text)
        turn.read_thinking(in_thinking)
        if turn.at("{", turn.skip_space(turn.position)):
            _read_calls(turn, turn.position, turn.find(_TAG), tagged=False)
        while turn.take_content(_TAG):
            body = turn.position + len(_TAG)
            _read_calls(turn, body, turn.find(_TAG, body), tagged=True)
        return turn.finish()


def _read_calls(turn: TurnReader, start: int, stop: int, *, tagged: bool) -> None:
    """Takes calls from the cursor on; nothing where there are none.

    Args:
        turn: its cursor stands at `start` or, if tagged, at the tag before it.
        start: where the first call should begin.
        stop: where the next tag stands.
        tagged: what stands here was meant as a call, whatever it is.
    """
    position = turn.skip_space(start)
    while True:
        call_start = turn.position if tagged else position
        try:
            value, end = turn.decode(position, stop)
        except UnreadableError as error:
            if tagged or _BEGUN.match(turn.text, position, stop):
                turn.take("markup", call_start)
                end = turn.end_of_broken(position, stop)
                broken = turn.text[call_start:end]
                turn.take_call(end, broken_call(broken, f"the call is not valid JSON: {error}"))
            return
        if not tagged and not _is_call(value):
            return
        turn.take("markup", call_start)
        turn.take_call(end, call_of_object(value, turn.text[call_start:end], _KEYS))
        stop = turn.find(_TAG, end)  # the value may have reached past a tag in a string
        separator = turn.skip_space(end)
        if not turn.at(";", separator):
            return
        position = turn.skip_space(separator + 1)
        tagged = False


def _is_call(value: Any) -> bool:
    return isinstance(value, dict) and "name" in value and any(key in value for key in _KEYS)
