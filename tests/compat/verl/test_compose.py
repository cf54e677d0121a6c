"""rollstream's keys as verl's configuration, and the backend in verl's registries."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from omegaconf import OmegaConf

pytest.importorskip("verl")

import torch
from safetensors.torch import load_file

from rollstream.config.load import compose, to_settings
from rollstream.demo import MODEL_PATH
from rollstream.engine.registry import check_engine_config
from rollstream.errors import ConfigError, EngineError
from rollstream.integrations.verl.compose import compose_verl, verl_identity
from rollstream.integrations.verl.plugin import register
from rollstream.integrations.verl.server import ReplicaServer, ServerOptions

ROLLOUT = "actor_rollout_ref.rollout"


def composed(*words: str, overrides: Sequence[str] = ()) -> Any:
    base = [f"actor_rollout_ref.model.path={MODEL_PATH}", "data.train_files=rows.parquet"]
    given = {"generation": {"executor": "verl", "verl_overrides": list(overrides)}}
    settings = to_settings(compose([*base, *words], layers=[given]))
    return compose_verl(settings)


def test_our_keys_are_verls() -> None:
    config = composed(
        f"{ROLLOUT}.response_length=77",
        f"{ROLLOUT}.temperature=0.5",
        f"{ROLLOUT}.multi_turn.max_parallel_calls=3",
        "data.max_prompt_length=33",
        overrides=[
            "data.image_patch_size=28",
            "+actor_rollout_ref.model.override_config.attn_implementation=eager",
        ],
    )
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.response_length, rollout.prompt_length, rollout.temperature) == (77, 33, 0.5)
    assert (config.data.max_response_length, config.data.max_prompt_length) == (77, 33)
    assert rollout.multi_turn.max_parallel_calls == 3
    assert rollout.name == "rollstream"
    assert rollout.load_format == "auto"
    assert config.data.image_patch_size == 28
    assert config.actor_rollout_ref.model.override_config.attn_implementation == "eager"
    assert config.data.train_files == [str(Path("rows.parquet").absolute())]


OWN = (f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=8")


def test_what_our_keys_say_of_servers_verls_own_get() -> None:
    """Keys of the same name: what is asked is what runs, not verl's default of it (R8)."""
    asked = {
        "tensor_model_parallel_size": 4,
        "pipeline_model_parallel_size": 2,
        "data_parallel_size": 2,
        "gpu_memory_utilization": 0.3,
        "dtype": "float32",
        "load_format": "safetensors",
    }
    rollout = composed(
        *(f"{ROLLOUT}.{key}={value}" for key, value in asked.items()), overrides=OWN
    ).actor_rollout_ref.rollout
    assert {key: rollout[key] for key in asked} == asked
    # Nothing asked: rollstream's defaults; a share of the memory it leaves to who starts the servers.
    rollout = composed(f"{ROLLOUT}.load_format=dummy", overrides=OWN).actor_rollout_ref.rollout
    assert (rollout.name, rollout.nnodes, rollout.n_gpus_per_node, rollout.load_format) == (
        "vllm",
        1,
        8,
        "auto",
    )
    assert (rollout.tensor_model_parallel_size, rollout.dtype) == (1, "auto")
    assert rollout.gpu_memory_utilization == 0.5


def identity_of(*overrides: str) -> dict[str, Any]:
    given = {"generation": {"executor": "verl", "verl_overrides": list(overrides)}}
    base = [f"actor_rollout_ref.model.path={MODEL_PATH}", "data.train_files=rows.parquet"]
    settings = to_settings(compose(base, layers=[given]))
    config = compose_verl(settings)
    return verl_identity(settings, config)


def test_overrides_are_in_the_identity_by_what_they_come_to() -> None:
    one = identity_of("data.image_key=a", "+data.mine=b")
    assert one["verl.overrides.data.image_key"] == "a"
    assert identity_of("++data.mine=b", "data.image_key=a") == one
    assert identity_of("data.image_key=a", "+data.mine=c") != one
    assert identity_of("data.image_key=a") != one
    assert identity_of("data.image_key=c", "data.image_key=a", "+data.mine=b") == one  # the last one holds
    whole, part = "+data.x={y: 1, z: 2}", "++data.x.y=3"
    assert identity_of(whole, part)["verl.overrides.data.x"] == '{"y":3,"z":2}'
    # Who looks on changes nothing.
    assert identity_of("data.image_key=a", "+data.mine=b", f"{ROLLOUT}.trace.token2text=true") == one


@pytest.mark.parametrize(
    "groups",
    [
        "ppo_trainer, generation",
        "model@actor_rollout_ref.model: hf_model, rollout@actor_rollout_ref.rollout: rollout, data: legacy_data",
    ],
)
def test_a_file_over_verls_own_groups_is_taken(tmp_path: Path, groups: str) -> None:
    lines = [f"  - {group}\n" for group in (*groups.split(", "), "_self_")]
    file = tmp_path / "run.yaml"
    file.write_text(
        f"hydra: {{searchpath: [pkg://verl.trainer.config]}}\ndefaults:\n{''.join(lines)}"
        "actor_rollout_ref: {rollout: {n: 3, name: vllm}}\ndata: {train_files: mine.parquet, shuffle: false}\n"
    )
    settings = to_settings(compose([f"actor_rollout_ref.model.path={MODEL_PATH}"], layers=[file]))
    assert (settings.actor_rollout_ref.rollout.n, settings.data.files) == (3, ["mine.parquet"])
    rollout = settings.actor_rollout_ref.rollout
    assert rollout.load_format == "auto"  # verl's is dummy
    servers = {"server_urls": ["http://127.0.0.1:9"], "engine_kwargs": rollout.engine_kwargs}
    check_engine_config(
        rollout.name, model_path=MODEL_PATH, **servers
    )  # verl's groups have engine_kwargs.vllm
    file.write_text(f"{file.read_text()}reward: {{custom_reward_function: {{path: reward.py}}}}\n")
    settings = to_settings(compose(["data.max_response_length=77"], layers=[file]))
    assert settings.custom_reward_function.path == "reward.py"
    assert settings.actor_rollout_ref.rollout.response_length == 77


def test_a_whole_configuration_of_verls_as_it_resolves_is_taken(tmp_path: Path) -> None:
    """It is what people copy from a training's log: each key is in the file itself, at verl's default."""
    from hydra import compose as compose_by_hydra
    from hydra import initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base="1.3"):
        whole = compose_by_hydra("ppo_trainer", overrides=[f"{ROLLOUT}.name=sglang"])
    (tmp_path / "whole.yaml").write_text(OmegaConf.to_yaml(whole))
    (tmp_path / "resolved.yaml").write_text(OmegaConf.to_yaml(whole, resolve=True))
    for name in ("whole.yaml", "resolved.yaml"):
        settings = to_settings(compose(layers=[tmp_path / name]))
        assert settings.actor_rollout_ref.rollout.load_format == "auto"
        assert settings.actor_rollout_ref.rollout.response_length == 512
        assert settings.custom_reward_function.name == "compute_score"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"{ROLLOUT}.dtype=float32", r"rollout\.dtype is a key of rollstream's"),
        (f"{ROLLOUT}.tensor_model_parallel_size=2", "is a key of rollstream's"),
        (f"{ROLLOUT}.name=vllm", r"nnodes is 0"),
        (f"{ROLLOUT}.name=hf", "vllm, sglang, trtllm"),
        (f"{ROLLOUT}.router_config_path=r.yaml", "chooses its server itself"),
        (f"{ROLLOUT}.n=4", r"rollout\.n is a key of rollstream's"),
        ("data.max_response_length=4", r"rollout\.response_length is a key of rollstream's"),
        (f"{ROLLOUT}.agent={{num_workers:3}}", "is a key of rollstream's"),
        (f"{ROLLOUT}.no_such_key=1", "verl does not take"),
        ("a b", "cannot read"),
        ("data.image_patch_size=1,2", "sweep"),
    ],
)
def test_what_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        composed(overrides=[override])


def test_verl_finds_the_backend_by_its_environment() -> None:
    program = (
        "import verl\n"
        "from verl.workers.rollout.replica import RolloutReplicaRegistry\n"
        "from verl.workers.rollout.base import get_rollout_class\n"
        "print(RolloutReplicaRegistry.get('rollstream').__name__, get_rollout_class('rollstream').__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "VERL_USE_EXTERNAL_MODULES": "rollstream.integrations.verl.plugin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["RollstreamReplica", "RollstreamRollout"]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """An engine whose weights can be replaced."""
    command = [sys.executable, "-m", "rollstream.cli", "serve", "--engine", "hf", "--port", "0", "--json"]
    command += ["--exit-with-parent", "--weights", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield orjson.loads(process.stdout.readline())["url"]
    finally:
        process.terminate()
        process.wait(20)


def trainers_side(folder: Path) -> Any:
    """A `RollstreamRollout`, as each start of a trainer makes one."""
    register()
    from verl.workers.rollout.base import get_rollout_class

    config = composed()
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    rollout.custom, model.local_path = {"weights_dir": str(folder)}, str(MODEL_PATH)
    return get_rollout_class("rollstream")(rollout, model, None)


async def test_a_trainer_that_goes_back_keeps_the_weights_it_just_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers load what the last update named whenever they start anew; numbers say nothing of age."""
    import ray

    there: list[bool] = []

    async def load(source: str, version: int) -> None:
        there.append(Path(source, "model.safetensors").is_file())
        if version == 103:
            raise EngineError("no server could load them")

    told = SimpleNamespace(update_weights=SimpleNamespace(remote=load))
    monkeypatch.setattr(ray, "get_actor", lambda name: told)

    async def update(adapter: Any, step: int) -> list[int]:
        await adapter.update_weights(iter([("w", torch.zeros(1))]), global_steps=step)
        return sorted(int(folder.name.removeprefix("version-")) for folder in tmp_path.glob("version-*"))

    first = trainers_side(tmp_path)
    assert [await update(first, step) for step in (148, 149, 150)] == [[148], [148, 149], [149, 150]]
    (tmp_path / "notes").mkdir()  # not the trainer's
    again = trainers_side(tmp_path)  # from the checkpoint of step 100
    assert [await update(again, step) for step in (101, 102)] == [[101], [101, 102]]
    with pytest.raises(EngineError):
        await update(again, 103)
    # The servers still have the ones before, until others are theirs.
    assert (tmp_path / "version-000000102").is_dir()
    assert [await update(again, step) for step in (104, 104, 105)] == [[103, 104], [103, 104], [104, 105]]
    assert all(there) and (tmp_path / "notes").is_dir()


@pytest.mark.slow
async def test_a_trainers_weights_reach_the_servers(
    tmp_path: Path, served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`RollstreamRollout.update_weights`, as verl's worker calls it, over a real server."""
    register()
    import ray
    from verl.workers.rollout.base import get_rollout_class

    config = composed()
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    rollout.custom = {"urls": [served], "weights_dir": str(tmp_path / "weights")}
    adapter = get_rollout_class("rollstream")(rollout, model, None)
    rollout.prompt_length, rollout.response_length = 64, 8
    options = ServerOptions.read(rollout, str(MODEL_PATH))
    server = ReplicaServer(options.lengths, options=options)
    await server.start()
    told = SimpleNamespace(update_weights=SimpleNamespace(remote=lambda *args: server.update_weights(*args)))
    monkeypatch.setattr(ray, "get_actor", lambda name: told)

    async def answer() -> Any:
        greedy = {"temperature": 0.0, "logprobs": True}
        return await server.generate([1, 2, 3, 4], greedy, "a")

    before = await answer()
    tensors = load_file(MODEL_PATH / "model.safetensors")
    for step in (1, 2, 3):
        changed = ((name, tensor * (1.0 + 0.25 * step)) for name, tensor in tensors.items())
        await adapter.update_weights(changed, global_steps=step)
        after = await answer()
        assert after.extra_fields["policy_versions"] == [(0, step)]
        assert after.extra_fields["global_steps"] == step
        assert after.log_probs != before.log_probs
    kept = sorted(folder.name for folder in (tmp_path / "weights").iterdir())
    assert kept == ["version-000000002", "version-000000003"]

    await adapter.update_weights(iter(tensors.items()), global_steps=4)
    again = await answer()
    assert again.token_ids == before.token_ids
    assert again.log_probs == pytest.approx(before.log_probs, abs=1e-3)
    with pytest.raises(ConfigError, match="delta_flush"):
        await adapter.update_weights(iter(()), global_steps=5, wire_format="delta_flush")
    await asyncio.wait_for(server.close(), 20)
    assert torch.is_tensor(next(iter(tensors.values())))
