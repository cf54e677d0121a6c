"""The scalars of a run; `test_run.py` looks at them while it is written, sealed, merged, damaged."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np

from rollstream.store.columns import RunColumns
from rollstream.store.merge import merge_batches
from rollstream.store.run import Run
from rollstream.view import reader
from tests.support.view_runs import (
    agent_rollout,
    large_run,
    opened,
    rollout,
    write_run,
    writing,
)


def columns_of(root: Path) -> RunColumns:
    found = RunColumns([Run.open(root)])
    found.refresh()
    return found


def table(columns: RunColumns) -> list[tuple[Any, ...]]:
    rows = np.arange(columns.rows)
    names = [one["name"] for one in columns.columns() if one["name"] != "finished_at"]
    return list(zip(*(columns.values(name, rows) for name in names), strict=True))


def test_the_same_scalars_in_a_journal_a_batch_and_an_artifact(tmp_path: Path) -> None:
    root = tmp_path / "run"
    records = [agent_rollout(at // 2, at % 2, snapshots=at % 2) for at in range(6)]
    journal = table(columns_of(write_run(root, records, prompts=3, seal=False)))
    batch = table(columns_of(write_run(root, [], prompts=3)))
    with opened(root, prompts=3) as run:
        merge_batches(run.paths, run.manifest.run_id_bytes)
    assert journal == batch == table(columns_of(root))
    assert len(journal) == 9


def test_an_exported_file_has_no_manifest(tmp_path: Path) -> None:
    root = large_run(tmp_path / "run", 3000)
    columns = RunColumns([root / "trajectories.parquet"])
    columns.refresh()
    assert columns.rows == 3000
    assert reader.trajectory(columns, 2999)["index"] == 374


def test_a_large_artifact_is_read_by_its_row_groups(tmp_path: Path) -> None:
    columns = columns_of(large_run(tmp_path / "run", 5000))
    assert columns.rows == 5000
    for row in (0, 1023, 1024, 4999):
        assert reader.trajectory(columns, row)["repeat"] == row % 8
    numbers = [one for one, _ in columns.read(np.array([0, 4999]), ["messages"])]
    assert sum(map(len, numbers)) < 2048
    assert sorted(np.concatenate(numbers)[np.concatenate(numbers) >= 0].tolist()) == [0, 4999]


def test_many_batches_are_as_one_artifact(tmp_path: Path) -> None:
    artifact = columns_of(large_run(tmp_path / "artifact", 3000, tokens=8))
    batches = columns_of(large_run(tmp_path / "batches", 3000, tokens=8, sealed_rows=250))
    assert batches["index"].tolist() == artifact["index"].tolist()
    assert batches.rollout_rows(300).tolist() == artifact.rollout_rows(300).tolist()
    rows = np.array([2999, 0, 1500])
    assert reader.prompts(batches, rows) == reader.prompts(artifact, rows)


def test_shards_are_one_run(tmp_path: Path) -> None:
    parts = []
    for shard in range(3):
        root = tmp_path / str(shard)
        write_run(root, [rollout(index, 0) for index in range(shard, 9, 3)], prompts=9)
        parts.append(Run.open(root))
    columns = RunColumns(parts)
    columns.refresh()
    assert sorted(columns["index"].tolist()) == list(range(9))
    assert [reader.trajectory(columns, row)["index"] for row in range(9)] == columns["index"].tolist()


def test_a_snapshot_stays_as_it_is(tmp_path: Path) -> None:
    async def both() -> None:
        async with writing(tmp_path / "run", prompts=8) as writer:
            await writer.commit(agent_rollout(0, 0))
            columns = columns_of(tmp_path / "run")
            seen = columns.snapshot()
            before = table(seen)
            await writer.commit(agent_rollout(1, 0))
            await writer.commit(rollout(2, 0, source="another"))
            assert columns.refresh()
            assert (seen.rows, columns.rows) == (1, 3)
            assert table(seen) == before
            assert seen.rollout_rows(1).tolist() == []
            assert not columns.refresh()

    asyncio.run(both())
