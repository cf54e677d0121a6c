"""The parameters of a generator, read from the payload of `/start_rollout`. Pure.

Source of the names: slime's rollout buffer, whose trainer sends numbers as text.
"""

import difflib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollstream.buffer.rollout_record import read_count, read_skips, read_task_type
from rollstream.errors import ConfigError
from rollstream.trajectory import SamplingParams

_LOG = logging.getLogger(__name__)

ENGINE_KINDS = ("sglang", "vllm", "openai")

_SAMPLING_KEYS = (
    "max_tokens", "max_new_tokens", "temperature", "top_p", "top_k", "stop", "stop_token_ids", "ignore_eos",
    "seed", "logprobs",
)  # fmt: skip

_KEYS = (
    "remote_engine_url", "remote_buffer_url", "input_file", "task_type", "num_repeat_per_sample", "num_epoch",
    "sampling_params", "num_process", "skip_instance_ids", "tokenizer_path", "max_tokens", "engine", "model",
    "agent_name", "prompt_key", "max_prompt_length", "max_attempts", "attempt_timeout", "engine_timeout",
    "tool_config_path", "function_tool_path", "max_assistant_turns", "max_user_turns", "tool_format",
    "rollstream",
)  # fmt: skip
"""Keys that a generator on this base knows; another one may be for the generator file itself."""


@dataclass(frozen=True, slots=True)
class GeneratorSettings:
    """What one generator is asked to do. Times in seconds, lengths in tokens."""

    rollout_id: str
    """Begins the uids: the same after every restart of the rollout."""
    task_type: str
    engine_urls: tuple[str, ...]
    """Base URLs of the inference servers, without `/v1`."""
    buffer_url: str
    input_file: str
    repeats: int
    """`num_repeat_per_sample`: the size of a group."""
    epochs: int
    in_flight: int
    """`num_process`: rollouts at once."""
    skip_instance_ids: tuple[int | str, ...]
    """Done before this rollout began: each time an id stands here, one of its epochs is left out."""
    finished: tuple[tuple[int | str, int], ...]
    """Instances, and how many groups of each are complete since this rollout began."""
    remember_uids: int | None
    """How many uids of items that have left the buffer knows; None: it does not say."""
    sampling: SamplingParams
    wants_logprobs: bool | None
    """`sampling_params.logprobs`; None takes them where the engine has some."""
    tokenizer_path: str | None
    engine: str | None
    """One of `ENGINE_KINDS`; None asks the server what it is."""
    model: str | None
    """The name of the model at an endpoint that serves several."""
    agent_name: str | None
    """The agent loop of rows that name none; None leaves it to the generator file."""
    prompt_key: str
    max_prompt_length: int | None
    max_attempts: int
    attempt_timeout: float
    engine_timeout: float
    tool_config_path: str | None
    function_tool_path: str | None
    max_assistant_turns: int | None
    max_user_turns: int | None
    tool_format: str

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> "GeneratorSettings":
        """From what `run_rollout` is called with.

        Raises:
            ConfigError: names the parameter that is missing or wrong.
        """
        for key in data:
            if key not in _KEYS and (near := difflib.get_close_matches(key, _KEYS, n=1)):
                _LOG.warning("parameter %r is not known; did you mean %r?", key, near[0])
        own = data.get("rollstream")
        own = own if isinstance(own, Mapping) else {}
        given = _mapping(data, "sampling_params")
        if data.get("max_tokens") is not None:  # slime's trainer also sends it beside the sampling parameters
            given = {"max_tokens": data["max_tokens"], **given}
        sampling, logprobs = read_sampling(given)
        engine = _optional_text(data, "engine")
        if engine is not None and engine not in ENGINE_KINDS:
            raise ConfigError(f"engine: {engine!r}, want one of {', '.join(ENGINE_KINDS)}")
        return cls(
            rollout_id=str(own.get("rollout_id") or "rollout"),
            task_type=read_task_type(data),
            engine_urls=_engine_urls(data.get("remote_engine_url")),
            buffer_url=_text(data, "remote_buffer_url").rstrip("/"),
            input_file=_text(data, "input_file"),
            repeats=read_count(data, "num_repeat_per_sample", 1),
            epochs=read_count(data, "num_epoch", 1),
            in_flight=read_count(data, "num_process", 100),
            skip_instance_ids=tuple(read_skips(own if "skip_instance_ids" in own else data)),
            finished=tuple((instance_id, count) for instance_id, count in own.get("finished") or ()),
            remember_uids=own.get("remember_uids"),
            sampling=sampling,
            wants_logprobs=logprobs,
            tokenizer_path=_optional_text(data, "tokenizer_path"),
            engine=engine,
            model=_optional_text(data, "model"),
            agent_name=_optional_text(data, "agent_name"),
            prompt_key=_optional_text(data, "prompt_key") or "prompt",
            max_prompt_length=_optional_count(data, "max_prompt_length"),
            max_attempts=read_count(data, "max_attempts", 3),
            attempt_timeout=_positive(data, "attempt_timeout", 600.0),
            engine_timeout=_positive(data, "engine_timeout", 600.0),
            tool_config_path=_optional_text(data, "tool_config_path"),
            function_tool_path=_optional_text(data, "function_tool_path"),
            max_assistant_turns=_optional_count(data, "max_assistant_turns"),
            max_user_turns=_optional_count(data, "max_user_turns"),
            tool_format=_optional_text(data, "tool_format") or "hermes",
        )


_MOST_TOKENS = 2**31 - 1
"""Of a response, a context or a vocabulary: engines have them as 32-bit numbers."""


def read_sampling(given: Mapping[str, Any]) -> tuple[SamplingParams, bool | None]:
    """`sampling_params`, and whether log-probs are wanted (None: where there are some).

    `seed` is for the whole rollout: each of its generations has one derived from it.

    Raises:
        ConfigError: a parameter is not known (it would change nothing without a word), missing or wrong.
    """
    for key in given:
        if key not in _SAMPLING_KEYS:
            near = difflib.get_close_matches(key, _SAMPLING_KEYS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(_SAMPLING_KEYS)}"
            raise ConfigError(f"sampling_params.{key} is not known; {hint}")
    named = {f"sampling_params.{key}": value for key, value in given.items()}
    key = "sampling_params.max_tokens"
    if given.get("max_new_tokens") is not None:  # SGLang's name of it
        if given.get("max_tokens") is not None:
            raise ConfigError("sampling_params has both max_tokens and max_new_tokens: leave one of them out")
        key = "sampling_params.max_new_tokens"
    if named.get(key) is None:
        raise ConfigError("sampling_params.max_tokens is missing: tokens of a response, at most")
    sampling = SamplingParams(
        max_tokens=read_count(named, key, 1, most=_MOST_TOKENS),
        temperature=_number(named, "sampling_params.temperature", 1.0, low=0.0),
        top_p=_number(named, "sampling_params.top_p", 1.0, low=0.0, high=1.0),
    )
    top_k = _number(named, "sampling_params.top_k", -1.0, low=-1.0)
    if top_k != int(top_k):
        raise ConfigError(f"sampling_params.top_k: {given['top_k']!r}, want a whole number; -1 is off")
    seed = given.get("seed")
    if seed is not None and (type(seed) is not int or not 0 <= seed < 2**31):
        raise ConfigError(f"sampling_params.seed: {seed!r:.100}, want a whole number from 0, below 2**31")
    stop = given.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise ConfigError(f"sampling_params.stop: {stop!r:.100}, want a text or a list of texts")
    ids = given.get("stop_token_ids") or []
    if not isinstance(ids, list) or not all(type(one) is int and one >= 0 for one in ids):
        raise ConfigError(f"sampling_params.stop_token_ids: {ids!r:.100}, want a list of token ids")
    for flag in ("ignore_eos", "logprobs"):
        if not isinstance(given.get(flag), bool | None):
            raise ConfigError(f"sampling_params.{flag}: {given[flag]!r:.100}, want true or false")
    return replace(
        sampling,
        top_k=int(top_k) or -1,
        seed=seed,
        stop=tuple(stop),
        stop_token_ids=tuple(ids),
        ignore_eos=bool(given.get("ignore_eos")),
    ), given.get("logprobs")


def _engine_urls(given: Any) -> tuple[str, ...]:
    urls: Sequence[Any] = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    if not urls or not all(isinstance(url, str) and url.startswith(("http://", "https://")) for url in urls):
        raise ConfigError(
            f"remote_engine_url: {given!r:.200}, want the inference server's URL, http://host:port, or a list"
        )
    return tuple(str(url).rstrip("/").removesuffix("/v1").rstrip("/") for url in urls)


def _mapping(data: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = data.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key}: {value!r:.100}, want a mapping")
    return dict(value)


def _text(data: Mapping[str, Any], key: str) -> str:
    value = data.get(key)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{key}: {value!r:.100}, want a text")
    return value


def _optional_text(data: Mapping[str, Any], key: str) -> str | None:
    return None if data.get(key) is None else _text(data, key)


def _optional_count(data: Mapping[str, Any], key: str) -> int | None:
    return None if data.get(key) is None else read_count(data, key, 1, most=_MOST_TOKENS)


def _positive(data: Mapping[str, Any], key: str, default: float) -> float:
    value = _number(data, key, default, low=0.0)
    if not value > 0:
        raise ConfigError(f"{key}: {value}, want more than 0 (seconds)")
    return value


def _number(
    data: Mapping[str, Any], key: str, default: float, *, low: float, high: float = math.inf
) -> float:
    value = data.get(key)
    if value is None:
        return default
    number = math.nan
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
    if not math.isfinite(number) or not low <= number <= high:
        limits = f"from {low:g}" + ("" if high == math.inf else f" to {high:g}")
        raise ConfigError(f"{key}: {value!r:.100}, want a number {limits}")
    return number
