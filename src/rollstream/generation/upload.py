"""Taking a run's trajectories elsewhere when it ends. Whatever goes wrong there, the run has ended well."""

import asyncio
import logging
import re
import shlex
import threading
from contextlib import suppress
from pathlib import Path

import orjson

from rollstream.config.load import check_artifact_name
from rollstream.errors import StorageError
from rollstream.generation.trackers import Staged, TrackedRun, check_trackers, load_uploader, tracked_run
from rollstream.stop_signals import StoppedEarly, StopSignals
from rollstream.store.export.files import export_zip, note_export, zip_batches
from rollstream.store.journal import write_file_durably
from rollstream.store.manifest import require_manifest
from rollstream.store.merge import source_digest
from rollstream.store.paths import RunPaths
from rollstream.user_calls import in_daemon_thread

logger = logging.getLogger(__name__)

_LIMIT_S = 2 * 3600.0
"""For an upload: tens of gigabytes over a slow line. It can be stopped like the rest of a run."""


def artifact_name(run: TrackedRun, name: str | bool) -> str:
    """The artifact's name; where the user gives none, one of which each upload is a new version.

    Shards of a run have the name of the experiment in common, and each an artifact of its own.
    """
    if isinstance(name, str):
        return name
    shard = run.config.get("generation", {}).get("shard")
    suffix = "" if shard is None else "-" + str(shard).replace("/", "-of-")
    return f"trajectories-{re.sub(r'[^A-Za-z0-9_.-]+', '-', run.name)[: 100 - len(suffix)]}{suffix}"


async def upload_trajectories(
    run: TrackedRun, name: str | bool, *, merged: bool, stop: StopSignals
) -> str | None:
    """Makes `trajectories.zip` in the run directory and uploads it, unless it has these trajectories already.

    Args:
        run: its lock is held, and everything is sealed.
        name: of the artifact; True for that of the run.
        merged: whether the merged artifact is there and goes up; else the batches do.
        stop: ends it early.

    Returns:
        where it is; None when that failed or was stopped, which is said with the command that does it later.
    """
    name, paths = artifact_name(run, name), RunPaths(run.run_dir)
    # By the batches and not by the zip: that has the time of `checkpoint.json` in it, new at each command.
    source = {"project": run.project, "name": name, "merged": merged, "batches": source_digest(paths)}
    note, target = paths.logs / "uploaded.json", run.run_dir / "trajectories.zip"
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # no note, or not a whole one
        known = orjson.loads(note.read_bytes())
        if known == {**source, "place": str(known["place"])}:
            logger.info("these trajectories are uploaded already: %s", known["place"])
            return str(known["place"])
    cancelled, uploader = threading.Event(), load_uploader()

    def work() -> str:
        if merged:
            summary = run.run_dir / "checkpoint.json"
            export_zip(paths.artifact, target, summary=summary, cancelled=cancelled.is_set)
        else:
            zip_batches(paths, target, cancelled.is_set)
        note_export(paths.artifact, target)
        logger.info("uploading %s (%d bytes)", target, target.stat().st_size)
        place = uploader.upload(run, target, name)
        if not (
            cancelled.is_set() or isinstance(place, Staged)
        ):  # else nobody knows whether it will ever be there
            with suppress(OSError):  # then the next command uploads again
                write_file_durably(note, orjson.dumps({**source, "place": place}) + b"\n")
        return place

    try:
        async with asyncio.timeout(_LIMIT_S):
            return await stop.unless_stopped(in_daemon_thread(work))
    except (StoppedEarly, TimeoutError):
        uploader.abandon()
        why = "the upload was stopped, or took too long"
    except Exception as error:  # a library's, over a network: it may be anything
        why = f"could not upload the trajectories: {type(error).__name__}: {error}"
    finally:
        cancelled.set()
    command = f"rollstream export {shlex.quote(str(run.run_dir))} --format zip --upload"
    logger.warning("%s; the trajectories are in %s; to upload them: %s", why, run.run_dir, command)
    return None


def check_upload(name: str | bool) -> None:
    """Refuses an upload that could not work, as far as that can be told. Raises `ConfigError`."""
    if isinstance(name, str):
        check_artifact_name(name, "--upload")
    check_trackers([], upload=True)


def upload_file(run_dir: Path, file: Path, name: str | bool) -> str:
    """Uploads a run's `trajectories.zip` by itself, as an artifact of this name (True: the run's); returns where it
    is.

    Raises:
        RunDirectoryError: no run directory.
        StorageError: it could not be uploaded; the file is there.
    """
    run = tracked_run(run_dir, require_manifest(run_dir))
    try:
        return load_uploader().upload(run, file, artifact_name(run, name))
    except Exception as error:  # a library's, over a network: it may be anything
        raise StorageError(f"could not upload {file}: {type(error).__name__}: {error}") from error
