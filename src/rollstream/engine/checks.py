"""Checks that every engine makes: settings it knows, requests it can take, a model folder it can read."""

import hashlib
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from rollstream.engine.base import Capabilities
from rollstream.errors import ConfigError, EngineError, unknown_name
from rollstream.sampling import check_extra, sampling_changes
from rollstream.trajectory import SamplingParams

logger = logging.getLogger(__name__)

_ROLLOUT = "actor_rollout_ref.rollout"

_MODEL_PATTERNS = (
    *("*.safetensors", "*.bin", "*.gguf"),
    *("config.json", "generation_config.json", "openvino_model.xml"),
)

_WHOLE_FILE_BYTES = 64 << 20
"""Files up to this size are hashed whole; of larger ones, samples: other weights differ nearly everywhere."""

_SAMPLE_BYTES = 1 << 20
_SAMPLES = 16

_LOGPROB_MAX = 0.01
"""Nats: log-probs that a server computes in half precision are that far above 0 at most."""


def read_engine_kwargs(engine: str, kwargs: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`defaults` overlaid with the user's `engine_kwargs`.

    Raises:
        ConfigError: for a key that `defaults` does not have, or a value of another type than the default
            (an int is taken where a float is the default; where the default is None any value is taken).
    """
    values = dict(defaults)
    for key, value in kwargs.items():
        if key in ("sglang", "vllm", "trtllm"):
            if not value:  # as verl's own rollout group has them
                continue
            raise ConfigError(f"engine_kwargs.{key}, verl's, is {_ROLLOUT}.launch.args here")
        if key not in defaults:
            raise unknown_name(f"key in engine_kwargs of engine {engine!r}:", key, defaults)
        default = defaults[key]
        if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if default is not None and type(value) is not type(default):
            raise ConfigError(
                f"engine_kwargs.{key} of engine {engine!r} must be {type(default).__name__}, not {value!r}"
            )
        values[key] = value
    return values


def ids_fit(ids: list[int], vocab_size: int | None) -> bool:
    """Whether all ids are at least 0 and below `vocab_size` (None: any int32)."""
    return not ids or (min(ids) >= 0 and max(ids) < (2**31 if vocab_size is None else vocab_size))


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
) -> None:
    """Refuses a request that the engine cannot serve, before it is sent.

    Raises:
        EngineError: empty prompt, ids outside the vocabulary, sampling values out of range, a request
            longer than `max_model_len`, images or sampling that the engine does not take.
    """
    if not prompt_ids and capabilities.token_ids:
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
        raise EngineError(f"the prompt has {len(images)} images, and this engine takes none")
    if not ids_fit(prompt_ids, capabilities.vocab_size):
        raise EngineError(f"prompt ids do not fit the model's vocabulary of {capabilities.vocab_size} ids")
    limit = capabilities.max_model_len
    if limit is not None and len(prompt_ids) + sampling.max_tokens > limit:
        raise EngineError(
            f"prompt of {len(prompt_ids)} tokens + max_tokens {sampling.max_tokens} > max_model_len {limit}"
        )
    for problem in _unsupported(sampling, capabilities):
        raise EngineError(problem)


def _unsupported(sampling: SamplingParams, capabilities: Capabilities) -> Iterator[str]:
    """Sampling that the engine does not take, by the keys of the configuration."""
    if sampling.stop and not capabilities.stop_strings:
        yield "stop: it cannot stop at texts"
    if sampling.ignore_eos and sampling.stop_token_ids and not capabilities.stop_token_ids_with_ignore_eos:
        yield "stop_token_ids: it drops them when ignore_eos is set"
    if sampling.extra:
        for name in sorted(set(sampling.extra) - set(capabilities.extra_sampling)):
            yield f"extra_sampling.{name}: it takes {', '.join(capabilities.extra_sampling) or 'none'}"
        if (problem := check_extra(sampling.extra)) is not None:
            yield f"extra_sampling.{problem}"


def check_capabilities(
    capabilities: Capabilities,
    sampling: SamplingParams,
    *,
    prompt_length: int,
    response_length: int,
    max_model_len: int | None,
    logprobs_mode: str | None = None,
) -> None:
    """Refuses a run that asks for more than its engine can give (R8). Call it once `start` has returned.

    Args:
        capabilities: of the started engine.
        sampling: how the run samples; `seed` is set if seeds are wanted.
        prompt_length: longest prompt, in tokens.
        response_length: longest response, in tokens.
        max_model_len: the user's own limit; None leaves it to the engine.
        logprobs_mode: `raw_logprobs` or `processed_logprobs`, if the run wants one of them; None takes the engine's.

    Raises:
        ConfigError: naming every key that asks for too much.
    """
    problems = [f"{_ROLLOUT}.{problem}" for problem in _unsupported(sampling, capabilities)]
    if not capabilities.token_ids:
        # Whoever chose this engine chose that; what it costs is said once, and marked on every trajectory.
        logger.warning(
            "this engine speaks messages: trajectories have neither token ids nor log-probs (they are marked by "
            "extra.token_exact=false)"
        )
        if sampling.top_k != -1:
            problems.append(f"{_ROLLOUT}.top_k: it knows none (engine_kwargs.extra_body may)")
        if sampling.ignore_eos:
            problems.append(f"{_ROLLOUT}.ignore_eos: it cannot go on after an end token")
    if sampling.logprobs and capabilities.logprobs == "none":
        problems.append(f"it has no log-probs; set {_ROLLOUT}.calculate_log_probs=false")
    changes = sampling_changes(sampling)
    if sampling.logprobs and logprobs_mode not in (None, f"{capabilities.logprobs}_logprobs") and changes:
        problems.append(
            f"{_ROLLOUT}.logprobs_mode={logprobs_mode}: with {changes} its log-probs are "
            f"{capabilities.logprobs} ones"
        )
    if sampling.seed is not None and not capabilities.seeds:
        problems.append(
            "generation.seed: it does not honour seeds (SGLang does with --enable-deterministic-inference, an "
            "endpoint that repeats itself with engine_kwargs.honours_seed=true)"
        )
    if sampling.stop_token_ids and not capabilities.stop_token_ids:
        problems.append(f"{_ROLLOUT}.stop_token_ids: it cannot stop at token ids")
    for token in sampling.stop_token_ids:
        if not ids_fit([token], capabilities.vocab_size):
            problems.append(f"{_ROLLOUT}.stop_token_ids: {token} is none of its ids")
    limit = least(capabilities.max_model_len, max_model_len)
    if limit is not None and prompt_length + response_length > limit:
        where = f"{_ROLLOUT}.max_model_len"
        if limit != max_model_len:
            where = "the model's own limit or, with an embedded engine, the KV cache"
        problems.append(
            f"{_ROLLOUT}.prompt_length {prompt_length} + response_length {response_length} is more than the "
            f"{limit} tokens a sequence may have, by {where}"
        )
    if problems:
        raise ConfigError("the engine cannot give what is asked for: " + "; ".join(problems))


def refuse_raw_logprobs(capabilities: Capabilities, sampling: SamplingParams) -> None:
    """Refuses log-probs that are those of another distribution than the one that is drawn from.

    Raises:
        ConfigError: the engine gives raw ones, and this sampling changes the model's distribution.
    """
    if capabilities.logprobs == "raw" and sampling.logprobs and (changes := sampling_changes(sampling)):
        raise ConfigError(
            f"the engine gives the raw model's log-probs, and with {changes} tokens come from another distribution: "
            "a loss would compare two. Set actor_rollout_ref.rollout.logprobs_mode=processed_logprobs (openvino "
            "knows it for a temperature alone), use engine 'hf', or set calculate_log_probs=false"
        )


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """A model by its folder."""

    max_model_len: int | None
    """`max_position_embeddings`."""
    vocab_size: int | None
    """Rows of the embedding: may be more than the tokenizer has tokens."""
    eos_token_ids: tuple[int, ...]
    """End tokens: of `generation_config.json`, else of `config.json`."""
    tied_embeddings: bool = False
    """Whether its output layer is its embedding: so it is in transformers where nothing is said."""
    image_token_id: int | None = None
    """Stands for an image in prompt ids, as often as the image has tokens; None for a text model."""


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
    return ModelLimits(
        max_model_len=_int_or_none(text.get("max_position_embeddings")),
        vocab_size=_int_or_none(text.get("vocab_size")),
        eos_token_ids=tuple(i for i in (eos if isinstance(eos, list) else [eos]) if isinstance(i, int)),
        tied_embeddings=bool(config) and text.get("tie_word_embeddings") is not False,
        image_token_id=_int_or_none(config.get("image_token_id", config.get("image_token_index"))),
    )


def model_digest(path: str) -> str:
    """Names a model's weights and configuration by content; a hub name stands for itself."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return path
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(
        {file for pattern in _MODEL_PATTERNS for file in folder.glob(pattern) if file.is_file()}
    ):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size};".encode())
        with file.open("rb") as stream:
            if size <= _WHOLE_FILE_BYTES:
                while chunk := stream.read(1 << 20):
                    digest.update(chunk)
                continue
            for sample in range(_SAMPLES + 1):
                stream.seek((size - _SAMPLE_BYTES) * sample // _SAMPLES)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def model_limits(model: str | None) -> ModelLimits:
    """The limits that a model's folder says; none of a name on the hub."""
    return read_model_limits(Path(model).expanduser()) if model else ModelLimits(None, None, ())


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return value


def _int_or_none(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
