"""Taking a run's trajectories elsewhere when it ends. Whatever goes wrong there, the run has ended well."""

import asyncio
import logging
import re
import shlex
import threading
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import orjson

from rollstream.config.load import check_artifact_name
from rollstream.daemon_threads import in_daemon_thread
from rollstream.errors import RollstreamError, StorageError
from rollstream.generation.tracking import Staged, TrackedRun, check_trackers, load_uploader, tracked_run
from rollstream.stop_signals import StoppedEarly, StopSignals
from rollstream.store.export.files import FILE_NAMES, export_zip, note_export, zip_batches
from rollstream.store.journal import write_file_durably
from rollstream.store.manifest import require_manifest
from rollstream.store.merge import source_digest
from rollstream.store.paths import RunPaths

logger = logging.getLogger(__name__)

_LIMIT_S = 2 * 3600.0
"""For an upload: tens of gigabytes over a slow line. It can be stopped like the rest of a run."""


def artifact_name(run: TrackedRun, given: str | bool) -> str:
    """The artifact's name; where the user gives none, one of which each upload is a new version.

    Shards of a run have the name of the experiment in common, and each an artifact of its own.
    """
    if isinstance(given, str):
        return given
    shard = run.config.get("generation", {}).get("shard")
    suffix = "" if shard is None else "-" + str(shard).replace("/", "-of-")
    return f"trajectories-{re.sub(r'[^A-Za-z0-9_.-]+', '-', run.name)[: 100 - len(suffix)]}{suffix}"


async def upload_trajectories(
    run: TrackedRun,
    given: str | bool,
    send: Callable[[Path, str], Awaitable[str]],
    *,
    merged: bool,
    stop: StopSignals,
) -> str | None:
    """Makes `trajectories.zip` in the run directory and uploads it, unless it has these trajectories already.

    Args:
        run: whose; its lock is held, and everything is sealed.
        given: name of the artifact; True for that of the run.
        send: uploads a file by a name, and returns where it is. Left behind when it takes too long.
        merged: whether the merged artifact is there and goes up; else the batches do.
        stop: ends it early.

    Returns:
        where it is; None when that failed or was stopped, which is said with the command that does it later.
    """
    name = artifact_name(run, given)
    paths = RunPaths(run.run_dir)
    # By the batches and not by the zip: that has the time of `checkpoint.json` in it, new at each command.
    what = {
        **{"project": run.project, "name": name, "merged": merged},
        "batches": source_digest(paths),
    }
    note = paths.logs / "uploaded.json"
    if (place := _place_of(note, what)) is not None:
        logger.info("these trajectories are uploaded already: %s", place)
        return place
    target = run.run_dir / FILE_NAMES["zip"]
    cancelled = threading.Event()

    def make() -> None:
        if merged:
            summary = run.run_dir / "checkpoint.json"
            export_zip(paths.artifact, target, summary=summary, cancelled=cancelled.is_set)
        else:
            zip_batches(paths, target, cancelled.is_set)
        note_export(paths.artifact, target)

    async def work() -> str:
        await in_daemon_thread(make)
        logger.info("uploading %s (%d bytes)", target, target.stat().st_size)
        return await send(target, name)

    command = f"rollstream export {shlex.quote(str(run.run_dir))} --format zip --upload"
    later = f"the trajectories are in {run.run_dir}; to upload them: {command}"
    try:
        async with asyncio.timeout(_LIMIT_S):
            place = await stop.unless_stopped(work())
        if not isinstance(place, Staged):  # else nobody knows whether it will ever be there
            _write_note(note, {**what, "place": place})
        return place
    except StoppedEarly:
        logger.warning("the upload was stopped; %s", later)
    except TimeoutError:
        logger.warning("the upload took longer than %g s; %s", _LIMIT_S, later)
    except Exception as error:  # a library's, over a network: it may be anything
        why = str(error) if isinstance(error, RollstreamError) else f"{type(error).__name__}: {error}"
        logger.warning("could not upload the trajectories: %s; %s", why, later)
    finally:
        cancelled.set()
    return None


def _place_of(note: Path, what: Mapping[str, Any]) -> str | None:
    """Where an earlier process has put the same; None where it has not, or nothing readable says so."""
    try:
        said = orjson.loads(note.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return None
    same = isinstance(said, dict) and {**said, **what} == said and isinstance(said.get("place"), str)
    return said["place"] if same else None


def _write_note(note: Path, said: Mapping[str, Any]) -> None:
    try:
        write_file_durably(note, orjson.dumps(said, option=orjson.OPT_INDENT_2) + b"\n")
    except OSError as error:
        logger.warning("cannot write %s, so the next command uploads again: %s", note, error.strerror)


def check_upload(name: str | bool) -> None:
    """Refuses an upload that could not work, as far as that can be told. Raises `ConfigError`."""
    if isinstance(name, str):
        check_artifact_name(name, "--upload")
    check_trackers([], upload=True)


def upload_file(run_dir: Path, file: Path, name: str | bool) -> str:
    """Uploads a run's `trajectories.zip` by itself; returns where it is.

    Args:
        run_dir: whose it is.
        file: the zip.
        name: of the artifact; True for that of the run.

    Raises:
        RunDirectoryError: no run directory.
        StorageError: it could not be uploaded; the file is there.
    """
    run = tracked_run(run_dir, require_manifest(run_dir))
    try:
        return load_uploader().upload(run, file, artifact_name(run, name))
    except Exception as error:  # a library's, over a network: it may be anything
        raise StorageError(f"could not upload {file}: {type(error).__name__}: {error}") from error
