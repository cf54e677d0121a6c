"""A format of `rollstream export`: an entry point of `rollstream.exports`.

The command line reads these modules for its options, so what takes time is imported when a format is written.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollstream import plugins

if TYPE_CHECKING:
    from rollstream.store.export.dataproto import ImageInputs
    from rollstream.store.manifest import Manifest


@dataclass(frozen=True, slots=True)
class ExportCall:
    """One export."""

    artifact: Path
    """`trajectories.parquet`, the trajectories sorted by key."""
    target: Path
    """The file or folder to write; one that is there is replaced at the end."""
    manifest: "Manifest"
    """Of the run."""
    root: Path
    """The run directory."""
    options: Mapping[str, Any]
    """Of the format's `flags` those that were given, by their names in Python."""
    images: "Callable[[], ImageInputs] | None"
    """Makes what reads images."""
    cancelled: Callable[[], bool]
    """Asked now and then; `store.merge.MergeCancelledError` is the answer."""


@dataclass(frozen=True, slots=True)
class ExportFormat:
    """What a format is called, takes and does."""

    text: str
    suffix: str
    """Behind `trajectories`: its name in a run directory."""
    write: Callable[[ExportCall], int]
    """Writes it, by a temporary name; returns the rows. Raises `ConfigError`, `DamageError`, `StorageError`."""
    flags: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Options of the command line: what argparse takes, by flag."""
    check_target: Callable[[Path], None] | None = None
    """Of a format that is a folder: raises `ConfigError` if this one must not be replaced."""


def export_format(name: str) -> ExportFormat:
    """The format of a name. Raises `ConfigError`."""
    found: ExportFormat = plugins.load("rollstream.exports", name)
    return found


def file_name(name: str) -> str:
    """What an export of a format is named in the run directory."""
    return f"trajectories{export_format(name).suffix}"
