"""Engines by name, and whether one can give what is asked for."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollstream.engine.base import Capabilities, Engine
from rollstream.engine.checks import unknown_name
from rollstream.errors import ConfigError
from rollstream.trajectory import SamplingParams

ENGINES = ("openvino", "sglang")
"""Names for `actor_rollout_ref.rollout.name`."""


def create_engine(
    name: str,
    *,
    model_path: str | Path | None,
    server_urls: Sequence[str] = (),
    max_model_len: int | None = None,
    engine_kwargs: Mapping[str, Any] | None = None,
    log_dir: Path,
) -> Engine:
    """Makes an engine; `start` it before use.

    Args:
        name: one of `ENGINES`.
        model_path: folder of the model (embedded engines); what servers are expected to serve.
        server_urls: base URLs of engines that are servers.
        max_model_len: prompt plus response tokens at most; None takes the engine's own limit.
        engine_kwargs: settings of the engine itself, see docs/engines.md.
        log_dir: where an embedded engine writes its log.

    Raises:
        ConfigError: unknown engine or engine_kwargs key, missing package, model folder or URLs.
    """
    if name == "openvino":
        from rollstream.engine.openvino import OpenVINOEngine

        if model_path is None:
            raise ConfigError("engine 'openvino' needs actor_rollout_ref.model.path")
        if server_urls:
            raise ConfigError(
                "engine 'openvino' is embedded: actor_rollout_ref.rollout.server_urls is for sglang"
            )
        return OpenVINOEngine(
            model_path,
            max_model_len=max_model_len,
            engine_kwargs=engine_kwargs,
            log_path=log_dir / "engine-openvino.log",
        )
    if name == "sglang":
        from rollstream.engine.sglang import SGLangEngine

        return SGLangEngine(
            server_urls,
            model_path=None if model_path is None else str(model_path),
            max_model_len=max_model_len,
            engine_kwargs=engine_kwargs,
        )
    raise unknown_name("engine", name, ENGINES)


def check_capabilities(
    capabilities: Capabilities,
    sampling: SamplingParams,
    *,
    prompt_length: int,
    response_length: int,
    max_model_len: int | None,
) -> None:
    """Refuses a run that asks for more than its engine can give (R8). Call it once `start` has returned.

    Args:
        capabilities: of the started engine.
        sampling: how the run samples; `seed` is set if seeds are wanted.
        prompt_length: longest prompt, in tokens.
        response_length: longest response, in tokens.
        max_model_len: the user's own limit; None leaves it to the engine.

    Raises:
        ConfigError: naming every key that asks for too much.
    """
    rollout = "actor_rollout_ref.rollout"
    problems = []
    if not capabilities.token_ids:
        problems.append("it does not return the exact token ids it sampled")
    if sampling.logprobs and capabilities.logprobs == "none":
        problems.append(f"it has no log-probs; set {rollout}.calculate_log_probs=false")
    if sampling.seed is not None and not capabilities.seeds:
        problems.append(
            "it does not honour seeds; set generation.seed=null "
            "(SGLang: start the servers with --enable-deterministic-inference)"
        )
    if sampling.stop and not capabilities.stop_strings:
        problems.append(f"it cannot stop at texts; {rollout}.stop must be empty")
    if sampling.stop_token_ids and not capabilities.stop_token_ids:
        problems.append(f"it cannot stop at token ids; {rollout}.stop_token_ids must be empty")
    elif sampling.stop_token_ids and sampling.ignore_eos and not capabilities.stop_token_ids_with_ignore_eos:
        problems.append(f"it drops {rollout}.stop_token_ids when {rollout}.ignore_eos is set")
    limits = [limit for limit in (capabilities.max_model_len, max_model_len) if limit is not None]
    if limits and prompt_length + response_length > min(limits):
        problems.append(
            f"{rollout}.prompt_length {prompt_length} + {rollout}.response_length {response_length} "
            f"is more than the {min(limits)} tokens a sequence may have"
        )
    if problems:
        raise ConfigError("the engine cannot give what is asked for: " + "; ".join(problems))
