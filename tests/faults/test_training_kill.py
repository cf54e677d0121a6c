"""Issue: after a crash at any point no prompt is skipped or trained on twice."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollstream.store.validate import validate_run
from rollstream.training.ledger import read_ledger
from tests.faults.training_loop import GROUPS

KILLS = 20


def play(
    folder: Path, order: str, kills: int, steps: int = 60, *more: str
) -> tuple[list[list[list[int]]], dict[str, Any]]:
    """What was trained on, batch by batch: `[position, epoch, index]` of each group; and the saved state."""
    folder.mkdir()
    command = [
        sys.executable,
        "-m",
        "tests.faults.training_loop",
        str(folder),
        order,
        str(steps),
        str(kills),
        "5",
        *more,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["killed"] == kills
    saved = json.loads((folder / "checkpoint.json").read_text())
    assert len(saved["weights"]) == report["steps"]
    return saved["weights"], saved["state"]


@pytest.mark.slow
def test_twenty_kills_change_nothing(tmp_path: Path) -> None:
    whole, _ = play(tmp_path / "whole", "plan", 0)
    killed, _ = play(tmp_path / "killed", "plan", KILLS)
    assert killed[: len(whole)] == whole
    again = [position for batch in killed for position, _, _ in batch]
    failing = {position for position in range(again[-1]) if position % 11 == 5}
    assert again == [position for position in range(again[-1] + 1) if position not in failing]


@pytest.mark.slow
def test_nor_when_the_first_finished_go_first(tmp_path: Path) -> None:
    batches, state = play(tmp_path / "first", "first", KILLS)
    trained = [tuple(group) for batch in batches for group in batch]
    assert all(len(batch) == GROUPS for batch in batches)
    assert len(set(trained)) == len(trained)
    positions = {position for position, _, _ in trained}
    below = set(range(state["watermark"]))
    assert below - positions == {position for position in below if position % 11 == 5}  # none skipped
    assert positions - below == set(state["trained"])


@pytest.mark.slow
@pytest.mark.parametrize("order", ["plan", "first"])
def test_with_a_store_nothing_that_was_finished_is_made_again(tmp_path: Path, order: str) -> None:
    batches, _ = play(tmp_path / "stored", order, KILLS, 60, "store")
    trained = [tuple(group) for batch in batches for group in batch]
    assert len(set(trained)) == len(trained)
    made = (tmp_path / "stored" / "made.log").read_text().splitlines()
    assert len(set(made)) == len(made)
    steps = dict[int, Any]()
    lines = [json.loads(line) for line in (tmp_path / "stored" / "trained.log").read_text().splitlines()]
    for step, content in lines:
        assert (
            steps.setdefault(step, content) == content
        )  # trained again: the same rollouts, as old as before
    ledger = read_ledger(tmp_path / "stored" / "store")
    assert ledger is not None and ledger.batches == len(steps) and ledger.trained == 3 * len(trained)
    assert (ledger.groups_skipped, ledger.groups_doubled, ledger.set_aside) == (0, 0, {})
    assert ledger.begun >= len(made)  # more where a kill cut some off
    assert validate_run(tmp_path / "stored" / "store").sound
