"""`{"name": ..., "parameters": {...}}`, bare or after `<|python_tag|>`: Llama 3.1, 3.2, 3.3.

Several calls are separated by `;`, white space or both: models write all of these. Format: the prompt formats
of Llama 3.1, and the chat template of meta-llama/Llama-3.1-8B-Instruct.
"""

import re
from collections.abc import Sequence
from typing import Any

from rollstream.chat.parsers.base import register_parser
from rollstream.chat.parsers.json_call import UnreadableError
from rollstream.chat.parsers.turn import CallParser, OpenCall, TurnReader

_TAG = "<|python_tag|>"
_KEYS = ("parameters", "arguments")
_BEGUN = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"[^"\\]*"\s*,\s*"(?:parameters|arguments)"\s*:'
)
"""What only a call begins with; the rest of it may be broken."""


@register_parser("llama3_json")
class Llama3JsonParser(CallParser):
    """JSON without tags: it is a call only at the start of the answer, after a tag, or after another call."""

    markers = (_TAG,)
    stop_tokens: tuple[str, ...] = ("<|eom_id|>",)

    def begin(self, turn: TurnReader) -> None:
        if turn.at("{", turn.skip_space(turn.position)):
            self.take_call(turn, ())

    def take_call(self, turn: TurnReader, tools: Sequence[dict[str, Any]]) -> None:
        """Takes calls from the cursor on. After a tag there is one, whatever stands there; else perhaps none."""
        tagged = turn.at(_TAG, turn.position)
        start = turn.skip_space(turn.past(_TAG, turn.position))
        while True:
            value, error, stop = None, None, turn.find(_TAG, start)
            try:
                value, end = turn.decode(start, stop, "the call is")
            except UnreadableError as raised:
                error, end = raised, start
            if not tagged and not (_BEGUN.match(turn.text, start, stop) if error else _is_call(value)):
                return
            turn.take("markup", turn.position if tagged else start)
            with OpenCall(turn, _TAG, others=(_TAG,)) as call:
                if error:
                    raise error
                call.take_object(value, end, _KEYS)
            if error:
                return
            tagged, start = False, turn.skip_space(turn.past(";", turn.skip_space(end)))


def _is_call(value: Any) -> bool:
    return isinstance(value, dict) and "name" in value and any(key in value for key in _KEYS)
