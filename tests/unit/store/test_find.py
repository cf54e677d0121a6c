"""Looking at a run: while it is written, without writing anything, and when files are not what they should be."""

import asyncio
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rollstream.errors import DamageError, RunDirectoryError
from rollstream.store.find import find_trajectory
from rollstream.store.paths import RunPaths
from rollstream.store.summary import read_status
from tests.unit.store.fabric import N, commit_all, failure, merge, rollout, writing

CHANGES_NOTHING = """
import os, sys
from rollstream.cli import main

root, *commands = sys.argv[1:]

def watch(event, arguments):
    path = os.fsdecode(arguments[0]) if arguments and isinstance(arguments[0], (str, bytes)) else ""
    if path.startswith(root) and (
        event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.truncate", "os.chmod")
        or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND))
    ):
        raise SystemExit(f"{event} {arguments}")

sys.addaudithook(watch)
for command in commands:
    assert main(command.replace("RUN", root).split()) == 0, command
"""


def test_a_look_changes_nothing(tmp_path: Path) -> None:
    """A run on a read-only mount, or another user's, can be looked at."""
    root = tmp_path / "run"

    async def write() -> None:
        await commit_all(root, [*(rollout(index) for index in range(6)), failure(9)], size=3)
        merge(root)
        with writing(root, save_batch_size=100) as (_, writer):
            await writer.commit(rollout(7))
            await writer.close(seal=False)

    asyncio.run(write())
    commands = [
        "status RUN",
        "status --failed RUN",
        "show RUN",
        "show RUN 3 --tokens",
        "show RUN 7",
        "validate RUN",
    ]
    done = subprocess.run(
        [sys.executable, "-c", CHANGES_NOTHING, str(root), *commands],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")


async def test_what_is_durable_is_found_while_the_run_is_written(tmp_path: Path) -> None:
    root, durable, ended = tmp_path / "run", 0, threading.Event()

    def look() -> int:
        looks = 0
        while not ended.is_set() or not looks:
            before = durable
            status = read_status(root)
            assert before <= status.completed == status.rows <= durable + 1
            assert (status.damage, status.artifact_rows) == ([], 0)
            if before:
                found = find_trajectory(root, (before - 1) // N, (before - 1) % N)
                assert found.row["messages"] == [{"role": "user", "content": f"q{(before - 1) // N}"}]
            looks += 1
        return looks

    with writing(root, save_batch_size=3) as (_, writer):
        looking = asyncio.create_task(asyncio.to_thread(look))
        for number in range(200):
            await writer.commit(rollout(number // N, number % N))
            durable += 1
            if looking.done():
                break
        ended.set()
        await looking
        await writer.close()
    assert read_status(root).saved_batches > 10


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


async def test_a_rollout_is_found_wherever_it_is(tmp_path: Path) -> None:
    root = tmp_path / "run"
    paths = RunPaths(root)
    await commit_all(root, [rollout(index, trajectories=2) for index in (3, 4)])
    assert find_trajectory(root, 4).source == "batches/batch_000000.parquet"
    merge(root)
    assert (find_trajectory(root, 4).source, find_trajectory(root, 4).siblings) == ("trajectories.parquet", 2)
    with writing(root, save_batch_size=100) as (_, writer):
        await writer.commit(rollout(1))
        await writer.close(seal=False)
    assert find_trajectory(root, 1).source == "journal/000001.rsj"
    first = find_trajectory(root, None)
    assert (first.row["index"], first.row["trajectory"], first.row["is_snapshot"]) == (3, 1, False)
    assert find_trajectory(root, 3, 0, 0).row["is_snapshot"]
    for index, repeat in ((5, 0), (4, 1), (1, 1)):
        with pytest.raises(RunDirectoryError, match="not done yet"):
            find_trajectory(root, index, repeat)
    # A damaged file is passed over where another one has the rollout.
    cut(paths.artifact)
    assert find_trajectory(root, 4).source == "batches/batch_000000.parquet"
    cut(paths.batch(0))
    with pytest.raises(
        DamageError, match=r"trajectories\.parquet, batches/batch_000000\.parquet cannot be read"
    ):
        find_trajectory(root, 4)
    assert find_trajectory(root, 1).source == "journal/000001.rsj"


async def test_a_file_of_another_run_says_nothing_of_this_one(tmp_path: Path) -> None:
    for name in ("one", "other"):
        await commit_all(tmp_path / name, [rollout(0, reward=float(name == "one"))])
        merge(tmp_path / name)
    shutil.copy(tmp_path / "other" / "trajectories.parquet", tmp_path / "one" / "trajectories.parquet")
    found = find_trajectory(tmp_path / "one", 0)
    assert (found.row["reward"], found.source) == (1.0, "batches/batch_000000.parquet")
