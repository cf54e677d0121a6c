"""How a training ends that is told to, and what it leaves behind."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from transformers import TrainerCallback

from rollstream.integrations.trl.checkpoints import STATE_FILE
from tests.compat.trl.parts import environment, rows, trainer


@pytest.fixture(autouse=True)
def signals_are_nobodys() -> Iterator[None]:
    """Ray's driver, which other tests start in this process, leaves a handler of its own; `nohup` ignores SIGINT."""
    before = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, signal.SIG_DFL),
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
    }
    yield
    for number, handler in before.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


class Told(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
    def __init__(self, number: signal.Signals, times: int = 1, *, at: str = "on_step_end") -> None:
        self.number, self.times = number, times
        setattr(self, at, self.tell)

    def tell(self, *_: Any, **more: Any) -> None:
        times, self.times = self.times, 0  # at the next step it would be another Ctrl-C
        for _again in range(times):
            os.kill(os.getpid(), self.number)


def test_sigterm_ends_generation_and_leaves_no_weights(tmp_path: Path) -> None:
    made = trainer(
        tmp_path,
        rows(10),
        env=environment(tmp_path, "openvino"),
        max_steps=2,
        weights_dir=str(tmp_path),
    )
    made.add_callback(Told(signal.SIGTERM))
    with pytest.raises(SystemExit) as ended:
        made.train()
    assert ended.value.code == 143
    assert made.state.global_step == 1 and not made.batches.alive
    assert not list(tmp_path.glob("rollstream-*"))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_ctrl_c_says_how_to_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = trainer(tmp_path, rows(10), max_steps=3, save_strategy="steps", save_steps=1)
    told = Told(signal.SIGINT)
    made.add_callback(told)
    with pytest.raises(KeyboardInterrupt):
        made.train()
    assert "ended at step 1, and there is no checkpoint in" in capsys.readouterr().err
    told.times = 0
    made.train()
    told.times = 1
    with pytest.raises(KeyboardInterrupt):
        made.train()
    said = capsys.readouterr().err
    assert "checkpoint-3: trainer.train(resume_from_checkpoint=True)" in said


def test_ctrl_c_saves_a_checkpoint_if_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the first of two steps of a batch: the batch is trained first. Two signals at once are one."""
    changed = {"max_steps": 6, "per_device_train_batch_size": 4, "steps_per_generation": 2}
    made = trainer(tmp_path, rows(10), save_on_interrupt=True, **changed)
    made.add_callback(Told(signal.SIGINT, times=2))
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        made.train()
    assert made.state.global_step == 2 and signal.getsignal(signal.SIGINT) is before
    assert "checkpoint-2: trainer.train(resume_from_checkpoint=True)" in capsys.readouterr().err
    resumed = trainer(tmp_path, rows(10), **changed)
    resumed.train(resume_from_checkpoint=True)
    assert len(resumed.trained_rows) == 2 and resumed.trained_rows[0] != made.trained_rows[0]


def test_ctrl_c_after_the_last_step_saves_a_checkpoint(tmp_path: Path) -> None:
    made = trainer(tmp_path, rows(10), max_steps=1, save_on_interrupt=True)
    made.add_callback(Told(signal.SIGINT, at="on_train_end"))
    with pytest.raises(KeyboardInterrupt):
        made.train()
    resumed = trainer(tmp_path, rows(10), max_steps=2)
    resumed.train(resume_from_checkpoint=True)
    assert len(resumed.trained_rows) == 1 and resumed.trained_rows != made.trained_rows


def test_a_checkpoint_that_was_not_written_to_its_end_is_passed_over(tmp_path: Path) -> None:
    made = trainer(tmp_path, rows(10), max_steps=2, save_strategy="steps", save_steps=1)
    made.train()
    torn = tmp_path / "out" / "checkpoint-2"
    for file in torn.iterdir():
        if file.name != STATE_FILE:
            file.unlink()
    resumed = trainer(tmp_path, rows(10), max_steps=2)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.trained_rows == made.trained_rows[1:]
    with pytest.raises(ValueError, match="No valid checkpoint"):
        trainer(tmp_path, rows(10), output_dir=str(tmp_path / "empty")).train(resume_from_checkpoint=True)
