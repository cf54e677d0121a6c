"""A training whose server shares nothing with it but a folder of what changed."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

import orjson

from rollstream.errors import ConfigError
from tests.compat.trl.parts import MODEL, environment, load, rows, settings, trainer


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """`rollstream serve`, and `rollstream weights` beside it."""
    (tmp_path / "bucket").mkdir()
    base = [sys.executable, "-m", "rollstream"]
    copying = [*base, "weights", str(tmp_path / "bucket"), str(tmp_path / "copies")]
    serving = [*base, "serve", "--engine", "hf", "--model", str(MODEL), "--port", "0", "--json"]
    serving += ["--exit-with-parent", "--weights", str(tmp_path / "copies")]
    (tmp_path / "copies").mkdir()
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for command in (serving, copying)]
    try:
        assert processes[0].stdout is not None
        yield orjson.loads(processes[0].stdout.readline())["url"]
    finally:
        for process in processes:
            process.terminate()
            process.wait(100)


def test_tokens_are_of_the_trainers_weights(served: str, tmp_path: Path) -> None:
    env = environment(
        tmp_path,
        "sglang",
        f"actor_rollout_ref.rollout.server_urls=[{served}]",
        f"actor_rollout_ref.model.path={MODEL}",
    )
    folder = str(tmp_path / "bucket")
    # The decay changes weights at every step, also where all rewards of a step happen to be equal.
    steps = {"learning_rate": 1e-3, "weight_decay": 100.0}
    made = trainer(tmp_path, rows(10), env=env, weight_transfer="deltas", weights_dir=folder, **steps)
    made.args.num_steps_async = 0
    seen, plain = [], made._use_sampler_logprobs

    def compare(output: Any) -> Any:
        off = made._logprobs_of(made.model, output) - output["sampling_per_token_logps"]
        seen.append((off * output["completion_mask"]).abs().max())
        return plain(output)

    made._use_sampler_logprobs = compare
    made.train()
    assert len(seen) == 3 and max(seen) < 1e-3
    assert not load()[0].lm_head.weight.allclose(made.model.lm_head.weight, atol=1e-3)
    assert len([*(tmp_path / "copies").iterdir()]) == 2


def test_a_folder_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="writes into weights_dir"):
        settings(tmp_path, weight_transfer="deltas")
