"""Which replicas of a pool may get requests: a replica is ready, or one coroutine makes it so.

    not ready --(says that it is what the run needs, loads the wanted weights, is healthy)--> ready
        ^                                                                                       |
        +--(gone, hung, fails again and again, has other weights, missed an update)-------------+

A server that comes back may be another one: restarted with other options, another model, or its first weights.
So whatever the reason was, the way back is the same. Until the first update the wanted weights are those that
the servers began with, wherever they are from; after it, a replica that was away loads the wanted ones again.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from rollstream.aio import Backoff, any_true, finish_despite_cancellation
from rollstream.engine.base import TopScores
from rollstream.engine.replica import (
    INITIAL_WEIGHTS,
    Replica,
    ReplicaUnavailableError,
    Weights,
    WeightsLostError,
)
from rollstream.engine.weight_channel import SentWeights
from rollstream.engine.weight_deltas import CopiedWeights
from rollstream.engine.weight_probe import (
    PROBE_IDS,
    ProbeScores,
    differ,
    difference,
    find_problem,
    read_probe,
)
from rollstream.errors import EngineError, EngineUnavailableError, RollstreamError, TransientEngineError

_LOG = logging.getLogger(__name__)

_FIRST_PAUSE_S, _PAUSE_S_MAX = 0.5, 5.0
"""Between tries. Asking a server what it is costs next to nothing, and one that is back should be used soon; a
load that fails may keep its disk busy for minutes."""

_UNCHANGED = 1e-6
"""Nats. The same weights give the same log-probs, but for what else is in the batch: nothing, in an update."""

_CLOSE_WAIT_S = 30.0
"""For loads that are under way when the engine is closed: one that is cut off may leave a server without any
weights. Most servers need less, and whoever closes the engine waits."""

_PASSING = (EngineUnavailableError, TransientEngineError)


@dataclass(slots=True, eq=False)
class Member:
    """A replica of the pool, and what is known of it."""

    replica: Replica
    is_ready: bool = False
    cause: str = ""
    """Why it is not ready."""
    weights: Weights | None = INITIAL_WEIGHTS
    """None when nobody knows which it holds."""
    is_loading: bool = False
    """It loads weights to become ready."""
    scores: ProbeScores | None = None
    """By the weights that it has loaded last; None: not known."""

    in_flight: int = 0
    alive_at: float = 0.0
    """When it last answered, or began to have work, by the event loop's clock."""
    failures: int = 0
    """Requests in a row that it failed at."""

    backoff: Backoff = field(default_factory=lambda: Backoff(_FIRST_PAUSE_S, _PAUSE_S_MAX))
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Ends a pause."""
    tried: asyncio.Event = field(default_factory=asyncio.Event)
    """Set after each try to make it ready."""
    task: "asyncio.Task[None] | None" = None
    """Makes it ready."""

    @property
    def name(self) -> str:
        return self.replica.name


class Readiness:
    """Knows which replicas are ready, makes the others so, and changes the weights of all. Owns its tasks.

    Args:
        replicas: those that are there from the start; `begin` says whether they are ready.
        check: asks a replica what it is; raises `EngineError` when it is not what the run needs.
        score: log-probs of ids by a replica, see `ScoresIds`; None of one that gives none.
    """

    def __init__(
        self,
        replicas: Iterable[Replica],
        check: Callable[[Replica], Awaitable[None]],
        score: Callable[[Replica, list[int]], Awaitable[TopScores | None]],
    ) -> None:
        self.members = {replica.name: Member(replica) for replica in replicas}
        self.ready: dict[str, Member] = {}
        """Replicas that may get requests, by name."""
        self.wanted = INITIAL_WEIGHTS
        """The weights that every ready replica holds."""
        self.newest = INITIAL_WEIGHTS
        """The weights of the update that is under way, else the wanted ones: servers may answer with them already."""
        self._check = check
        self._score = score
        self._said_unchanged = False
        self._one_update = asyncio.Lock()
        self.settled = asyncio.Event()
        """Set while no update is under way: only then a replica may be given requests."""
        self.settled.set()
        self._closed = False

    async def join(self, replica: Replica) -> bool:
        """Takes in a replica if it can be made ready now, and returns whether it is in. Raises as `_make_ready`."""
        member = Member(replica)
        if await self._make_ready(member):
            self.members[member.name] = member
            self._set_ready(member)
        return member.is_ready

    def begin(self, member: Member, cause: str) -> None:
        """Lets a replica have requests, or has it made ready where there is a `cause` why it is not."""
        if not cause:
            self._set_ready(member)
            return
        member.cause = cause
        if not self._closed:
            member.wake.clear()
            member.task = asyncio.get_running_loop().create_task(self._until_ready(member))

    async def remove(self, name: str) -> None:
        """Leaves a replica out. An unknown name is fine."""
        if (member := self.members.pop(name, None)) is not None:
            self._set_not_ready(member)
            if member.task is not None:
                member.task.cancel()
            await member.replica.close()

    def lost(self, member: Member, cause: str) -> None:
        """Told that a replica cannot serve, and why. One that is not ready already, or was removed: fine."""
        if member.is_ready:
            self._set_not_ready(member)
            if self.wanted != INITIAL_WEIGHTS:  # it may have been started anew
                member.weights = None
            self.begin(member, cause)

    def causes(self) -> dict[str, str]:
        """Why replicas are not ready, by name."""
        return {name: member.cause for name, member in self.members.items() if not member.is_ready}

    def is_loading(self, name: str) -> bool:
        """Whether a replica loads weights: it may be deaf, paused and not healthy meanwhile."""
        return not self.settled.is_set() or (name in self.members and self.members[name].is_loading)

    async def try_now(self, seconds: float) -> bool:
        """Tries at once to make replicas ready. Returns whether one is, at the latest after so many seconds."""

        async def becomes_ready(member: Member) -> bool:
            await member.tried.wait()
            return member.is_ready

        waiting = [member for member in self.members.values() if not member.is_ready]
        for member in waiting:
            member.tried.clear()
            member.wake.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await any_true(map(becomes_ready, waiting))
        return bool(self.ready)

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
            self.settled.clear()
            self.newest = Weights(source, version)
            try:
                await finish_despite_cancellation(self._update(self.newest))
            finally:
                self.newest = self.wanted
                self.settled.set()
        if not self.ready:
            await self.try_now(_PAUSE_S_MAX)

    async def close(self) -> None:
        """Ends all tasks; loads that are under way have a while to come to their end."""
        self._closed = True
        working = {member.task: member for member in self.members.values() if member.task is not None}
        for task, member in working.items():
            if not member.is_loading:
                task.cancel()
        if working:
            _, late = await asyncio.wait(working, timeout=_CLOSE_WAIT_S)
            for task in late:
                _LOG.warning("%s still loads weights, and is left alone", working[task].name)
                task.cancel()

    def _set_ready(self, member: Member) -> None:
        member.is_ready, member.task, member.cause = True, None, ""
        self.ready[member.name] = member

    def _set_not_ready(self, member: Member) -> None:
        member.is_ready = False
        self.ready.pop(member.name, None)

    async def _until_ready(self, member: Member) -> None:
        while not member.is_ready:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(member.backoff.pause()):
                    await member.wake.wait()
            member.wake.clear()
            try:
                if await self._make_ready(member):
                    self._set_ready(member)
            except RollstreamError as error:
                if str(error) != member.cause:
                    member.cause = str(error)
                    level = logging.INFO if isinstance(error, _PASSING) else logging.ERROR
                    _LOG.log(level, "%s gets no work: %s", member.name, error)
            except Exception as error:  # a bug must not take a replica out for good without a word
                member.cause = f"{member.name}: {error!r}"
                _LOG.exception("%s cannot be made ready", member.name)
            member.tried.set()

    async def _make_ready(self, member: Member) -> bool:
        """One try: whether a replica is what the run needs, has the wanted weights and is healthy.

        Raises:
            EngineError: it is not, and why; `ReplicaUnavailableError` where that may pass by itself.
        """
        await self._check(member.replica)  # also before a load: it may be another server by now
        while True:
            await self.settled.wait()
            if member.weights != self.wanted:
                await self._load(member)
            elif not await member.replica.health():
                return False
            elif self.settled.is_set() and member.weights == self.wanted:
                return True

    async def _load(self, member: Member) -> None:
        """Has a replica load the wanted weights. Raises `ReplicaUnavailableError`."""
        name, weights = member.name, self.wanted
        if weights == INITIAL_WEIGHTS:
            raise ReplicaUnavailableError(
                f"{name} was lost while it loaded weights, and nobody knows which it has: update again"
            )
        _LOG.info("%s loads the weights of version %d before it goes on", name, weights.version)
        member.is_loading = True
        try:
            await self._load_and_probe(member, weights)
            self._compare(member, [other for other in self.ready.values() if other.weights == weights])
        except EngineError as error:
            raise ReplicaUnavailableError(
                f"{name} has no weights of version {weights.version}: {error}"
            ) from error
        finally:
            member.is_loading = False
        member.weights = weights

    async def _update(self, weights: Weights) -> None:
        free = [member for member in self.members.values() if not member.is_loading]
        checks = await asyncio.gather(*(member.replica.health() for member in free))
        healthy = [member for member, is_healthy in zip(free, checks, strict=True) if is_healthy]
        asked = healthy or free  # one that a failed update has paused says that it is not healthy
        if self.wanted == INITIAL_WEIGHTS:
            # Not of one that is paused: it would not answer.
            await asyncio.gather(*(self._probe(member, None) for member in healthy))
        answers = await asyncio.gather(
            *(self._load_and_probe(member, weights) for member in asked), return_exceptions=True
        )
        loaded = [member for member, answer in zip(asked, answers, strict=True) if answer is None]
        errors: dict[str, EngineError] = {}
        try:
            for member, answer in zip(asked, answers, strict=True):
                before, member.weights = member.weights, None
                try:
                    if answer is not None:
                        raise answer
                    self._compare(member, loaded)
                    member.weights = self.wanted = weights
                except EngineError as error:
                    errors[member.name] = error
                    was_away = not healthy and isinstance(error, ReplicaUnavailableError)
                    if was_away or not isinstance(error, (*_PASSING, WeightsLostError)):
                        member.weights = before  # nothing was loaded
        finally:
            for member in [*self.members.values()]:
                if member.weights != self.wanted:
                    self.lost(member, f"{member.name} has no weights of version {self.wanted.version}")
        causes = [f"{name}: {error}" for name, error in errors.items()]
        causes += [
            f"{name}: it is not healthy, or loads older weights"
            for name in self.members.keys() - {member.name for member in asked}
        ]
        text = "; ".join(causes)
        if len(errors) == len(asked):
            if all(isinstance(error, ReplicaUnavailableError) for error in errors.values()):
                raise EngineUnavailableError(f"no server is there to load weights ({text})")
            raise EngineError(f"none of {len(asked)} replicas could load {weights.source} ({text})")
        if causes:
            _LOG.warning("without the weights of version %d replicas get no work: %s", weights.version, text)

    async def _load_and_probe(self, member: Member, weights: Weights) -> None:
        """Raises what `Replica.update_weights` does; `WeightsLostError` where it has other weights afterwards."""
        await member.replica.update_weights(weights.source, weights.version)
        await self._probe(member, weights.source)

    async def _probe(self, member: Member, source: str | None) -> None:
        """Notes log-probs of a replica, which has loaded `source`, or is as it began (None).

        Raises:
            WeightsLostError: it has other weights than those of `source`.
        """
        before, member.scores = member.scores, None
        try:
            found = await self._score(member.replica, list(PROBE_IDS))
        except EngineError as error:
            if source is None or not isinstance(error, _PASSING):
                _LOG.info("%s gives no log-probs of given ids: %s", member.name, error)
                return  # an older server, say: whether weights arrive there is not seen
            raise WeightsLostError(
                f"{member.name} has loaded {source}, and fails since then: {error}"
            ) from error
        if found is None:
            return
        scores = found.logprobs
        if source is None:  # what a server began with is nobody's update
            member.scores = ProbeScores(scores, None)
            return
        if isinstance(source, SentWeights | CopiedWeights):
            trainers = source.logprobs
        else:
            trainers = await asyncio.to_thread(read_probe, source)
        now = ProbeScores(scores, trainers)
        if (problem := find_problem(now, before)) is not None:
            raise WeightsLostError(f"{member.name} has loaded {source}, but {problem}")
        member.scores = now
        is_unchanged = before is not None and difference(scores, before.engine) < _UNCHANGED
        if is_unchanged and now.trainer is None and not self._said_unchanged:
            self._said_unchanged = True
            _LOG.warning(
                "%s has loaded %s, and its log-probs did not change: the same weights as before?",
                member.name,
                source,
            )

    def _compare(self, member: Member, others: Iterable[Member]) -> None:
        """Raises `WeightsLostError` where log-probs are not those of most others with the same weights."""
        known = [other.scores.engine for other in {member, *others} if other.scores is not None]
        if member.scores is not None and differ(member.scores.engine, known):
            raise WeightsLostError(f"{member.name} has other log-probs than replicas with the same weights")
