"""`trajectories.zip`: a run's trajectories and its summary in one file, to be taken elsewhere."""

import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from rollstream.store.export.files import replacing
from rollstream.store.merge import MergeCancelledError
from rollstream.store.paths import RunPaths

_CHUNK = 1 << 20
"""Bytes copied at a time."""


def export_zip(
    artifact: Path, target: Path, *, summary: Path, cancelled: Callable[[], bool] = lambda: False
) -> None:
    """Writes a merged artifact and `checkpoint.json`.

    Args:
        artifact: the merged artifact.
        target: the file to write; replaced at once when it is whole.
        summary: `checkpoint.json`; left out where it is not there.
        cancelled: asked now and then.

    Raises:
        StorageError: it cannot be written.
        MergeCancelledError: cancelled; `target` is as it was.
    """
    _write([(artifact, "trajectories.parquet"), (summary, "checkpoint.json")], target, artifact, cancelled)


def zip_batches(paths: RunPaths, target: Path, cancelled: Callable[[], bool] = lambda: False) -> int:
    """Writes the sealed batches of a run that is not merged, and `checkpoint.json`; returns how many batches.

    Raises as `export_zip`.
    """
    batches = [paths.batch(number) for number in paths.batch_numbers()]
    files = [(path, f"batches/{path.name}") for path in batches]
    files.append((paths.root / "checkpoint.json", "checkpoint.json"))
    _write(files, target, paths.artifact, cancelled)
    return len(batches)


def _write(
    files: Sequence[tuple[Path, str]], target: Path, artifact: Path, cancelled: Callable[[], bool]
) -> None:
    # Stored: Parquet is compressed already, and what is stored can be read where it is.
    with (
        replacing(target, artifact) as temporary,
        zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED, strict_timestamps=False) as archive,
    ):
        for path, name in files:
            if not path.exists():
                continue
            entry = zipfile.ZipInfo.from_file(path, name, strict_timestamps=False)
            with path.open("rb") as source, archive.open(entry, "w") as sink:
                while chunk := source.read(_CHUNK):
                    if cancelled():
                        raise MergeCancelledError
                    sink.write(chunk)
