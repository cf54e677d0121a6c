"""`trajectories.zip`: what was there goes in as it is, whole or not at all."""

import tracemalloc
import zipfile
from pathlib import Path

from rollstream.store.export.files import export_zip, zip_batches
from rollstream.store.export.run import export_run
from rollstream.store.paths import RunPaths
from tests.unit.store.test_export import finished


async def test_the_export_has_the_artifact_and_the_summary(tmp_path: Path) -> None:
    run = await finished(tmp_path / "run")
    done = export_run(run, "zip")
    assert (done.target, done.rows) == (run / "trajectories.zip", 6)
    with zipfile.ZipFile(done.target) as archive:
        assert archive.testzip() is None
        assert archive.namelist() == ["trajectories.parquet", "checkpoint.json"]
        assert {entry.compress_type for entry in archive.infolist()} == {zipfile.ZIP_STORED}
        for name in archive.namelist():
            assert archive.read(name) == (run / name).read_bytes()
    assert export_run(run, "zip").rows == 6  # again: replaced


async def test_batches_of_a_run_that_is_not_merged(tmp_path: Path) -> None:
    run = await finished(tmp_path / "run")
    paths = RunPaths(run)
    batches = [paths.batch(number) for number in paths.batch_numbers()]
    assert zip_batches(paths, run / "trajectories.zip") == len(batches) > 0
    with zipfile.ZipFile(run / "trajectories.zip") as archive:
        assert archive.namelist() == [*(f"batches/{path.name}" for path in batches), "checkpoint.json"]
        for path in batches:
            assert archive.read(f"batches/{path.name}") == path.read_bytes()


def test_memory_does_not_grow_with_the_artifact(tmp_path: Path) -> None:
    artifact = tmp_path / "a.parquet"
    with artifact.open("wb") as file:
        file.truncate(200 << 20)
    tracemalloc.start()
    try:
        export_zip(artifact, tmp_path / "t.zip", summary=tmp_path / "none")
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert (tmp_path / "t.zip").stat().st_size > 200 << 20
