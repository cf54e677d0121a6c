"""OpenAI's `/v1/chat/completions`: messages and tools in, a message out."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import orjson

from rollstream.chat.parsers.base import ToolCall
from rollstream.serving import openai_wire as wire
from rollstream.serving.chat_messages import read_messages, read_tools
from rollstream.serving.model import ServedModel
from rollstream.serving.parameters import read_parameters
from rollstream.serving.refusals import RequestError
from rollstream.serving.sampling import Sampling, build_sampling, seed_of
from rollstream.serving.service import EngineRequest, EngineService
from rollstream.trajectory import Completion

_NEUTRAL = {
    **wire.NEUTRAL,
    "top_logprobs": 0,
    "parallel_tool_calls": True,
    "modalities": ["text"],
    "functions": [],
    "function_call": "none",
    "add_special_tokens": False,
    "chat_template_kwargs": {},
    "include_reasoning": True,
    "separate_reasoning": True,
}

_DEFAULT_TOKENS = 1024
"""Of an answer, where neither the request nor the engine has a limit."""


class ChatRequest(msgspec.Struct):
    """Body of `/v1/chat/completions`."""

    messages: list[Any]
    model: str | None = None
    tools: list[Any] = []
    tool_choice: Any = "auto"
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    n: int = 1
    logprobs: bool = False
    seed: int | None = None
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    rid: str | None = None
    request_id: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False


async def chat(
    given: Mapping[str, Any], model: ServedModel, service: EngineService
) -> dict[str, Any] | list[dict[str, Any]]:
    """Answers a request.

    Returns:
        the answer, or the chunks of a stream.

    Raises:
        RequestError: it cannot be answered as it is.
        DataError: the chat template refuses the messages.
        EngineError: the engine's.
    """
    if given.get("top_logprobs"):
        raise RequestError(
            "this engine gives the log-prob of the sampled token and of no other: leave top_logprobs out",
            param="top_logprobs",
        )
    asked = read_parameters(given, ChatRequest, harmless=wire.HARMLESS, neutral=_NEUTRAL)
    wire.check_model(asked.model, model)
    wire.check_samples(asked.n)
    with_usage = wire.wants_usage(asked.stream, asked.stream_options)
    if asked.tool_choice not in ("auto", "none"):
        raise RequestError(
            f"tool_choice {asked.tool_choice!r} is not supported: nothing here forces a model to call a "
            "tool; use 'auto' or 'none'",
            param="tool_choice",
        )
    # Tools that may not be called are not shown, as in SGLang.
    tools = read_tools(asked.tools) if asked.tool_choice == "auto" else []
    prompt_ids = _render(asked, model, tools)
    sampling = build_sampling(_sampling(asked, model, service, prompt_ids, tools), service.capabilities)
    envelope = wire.Envelope.make(
        model, "chat.completion", "chatcmpl", rid=asked.rid, request_id=asked.request_id
    )
    requests = [
        EngineRequest(
            f"{envelope.id}_{sample}", prompt_ids, replace(sampling, seed=seed_of(sampling.seed, sample))
        )
        for sample in range(asked.n)
    ]
    completions = await service.generate(envelope.id, requests)
    # What an answer goes on with is text: thinking that it opened has been closed.
    in_thinking = model.template.in_thinking(prompt_ids) and not asked.continue_final_message
    turns = [
        _read_turn(model, request, completion, tools, in_thinking=in_thinking)
        for request, completion in zip(requests, completions, strict=True)
    ]
    more: dict[str, Any] = {"metadata": wire.weight_metadata(completions)}
    usage = wire.usage([prompt_ids], completions)
    if not asked.stream:
        if asked.return_token_ids:
            more["prompt_token_ids"] = prompt_ids
        choices = [
            {"index": index, "message": turn.message(), **_rest(turn, model, asked)}
            for index, turn in enumerate(turns)
        ]
        return envelope.around(choices, usage=usage, **more)
    envelope = replace(envelope, object="chat.completion.chunk")
    chunks = []
    for index, turn in enumerate(turns):
        for delta in turn.deltas():
            chunks.append(
                envelope.around(
                    [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}], **more
                )
            )
        chunks.append(envelope.around([{"index": index, "delta": {}, **_rest(turn, model, asked)}], **more))
    if asked.return_token_ids:
        chunks[0]["prompt_token_ids"] = prompt_ids
    if with_usage:
        chunks = [{**chunk, "usage": None} for chunk in chunks]
        chunks.append(envelope.around([], usage=usage, **more))
    return chunks


def _render(asked: ChatRequest, model: ServedModel, tools: list[dict[str, Any]]) -> list[int]:
    """Ids of the messages, ready for an answer; inside the last one with `continue_final_message`."""
    messages = read_messages(asked.messages)
    if asked.add_generation_prompt is asked.continue_final_message:
        raise RequestError(
            "an answer either begins (add_generation_prompt) or goes on (continue_final_message): exactly "
            "one of them has to be true",
            param="add_generation_prompt",
        )
    if asked.continue_final_message and messages[-1]["role"] != "assistant":
        raise RequestError(
            "continue_final_message goes on with the last message, which must be an assistant's",
            param="continue_final_message",
        )
    return model.tokenizer.render(
        messages, tools=tools or None, continue_final_message=asked.continue_final_message
    )


def _sampling(
    asked: ChatRequest,
    model: ServedModel,
    service: EngineService,
    prompt_ids: list[int],
    tools: list[dict[str, Any]],
) -> Sampling:
    limit = service.capabilities.max_model_len
    if limit is not None and len(prompt_ids) >= limit:
        raise RequestError(
            f"the messages have {len(prompt_ids)} tokens, which leaves no room for an answer in {limit}",
            param="messages",
            code="context_length_exceeded",
        )
    if asked.max_completion_tokens is not None:
        max_tokens = asked.max_completion_tokens
    elif asked.max_tokens is not None:
        max_tokens = asked.max_tokens
    else:
        max_tokens = _DEFAULT_TOKENS if limit is None else limit - len(prompt_ids)
    stops = asked.stop_token_ids
    if tools:
        stops = [*stops, *(token for token in model.parser_stop_ids if token not in stops)]
    return Sampling(
        max_tokens=max_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k or -1,
        logprobs=asked.logprobs,
        seed=asked.seed,
        stop=asked.stop,
        stop_token_ids=stops,
        ignore_eos=asked.ignore_eos,
    )


@dataclass(frozen=True, slots=True)
class _Turn:
    """One sample, read."""

    completion: Completion
    content: str
    reasoning: str
    calls: Sequence[dict[str, Any]]
    """In OpenAI's form."""
    stop_reason: str | int | None

    @property
    def finish_reason(self) -> str:
        reason = self.completion.finish_reason
        return "tool_calls" if self.calls and reason == "stop" else reason

    def message(self) -> dict[str, Any]:
        """The whole message."""
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if self.calls and not self.content else self.content,
        }
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = list(self.calls)
        return message

    def deltas(self) -> list[dict[str, Any]]:
        """The message in pieces: role, thinking, content, and each call."""
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": None if self.calls else ""}]
        if self.reasoning:
            deltas.append({"reasoning_content": self.reasoning})
        if self.content:
            deltas.append({"content": self.content})
        deltas += [{"tool_calls": [{"index": at, **call}]} for at, call in enumerate(self.calls)]
        return deltas


def _read_turn(
    model: ServedModel,
    request: EngineRequest,
    completion: Completion,
    tools: list[dict[str, Any]],
    *,
    in_thinking: bool,
) -> _Turn:
    answer = model.reader.read(completion, request.sampling, skip_special_tokens=False)
    parsed = model.parser.parse(answer.text, in_thinking=in_thinking, tools=tools)
    if tools:
        # A call that cannot be executed has no place in `tool_calls`; what the model wrote is not dropped.
        content = parsed.content + "".join(call.text for call in parsed.calls if call.error is not None)
        calls = [_openai_call(call) for call in parsed.calls if call.error is None]
    else:
        content = "".join(segment.text for segment in parsed.segments if segment.kind in ("content", "call"))
        calls = []
    for text in model.special_texts:
        content = content.replace(text, "")
    if parsed.reasoning or calls:
        content = content.strip()
    return _Turn(completion, content, parsed.reasoning, calls, answer.stop_reason)


def _openai_call(call: ToolCall) -> dict[str, Any]:
    return {
        # Nine letters and digits: Mistral's templates take no other id.
        "id": call.call_id or f"c{secrets.token_hex(4)}",
        "type": "function",
        "function": {"name": call.name, "arguments": orjson.dumps(call.arguments).decode()},
    }


def _rest(turn: _Turn, model: ServedModel, asked: ChatRequest) -> dict[str, Any]:
    """What a choice has beside its message."""
    rest: dict[str, Any] = {
        "logprobs": None,
        "finish_reason": turn.finish_reason,
        "stop_reason": turn.stop_reason,
    }
    completion = turn.completion
    if completion.logprobs is not None:
        ids = completion.token_ids
        texts = model.reader.token_texts(ids)
        names = wire.name_tokens(ids, texts, as_ids=asked.return_tokens_as_token_ids)
        rest["logprobs"] = {
            "content": [
                {
                    "token": name,
                    "logprob": logprob,
                    # Of a token that ends inside a character, only its character's last token knows.
                    "bytes": list(text.encode()) if text else None,
                    "top_logprobs": [],
                }
                for name, text, logprob in zip(names, texts, completion.logprobs, strict=True)
            ],
            "refusal": None,
        }
    if asked.return_token_ids:
        rest["token_ids"] = completion.token_ids
    return rest
