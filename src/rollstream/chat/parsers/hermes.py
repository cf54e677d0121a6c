"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes 2 and 3, Qwen2.5, Qwen3.

Format: the chat templates of NousResearch/Hermes-3-Llama-3.1-8B and Qwen/Qwen3-8B.
"""

from collections.abc import Sequence
from typing import Any

from rollstream.chat.parsers.base import ParsedOutput, register_parser
from rollstream.chat.parsers.json_call import UnreadableError, broken_call, call_of_object
from rollstream.chat.parsers.tagged_call import CLOSING, OPENING
from rollstream.chat.parsers.turn import TurnReader


@register_parser("hermes")
class HermesParser:
    """JSON between tags. A missing closing tag is no error where the JSON is whole."""

    stop_tokens: tuple[str, ...] = ()

    def parse(
        self, text: str, *, in_thinking: bool = False, tools: Sequence[dict[str, Any]] = ()
    ) -> ParsedOutput:
        turn = TurnReader(text)
        turn.read_thinking(in_thinking)
        while turn.take_content(OPENING):
            _read_call(turn)
        return turn.finish()


def _read_call(turn: TurnReader) -> None:
    start, body = turn.position, turn.position + len(OPENING)
    stop = min(turn.find(CLOSING, body), turn.find(OPENING, body))
    try:
        value, stop = turn.decode_between(body, stop, (CLOSING,))
    except UnreadableError as error:
        end = turn.end_of_broken(body, stop, CLOSING)
        turn.take_call(end, broken_call(turn.text[start:end], f"the call is not valid JSON: {error}"))
        return
    end = turn.past(CLOSING, stop)
    turn.take_call(end, call_of_object(value, turn.text[start:end]))
