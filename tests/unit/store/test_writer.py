"""R2, R3, R4: commits are durable, in order, whole, and survive damage elsewhere."""

import asyncio
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rollstream.errors import ConfigError, IdentityMismatchError, StorageError
from rollstream.store.journal import JournalFile, ScanReport, scan
from rollstream.store.merge import merge_batches
from rollstream.store.records import EncodedTurn, EncodingError, RecordCodec
from rollstream.store.run import Run
from rollstream.store.validate import repair_run, validate_run
from rollstream.store.writer import StoreWriter
from rollstream.trajectory import RolloutKey
from tests.support.until import PATIENCE_S
from tests.unit.store.fabric import commit_all, failure, flip, keys_on_disk, merge, open_dir, rollout, writing


async def test_commit_then_seal_keeps_every_value(tmp_path: Path) -> None:
    rollouts = [rollout(index, repeat, trajectories=1 + index % 3) for index in range(9) for repeat in (0, 1)]
    await commit_all(tmp_path, rollouts, size=7)
    assert not list((tmp_path / "journal").iterdir())
    rows = {
        (row["index"], row["repeat"], row["trajectory"]): row
        for path in (tmp_path / "batches").glob("*.parquet")
        for row in pq.read_table(path).to_pylist()
    }
    assert len(rows) == sum(len(one.trajectories) for one in rollouts)
    for one in rollouts:
        for number, trajectory in enumerate(one.trajectories):
            row = rows[one.index, one.repeat, number]
            assert row["prompt_ids"] == trajectory.prompt_ids
            assert row["response_ids"] == trajectory.response_ids
            assert row["response_mask"] == trajectory.response_mask
            assert row["response_logprobs"] == pytest.approx(trajectory.response_logprobs)
            assert row["policy_versions"] == [{"start": 0, "version": 0}]
            assert row["reward"] == 0.5
            assert row["ground_truth"] == f'{{"answer":{one.index}}}'


async def test_group_commit_keeps_the_order_of_commits(tmp_path: Path) -> None:
    order = list(range(500))
    random.Random(3).shuffle(order)
    with writing(tmp_path, save_batch_size=100_000) as (run, writer):
        resolved: list[int] = []

        async def commit(index: int) -> None:
            await writer.commit(rollout(index))
            resolved.append(index)

        await asyncio.gather(*(commit(index) for index in order))
        await writer.close(seal=False)
        run_id = run.manifest.run_id_bytes
    frames = list(scan(tmp_path / "journal" / "000000.rsj", run_id, ScanReport()))
    assert [frame.index for frame in frames] == order == resolved


async def test_batches_have_exactly_the_asked_rows(tmp_path: Path) -> None:
    await commit_all(tmp_path, [rollout(index) for index in range(25)], size=10)
    sizes = [pq.read_metadata(path).num_rows for path in sorted((tmp_path / "batches").glob("*.parquet"))]
    assert sizes == [10, 10, 5]


async def test_each_batch_is_told_once_it_counts(tmp_path: Path) -> None:
    told: list[int] = []
    with open_dir(tmp_path) as run:
        batches = run.state.batches
        writer = StoreWriter(
            run, save_batch_size=3, pull_timeout=60, on_sealed=lambda: told.append(len(batches))
        )
        writer.start()
        await asyncio.gather(*(writer.commit(rollout(index)) for index in range(10)))
        await writer.close()
    assert told == [1, 2, 3, 4]


async def test_idle_rollouts_are_sealed_after_pull_timeout(tmp_path: Path) -> None:
    with writing(tmp_path, save_batch_size=1000, pull_timeout=0.05) as (_, writer):
        await writer.commit(rollout(0))
        async with asyncio.timeout(PATIENCE_S):
            while not writer.saved_batches:
                await asyncio.sleep(0.01)
        await writer.close()
    assert keys_on_disk(tmp_path) == [(0, 0, 0)]


async def test_durable_when_said(tmp_path: Path) -> None:
    """What commit() returned for is in the journal already, whole, before any close."""
    with writing(tmp_path, save_batch_size=1000) as (run, writer):
        await writer.commit(rollout(4, trajectories=3))
        frames = list(scan(tmp_path / "journal" / "000000.rsj", run.manifest.run_id_bytes, ScanReport()))
        assert len(RecordCodec().decode_rollout(frames[0].body).trajectories) == 3
        await writer.close()


async def test_continue_after_a_torn_tail(tmp_path: Path) -> None:
    await commit_all(tmp_path, [rollout(0), rollout(1)], seal=False)
    journal = tmp_path / "journal" / "000000.rsj"
    journal.write_bytes(journal.read_bytes()[:-3])
    with open_dir(tmp_path) as run:
        assert (run.state.keys.done, run.state.damage) == (1, [])
        assert run.state.torn > 0
        assert [key.index for key in run.state.keys.owed([0, 1], retry_failed=False) if key.repeat == 0] == [
            1
        ]
    await commit_all(tmp_path, [rollout(1)])
    assert keys_on_disk(tmp_path) == [(0, 0, 0), (1, 0, 0)]


async def test_damage_in_a_journal_is_quarantined_and_owed_again(tmp_path: Path) -> None:
    await commit_all(tmp_path, [rollout(index) for index in range(3)], seal=False)
    journal = tmp_path / "journal" / "000000.rsj"
    data = flip(journal)
    with open_dir(tmp_path) as run:
        assert run.state.keys.done == 2
        assert "000000.rsj" in run.state.damage[0]
        assert "offset" in run.state.damage[0]
        assert not run.state.keys.is_done(1, 0)
    assert (tmp_path / "damaged" / "000000.rsj").read_bytes() == data
    await commit_all(tmp_path, [rollout(1)])
    assert keys_on_disk(tmp_path) == [(0, 0, 0), (1, 0, 0), (2, 0, 0)]


async def test_damaged_batch_is_quarantined_and_owed_again(tmp_path: Path) -> None:
    await commit_all(tmp_path, [rollout(index) for index in range(6)], size=3)
    batch = tmp_path / "batches" / "batch_000001.parquet"
    batch.write_bytes(batch.read_bytes()[:-20])
    with open_dir(tmp_path) as run:
        assert run.state.keys.done == 3
        assert "batch_000001.parquet" in run.state.damage[0]
    assert (tmp_path / "damaged" / "batch_000001.parquet").exists()


async def test_failures_are_recorded_and_a_later_success_wins(tmp_path: Path) -> None:
    with writing(tmp_path, save_batch_size=10) as (run, writer):
        await asyncio.gather(writer.commit(failure(0)), writer.commit(failure(1)), writer.commit(rollout(2)))
        await writer.close()
    with open_dir(tmp_path) as run:
        keys = run.state.keys
        assert (keys.done, keys.failed) == (1, 2)
        assert [key.index for key in keys.owed([0, 1, 2], retry_failed=True) if key.repeat == 0] == [0, 1]
    await commit_all(tmp_path, [rollout(0)])
    with open_dir(tmp_path) as run:
        assert (run.state.keys.done, run.state.keys.failed) == (2, 1)


async def test_a_loop_gives_streams_of_its_own(tmp_path: Path) -> None:
    rollouts = [rollout(at) for at in range(4)]
    length = len(rollouts[0].final.response_ids)
    given: list[Any] = [[0.5] * length, [0.5] * (length + 1), 7]
    for one, values in zip(rollouts, given, strict=False):
        one.final.extra["token_streams"] = {"entropy": values}
    with writing(tmp_path, save_batch_size=10) as (_, writer):
        results = await asyncio.gather(*map(writer.commit, rollouts), return_exceptions=True)
        await writer.close()
    assert [type(result) for result in results] == [type(None), EncodingError, EncodingError, type(None)]
    (table,) = Run.open(tmp_path).rows(["index"], streams=["loop.entropy"])
    assert table.to_pylist() == [
        {"index": 0, "stream.loop.entropy": given[0]},
        {"index": 3, "stream.loop.entropy": None},
    ]


async def test_what_cannot_be_stored_fails_alone(tmp_path: Path) -> None:
    bad = rollout(1)
    bad.final.response_ids = [2**40] * len(bad.final.response_mask)
    worse = rollout(3)
    worse.final.extra = {"what": object()}
    with writing(tmp_path, save_batch_size=10) as (_, writer):
        results = await asyncio.gather(
            *(writer.commit(one) for one in (rollout(0), bad, rollout(2), worse)), return_exceptions=True
        )
        await writer.close()
    assert [type(result) for result in results] == [type(None), EncodingError, type(None), EncodingError]
    assert keys_on_disk(tmp_path) == [(0, 0, 0), (2, 0, 0)]


async def test_another_identity_touches_nothing(tmp_path: Path) -> None:
    await commit_all(tmp_path, [rollout(0)], seal=False)
    before = {
        path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"
    }
    with pytest.raises(IdentityMismatchError, match=r"rollout\.temperature: None -> 0\.5") as caught:
        open_dir(tmp_path, **{"rollout.temperature": 0.5})
    assert caught.value.differences == [("rollout.temperature", None, 0.5)]
    after = {
        path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"
    }
    assert before == after


async def test_a_broken_writer_says_so_to_everyone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with writing(tmp_path, save_batch_size=10) as (run, writer):
        await writer.commit(rollout(0))

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("rollstream.store.journal.os.fdatasync", full)
        with pytest.raises(StorageError, match="No space left on device"):
            await writer.commit(rollout(1))
        monkeypatch.undo()
        with pytest.raises(StorageError, match="No space left"):
            await writer.failed
        with pytest.raises(StorageError, match="No space left"):
            await writer.commit(rollout(2))
        with pytest.raises(StorageError, match="No space left"):
            await writer.close()
    with open_dir(tmp_path) as run:
        assert (run.state.keys.done, run.state.damage, run.state.torn) == (1, [], 0)


async def test_a_run_that_holds_nothing_gives_way(tmp_path: Path) -> None:
    open_dir(tmp_path, **{"engine": "mistyped"}).close()
    await commit_all(tmp_path, [rollout(0)], **{"engine": "right"})
    with pytest.raises(IdentityMismatchError):
        open_dir(tmp_path, **{"engine": "mistyped"})


@pytest.mark.parametrize("where", ["append", "mark_done"])
async def test_an_unforeseen_error_in_the_writer_thread_reaches_everyone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError("no room")

    with writing(tmp_path, save_batch_size=10, pull_timeout=float("inf")) as (run, writer):
        await writer.commit(rollout(0))
        target = {"append": JournalFile, "mark_done": type(run.state.keys)}[where]
        monkeypatch.setattr(target, where, fail)
        async with asyncio.timeout(PATIENCE_S):
            results = await asyncio.gather(
                *(writer.commit(rollout(index)) for index in range(1, 5)), return_exceptions=True
            )
            assert all(isinstance(result, StorageError) for result in results), results
            with pytest.raises(StorageError, match="no room"):
                await writer.failed
            with pytest.raises(StorageError, match="no room"):
                await writer.close()
            with pytest.raises(StorageError):
                await writer.seal()
            with pytest.raises(StorageError):
                await writer.commit(rollout(9))
        monkeypatch.undo()
    with open_dir(tmp_path) as run:
        assert run.state.keys.is_done(0, 0)
        assert not run.state.damage


async def test_commit_after_close_is_refused(tmp_path: Path) -> None:
    with writing(tmp_path, save_batch_size=10) as (_, writer):
        await writer.close()
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(StorageError, match="closed"):
                await writer.commit(rollout(0))


async def test_a_seal_that_fails_is_never_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await commit_all(tmp_path, [rollout(index) for index in range(9)], seal=False)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for _ in range(2):
        with open_dir(tmp_path) as run:
            writer = StoreWriter(run, save_batch_size=4, pull_timeout=60)
            with monkeypatch.context() as patch:
                patch.setattr("rollstream.store.batch.write_tables_durably", full)
                writer.start()
                with pytest.raises(StorageError, match="No space left"):
                    await writer.close()
    await commit_all(tmp_path, [])
    assert len(keys_on_disk(tmp_path)) == 9


async def test_cancelled_closing_ends_only_when_the_threads_have(tmp_path: Path) -> None:
    others = set(threading.enumerate())  # those of stores that other tests had die
    with writing(tmp_path, save_batch_size=4) as (_, writer):
        await asyncio.gather(*(writer.commit(rollout(index)) for index in range(30)))
        closing = asyncio.create_task(writer.close())
        for _ in range(3):
            await asyncio.sleep(0)
            closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        left = set(threading.enumerate()) - others
        assert not [thread for thread in left if thread.name.startswith("store-")]


async def test_a_passing_read_error_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await commit_all(tmp_path, [rollout(index) for index in range(4)], size=2)

    def fail(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("rollstream.store.batch.pq.ParquetFile", fail)
        with pytest.raises(StorageError, match="Too many open files"):
            open_dir(tmp_path)
    with open_dir(tmp_path) as run:
        assert (run.state.keys.done, run.state.damage) == (4, [])


async def test_a_missing_batch_is_named_and_owed_again(tmp_path: Path) -> None:
    await commit_all(tmp_path, [rollout(index) for index in range(4)], size=2)
    (tmp_path / "batches" / "batch_000000.parquet").unlink()
    assert "batches/batch_000000.parquet is missing" in validate_run(tmp_path).problems
    with open_dir(tmp_path) as run:
        assert run.state.damage == ["batches/batch_000000.parquet is missing"]
        assert run.state.keys.done == 2
    await commit_all(tmp_path, [rollout(0), rollout(1)])
    assert validate_run(tmp_path).sound


async def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.tmp").mkdir()
    (tmp_path / "mine.tmp" / "precious").write_text("x")
    (tmp_path / "notes.tmp").write_text("y")
    await commit_all(tmp_path, [rollout(0)])
    assert (tmp_path / "mine.tmp" / "precious").read_text() == "x"
    assert (tmp_path / "notes.tmp").exists()


async def test_an_unfinished_checksum_line_spoils_only_itself(tmp_path: Path) -> None:
    await commit_all(tmp_path, [rollout(0)])
    sums = tmp_path / "batches" / "_SHA256SUMS"
    sums.write_bytes(sums.read_bytes() + b"0123456789abcdef")
    await commit_all(tmp_path, [rollout(1)])
    assert validate_run(tmp_path).sound


async def test_repair_quarantines_damage_and_restores_checksums(tmp_path: Path) -> None:
    await commit_all(tmp_path, [rollout(index) for index in range(6)], size=2)
    merge(tmp_path)
    batch = tmp_path / "batches" / "batch_000001.parquet"
    flip(batch, 0.25)
    assert not validate_run(tmp_path).sound
    assert any("batch_000001.parquet" in line for line in repair_run(tmp_path))
    with open_dir(tmp_path) as run:
        assert run.state.keys.done == 6  # the artifact has them
    merge(tmp_path)
    assert validate_run(tmp_path).sound
    (tmp_path / "batches" / "_SHA256SUMS").write_bytes(b"")
    assert not validate_run(tmp_path).sound
    repair_run(tmp_path)
    assert validate_run(tmp_path).sound


async def test_a_journal_damaged_before_sealing_is_quarantined(tmp_path: Path) -> None:
    with writing(tmp_path, save_batch_size=100) as (run, writer):
        for index in range(3):
            await writer.commit(rollout(index))
        journal = run.paths.journal(0)
        data = flip(journal)
        with pytest.raises(StorageError, match="changed under the run"):
            await writer.close()
    with open_dir(tmp_path) as run:
        assert run.state.keys.done == 2
        assert "000000.rsj" in run.state.damage[0]
    assert (tmp_path / "damaged" / "000000.rsj").read_bytes() == data


async def test_big_rollouts_close_a_journal_by_their_bytes(tmp_path: Path) -> None:
    with writing(tmp_path, save_batch_size=1000, segment_bytes=20_000) as (_, writer):
        for index in range(10):
            one = rollout(index)
            one.final.response_ids = [7] * 1000  # compresses to next to nothing
            one.final.response_mask = [1] * 1000
            one.final.response_logprobs = None
            await writer.commit(one)
        await writer.close()
    sizes = [pq.read_metadata(path).num_rows for path in sorted((tmp_path / "batches").glob("*.parquet"))]
    assert max(sizes) <= 4
    assert sum(sizes) == 10


class Recorder:
    """Records the system calls that decide what survives a crash, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        for name in ("fsync", "fdatasync"):
            real = getattr(os, name)

            def sync(fd: int, name: str = name, real: Callable[[int], None] = real) -> None:
                self.calls.append(f"{name} {Path(f'/proc/self/fd/{fd}').readlink().name}")
                real(fd)

            monkeypatch.setattr(os, name, sync)
        rename, unlink = Path.rename, Path.unlink

        def renaming(path: Path, target: Path) -> Path:
            self.calls.append(f"rename {path.name} {Path(target).name}")
            return rename(path, target)

        def unlinking(path: Path, missing_ok: bool = False) -> None:
            if path.exists():
                self.calls.append(f"unlink {path.name}")
            unlink(path, missing_ok)

        monkeypatch.setattr(Path, "rename", renaming)
        monkeypatch.setattr(Path, "unlink", unlinking)


async def test_order_of_syncs_renames_and_deletions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R2 after a power cut, not only after a kill: which call comes before which."""
    with open_dir(tmp_path) as run:
        writer = StoreWriter(run, save_batch_size=1, pull_timeout=60)
        recorder = Recorder(monkeypatch)
        writer.start()
        await writer.commit(rollout(0))
        before_seal = list(recorder.calls)
        await writer.close()
        merge_batches(run.paths, run.manifest.run_id_bytes)
    monkeypatch.undo()
    assert before_seal[:3] == ["fdatasync 000000.rsj", "fsync journal", "fdatasync 000000.rsj"]
    sealing = [call for call in recorder.calls[3:] if call != "unlink 0.arrow"]  # where the merge sorts
    assert sealing == [
        "fsync batch_000000.parquet.tmp",
        "fdatasync _SHA256SUMS",
        "rename batch_000000.parquet.tmp batch_000000.parquet",
        "fsync batches",
        "unlink 000000.rsj",
        "fsync journal",
        "fsync trajectories.parquet.tmp",
        "fdatasync trajectories.parquet.sha256",
        "rename trajectories.parquet.tmp trajectories.parquet",
        f"fsync {tmp_path.name}",
        "fsync trajectories.parquet.sha256.tmp",
        "rename trajectories.parquet.sha256.tmp trajectories.parquet.sha256",
        f"fsync {tmp_path.name}",
    ]


async def test_files_say_what_the_log_probs_are_of(tmp_path: Path) -> None:
    def said() -> list[bytes | None]:
        files = [*sorted(tmp_path.glob("batches/*.parquet")), tmp_path / "trajectories.parquet"]
        return [pq.read_metadata(file).metadata.get(b"rollstream.logprobs") for file in files]

    with open_dir(tmp_path) as run:
        writer = StoreWriter(run, save_batch_size=1, pull_timeout=60)
        writer.start()
        run.note_logprobs("processed")
        run.note_logprobs("raw")  # nothing is done yet: another engine may have been tried first
        writer.keep(EncodedTurn(RolloutKey(0, 0), 0, b""))
        await writer._at_rest()
        with pytest.raises(ConfigError):
            run.note_logprobs("processed")  # of which one rollout would have both kinds
        await writer.commit(rollout(0))
        await writer.commit(rollout(1))
        with pytest.raises(ConfigError):
            run.note_logprobs("processed")
        await writer.close()
        merge_batches(run.paths, run.manifest.run_id_bytes)
    assert said() == [b"raw", b"raw", b"raw"]
    (tmp_path / "batches" / "batch_000000.parquet").unlink()  # comes back from the artifact
    with open_dir(tmp_path) as run:
        run.note_logprobs("raw")
        with pytest.raises(ConfigError):
            run.note_logprobs("processed")
        assert run.manifest.logprobs == "raw"
    assert said() == [b"raw", b"raw", b"raw"]
