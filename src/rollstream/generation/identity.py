"""What decides the data of a run: a flat mapping of dotted keys to JSON values (R6)."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import orjson

from rollstream.config.settings import Settings
from rollstream.data.mixed import read_sources
from rollstream.engine.checks import model_digest
from rollstream.engine.registry import data_deciding_kwargs, is_launched
from rollstream.errors import IdentityMismatchError
from rollstream.rollout.setup import RolloutSetup
from rollstream.store.manifest import (
    DATASET_IDENTITY,
    LOOP_IDENTITY,
    SHARD_IDENTITY,
    Manifest,
    extends,
    identity_differences,
)

_DECIDING_ARGS = (
    *("quantization", "kv-cache-dtype", "revision", "code-revision", "lora-paths", "lora-modules"),
    *("hf-overrides", "json-model-override-args", "generation-config", "override-generation-config"),
)
"""Arguments of launched servers (`launch.args`) that say which model answers, and in which numbers. All others,
and the servers' environment, may change on resume: they are layout and speed, and of servers that are given by
URL nobody knows them at all."""

_ROLLOUT_SETTINGS = (
    *("n", "temperature", "top_p", "top_k", "stop", "stop_token_ids", "ignore_eos", "calculate_log_probs"),
    *("prompt_length", "response_length", "max_model_len"),
)
_TURN_SETTINGS = (
    *("max_assistant_turns", "max_user_turns", "format", "show_tools"),
    *("max_tool_response_length", "tool_response_truncate_side"),
)


def build_identity(
    setup: RolloutSetup, agents: Mapping[str, str], *, fingerprint: str, rows: int
) -> dict[str, Any]:
    """The identity of a run. Paths and speeds are not in it: moving a model or a dataset changes nothing.

    Args:
        setup: of the run.
        agents: its agent loops and their partners, see `Agents.identity`.
        fingerprint: of the prompt rows.
        rows: how many there are.
    """
    settings, tools = setup.settings, setup.agents.tools
    model, data = settings.actor_rollout_ref.model, settings.data
    rollout = settings.actor_rollout_ref.rollout
    tokenizer = setup.tokenizer
    images = setup.images.processor.digest() if tokenizer and setup.images and setup.shows_images else None
    identity: dict[str, Any] = {
        "model.digest": model_digest(model.path) if model.path is not None else None,
        "model.tokenizer": tokenizer.digest() if tokenizer else None,
        "engine": rollout.name,
        **{
            f"engine.{key}": value
            for key, value in data_deciding_kwargs(rollout.name, rollout.engine_kwargs).items()
        },
        "agent.default_agent_loop": rollout.agent.default_agent_loop,
        "tools": tools.digest if tools.schemas else None,
        "data.tool_config": _json_digest(setup.shown_tools) if setup.shown_tools else None,
        "model.image_processor": images,
        "generation.seed": settings.generation.seed,
        "data.prompt_key": data.prompt_key,
        "data.truncation": data.truncation,
        "data.apply_chat_template_kwargs": data.apply_chat_template_kwargs,
        f"{DATASET_IDENTITY}.fingerprint": fingerprint,
        f"{DATASET_IDENTITY}.count": rows,
        f"{DATASET_IDENTITY}.filter_overlong_prompts": data.filter_overlong_prompts,
        f"{DATASET_IDENTITY}.train_max_samples": data.train_max_samples,
        f"{DATASET_IDENTITY}.shuffle": data.shuffle,
        f"{DATASET_IDENTITY}.seed": data.seed if data.shuffle else None,
    }
    if data.sources:
        weights = [[one.name, one.weight] for one in read_sources(data.sources)]
        identity[f"{DATASET_IDENTITY}.sources"] = weights
    if data.ground_truth_key is not None:
        identity["data.ground_truth_key"] = data.ground_truth_key
    identity |= {**agents, **launch_identity(settings)}
    if (shard := settings.generation.shard_of) is not None:
        identity[SHARD_IDENTITY] = f"{shard[0]}/{shard[1]}"
    if "multi_turn.parser" in agents:  # a loop that takes turns
        identity |= {f"multi_turn.{name}": getattr(rollout.multi_turn, name) for name in _TURN_SETTINGS}
    identity |= {f"rollout.{name}": getattr(rollout, name) for name in _ROLLOUT_SETTINGS}
    if rollout.extra_sampling:
        identity["rollout.extra_sampling"] = rollout.extra_sampling
    normalised: dict[str, Any] = orjson.loads(orjson.dumps(identity, option=orjson.OPT_SERIALIZE_NUMPY))
    return normalised


def _json_digest(value: list[Any]) -> str:
    return hashlib.blake2b(orjson.dumps(value, option=orjson.OPT_SORT_KEYS), digest_size=16).hexdigest()


def launch_identity(settings: Settings) -> dict[str, Any]:
    """What of the launch decides the data, where it is not the servers' own way.

    So a run whose servers were launched plainly may be resumed with servers by URL, and the other way round.
    """
    rollout, launch = settings.actor_rollout_ref.rollout, settings.actor_rollout_ref.rollout.launch
    if not is_launched(rollout.name, rollout.server_urls):
        return {}
    identity: dict[str, Any] = {}
    if launch.server not in ("auto", rollout.name):
        identity["launch.server"] = launch.server
    for name in ("dtype", "load_format"):
        if (value := getattr(rollout, name)) != "auto":
            identity[f"launch.{name}"] = value
    args = {str(name).replace("_", "-"): value for name, value in launch.args.items()}
    if launch.server == "rollstream":  # its engine says which of its settings decide the data
        kwargs = data_deciding_kwargs(str(args.get("engine", "openvino")), args.get("engine-kwargs"))
        identity |= {f"launch.engine.{name}": value for name, value in kwargs.items()}
        if "engine" in args:
            identity["launch.args.engine"] = args["engine"]
    return identity | {f"launch.args.{name}": args[name] for name in _DECIDING_ARGS if name in args}


def adopted_manifest(
    root: Path, old: Manifest, wanted: Manifest, *, extend: bool, nothing_done: bool
) -> Manifest | None:
    """The manifest that a run directory gets where settings differ that change nothing in it; None for its own.

    Where nothing is done, everything may differ. Else only what would have made the same rollouts of those
    that are done.

    Args:
        root: the run directory.
        old: its manifest.
        wanted: the one asked for.
        extend: appended rows and a larger `n` are allowed.
        nothing_done: the run has no finished rollout.

    Raises:
        IdentityMismatchError: with the settings that differ.
    """
    differences = identity_differences(old.identity, wanted.identity)
    if nothing_done:
        kept = msgspec.structs.replace(wanted, run_id=old.run_id, created=old.created)
        return kept if differences else None
    harmless = _harmless(old.identity, wanted.identity)
    refused = [one for one in differences if one[0] not in harmless and not (extend and extends(one))]
    if refused:
        lines = [f"  {_difference(*one, _changed_files(old, wanted))}" for one in refused]
        hint = "generation.resume=extend goes on with rows that were appended, or a larger n"
        raise IdentityMismatchError(
            f"{root} holds a run of another identity; nothing was touched. What differs (old -> new):\n"
            + "\n".join([*lines, *([hint] if all(map(extends, refused)) else [])]),
            refused,
        )
    changed = {key: wanted.identity[key] for key, _, _ in differences if key in harmless}
    if not changed:
        return None
    return msgspec.structs.replace(old, identity={**old.identity, **changed}, config=wanted.config)


def _harmless(old: Mapping[str, Any], new: Mapping[str, Any]) -> set[str]:
    """Identity keys whose difference would have changed no rollout that is done."""
    filtered, length = f"{DATASET_IDENTITY}.filter_overlong_prompts", "rollout.prompt_length"
    # With truncation=error no prompt was cut, so each prompt of a finished rollout is within the old limit.
    uncut = old.get("data.truncation") == "error" and not old.get(filtered) and not new.get(filtered)
    return {"data.truncation", length} if uncut and new.get(length, 0) >= old.get(length, 0) > 0 else set()


_DIGESTS = {
    "model.digest": "the model",
    "model.tokenizer": "the tokenizer or chat template",
    "model.image_processor": "the image processor",
    "tools": "the tools (tool_config_path, function_tool_path)",
    "data.tool_config": "data.tool_config_path",
    "multi_turn.interactions": "interaction_config_path",
    "multi_turn.parser": "the tool parser",
}
"""Keys whose values are digests, and what to call them."""

_CONFIG_KEYS = {
    "engine": "actor_rollout_ref.rollout.name",
    "rollout.prompt_length": "data.max_prompt_length",
    "agent.": "actor_rollout_ref.rollout.agent.",
    "rollout.": "actor_rollout_ref.rollout.",
    "multi_turn.": "actor_rollout_ref.rollout.multi_turn.",
    "launch.": "actor_rollout_ref.rollout.launch.",
    "engine.": "actor_rollout_ref.rollout.engine_kwargs.",
    f"{DATASET_IDENTITY}.": "data.",
}
"""Keys, or how they begin, and their names in the configuration."""


def _difference(key: str, old: object, new: object, files: str) -> str:
    if key == f"{DATASET_IDENTITY}.fingerprint":
        return f"prompt rows: {files}"
    name = _DIGESTS.get(key)
    if key.startswith(LOOP_IDENTITY):
        name = f"agent loop {key.removeprefix(LOOP_IDENTITY)} or its options"
    if name is not None:
        return f"{name}: {'used only now' if old is None else 'unused now' if new is None else 'another content'}"
    for prefix, config in _CONFIG_KEYS.items():
        if key == prefix or (prefix.endswith(".") and key.startswith(prefix)):
            return f"{config + key.removeprefix(prefix)}: {old!r} -> {new!r}"
    return f"{key}: {old!r} -> {new!r}"


def _changed_files(old: Manifest, wanted: Manifest) -> str:
    """Data files that differ, by name; their order may differ, too."""
    before, after = (
        {str(file["name"]): str(file["digest"]) for file in manifest.dataset.get("files") or []}
        for manifest in (old, wanted)
    )
    changes = [
        f"{path} {'has another content' if path in before else 'is new'}"
        for path, digest in after.items()
        if digest not in before.values()
    ]
    changes += [
        f"{path} is not used any more"
        for path, digest in before.items()
        if digest not in after.values() and path not in after
    ]
    return "; ".join(changes) or "other rows, or in another order"
