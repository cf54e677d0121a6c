"""What OpenAI's two routes have in common: parameters, names, usage, log-probs, chunks.

Source: https://platform.openai.com/docs/api-reference. From vLLM: `return_token_ids`, `request_id`, `top_k`,
`return_tokens_as_token_ids`, `stop_token_ids`, `ignore_eos`; from SGLang: `rid`, `metadata.weight_version`.
"""

import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from rollstream.serving.model import ServedModel
from rollstream.serving.refusals import RequestError
from rollstream.trajectory import Completion

HARMLESS = frozenset(
    (
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "cache_salt",
        "priority",
    )
)
"""Accepted and without a meaning here: none of them changes what is sampled."""

NEUTRAL: dict[str, Any] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "length_penalty": 1,
    "logit_bias": {},
    "min_p": 0,
    "min_tokens": 0,
    "use_beam_search": False,
    "response_format": {"type": "text"},
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "echo": False,
}

MAX_SAMPLES = 128
"""Samples of one prompt, as OpenAI bounds them."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """What is around the choices of one answer."""

    id: str
    object: str
    model: str
    created: int

    @classmethod
    def make(
        cls, model: ServedModel, object_name: str, prefix: str, *, rid: str | None, request_id: str | None
    ) -> "Envelope":
        """For a new answer: SGLang's is called `rid`, vLLM's by the prefix and `request_id`."""
        name = rid or f"{prefix}-{request_id or uuid.uuid4().hex}"
        return cls(name, object_name, model.name, int(time.time()))

    def around(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """An answer, or a chunk of one."""
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }


def check_model(name: str | None, model: ServedModel) -> None:
    """Refuses another model than the one that is served; no name means that one."""
    if name is not None and name not in (model.name, model.path):
        raise RequestError(
            f"the model {name!r} is not served here, but {model.name!r}",
            status=404,
            param="model",
            code="model_not_found",
        )


def check_samples(n: int) -> None:
    """Refuses a number of samples that makes no sense."""
    if not 1 <= n <= MAX_SAMPLES:
        raise RequestError(f"n must be from 1 to {MAX_SAMPLES}, not {n}", param="n")


def wants_usage(stream: bool, options: dict[str, Any] | None) -> bool:
    """Whether a stream ends with a chunk of usage.

    Raises:
        RequestError: options for a stream where none is asked for, or unknown ones.
    """
    if options is None:
        return False
    if not stream:
        raise RequestError("stream_options is for stream=true only", param="stream_options")
    unknown = [
        name
        for name, value in options.items()
        if name not in ("include_usage", "include_obfuscation") and value
    ]
    if unknown:
        raise RequestError(f"stream_options.{unknown[0]} is not supported", param="stream_options")
    return bool(options.get("include_usage"))


def name_tokens(ids: Sequence[int], texts: Sequence[str], *, as_ids: bool) -> list[str]:
    """What a token is called beside its log-prob; by its id in vLLM's way, where a text may be of several."""
    return [f"token_id:{token}" for token in ids] if as_ids else list(texts)


def usage(prompts: Iterable[Sequence[int]], completions: Sequence[Completion]) -> dict[str, Any]:
    """Tokens: of each prompt once, whatever the number of its samples; of every sample all sampled ones."""
    prompt_tokens = sum(map(len, prompts))
    completion_tokens = sum(len(completion.token_ids) for completion in completions)
    cached = sum(completion.cached_prompt_tokens for completion in completions)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def weight_metadata(completions: Sequence[Completion]) -> dict[str, str]:
    """With every answer: the newest weights that had a part in it."""
    newest = max(completion.policy_versions[-1][1] for completion in completions)
    return {"weight_version": str(newest)}


def event_stream(chunks: Iterable[dict[str, Any] | Any]) -> bytes:
    """Server-sent events, with the end that OpenAI and SGLang both have."""
    events = [b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks]
    return b"".join([*events, b"data: [DONE]\n\n"])
