"""What an executor needs is looked for before anything is made on disk."""

import subprocess
import sys
from pathlib import Path

import pytest

from rollstream.config.load import compose, to_settings
from rollstream.demo import MODEL_PATH
from rollstream.errors import ConfigError
from rollstream.generation.plan import check_executor
from rollstream.generation.run import run_generation

ROLLOUT = "actor_rollout_ref.rollout"
ON_RAY = (f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.launch.server=rollstream", f"{ROLLOUT}.launch.where=ray")


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as Python has it for one that cannot be imported


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize("words", [("generation.executor=ray",), ON_RAY])
def test_without_ray_no_run_directory_is_made(tmp_path: Path, words: tuple[str, ...]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1 + 1 ="}\n')
    given = [
        f"actor_rollout_ref.model.path={MODEL_PATH}",
        f"data.train_files={prompts}",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    ]
    with pytest.raises(ConfigError, match=r"Ray, which is not installed .*: pip install 'rollstream\[ray\]'"):
        run_generation([*given, *words])
    assert not (tmp_path / "run").exists()


PROGRAM = """
import sys
from rollstream.errors import ConfigError
from rollstream.generation.run import run_generation
from rollstream.reward.rules import register_reward

@register_reward("of_this")
def score(*given): return 1.0

try:
    run_generation(sys.argv[1:])
except ConfigError as error:
    print(error)
"""


def test_a_rule_that_only_this_process_knows_is_refused_for_workers(tmp_path: Path) -> None:
    (tmp_path / "reward.jsonl").write_text('{"prompt": "1 + 1 =", "data_source": "of_this/process"}\n')
    given = [
        f"actor_rollout_ref.model.path={MODEL_PATH}",
        "trainer.default_local_dir=run",
        f"{ROLLOUT}.name=sglang",
        f"{ROLLOUT}.server_urls=[http://127.0.0.1:9]",
        "generation.processes=2",
        "data.train_files=reward.jsonl",
    ]
    words = [sys.executable, "-c", PROGRAM, *given]
    said = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert said.startswith("the reward of data source 'of_this/process' (@register_reward) is known")
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize("words", [(), ("ray_kwargs.ray_init.address=auto",), ON_RAY[:2]])
def test_who_needs_no_ray_is_not_asked_for_it(words: tuple[str, ...]) -> None:
    check_executor(to_settings(compose([f"actor_rollout_ref.model.path={MODEL_PATH}", *words])))
