"""Where things are in a run directory, and moving what is damaged out of the way."""

import os
import re
from pathlib import Path

from rollstream.store.batch import forget_digests, recorded_digests
from rollstream.store.journal import sync_folder

MERGE_FOLDER = "merge.tmp"
"""Where a merge spreads rows."""

_WRITTEN_WHOLE = (
    *("run.json", "config.yaml", "checkpoint.json", "exports.json", "tokenizer.json"),
    *("trajectories.parquet", "trajectories.parquet.sha256"),
)
"""Files of the run's root that are written by way of a temporary name."""

_BATCH_NAME = r"batch_(\d{6,})\.parquet"
_JOURNAL_NAME = r"(\d{6,})\.rsj"


class RunPaths:
    """Where things are in a run directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.artifact = root / "trajectories.parquet"
        self.tokenizer = root / "tokenizer.json"
        self.journals = root / "journal"
        self.batches = root / "batches"
        self.failures = root / "failed"
        self.turns = root / "turns"
        """Made for the first turn."""
        self.logs = root / "logs"
        self.damaged = root / "damaged"
        """Damaged files that were moved out of the way."""

    def make_folders(self) -> None:
        """Makes the folders that a run writes to, where they are not there."""
        for folder in (self.journals, self.batches, self.failures, self.logs):
            folder.mkdir(exist_ok=True)

    def has_data(self) -> bool:
        """Whether anything was ever finished here, or a turn of it."""
        files = (self.journal_numbers(), self.batch_numbers(), self.failure_files(), missing_batches(self))
        return self.artifact.exists() or self.damaged.is_dir() or any(files) or bool(self.turn_numbers())

    def journal(self, number: int) -> Path:
        """Journal file of this number."""
        return self.journals / f"{number:06d}.rsj"

    def batch(self, number: int) -> Path:
        """Batch of this number."""
        return self.batches / f"batch_{number:06d}.parquet"

    def journal_numbers(self) -> list[int]:
        """Numbers of the journal files there are, ascending."""
        return _numbers(_names(self.journals), _JOURNAL_NAME)

    def batch_numbers(self) -> list[int]:
        """Numbers of the batches there are, ascending."""
        return _numbers(_names(self.batches), _BATCH_NAME)

    def failure_files(self) -> list[Path]:
        """Journal files of failures, oldest first."""
        return [
            self.failures / f"{number:06d}.rsj" for number in _numbers(_names(self.failures), _JOURNAL_NAME)
        ]

    def turns_file(self, number: int) -> Path:
        """File of turns of this number."""
        return self.turns / f"{number:06d}.rsj"

    def turn_numbers(self) -> list[int]:
        """Numbers of the files of turns there are, ascending."""
        return _numbers(_names(self.turns), _JOURNAL_NAME)

    def next_number(self) -> int:
        """The next number that no batch and no journal file has."""
        return max([*self.batch_numbers(), *self.journal_numbers()], default=-1) + 1

    def damaged_files(self) -> list[Path]:
        """Damaged files that were quarantined."""
        return sorted(self.damaged / name for name in _names(self.damaged))


def _names(folder: Path) -> list[str]:
    return os.listdir(folder) if folder.is_dir() else []  # noqa: PTH208


def _numbers(names: list[str], pattern: str) -> list[int]:
    return sorted(int(match[1]) for match in (re.fullmatch(pattern, name) for name in names) if match)


def missing_batches(paths: RunPaths) -> list[int]:
    """Numbers of batches that were sealed but are not there any more."""
    # A batch is noted, then named, then its journal goes: looked for in this order, none is missed meanwhile.
    noted = _numbers([*recorded_digests(paths.batch(0))], _BATCH_NAME)
    there = {*paths.journal_numbers(), *paths.batch_numbers()}
    return [number for number in noted if number not in there]


def forget_batches(paths: RunPaths, numbers: list[int]) -> None:
    """Takes batches that are not there any more out of the checksums."""
    forget_digests(paths.batches, {paths.batch(number).name for number in numbers})


def leftovers(paths: RunPaths) -> list[Path]:
    """Temporary files that an earlier process of this run left; nobody else's."""
    mine = [paths.root / f"{name}.tmp" for name in _WRITTEN_WHOLE]
    frames = [*paths.failure_files(), *map(paths.turns_file, paths.turn_numbers())]
    mine += [path.with_name(f"{path.name}.tmp") for path in frames]
    temporary = rf"({_BATCH_NAME}|_SHA256SUMS)\.tmp"
    return mine + [paths.batches / name for name in _names(paths.batches) if re.fullmatch(temporary, name)]


def quarantine_file(paths: RunPaths, path: Path, *, keep: bool = False) -> Path:
    """Moves a damaged file to `damaged/`, under a name that is not taken there; `keep`: by a second name only."""
    paths.damaged.mkdir(exist_ok=True)
    target, count = paths.damaged / path.name, 0
    while target.exists():
        count += 1
        target = paths.damaged / f"{path.name}.{count}"
    if keep:
        os.link(path, target)
    else:
        path.rename(target)
    sync_folder(path.parent)
    sync_folder(paths.damaged)
    if path.parent == paths.batches:  # a crash before this is a batch that is missing: named, owed again
        forget_digests(paths.batches, {path.name})
    return target
