"""Which replicas of a pool may get requests: a replica is ready, or one coroutine makes it so.

    not ready --(says that it is what the run needs, loads the wanted weights, is healthy)--> ready
        ^                                                                                       |
        +--(gone, hung, fails again and again, has other weights, missed an update)-------------+

A server that comes back may be another one: restarted with other options, another model, or its first weights.
So whatever the reason was, the way back is the same. Until the first update the wanted weights are those that
the servers began with, wherever they are from; after it, a replica that was away loads the wanted ones again.

A request goes to a ready replica. Where there is none, they are tried once more at once; the request waits for
that, but not for a load of weights.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from rollstream.aio import Backoff, finish_despite_cancellation
from rollstream.engine.replica import (
    INITIAL_WEIGHTS,
    Replica,
    ReplicaUnavailableError,
    Weights,
    WeightsLostError,
)
from rollstream.errors import EngineError, EngineUnavailableError, RollstreamError, TransientEngineError

_LOG = logging.getLogger(__name__)

_FIRST_PAUSE_S, _PAUSE_S_MAX = 0.5, 5.0
"""Between tries. Asking a server what it is costs next to nothing, and one that is back should be used soon; a
load that fails may keep its disk busy for minutes."""

_CLOSE_WAIT_S = 30.0
"""For loads that are under way when the engine is closed: one that is cut off may leave a server without any
weights. Most servers need less, and whoever closes the engine waits."""

LoadResult = Literal["loaded", "refused", "unknown", "not asked"]
"""How a replica fared in an update: it has the new weights, it kept the old ones, nobody knows, it was away."""


class WeightTracker:
    """Which weights each replica holds, as far as is known, and which it should. Pure."""

    def __init__(self) -> None:
        self.wanted = INITIAL_WEIGHTS
        self._loaded: dict[str, Weights | None] = {}

    def loaded(self, name: str) -> Weights | None:
        """What a replica holds; None when nobody knows."""
        return self._loaded.get(name, INITIAL_WEIGHTS)

    def needs_load(self, name: str) -> bool:
        """Whether a replica must load the wanted weights before it generates."""
        return self.loaded(name) != self.wanted

    def record(self, name: str, weights: Weights) -> None:
        """A replica has loaded weights."""
        self._loaded[name] = weights

    def lost(self, name: str) -> None:
        """A replica was away: it may have been started anew. Before the first update that is nobody's loss."""
        if self.wanted != INITIAL_WEIGHTS:
            self._loaded[name] = None

    def forget(self, name: str) -> None:
        """A replica has left the pool."""
        self._loaded.pop(name, None)

    def settle(self, weights: Weights, results: Mapping[str, LoadResult]) -> None:
        """Ends an update. The new weights are wanted when at least one replica has them."""
        for name, result in results.items():
            if result == "loaded":
                self._loaded[name] = weights
            elif result == "unknown":
                self._loaded[name] = None
        if "loaded" in results.values():
            self.wanted = weights


@dataclass(slots=True, eq=False)
class _Member:
    replica: Replica
    cause: str = ""
    """Why it is not ready."""
    served: bool = False
    """It has answered since it became ready: then the first try to make it ready again needs no pause."""
    backoff: Backoff = field(default_factory=lambda: Backoff(_FIRST_PAUSE_S, _PAUSE_S_MAX))
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Ends a pause."""
    tried: asyncio.Event = field(default_factory=asyncio.Event)
    """A try has failed."""
    task: "asyncio.Task[None] | None" = None
    """Makes it ready."""


class Readiness:
    """Knows which replicas are ready, makes the others so, and changes the weights of all. Owns its tasks.

    Args:
        check: asks a replica what it is; raises `EngineError` when it is not what the run needs.
    """

    def __init__(self, check: Callable[[Replica], Awaitable[None]]) -> None:
        self._check = check
        self.weights = WeightTracker()
        self.ready: dict[str, Replica] = {}
        """Replicas that may get requests, by name."""
        self._members: dict[str, _Member] = {}
        self._loading: set[str] = set()
        self._any_ready = asyncio.Event()
        self._one_update = asyncio.Lock()
        self._settled = asyncio.Event()
        self._settled.set()
        self._closed = False

    def add(self, replica: Replica, *, cause: str | None = None) -> None:
        """Takes in a replica that is ready, or the `cause` why it is not."""
        member = self._members[replica.name] = _Member(replica)
        if cause is None:
            self._set_ready(member)
        else:
            self._begin(member, cause)

    def remove(self, name: str) -> None:
        """Leaves a replica out. An unknown name is fine."""
        self._set_not_ready(name)
        self.weights.forget(name)
        member = self._members.pop(name, None)
        if member is not None and member.task is not None:
            member.task.cancel()

    def lost(self, name: str, cause: str) -> None:
        """Told that a replica cannot serve, and why. One that is not ready already, or is not known: fine."""
        if self._set_not_ready(name):
            self.weights.lost(name)
            self._begin(self._members[name], cause)

    def answered(self, name: str) -> None:
        """Told that a replica has answered a request."""
        if name in self.ready:
            member = self._members[name]
            if not member.served:
                member.served = True
                member.backoff.reset()

    def causes(self) -> dict[str, str]:
        """Why replicas are not ready, by name."""
        return {name: one.cause for name, one in self._members.items() if name not in self.ready}

    def is_loading(self, name: str) -> bool:
        """Whether a replica loads weights: it may be deaf, paused and not healthy meanwhile."""
        return not self._settled.is_set() or name in self._loading

    async def make_ready(self, replica: Replica) -> bool:
        """One try: whether a replica is what the run needs, has the wanted weights and is healthy.

        Raises:
            EngineError: it is not, and why; `ReplicaUnavailableError` where that may pass by itself.
        """
        await self._check(replica)  # also before a load: it may be another server by now
        while True:
            await self._settled.wait()
            if self.weights.needs_load(replica.name):
                await self._load(replica)
            elif not await replica.health():
                return False
            elif self._settled.is_set() and not self.weights.needs_load(replica.name):
                return True

    async def try_now(self, seconds: float) -> bool:
        """Tries at once to make replicas ready. Returns whether one is, at the latest after so many seconds."""
        members = [member for name, member in self._members.items() if name not in self.ready]
        for member in members:
            member.wake.set()
            member.tried.clear()
        waits = [asyncio.ensure_future(self._any_ready.wait()), asyncio.ensure_future(_all_tried(members))]
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return bool(self.ready)

    @property
    def is_settled(self) -> bool:
        """Whether no update is under way: only then a replica may be given requests."""
        return self._settled.is_set()

    async def settled(self) -> None:
        """Returns when no update is under way."""
        await self._settled.wait()

    async def update(self, source: str, version: int) -> None:
        """Loads weights on all replicas; one update at a time.

        Replicas are asked that are healthy and load nothing, if there are any: one that hangs, or is busy with
        weights of before, would keep all waiting. When at least one has loaded them, they are the wanted ones,
        and this returns: a replica that has not gets no request before it has. Requests that replicas have in
        flight are the caller's to end: see `ContinuingEngine`.

        Cancelling this takes effect when all replicas have answered.

        Raises:
            EngineUnavailableError: no replica is there. Nothing has changed.
            EngineError: none could load them; the old weights stay wanted. A replica that was lost midway
                loads those again; before the first update that went well nobody knows where they are, and
                such a replica gets no request.
        """
        async with self._one_update:
            self._settled.clear()
            try:
                await finish_despite_cancellation(self._update(Weights(source, version)))
            finally:
                self._settled.set()
        if not self.ready:
            await self.try_now(_PAUSE_S_MAX)

    async def close(self) -> None:
        """Ends all tasks; loads that are under way have a while to come to their end."""
        self._closed = True
        tasks = {name: one.task for name, one in self._members.items() if one.task is not None}
        for name, task in tasks.items():
            if name not in self._loading:
                task.cancel()
        if tasks:
            _, late = await asyncio.wait(tasks.values(), timeout=_CLOSE_WAIT_S)
            for task in late:
                _LOG.warning("%s: still loads weights, and is left alone", task.get_name())
                task.cancel()

    def _set_ready(self, member: _Member) -> None:
        member.task, member.served, member.cause = None, False, ""
        self.ready[member.replica.name] = member.replica
        self._any_ready.set()

    def _set_not_ready(self, name: str) -> bool:
        """Returns whether it was ready."""
        was_ready = self.ready.pop(name, None) is not None
        if not self.ready:
            self._any_ready.clear()
        return was_ready

    def _begin(self, member: _Member, cause: str) -> None:
        member.cause = cause
        if not self._closed:
            member.wake.clear()
            name = f"make-ready-{member.replica.name}"
            member.task = asyncio.get_running_loop().create_task(self._until_ready(member), name=name)

    async def _until_ready(self, member: _Member) -> None:
        if not member.served:
            await self._pause(member)
        while not await self._try(member):
            member.tried.set()
            await self._pause(member)
        self._set_ready(member)

    async def _try(self, member: _Member) -> bool:
        name = member.replica.name
        try:
            return await self.make_ready(member.replica)
        except RollstreamError as error:
            if str(error) != member.cause:
                member.cause = str(error)
                is_passing = isinstance(error, EngineUnavailableError | TransientEngineError)
                _LOG.log(logging.INFO if is_passing else logging.ERROR, "%s gets no work: %s", name, error)
        except Exception as error:  # a bug must not take a replica out for good without a word
            member.cause = f"{name}: {error!r}"
            _LOG.exception("%s cannot be made ready", name)
        return False

    async def _pause(self, member: _Member) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(member.backoff.pause()):
                await member.wake.wait()
        member.wake.clear()

    async def _load(self, replica: Replica) -> None:
        """Has a replica load the wanted weights. Raises `ReplicaUnavailableError`."""
        name, weights = replica.name, self.weights.wanted
        if weights == INITIAL_WEIGHTS:
            raise ReplicaUnavailableError(
                f"{name} was lost while it loaded weights, and nobody knows which it has: update again"
            )
        _LOG.info("%s loads the weights of version %d before it goes on", name, weights.version)
        self._loading.add(name)
        try:
            await replica.update_weights(weights.source, weights.version)
        except EngineError as error:
            raise ReplicaUnavailableError(
                f"{name} has no weights of version {weights.version}: {error}"
            ) from error
        finally:
            self._loading.discard(name)
        self.weights.record(name, weights)

    async def _update(self, weights: Weights) -> None:
        replicas = [one.replica for name, one in self._members.items() if name not in self._loading]
        checks = await asyncio.gather(*(replica.health() for replica in replicas))
        healthy = [replica for replica, is_healthy in zip(replicas, checks, strict=True) if is_healthy]
        # One that a failed update has paused says that it is not healthy.
        asked = healthy or replicas
        answers = await asyncio.gather(
            *(replica.update_weights(weights.source, weights.version) for replica in asked),
            return_exceptions=True,
        )
        errors = {one.name: f"{one.name}: it is not healthy, or loads older weights" for one in replicas}
        results: dict[str, LoadResult] = {}
        for replica, answer in zip(asked, answers, strict=True):
            results[replica.name] = _result(answer, was_healthy=bool(healthy))
            errors[replica.name] = "" if answer is None else f"{replica.name}: {answer}"
        self.weights.settle(weights, results)
        for name in [*self._members]:
            if self.weights.needs_load(name):
                self.lost(name, f"{name} has no weights of version {self.weights.wanted.version}")
        for answer in answers:
            if answer is not None and not isinstance(answer, RollstreamError):
                raise answer
        causes = "; ".join(filter(None, errors.values()))
        if "loaded" in results.values():
            if causes:
                _LOG.warning(
                    "these replicas get no work before they have the weights of version %d: %s",
                    weights.version,
                    causes,
                )
        elif set(results.values()) <= {"not asked"}:
            raise EngineUnavailableError(f"no server is there to load weights ({causes})")
        else:
            raise EngineError(f"none of {len(results)} replicas could load {weights.source} ({causes})")


async def _all_tried(members: Iterable[_Member]) -> bool:
    for member in members:
        await member.tried.wait()
    return True


def _result(answer: BaseException | None, *, was_healthy: bool) -> LoadResult:
    if answer is None:
        return "loaded"
    if isinstance(answer, ReplicaUnavailableError) and not was_healthy:
        return "not asked"
    may_be_halfway = EngineUnavailableError | TransientEngineError | WeightsLostError
    return (
        "unknown" if isinstance(answer, may_be_halfway) or not isinstance(answer, EngineError) else "refused"
    )
