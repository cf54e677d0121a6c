"""What a sealed file holds beside the rollouts, and how one of them is found in it."""

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.store.batch import (
    SCHEMA,
    batch_metadata,
    build_table,
    read_footer,
    read_groups,
    write_tables_durably,
)
from rollstream.store.records import RecordCodec
from rollstream.trajectory import Rollout
from tests.unit.store.fabric import rollout

RUN_ID = bytes(16)


def table_of(rollouts: list[Rollout]) -> pa.Table:
    codec = RecordCodec()
    return build_table([codec.decode_rollout(codec.encode(one).body) for one in rollouts])


@given(st.lists(st.tuples(st.integers(0, 50), st.booleans()), min_size=1, max_size=8))
def test_counts_are_those_of_the_tokens(kinds: list[tuple[int, bool]]) -> None:
    rollouts = [rollout(index, trajectories=1 + index % 3) for index in range(len(kinds))]
    for one, (length, with_logprobs) in zip(rollouts, kinds, strict=True):
        for trajectory in one.trajectories:
            trajectory.response_ids = [7] * length
            trajectory.response_mask = mask = [at % 3 % 2 for at in range(length)]
            trajectory.response_logprobs = (
                [-0.5 * at * mask[at] for at in range(length)] if with_logprobs else None
            )
    started = time.time()
    for row in table_of(rollouts).to_pylist():
        assert started - 1 <= row["finished_at"] <= time.time() + 1
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
    write_tables_durably(path, [table], batch_metadata(RUN_ID))
    footer = read_footer(path)
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    assert max(group.num_rows for group in groups) <= 1024
    assert all(group.column(0).statistics.has_min_max for group in groups)
    for index in (0, 682, 2 * rows - 2):  # 682: its rows stand in two row groups
        [read] = read_groups(path, ["index"], np.array([index]))
        assert isinstance(read, pa.Table) and read["index"].to_pylist().count(index) == 3
