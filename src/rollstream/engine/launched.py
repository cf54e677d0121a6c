"""An engine of replicas that it starts itself, and keeps running.

The pool routes between what is there; a supervisor for each replica starts it, watches it and starts it anew,
each time on a new port: so a replica that comes back is a new one to the pool, with nothing remembered of the
one before.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rollstream.engine.base import Capabilities, EngineLoad
from rollstream.engine.launch_plan import LaunchRequest, ReplicaPlan
from rollstream.engine.launch_process import Launcher
from rollstream.engine.pool import PoolEngine
from rollstream.engine.replica import Replica
from rollstream.engine.restarts import Restarts
from rollstream.engine.supervisor import Supervisor
from rollstream.errors import EngineError, EngineLostError, EngineUnavailableError
from rollstream.trajectory import Completion, SamplingParams

_LOG = logging.getLogger(__name__)

_WAITING_SAID_S = 10.0
"""Between two lines about replicas that load: a large model takes minutes."""


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
        self._plans = plans
        self._launcher = launcher
        self._request = request
        self._kwargs = kwargs
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
        self.supervisors: list[Supervisor] = []
        """One for each replica, by index; made at start."""

    @property
    def capabilities(self) -> Capabilities:
        return self._running.capabilities

    async def start(self) -> None:
        """Starts all replicas at once and waits until all are healthy.

        Raises:
            ConfigError: there is no place for them.
            EngineError: one of them is not; with its command and the end of its log. The others are stopped.
        """
        if self._pool is not None:
            return
        self.supervisors = [
            self._supervisor(at, plan) for at, plan in enumerate(self._launcher.place(self._plans))
        ]
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

    def replica_counts(self) -> tuple[int, int]:
        """How many replicas serve, and how many there should be."""
        return self.serving, len(self.supervisors)

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
                try:
                    await asyncio.gather(*(supervisor.stop() for supervisor in self.supervisors))
                finally:
                    await self._launcher.close()

    @property
    def _running(self) -> PoolEngine:
        if self._pool is None:
            raise EngineError("the engine has not been started")
        return self._pool

    def _supervisor(self, at: int, plan: ReplicaPlan) -> Supervisor:
        request = self._request
        return Supervisor(
            plan,
            self._launcher,
            restarts=Restarts(
                first=request.restart_delay,
                longest=request.restart_delay_max,
                most_failures=request.max_restarts,
            ),
            startup_timeout=request.startup_timeout,
            unhealthy_timeout=request.unhealthy_timeout,
            kwargs=self._kwargs,
            take_in=self._take_in,
            leave_out=self._leave_out,
            is_excused=partial(self._is_excused, at),
        )

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
