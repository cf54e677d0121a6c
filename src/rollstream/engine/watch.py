"""What a pool does beside its requests: moves stragglers, and finds replicas that hang."""

import asyncio
import logging
from collections.abc import Callable, Mapping

from rollstream.engine.flight import Flight, Stretch
from rollstream.engine.replica import Replica
from rollstream.engine.routing import Router
from rollstream.engine.stragglers import Running, choose_moves, has_slower

logger = logging.getLogger(__name__)

_TICK_S = 0.25
"""Between two looks. While all are busy a look takes less than a millisecond, whatever is in flight."""

_CHECKS = 2
"""Health checks in a row that must fail: one that takes too long may be a server that is very busy."""

_PAUSE_S = 1.0
"""Between two health checks of a replica that hangs."""


class PoolWatch:
    """Looks at a pool again and again. Owns its task and the health checks that it makes.

    A replica that has had requests for `probe_after` seconds and answered none is asked for its health. If it
    says no, or nothing, twice, it hangs: its requests go on elsewhere, and it gets nothing until it says yes,
    or has been made fit.

    Args:
        router: of the pool; told what is found.
        replicas: of the pool, as they are at any time.
        flights: likewise.
        probe_after: seconds; 0: never.
        move: whether stragglers move.
        abort: tells the replica to end a request, without waiting for that.
        is_excused: whether a replica may be deaf now, as while it loads other weights.
    """

    def __init__(
        self,
        router: Router,
        replicas: Mapping[str, Replica],
        flights: Mapping[str, Flight],
        *,
        probe_after: float,
        move: bool,
        abort: Callable[[Stretch], None],
        is_excused: Callable[[str], bool],
    ) -> None:
        self._router = router
        self._replicas = replicas
        self._flights = flights
        self._probe_after = probe_after
        self._move = move
        self._abort = abort
        self._is_excused = is_excused
        self._task: asyncio.Task[None] | None = None
        self._probes: dict[str, asyncio.Task[None]] = {}
        self.moved = 0
        """Requests that were moved so far."""

    def start(self) -> None:
        """Begins to look."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Ends it all. Raises what made it end before."""
        probes = list(self._probes.values())
        for task in (self._task, *probes):
            if task is not None:
                task.cancel()
        await asyncio.gather(*probes, return_exceptions=True)
        if self._task is not None:
            await asyncio.wait((self._task,))
            if not self._task.cancelled():
                self._task.result()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            if self._move:
                self.move_stragglers()
            if self._probe_after:
                self._listen()

    def move_stragglers(self) -> None:
        """Sends stragglers on their way to replicas that are idle and faster, if there are any."""
        lanes = self._router.lanes()
        if not has_slower(lanes):
            return
        now = self._router.now()
        running = [
            Running(
                flight.request_id,
                stretch.pick.name,
                now - stretch.pick.began,
                len(stretch.request.prompt_ids),
                stretch.request.sampling.max_tokens,
                flight.moves,
            )
            for flight in self._flights.values()
            if flight.may_move and (stretch := flight.stretch) is not None
        ]
        for move in choose_moves(lanes, running):
            flight = self._flights[move.request_id]
            stretch = flight.stretch
            seat = self._router.take(move.to, move.request_id)
            if seat is None or stretch is None:
                continue
            logger.debug("%s moves from %s to %s", move.request_id, stretch.pick.name, move.to)
            self.moved += 1
            flight.seat = seat
            flight.moves += 1
            stretch.request.aborted = True
            self._abort(stretch)

    def _listen(self) -> None:
        hung = self._router.hung
        for name in {*self._router.silent(self._probe_after), *hung} - self._probes.keys():
            if name in self._replicas and not self._is_excused(name):
                self._probes[name] = asyncio.get_running_loop().create_task(self._probe(name, name in hung))

    async def _probe(self, name: str, hangs: bool) -> None:
        try:
            replica = self._replicas[name]
            for _ in range(1 if hangs else _CHECKS):
                if await replica.health():
                    self._router.heard(name)
                    if hangs:
                        logger.warning("%s is back", name)
                    return
            if hangs:
                await asyncio.sleep(_PAUSE_S)
                return
            if self._is_excused(name):
                return  # it has begun to load meanwhile
            self._router.hang(name)
            held = [
                stretch
                for flight in self._flights.values()
                if (stretch := flight.stretch) is not None and stretch.pick.name == name
            ]
            logger.warning(
                "%s has answered nothing for %g s and is not healthy: its %d requests go elsewhere",
                name,
                self._probe_after,
                len(held),
            )
            for stretch in held:
                stretch.pull()
        finally:
            del self._probes[name]
