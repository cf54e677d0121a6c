"""Keeps one replica running.

waiting --> starting --(healthy)--> serving --(ended, or unhealthy for long: killed)--> waiting
                |                                                                          |
                +--(ended, or not healthy in time: killed)-- too often in a row --> given up
                +----------------------------------------------------------------> waiting
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from rollstream.engine.http_server import HttpServer, is_answered
from rollstream.engine.launch_plan import ReplicaPlan
from rollstream.engine.launch_process import Launcher, ReplicaProcess
from rollstream.engine.restarts import Restarts
from rollstream.errors import EngineError

_LOG = logging.getLogger(__name__)

State = Literal["waiting", "starting", "serving", "given up"]

_START_PROBE_S = 0.2
"""Between looks at a replica that starts: it is used soon after it can be."""

_WATCH_PROBE_S = 10.0
"""Between looks at one that serves: SGLang generates a token for each. Its end is noticed without them."""

_OTHER_PORTS = 3
"""Starts that may fail because another program took the port meanwhile."""


class Supervisor:
    """Starts a replica, watches it, and starts it again. `start` it, then `run` it, then `stop` it.

    Args:
        plan: what is started.
        launcher: starts it.
        restarts: when it is started again.
        startup_timeout: seconds for it to become healthy.
        unhealthy_timeout: seconds without a healthy answer after which it is killed.
        kwargs: of the connection, see `http_server.CONNECTION_KWARGS`.
        take_in: told the URL of a replica that is back, before it counts as serving; may raise `EngineError`.
        leave_out: told the URL of a replica that is gone.
        is_excused: whether replicas may be deaf now, as while they load other weights.
    """

    def __init__(
        self,
        plan: ReplicaPlan,
        launcher: Launcher,
        *,
        restarts: Restarts,
        startup_timeout: float,
        unhealthy_timeout: float,
        kwargs: dict[str, Any],
        take_in: Callable[[str], Awaitable[None]],
        leave_out: Callable[[str], Awaitable[None]],
        is_excused: Callable[[], bool],
    ) -> None:
        self._plan = plan
        self._launcher = launcher
        self._restarts = restarts
        self._startup_timeout = startup_timeout
        self._unhealthy_timeout = unhealthy_timeout
        self._kwargs = kwargs
        self._take_in = take_in
        self._leave_out = leave_out
        self._is_excused = is_excused
        self._process: ReplicaProcess | None = None
        self.state: State = "waiting"
        self.restarted = 0
        """How often it was started again."""
        self.cause = ""
        """Why it is not serving, with the end of its log."""

    @property
    def name(self) -> str:
        """For messages."""
        return f"replica {self._plan.index}"

    @property
    def url(self) -> str | None:
        """Where the replica listens, or will; None while none runs."""
        return self._process.url if self._process is not None else None

    async def start(self) -> str:
        """Starts the replica for the first time; returns its URL.

        Raises:
            EngineError: it ended, or was not healthy in time; with the end of its log.
        """
        for attempt in range(1 + _OTHER_PORTS):
            try:
                await self._start()
                break
            except _PortTakenError as error:
                if attempt == _OTHER_PORTS:
                    raise
                _LOG.warning("%s\n%s tries another port", error, self.name)
                await self.stop()
        assert self._process is not None
        self.state = "serving"
        return self._process.url

    async def run(self) -> None:
        """Watches the replica that `start` started and starts it anew, until it is given up, or cancelled."""
        pause: float | None = await self._watch(time.monotonic())
        while pause is not None:
            self.state = "waiting"
            _LOG.warning("%s\n%s is started again in %g s", self.cause, self.name, pause)
            await asyncio.sleep(pause)
            self.restarted += 1
            try:
                await self._start()
                assert self._process is not None
                await self._take_in(self._process.url)
            except (EngineError, OSError) as error:  # no descriptor is left, for one: that may pass
                await self.stop()
                self.cause = str(error)
                pause = self._restarts.after_failed_start()
                continue
            self.state, self.cause = "serving", ""
            began = time.monotonic()
            _LOG.warning("%s is back, at %s", self.name, self._process.url)
            pause = await self._watch(began)
        self.state = "given up"
        _LOG.error(
            "%s is given up after %d starts in a row that failed: %s",
            *(self.name, self._restarts.failures, self.cause),
        )

    async def stop(self) -> None:
        """Ends the replica, and all that it started."""
        process, self._process = self._process, None
        if process is not None:
            try:
                await process.stop()
            except asyncio.CancelledError:
                self._process = process  # who cancels stops it again
                raise

    async def _start(self) -> None:
        """Starts the replica and waits until it is healthy. Raises `EngineError`."""
        self.state = "starting"
        self._process = process = await self._launcher.start(self._plan)
        ended = asyncio.ensure_future(process.wait())
        server = HttpServer(process.url, self._kwargs)
        try:
            async with asyncio.timeout(self._startup_timeout):
                while not ended.done():
                    if await self._is_healthy(server) and await process.is_listening():
                        return
                    await asyncio.wait((ended,), timeout=_START_PROBE_S)
            error_type = _PortTakenError if await process.is_port_taken() else EngineError
            raise error_type(f"{self.name} {ended.result()} before it was healthy{await _details(process)}")
        except TimeoutError:
            await self.stop()
            raise EngineError(
                f"{self.name} was not healthy within {self._startup_timeout:g} s "
                "(actor_rollout_ref.rollout.launch.startup_timeout), and was stopped"
                f"{await _details(process)}"
            ) from None
        finally:
            ended.cancel()
            await server.close()

    async def _watch(self, began: float) -> float:
        """Returns when the replica is gone, with the pause before the next start. `cause` says why."""
        process = self._process
        assert process is not None
        server = HttpServer(process.url, self._kwargs)
        ended = asyncio.ensure_future(process.wait())
        healthy_at = time.monotonic()
        try:
            while True:
                await asyncio.wait((ended,), timeout=min(_WATCH_PROBE_S, self._unhealthy_timeout / 4))
                if ended.done():
                    self.cause = f"{self.name} {ended.result()}{await _details(process)}"
                    break
                # The probe's own time counts: a server that hangs is asked with a bound.
                if self._is_excused() or await self._is_healthy(server):
                    healthy_at = time.monotonic()
                elif time.monotonic() - healthy_at >= self._unhealthy_timeout:
                    self.cause = (
                        f"{self.name} runs, but was not healthy for {self._unhealthy_timeout:g} s "
                        "(actor_rollout_ref.rollout.launch.unhealthy_timeout), and was stopped"
                        f"{await _details(process)}"
                    )
                    break
        finally:
            ended.cancel()
            await server.close()
        served = time.monotonic() - began
        self.state = "waiting"
        await self._leave_out(process.url)
        await self.stop()
        return self._restarts.after_serving(served)

    async def _is_healthy(self, server: HttpServer) -> bool:
        timeout = min(server.health_timeout, self._unhealthy_timeout)
        return await is_answered(server.get("/health", timeout_s=timeout)) == 200


class _PortTakenError(EngineError):
    """Another program has the port that was the replica's."""


async def _details(process: ReplicaProcess) -> str:
    """Command and log's end, for a message."""
    words = await process.last_words()
    return f"\n  command: {process.what}\n" + (
        "  the end of its log:\n" + "\n".join(f"    {line}" for line in words.splitlines())
        if words
        else "  it wrote nothing to its log"
    )
