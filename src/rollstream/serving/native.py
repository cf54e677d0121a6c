"""SGLang's `/generate`: ids or text in, ids, text and log-probs out, one or many.

Source: https://docs.sglang.io/basic_usage/native_api.html and sampling_params.html.
"""

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from rollstream.chat.wires.openai_chat import event_stream
from rollstream.chat.wires.requests import RequestError, Sampling, read_parameters, request_object
from rollstream.serving.model import ServedModel
from rollstream.serving.service import EngineRequest, EngineService, build_sampling, samples
from rollstream.trajectory import Completion
from rollstream.web import Request, Route, json_response

_HARMLESS = frozenset(("log_metrics", "no_logs", "priority", "background", "extra_key", "modalities"))
_NEUTRAL = {
    "image_data": [],
    "video_data": [],
    "audio_data": [],
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

_MAX_TOKENS = 128
"""Where a request does not say, as in SGLang."""


class NativeRequest(msgspec.Struct):
    """Body of `/generate`."""

    text: str | list[str] | None = None
    input_ids: Any = None
    sampling_params: dict[str, Any] = {}
    rid: str | None = None
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    return_text_in_logprobs: bool = False
    stream: bool = False


class _NativeSampling(Sampling):
    max_tokens: int | None = msgspec.field(default=None, name="max_new_tokens")
    seed: int | None = msgspec.field(default=None, name="sampling_seed")
    skip_special_tokens: bool = True


@dataclass(frozen=True)
class GenerateRoutes:
    """The handler."""

    model: ServedModel
    service: EngineService

    def routes(self) -> list[Route]:
        return [Route("POST", "/generate", self.generate)]

    async def generate(self, request: Request) -> web.Response:
        """Answers a request; the engine gives whole completions, so a stream has one event for each."""
        began = time.monotonic()
        asked, prompts, is_list = await request_object(request, self._read)
        answers = await self.service.generate(self._requests(asked, prompts, is_list))
        scores = [await self._score(sample) for sample, _ in answers]
        seconds = time.monotonic() - began
        replies = [
            self._reply(sample, completion, asked, scored, seconds)
            for (sample, completion), scored in zip(answers, scores, strict=True)
        ]
        is_list = is_list or len(replies) > 1
        if not asked.stream:
            return json_response(replies if is_list else replies[0])
        events = [{**reply, "index": at} for at, reply in enumerate(replies)] if is_list else replies
        return web.Response(body=event_stream(events), content_type="text/event-stream")

    def _read(self, body: dict[str, Any]) -> tuple[NativeRequest, list[list[int]], bool]:
        """The request, the ids of its prompts, and whether they are a list."""
        asked = read_parameters(body, NativeRequest, harmless=_HARMLESS, neutral=_NEUTRAL)
        if (asked.text is None) == (asked.input_ids is None):
            raise RequestError("give either text or input_ids", param="input_ids")
        texts = asked.text is not None
        prompts, many = self.model.read_prompts(
            asked.text if texts else asked.input_ids,
            "text" if texts else "input_ids",
            self.service.limit,
            most=self.service.max_queue,
            texts=texts,
        )
        return asked, prompts, many

    def _requests(
        self, asked: NativeRequest, prompts: list[list[int]], is_list: bool
    ) -> Iterator[EngineRequest]:
        """A request for each sample of each prompt."""
        how = read_parameters(
            asked.sampling_params, _NativeSampling, neutral=_NEUTRAL_SAMPLING, where="sampling_params."
        )
        capabilities = self.service.capabilities
        sampling = build_sampling(how, capabilities, max_tokens=_MAX_TOKENS, logprobs=asked.return_logprob)
        name = asked.rid or uuid.uuid4().hex
        for at, prompt in enumerate(prompts):
            is_scored = asked.return_logprob and 0 <= asked.logprob_start_len < len(prompt) - 1
            if is_scored and not capabilities.scores:
                raise RequestError(
                    "this engine gives log-probs of sampled tokens only: leave logprob_start_len out",
                    param="logprob_start_len",
                )
            if not 0 <= asked.top_logprobs_num <= (capabilities.score_top_k if is_scored else 0):
                raise RequestError(
                    f"likeliest ids are those of a prompt's places (logprob_start_len), {capabilities.score_top_k} of "
                    "each at most with this engine",
                    param="top_logprobs_num",
                )
            for sample in samples(f"{name}_{at}" if is_list else name, prompt, sampling, how.n):
                sample.skip_special_tokens = how.skip_special_tokens
                sample.scored_from = asked.logprob_start_len if is_scored else None
                sample.top_logprobs = asked.top_logprobs_num
                yield sample

    async def _score(self, sample: EngineRequest) -> dict[str, Any]:
        """The prompt's log-probs as SGLang has them: ids from `scored_from` on, the first of them without one."""
        start, ids, engine = sample.scored_from, sample.prompt_ids, self.service.engine
        if start is None:
            return {"input_token_logprobs": []}
        scores = await engine.score(ids, start + 1, sample.top_logprobs)
        values = zip([None, *scores.logprobs], ids[start:], strict=True)
        found: dict[str, Any] = {"input_token_logprobs": [(value, token, None) for value, token in values]}
        if sample.top_logprobs:
            places = zip(scores.top_logprobs, scores.top_ids, strict=True)
            found["input_top_logprobs"] = [
                None,
                *([(value, token, None) for value, token in zip(*place, strict=True)] for place in places),
            ]
        return found

    def _reply(
        self,
        sample: EngineRequest,
        completion: Completion,
        asked: NativeRequest,
        prompt_logprobs: dict[str, Any],
        seconds: float,
    ) -> dict[str, Any]:
        ids = completion.token_ids
        read = self.model.read(completion, sample.sampling, skip_special_tokens=sample.skip_special_tokens)
        ends: dict[str, dict[str, Any]] = {
            "stop": {"type": "stop", "matched": read.matched},
            "length": {"type": "length", "length": len(ids)},
            "abort": {"type": "abort", "message": "the request was aborted"},
        }
        meta: dict[str, Any] = {
            "id": sample.request_id,
            "finish_reason": ends[completion.finish_reason],
            "prompt_tokens": len(sample.prompt_ids),
            "completion_tokens": len(ids),
            "cached_tokens": completion.cached_prompt_tokens,
            "weight_version": str(completion.policy_versions[-1][1]),
            "e2e_latency": seconds,
        }
        if len(completion.policy_versions) > 1:
            meta["weight_versions"] = completion.policy_versions
        if completion.logprobs is not None:
            texts = self.model.token_texts(ids) if asked.return_text_in_logprobs else [None] * len(ids)
            meta |= prompt_logprobs
            meta["output_token_logprobs"] = list(zip(completion.logprobs, ids, texts, strict=True))
        return {"text": read.text, "output_ids": ids, "meta_info": meta}
