"""`generation.resume=extend`: what was done stays with its prompt row."""

import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest

from rollstream.errors import DamageError, IdentityMismatchError
from rollstream.store.extend import extend_run, finish_extend, rollouts_leaving
from rollstream.store.find import find_trajectory
from rollstream.store.journal import encode_file_header, encode_frame
from rollstream.store.manifest import DATASET_IDENTITY
from rollstream.store.run_dir import lock_run
from rollstream.store.scores import (
    ScoredRollout,
    ScoreFacts,
    ScorePaths,
    activate,
    active_name,
    encode_scores,
    score_folder,
    seal_scores,
)
from tests.unit.store.fabric import commit_all, failure, manifest, merge, open_dir, rollout

ROWS = f"{DATASET_IDENTITY}.fingerprint"


def extend(root: Path, keys: Sequence[str], **identity: object) -> None:
    lock = lock_run(root)
    try:
        finish_extend(root)
        extend_run(root, manifest(**{ROWS: "".join(keys), **identity}), lambda: keys, "a: 2\n")
    finally:
        lock.release()


async def start(root: Path, keys: str, failed: Sequence[int] = ()) -> None:
    done = [
        rollout(index, repeat, key=key)
        for index, key in enumerate(keys)
        for repeat in (0, 1)
        if index not in failed
    ]
    failures = [failure(index, key=keys[index]) for index in failed]
    await commit_all(root, [*done, *failures], size=3, seal=False, **{ROWS: keys})


def state(root: Path, keys: str) -> tuple[dict[int, str], int]:
    """Prompt key by index of what is done, and how many rows failed."""
    with open_dir(root, **{ROWS: keys}) as run:
        found: dict[int, str] = {}
        for path in (root / "batches").glob("*.parquet"):
            table = pq.read_table(path)
            assert table["index"].to_pylist() == sorted(table["index"].to_pylist())
            for index, key, answer in zip(
                *(table[name].to_pylist() for name in ("index", "prompt_key", "ground_truth")), strict=True
            ):
                assert found.setdefault(index, key) == key
                del answer
        return found, run.state.keys.failed


async def test_appended_rows_rewrite_nothing(tmp_path: Path) -> None:
    await start(tmp_path, "abc")
    extend(tmp_path, "abcd")
    assert state(tmp_path, "abcd") == ({0: "a", 1: "b", 2: "c"}, 0)
    assert not (tmp_path / "removed").exists()


async def test_reordered_rows_keep_their_rollouts(tmp_path: Path) -> None:
    await start(tmp_path, "abcd", failed=[3])
    extend(tmp_path, "dxcba")
    assert state(tmp_path, "dxcba") == ({4: "a", 3: "b", 2: "c"}, 1)
    with open_dir(tmp_path, **{ROWS: "dxcba"}) as run:
        assert not run.state.keys.is_done(0, 0) and run.state.keys.failed
        owed = list(run.state.keys.owed(range(5), retry_failed=False))
        assert [(key.index, key.repeat) for key in owed] == [(0, 1), (1, 0), (1, 1)]


async def test_equal_rows_are_matched_in_order(tmp_path: Path) -> None:
    await start(tmp_path, "aab")
    extend(tmp_path, "baa")
    assert state(tmp_path, "baa") == ({0: "b", 1: "a", 2: "a"}, 0)


async def test_rows_that_are_gone_come_back_with_their_rollouts(tmp_path: Path) -> None:
    """Whatever the run is extended to, nothing is lost: it is in the run or in `removed/`."""
    await start(tmp_path, "abca")
    assert [rollouts_leaving(tmp_path, keys) for keys in ("acbad", "cb", "x")] == [0, 4, 8]
    extend(tmp_path, "cb")
    assert state(tmp_path, "cb") == ({0: "c", 1: "b"}, 0)
    assert removed(tmp_path) == ["a", "a"]
    extend(tmp_path, "xab")
    assert state(tmp_path, "xab") == ({1: "a", 2: "b"}, 0)
    assert removed(tmp_path) == ["a", "c"]
    extend(tmp_path, "aabcx")
    assert state(tmp_path, "aabcx") == ({0: "a", 1: "a", 2: "b", 3: "c"}, 0)
    assert removed(tmp_path) == []
    with open_dir(tmp_path, **{ROWS: "aabcx"}) as run:
        assert run.state.rows == run.state.keys.done == 8


def removed(root: Path) -> list[str]:
    """Prompt keys of the rows in `removed/`, each of both repeats."""
    rows = {
        (row["index"], row["prompt_key"])
        for path in (root / "removed").glob("*.parquet")
        for row in pq.read_table(path, columns=["index", "prompt_key"]).to_pylist()
    }
    return sorted(key for _, key in rows)


async def test_an_artifact_is_extended_when_its_batches_are_gone(tmp_path: Path) -> None:
    await start(tmp_path, "abc")
    await commit_all(tmp_path, [], **{ROWS: "abc"})
    merge(tmp_path, **{ROWS: "abc"})
    shutil.rmtree(tmp_path / "batches")
    extend(tmp_path, "cxa")
    assert state(tmp_path, "cxa") == ({0: "c", 2: "a"}, 0)
    assert removed(tmp_path) == ["b"]
    assert not (tmp_path / "trajectories.parquet").exists()  # it had the old positions


async def test_another_difference_is_refused(tmp_path: Path) -> None:
    await start(tmp_path, "abc")
    with pytest.raises(IdentityMismatchError, match="temperature"):
        extend(tmp_path, "abcd", temperature=2.0)
    assert state(tmp_path, "abc")[0] == {0: "a", 1: "b", 2: "c"}


@pytest.mark.parametrize("crash_at", range(1, 40))
async def test_a_crash_at_any_change_of_folders_is_finished_by_the_next_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash_at: int
) -> None:
    await start(tmp_path, "abcd", failed=[3])
    changes = 0

    class Crash(BaseException):
        pass

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def change(*arguments: Any, **named: Any) -> Any:
            nonlocal changes
            changes += 1
            if changes == crash_at:
                raise Crash
            return real(*arguments, **named)

        return change

    for name in ("rename", "unlink", "rmdir", "mkdir"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    with contextlib.suppress(Crash):
        extend(tmp_path, "dcba")
    monkeypatch.undo()
    extend(tmp_path, "dcba")
    assert state(tmp_path, "dcba") == ({3: "a", 2: "b", 1: "c"}, 1)
    assert not (tmp_path / "extend.ready").exists()


async def test_rows_not_selected_any_more_leave_the_run(tmp_path: Path) -> None:
    await start(tmp_path, "abc")
    lock = lock_run(tmp_path)
    keys = ["a", None, "c"]
    extend_run(tmp_path, manifest(**{ROWS: "abc'"}), lambda: keys, "a: 2\n")
    lock.release()
    assert state(tmp_path, "abc'") == ({0: "a", 2: "c"}, 0)


@pytest.mark.parametrize("share", [0.25, 0.5])
async def test_a_damaged_batch_is_quarantined(tmp_path: Path, share: float) -> None:
    """In a key column, the opening sees it; elsewhere the rewriting does, and asks for another go."""
    await start(tmp_path, "abc")
    batch = tmp_path / "batches" / "batch_000000.parquet"
    data = bytearray(batch.read_bytes())
    middle = int(len(data) * share)
    data[middle : middle + 60] = bytes(byte ^ 0x55 for byte in data[middle : middle + 60])
    batch.write_bytes(data)
    with contextlib.suppress(DamageError):
        extend(tmp_path, "cba")
    extend(tmp_path, "cba")
    assert (tmp_path / "damaged" / batch.name).exists()
    with open_dir(tmp_path, **{ROWS: "cba"}) as run:
        assert run.state.keys.done == 3


async def test_scores_go_with_their_prompt_rows(tmp_path: Path) -> None:
    await start(tmp_path, "abc")
    paths = ScorePaths(score_folder(tmp_path), "mine")
    paths.facts.parent.mkdir()
    with open_dir(tmp_path, **{ROWS: "abc"}) as run:
        facts = ScoreFacts(id="0" * 32, run_id=run.manifest.run_id, reward="r", digest="d", created="")
    paths.facts.write_bytes(msgspec.json.encode(facts))
    frames = []
    for index, repeat in product(range(3), (0, 1)):
        finished = find_trajectory(tmp_path, index, repeat).row["finished_at"]
        scored = ScoredRollout(finished, [(float(10 * index + repeat), "{}")])
        frames.append(encode_frame(index, repeat, 1, encode_scores(scored)))
    paths.journal.write_bytes(encode_file_header(bytes(16)) + b"".join(frames))
    assert len(list(seal_scores(paths, facts))) == 6
    activate(tmp_path, "mine")
    extend(tmp_path, "cxa")
    found = {index: find_trajectory(tmp_path, index, 1).row["reward"] for index in (0, 2)}
    assert found == {0: 21.0, 2: 1.0} and active_name(tmp_path) == "mine"
    extend(tmp_path, "acx")
    assert find_trajectory(tmp_path, 1, 0).row["reward"] == 20.0
