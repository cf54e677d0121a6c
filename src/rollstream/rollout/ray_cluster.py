"""Joining a Ray cluster, or starting one on this machine, and leaving it again."""

import asyncio
import logging
import os
import queue
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollstream.daemon_threads import deliver
from rollstream.engine.ray_package import import_ray
from rollstream.errors import ConfigError, EngineUnavailableError
from rollstream.redaction import redact

logger = logging.getLogger(__name__)

_LOCAL_DEFAULTS: dict[str, Any] = {
    "address": "local",  # none given: never one that happens to run here
    "include_dashboard": False,
    "object_store_memory": 512 << 20,  # results in flight, not data sets
}
"""Of `ray.init` where it starts a cluster."""

_DEFAULTS: dict[str, Any] = {
    "log_to_driver": False,  # workers' log lines come with their reports; standard output is the result's
    "logging_level": logging.ERROR,
    "ignore_reinit_error": True,
}

_WHERE = "ray_kwargs.ray_init"


class RayCluster:
    """The connection to a cluster. One that this program had before is used, and left as it is.

    Args:
        ray_init: arguments of `ray.init`, laid over the defaults here.
        timeline_json_file: gets Ray's trace of all tasks when the cluster is left; None writes none.
    """

    def __init__(self, ray_init: Mapping[str, Any], timeline_json_file: str | None = None) -> None:
        self._ray_init = {str(key): value for key, value in ray_init.items()}
        self._timeline = timeline_json_file
        self._thread: _ClusterThread | None = None
        self._users = 0

    @property
    def arguments(self) -> dict[str, Any]:
        """What `ray.init` is called with."""
        return {
            **({} if joins_cluster(self._ray_init, os.environ) else _LOCAL_DEFAULTS),
            **_DEFAULTS,
            **self._ray_init,
        }

    async def start(self) -> None:
        """Joins or starts the cluster. Takes seconds, in a thread. Each `start` has a `close` of its own.

        Raises:
            ConfigError: Ray is not installed, or does not take these arguments.
            EngineUnavailableError: no cluster is there.
        """
        ray = import_ray()
        if self._users or ray.is_initialized():
            self._users += 1
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would report to its makers
        # Workers without GPUs of their own see those of their node: an embedded engine may use them.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        joins = joins_cluster(self._ray_init, os.environ)
        logger.info("joining the Ray cluster" if joins else "starting Ray on this machine")
        thread = _ClusterThread()
        self._thread = thread
        arguments = self.arguments
        try:
            await thread.do(lambda: ray.init(**arguments))
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"{_WHERE}: ray.init refuses {_shown(arguments)}: {error}") from error
        except (ConnectionError, TimeoutError, OSError) as error:
            raise EngineUnavailableError(f"{_WHERE}: no Ray cluster is there: {error}") from error
        finally:
            _take_signals_back()
        self._users = 1
        resources = ray.cluster_resources()
        logger.info(
            "Ray cluster: %d nodes, %g CPUs, %g GPUs",
            *(len(ray.nodes()), resources.get("CPU", 0), resources.get("GPU", 0)),
        )

    async def close(self) -> None:
        """The last one writes the timeline and leaves the cluster; one that was started here ends."""
        self._users -= 1
        if self._users > 0:
            return
        thread, self._thread = self._thread, None
        ray = import_ray()
        if self._timeline is not None and ray.is_initialized():
            path = Path(self._timeline).expanduser()
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                await asyncio.to_thread(ray.timeline, str(path))
            except Exception as error:  # a trace is for the curious: it must not cost a run its result
                logger.warning("cannot write ray_kwargs.timeline_json_file %s: %s", path, error)
            self._timeline = None
        if thread is not None:
            try:
                await thread.do(ray.shutdown)
            finally:
                thread.end()


class _ClusterThread:
    """Runs functions one by one in a thread that lives as long as the cluster.

    It has to: Ray asks the kernel to kill the processes of a local cluster with their parent, and to the
    kernel that is the thread that started them.
    """

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="rollstream-ray", daemon=True).start()

    async def do(self, function: Callable[[], Any]) -> None:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[BaseException | None] = loop.create_future()

        def call() -> None:
            try:
                function()
            except BaseException as error:
                deliver(loop, done, error)
            else:
                deliver(loop, done, None)

        self._work.put(call)
        if (error := await done) is not None:
            raise error

    def end(self) -> None:
        self._work.put(None)

    def _run(self) -> None:
        while (call := self._work.get()) is not None:
            call()


def joins_cluster(ray_init: Mapping[str, Any], environ: Mapping[str, str]) -> bool:
    """Whether `ray.init` with these arguments joins a cluster that is there, or starts one."""
    if "address" in ray_init:
        return ray_init["address"] not in (None, "local")
    return bool(environ.get("RAY_ADDRESS"))


def _take_signals_back() -> None:
    """Puts the handlers of this program back in place: Ray puts C functions before them, which end it."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        handler = signal.getsignal(number)
        if handler is not None:
            with suppress(ValueError):
                signal.signal(number, handler)
                signal.siginterrupt(number, False)


def _shown(arguments: Mapping[str, Any]) -> str:
    """For a message: without secrets, which a Python caller may have given."""
    return ", ".join(f"{key}={value!r}" for key, value in redact(arguments).items())
