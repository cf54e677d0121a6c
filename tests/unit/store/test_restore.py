"""Rollouts are generated again only where no intact copy is left; stale exports."""

import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import orjson
import pyarrow.parquet as pq
import pytest

from rollstream.errors import DamageError, StorageError
from rollstream.store.export.files import note_export, zip_batches
from rollstream.store.export.run import export_run
from rollstream.store.lock import locked
from rollstream.store.merge import merge_batches
from rollstream.store.paths import RunPaths
from rollstream.store.run import Run
from rollstream.store.summary import read_status, write_checkpoint
from rollstream.store.validate import repair_run, validate_run
from tests.unit.store.fabric import commit_all, failure, flip, keys_in, merge, merged_run, open_dir, rollout

ROLLOUTS = 12
KEYS = [(index, 0, number) for index in range(ROLLOUTS) for number in range(2)]


async def merged(root: Path) -> RunPaths:
    """A finished, merged run of four batches with three rollouts of two trajectories each."""
    work = [rollout(index, trajectories=2) for index in range(ROLLOUTS)]
    await merged_run(root, work, size=6)
    assert len(RunPaths(root).batch_numbers()) == 4
    return RunPaths(root)


def lose_folder(paths: RunPaths) -> None:
    shutil.rmtree(paths.batches)


def lose_files(paths: RunPaths) -> None:
    for number in paths.batch_numbers():
        paths.batch(number).unlink()


def lose_one_and_damage_one(paths: RunPaths) -> None:
    paths.batch(0).unlink()
    flip(paths.batch(2), 0.999)


@pytest.mark.parametrize("lose", [lose_folder, lose_files, lose_one_and_damage_one])
async def test_the_artifact_counts_where_batches_are_gone(
    tmp_path: Path, lose: Callable[[RunPaths], None]
) -> None:
    paths = await merged(tmp_path)
    before = paths.artifact.read_bytes()
    lose(paths)
    status, result = read_status(tmp_path), validate_run(tmp_path)
    assert (status.completed, status.rows, status.owed) == (ROLLOUTS, len(KEYS), 0)
    assert status.artifact_rows == (12 if lose is lose_one_and_damage_one else 24)
    assert (result.rollouts, result.rows) == (ROLLOUTS, len(KEYS))
    assert any("stand in trajectories.parquet alone" in note for note in result.notes)
    assert result.sound == (lose is not lose_one_and_damage_one)
    assert Run.open(tmp_path).find(1).row["trajectory"] == 1
    with open_dir(tmp_path) as run:
        assert (run.state.keys.done, run.state.rows) == (ROLLOUTS, len(KEYS))
        assert any("taken from trajectories.parquet" in line for line in run.state.restored)
        merge_batches(run.paths, run.manifest.run_id_bytes)
    assert keys_in(paths.artifact) == KEYS
    if lose is not lose_one_and_damage_one:
        assert paths.artifact.read_bytes() == before
    assert validate_run(tmp_path).sound
    assert read_status(tmp_path).artifact_rows == 0


async def test_a_run_is_held_against_its_checkpoint(tmp_path: Path) -> None:
    paths = await merged(tmp_path)
    shutil.rmtree(paths.batches)
    for file in tmp_path.glob("trajectories.parquet*"):
        file.unlink()
    [line] = read_status(tmp_path).damage
    assert (str(ROLLOUTS) in line, validate_run(tmp_path).problems) == (True, [line])
    with open_dir(tmp_path) as run:
        assert (run.state.damage, run.state.keys.done) == ([line], 0)
        write_checkpoint(run.paths, run.manifest, run.state, total=ROLLOUTS)
    assert validate_run(tmp_path).sound


async def test_fewer_rows_never_overwrite_the_artifact(tmp_path: Path) -> None:
    paths = await merged(tmp_path)
    with open_dir(tmp_path) as run:
        paths.batch(1).unlink()
        flip(paths.batches / "_SHA256SUMS", 0.01)
        with pytest.raises(StorageError, match="holds 24 trajectories, and the batches only 18"):
            merge_batches(run.paths, run.manifest.run_id_bytes)
    assert keys_in(paths.artifact) == KEYS


async def test_exports_take_from_the_artifact(tmp_path: Path) -> None:
    paths = await merged(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "unfinished")
    lose_folder(paths)
    assert export_run(tmp_path / "run", "jsonl").rows == len(KEYS)
    half = RunPaths(tmp_path / "unfinished")
    half.batch(1).unlink()
    with open_dir(half.root) as run:
        write_checkpoint(run.paths, run.manifest, run.state, total=100)
    done = export_run(half.root, "parquet", tmp_path / "copy.parquet")
    assert (done.finished, keys_in(tmp_path / "copy.parquet")) == (False, KEYS)


@pytest.mark.parametrize("name", ["batches/batch_000000.parquet", "trajectories.parquet"])
async def test_row_groups_that_can_be_read_survive_damage_in_others(tmp_path: Path, name: str) -> None:
    work = [rollout(index, trajectories=3) for index in range(1000)]
    await merged_run(tmp_path, work, size=10_000)
    paths = RunPaths(tmp_path)
    kept = [paths.artifact, paths.batch(0)]
    kept.remove(tmp_path / name)
    kept[0].unlink()
    group = pq.ParquetFile(tmp_path / name).metadata.row_group(1)
    at = group.column(5).data_page_offset + 40
    data = bytearray((tmp_path / name).read_bytes())
    data[at] ^= 0xFF
    (tmp_path / name).write_bytes(data)
    repaired = repair_run(tmp_path)
    assert any("is damaged" in line for line in repaired), repaired
    with open_dir(tmp_path) as run:
        # The second of three row groups is gone, with the rollouts that it shared with the others.
        assert 1000 - 1024 // 3 - 3 <= run.state.keys.done <= 1000 - 1024 // 3
    result = validate_run(tmp_path)
    assert (result.sound, result.rows) == (True, 3 * result.rollouts)
    assert (tmp_path / "damaged" / Path(name).name).exists()


def merge_alone(root: Path) -> None:
    """Merges, and keeps the artifact as the only batch (`generation.keep_batches=false`)."""
    with open_dir(root) as run:
        run.merge(keep_batches=False)
        write_checkpoint(run.paths, run.manifest, run.state, total=run.state.keys.done)


async def test_without_its_batches_a_run_is_one_file_under_two_names(tmp_path: Path) -> None:
    paths = await merged(tmp_path)
    merge_alone(tmp_path)
    [number] = paths.batch_numbers()
    assert paths.batch(number).samefile(paths.artifact)
    result, status = validate_run(tmp_path), read_status(tmp_path)
    assert (result.sound, result.notes, result.rows) == (True, [], len(KEYS))
    assert (status.stale, status.artifact_rows, status.damage) == ([], 0, [])
    await commit_all(tmp_path, [rollout(ROLLOUTS), failure(99)])
    assert read_status(tmp_path).stale == ["trajectories.parquet"]
    merge_alone(tmp_path)
    assert keys_in(paths.artifact) == [*KEYS, (ROLLOUTS, 0, 0)]
    assert len(paths.batch_numbers()) == 1 and validate_run(tmp_path).sound


@pytest.mark.parametrize("name", ["parquet", "zip"])
async def test_a_damaged_artifact_that_is_the_only_copy_is_handed_on_to_nobody(
    tmp_path: Path, name: str
) -> None:
    paths = await merged(tmp_path / "run")
    merge_alone(paths.root)
    flip(paths.artifact, 0.1)  # in a page that no key stands in
    with pytest.raises(DamageError):
        export_run(paths.root, name, tmp_path / "copy")
    with pytest.raises(DamageError):
        zip_batches(paths, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


async def test_what_may_not_be_written_is_exported_from_intact_batches(tmp_path: Path) -> None:
    paths = await merged(tmp_path / "run")
    whole = pq.read_table(paths.artifact)
    flip(paths.artifact, 0.1)
    with locked(paths.root):
        export_run(paths.root, "parquet", tmp_path / "copy.parquet")
    assert pq.read_table(tmp_path / "copy.parquet").equals(whole)


async def test_a_file_system_without_hard_links_gets_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = await merged(tmp_path)

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    lose_folder(paths)
    open_dir(tmp_path).close()
    assert not paths.batch(0).samefile(paths.artifact)
    assert validate_run(tmp_path).sound


async def test_a_zip_of_batches_is_stale_once_there_are_more(tmp_path: Path) -> None:
    await commit_all(tmp_path, [rollout(0)])
    paths, target = RunPaths(tmp_path), tmp_path / "trajectories.zip"
    zip_batches(paths, target)
    note_export(paths.artifact, target)
    assert read_status(tmp_path).stale == []
    await commit_all(tmp_path, [rollout(1)])
    assert read_status(tmp_path).stale == ["trajectories.zip"]


async def copy_of_another_run(paths: RunPaths, target: Path) -> None:
    other = paths.root.parent / "other"
    await merged_run(other, [rollout(index) for index in range(100, 103)], size=6)
    shutil.copy(RunPaths(other).batch(0), target)


async def copy_of_a_batch(paths: RunPaths, target: Path) -> None:
    shutil.copy(paths.batch(0), target)


@pytest.mark.parametrize("copied", [copy_of_another_run, copy_of_a_batch])
@pytest.mark.parametrize("number", [1, 4], ids=["over a batch", "beside them"])
@pytest.mark.parametrize("repairs", [False, True], ids=["run again", "repair"])
async def test_a_file_copied_among_the_batches_adds_nothing(
    tmp_path: Path, copied: Callable[[RunPaths, Path], Awaitable[None]], number: int, repairs: bool
) -> None:
    paths = await merged(tmp_path / "run")
    await copied(paths, paths.batch(number))
    assert not validate_run(paths.root).sound
    assert read_status(paths.root).rows == len(KEYS)
    if repairs:
        assert repair_run(paths.root)
        assert validate_run(paths.root).sound
        assert orjson.loads((paths.root / "checkpoint.json").read_bytes())["completed"] == ROLLOUTS
    merge(paths.root)
    assert keys_in(paths.artifact) == KEYS
    assert validate_run(paths.root).sound
    assert (read_status(paths.root).completed, paths.damaged_files() != []) == (ROLLOUTS, True)


async def test_what_a_copied_file_overwrote_is_owed_again_where_no_artifact_has_it(tmp_path: Path) -> None:
    paths = await merged(tmp_path / "run")
    paths.artifact.unlink()
    await copy_of_another_run(paths, paths.batch(1))
    with open_dir(paths.root) as run:
        assert run.state.keys.done == ROLLOUTS - 3
        merge_batches(run.paths, run.manifest.run_id_bytes)
        write_checkpoint(run.paths, run.manifest, run.state, total=ROLLOUTS)
    assert len(keys_in(paths.artifact)) == len(KEYS) - 6
    assert validate_run(paths.root).sound
