"""The rollouts of a training are on disk, and a resumed one makes only those that were in flight."""

from pathlib import Path
from typing import Any

import orjson
import pytest

pytest.importorskip("trl")

from transformers import TrainerCallback

from rollstream.store.run import Run
from rollstream.store.validate import validate_run
from rollstream.training.ledger import Ledger, read_ledger
from tests.compat.trl.parts import numbers_of, rows, trainer


class Breaks(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
    """Raises when a step has been made, as a crash would; nothing is saved of it."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise ZeroDivisionError


def crash(made: Any, step: int, **resume: Any) -> None:
    made.add_callback(Breaks(step))
    with pytest.raises(ZeroDivisionError):
        made.train(**resume)


def ledger_of(folder: Path) -> Ledger:
    ledger = read_ledger(folder / "out" / "rollouts")
    assert ledger is not None and (ledger.groups_skipped, ledger.groups_doubled) == (0, 0)
    return ledger


def completions(made: Any) -> list[Any]:
    return [output["completion_ids"].tolist() for output in made.outputs]


def test_a_crash_costs_what_was_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = numbers_of(monkeypatch)
    changed = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2}
    made = trainer(tmp_path, rows(30), **changed)
    crash(made, 5)
    resumed = trainer(tmp_path, rows(30), **changed)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.trained_rows[0] == made.trained_rows[4] and completions(resumed)[0] == completions(made)[4]
    ledger = ledger_of(tmp_path)
    assert (ledger.batches, ledger.batches_trained_again, ledger.processes) == (6, 1, 2)
    assert ledger.trained == 6 * 8 and ledger.begun == len(begun) and not ledger.set_aside
    assert len(begun) - len(set(begun)) <= ledger.cut_off
    assert validate_run(tmp_path / "out" / "rollouts").sound
    assert (tmp_path / "out" / "rollouts" / "tokenizer.json").exists()


def test_before_the_first_checkpoint_too(tmp_path: Path) -> None:
    made = trainer(tmp_path, rows(30), max_steps=3)
    crash(made, 2)
    resumed = trainer(tmp_path, rows(30), max_steps=3)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.trained_rows[:2] == made.trained_rows[:2]
    assert completions(resumed)[:2] == completions(made)[:2]
    assert ledger_of(tmp_path).batches_trained_again == 2


def by_length(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def test_rewards_of_functions_of_trls_are_read_with_the_rollouts(tmp_path: Path) -> None:
    changed: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    changed |= {"reward_funcs": [by_length], "reward_weights": [1.0, 0.5]}
    made = trainer(tmp_path, rows(30), **changed)
    crash(made, 4)
    resumed = trainer(tmp_path, rows(30), **changed)
    resumed.train(resume_from_checkpoint=True)
    assert completions(resumed)[0] == completions(made)[2]
    # The environment's reward is what it was: the functions' were not taken for it.
    assert resumed.outputs[0]["advantages"].tolist() == made.outputs[2]["advantages"].tolist()
    run = Run.open(tmp_path / "out" / "rollouts")
    kept = [
        row for table in run.rows(["response_ids", "reward", "reward_extra"]) for row in table.to_pylist()
    ]
    scored = [row for row in kept if "by_length" in (row["reward_extra"] or "")]
    assert len(scored) == ledger_of(tmp_path).trained == 4 * 8
    for row in scored:
        extra = orjson.loads(row["reward_extra"])
        assert extra["by_length"] == len(row["response_ids"])
        assert row["reward"] == pytest.approx(extra["env_reward"] + 0.5 * extra["by_length"])
    assert validate_run(run.root).sound


def test_who_goes_back_gets_new_rollouts(tmp_path: Path) -> None:
    changed = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "rollout_store_keep_steps": 0}
    trainer(tmp_path, rows(30), **changed).train()
    resumed = trainer(tmp_path, rows(30), **changed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    [(reason, count)] = ledger_of(tmp_path).set_aside.items()
    assert "went back" in reason and count >= 16
    assert Run.open(tmp_path / "out" / "rollouts").state().damage == []


def test_no_store(tmp_path: Path) -> None:
    trainer(tmp_path, rows(10), max_steps=1, rollout_store=None).train()
    assert not (tmp_path / "out" / "rollouts").exists()
