"""The exports in a run directory: their names, and of which artifact each was made.

`exports.json` beside them says the artifact's checksum by file name, so that an export from before the run
went on (more data, failed rollouts tried again) is not taken for one of the artifact that lies beside it.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson

from rollstream.errors import StorageError
from rollstream.store.batch import recorded_digests
from rollstream.store.journal import write_file_durably
from rollstream.store.merge import source_digest
from rollstream.store.paths import RunPaths

FILE_NAMES = {
    "parquet": "trajectories.parquet",
    "jsonl": "trajectories.jsonl",
    "dataproto": "trajectories.pkl",
    "hf": "trajectories_hf",
    "zip": "trajectories.zip",
}
"""What an export is named in the run directory, by format. That of `hf` is a folder."""


@contextmanager
def replacing(target: Path, artifact: Path) -> Iterator[Path]:
    """A file to write that becomes `target`, made of `artifact`, when the block ends well.

    Raises `StorageError` when it cannot be written; an older `target` stays.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(target)
        note_export(artifact, target)
    except OSError as error:
        raise StorageError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def note_export(artifact: Path, *targets: Path) -> None:
    """Notes that these files were made of `artifact`, if they stand beside it in a run directory."""
    root = targets[0].parent
    if root.resolve() == artifact.parent.resolve() and (root / "run.json").exists():
        noted = {name: digest for name, digest in _noted(root).items() if (root / name).exists()}
        noted |= dict.fromkeys((target.name for target in targets), _digest(artifact))
        write_file_durably(root / "exports.json", orjson.dumps(noted, option=orjson.OPT_INDENT_2) + b"\n")


def stale_exports(root: Path) -> list[str]:
    """Names of the exports in a run directory that were not made of the artifact that is there."""
    names = [Path(name) for name in FILE_NAMES.values() if name != FILE_NAMES["parquet"]]
    there = {path.name for one in names for path in root.glob(f"{one.stem}*") if _is_export(path, one)}
    noted, current = _noted(root), _digest(root / FILE_NAMES["parquet"])
    return [name for name in sorted(there) if noted.get(name) != current]


def _is_export(path: Path, name: Path) -> bool:
    """Whether a file has this name, or is one of several of a DataProto."""
    return (
        path.suffix == name.suffix
        and re.fullmatch(r"(-\d+-of-\d+)?", path.stem[len(name.stem) :]) is not None
    )


def _digest(artifact: Path) -> str:
    """Of the artifact; of the batches where a run is not merged."""
    if not artifact.exists():
        return source_digest(RunPaths(artifact.parent))
    return " ".join(sorted(recorded_digests(artifact).get(artifact.name, ())))


def _noted(root: Path) -> dict[str, str]:
    try:
        noted = orjson.loads((root / "exports.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return noted if isinstance(noted, dict) else {}
