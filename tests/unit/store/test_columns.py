"""The scalars of a run while it is written, sealed, merged, damaged."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rollstream.store.batch import RECORDED
from rollstream.store.columns import RunColumns
from rollstream.store.merge import merge_batches
from rollstream.store.run import Run
from rollstream.view import reader
from tests.support.view_runs import (
    agent_rollout,
    agent_run,
    failure,
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


def contents(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()
    }


@example([("write", 3), ("look", 0), ("seal", 0), ("alone", 0), ("write", 1), ("fail", 0), ("look", 0)])
@example([("seal", 0), ("write", 1), ("seal", 0), ("alone", 0), ("write", 1), ("seal", 0)])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("write"), st.integers(1, 4)),
            st.tuples(st.sampled_from(["seal", "look", "merge", "alone", "fail"]), st.just(0)),
        ),
        min_size=2,
        max_size=12,
    )
)
def test_a_run_that_is_followed_is_as_one_that_is_read_at_its_end(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    root = tmp_path_factory.mktemp("followed") / "run"
    keys: Iterator[int] = iter(range(1000))

    async def follow() -> RunColumns:
        async with writing(root, prompts=100, seal=False) as writer:
            await writer.commit(rollout(99, 3))  # an empty run is begun anew by the next one who writes
        columns = columns_of(root)
        before = table(columns)
        for step, count in steps:
            if step == "merge":
                with opened(root, prompts=100) as run:
                    merge_batches(run.paths, run.manifest.run_id_bytes)
            elif step == "alone":
                async with writing(root, prompts=100):
                    pass
                with opened(root, prompts=100) as run:
                    run.merge(keep_batches=False)
            else:
                async with writing(root, prompts=100, seal=step == "seal") as writer:
                    for _ in range(count):
                        number = next(keys)
                        await writer.commit(agent_rollout(number // 4, number % 4, snapshots=number % 3))
                    if step == "fail":
                        number = next(keys)
                        await writer.commit(failure(number // 4, number % 4))
            columns.refresh()
            # Rows keep their numbers; parts of rewards may come on top.
            now = table(columns)[: len(before)]
            assert [row[: len(old)] for row, old in zip(now, before, strict=True)] == before
            before = table(columns)
        return columns

    followed, anew = asyncio.run(follow()), columns_of(root)
    assert sorted(table(followed), key=str) == sorted(table(anew), key=str)
    assert not followed.damage
    assert [(one.index, one.repeat) for one in followed.failures()] == [
        (one.index, one.repeat) for one in Run.open(root).failures()
    ]
    assert len(reader.read_rows(followed, range(followed.rows))) == followed.rows


def test_the_same_scalars_in_a_journal_a_batch_and_an_artifact(tmp_path: Path) -> None:
    root = tmp_path / "run"
    records = [agent_rollout(at // 2, at % 2, snapshots=at % 2) for at in range(6)]
    journal = table(columns_of(write_run(root, records, prompts=3, seal=False)))
    batch = table(columns_of(write_run(root, [], prompts=3)))
    with opened(root, prompts=3) as run:
        merge_batches(run.paths, run.manifest.run_id_bytes)
    assert journal == batch == table(columns_of(root))
    assert len(journal) == 9


def test_looking_changes_nothing(tmp_path: Path) -> None:
    root = agent_run(tmp_path / "run", prompts=4)
    before = contents(root)
    columns = columns_of(root)
    reader.group(columns, 0)
    reader.trajectory(columns, 0)
    assert contents(root) == before


def test_a_run_is_read_while_somebody_writes_it(tmp_path: Path) -> None:
    async def both() -> None:
        async with writing(tmp_path / "run", prompts=8) as writer:
            columns = columns_of(tmp_path / "run")
            for number in range(8):
                await writer.commit(rollout(number, 0))
                columns.refresh()
                assert columns.rows == number + 1
                assert reader.trajectory(columns, number)["index"] == number
            await writer.seal()
            columns.refresh()
            assert (columns.rows, columns.damage) == (8, [])

    asyncio.run(both())


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.99])
def test_a_damaged_batch_is_named_and_the_others_are_there(tmp_path: Path, share: float) -> None:
    root = write_run(tmp_path / "run", [rollout(at, 0) for at in range(12)], prompts=12, rows=4)
    path = sorted((root / "batches").glob("*.parquet"))[1]
    data = bytearray(path.read_bytes())
    data[int(len(data) * share)] ^= 0xFF
    path.write_bytes(data)
    columns = columns_of(root)
    assert columns.rows in (8, 12)  # what was flipped may be in a column that is not read for the list
    read = reader.read_rows(columns, range(columns.rows))
    assert len(read) in (8, 12)
    assert columns.damage or len(read) == 12


def test_a_damaged_journal_is_read_around(tmp_path: Path) -> None:
    root = write_run(tmp_path / "run", [rollout(at, 0) for at in range(9)], prompts=9, seal=False)
    path = next((root / "journal").glob("*.rsj"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data + b"\xd7RS")
    columns = columns_of(root)
    assert columns.rows == 8
    assert len(columns.damage) == 1 and "bytes at offset" in columns.damage[0]
    assert len(reader.read_rows(columns, range(8))) == 8


def test_a_file_of_another_run_is_not_taken_for_ones_own(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", [rollout(0, 0)], prompts=1)
    other = write_run(tmp_path / "other", [rollout(1, 0)], prompts=1)
    copied = next((other / "batches").glob("*.parquet")).read_bytes()
    (one / "batches" / "batch_000007.parquet").write_bytes(copied)
    (one / "batches" / "batch_000008.parquet").write_bytes(b"PAR1 nothing PAR1")
    columns = columns_of(one)
    assert columns.rows == 1
    assert len(columns.damage) == 2


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


def test_files_without_counts_are_counted_when_they_are_read(tmp_path: Path) -> None:
    root = write_run(tmp_path / "run", [agent_rollout(at, 0, snapshots=at % 2) for at in range(4)], prompts=4)
    counted = table(columns_of(root))
    path = next((root / "batches").glob("*.parquet"))
    old = pq.read_table(path).select(RECORDED.names)
    metadata = {**old.schema.metadata, b"rollstream.format": b"rollstream.batch/2"}
    pq.write_table(old.cast(RECORDED).replace_schema_metadata(metadata), path)
    columns = columns_of(root)
    assert not columns.damage
    assert table(columns) == counted
    assert columns.values("finished_at", np.array([0])) == [None]
    assert reader.trajectory(columns, 0)["response_tokens"] == counted[0][7]
