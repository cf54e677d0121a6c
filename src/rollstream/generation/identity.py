"""What decides the data of a run: a flat mapping of dotted keys to JSON values (R6)."""

import hashlib
from pathlib import Path
from typing import Any

import orjson

from rollstream.config.settings import Settings
from rollstream.generation.replicas import launch_identity
from rollstream.store.manifest import DATASET_IDENTITY, SHARD_IDENTITY

_WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.gguf")
_MODEL_PATTERNS = (*_WEIGHT_PATTERNS, "config.json", "generation_config.json", "openvino_model.xml")

_WHOLE_FILE_BYTES = 64 << 20
"""Files up to this size are hashed whole; of larger ones, samples: other weights differ nearly everywhere."""

_SAMPLE_BYTES = 1 << 20
_SAMPLES = 16


def build_identity(
    settings: Settings,
    *,
    tokenizer_digest: str,
    agents: dict[str, str],
    images_digest: str | None,
    tools_digest: str | None,
    shown_tools_digest: str | None,
    reward_digest: str | None,
    dataset_fingerprint: str,
    dataset_rows: int,
    engine_settings: dict[str, Any],
) -> dict[str, Any]:
    """The identity of a run. Paths and speeds are not in it: moving a model or a dataset changes nothing."""
    model = settings.actor_rollout_ref.model
    rollout, data = settings.actor_rollout_ref.rollout, settings.data
    identity: dict[str, Any] = {
        "model.digest": model_digest(model.path) if model.path is not None else None,
        "model.tokenizer": tokenizer_digest,
        "engine": rollout.name,
        **{f"engine.{key}": value for key, value in engine_settings.items()},
        "agent.default_agent_loop": rollout.agent.default_agent_loop,
        "tools": tools_digest,
        "data.tool_config": shown_tools_digest,
        "model.image_processor": images_digest,
        "reward": reward_digest,
        "generation.seed": settings.generation.seed,
        "data.prompt_key": data.prompt_key,
        "data.truncation": data.truncation,
        "data.apply_chat_template_kwargs": data.apply_chat_template_kwargs,
        f"{DATASET_IDENTITY}.fingerprint": dataset_fingerprint,
        f"{DATASET_IDENTITY}.count": dataset_rows,
        f"{DATASET_IDENTITY}.filter_overlong_prompts": data.filter_overlong_prompts,
        f"{DATASET_IDENTITY}.train_max_samples": data.train_max_samples,
        f"{DATASET_IDENTITY}.shuffle": data.shuffle,
        f"{DATASET_IDENTITY}.seed": data.seed if data.shuffle else None,
    }
    identity |= agents | launch_identity(settings)
    if (shard := settings.generation.shard_of) is not None:
        identity[SHARD_IDENTITY] = f"{shard[0]}/{shard[1]}"
    if "multi_turn.parser" in agents:  # a loop that takes turns
        for name in [
            "max_assistant_turns",
            "max_user_turns",
            "format",
            "show_tools",
            "max_tool_response_length",
            "tool_response_truncate_side",
        ]:
            identity[f"multi_turn.{name}"] = getattr(rollout.multi_turn, name)
    for name in [
        "n",
        "temperature",
        "top_p",
        "top_k",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "calculate_log_probs",
        "prompt_length",
        "response_length",
        "max_model_len",
    ]:
        identity[f"rollout.{name}"] = getattr(rollout, name)
    if rollout.extra_sampling:  # a run directory of before they were known has none
        identity["rollout.extra_sampling"] = rollout.extra_sampling
    normalised: dict[str, Any] = orjson.loads(orjson.dumps(identity, option=orjson.OPT_SERIALIZE_NUMPY))
    return normalised


def model_digest(path: str) -> str:
    """Names a model's weights and configuration by content; a hub name stands for itself."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return path
    digest = hashlib.blake2b(digest_size=16)
    files = sorted({file for pattern in _MODEL_PATTERNS for file in folder.glob(pattern) if file.is_file()})
    for file in files:
        digest.update(f"{file.name}:{file.stat().st_size};".encode())
        _hash_file(file, digest)
    return digest.hexdigest()


def _hash_file(file: Path, digest: "hashlib.blake2b") -> None:
    size = file.stat().st_size
    with file.open("rb") as stream:
        if size <= _WHOLE_FILE_BYTES:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
            return
        for sample in range(_SAMPLES + 1):
            stream.seek((size - _SAMPLE_BYTES) * sample // _SAMPLES)
            digest.update(stream.read(_SAMPLE_BYTES))
