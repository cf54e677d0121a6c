"""Reading a run directory at any moment of its life: every durable rollout once, whole, and nothing else."""

import asyncio
import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from rollstream.errors import DamageError, RunDirectoryError
from rollstream.store.batch import KEY_COLUMNS, SCHEMA, forget_old_digests, write_tables_durably
from rollstream.store.columns import RunColumns
from rollstream.store.merge import merge_batches
from rollstream.store.run import Run
from rollstream.store.scores import SCORED_COLUMNS, sidecar_table
from rollstream.store.summary import read_status
from rollstream.trajectory import Rollout
from tests.unit.store.fabric import N, commit_all, failure, merge, open_dir, rollout, writing

Key = tuple[int, int]


def rollout_of(key: Key) -> Rollout:
    return rollout(*key, trajectories=1 + sum(key) % 3, reward=key[0] / 8)


def expected(key: Key) -> list[tuple[Any, ...]]:
    return [(number, one.response_ids, one.reward) for number, one in enumerate(rollout_of(key).trajectories)]


def rows_of(run: Run) -> dict[Key, list[tuple[Any, ...]]]:
    rows = defaultdict[Key, list[tuple[Any, ...]]](list)
    columns = ["index", "repeat", "trajectory", "response_ids", "reward"]
    for table in run.rows(columns):
        assert table.column_names == columns
        keys = set[Key]()
        for row in table.to_pylist():
            keys.add((row["index"], row["repeat"]))
            rows[row["index"], row["repeat"]].append((row["trajectory"], row["response_ids"], row["reward"]))
        assert all(rows[key][0][0] == 0 for key in keys), "a rollout is whole in one table"
    return dict(rows)


@contextlib.contextmanager
def looking(look: Callable[[], None], every: int = 1) -> Iterator[None]:
    """Calls `look` before whatever makes a change durable or visible, or some of it."""
    count, errors = itertools.count(), list[Exception]()
    with pytest.MonkeyPatch.context() as patch:

        def watch(holder: Any, name: str) -> None:
            original = getattr(holder, name)

            def watched(*arguments: Any, **named: Any) -> Any:
                if next(count) % every == 0 and not errors:
                    try:
                        look()
                    except Exception as error:  # raised here it would pass for a full disk
                        errors.append(error)
                return original(*arguments, **named)

            patch.setattr(holder, name, watched)

        for name in ("fsync", "fdatasync", "truncate", "link"):
            watch(os, name)
        for name in ("rename", "unlink", "hardlink_to"):
            watch(Path, name)
        yield
    if errors:
        raise errors[0]


def write_scores(run: Run, name: str, rewards: dict[Key, float]) -> None:
    (run.root / "scores").mkdir(exist_ok=True)
    rows = [row for table in run.rows(SCORED_COLUMNS) for row in table.to_pylist()]
    scored = [
        row | {"reward": rewards[key], "reward_extra": "{}"}
        for row in sorted(rows, key=lambda row: [row[column] for column in KEY_COLUMNS])
        if (key := (row["index"], row["repeat"])) in rewards
    ]
    names = [*SCORED_COLUMNS, "reward", "reward_extra"]
    table = pa.Table.from_pylist(scored, schema=pa.schema([SCHEMA.field(column) for column in names]))
    write_tables_durably(sidecar_table(run.root, name), [table], {}, table.schema)
    forget_old_digests(sidecar_table(run.root, name))


class RunLife(RuleBasedStateMachine):
    """A run that is written, sealed, merged, killed, copied, scored and damaged; readers look on all the while."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()  # threads seal while others write
        self.folder = tempfile.TemporaryDirectory()
        self.roots = (Path(self.folder.name) / str(number) for number in itertools.count())
        self.root = next(self.roots)
        self.fresh = itertools.count(1)
        self.done: set[Key] = set()
        self.pending: set[Key] = set()
        self.failed: set[Key] = set()
        self.scores: dict[Key, float] = {}
        self._commit([(0, 0)], seal=False)
        self._begin_to_follow()

    def teardown(self) -> None:
        self.folder.cleanup()

    def _begin_to_follow(self) -> None:
        self.followed = RunColumns([Run.open(self.root)])
        self.followed.refresh()

    def _commit(self, keys: list[Key], *, seal: bool, failures: int = 0) -> None:
        self.pending = set(keys)
        failed = [failure(next(self.fresh)) for _ in range(failures)]
        asyncio.run(commit_all(self.root, [*map(rollout_of, keys), *failed], size=8, seal=seal))
        self.done |= self.pending
        self.failed |= {(one.index, one.repeat) for one in failed}
        self.pending = set()

    def _look(self) -> None:
        with self.lock:
            self._look_now()

    def _look_now(self) -> None:
        run = Run.open(self.root)
        rows = rows_of(run)
        assert self.done <= {*rows} <= self.done | self.pending
        assert rows == {key: expected(key) for key in rows}
        assert run.damage == []
        state = run.state()
        assert len(rows) <= state.keys.done <= len(self.done | self.pending)
        self.followed.refresh()
        followed = {*zip(self.followed["index"].tolist(), self.followed["repeat"].tolist(), strict=True)}
        assert {*rows} <= followed <= self.done | self.pending
        assert self.followed.rows == sum(len(expected(key)) for key in followed)
        assert state.damage == self.followed.damage == []

    def _keys(self, count: int) -> list[Key]:
        return [divmod(next(self.fresh), N) for _ in range(count)]

    @rule(count=st.integers(1, 12), seal=st.booleans(), failures=st.integers(0, 2))
    def append(self, count: int, seal: bool, failures: int) -> None:
        with looking(self._look, every=3):
            self._commit(self._keys(count), seal=seal, failures=failures)

    @rule()
    def seal(self) -> None:
        with looking(self._look):
            self._commit([], seal=True)

    @rule(keep_batches=st.booleans())
    def merge(self, keep_batches: bool) -> None:
        with looking(self._look):
            self._commit([], seal=True)
            with open_dir(self.root) as run:
                run.merge(keep_batches=keep_batches)

    @rule(count=st.integers(1, 5), at=st.integers(0, 30), merges=st.booleans())
    def kill(self, count: int, at: int, merges: bool) -> None:
        """Goes on with the folder as it was before a sync, a rename or a deletion."""
        before, target, seen = set(self.done), next(self.roots), itertools.count()

        def copy() -> None:
            if next(seen) == at:
                shutil.copytree(self.root, target)

        keys = self._keys(count)
        with looking(copy):
            self._commit(keys, seal=True)
            with open_dir(self.root) as run:
                run.merge(keep_batches=not merges)
        if target.exists():
            self.root = target
            self.done, self.pending = before, set(keys)
            self._look_anew()
            with open_dir(target) as run:
                assert before <= {*rows_of(Run.open(target))}
                assert run.state.damage == []
            self.done, self.pending = {*rows_of(Run.open(target))}, set()

    @rule()
    def copy(self) -> None:
        target = next(self.roots)
        shutil.copytree(self.root, target)
        self.root = target
        self._look_anew()

    def _look_anew(self) -> None:
        self._begin_to_follow()
        self._look()

    @rule(every=st.integers(1, 3))
    def score(self, every: int) -> None:
        self.scores = {key: -1.0 - key[0] for key in sorted(self.done)[::every]}
        write_scores(Run.open(self.root), "other", self.scores)
        scored = rows_of(Run.open(self.root, "other"))
        rewards = {key: {reward for *_, reward in rows} for key, rows in scored.items()}
        assert rewards == {key: {self.scores.get(key)} for key in self.done}

    @rule(number=st.integers(0, 1000), share=st.floats(0, 1, exclude_max=True))
    def damage(self, number: int, share: float) -> None:
        """A flipped byte is named, and costs what lies in it; the run itself goes on without it."""
        target = next(self.roots)
        shutil.copytree(self.root, target)
        files = sorted({*target.glob("journal/*"), *target.rglob("*.parquet")} - {*target.glob("scores/*")})
        path = files[number % len(files)]
        content = bytearray(path.read_bytes())
        end = len(content)
        if (
            path.suffix == ".parquet"
        ):  # page checksums do not cover the footer; the file's own does (`validate`)
            end -= 8 + int.from_bytes(content[-8:-4], "little")
        content[int(share * end)] ^= 0xFF
        path.write_bytes(content)
        run = Run.open(target)
        rows = rows_of(run)
        assert {*rows} <= self.done
        assert rows == {key: expected(key) for key in rows}
        assert run.damage or {*rows} == self.done
        others = set[Key]()
        for one in files:
            if one != path and one.parent.name == "batches":
                others |= {key for key, _ in _keys_in(one)}
        assert others <= {*rows}
        shutil.rmtree(target)

    @invariant()
    def nothing_is_lost(self) -> None:
        self._look()
        run = Run.open(self.root)
        key = max(self.done)
        found = run.find(*key)
        assert (found.siblings, found.row["response_ids"]) == (len(expected(key)), expected(key)[-1][1])
        assert {(one.index, one.repeat) for one in run.failures()} == {
            (one.index, one.repeat) for one in self.followed.failures()
        }
        with pytest.raises(RunDirectoryError):
            run.find(10**6)


def _keys_in(path: Path) -> list[tuple[Key, int]]:
    import pyarrow.parquet as pq

    return [((row["index"], row["repeat"]), row["trajectory"]) for row in pq.read_table(path).to_pylist()]


def test_a_run_is_read_as_it_is_at_every_moment_of_its_life() -> None:
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    run_state_machine_as_test(
        RunLife,
        settings=settings(max_examples=8, stateful_step_count=6, deadline=None, suppress_health_check=checks),
    )


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


async def test_a_look_changes_nothing(tmp_path: Path) -> None:
    """A run on a read-only mount, or another user's, can be looked at."""
    root = tmp_path / "run"
    await commit_all(root, [*(rollout(index) for index in range(6)), failure(9)], size=3)
    merge(root)
    await commit_all(root, [rollout(7)], seal=False)
    looks = [
        "status RUN",
        "status --failed RUN",
        "show RUN",
        "show RUN 3 --tokens",
        "show RUN 7",
        "validate RUN",
    ]
    done = await asyncio.to_thread(
        lambda: subprocess.run(
            [sys.executable, "-c", CHANGES_NOTHING, str(root), *looks],
            capture_output=True,
            text=True,
            timeout=120,
        )
    )
    assert (done.returncode, done.stderr) == (0, "")


async def test_what_is_durable_is_found_while_another_thread_writes(tmp_path: Path) -> None:
    root, durable, ended = tmp_path / "run", 0, threading.Event()

    def look() -> None:
        columns = RunColumns([Run.open(root)])
        while not ended.is_set():
            before = durable
            status = read_status(root)
            assert before <= status.completed == status.rows <= durable + 1
            assert (status.damage, status.artifact_rows) == ([], 0)
            columns.refresh()
            assert before <= columns.rows <= durable + 1
            if before:
                found = Run.open(root).find((before - 1) // N, (before - 1) % N)
                assert found.row["messages"] == [{"role": "user", "content": f"q{(before - 1) // N}"}]

    with writing(root, save_batch_size=3) as (_, writer):
        looks = asyncio.create_task(asyncio.to_thread(look))
        for number in range(200):
            await writer.commit(rollout(number // N, number % N))
            durable += 1
            if looks.done():
                break
        ended.set()
        await looks
        await writer.close()
    assert read_status(root).saved_batches > 10


async def test_one_file_stands_for_another_that_is_damaged(tmp_path: Path) -> None:
    root = tmp_path / "run"
    await commit_all(root, [rollout(index) for index in (3, 4)])
    with open_dir(root) as run:
        merge_batches(run.paths, run.manifest.run_id_bytes)
    paths = run.paths
    for file in (paths.artifact, paths.batch(0)):
        assert Run.open(root).find(4).source == str(file.relative_to(root))
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DamageError):
        Run.open(root).find(4)


async def test_a_file_of_another_run_says_nothing_of_this_one(tmp_path: Path) -> None:
    for name in ("one", "other"):
        await commit_all(tmp_path / name, [rollout(0, reward=float(name == "one"))])
        merge(tmp_path / name)
    for name in ("trajectories.parquet", "batches/batch_000007.parquet"):
        shutil.copy(tmp_path / "other" / "trajectories.parquet", tmp_path / "one" / name)
    run = Run.open(tmp_path / "one")
    assert (run.find(0).row["reward"], run.find(0).source) == (1.0, "batches/batch_000000.parquet")
    assert len(run.state().damage) == 2
