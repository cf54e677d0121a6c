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
from rollstream.engine.base import Capabilities
from rollstream.engine.launch_plan import LaunchRequest, ReplicaPlan
from rollstream.engine.launch_process import Launcher, ReplicaProcess
from rollstream.engine.pool import PoolEngine
from rollstream.engine.replica import Replica
from rollstream.errors import EngineError, EngineLostError, EngineUnavailableError, TransientEngineError

_LOG = logging.getLogger(__name__)

_WAITING_SAID_S = 10.0
"""Between two lines about replicas that load: a large model takes minutes."""

_START_CHECK_S = 0.2
"""Between looks at a replica that starts: it is used soon after it can be."""

_CHECK_S = 10.0
"""Between health checks of one that serves: SGLang generates a token for each. Its end is noticed without."""


class LaunchedEngine(PoolEngine):
    """Launches replicas and drives them as one engine. Closing it ends them.

    Args:
        plans: of the replicas, at least one.
        launcher: starts them.
        make_replica: speaks to one, by its URL.
        request: timeouts and restarts.
        own: see `PoolEngine`, like the others.
        what: see there.
        kwargs: see there.
    """

    def __init__(
        self,
        plans: Sequence[ReplicaPlan],
        launcher: Launcher,
        *,
        make_replica: Callable[[str], Replica],
        request: LaunchRequest,
        own: Callable[[Capabilities], Capabilities] = lambda capabilities: capabilities,
        what: str = "engine",
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__([], own=own, what=what, kwargs=kwargs)
        self._plans = plans
        self._launcher = launcher
        self._make_replica = make_replica
        self._request = request
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
        self.supervisors = [
            Supervisor(plan, self._launcher, self._make_replica, self._request, self)
            for plan in self._launcher.place(self._plans)
        ]
        try:
            await self._start_all()
            await super().start()
        except BaseException:
            await self.close()
            raise
        self._supervision = [
            asyncio.create_task(supervisor.run(), name=f"rollstream-{supervisor.name}")
            for supervisor in self.supervisors
        ]

    async def health(self) -> bool:
        """Whether at least one replica is ready and healthy.

        Raises:
            EngineLostError: no replica is started again: waiting would be in vain.
        """
        if self._supervision and all(one.is_given_up for one in self.supervisors):
            raise EngineLostError(
                "no replica could be started again. What is done is safe; mend the cause and run the same "
                f"command again. {self.supervisors[0].cause}"
            )
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
                    await self._launcher.close()

    async def _start_all(self) -> None:
        """Starts the replicas. The first that fails ends the wait."""
        began = time.monotonic()
        tasks = [asyncio.ensure_future(supervisor.start()) for supervisor in self.supervisors]
        waiting = {*tasks}
        try:
            while waiting:
                done, waiting = await asyncio.wait(
                    waiting, timeout=_WAITING_SAID_S, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    task.result()
                seconds, ready = time.monotonic() - began, len(tasks) - len(waiting)
                _LOG.info("%d of %d replicas ready (%.1f s)", ready, len(tasks), seconds)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class Supervisor:
    """Starts a replica, watches it, and starts it again. `start` it, then `run` it, then `stop` it.

    Args:
        plan: what is started.
        launcher: starts it.
        make_replica: speaks to it, by its URL.
        request: timeouts and restarts.
        pool: takes it in while it serves.
    """

    def __init__(
        self,
        plan: ReplicaPlan,
        launcher: Launcher,
        make_replica: Callable[[str], Replica],
        request: LaunchRequest,
        pool: PoolEngine,
    ) -> None:
        self._plan = plan
        self._launcher = launcher
        self._make_replica = make_replica
        self._request = request
        self._pool = pool
        self._restarts = Restarts(
            first=request.restart_delay,
            longest=request.restart_delay_max,
            most_failures=request.max_restarts,
        )
        self._process: ReplicaProcess | None = None
        self._replica: Replica | None = None
        self.is_given_up = False
        self.restarted = 0
        """How often it was started again."""
        self.cause = ""
        """Why it was not serving the last time, with the end of its log."""

    @property
    def name(self) -> str:
        """For messages."""
        return f"replica {self._plan.index}"

    async def start(self) -> None:
        """Starts the replica and waits until the pool has taken it in.

        Raises:
            EngineError: it ended, was not ready in time, or is not what is expected; with the end of its log.
        """
        limit = self._request.startup_timeout
        self._process = process = await self._launcher.start(self._plan)
        replica = self._make_replica(process.url)
        ended = asyncio.ensure_future(process.wait())
        try:
            async with asyncio.timeout(limit):
                while not await self._is_taken_in(replica):
                    await asyncio.wait((ended,), timeout=_START_CHECK_S)
                    if ended.done():
                        raise EngineError(f"{self.name} {ended.result()} before it was healthy")
        except BaseException as error:
            await replica.close()
            if not isinstance(error, TimeoutError | EngineError):
                raise
            details = await _details(process)
            await self.stop()
            said = str(error)
            if isinstance(error, TimeoutError):
                said = (
                    f"{self.name} was not healthy within {limit:g} s "
                    "(actor_rollout_ref.rollout.launch.startup_timeout), and was stopped"
                )
            raise EngineError(said + details) from error
        finally:
            ended.cancel()
        self._replica = replica

    async def run(self) -> None:
        """Watches the replica that was started, and starts it anew until it is given up, or cancelled."""
        try:
            pause: float | None = await self._watch()
            while pause is not None:
                _LOG.warning("%s\n%s is started again in %g s", self.cause, self.name, pause)
                await asyncio.sleep(pause)
                self.restarted += 1
                try:
                    await self.start()
                except EngineError as error:
                    self.cause = str(error)
                    pause = self._restarts.after_failed_start()
                else:
                    _LOG.warning("%s is back", self.name)
                    pause = await self._watch()
            _LOG.error(
                "%s is given up after %d starts in a row that failed: %s",
                *(self.name, self._restarts.failures, self.cause),
            )
        except Exception as error:  # a bug: the other replicas go on, and it is said when none is left
            self.cause = f"it is not looked after any more: {error!r}"
            _LOG.exception("%s is not looked after any more", self.name)
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
            await self._pool.add_replica(replica)
        except (EngineUnavailableError, TransientEngineError):
            return False
        return True

    async def _watch(self) -> float:
        """Returns when the replica is gone, with the pause before the next start. `cause` says why."""
        process, replica, pool = self._process, self._replica, self._pool
        assert process is not None and replica is not None
        ended = asyncio.ensure_future(process.wait())
        began = healthy_at = time.monotonic()
        limit = self._request.unhealthy_timeout
        try:
            while True:
                await asyncio.wait((ended,), timeout=min(_CHECK_S, limit / 4))
                if ended.done():
                    cause = f"{self.name} {ended.result()}"
                    break
                # The check's own time counts: a server that hangs is asked with a bound.
                if pool.is_loading(replica.name) or await replica.health():
                    healthy_at = time.monotonic()
                elif time.monotonic() - healthy_at >= limit:
                    cause = (
                        f"{self.name} runs, but was not healthy for {limit:g} s "
                        "(actor_rollout_ref.rollout.launch.unhealthy_timeout), and was stopped"
                    )
                    break
        finally:
            ended.cancel()
        self.cause = cause + await _details(process)
        await pool.remove_replica(replica.name)
        await self.stop()
        return self._restarts.after_serving(time.monotonic() - began)


async def _details(process: ReplicaProcess) -> str:
    """Command and log's end, for a message."""
    words = await process.last_words()
    return f"\n  command: {process.what}\n" + (
        "  the end of its log:\n" + "\n".join(f"    {line}" for line in words.splitlines())
        if words
        else "  it wrote nothing to its log"
    )
