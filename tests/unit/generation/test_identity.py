"""R6: the identity changes with what decides the data, and with nothing else."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollstream.agent.tools.toolbox import ToolBox
from rollstream.config.load import compose, to_settings
from rollstream.demo import MODEL_PATH
from rollstream.engine.checks import model_digest
from rollstream.errors import IdentityMismatchError
from rollstream.generation.identity import adopted_manifest, build_identity
from rollstream.generation.run import _adopt
from rollstream.store.manifest import Manifest, new_manifest
from rollstream.store.records import EncodedTurn
from rollstream.trajectory import RolloutKey
from tests.unit.store import fabric
from tests.unit.store.fabric import writing


def identity(*words: str, model: Path = MODEL_PATH) -> dict[str, object]:
    settings = to_settings(compose([f"actor_rollout_ref.model.path={model}", *words]))
    setup: Any = SimpleNamespace(
        settings=settings,
        tokenizer=SimpleNamespace(digest=lambda: "t"),
        images=None,
        shown_tools=[],
        agents=SimpleNamespace(tools=ToolBox()),
        reward=SimpleNamespace(source_digest="r"),
    )
    return build_identity(setup, {"agent.loops.single_turn_agent": "l"}, fingerprint="f", rows=3)


@pytest.mark.parametrize(
    "word",
    [
        "actor_rollout_ref.rollout.temperature=0.7",
        "actor_rollout_ref.rollout.n=3",
        "actor_rollout_ref.rollout.stop=[x]",
        "actor_rollout_ref.rollout.response_length=8",
        "actor_rollout_ref.rollout.name=sglang",
        "actor_rollout_ref.rollout.engine_kwargs.kv_cache_precision=u8",
        "generation.seed=1",
        "data.max_prompt_length=10",
        "data.truncation=left",
        "data.shuffle=true",
        "data.train_max_samples=2",
        "data.apply_chat_template_kwargs.x=1",
    ],
)
def test_what_decides_the_data_is_in(word: str) -> None:
    assert identity(word) != identity()


@pytest.mark.parametrize(
    "word",
    [
        "generation.max_in_flight=3",
        "actor_rollout_ref.rollout.engine_kwargs.num_threads=1",
        "generation.save_batch_size=3",
        "generation.retry_failed=true",
        "trainer.default_local_dir=elsewhere",
        "data.seed=4",  # without shuffle it decides nothing
    ],
)
def test_what_does_not_is_not(word: str) -> None:
    assert identity(word) == identity()


def test_where_its_servers_are_is_not() -> None:
    here, there = (f"actor_rollout_ref.rollout.server_urls=[http://{name}]" for name in ("here", "there"))
    engine = "actor_rollout_ref.rollout.name=sglang"
    assert identity(engine, here) == identity(engine, there)


def test_a_model_is_known_by_content_not_by_path(tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(MODEL_PATH, moved)
    assert identity(model=moved) == identity()
    weights = moved / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    assert model_digest(str(moved)) != model_digest(str(MODEL_PATH))
    assert model_digest("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"


def manifest(identity: dict[str, object]) -> Manifest:
    return new_manifest(n=1, identity=identity, dataset={}, versions={}, config={})


def adopts(old: dict[str, object], new: dict[str, object], *, nothing_done: bool = False) -> bool | None:
    """Whether a run directory takes other settings; None where it need not, False where it refuses."""
    try:
        adopted = adopted_manifest(
            Path("run"), manifest(old), manifest(new), extend=False, nothing_done=nothing_done
        )
    except IdentityMismatchError:
        return False
    if adopted is not None:
        assert adopted.identity == new
    return None if adopted is None else True


def test_settings_that_would_have_changed_no_finished_rollout_are_taken() -> None:
    old = identity()
    longer, cut = identity("data.max_prompt_length=2000"), identity("data.truncation=left")
    assert adopts(old, old) is None
    assert adopts(old, longer) is True
    assert adopts(old, cut) is True
    assert adopts(longer, old) is False
    assert adopts(cut, old) is False
    assert adopts(old, identity("data.truncation=left", "data.max_prompt_length=10")) is False
    filtered = identity("data.filter_overlong_prompts=true")
    assert adopts(filtered, {**filtered, "rollout.prompt_length": 2000}) is False
    assert adopts({**old, "launch.args.quantization": "fp8"}, old) is False


async def test_turns_of_other_settings_go_where_nothing_is_done(tmp_path: Path) -> None:
    """R6: no rollout goes on behind turns that its settings would not have made."""
    for temperature, left in ((1.0, 1), (0.5, 0)):
        with writing(tmp_path, identity={"rollout.temperature": 1.0}, save_batch_size=9) as (run, writer):
            writer.keep(EncodedTurn(RolloutKey(0, 0), 0, b""))
            await writer.close()
        wanted = fabric.manifest(**{"rollout.temperature": temperature})
        generation = SimpleNamespace(resume="auto", rescore=False)
        plan: Any = SimpleNamespace(
            run_dir=tmp_path, manifest=wanted, settings=SimpleNamespace(generation=generation), config_yaml=""
        )
        _adopt(tmp_path, plan, None)
        assert len(run.paths.turn_numbers()) == left
