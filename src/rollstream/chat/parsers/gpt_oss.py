"""Harmony: messages with roles, channels and recipients: gpt-oss.

`<|start|>assistant<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>`; the
recipient may also stand in the role part, before the channel. The channel `analysis` is thinking; `final` and
a `commentary` without a recipient are content. The prompt ends with `<|start|>assistant`, so a turn begins in
a header.
Format: the guide to harmony, https://cookbook.openai.com/articles/openai-harmony.
"""

import re
from collections.abc import Sequence
from typing import Any

from rollstream.chat.parsers.base import ParsedOutput, register_parser
from rollstream.chat.parsers.json_call import UnreadableError
from rollstream.chat.parsers.turn import OpenCall, TurnReader

_START, _CHANNEL, _MESSAGE, _CALL = "<|start|>", "<|channel|>", "<|message|>", "<|call|>"
_CLOSINGS = ("<|end|>", "<|return|>", _CALL)
_ROLE_PART = re.compile(r"\s*(?:assistant\b\s*)?(?:to=\S+\s*)?")
_CHANNEL_NAME = re.compile(r"\s*(\w*)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_NO_TOOLS = ("assistant", "user", "all")
"""Recipients that are parties of the conversation."""


@register_parser("gpt-oss")
@register_parser("gpt_oss")
class GptOssParser:
    """Messages up to their end tokens; a message to a recipient is a call, whatever its channel."""

    stop_tokens: tuple[str, ...] = (_CALL,)

    def parse(
        self, text: str, *, in_thinking: bool = False, tools: Sequence[dict[str, Any]] = ()
    ) -> ParsedOutput:
        turn = TurnReader(text, end_tokens=("<|endoftext|>",), thinking={})
        if in_thinking:
            _take_body(turn, "analysis")
        while turn.position < turn.end:
            _read_message(turn)
        return turn.finish()


def _read_message(turn: TurnReader) -> None:
    start = turn.position
    closing = turn.find_any(_CLOSINGS)
    header_start = min(turn.find_any((_START, _CHANNEL, _MESSAGE)), closing)
    if not _ROLE_PART.fullmatch(turn.text, start, header_start):
        turn.take("content", header_start)  # text without a header
        return
    message = turn.find(_MESSAGE)
    header = turn.text[start : min(message, closing)]
    _, _, after_channel = header.rpartition(_CHANNEL)
    channel_name = _CHANNEL_NAME.match(after_channel) if _CHANNEL in header else None
    channel = channel_name[1] if channel_name else ""
    addressee = _RECIPIENT.search(header)
    recipient = addressee[1] if addressee and addressee[1] not in _NO_TOOLS else ""
    whole, body = message < closing, message + len(_MESSAGE)
    closing = turn.find_any(_CLOSINGS, body) if whole else closing
    if recipient or (whole and channel != "analysis" and turn.at(_CALL, closing)):
        with OpenCall(turn, "", _CLOSINGS) as call:
            call.name = recipient.removeprefix("functions.")
            if not whole:
                raise UnreadableError(f"no {_MESSAGE} in the call")
            call.position = body
            if not recipient:
                raise UnreadableError("the call has no recipient (to=functions.name)")
            arguments, closing = turn.decode_between(body, closing, "the arguments are", _CLOSINGS)
            call.take_arguments(arguments, turn.past_any(_CLOSINGS, closing))
    elif whole:
        turn.take("markup", body)
        _take_body(turn, channel)
    else:
        turn.take("markup", turn.past_any(_CLOSINGS, closing))


def _take_body(turn: TurnReader, channel: str) -> None:
    closing = turn.find_any(_CLOSINGS)
    turn.take("thinking" if channel == "analysis" else "content", closing)
    turn.take("markup", turn.past_any(_CLOSINGS, closing))
