"""Engines by name, and whether one can give what is asked for."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollstream import plugins
from rollstream.engine.base import Capabilities, Engine
from rollstream.engine.checks import ids_fit
from rollstream.engine.kind import EngineKind, EngineOptions
from rollstream.engine.launch.plan import LaunchRequest
from rollstream.engine.replica import Replica
from rollstream.errors import ConfigError
from rollstream.sampling import check_extra, sampling_changes
from rollstream.trajectory import SamplingParams

logger = logging.getLogger(__name__)


def engine_kind(name: str) -> EngineKind:
    """The engine of a name. Raises `ConfigError`."""
    kind: EngineKind = plugins.load("rollstream.engines", name)
    return kind


def create_engine(
    name: str,
    *,
    model_path: str | Path | None,
    server_urls: Sequence[str] = (),
    max_model_len: int | None = None,
    engine_kwargs: Mapping[str, Any] | None = None,
    launch: LaunchRequest | None = None,
    log_dir: Path,
    logprobs_temperature: float | None = None,
) -> Engine:
    """Makes an engine; `start` it before use.

    Args:
        name: an entry point of `rollstream.engines`.
        model_path: see `EngineOptions`, like the others.
        server_urls: base URLs of engines that are servers.
        max_model_len: see there.
        engine_kwargs: settings of the engine itself, see docs/engines.md.
        launch: how servers are launched where no URLs are given; None: an engine that needs URLs says so.
        log_dir: where an embedded engine and launched servers write their logs.
        logprobs_temperature: see `EngineOptions`.

    Raises:
        ConfigError: unknown engine or engine_kwargs key, a value out of range, missing package, model folder
            or URLs; servers that cannot be launched.
    """
    kind = engine_kind(name)
    path = None if model_path is None else str(model_path)
    options = EngineOptions(
        path, server_urls, max_model_len, engine_kwargs or {}, log_dir, logprobs_temperature
    )
    if kind.is_embedded and server_urls:
        raise ConfigError(
            f"engine {name!r} is embedded: actor_rollout_ref.rollout.server_urls is for servers, whose kind "
            "actor_rollout_ref.rollout.name says"
        )
    if launch is None or not is_launched(name, server_urls):
        return kind.create(options)
    from rollstream.engine.launch.engine import launched_engine

    if path is None:
        raise ConfigError(f"engine {name!r} needs actor_rollout_ref.model.path to launch servers")
    engine = launched_engine(kind, replace(options, model_path=path), launch)
    if launch.server == "rollstream" and launch.python is None:
        # What `rollstream serve` would refuse, as far as its engine shows without a start.
        given = {str(key).replace("_", "-"): value for key, value in launch.args.items()}
        inner = str(given.get("engine", "openvino"))
        check_engine_config(inner, model_path=path, engine_kwargs=given.get("engine-kwargs"))
    return engine


def is_launched(name: str, server_urls: Sequence[str]) -> bool:
    """Whether an engine's servers are launched by rollstream: they could be, and no URLs are given."""
    return bool(engine_kind(name).launches) and not server_urls


def replica_maker(
    name: str, *, model_path: str, engine_kwargs: Mapping[str, Any] | None
) -> Callable[[str], Replica]:
    """What makes a replica of an engine from a URL, for a pool that takes it in. Raises `ConfigError`."""
    make = engine_kind(name).make_replica
    if make is None:
        raise ConfigError(f"engine {name!r} has no servers that come and go")
    options = EngineOptions(model_path, engine_kwargs=engine_kwargs or {})
    return lambda url: make(url, options)


def check_engine_config(
    name: str,
    *,
    model_path: str | Path | None,
    server_urls: Sequence[str] = (),
    engine_kwargs: Mapping[str, Any] | None = None,
    launch: LaunchRequest | None = None,
) -> None:
    """Refuses an engine that cannot start as it is configured, as far as that shows without starting it.

    It takes milliseconds (seconds where `launch` asks for devices) and touches no server, so call it before
    anything slow. Arguments and errors are those of `create_engine`.
    """
    # An engine that was not started holds nothing and has written nothing.
    create_engine(
        name,
        model_path=model_path,
        server_urls=server_urls,
        engine_kwargs=engine_kwargs,
        launch=launch,
        log_dir=Path(),
    )


def data_deciding_kwargs(name: str, engine_kwargs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The settings of an engine that decide which tokens or log-probs it gives, with their defaults.

    They belong to a run's identity; the others (threads, batch sizes, timeouts) may change on resume.

    Raises:
        ConfigError: unknown engine or engine_kwargs key, or a value of a wrong type.
    """
    kind = engine_kind(name)
    values = kind.read_kwargs(engine_kwargs or {})
    deciding = {key: values[key] for key in kind.data_deciding}
    return deciding if kind.is_token_exact else {"token_exact": False, **deciding}


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
    rollout = "actor_rollout_ref.rollout"
    problems = []
    if not capabilities.token_ids:
        # Whoever chose this engine chose that; what it costs is said once, and marked on every trajectory.
        logger.warning(
            "this engine speaks messages, not token ids: ids are those of the local tokenizer (none without "
            "one), not those that were sampled, and without log-probs (trajectories are marked by "
            "extra.token_exact=false)"
        )
        endpoint = "an endpoint that knows it takes it by engine_kwargs.extra_body"
        if sampling.top_k != -1:
            problems.append(f"it knows no top_k; set {rollout}.top_k=-1 ({endpoint})")
        if sampling.ignore_eos:
            problems.append(f"it cannot go on after an end token; set {rollout}.ignore_eos=false")
    if sampling.logprobs and capabilities.logprobs == "none":
        problems.append(f"it has no log-probs; set {rollout}.calculate_log_probs=false")
    changes = sampling_changes(sampling)
    if sampling.logprobs and logprobs_mode not in (None, f"{capabilities.logprobs}_logprobs") and changes:
        named = ", ".join(f"{name} {value}" for name, value in changes.items())
        problems.append(
            f"with {named} its log-probs are {capabilities.logprobs}, not what {rollout}.logprobs_mode="
            f"{logprobs_mode} asks for (processed ones are given by openvino for a temperature alone, by vLLM "
            "servers with --logprobs-mode processed_logprobs, by hf always)"
        )
    if sampling.seed is not None and not capabilities.seeds:
        problems.append(
            "it does not honour seeds; set generation.seed=null "
            "(SGLang: start the servers with --enable-deterministic-inference; openai: "
            "engine_kwargs.honours_seed=true for an endpoint that repeats itself)"
        )
    if sampling.stop and not capabilities.stop_strings:
        problems.append(f"it cannot stop at texts; {rollout}.stop must be empty")
    if sampling.stop_token_ids and not capabilities.stop_token_ids:
        problems.append(f"it cannot stop at token ids; {rollout}.stop_token_ids must be empty")
    elif sampling.stop_token_ids and sampling.ignore_eos and not capabilities.stop_token_ids_with_ignore_eos:
        problems.append(f"it drops {rollout}.stop_token_ids when {rollout}.ignore_eos is set")
    unknown = [token for token in sampling.stop_token_ids if not ids_fit([token], capabilities.vocab_size)]
    if unknown:
        beyond = f"are below {capabilities.vocab_size}" if capabilities.vocab_size else "fit 31 bits"
        problems.append(f"{rollout}.stop_token_ids has {unknown[0]}, but its ids {beyond} and 0 or more")
    limits = [limit for limit in (capabilities.max_model_len, max_model_len) if limit is not None]
    if limits and prompt_length + response_length > min(limits):
        own = min(limits) != max_model_len
        problems.append(
            f"{rollout}.prompt_length {prompt_length} + {rollout}.response_length {response_length} "
            f"is more than the {min(limits)} tokens a sequence may have, by "
            + (
                "the model's own limit or, with an embedded engine, the KV cache "
                "(engine_kwargs.cache_size or num_kv_blocks)"
                if own
                else f"{rollout}.max_model_len"
            )
        )
    for name in sorted(set(sampling.extra) - set(capabilities.extra_sampling)):
        known = ", ".join(capabilities.extra_sampling) or "none"
        problems.append(f"it takes no {rollout}.extra_sampling.{name} (it takes: {known})")
    if (wrong := check_extra(sampling.extra)) is not None:
        problems.append(f"{rollout}.extra_sampling.{wrong}")
    if problems:
        raise ConfigError("the engine cannot give what is asked for: " + "; ".join(problems))
