"""Exports: what is done is in them, finished or not, and files of the run are never overwritten."""

import os
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import orjson
import pytest

from rollstream import plugins
from rollstream.errors import ConfigError, DamageError, RunDirectoryError, StorageError
from rollstream.store.export.files import read_rows
from rollstream.store.export.format import file_name
from rollstream.store.export.run import export_run
from rollstream.store.lock import RunLock
from rollstream.store.manifest import read_manifest
from rollstream.store.merge import merge_batches
from rollstream.store.paths import RunPaths
from rollstream.store.run import Run
from rollstream.store.summary import read_status, write_checkpoint
from rollstream.store.validate import validate_run
from tests.support.processes import full_disk
from tests.unit.store.export.artifacts import rollouts, trajectory
from tests.unit.store.fabric import commit_all, failure, flip, keys_in, open_dir, rollout


def set_total(root: Path, total: int) -> None:
    with open_dir(root) as run:
        write_checkpoint(run.paths, run.manifest, run.state, total=total)


def content(root: Path) -> dict[str, bytes]:
    files = (path for path in root.rglob("*") if path.is_file() and path.name != "run.lock")
    return {str(path): path.read_bytes() for path in files}


async def finished(root: Path) -> Path:
    await commit_all(root, [*(rollout(i, trajectories=2) for i in range(3)), failure(9)], size=2)
    set_total(root, 4)
    return root


async def unfinished(root: Path) -> Path:
    """Two rollouts in a batch, two in the journal, of ten."""
    await commit_all(root, [rollout(5), rollout(1)], size=2)
    await commit_all(root, [rollout(4), rollout(0)], seal=False)
    set_total(root, 10)
    assert RunPaths(root).journal_numbers()
    return root


async def test_a_finished_run_in_both_formats(tmp_path: Path) -> None:
    run = await finished(tmp_path / "run")
    done = export_run(run, "jsonl")
    assert (done.target, done.rows, done.finished) == (run / "trajectories.jsonl", 6, True)
    lines = [orjson.loads(line) for line in done.target.read_bytes().splitlines()]
    assert lines == orjson.loads(orjson.dumps(list(read_rows(run / "trajectories.parquet"))))
    assert lines[2]["messages"] == [{"role": "user", "content": "q1"}]
    assert export_run(run, "jsonl").rows == 6  # its own name may be written again
    copy = export_run(run, "parquet", tmp_path / "copy.parquet")
    assert keys_in(copy.target) == keys_in(run / "trajectories.parquet")
    assert validate_run(run).sound


@pytest.mark.parametrize("name", ["parquet", "jsonl"])
async def test_an_unfinished_run_with_what_is_in_the_journal(tmp_path: Path, name: str) -> None:
    run = await unfinished(tmp_path / "run")
    before = content(run)
    for output in (None, run / f"trajectories.{name}"):
        with pytest.raises(RunDirectoryError, match=r"4 of 10 rollouts done; the run is unfinished"):
            export_run(run, name, output)
    done = export_run(run, name, tmp_path / "part")
    assert (done.rows, done.finished, done.status.completed, done.status.total) == (4, False, 4, 10)
    if name == "parquet":
        assert [key[0] for key in keys_in(done.target)] == [0, 1, 4, 5]
    else:
        rows = [orjson.loads(line) for line in done.target.read_bytes().splitlines()]
        assert [row["index"] for row in rows] == [0, 1, 4, 5]
    assert content(run) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["part", "run"]


async def test_everything_done_but_not_sealed_is_unfinished(tmp_path: Path) -> None:
    await commit_all(tmp_path / "run", [rollout(0)], seal=False)
    set_total(tmp_path / "run", 1)
    with pytest.raises(RunDirectoryError, match="1 of 1 rollouts done; the run is unfinished"):
        export_run(tmp_path / "run", "parquet")


async def test_files_of_the_run_are_never_overwritten(tmp_path: Path) -> None:
    run = await finished(tmp_path / "run")
    before = content(run)
    (tmp_path / "link").symlink_to(run / "run.json")
    outputs = [
        "run/run.json",
        "run/batches/batch_000000.parquet",
        "run/new.jsonl",
        "link",
        "run",
        "run/../run/x",
    ]
    for output in [*outputs, "run/trajectories.parquet"]:
        with pytest.raises(ConfigError, match=r"only trajectories\.jsonl"):
            export_run(run, "jsonl", tmp_path / output, force=True)
    assert content(run) == before


async def test_another_file_only_with_force(tmp_path: Path) -> None:
    run, target = await finished(tmp_path / "run"), tmp_path / "mine"
    target.write_text("precious")
    with pytest.raises(ConfigError, match="exists; --force"):
        export_run(run, "jsonl", target)
    assert target.read_text() == "precious"
    assert export_run(run, "jsonl", target, force=True).rows == 6
    with pytest.raises(ConfigError, match="is a folder"):
        export_run(run, "jsonl", tmp_path)
    with pytest.raises(ConfigError, match="no folder"):
        export_run(run, "jsonl", tmp_path / "none" / "x")
    os.mkfifo(tmp_path / "pipe")
    for odd in ("/dev/null", tmp_path / "pipe"):  # renaming over it would take it away
        with pytest.raises(ConfigError, match="is no regular file"):
            export_run(run, "jsonl", Path(odd), force=True)


@pytest.mark.parametrize("name", plugins.names("rollstream.exports"))
async def test_a_full_disk_leaves_what_was_there_and_a_kill_leaves_nothing_for_good(
    tmp_path: Path, name: str
) -> None:
    if name == "dataproto":
        pytest.importorskip("tensordict")
    run, options = tmp_path / "run", {"pad_token_id": 0} if name == "dataproto" else {}
    made = [trajectory(turns=[[4]], reward=reward) for reward in (0.0, 1.0)]
    for number, one in enumerate(made):
        answer = {"role": "assistant", "content": os.urandom(9000).hex() + str(number)}
        one.messages = [{"role": "user", "content": "q"}, answer]
    await commit_all(run, rollouts(*made))
    set_total(run, 2)
    merge_batches(RunPaths(run), run_id_of(run))
    for target in (run / file_name(name), tmp_path / file_name(name)):
        left = [target.with_name(f".{target.name}.{number}.tmp") for number in (1, 2)]
        if target.parent == run:
            left[0].mkdir()
            left[1].write_text("half")
        export_run(run, name, target, options=options)
        assert not any(path.exists() for path in left)
        if (name, target.parent) == ("parquet", run):
            continue  # the artifact itself
        before = content(tmp_path)
        with full_disk(5000), pytest.raises(StorageError, match=re.escape(f"cannot write {target}")):
            export_run(run, name, target, force=True, options=options)
        assert content(tmp_path) == before


async def test_without_anything_done(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"no run\.json"):
        export_run(tmp_path, "jsonl")
    open_dir(tmp_path / "empty").close()
    with pytest.raises(RunDirectoryError, match="no finished rollout"):
        export_run(tmp_path / "empty", "jsonl")


@pytest.mark.parametrize("make", [finished, unfinished])
@pytest.mark.parametrize("why", ["being written by another run", "cannot lock"])
async def test_a_run_that_is_written_or_read_only_is_exported_elsewhere(
    tmp_path: Path, why: str, make: Callable[[Path], Awaitable[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, lock = await make(tmp_path / "run"), RunLock(tmp_path / "run" / "run.lock")
    rows = export_run(run, "jsonl", tmp_path / "before").rows
    (run / "trajectories.parquet").unlink(missing_ok=True)
    before = content(run)
    if "written" in why:
        lock.acquire()
    else:  # as root, a mode keeps nobody from writing
        (run / "run.lock").unlink()
        (run / "run.lock").mkdir()
        monkeypatch.setattr(os, "access", lambda path, mode: False)
    try:
        with pytest.raises(RunDirectoryError, match=why):
            export_run(run, "jsonl")
        assert export_run(run, "jsonl", tmp_path / "x").rows == rows
    finally:
        lock.release()
    assert content(run) == before
    assert (tmp_path / "x").read_bytes() == (tmp_path / "before").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["before", "run", "x"]


async def test_an_export_says_of_what_it_was_made_and_when_it_is_older(tmp_path: Path) -> None:
    run = await finished(tmp_path / "run")
    for name in ("jsonl", "zip", "hf", "sft"):
        file = export_run(run, name, options={"best": 1} if name == "sft" else {}).target.name
        noted = orjson.loads((run / "exports.json").read_bytes())[file]
        assert noted == (run / "trajectories.parquet.sha256").read_text().split()[-2]
    assert read_status(run).stale == []
    await commit_all(run, [rollout(9)])
    assert read_status(run).stale == [
        "trajectories.parquet"
    ]  # the exports are of the artifact that lies beside them
    export_run(run, "parquet")
    stale = ["trajectories.jsonl", "trajectories.zip", "trajectories_hf", "trajectories_sft.jsonl"]
    assert read_status(run).stale == stale
    assert [note.split()[0] for note in validate_run(run).notes] == stale
    for damaged in ("[1]", "{", '{"trajectories.jsonl": 3}'):  # nothing says of what they were made
        (run / "exports.json").write_text(damaged)
        assert read_status(run).stale == stale


@pytest.mark.parametrize("at", [0.1, 0.2, 0.4, 0.6, 0.8, 0.99])
async def test_a_damaged_batch_is_an_error_or_shows_what_was_written(tmp_path: Path, at: float) -> None:
    run = await finished(tmp_path / "run")
    whole = {index: Run.open(run).find(index).row for index in range(2)}
    export_run(run, "jsonl", tmp_path / "whole")
    RunPaths(run).artifact.unlink()
    flip(RunPaths(run).batch(0), at)
    for index in range(2):
        try:
            assert Run.open(run).find(index).row == whole[index]
        except DamageError as error:
            assert "batch_000000" in str(error)
    try:
        export_run(run, "jsonl", tmp_path / "x")
    except DamageError as error:
        assert "batch_000000" in str(error)
        assert not (tmp_path / "x").exists()
    else:  # a byte that holds no data: of a header's padding, of a statistic
        assert (tmp_path / "x").read_bytes() == (tmp_path / "whole").read_bytes()


async def test_a_damaged_journal_is_an_error(tmp_path: Path) -> None:
    run = await unfinished(tmp_path / "run")
    journal = RunPaths(run).journal(RunPaths(run).journal_numbers()[-1])
    flip(journal, 0.4)
    with pytest.raises(DamageError, match=journal.name):
        export_run(run, "jsonl", tmp_path / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def run_id_of(root: Path) -> bytes:
    manifest = read_manifest(root)
    assert manifest is not None
    return manifest.run_id_bytes
