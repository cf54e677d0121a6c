"""SGLang's `/generate`: ids or text in, ids, text and log-probs out, one or many.

Source: https://docs.sglang.io/basic_usage/native_api.html and sampling_params.html.
"""

import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from rollstream.engine.base import Capabilities
from rollstream.serving.model import ServedModel, is_batch, read_ids
from rollstream.serving.parameters import read_parameters
from rollstream.serving.refusals import RequestError
from rollstream.serving.sampling import Sampling, build_sampling, seed_of
from rollstream.serving.service import EngineRequest, EngineService
from rollstream.trajectory import Completion, SamplingParams

_HARMLESS = frozenset(("log_metrics", "no_logs", "priority", "background", "extra_key", "modalities"))
_NEUTRAL = {
    "image_data": [],
    "video_data": [],
    "audio_data": [],
    "top_logprobs_num": 0,
    "token_ids_logprob": [],
    "return_hidden_states": False,
    "return_routed_experts": False,
}
_NEUTRAL_SAMPLING = {
    "min_p": 0,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "min_new_tokens": 0,
    "spaces_between_special_tokens": True,
    "no_stop_trim": False,
    "logit_bias": {},
    "custom_params": {},
}

MAX_SAMPLES = 4096
"""Samples of one prompt; a mistyped `n` must not fill the memory before the queue's bound is looked at."""


class NativeRequest(msgspec.Struct):
    """Body of `/generate`. What is typed Any may be a list with an entry for each prompt."""

    text: str | list[str] | None = None
    input_ids: Any = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] = {}
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] = False
    logprob_start_len: int | list[int] = -1
    return_text_in_logprobs: bool = False
    stream: bool = False


class _NativeSampling(msgspec.Struct):
    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    sampling_seed: int | None = None
    skip_special_tokens: bool = True
    n: int = 1


async def generate(given: Mapping[str, Any], model: ServedModel, service: EngineService) -> tuple[Any, bool]:
    """Answers a request.

    Returns:
        the reply (a list for a batch or several samples), and whether it is wanted as a stream.

    Raises:
        RequestError: it cannot be answered as it is.
        EngineError: the engine's.
    """
    began = time.monotonic()
    asked = read_parameters(given, NativeRequest, harmless=_HARMLESS, neutral=_NEUTRAL)
    prompts, batch = await _read_prompts(asked, model, service.capabilities)
    params = _for_each(asked.sampling_params, len(prompts), "sampling_params")
    samplings = [
        read_parameters(one, _NativeSampling, neutral=_NEUTRAL_SAMPLING, where="sampling_params.")
        for one in params
    ]
    logprobs = _for_each(asked.return_logprob, len(prompts), "return_logprob")
    starts = _for_each(asked.logprob_start_len, len(prompts), "logprob_start_len")
    many = batch or any(one.n != 1 for one in samplings)
    names = _Names(asked.rid, len(prompts), many=many)
    requests: list[EngineRequest] = []
    skips: list[bool] = []
    for at, (prompt, one, wanted) in enumerate(zip(prompts, samplings, logprobs, strict=True)):
        if not 1 <= one.n <= MAX_SAMPLES:
            raise RequestError(f"n must be from 1 to {MAX_SAMPLES}, not {one.n}", param="sampling_params.n")
        if wanted and 0 <= starts[at] < len(prompt) - 1:
            raise RequestError(
                "this engine gives log-probs of sampled tokens only: leave logprob_start_len out",
                param="logprob_start_len",
            )
        sampling = _to_sampling(one, service.capabilities, logprobs=wanted)
        for sample in range(one.n):
            seeded = replace(sampling, seed=seed_of(sampling.seed, sample))
            requests.append(EngineRequest(names.of(at, sample, one.n), prompt, seeded))
            skips.append(one.skip_special_tokens)
    completions = await service.generate(names.group, requests)
    seconds = time.monotonic() - began
    replies = [
        _reply(request, completion, model, asked, skip_special_tokens=skip, seconds=seconds)
        for request, completion, skip in zip(requests, completions, skips, strict=True)
    ]
    return (replies if many else replies[0]), asked.stream


async def _read_prompts(
    asked: NativeRequest, model: ServedModel, capabilities: Capabilities
) -> tuple[list[list[int]], bool]:
    if (asked.text is None) == (asked.input_ids is None):
        raise RequestError("give either text or input_ids", param="input_ids")
    value: Any = asked.input_ids if asked.text is None else asked.text
    batch = is_batch(value)
    prompts: list[Any] = value if batch else [value]
    if asked.text is None:
        return [read_ids(prompt, "input_ids") for prompt in prompts], batch
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise RequestError("'text' must be a text or several", param="text")
    return [await model.encode(prompt, capabilities.max_model_len) for prompt in prompts], batch


def _for_each(value: Any, count: int, param: str) -> list[Any]:
    """A value for each prompt."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{param!r} has {len(value)} entries for {count} prompts", param=param)
    return value


class _Names:
    """Request ids: given ones as they are; of a batch with one id, and of several samples, with a number."""

    def __init__(self, rid: str | list[str] | None, prompts: int, *, many: bool) -> None:
        self._rids = _for_each(rid, prompts, "rid") if isinstance(rid, list) else None
        self.group = rid if isinstance(rid, str) and rid else uuid.uuid4().hex
        self._many = many

    def of(self, prompt: int, sample: int, samples: int) -> str:
        """The id of one sample."""
        if self._rids is not None:
            rid: str = self._rids[prompt]
            return rid if samples == 1 else f"{rid}_{sample}"
        return f"{self.group}_{prompt}_{sample}" if self._many else self.group


def _to_sampling(one: _NativeSampling, capabilities: Capabilities, *, logprobs: bool) -> SamplingParams:
    asked = Sampling(
        max_tokens=one.max_new_tokens,
        temperature=one.temperature,
        top_p=one.top_p,
        top_k=one.top_k,
        logprobs=logprobs,
        seed=one.sampling_seed,
        stop=one.stop,
        stop_token_ids=one.stop_token_ids,
        ignore_eos=one.ignore_eos,
        seed_name="sampling_params.sampling_seed",
    )
    return build_sampling(asked, capabilities)


def _reply(
    request: EngineRequest,
    completion: Completion,
    model: ServedModel,
    asked: NativeRequest,
    *,
    skip_special_tokens: bool,
    seconds: float,
) -> dict[str, Any]:
    ids = completion.token_ids
    answer = model.reader.read(completion, request.sampling, skip_special_tokens=skip_special_tokens)
    finish: dict[str, Any] = {"type": completion.finish_reason}
    if completion.finish_reason == "stop":
        finish["matched"] = answer.matched
    elif completion.finish_reason == "length":
        finish["length"] = len(ids)
    else:
        finish["message"] = "the request was aborted"
    meta: dict[str, Any] = {
        "id": request.request_id,
        "finish_reason": finish,
        "prompt_tokens": len(request.prompt_ids),
        "completion_tokens": len(ids),
        "cached_tokens": completion.cached_prompt_tokens,
        "weight_version": str(completion.policy_versions[-1][1]),
        "e2e_latency": seconds,
    }
    if len(completion.policy_versions) > 1:
        meta["weight_versions"] = completion.policy_versions
    if completion.logprobs is not None:
        texts: list[str] | list[None] = [None] * len(ids)
        if asked.return_text_in_logprobs:
            texts = model.reader.token_texts(ids)
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = list(zip(completion.logprobs, ids, texts, strict=True))
    return {"text": answer.text, "output_ids": ids, "meta_info": meta}
