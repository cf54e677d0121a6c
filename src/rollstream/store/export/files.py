"""The exports in a run directory: their names, and of which artifact each was made.

`exports.json` beside them says the artifact's checksum by file name, so that an export from before the run
went on (more data, failed rollouts tried again) is not taken for one of the artifact that lies beside it.
"""

import re
from pathlib import Path

import orjson

from rollstream.store.batch import recorded_digests
from rollstream.store.journal import write_file_durably

FILE_NAMES = {
    "parquet": "trajectories.parquet",
    "jsonl": "trajectories.jsonl",
    "dataproto": "trajectories.pkl",
    "hf": "trajectories_hf",
    "zip": "trajectories.zip",
}
"""What an export is named in the run directory, by format. That of `hf` is a folder."""


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
    return [name for name in sorted(there) if not current or noted.get(name) != current]


def _is_export(path: Path, name: Path) -> bool:
    """Whether a file has this name, or is one of several of a DataProto."""
    return (
        path.suffix == name.suffix
        and re.fullmatch(r"(-\d+-of-\d+)?", path.stem[len(name.stem) :]) is not None
    )


def _digest(artifact: Path) -> str:
    return " ".join(sorted(recorded_digests(artifact).get(artifact.name, ()))) if artifact.exists() else ""


def _noted(root: Path) -> dict[str, str]:
    try:
        noted = orjson.loads((root / "exports.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return noted if isinstance(noted, dict) else {}
