"""What of verl's decides the data of a run (R6)."""

import importlib
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rollstream.config.load import compose, to_settings
from rollstream.demo import MODEL_PATH
from rollstream.integrations.verl import compose as compose_module
from rollstream.integrations.verl.compose import verl_identity

ROLLOUT = "actor_rollout_ref.rollout"


@pytest.fixture(autouse=True)
def _some_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compose_module.importlib.metadata, "version", lambda name: "0.9.1")


def identity_of(*words: str, overrides: tuple[str, ...] = ()) -> dict[str, Any]:
    given = {"generation": {"executor": "verl", "verl_overrides": list(overrides)}}
    base = [f"actor_rollout_ref.model.path={MODEL_PATH}", "data.train_files=rows.jsonl"]
    settings = to_settings(compose([*base, *words], layers=[given]))
    verls: Any = OmegaConf.create()
    for word in overrides:
        key, _, value = word.partition("=")
        OmegaConf.update(verls, key, value, force_add=True)
    return verl_identity(settings, verls)


@pytest.mark.parametrize(
    ("key", "yaml"),
    [
        ("multi_turn.tool_config_path", "tools:\n- class_name: {module}.Thing\n  config: {{type: native}}\n"),
        ("agent.agent_loop_config_path", "- name: mine\n  _target_: {module}.Thing\n"),
    ],
)
def test_classes_belong_to_it_by_their_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, yaml: str
) -> None:
    module = f"verl_things_{key.partition('.')[0]}"
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "file.yaml").write_text(yaml.format(module=module))
    source = tmp_path / f"{module}.py"
    source.write_text("class Thing:\n    answer = 'old'\n")
    importlib.invalidate_caches()
    word = f"{ROLLOUT}.{key}={tmp_path / 'file.yaml'}"
    first = identity_of(word)
    assert identity_of(word) == first
    source.write_text("class Thing:\n    answer = 'another'\n")
    second = identity_of(word)
    assert second != first
    source.unlink()
    importlib.invalidate_caches()
    assert identity_of(word) not in (first, second)


@pytest.mark.parametrize("content", ["", "[]", "tools:", "tools: [1]", "tools: [{class_name: 3}]"])
def test_what_is_no_file_of_tools_is_left_to_verl_to_refuse(tmp_path: Path, content: str) -> None:
    (tmp_path / "tools.yaml").write_text(content)
    assert identity_of(f"{ROLLOUT}.multi_turn.tool_config_path={tmp_path / 'tools.yaml'}")


def test_the_layout_may_change_on_resume() -> None:
    name = f"{ROLLOUT}.name=vllm"
    one = identity_of(overrides=(name, f"{ROLLOUT}.n_gpus_per_node=8", f"{ROLLOUT}.nnodes=1"))
    two = identity_of(overrides=(name, f"{ROLLOUT}.n_gpus_per_node=4", f"{ROLLOUT}.nnodes=2"))
    assert one == two
    assert identity_of(overrides=(f"{ROLLOUT}.name=sglang",)) != identity_of(overrides=(name,))


def test_the_numbers_of_verls_own_servers_are_in_it_and_their_layout_is_not() -> None:
    name = f"{ROLLOUT}.name=vllm"
    plain = identity_of(overrides=(name,))
    assert identity_of(f"{ROLLOUT}.dtype=float32", overrides=(name,)) == plain | {"verl.dtype": "float32"}
    assert identity_of(f"{ROLLOUT}.tensor_model_parallel_size=4", overrides=(name,)) == plain
    assert "verl.dtype" not in identity_of()
