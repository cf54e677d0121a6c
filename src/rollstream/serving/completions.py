"""OpenAI's `/v1/completions`: texts or token ids in, text out, and token ids if asked for."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

import msgspec

from rollstream.serving import openai_wire as wire
from rollstream.serving.model import ServedModel, is_batch, read_ids
from rollstream.serving.parameters import read_parameters
from rollstream.serving.refusals import RequestError
from rollstream.serving.sampling import Sampling, build_sampling, seed_of
from rollstream.serving.service import EngineRequest, EngineService

_HARMLESS = wire.HARMLESS
_NEUTRAL = {**wire.NEUTRAL, "suffix": "", "best_of": 1, "add_special_tokens": False}


class CompletionRequest(msgspec.Struct):
    """Body of `/v1/completions`."""

    prompt: Any
    model: str | None = None
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    n: int = 1
    logprobs: int | None = None
    seed: int | None = None
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    rid: str | None = None
    request_id: str | None = None


async def complete(
    given: Mapping[str, Any], model: ServedModel, service: EngineService
) -> dict[str, Any] | list[dict[str, Any]]:
    """Answers a request.

    Returns:
        the answer, or the chunks of a stream.

    Raises:
        RequestError: it cannot be answered as it is.
        EngineError: the engine's.
    """
    asked = read_parameters(given, CompletionRequest, harmless=_HARMLESS, neutral=_NEUTRAL)
    wire.check_model(asked.model, model)
    wire.check_samples(asked.n)
    with_usage = wire.wants_usage(asked.stream, asked.stream_options)
    if asked.logprobs:
        raise RequestError(
            "this engine gives the log-prob of the sampled token and of no other: use logprobs=0",
            param="logprobs",
        )
    sampling = build_sampling(
        Sampling(
            max_tokens=asked.max_tokens,
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k or -1,
            logprobs=asked.logprobs is not None,
            seed=asked.seed,
            stop=asked.stop,
            stop_token_ids=asked.stop_token_ids,
            ignore_eos=asked.ignore_eos,
        ),
        service.capabilities,
    )
    prompts = await _read_prompts(asked.prompt, model, service)
    envelope = wire.Envelope.make(
        model, "text_completion", "cmpl", rid=asked.rid, request_id=asked.request_id
    )
    requests = [
        EngineRequest(
            f"{envelope.id}_{at}_{sample}", prompt, replace(sampling, seed=seed_of(sampling.seed, sample))
        )
        for at, prompt in enumerate(prompts)
        for sample in range(asked.n)
    ]
    completions = await service.generate(envelope.id, requests)
    choices = []
    for index, (request, completion) in enumerate(zip(requests, completions, strict=True)):
        answer = model.reader.read(
            completion, request.sampling, skip_special_tokens=asked.skip_special_tokens
        )
        choice: dict[str, Any] = {
            "index": index,
            "text": answer.text,
            "logprobs": None,
            "finish_reason": completion.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        if completion.logprobs is not None:
            texts = model.reader.token_texts(completion.token_ids)
            choice["logprobs"] = {
                "tokens": wire.name_tokens(
                    completion.token_ids, texts, as_ids=asked.return_tokens_as_token_ids
                ),
                "token_logprobs": completion.logprobs,
                "top_logprobs": None,
                "text_offset": list(accumulate(map(len, texts[:-1]), initial=0)) if texts else [],
            }
        if asked.return_token_ids:
            choice["prompt_token_ids"] = request.prompt_ids
            choice["token_ids"] = completion.token_ids
        choices.append(choice)
    usage = wire.usage(prompts, completions)
    metadata = wire.weight_metadata(completions)
    if not asked.stream:
        return envelope.around(choices, usage=usage, metadata=metadata)
    chunks = [envelope.around([choice], metadata=metadata) for choice in choices]
    if with_usage:
        chunks = [{**chunk, "usage": None} for chunk in chunks]
        chunks.append(envelope.around([], usage=usage, metadata=metadata))
    return chunks


async def _read_prompts(value: Any, model: ServedModel, service: EngineService) -> list[list[int]]:
    prompts = []
    for prompt in value if is_batch(value) else [value]:
        if isinstance(prompt, str):
            prompts.append(await model.encode(prompt, service.capabilities.max_model_len))
        else:
            prompts.append(read_ids(prompt, "prompt"))
    return prompts
