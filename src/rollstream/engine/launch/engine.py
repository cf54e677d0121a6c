"""A pool of replicas that it starts itself, and keeps running.

A supervisor for each replica starts it, watches it and starts it anew, each time on a new port: so a replica that
comes back is a new one to the pool, which checks it and gives it the current weights as any other.

starting --(ready)--> serving --(ended, or unhealthy for long: killed)--> starting again, after a pause
    |
    +--(ended, or not ready in time: killed)--> starting again, after a pause; too often in a row: given up
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from rollstream.aio import Restarts
from rollstream.engine.checks import least, model_limits
from rollstream.engine.kind import EngineKind, EngineOptions
from rollstream.engine.launch.local import LocalLauncher, LocalProcess
from rollstream.engine.launch.plan import LaunchRequest, ReplicaPlan, choose_server, launch_plan
from rollstream.engine.launch.ray import RayLauncher, RayProcess
from rollstream.engine.pool import PoolEngine
from rollstream.engine.replica import Replica
from rollstream.errors import EngineError, EngineLostError, EngineUnavailableError, TransientEngineError

_LOG = logging.getLogger(__name__)

_START_CHECK_S = 0.2
"""Between looks at a replica that starts: it is used soon after it can be."""

_CHECK_S = 10.0
"""Between health checks of one that serves: SGLang generates a token for each. Its end is noticed without."""


def launched_engine(kind: EngineKind, options: EngineOptions, request: LaunchRequest) -> "LaunchedEngine":
    """Makes an engine that launches its replicas; `start` it before use. On Ray, join the cluster first.

    Raises:
        ConfigError: what `launch_plan` raises, or an unknown key of engine_kwargs.
    """
    assert options.model_path is not None and kind.make_replica is not None
    plans = launch_plan(
        kind.name,
        model_path=options.model_path,
        max_model_len=options.max_model_len,
        request=request,
        log_dir=options.log_dir,
    )
    kwargs, limits = kind.read_kwargs(options.engine_kwargs), model_limits(options.model_path)
    launcher: LocalLauncher | RayLauncher = LocalLauncher(options.log_dir)
    if request.where == "ray":
        launcher = RayLauncher(choose_server(kind.name, request.server), request, options.log_dir)
    make = kind.make_replica
    return LaunchedEngine(
        plans,
        launcher,
        make_replica=lambda url: make(url, options),
        request=request,
        max_model_len=least(options.max_model_len, limits.max_model_len),
        what=kind.name,
        probe_after=kwargs["probe_after"],
    )


class LaunchedEngine(PoolEngine):
    """Launches replicas and drives them as one engine. Closing it ends them.

    `make_replica` makes what speaks to one, by its URL; `pool` are options of `PoolEngine`.
    """

    def __init__(
        self,
        plans: Sequence[ReplicaPlan],
        launcher: LocalLauncher | RayLauncher,
        *,
        make_replica: Callable[[str], Replica],
        request: LaunchRequest,
        **pool: Any,
    ) -> None:
        super().__init__([], **pool)
        self.launcher, self.make_replica, self.request = launcher, make_replica, request
        self._plans = plans
        self._supervision: list[asyncio.Task[None]] = []
        self._closing = asyncio.Lock()
        self.supervisors: list[Supervisor] = []
        """One for each replica, by index; made at start."""

    async def start(self) -> None:
        """Starts all replicas at once and waits until all are ready.

        Raises:
            ConfigError: there is no place for them.
            EngineError: one of them is not; with its command and the end of its log. The others are stopped.
        """
        if self.supervisors:
            return
        self.supervisors = [Supervisor(plan, self) for plan in self.launcher.place(self._plans)]
        try:
            await self._start_all()
            await super().start()
        except BaseException:
            await self.close()
            raise
        self._supervision = [asyncio.create_task(supervisor.run()) for supervisor in self.supervisors]

    async def health(self) -> bool:
        """Whether at least one replica is ready and healthy.

        Raises:
            EngineLostError: no replica is started again: waiting would be in vain.
        """
        if self._supervision and all(supervisor.is_given_up for supervisor in self.supervisors):
            raise EngineLostError(f"no replica could be started again. {self.supervisors[0].cause}")
        return await super().health()

    def replica_counts(self) -> tuple[int, int]:
        """How many replicas take requests now, and how many there should be."""
        return len(self.ready), len(self.supervisors)

    @property
    def restarts(self) -> int:
        """How often replicas were started again."""
        return sum(supervisor.restarted for supervisor in self.supervisors)

    async def close(self) -> None:
        async with self._closing:  # a start that was cancelled closes, too: the second one waits for the end
            for task in self._supervision:
                task.cancel()
            try:
                await super().close()
            finally:
                await asyncio.gather(*self._supervision, return_exceptions=True)
                try:
                    await asyncio.gather(*(supervisor.stop() for supervisor in self.supervisors))
                finally:
                    await self.launcher.close()

    async def _start_all(self) -> None:
        """Starts the replicas. The first that fails ends the wait."""
        began = time.monotonic()
        tasks = [asyncio.ensure_future(supervisor.start()) for supervisor in self.supervisors]
        _LOG.info("%d replicas start; a large model takes minutes", len(tasks))
        try:
            for ready, task in enumerate(asyncio.as_completed(tasks), start=1):
                await task
                _LOG.info("%d of %d replicas ready (%.1f s)", ready, len(tasks), time.monotonic() - began)
        finally:
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class Supervisor:
    """Starts a replica of an engine, watches it, and starts it again. `start` it, then `run` it, then `stop` it."""

    def __init__(self, plan: ReplicaPlan, engine: LaunchedEngine) -> None:
        self._plan, self._engine = plan, engine
        request = engine.request
        self._restarts = Restarts(
            first=request.restart_delay,
            longest=request.restart_delay_max,
            most_failures=request.max_restarts,
        )
        self._process: LocalProcess | RayProcess | None = None
        self._replica: Replica | None = None
        self._name = f"replica {plan.index}"
        self.is_given_up = False
        self.restarted = 0
        """How often it was started again."""
        self.cause = ""
        """Why it was not serving the last time, with the end of its log."""

    async def start(self) -> None:
        """Starts the replica and waits until the pool has taken it in.

        Raises:
            EngineError: it ended, was not ready in time, or is not what is expected; with the end of its log.
        """
        limit = self._engine.request.startup_timeout
        self._process = process = await self._engine.launcher.start(self._plan)
        replica = self._engine.make_replica(process.url)
        ended = asyncio.ensure_future(process.wait())
        try:
            async with asyncio.timeout(limit):
                while not await self._is_taken_in(replica):
                    await asyncio.wait((ended,), timeout=_START_CHECK_S)
                    if ended.done():
                        raise EngineError(f"{self._name} {ended.result()} before it was healthy")
        except BaseException as error:
            await replica.close()
            if not isinstance(error, TimeoutError | EngineError):
                raise
            details = await _details(process)
            await self.stop()
            problem = str(error)
            if isinstance(error, TimeoutError):
                problem = f"{self._name} was not healthy within {limit:g} s (launch.startup_timeout)"
            raise EngineError(problem + details) from error
        finally:
            ended.cancel()
        self._replica = replica

    async def run(self) -> None:
        """Watches the replica that was started, and starts it anew until it is given up, or cancelled."""
        try:
            pause: float | None = await self._watch()
            while pause is not None:
                _LOG.warning("%s\n%s is started again in %g s", self.cause, self._name, pause)
                await asyncio.sleep(pause)
                self.restarted += 1
                try:
                    await self.start()
                except EngineError as error:
                    self.cause = str(error)
                    pause = self._restarts.after_failed_start()
                else:
                    _LOG.warning("%s is back", self._name)
                    pause = await self._watch()
            failures = self._restarts.failures
            _LOG.error("%s is given up after %d failed starts in a row: %s", self._name, failures, self.cause)
        except Exception as error:  # a bug: the other replicas go on, and it is said when none is left
            self.cause = f"{self._name} is not looked after any more: {error!r}"
            _LOG.exception("%s is not looked after any more", self._name)
        self.is_given_up = True

    async def stop(self) -> None:
        """Ends the replica, and all that it started."""
        process, self._process = self._process, None
        if process is not None:
            try:
                await process.stop()
            except asyncio.CancelledError:
                self._process = process  # whoever cancels stops it again
                raise

    async def _is_taken_in(self, replica: Replica) -> bool:
        """Whether a replica that starts is ready, and the pool's now. Raises when it will never be."""
        try:
            await self._engine.add_replica(replica)
        except (EngineUnavailableError, TransientEngineError):
            return False
        return True

    async def _watch(self) -> float:
        """Returns when the replica is gone, with the pause before the next start. `cause` says why."""
        process, replica, engine = self._process, self._replica, self._engine
        assert process is not None and replica is not None
        ended = asyncio.ensure_future(process.wait())
        began = healthy_at = time.monotonic()
        limit = engine.request.unhealthy_timeout
        try:
            while True:
                await asyncio.wait((ended,), timeout=min(_CHECK_S, limit / 4))
                if ended.done():
                    cause = f"{self._name} {ended.result()}"
                    break
                # The check's own time counts: a server that hangs is asked with a bound.
                if engine.is_loading(replica.name) or await replica.health():
                    healthy_at = time.monotonic()
                elif time.monotonic() - healthy_at >= limit:
                    cause = f"{self._name} was not healthy for {limit:g} s (launch.unhealthy_timeout)"
                    break
        finally:
            ended.cancel()
        self.cause = cause + await _details(process)
        await engine.remove_replica(replica.name)
        await self.stop()
        return self._restarts.after_serving(time.monotonic() - began)


async def _details(process: LocalProcess | RayProcess) -> str:
    """Command and log's end, for a message."""
    lines = (await process.last_words()).splitlines() or ["(nothing)"]
    return "\n    ".join([f"\n  command: {process.what}\n  the end of its log:", *lines])
