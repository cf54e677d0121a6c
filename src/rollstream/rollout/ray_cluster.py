"""Joining a Ray cluster, or starting one on this machine, and leaving it again."""

import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rollstream.engine.ray_package import import_ray
from rollstream.errors import ConfigError, EngineUnavailableError
from rollstream.redaction import redact
from rollstream.user_calls import DaemonThreads

logger = logging.getLogger(__name__)

_LOCAL_DEFAULTS: dict[str, Any] = {
    "address": "local",  # none given: never one that happens to run here
    "include_dashboard": False,
    "object_store_memory": 512 << 20,  # results in flight, not data sets
}

_DEFAULTS: dict[str, Any] = {
    "log_to_driver": False,  # workers' log lines come with their reports; standard output is the result's
    "logging_level": logging.INFO,  # for the log file of a run: see `_keep_off_terminal`
    "logging_format": "%(asctime)s %(levelname)s %(name)s: %(message)s",  # Ray changes it for all handlers
    "ignore_reinit_error": True,
}


class RayCluster:
    """The connection to a cluster. One that this program had before is used, and left as it is.

    A process has one connection: whoever comes while it is there shares it, whatever their arguments say, and
    the last one of all leaves the cluster.

    Args:
        ray_init: arguments of `ray.init`, laid over the defaults here.
        timeline_json_file: gets Ray's trace of all tasks when this one is closed; None writes none.
    """

    def __init__(self, ray_init: Mapping[str, Any], timeline_json_file: str | None = None) -> None:
        own = {str(key): value for key, value in ray_init.items()}
        self._joins = joins_cluster(own, os.environ)
        self._arguments = {**({} if self._joins else _LOCAL_DEFAULTS), **_DEFAULTS, **own}
        self._timeline = timeline_json_file
        self._users = 0
        """Starts of this one without their close. Belongs to the connection's thread."""

    async def start(self) -> None:
        """Joins or starts the cluster. Takes seconds, in a thread. Each `start` has a `close` of its own.

        Raises:
            ConfigError: Ray is not installed, or does not take these arguments.
            EngineUnavailableError: no cluster is there.
        """
        ray = import_ray()
        was_there = ray.is_initialized()
        try:
            await _CONNECTION.do(partial(self._join, ray))
        except (TypeError, ValueError, RuntimeError) as error:
            shown = redact(self._arguments)
            raise ConfigError(f"ray_kwargs.ray_init: ray.init refuses {shown}: {error}") from error
        except (ConnectionError, TimeoutError, OSError) as error:
            raise EngineUnavailableError(f"ray_kwargs.ray_init: no Ray cluster is there: {error}") from error
        finally:
            if not was_there:
                _take_signals_back()

    async def close(self) -> None:
        """The last one writes the timeline; the last of the process leaves a cluster that was joined here,
        or ends it. After a `start` that failed, or more often than `start`, it does nothing.
        """
        await _CONNECTION.do(partial(self._leave, import_ray()))

    def _join(self, ray: Any) -> None:
        if not ray.is_initialized():
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would report to its makers
            # Workers without GPUs of their own see those of their node: an embedded engine may use them.
            os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
            logger.info("joining the Ray cluster" if self._joins else "starting Ray on this machine")
            if not self._arguments["log_to_driver"]:
                _keep_off_terminal()
            ray.init(**self._arguments)
            _CONNECTION.is_ours = True
            logger.info("Ray cluster: %d nodes, %s", len(ray.nodes()), ray.cluster_resources())
        self._users += 1
        _CONNECTION.users += 1

    def _leave(self, ray: Any) -> None:
        if not self._users:
            return
        self._users -= 1
        _CONNECTION.users -= 1
        if not self._users and self._timeline is not None and ray.is_initialized():
            path = Path(self._timeline).expanduser()
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                ray.timeline(str(path))
            except Exception as error:  # a trace is for the curious: it must not cost a run its result
                logger.warning("cannot write ray_kwargs.timeline_json_file %s: %s", path, error)
        if not _CONNECTION.users and _CONNECTION.is_ours:
            _CONNECTION.is_ours = False
            ray.shutdown()


class _Connection:
    """Who uses this process's connection to Ray, and the thread in which all of them join and leave.

    The thread has to outlive the connection: Ray asks the kernel to kill the processes of a local cluster with
    their parent, and to the kernel that is the thread that started them.
    """

    def __init__(self) -> None:
        self.users = 0
        self.is_ours = False
        """Whether it was made here, and is to be left again."""
        self._thread = DaemonThreads("rollstream-ray", most=1)

    async def do(self, function: Callable[[], None]) -> None:
        """Runs a function in the thread, after those before it; also when who waits is cut off."""
        if (error := (await self._thread.start(function)).error) is not None:
            raise error


_CONNECTION = _Connection()


def joins_cluster(ray_init: Mapping[str, Any], environ: Mapping[str, str]) -> bool:
    """Whether `ray.init` with these arguments joins a cluster that is there, or starts one."""
    if "address" in ray_init:
        return ray_init["address"] not in (None, "local")
    return bool(environ.get("RAY_ADDRESS"))


def _keep_off_terminal() -> None:
    """Makes Ray's notices and warnings records of the logger `ray`, which a run's log file takes.

    Its errors stay on standard error. A raylet's messages (of a worker that died, say) have no setting: Ray
    prints them to standard output, which is the result's.
    """
    from ray._private import worker

    ray_logger = logging.getLogger("ray")
    for handler in ray_logger.handlers:
        if type(handler).__module__.startswith("ray."):
            handler.setLevel(logging.ERROR)

    def log(data: Any, ignore_prefix: bool) -> None:
        ray_logger.warning("%s: %s", data.get("pid"), "\n".join(data.get("lines", ())))

    worker.print_to_stdstream = log


def _take_signals_back() -> None:
    """Puts the handlers of this program back in place: Ray puts C functions before them, which end it."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        if (handler := signal.getsignal(number)) is not None:
            with suppress(ValueError):
                signal.signal(number, handler)
                signal.siginterrupt(number, False)
