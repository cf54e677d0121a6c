"""The exports in a run directory: their names, of which artifact each was made, and the plain ones (jsonl, zip).

`exports.json` beside them says by file name of which artifact it was made (its checksum), so that an export from before
the run went on (more data, failed rollouts tried again) is not taken for one of the artifact that lies beside it.
"""

import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from rollstream.errors import StorageError
from rollstream.store.batch import DamagedFileError, read_tables, recorded_digests, require_intact
from rollstream.store.journal import write_file_durably
from rollstream.store.merge import MergeCancelledError, source_digest, until
from rollstream.store.paths import RunPaths
from rollstream.untrusted import open_regular, read_regular

JSON_COLUMNS = ("messages", "reward_extra", "ground_truth", "extra")
"""Columns that hold JSON text."""

_CHUNK = 1 << 20
"""Bytes copied at a time."""


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A file to write that becomes `target` when the block ends well.

    Raises `StorageError` when it cannot be written; an older `target` stays.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # a link of this name would lead elsewhere
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(target)
    except OSError as error:
        raise StorageError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def note_export(artifact: Path, *targets: Path) -> None:
    """Notes that these files were made of `artifact`, if they stand beside it in a run directory.

    Raises `StorageError`: it cannot be noted; the files stay.
    """
    root = targets[0].parent
    if root.resolve() == artifact.parent.resolve() and (root / "run.json").exists():
        noted = {name: digest for name, digest in _noted(root).items() if (root / name).exists()}
        noted |= dict.fromkeys((target.name for target in targets), _digest(artifact))
        path = root / "exports.json"
        try:
            write_file_durably(path, orjson.dumps(noted, option=orjson.OPT_INDENT_2) + b"\n")
        except OSError as error:
            raise StorageError(f"{targets[0]} is written, but not {path}: {error.strerror}") from error


def stale_exports(root: Path) -> list[str]:
    """Names of the exports in a run directory that were not made of the artifact that is there."""
    artifact = root / "trajectories.parquet"
    noted, current = _noted(root), _digest(artifact)
    names = sorted(path.name for path in root.glob("trajectories*"))
    return [name for name in names if not name.startswith(artifact.name) and noted.get(name) != current]


def _digest(artifact: Path) -> str:
    """Of the artifact; of the batches where a run is not merged."""
    if not artifact.exists():
        return source_digest(RunPaths(artifact.parent))
    return " ".join(sorted(recorded_digests(artifact).get(artifact.name, ())))


def _noted(root: Path) -> dict[str, Any]:
    try:
        noted = orjson.loads(read_regular(root / "exports.json"))
    except (OSError, ValueError):
        return {}
    return noted if isinstance(noted, dict) else {}


def read_rows(path: Path, cancelled: Callable[[], bool] = lambda: False) -> Iterator[dict[str, Any]]:
    """Trajectories of an artifact or batch as dicts, JSON columns decoded.

    Raises:
        DamageError: its bytes are not what was written.
        StorageError: it cannot be read right now.
        MergeCancelledError: `cancelled`, asked now and then, said so.
    """
    for table in until(read_tables(path), cancelled):
        for row in table.to_pylist():
            yield decode_row(row, path)


def decode_row(row: dict[str, Any], path: Path) -> dict[str, Any]:
    """A row with its JSON columns decoded. Raises `DamageError` naming `path`."""
    return row | {key: load_json(row[key], path) for key in JSON_COLUMNS if key in row}


def load_json(text: str, path: Path) -> Any:
    """A cell of a JSON column. Raises `DamageError` naming `path`."""
    try:
        return orjson.loads(text)
    except ValueError as error:
        raise DamagedFileError(path, f"{path.name} is damaged: {error}") from error


def export_lines(
    artifact: Path,
    target: Path,
    line_of: Callable[[dict[str, Any]], Any] = lambda row: row,
    cancelled: Callable[[], bool] = lambda: False,
) -> int:
    """Writes `target` (by a temporary name), a JSON value for each row; returns its lines.

    Raises:
        DamageError: the artifact is damaged.
        StorageError: the disk is full, or `target` cannot be written.
        MergeCancelledError: `cancelled`, asked now and then, said so. An older `target` stays.
    """
    lines = 0
    with replacing(target) as temporary, temporary.open("wb") as file:
        for row in read_rows(artifact, cancelled):
            file.write(orjson.dumps(line_of(row), option=orjson.OPT_APPEND_NEWLINE))
            lines += 1
    return lines


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
    _write_zip({"trajectories.parquet": artifact, "checkpoint.json": summary}, target, cancelled)


def zip_batches(paths: RunPaths, target: Path, cancelled: Callable[[], bool] = lambda: False) -> int:
    """Writes the sealed batches of a run that is not merged, and `checkpoint.json`; returns how many batches.

    Raises as `export_zip`, and `DamageError` where one does not match its checksum.
    """
    batches = [paths.batch(number) for number in paths.batch_numbers()]
    for batch in batches:
        require_intact(batch)
    files = {f"batches/{path.name}": path for path in batches}
    _write_zip({**files, "checkpoint.json": paths.root / "checkpoint.json"}, target, cancelled)
    return len(batches)


def _write_zip(files: Mapping[str, Path], target: Path, cancelled: Callable[[], bool]) -> None:
    # Stored: Parquet is compressed already, and what is stored can be read where it is.
    with (
        replacing(target) as temporary,
        zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED, strict_timestamps=False) as archive,
    ):
        for name, path in files.items():
            if not path.exists():
                continue
            entry = zipfile.ZipInfo.from_file(path, name, strict_timestamps=False)
            with open_regular(path) as source, archive.open(entry, "w") as sink:
                while chunk := source.read(_CHUNK):
                    if cancelled():
                        raise MergeCancelledError
                    sink.write(chunk)
