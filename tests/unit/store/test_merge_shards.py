"""Merging shards: the whole run comes out, or nothing and a reason."""

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from rollstream.errors import (
    ConfigError,
    DamageError,
    IdentityMismatchError,
    RunDirectoryError,
    StorageError,
)
from rollstream.store.export.files import read_rows
from rollstream.store.lock import RunLock
from rollstream.store.manifest import read_manifest, require_manifest, write_manifest
from rollstream.store.merge import MergeCancelledError, merge_batches
from rollstream.store.merge_shards import merge_shards
from rollstream.store.paths import RunPaths
from rollstream.store.run import Run
from rollstream.store.summary import read_status, write_checkpoint
from rollstream.store.validate import validate_run
from rollstream.trajectory import Failure, Rollout
from tests.support.processes import full_disk
from tests.unit.store.fabric import N, commit_all, failure, flip, merge, open_dir, rollout

Work = list[Rollout | Failure]


async def write_run(root: Path, work: Work, *, total: int | None = None, **identity: Any) -> Path:
    await commit_all(root, work, size=3, **identity)
    with open_dir(root, **identity) as run:
        write_checkpoint(run.paths, run.manifest, run.state, total=len(work) if total is None else total)
    return root


async def write_shards(folder: Path, work: Work, count: int) -> list[Path]:
    return [
        await write_run(
            folder / f"shard{number}",
            [one for one in work if one.index % count == number],
            **{"generation.shard": f"{number}/{count}"},
        )
        for number in range(count)
    ]


def work_of(rows: int) -> Work:
    return [rollout(i, r, trajectories=1 + (i + r) % 3) for i in range(rows) for r in range(N)]


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(3, 12), count=st.integers(1, 3), failed=st.sets(st.integers(0, 11)), seed=st.randoms()
)
def test_it_is_the_run_without_shards(
    tmp_path: Path, rows: int, count: int, failed: set[int], seed: Any
) -> None:
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    work = work_of(rows)
    work = [failure(one.index) if one.index in failed and one.repeat == 0 else one for one in work]

    async def write() -> list[Path]:
        await write_run(tmp_path / "whole", work)
        return await write_shards(tmp_path, work, count)

    roots = asyncio.run(write())
    seed.shuffle(roots)
    merged = merge_shards(roots, tmp_path / "out")
    whole, found = read_status(tmp_path / "whole"), read_status(tmp_path / "out")
    for name in ("total", "completed", "failed", "owed", "rows", "mean_reward"):
        assert getattr(found, name) == getattr(whole, name), name
    assert (merged.completed, merged.failed, merged.rows) == (whole.completed, whole.failed, whole.rows)
    result = validate_run(tmp_path / "out")
    assert (result.sound, result.notes) == (True, [])
    if whole.rows:
        manifest = read_manifest(tmp_path / "whole")
        assert manifest is not None
        merge_batches(RunPaths(tmp_path / "whole"), manifest.run_id_bytes)
        one, other = (list(read_rows(tmp_path / name / "trajectories.parquet")) for name in ("whole", "out"))
        assert all(row.pop("finished_at") for row in one + other)
        assert one == other
    by_key = sorted(Run.open(tmp_path / "out").failures(), key=lambda record: (record.index, record.repeat))
    assert by_key == sorted(Run.open(tmp_path / "whole").failures(), key=lambda one: (one.index, one.repeat))
    # The run's own command, without shards, opens it.
    open_dir(tmp_path / "out").close()
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "out", *(root.name for root in roots)}


async def test_the_configuration_names_the_whole_run(tmp_path: Path) -> None:
    roots = await write_shards(tmp_path, work_of(4), 2)
    for root in roots:
        write_manifest(
            root, msgspec.structs.replace(require_manifest(root), tools={"d": {"type": "function"}})
        )
    merge_shards(roots, tmp_path / "out")
    manifest = require_manifest(tmp_path / "out")
    assert manifest.tools == {"d": {"type": "function"}}
    assert "generation.shard" not in manifest.identity
    config = OmegaConf.load(tmp_path / "out" / "config.yaml")
    assert config["generation"]["shard"] is None
    assert config["trainer"]["default_local_dir"] == str(tmp_path / "out")
    assert config["a"] == 1


async def test_what_is_not_one_whole_run_is_refused(tmp_path: Path) -> None:
    work = work_of(6)
    one, two, three = await write_shards(tmp_path, work, 3)
    other = await write_run(tmp_path / "other", work[:2], **{"generation.shard": "2/3", "seed": 9})
    half = await write_run(tmp_path / "half", work[:2], **{"generation.shard": "1/2"})
    whole = await write_run(tmp_path / "whole", work)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    out = tmp_path / "out"
    cases: list[tuple[list[Path], Path, type[Exception], str]] = [
        ([one, three], out, ConfigError, "shards are missing: 1/3"),
        ([one, two, two], out, ConfigError, "is named twice"),
        ([one, one / ".." / "shard0", two], out, ConfigError, "is named twice"),
        ([one, two, half], out, ConfigError, "cut differently"),
        ([one, two, whole], out, ConfigError, "whole run, not a shard"),
        ([one, two, other, three], out, ConfigError, "are both shard 2/3"),
        ([one, two, other], out, IdentityMismatchError, "seed: None and 9"),
        ([one, two, tmp_path / "nothing"], out, RunDirectoryError, "no such folder"),
        ([one, two, tmp_path / "full"], out, RunDirectoryError, r"no run\.json"),
        ([one, two, three], tmp_path / "full", ConfigError, "exists"),
        ([one, two, three], one / "out", ConfigError, "is inside the run directory"),
        ([one, two, three], tmp_path / "none" / "out", ConfigError, "no folder"),
    ]
    for roots, output, error, message in cases:
        with pytest.raises(error, match=message):
            merge_shards(roots, output)
        assert not (tmp_path / "out").exists()
    (tmp_path / "full" / "x").unlink()
    assert merge_shards([three, one, two], tmp_path / "full").completed == 12


async def test_a_shard_without_batches_gives_its_artifact(tmp_path: Path) -> None:
    roots = await write_shards(tmp_path, work_of(6), 2)
    merge(roots[1], **{"generation.shard": "1/2"})
    shutil.rmtree(roots[1] / "batches")
    assert merge_shards(roots, tmp_path / "out").completed == 12
    assert validate_run(tmp_path / "out").sound


async def test_an_unfinished_shard_is_named(tmp_path: Path) -> None:
    roots = await write_shards(tmp_path, work_of(4), 2)
    shutil.rmtree(roots[1])
    await write_run(roots[1], [rollout(1)], total=4, **{"generation.shard": "1/2"})
    with pytest.raises(RunDirectoryError, match=r"shard1: 1 of 4 rollouts done; the shard is unfinished"):
        merge_shards(roots, tmp_path / "out")
    shutil.rmtree(roots[1])
    await commit_all(roots[1], work_of(1), seal=False, **{"generation.shard": "1/2"})
    with pytest.raises(RunDirectoryError, match=r"2 of \? rollouts done"):
        merge_shards(roots, tmp_path / "out")


async def test_rows_in_two_shards_are_refused(tmp_path: Path) -> None:
    roots = await write_shards(tmp_path, work_of(4), 2)
    shutil.rmtree(roots[1])
    await write_run(roots[1], [rollout(1), rollout(2)], **{"generation.shard": "1/2"})
    with pytest.raises(DamageError, match=r"1 prompt rows .*stand in another shard, too: \[2\]"):
        merge_shards(roots, tmp_path / "out")


async def test_a_shard_in_use_is_waited_for_by_a_person(tmp_path: Path) -> None:
    roots = await write_shards(tmp_path, work_of(4), 2)
    lock = RunLock(roots[1] / "run.lock")
    lock.acquire()
    with pytest.raises(RunDirectoryError, match="shard1 is being written by another run"):
        merge_shards(roots, tmp_path / "out")
    lock.release()
    # Another merge into the same place is let alone.
    aside = tmp_path / ".out.merge.tmp"
    aside.mkdir()
    (aside / "theirs").touch()
    lock = RunLock(aside / "run.lock")
    lock.acquire()
    with pytest.raises(RunDirectoryError, match=r"out\.merge\.tmp is being written"):
        merge_shards(roots, tmp_path / "out")
    assert (aside / "theirs").exists()
    lock.release()
    assert merge_shards(roots, tmp_path / "out").completed == 8


@pytest.mark.parametrize("at", [0.1, 0.35, 0.6, 0.85])
async def test_damage_in_a_shard_is_found(tmp_path: Path, at: float) -> None:
    roots = await write_shards(tmp_path, work_of(4), 2)
    flip(RunPaths(roots[0]).batch(0), at)
    with pytest.raises(DamageError, match=r"shard0.*batch_000000"):
        merge_shards(roots, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shard0", "shard1"]


async def test_cancelled_it_leaves_nothing(tmp_path: Path) -> None:
    roots = await write_shards(tmp_path, work_of(6), 2)
    for patience in range(0, 60, 5):
        asked = iter([False] * patience + [True] * 1000)
        try:
            merge_shards(roots, tmp_path / "out", cancelled=asked.__next__)
        except MergeCancelledError:
            assert sorted(path.name for path in tmp_path.iterdir()) == ["shard0", "shard1"]
        else:
            break
    assert patience > 4
    assert validate_run(tmp_path / "out").sound


_KILLED = """
import sys
from pathlib import Path
from rollstream.store import merge_shards
calls = 0
def cancelled():
    global calls
    calls += 1
    if calls == int(sys.argv[1]):
        print("there", flush=True)
        sys.stdin.read()  # until killed
    return False
merge_shards.merge_shards(
    [Path(word) for word in sys.argv[3:]], Path(sys.argv[2]), cancelled=cancelled
)
"""


@pytest.mark.parametrize("calls", [1, 4])
def test_killed_it_can_be_run_again(tmp_path: Path, calls: int) -> None:
    roots = asyncio.run(write_shards(tmp_path, work_of(6), 2))
    words = [sys.executable, "-c", _KILLED, str(calls), str(tmp_path / "out"), *map(str, roots)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        process.kill()
    assert not (tmp_path / "out").exists()
    assert (tmp_path / ".out.merge.tmp").exists()
    assert merge_shards(roots, tmp_path / "out").completed == 12
    assert validate_run(tmp_path / "out").sound
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "shard0", "shard1"]


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    roots = asyncio.run(write_shards(tmp_path, work_of(40), 2))
    with full_disk(12_000), pytest.raises(StorageError, match="File too large"):
        merge_shards(roots, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shard0", "shard1"]
