"""A training's store feeds another trainer with the same batches."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rollstream.errors import ConfigError, GenerationFailedError, PlanEndedError, RunDirectoryError
from rollstream.store.manifest import new_manifest, write_manifest
from rollstream.store.scores import notes_path
from rollstream.training import BatchesAhead, ReplayGroups, ShuffledPlan, TrainingStore
from rollstream.trajectory import Rollout
from tests.support.training import LONG_S, StoredGroups

Trained = list[list[list[Rollout]]]


def train(batches: BatchesAhead, steps: int) -> Trained:
    trained = []
    for _ in range(steps):
        batch = batches.next_batch(LONG_S)
        rollouts = [[replace(one, finished_at=0.0) for one in group.rollouts] for group in batch.groups]
        trained.append(rollouts)  # the store has set that time
        batches.trained(batch.step)
        batches.update_weights()
    return trained


def stored(store: Path | TrainingStore, *, order: Any = "first", steps: int = 6, **options: Any) -> Trained:
    """Trains on four groups a batch, two batches ahead; what is finished first goes first."""
    with BatchesAhead(
        ShuffledPlan(7, seed=2),
        StoredGroups(),
        max_staleness=2,
        order=order,
        weights="in_flight",
        store=store,
        **{"groups_per_step": 4, **options},
    ) as batches:
        trained: Trained = []
        for _ in range(steps):
            trained += train(batches, 1)
            batches.state_dict()
    return trained


def replay(groups: ReplayGroups, *, at: int = 0, **options: Any) -> Trained:
    batches = BatchesAhead(groups.plan, groups, groups_per_step=groups.groups_per_step, **options)
    if at:
        batches.load_state_dict(groups.state_at(at))
    with batches:
        trained = train(batches, groups.steps - at)
        with pytest.raises(PlanEndedError):
            batches.next_batch(LONG_S)
    return trained


def test_the_same_groups_in_the_same_order(tmp_path: Path) -> None:
    trained = stored(tmp_path)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    groups = ReplayGroups(tmp_path, prompt_key=StoredGroups().prompt_key)
    assert (groups.steps, groups.groups_per_step) == (6, 4)
    for staleness in (0, 1, 3):
        assert replay(groups, max_staleness=staleness) == trained
    assert replay(groups, at=4) == trained[4:]
    assert files == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_groups_of_some_of_their_rollouts_and_a_last_batch_that_is_smaller(tmp_path: Path) -> None:
    class Fewer(StoredGroups):
        """One of each group's rollouts comes too late."""

        async def generate(self, group: Any) -> list[Rollout]:
            return (await super().generate(group))[:-1]

    with BatchesAhead(ShuffledPlan(6, epochs=1), Fewer(), groups_per_step=4, store=tmp_path) as batches:
        trained = train(batches, 2)
    assert [[len(group) for group in batch] for batch in trained] == [[2] * 4, [2] * 2]
    assert replay(ReplayGroups(tmp_path)) == trained


def test_what_cannot_be_replayed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        ReplayGroups(tmp_path / "nothing")
    (run := tmp_path / "run").mkdir()
    write_manifest(run, new_manifest(n=1, identity={}, dataset={}, versions={}, config={}))
    with pytest.raises(RunDirectoryError, match="not the store of a training"):
        ReplayGroups(run)
    stored(tmp_path / "begun", steps=0)
    with pytest.raises(RunDirectoryError, match="no batch"):
        ReplayGroups(tmp_path / "begun")
    stored(TrainingStore(tmp_path / "short", keep_steps=0), steps=6)
    with pytest.raises(RunDirectoryError, match="all rollouts of step 0: deleted"):
        ReplayGroups(tmp_path / "short")
    stored(tmp_path / "shrinks", order="plan", steps=1)
    stored(TrainingStore(tmp_path / "shrinks", resume=True), order="plan", steps=3, groups_per_step=2)
    with pytest.raises(ConfigError, match="different sizes: step 1 has 2 groups, those before it 4"):
        ReplayGroups(tmp_path / "shrinks")
    stored(tmp_path / "whole")
    with pytest.raises(ConfigError, match="has 6 batches: step 7"):
        ReplayGroups(tmp_path / "whole").state_at(7)
    with pytest.raises(ConfigError, match=r"prompt row . is another one than at step 0"):
        replay(ReplayGroups(tmp_path / "whole", prompt_key=StoredGroups(key="f").prompt_key))
    groups = ReplayGroups(tmp_path / "whole")
    for path in (tmp_path / "whole" / "batches").iterdir():
        path.unlink()
    with pytest.raises(GenerationFailedError) as error:
        replay(groups)
    assert "rollouts of step 0 any more" in str(error.value.__cause__)


@pytest.mark.parametrize("what", ["batch", "notes"])
def test_damage_is_refused_and_names_the_first_step(tmp_path: Path, what: str) -> None:
    stored(TrainingStore(tmp_path, keep_steps=100), order="plan")  # about a file for each step
    if what == "batch":
        firsts = {min(_positions(path)) // 4: path for path in (tmp_path / "batches").glob("*.parquet")}
        step = max(step for step in firsts if step < 6)
        firsts[step].write_bytes(b"damaged")
        message = f"all rollouts of step {step}: batches/"
    else:
        notes = bytearray(notes_path(tmp_path).read_bytes())
        notes[200] ^= 1
        notes_path(tmp_path).write_bytes(notes)
        message = r"notes of .* are damaged"
    with pytest.raises(RunDirectoryError, match=message):
        ReplayGroups(tmp_path)


def _positions(batch: Path) -> list[int]:
    positions: list[int] = pq.read_table(batch, columns=["index"])["index"].to_pylist()
    return positions
