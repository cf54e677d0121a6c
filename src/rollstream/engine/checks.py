"""Checks that every engine makes: settings it knows, requests it can take, a model folder it can read."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from rollstream.engine.base import Capabilities
from rollstream.errors import ConfigError, EngineError, unknown_name
from rollstream.sampling import check_extra, sampling_changes
from rollstream.trajectory import SamplingParams


def read_engine_kwargs(engine: str, kwargs: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`defaults` overlaid with the user's `engine_kwargs`.

    Raises:
        ConfigError: for a key that `defaults` does not have, or a value of another type than the default
            (an int is taken where a float is the default; where the default is None any value is taken).
    """
    values = dict(defaults)
    for key, value in kwargs.items():
        if key in ("sglang", "vllm", "trtllm"):
            raise ConfigError(
                f"engine_kwargs.{key} is where verl has arguments of the server: name those of servers that are "
                "launched in actor_rollout_ref.rollout.launch.args; servers that run have theirs"
            )
        if key not in defaults:
            raise unknown_name(f"key in engine_kwargs of engine {engine!r}:", key, defaults)
        default = defaults[key]
        if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if default is not None and type(value) is not type(default):
            raise ConfigError(
                f"engine_kwargs.{key} of engine {engine!r} must be {type(default).__name__}, "
                f"not {type(value).__name__} ({value!r})"
            )
        values[key] = value
    return values


def ids_fit(ids: list[int], vocab_size: int | None) -> bool:
    """Whether all ids are at least 0 and below `vocab_size` (None: any int32)."""
    return not ids or (min(ids) >= 0 and max(ids) < (2**31 if vocab_size is None else vocab_size))


_LOGPROB_MAX = 0.01
"""Nats: log-probs that a server computes in half precision are that far above 0 at most."""


def logprobs_fit(logprobs: list[float]) -> bool:
    """Whether all can be logarithms of probabilities: none is above 0, but for rounding, or no number."""
    return not logprobs or (max(logprobs) <= _LOGPROB_MAX and not math.isnan(sum(logprobs)))


def least(*lengths: int | None) -> int | None:
    """The least of several limits on a sequence's length; None is no limit."""
    return min((length for length in lengths if length is not None), default=None)


def check_request(
    prompt_ids: list[int],
    sampling: SamplingParams,
    capabilities: Capabilities,
    *,
    images: list[object] | None,
    is_chat: bool = False,
) -> None:
    """Refuses a request that the engine cannot serve, before it is sent.

    `is_chat`: the prompt is sent as messages, and has ids only where there is a tokenizer.

    Raises:
        EngineError: empty prompt, ids outside the vocabulary, sampling values out of range, a request
            longer than `max_model_len`, images, stop strings where the engine has none, or stop ids
            together with `ignore_eos` where the engine drops them.
    """
    if not prompt_ids and not is_chat:
        raise EngineError("the prompt is empty: an engine needs at least one token")
    if sampling.max_tokens < 1:
        raise EngineError(f"max_tokens must be at least 1, not {sampling.max_tokens}")
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise EngineError(f"temperature must be 0 or more, not {sampling.temperature}")
    if not 0 < sampling.top_p <= 1:
        raise EngineError(f"top_p must be above 0 and at most 1, not {sampling.top_p}")
    if sampling.top_k < 1 and sampling.top_k != -1:
        raise EngineError(f"top_k must be -1 (off) or at least 1, not {sampling.top_k}")
    if images and not capabilities.images:
        raise EngineError(
            f"the prompt has {len(images)} images, but this engine takes none, or its model sees none"
        )
    if not ids_fit(prompt_ids, capabilities.vocab_size):
        raise EngineError(
            f"prompt ids from {min(prompt_ids)} to {max(prompt_ids)} do not fit the model's vocabulary "
            f"of {capabilities.vocab_size} ids"
        )
    limit = capabilities.max_model_len
    if limit is not None and len(prompt_ids) + sampling.max_tokens > limit:
        raise EngineError(
            f"prompt of {len(prompt_ids)} tokens + max_tokens {sampling.max_tokens} > max_model_len {limit}"
        )
    if sampling.stop and not capabilities.stop_strings:
        raise EngineError("this engine cannot stop at texts")
    if sampling.extra and (problem := check_extra(sampling.extra)) is not None:
        raise EngineError(problem)
    if unknown := sorted(set(sampling.extra) - set(capabilities.extra_sampling)):
        raise EngineError(f"this engine takes no sampling parameter {unknown[0]!r}")
    if sampling.ignore_eos and sampling.stop_token_ids and not capabilities.stop_token_ids_with_ignore_eos:
        raise EngineError("this engine drops stop_token_ids when ignore_eos is set: ask for one of them only")


def refuse_raw_logprobs(capabilities: Capabilities, sampling: SamplingParams) -> None:
    """Refuses log-probs that are those of another distribution than the one that is drawn from.

    Raises:
        ConfigError: the engine gives raw ones, and this sampling changes the model's distribution.
    """
    if capabilities.logprobs != "raw" or not sampling.logprobs or not (changes := sampling_changes(sampling)):
        return
    named = ", ".join(f"{name} {value}" for name, value in changes.items())
    raise ConfigError(
        f"the engine gives the raw model's log-probs, and with {named} tokens come from another distribution: a "
        "loss would compare two. Set actor_rollout_ref.rollout.logprobs_mode=processed_logprobs (openvino knows "
        "it for a temperature alone), use engine 'hf', or set calculate_log_probs=false"
    )


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a model folder says about itself."""

    max_model_len: int | None
    """`max_position_embeddings`."""
    vocab_size: int | None
    """Rows of the embedding: may be more than the tokenizer has tokens."""
    eos_token_ids: tuple[int, ...]
    """End tokens: of `generation_config.json`, else of `config.json`."""
    tied_embeddings: bool | None = None
    """Whether its output layer is its embedding."""
    image_token_id: int | None = None
    """What stands for an image in prompt ids, as often as the image has tokens; None for a text model."""


def read_model_limits(model_path: Path) -> ModelLimits:
    """Reads `config.json` and `generation_config.json`; what they don't say is None (or empty).

    Raises:
        ConfigError: when one of them is there and is not a JSON object.
    """
    config = _read_json(model_path / "config.json")
    generation = _read_json(model_path / "generation_config.json")
    # Multi-modal models keep the language model's figures one level down.
    text = {**config, **(config.get("text_config") or {})}
    eos = generation.get("eos_token_id", text.get("eos_token_id"))
    eos_ids = eos if isinstance(eos, list) else [eos]
    return ModelLimits(
        max_model_len=_int_or_none(text.get("max_position_embeddings")),
        vocab_size=_int_or_none(text.get("vocab_size")),
        eos_token_ids=tuple(i for i in eos_ids if isinstance(i, int)),
        tied_embeddings=tied if isinstance(tied := text.get("tie_word_embeddings"), bool) else None,
        image_token_id=_int_or_none(config.get("image_token_id", config.get("image_token_index"))),
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return value


def _int_or_none(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
