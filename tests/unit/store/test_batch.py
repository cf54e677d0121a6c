"""What a sealed file holds beside the rollouts, and how one of them is found in it."""

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.store.batch import (
    COUNTS,
    RECORDED,
    SCHEMA,
    batch_metadata,
    build_table,
    note_digest,
    open_parquet,
    read_tables,
    with_counts,
    write_table_durably,
)
from rollstream.store.export.files import read_rows
from rollstream.store.manifest import require_manifest
from rollstream.store.paths import RunPaths
from rollstream.store.records import RecordCodec
from rollstream.store.run import Run, read_groups
from rollstream.store.summary import read_status
from rollstream.store.validate import validate_run
from rollstream.trajectory import Rollout
from tests.unit.store.fabric import N, commit_all, merge, rollout

RUN_ID = bytes(16)


def table_of(rollouts: list[Rollout]) -> pa.Table:
    codec = RecordCodec()
    return build_table([codec.decode_rollout(codec.encode(one).body) for one in rollouts])


@given(st.lists(st.tuples(st.integers(0, 50), st.booleans()), min_size=1, max_size=8), st.integers(0, 3))
def test_counts_are_those_of_the_tokens(kinds: list[tuple[int, bool]], skipped: int) -> None:
    rollouts = [rollout(index, trajectories=1 + index % 3) for index in range(len(kinds))]
    for one, (length, with_logprobs) in zip(rollouts, kinds, strict=True):
        for trajectory in one.trajectories:
            trajectory.response_ids = [7] * length
            trajectory.response_mask = mask = [at % 3 % 2 for at in range(length)]
            trajectory.response_logprobs = (
                [-0.5 * at * mask[at] for at in range(length)] if with_logprobs else None
            )
    started = time.time()
    table = table_of(rollouts).slice(skipped)
    assert all(started - 1 <= row["finished_at"] <= time.time() + 1 for row in table.to_pylist())
    counted = with_counts(table.select(RECORDED.names))
    assert counted.drop_columns(["finished_at"]) == table.drop_columns(["finished_at"])
    for row in counted.to_pylist():
        sampled = sum(row["response_mask"])
        assert row["prompt_tokens"] == len(row["prompt_ids"])
        assert row["response_tokens"] == len(row["response_ids"])
        assert row["sampled_tokens"] == sampled
        if row["response_logprobs"] is None or not sampled:
            assert row["mean_logprob"] is None
        else:
            assert row["mean_logprob"] == pytest.approx(sum(row["response_logprobs"]) / sampled)


@pytest.mark.parametrize(
    ("usage", "counted"),
    [
        ({"prompt_tokens": 11, "response_tokens": 5}, (11, 5)),
        ({"prompt_tokens": "many"}, (0, 0)),
        ({"prompt_tokens": -1, "response_tokens": 1 << 40}, (0, 0)),
    ],
)
def test_without_a_tokenizer_the_endpoint_counts(usage: object, counted: tuple[int, int]) -> None:
    one = rollout(0)
    one.trajectories[0] = replace(
        one.final, prompt_ids=[], response_ids=[], response_mask=[], response_logprobs=None
    )
    one.final.extra = {"usage": usage}
    (row,) = table_of([one]).to_pylist()
    assert (row["prompt_tokens"], row["response_tokens"], row["sampled_tokens"]) == (*counted, 0)


def test_row_groups_are_small_and_one_rollout_takes_one_of_them(tmp_path: Path) -> None:
    path = tmp_path / "batch.parquet"
    table = table_of([rollout(0, trajectories=3)])
    rows = 5000
    table = table.take(pa.array(np.arange(3 * rows) % 3)).set_column(
        0, SCHEMA.field("index"), pa.array(np.arange(3 * rows) // 3 * 2)
    )
    write_table_durably(path, table, batch_metadata(RUN_ID))
    with open_parquet(path) as file:
        groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
        assert max(group.num_rows for group in groups) <= 1024
        assert all(group.column(0).statistics.has_min_max for group in groups)
        for index in (0, 682, 2 * rows - 2):  # 682: its rows stand in two row groups
            read = [*read_groups(path, ["index"], np.array([index]))]
            assert len(read) == 1 and read[0]["index"].to_pylist().count(index) == 3


def as_before_counts(path: Path, run_id: bytes) -> None:
    """Writes a batch again as the version before did."""
    table = pa.concat_tables(read_tables(path)).select(RECORDED.names)
    metadata = batch_metadata(run_id) | {"rollstream.format": "rollstream.batch/2"}
    pq.write_table(table.replace_schema_metadata(metadata), path, row_group_size=2)
    note_digest(path)


async def test_files_without_counts_are_read_as_if_they_had_them(
    tmp_path: Path,
) -> None:
    root, work = tmp_path / "run", [rollout(i, r, trajectories=2) for i in range(5) for r in range(N)]
    await commit_all(root, work, size=8)
    paths, before = RunPaths(root), read_status(root)
    parts = [list(read_rows(paths.batch(number))) for number in paths.batch_numbers()]
    as_before_counts(paths.batch(1), require_manifest(root).run_id_bytes)
    assert set(COUNTS.names).isdisjoint(pq.read_schema(paths.batch(1)).names)
    parts[1] = [row | {"finished_at": None} for row in parts[1]]
    rows = [row for part in parts for row in part]
    assert [row for number in paths.batch_numbers() for row in read_rows(paths.batch(number))] == rows
    assert {tuple(one.column_names) for one in read_tables(paths.batch(1), ["index", "sampled_tokens"])} == {
        ("index", "sampled_tokens")
    }
    assert Run.open(root).find(parts[1][0]["index"], parts[1][0]["repeat"], 0).row == parts[1][0]
    assert read_status(root) == before
    validation = validate_run(root)
    assert (validation.sound, validation.rows) == (True, len(rows))
    merge(root)
    assert list(read_rows(paths.artifact)) == sorted(
        rows, key=lambda row: (row["index"], row["repeat"], row["trajectory"])
    )
