"""Where things are in a run directory, and moving what is damaged out of the way."""

import os
import re
from pathlib import Path

from rollstream.store.batch import forget_digests, recorded_digests
from rollstream.store.journal import sync_folder

_WRITTEN_WHOLE = (
    "run.json",
    "config.yaml",
    "checkpoint.json",
    "trajectories.parquet",
    "trajectories.parquet.sha256",
    "exports.json",
    "tokenizer.json",
)
"""Files of the run's root that are written by way of a temporary name."""

MERGE_FOLDER = "merge.tmp"
"""Where a merge spreads rows."""

_BATCH_NAME = r"batch_(\d{6,})\.parquet"


class RunPaths:
    """Where things are in a run directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.artifact = root / "trajectories.parquet"
        self.tokenizer = root / "tokenizer.json"
        self.journals = root / "journal"
        self.batches = root / "batches"
        self.failures = root / "failed"
        self.logs = root / "logs"
        self.damaged = root / "damaged"
        """Damaged files that were moved out of the way."""

    def has_data(self) -> bool:
        """Whether anything was ever finished here."""
        kept = (self.artifact.exists(), self.damaged.is_dir())
        files = (self.journal_numbers(), self.batch_numbers(), self.failure_files(), missing_batches(self))
        return any(kept) or any(files)

    def journal(self, number: int) -> Path:
        """Journal file of this number."""
        return self.journals / f"{number:06d}.rsj"

    def batch(self, number: int) -> Path:
        """Batch of this number."""
        return self.batches / f"batch_{number:06d}.parquet"

    def journal_numbers(self) -> list[int]:
        """Numbers of the journal files there are, ascending."""
        return _numbers(self.journals, r"(\d{6,})\.rsj")

    def batch_numbers(self) -> list[int]:
        """Numbers of the batches there are, ascending."""
        return _numbers(self.batches, _BATCH_NAME)

    def failure_files(self) -> list[Path]:
        """Journal files of failures, oldest first."""
        return [self.failures / f"{number:06d}.rsj" for number in _numbers(self.failures, r"(\d{6,})\.rsj")]

    def next_number(self) -> int:
        """The next number that no batch and no journal file has."""
        return max([*self.batch_numbers(), *self.journal_numbers()], default=-1) + 1

    def damaged_files(self) -> list[Path]:
        """Damaged files that were quarantined."""
        return sorted(self.damaged.iterdir()) if self.damaged.is_dir() else []


def _numbers(folder: Path, pattern: str) -> list[int]:
    names = os.listdir(folder) if folder.is_dir() else []  # noqa: PTH208
    return sorted(int(match[1]) for match in (re.fullmatch(pattern, name) for name in names) if match)


def missing_batches(paths: RunPaths) -> list[str]:
    """Names of batches that were sealed but are not there any more."""
    # A batch is noted, then named, then its journal goes: looked for in this order, none is missed meanwhile.
    noted = [name for name in recorded_digests(paths.batch(0)) if re.fullmatch(_BATCH_NAME, name)]
    journals = paths.journal_numbers()
    there = {paths.batch(number).name for number in [*journals, *paths.batch_numbers()]}
    return sorted(name for name in noted if name not in there)


def leftovers(paths: RunPaths) -> list[Path]:
    """Temporary files that an earlier process of this run left; nobody else's."""
    mine = [paths.root / f"{name}.tmp" for name in _WRITTEN_WHOLE]
    mine += [paths.failures / f"{path.name}.tmp" for path in paths.failure_files()]
    mine += [
        paths.batches / name
        for name in os.listdir(paths.batches)  # noqa: PTH208
        if re.fullmatch(r"batch_\d{6,}\.parquet\.tmp|_SHA256SUMS\.tmp", name)
    ]
    return mine


def quarantine_file(paths: RunPaths, path: Path) -> Path:
    """Moves a damaged file to `damaged/`, under a name that is not taken there."""
    paths.damaged.mkdir(exist_ok=True)
    target = quarantine_name(paths, path)
    path.rename(target)
    sync_folder(path.parent)
    sync_folder(paths.damaged)
    if path.parent == paths.batches:  # a crash before this is a batch that is missing: named, owed again
        forget_digests(paths.batches, {path.name})
    return target


def quarantine_name(paths: RunPaths, path: Path) -> Path:
    """A name in `damaged/` that is not taken, after the file's own."""
    target = paths.damaged / path.name
    count = 1
    while target.exists():
        target = paths.damaged / f"{path.name}.{count}"
        count += 1
    return target
