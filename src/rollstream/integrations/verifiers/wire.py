"""OpenAI's chat API, as an environment speaks it: what of it a run allows, and what it is answered."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollstream.chat.parsers.base import ParsedOutput
from rollstream.chat.wires.openai_chat import (
    ChatAnswer,
    ChatRequest,
    Choice,
    assistant_message,
    event_stream,
    read_chat,
)
from rollstream.chat.wires.requests import RequestError
from rollstream.trajectory import Completion, Message, SamplingParams

TurnRequest = ChatRequest

_HARMLESS = frozenset(
    (
        "seed",  # a rollout's seeds are the run's
        "return_tokens_as_token_ids",
        "return_token_ids",
        "reasoning_effort",
    )
)
_NEUTRAL: dict[str, Any] = {
    "n": 1,
    "stop_token_ids": [],
    "ignore_eos": False,
    "add_generation_prompt": True,
    "continue_final_message": False,
}


def read_request(given: Mapping[str, Any], run: SamplingParams) -> ChatRequest:
    """Reads the body of a request.

    How to sample is the run's affair: log-probs and seeds are of its distribution. A request that asks for
    another one is refused, not passed over.

    Args:
        given: the body.
        run: how the run samples.

    Raises:
        RequestError: it cannot be answered as it is.
        ConfigError: a tool's schema is not whole.
    """
    asked = read_chat(given, harmless=_HARMLESS, neutral=_NEUTRAL)
    for name in ("temperature", "top_p", "top_k"):
        value, ours = getattr(asked, name), getattr(run, name)
        if value is not None and value != ours and not (name == "top_k" and value <= 0 and ours <= 0):
            raise RequestError(
                f"{name} is {value} and the run's is {ours}: leave it out, or set "
                f"actor_rollout_ref.rollout.{name}",
                param=name,
            )
    if asked.max_tokens is not None and asked.max_tokens < 1:
        raise RequestError(f"max_tokens must be at least 1, not {asked.max_tokens}", param="max_tokens")
    asked.stop = [text for text in asked.stops if text]
    asked.return_token_ids = asked.logprobs  # with log-probs an environment is told the token ids, too
    return asked


class TurnAnswer:
    """An answer, and what belongs to it."""

    def __init__(
        self, id: str, model: str, message: Message, prompt_ids: list[int], completion: Completion
    ) -> None:
        self.id = id
        if completion.finish_reason == "abort":
            # Cut off by an abort: for the environment an answer that is not whole.
            completion = replace(completion, finish_reason="length")
        self._answer = ChatAnswer(id, model, prompt_ids, [Choice(message, completion)])

    def body(self, request: ChatRequest) -> dict[str, Any]:
        """The whole answer."""
        return self._answer.body(request)

    def events(self, request: ChatRequest) -> bytes:
        """The whole answer as server-sent events: the engine gives it at once, so they come at once."""
        return event_stream(self._answer.chunks(request))


def content_of(parsed: ParsedOutput, special_texts: Sequence[str], *, tools: bool) -> str:
    """What a model says, as an environment is told, see `assistant_message`."""
    content: str = assistant_message(parsed, special_texts, tools=tools)["content"]
    return content
