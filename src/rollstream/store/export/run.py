"""`rollstream export`: a run directory's trajectories in a file of their own.

Of a finished run, the artifact is merged if it is not there, and converted. Of an unfinished one, of one that is
being written and of one in which nothing may be written, what is done so far (batches and journals) is merged in a
temporary folder beside the output; the run directory is left as it is, and no file there ever passes for the
artifact of a finished run.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rollstream.errors import ConfigError, DamageError, RunDirectoryError, StorageError
from rollstream.store.batch import SCHEMA, batch_metadata, require_intact, write_tables_durably
from rollstream.store.export.dataproto import ImageInputs, dataproto_files
from rollstream.store.export.files import note_export
from rollstream.store.export.format import ExportCall, export_format, file_name
from rollstream.store.lock import locked
from rollstream.store.manifest import Manifest
from rollstream.store.merge import Artifact, merge_batches
from rollstream.store.paths import RunPaths
from rollstream.store.recovery import recover
from rollstream.store.run import Run
from rollstream.store.summary import RunStatus, read_status


@dataclass(frozen=True, slots=True)
class Export:
    """What was exported."""

    target: Path
    """As asked for; a DataProto of several files has theirs beside it."""
    rows: int
    """Trajectories in `target`."""
    status: RunStatus | None
    """The run's state when it was exported; None for a buffer."""

    @property
    def files(self) -> list[Path]:
        """What was written: `target`, or the files of a DataProto of several."""
        return _written(self.target)

    @property
    def finished(self) -> bool:
        """Whether the run was at its end."""
        return self.status is None or self.status.finished


def export_run(
    root: Path,
    name: str,
    output: Path | None = None,
    *,
    force: bool = False,
    options: Mapping[str, Any] = MappingProxyType({}),
    images: Callable[[], ImageInputs] | None = None,
    scores: str | None = None,
) -> Export:
    """Writes a run's trajectories in a format.

    Args:
        root: the run directory.
        name: the format.
        output: the file (of `hf`: the folder) to write; by default that of the format in the run
            directory, which only a finished run has.
        force: overwrite an existing `output`. Files of the run itself are never overwritten, and a folder
            only if it holds an earlier export and nothing else.
        options: of the format, see `ExportCall`.
        images: what reads images, for a DataProto.
        scores: whose rewards; None: the run's own. Those of a name go to an `output` only.

    Raises:
        ConfigError: `output` must not be written, or the format cannot hold these trajectories.
        RunDirectoryError: no run directory, or nothing done in it; unfinished, being written or read-only, and
            no `output`.
        DamageError: a batch or journal is damaged.
        StorageError: the disk is full.
    """
    run, own = Run.open(root, scores), root / file_name(name)
    target = output or own
    in_run = target.resolve() == own.resolve()
    if scores is not None and in_run:
        raise ConfigError(
            "exports in the run directory have the run's own rewards: name a file with --output"
        )
    check_output(root, target, own, name, force=force)
    with ExitStack() as stack:
        lock = stack.enter_context(ExitStack())
        is_ours = _take_lock(root, lock, needed=in_run)
        status = read_status(root)
        damage = [line for line in status.damage if not line.startswith("failed/")]
        if damage:
            raise DamageError(
                f"{root}: {damage[0]}. Its `rollstream generate` takes it from an intact copy, or again"
            )
        if not status.rows:
            raise RunDirectoryError(f"{root} holds no finished rollout yet")
        if status.finished and is_ours:
            if status.artifact_rows:
                recover(run.paths, run.manifest)
            merge_batches(run.paths, run.manifest.run_id_bytes)
        elif in_run:
            total = "?" if status.total is None else status.total
            raise RunDirectoryError(
                f"{root}: {status.completed} of {total} rollouts done; the run is unfinished. To export what "
                "is there, name a file outside with --output; or run `rollstream generate` to its end"
            )
        else:
            lock.close()  # what is done so far can be read while the run goes on
        artifact = run.paths.artifact
        is_usable = (
            status.finished and scores is None and Artifact(run.paths, run.manifest.run_id).is_current()
        )
        if not is_usable or not (is_ours or _is_intact(artifact)):
            artifact = stack.enter_context(_merged_copy(run, target))
        rows = write_export(artifact, name, target, run.manifest, root=root, options=options, images=images)
        return Export(target, rows, status)


def _is_intact(artifact: Path) -> bool:
    try:
        require_intact(artifact)
    except DamageError:
        return False
    return True


def _take_lock(root: Path, stack: ExitStack, *, needed: bool) -> bool:
    """Takes the run's lock; False where it need not be had, as another run has it or nothing may be written."""
    try:
        stack.enter_context(locked(root))
    except RunDirectoryError as error:
        if needed and not os.access(root, os.W_OK):
            raise RunDirectoryError(f"{error}; name a file outside with --output") from error
        if needed:
            raise
        return False
    return os.access(root, os.W_OK)


def check_output(root: Path, target: Path, own: Path, name: str, *, force: bool) -> None:
    """Raises `ConfigError` when `target` must not be written: `own` is what may be in the folder `root`."""
    place = target.resolve()
    if place.is_relative_to(root.resolve()):
        if place != own.resolve():
            raise ConfigError(f"--output {target} is inside {root}, where only {own.name} may be written")
        return
    check_target = export_format(name).check_target
    if check_target is not None:
        check_target(target)
    elif place.is_dir():
        raise ConfigError(f"--output {target} is a folder; name a file")
    if not place.parent.is_dir():
        raise ConfigError(f"--output {target}: there is no folder {place.parent}")
    if place.exists() and check_target is None and not place.is_file():
        raise ConfigError(f"--output {target} is no regular file; name another")
    there = dataproto_files(place) if name == "dataproto" else [place] if place.exists() else []
    if there and not force:
        first = target if there[0] == place else target.with_name(there[0].name)
        raise ConfigError(f"--output {first} exists; --force overwrites it")


@contextmanager
def _merged_copy(run: Run, target: Path) -> Iterator[Path]:
    """An artifact of what is done so far, in a temporary folder on the disk of `target`."""
    try:
        folder = tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.resolve().parent)
    except OSError as error:
        raise StorageError(f"cannot write beside {target}: {error.strerror}") from error
    copy, run_id = RunPaths(Path(folder)), run.manifest.run_id_bytes
    try:
        copy.batches.mkdir()
        write_tables_durably(
            copy.batch(0), run.rows(SCHEMA.names), batch_metadata(run_id, run.manifest.logprobs)
        )
        if run.damage:
            raise DamageError(f"{run.root}: {run.damage[0]}")
        merge_batches(copy, run_id)
        yield copy.artifact
    except OSError as error:
        raise StorageError(f"cannot write beside {target}: {error.strerror}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_export(
    artifact: Path,
    name: str,
    target: Path,
    manifest: Manifest,
    *,
    root: Path,
    options: Mapping[str, Any] = MappingProxyType({}),
    images: Callable[[], ImageInputs] | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> int:
    """Writes one format and notes beside an artifact of a run directory what it was made of; returns its rows.

    Args:
        artifact: of what it is made.
        name: of the format.
        target: the file or folder; it may be there.
        manifest: of the run.
        root: the run directory.
        options: of the format, see `ExportCall`.
        images: what reads images, for a DataProto.
        cancelled: asked now and then.

    Raises:
        ConfigError: the format cannot hold these trajectories.
        DamageError: the artifact is damaged.
        StorageError: `target` cannot be written.
        MergeCancelledError: `cancelled` said so.
    """
    if target.parent.resolve() == root.resolve():  # its lock is held here: nobody writes what a kill has left
        for left in target.parent.glob(f".{target.stem}*{target.suffix}.*.tmp"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    call = ExportCall(artifact, target, manifest, root, options, images, cancelled)
    rows = export_format(name).write(call)
    if name == "parquet":
        return rows
    note_export(artifact, *_written(target))
    return rows


def _written(target: Path) -> list[Path]:
    """`target`, or the files of a DataProto of several."""
    if target.exists():
        return [target]
    return [target.with_name(path.name) for path in dataproto_files(target)]
