"""Taking a run's trajectories elsewhere when it ends. Whatever goes wrong there, the run has ended well."""

import asyncio
import logging
import re
import shlex
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

from rollstream.config.load import check_artifact_name
from rollstream.errors import RollstreamError, StorageError
from rollstream.generation.stopping import StoppedEarly, StopSignals, in_daemon_thread
from rollstream.generation.trackers import check_trackers, load_uploader, tracked_run_of
from rollstream.generation.tracking import TrackedRun
from rollstream.store.export.run import FILE_NAMES
from rollstream.store.export.zip import export_zip, zip_batches
from rollstream.store.paths import RunPaths

logger = logging.getLogger(__name__)

_LIMIT_S = 2 * 3600.0
"""For an upload: tens of gigabytes over a slow line. It can be stopped like the rest of a run."""


def artifact_name(run: TrackedRun) -> str:
    """The artifact's name where the user gives none: each upload is a new version of it."""
    return f"trajectories-{re.sub(r'[^A-Za-z0-9_.-]+', '-', run.name)[:100]}"


def upload_command(run: TrackedRun) -> str:
    """What a person types to upload later."""
    return f"rollstream export {shlex.quote(str(run.run_dir))} --format zip --upload"


async def upload_trajectories(
    run: TrackedRun,
    send: Callable[[Path], Awaitable[str]],
    *,
    merged: bool,
    stop: StopSignals,
) -> str | None:
    """Makes `trajectories.zip` in the run directory and uploads it.

    Args:
        run: whose; its lock is held.
        send: uploads a file, and returns where it is. Left behind when it takes too long.
        merged: whether the merged artifact is there and goes up; else the batches do.
        stop: ends it early.

    Returns:
        where it is; None when that failed or was stopped, which is said with the command that does it later.
    """
    paths = RunPaths(run.run_dir)
    target = run.run_dir / FILE_NAMES["zip"]
    cancelled = threading.Event()

    def make() -> None:
        if merged:
            summary = run.run_dir / "checkpoint.json"
            export_zip(paths.artifact, target, summary=summary, cancelled=cancelled.is_set)
        else:
            zip_batches(paths, target, cancelled.is_set)

    async def work() -> str:
        await in_daemon_thread(make)
        logger.info("uploading %s (%d bytes)", target, target.stat().st_size)
        return await send(target)

    later = f"the trajectories are in {run.run_dir}; to upload them: {upload_command(run)}"
    try:
        async with asyncio.timeout(_LIMIT_S):
            return await stop.unless_stopped(work())
    except StoppedEarly:
        logger.warning("the upload was stopped; %s", later)
    except TimeoutError:
        logger.warning("the upload took longer than %g s; %s", _LIMIT_S, later)
    except Exception as error:  # a library's, over a network: it may be anything
        what = str(error) if isinstance(error, RollstreamError) else f"{type(error).__name__}: {error}"
        logger.warning("could not upload the trajectories: %s; %s", what, later)
    finally:
        cancelled.set()
    return None


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
    run = tracked_run_of(run_dir)
    try:
        return load_uploader().upload(run, file, name if isinstance(name, str) else artifact_name(run))
    except Exception as error:  # a library's, over a network: it may be anything
        raise StorageError(f"could not upload {file}: {type(error).__name__}: {error}") from error
