"""R3: the artifact has every key exactly once, sorted, in bounded memory."""

import random
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.store import merge
from rollstream.store.batch import DamagedFileError, batch_metadata, build_table, write_tables_durably
from rollstream.store.merge import merge_batches
from rollstream.store.paths import RunPaths
from rollstream.store.records import RecordCodec
from rollstream.store.validate import validate_run
from rollstream.trajectory import Rollout
from tests.unit.store.fabric import commit_all, failure, flip, keys_in, rollout
from tests.unit.store.fabric import merge as merge_run

RUN_ID = bytes(16)
codec = RecordCodec()


def write_batch(root: Path, number: int, rollouts: list[Rollout]) -> None:
    (root / "batches").mkdir(exist_ok=True)
    table = build_table([codec.decode_rollout(codec.encode(one).body) for one in rollouts])
    write_tables_durably(RunPaths(root).batch(number), [table], batch_metadata(RUN_ID))


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 1)), unique=True, max_size=40),
    st.integers(1, 9),
    st.sampled_from([1, 2000, 1 << 27]),
    st.randoms(use_true_random=False),
)
def test_merge_is_every_key_once_in_order(
    keys: list[tuple[int, int]], size: int, bucket_bytes: int, rng: random.Random
) -> None:
    rng.shuffle(keys)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        rollouts = [rollout(index, repeat, trajectories=1 + index % 3) for index, repeat in keys]
        for number in range(0, len(rollouts), size):
            write_batch(root, number, rollouts[number : number + size])
        rows = merge_batches(RunPaths(root), RUN_ID, bucket_bytes=bucket_bytes)
        expected = sorted((i, r, t) for i, r in keys for t in range(1 + i % 3))
        assert rows == len(expected)
        assert keys_in(root / "trajectories.parquet") == expected
        for row in pq.read_table(root / "trajectories.parquet").to_pylist():
            one = rollout(row["index"], row["repeat"], trajectories=1 + row["index"] % 3)
            assert row["response_ids"] == one.trajectories[row["trajectory"]].response_ids
        assert not (root / "merge.tmp").exists()


def test_long_rows_do_not_make_large_buckets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [rollout(index) for index in range(300)]
    for one in rows[200:]:
        one.final.response_ids = list(range(2000))
        one.final.response_mask = [1] * 2000
        one.final.response_logprobs = None
    random.Random(1).shuffle(rows)
    for number in range(6):
        write_batch(tmp_path, number, rows[number * 50 : number * 50 + 50])
    largest = 0
    write = merge.write_tables_durably

    def measured(path: Path, tables: Iterable[pa.Table], metadata: dict[str, str]) -> int:
        def all_tables() -> Iterator[pa.Table]:
            nonlocal largest
            for table in tables:
                largest = max(largest, table.nbytes)
                yield table

        return write(path, all_tables(), metadata)

    monkeypatch.setattr(merge, "write_tables_durably", measured)
    assert merge_batches(RunPaths(tmp_path), RUN_ID, bucket_bytes=50_000) == 300
    assert keys_in(tmp_path / "trajectories.parquet") == [(index, 0, 0) for index in range(300)]
    assert largest <= 2 * 50_000


def test_a_cancelled_merge_leaves_everything_as_it_was(tmp_path: Path) -> None:
    write_batch(tmp_path, 0, [rollout(1)])
    with pytest.raises(merge.MergeCancelledError):
        merge_batches(RunPaths(tmp_path), RUN_ID, cancelled=lambda: True)
    assert [path.name for path in tmp_path.iterdir()] == ["batches"]


def test_of_a_key_in_two_batches_the_first_counts(tmp_path: Path) -> None:
    write_batch(tmp_path, 0, [rollout(1, trajectories=2, reward=0.0), rollout(2)])
    write_batch(tmp_path, 1, [rollout(0), rollout(1, trajectories=3, reward=1.0)])
    assert merge_batches(RunPaths(tmp_path), RUN_ID) == 4
    assert keys_in(tmp_path / "trajectories.parquet") == [(0, 0, 0), (1, 0, 0), (1, 0, 1), (2, 0, 0)]
    assert pq.read_table(tmp_path / "trajectories.parquet")["reward"].to_pylist() == [0.5, 0.0, 0.0, 0.5]


def test_an_artifact_that_is_up_to_date_is_left_alone(tmp_path: Path) -> None:
    write_batch(tmp_path, 0, [rollout(1)])
    merge_batches(RunPaths(tmp_path), RUN_ID)
    before = (tmp_path / "trajectories.parquet").stat().st_mtime_ns
    assert merge_batches(RunPaths(tmp_path), RUN_ID) == 1
    assert (tmp_path / "trajectories.parquet").stat().st_mtime_ns == before
    write_batch(tmp_path, 1, [rollout(2)])
    assert merge_batches(RunPaths(tmp_path), RUN_ID) == 2


@pytest.mark.parametrize("at", [0.1, 0.5, 0.99])
def test_a_damaged_artifact_is_made_anew_of_intact_batches(tmp_path: Path, at: float) -> None:
    write_batch(tmp_path, 0, [rollout(index) for index in range(50)])
    merge_batches(RunPaths(tmp_path), RUN_ID)
    whole = pq.read_table(tmp_path / "trajectories.parquet")
    flip(tmp_path / "trajectories.parquet", at)
    assert merge_batches(RunPaths(tmp_path), RUN_ID) == 50
    assert pq.read_table(tmp_path / "trajectories.parquet").equals(whole)


def test_a_damaged_batch_is_named_and_the_old_artifact_stays(tmp_path: Path) -> None:
    for number in range(3):
        write_batch(tmp_path, number, [rollout(number * 100 + i) for i in range(50)])
    merge_batches(RunPaths(tmp_path), RUN_ID)
    batch = RunPaths(tmp_path).batch(1)
    flip(batch, 1 / 3)
    old = (tmp_path / "trajectories.parquet").read_bytes()
    assert merge_batches(RunPaths(tmp_path), RUN_ID) == 150  # nothing is new: the artifact has them all
    write_batch(tmp_path, 3, [rollout(1000)])
    with pytest.raises(DamagedFileError, match=r"batch_000001\.parquet"):
        merge_batches(RunPaths(tmp_path), RUN_ID)
    assert (tmp_path / "trajectories.parquet").read_bytes() == old
    assert not list(tmp_path.glob("*.tmp"))


async def test_validate_says_what_is_wrong(tmp_path: Path) -> None:
    records = [rollout(i, trajectories=1 + i % 2) for i in range(40)]
    await commit_all(tmp_path, [*records, failure(99)], size=10)
    paths = RunPaths(tmp_path)
    merge_run(tmp_path)
    result = validate_run(tmp_path)
    assert result.sound, result.problems
    assert (result.rollouts, result.rows, result.artifact_rows) == (40, 60, 60)
    for target in [*(paths.batch(number) for number in paths.batch_numbers()), paths.artifact]:
        good = target.read_bytes()
        detected = 0
        places = range(4, len(good), max(1, len(good) // 5))
        for at in places:
            broken = bytearray(good)
            broken[at] ^= 0x20
            target.write_bytes(broken)
            detected += not validate_run(tmp_path).sound
        target.write_bytes(good)
        assert detected == len(places), target.name
