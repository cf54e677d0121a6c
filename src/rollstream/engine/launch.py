"""An engine of replicas that it starts itself, and keeps running.

The pool routes between what is there; a supervisor for each replica starts it, watches it and starts it anew,
each time on a new port: so a replica that comes back is a new one to the pool, with nothing remembered of the
one before.
"""

import asyncio
import contextlib
import importlib.util
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import rollstream
from rollstream.engine.base import Capabilities, EngineLoad
from rollstream.engine.checks import read_engine_kwargs, read_model_limits
from rollstream.engine.devices import Devices, DeviceToolError, find_devices
from rollstream.engine.launch_commands import MODULES, ServerKind
from rollstream.engine.launch_plan import LaunchRequest, ReplicaPlan, choose_server, plan_replicas
from rollstream.engine.launch_process import Launcher, LocalLauncher
from rollstream.engine.pool import PoolEngine
from rollstream.engine.replica import Replica
from rollstream.engine.restarts import Restarts
from rollstream.engine.sglang import ENGINE_KWARGS as SGLANG_KWARGS
from rollstream.engine.sglang import SGLangEngine, SGLangReplica
from rollstream.engine.supervisor import Supervisor
from rollstream.engine.vllm import ENGINE_KWARGS as VLLM_KWARGS
from rollstream.engine.vllm import VLLMEngine, VLLMReplica
from rollstream.errors import ConfigError, EngineError, EngineLostError, EngineUnavailableError
from rollstream.trajectory import Completion, SamplingParams

_LOG = logging.getLogger(__name__)

_WAITING_SAID_S = 10.0
"""Between two lines about replicas that load: a large model takes minutes."""

_PYTHON_TIMEOUT_S = 60.0
"""For an interpreter to say whether it has a package, from a slow disk."""


class LaunchedEngine:
    """Launches replicas and drives them as one engine. Closing it ends them.

    Args:
        plans: of the replicas, at least one.
        launcher: starts them.
        make_pool: the engine over their URLs.
        make_replica: a replica of that engine, for one that is back.
        request: timeouts and restarts.
        kwargs: of the connections.
    """

    def __init__(
        self,
        plans: Sequence[ReplicaPlan],
        launcher: Launcher,
        *,
        make_pool: Callable[[Sequence[str]], PoolEngine],
        make_replica: Callable[[str], Replica],
        request: LaunchRequest,
        kwargs: dict[str, Any],
    ) -> None:
        self._make_pool = make_pool
        self._make_replica = make_replica
        self._pool: PoolEngine | None = None
        self._updates = 0
        self._gone: set[str] = set()
        self._closing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._broken: dict[str, BaseException] = {}
        """Replicas that are not looked after any more, by name, and why."""
        self._closed = False
        self.supervisors = [
            Supervisor(
                plan,
                launcher,
                restarts=Restarts(
                    first=request.restart_delay,
                    longest=request.restart_delay_max,
                    most_failures=request.max_restarts,
                ),
                startup_timeout=request.startup_timeout,
                unhealthy_timeout=request.unhealthy_timeout,
                kwargs=kwargs,
                take_in=self._take_in,
                leave_out=self._leave_out,
                is_excused=partial(self._is_excused, at),
            )
            for at, plan in enumerate(plans)
        ]
        """One for each replica, by index."""

    @property
    def capabilities(self) -> Capabilities:
        return self._running.capabilities

    async def start(self) -> None:
        """Starts all replicas at once and waits until all are healthy.

        Raises:
            EngineError: one of them is not; with its command and the end of its log. The others are stopped.
        """
        if self._pool is not None:
            return
        try:
            pool = self._make_pool(await self._start_all())
            await pool.start()
        except BaseException:
            await self.close()
            raise
        self._pool = pool
        for supervisor in self.supervisors:
            task = asyncio.create_task(supervisor.run(), name=f"rollstream-{supervisor.name}")
            task.add_done_callback(partial(self._supervised, supervisor.name))
            self._tasks.add(task)

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        images: list[object] | None = None,
    ) -> Completion:
        if self._closed:
            raise EngineUnavailableError("the engine is closed")
        return await self._running.generate(prompt_ids, sampling, request_id=request_id, images=images)

    async def abort(self, request_id: str) -> None:
        await self._running.abort(request_id)

    async def update_weights(self, source: str, version: int) -> None:
        """Loads weights on all replicas, see `PoolEngine.update_weights`; they may be deaf meanwhile."""
        self._updates += 1
        try:
            await self._running.update_weights(source, version)
        finally:
            self._updates -= 1

    async def load(self) -> EngineLoad | None:
        """Of all replicas that are there."""
        return await self._running.load()

    async def health(self) -> bool:
        """Whether at least one replica says it is healthy.

        Raises:
            EngineLostError: nobody serves and nobody is started again: waiting would be in vain.
        """
        if self._closed or self._pool is None:
            return False
        if self.serving and await self._pool.health():
            return True
        if any(one.state != "given up" and one.name not in self._broken for one in self.supervisors):
            return False
        broken = next(iter(self._broken.values()), None)
        why = self.supervisors[0].cause if broken is None else f"They are not looked after: {broken!r}"
        raise EngineLostError(
            "no replica could be started again. What is done is safe; mend the cause and run the same "
            f"command again. {why}"
        ) from broken

    @property
    def urls(self) -> list[str]:
        """Where its replicas listen now; those that come back listen elsewhere."""
        return self._running.replicas

    @property
    def serving(self) -> int:
        """How many replicas serve."""
        return sum(supervisor.state == "serving" for supervisor in self.supervisors)

    @property
    def restarts(self) -> int:
        """How often replicas were started again."""
        return sum(supervisor.restarted for supervisor in self.supervisors)

    async def close(self) -> None:
        self._closed = True
        async with (
            self._closing
        ):  # a start that was cancelled closes, too: who comes second waits for the end
            for task in self._tasks:
                task.cancel()
            try:
                if self._pool is not None:
                    await self._pool.close()
            finally:
                await asyncio.gather(*self._tasks, return_exceptions=True)
                await asyncio.gather(*(supervisor.stop() for supervisor in self.supervisors))

    @property
    def _running(self) -> PoolEngine:
        if self._pool is None:
            raise EngineError("the engine has not been started")
        return self._pool

    async def _start_all(self) -> list[str]:
        """Starts the replicas; returns their URLs. The first that fails ends the wait."""
        began = time.monotonic()
        tasks = [asyncio.ensure_future(supervisor.start()) for supervisor in self.supervisors]
        try:
            while True:
                done, waiting = await asyncio.wait(
                    tasks, timeout=_WAITING_SAID_S, return_when=asyncio.FIRST_EXCEPTION
                )
                for task in done:
                    task.result()
                if not waiting:
                    break
                _LOG.info(
                    "waiting for replicas: %d of %d ready (%.0f s)",
                    *(len(done), len(tasks), time.monotonic() - began),
                )
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        _LOG.info("%d of %d replicas ready after %.1f s", len(tasks), len(tasks), time.monotonic() - began)
        return [task.result() for task in tasks]

    def _is_excused(self, at: int) -> bool:
        """Whether a replica may be deaf: it loads weights, in an update or before it gets work again."""
        if self._updates:
            return True
        url = self.supervisors[at].url
        return self._pool is not None and url is not None and self._pool.is_loading(url)

    async def _take_in(self, url: str) -> None:
        pool = self._running
        replica = self._make_replica(url)
        try:
            await pool.add_replica(replica)
        except BaseException:
            await replica.close()
            raise
        while self._gone:
            await pool.remove_replica(self._gone.pop())

    async def _leave_out(self, url: str) -> None:
        pool = self._running
        if len(pool.replicas) > 1:
            await pool.remove_replica(url)
        else:
            self._gone.add(url)  # a pool is never empty: it stays until another one comes

    def _supervised(self, name: str, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broken[name] = error
            _LOG.error("%s is not looked after any more: %r", name, error, exc_info=error)


def launched_engine(
    name: str,
    *,
    model_path: str,
    max_model_len: int | None,
    engine_kwargs: Mapping[str, Any] | None,
    request: LaunchRequest,
    log_dir: Path,
) -> LaunchedEngine:
    """Makes an engine that launches its replicas on this machine; `start` it before use.

    Raises:
        ConfigError: what `launch_plan` raises, or an unknown key of engine_kwargs.
    """
    plans = launch_plan(
        name, model_path=model_path, max_model_len=max_model_len, request=request, log_dir=log_dir
    )
    path = _expanded(model_path)

    def make_pool(urls: Sequence[str]) -> PoolEngine:
        engine = SGLangEngine if name == "sglang" else VLLMEngine
        return engine(urls, model_path=path, max_model_len=max_model_len, engine_kwargs=engine_kwargs)

    return LaunchedEngine(
        plans,
        LocalLauncher(log_dir),
        make_pool=make_pool,
        make_replica=replica_maker(name, model_path=model_path, engine_kwargs=engine_kwargs),
        request=request,
        kwargs=_connection_kwargs(name, engine_kwargs),
    )


def replica_maker(
    name: str, *, model_path: str, engine_kwargs: Mapping[str, Any] | None
) -> Callable[[str], Replica]:
    """What makes a replica of a launched engine from its URL. Raises `ConfigError` as `launched_engine`."""
    path = _expanded(model_path)
    limits = read_model_limits(Path(path))
    kwargs = _connection_kwargs(name, engine_kwargs)
    kind = SGLangReplica if name == "sglang" else VLLMReplica
    return lambda url: kind(url, model_path=path, limits=limits, kwargs=kwargs)


def _connection_kwargs(name: str, engine_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    return read_engine_kwargs(name, engine_kwargs or {}, SGLANG_KWARGS if name == "sglang" else VLLM_KWARGS)


def launch_plan(
    name: str, *, model_path: str, max_model_len: int | None, request: LaunchRequest, log_dir: Path
) -> list[ReplicaPlan]:
    """What would be launched for an engine. Starts nothing, but asks the vendors' tools for devices.

    Raises:
        ConfigError: no such model folder, interpreter or package; what `plan_replicas` raises.
    """
    server = choose_server(name, request.server)
    path = _expanded(model_path)
    if server == "rollstream" or path.startswith(("/", ".")):
        if not Path(path).is_dir():
            raise ConfigError(f"actor_rollout_ref.model.path: there is no folder {path}")
        path = str(Path(path).resolve())
    if server == "rollstream" and request.python is None:
        request = replace(request, env={**_where_rollstream_is(), **request.env})
    plans = plan_replicas(
        server,
        request,
        _devices_for(server, request),
        model_path=path,
        max_model_len=max_model_len,
        python=_interpreter(request.python),
        log_dir=log_dir.absolute(),
    )
    _check_interpreter(server, request.python)
    if server == "rollstream" and request.python is None:
        _check_embedded(path, request.args)
    return plans


def _devices_for(server: ServerKind, request: LaunchRequest) -> Devices | None:
    if server == "rollstream":
        return None
    try:
        return _machine_devices()  # for 0, too: so that they can be hidden from the server
    except DeviceToolError:
        if request.devices_per_node == 0:
            return None
        raise


@cache
def _machine_devices() -> Devices | None:
    # They do not change while a process runs, and asking takes up to seconds.
    return find_devices(os.environ)


def _expanded(model_path: str) -> str:
    return str(Path(model_path).expanduser()) if model_path.startswith("~") else model_path


def _where_rollstream_is() -> dict[str, str]:
    package_parent = str(Path(rollstream.__file__).parent.parent)
    return {
        "PYTHONPATH": os.pathsep.join([package_parent, *filter(None, [os.environ.get("PYTHONPATH")])]),
    }


def _interpreter(python: str | None) -> str:
    if python is None:
        return sys.executable
    # Not resolved: an interpreter's link is what makes it its environment's.
    return str(Path(python).expanduser().absolute()) if os.sep in python else python


def _check_interpreter(server: ServerKind, python: str | None) -> None:
    """Refuses an interpreter that lacks the server's package."""
    module = MODULES[server]
    rollout = "actor_rollout_ref.rollout"
    if python is None:
        if importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"replicas of {server!r} are to be launched, but this environment has no {module!r}. Name "
                f"another environment's interpreter by {rollout}.launch.python, or running servers by "
                f"{rollout}.server_urls; or launch rollstream's own servers, which need no GPU, by "
                f"{rollout}.launch.server=rollstream"
            )
        return
    _LOG.info("looking for %r in the environment of %s", module, python)
    found = _has_module(_interpreter(python), module)
    if found is None:
        raise ConfigError(f"{rollout}.launch.python: {python} cannot be run as a Python interpreter")
    if not found:
        raise ConfigError(f"{rollout}.launch.python: {python} has no {module!r}")


def _check_embedded(path: str, args: Mapping[str, Any]) -> None:
    """Refuses what `rollstream serve` would refuse, as far as its engine shows without a start."""
    from rollstream.engine.registry import check_engine_config

    given = {str(name).replace("_", "-"): value for name, value in args.items()}
    check_engine_config(
        str(given.get("engine", "openvino")), model_path=path, engine_kwargs=given.get("engine-kwargs")
    )


@cache
def _has_module(python: str, module: str) -> bool | None:
    """Whether an interpreter has a package; None when it cannot be run."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            [python, "-c", code], capture_output=True, timeout=_PYTHON_TIMEOUT_S, check=False
        )
        if done.returncode in (0, 1):
            return done.returncode == 0
    return None
