"""An engine made of replicas: servers of the same model that come and go.

    wait for the end of an update --> a ready replica --> it answers                          --> done
                                        ^                 it is gone, or failed at the request --+
                                        +--- another one ----------------------------------------+

    no replica is ready, or all are gone    --> EngineUnavailableError: the caller waits, nothing is charged
    some are there, and all failed at it    --> TransientEngineError: charged as an attempt
    the request is at fault                 --> EngineError, at once

Which replicas are ready, and their weights: `readiness`.
"""

import asyncio
import itertools
import logging
import random
import secrets
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from rollstream.aio import any_true
from rollstream.engine.adapters import check_takes
from rollstream.engine.base import (
    Capabilities,
    ChatPrompt,
    EngineLoad,
    ReportsLoad,
    ScoresIds,
    TopScores,
)
from rollstream.engine.checks import check_request, ids_fit, least
from rollstream.engine.load import LoadSum
from rollstream.engine.readiness import Member, Readiness
from rollstream.engine.replica import (
    INITIAL_WEIGHTS,
    Replica,
    ReplicaRequest,
    ReplicaUnavailableError,
    Weights,
)
from rollstream.errors import ConfigError, EngineError, EngineUnavailableError, TransientEngineError
from rollstream.trajectory import Completion, SamplingParams

logger = logging.getLogger(__name__)

POOL_KWARGS: dict[str, Any] = {
    "probe_after": 30.0,  # seconds without an answer after which a server is asked for its health; 0: never
}
"""Keys of `engine_kwargs` for every pool, with their defaults."""

_ABORT_TIMEOUT_S = 10.0
"""For a replica to end a request that was aborted: a step of the model, or a round trip. Then its tokens are
given up: an update empties the engine first, and must not wait for a server."""

_TRY_WAIT_S = 2.0
"""For a replica to become ready when none is: asking a server what it is takes milliseconds, loading weights
takes longer than anybody should wait here."""

_FAILURES_MAX = 5
"""One bad reply is an accident; five in a row, with requests in between going well elsewhere, are a state."""

_HEALTH_CHECKS = 2
"""Health checks in a row that must fail: one that takes too long may be a server that is very busy."""

_REMEMBERED_SESSIONS = 8_192
"""A session is a rollout; some times as many as are in flight. One that is forgotten loses a cached prefix."""

_STICKY_MARGIN, _STICKY_FACTOR = 4, 2
"""A session leaves its replica when that has at least so many more requests than another (small numbers differ
by chance), and so many times as many: a cached prefix saves the prompt's computation, not an answer's."""


@dataclass(slots=True, eq=False)
class _PoolRequest:
    """A caller's request, over all the replicas that have a part in it."""

    sent: ReplicaRequest
    member: Member | None = None
    """Works on it; None between two replicas."""
    timeout: asyncio.Timeout | None = None
    """Ends the wait for that one, as if its connection was lost."""
    failures: dict[str, EngineError] = field(default_factory=dict)
    """Replicas that failed at it or went away under it."""

    def end_wait(self, after: float = 0.0) -> None:
        at = asyncio.get_running_loop().time() + after
        if self.member is not None and self.timeout and ((when := self.timeout.when()) is None or at < when):
            self.timeout.reschedule(at)


class Router:
    """Chooses replicas: the one of the request's session while it is not much busier, else the least busy one."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, str] = OrderedDict()

    def pick(self, candidates: Sequence[Member], session: str) -> Member:
        """Picks one of the candidates (at least one) and remembers it for the session."""
        fewest = min(member.in_flight for member in candidates)
        home = self._sessions.get(session)
        for chosen in candidates:
            most = max(fewest + _STICKY_MARGIN - 1, _STICKY_FACTOR * (fewest + 1) - 1)
            if chosen.name == home and chosen.in_flight <= most:
                break
        else:
            chosen = random.choice([member for member in candidates if member.in_flight == fewest])
        self._sessions[session] = chosen.name
        self._sessions.move_to_end(session)
        if len(self._sessions) > _REMEMBERED_SESSIONS:
            self._sessions.popitem(last=False)
        return chosen


class PoolEngine:
    """Drives one or several replicas as one engine.

    Time and connections of requests to healthy replicas are the caller's to bound.

    Args:
        max_model_len: the longest sequence, where that is less than what the replicas say of themselves.
        what: the engine's name, for messages.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        max_model_len: int | None = None,
        what: str = "engine",
        probe_after: float = POOL_KWARGS["probe_after"],
    ) -> None:
        self._router = Router()
        self._readiness = Readiness(replicas, self._check_capabilities, self._score_on)
        self._max_model_len = max_model_len
        self._what = what
        self._probe_after = probe_after
        self._capabilities: Capabilities | None = None
        # A rid of our own on the wire: one that was cancelled may still be known to the server when the same
        # request comes again, and two runs may share a server.
        self._nonce = secrets.token_hex(4)
        self._counter = itertools.count()
        self._requests: dict[str, _PoolRequest] = {}
        self._held: set[Weights] = set()
        self._loads = LoadSum()
        self._watching: asyncio.Task[None] | None = None
        self._aborts: set[asyncio.Task[bool]] = set()
        self._closed = False

    @property
    def capabilities(self) -> Capabilities:
        if self._capabilities is None:
            raise EngineError("the engine has not been started")
        return self._capabilities

    @property
    def replicas(self) -> list[str]:
        """Names of the replicas, in the order they came."""
        return list(self._readiness.members)

    @property
    def ready(self) -> list[str]:
        """Names of the replicas that take requests now."""
        return list(self._readiness.ready)

    def replica_counts(self) -> tuple[int, int]:
        """How many replicas take requests now, and how many there are."""
        return len(self._readiness.ready), len(self._readiness.members)

    def is_loading(self, name: str) -> bool:
        """Whether a replica loads weights, in an update or by itself: it may be deaf meanwhile."""
        return self._readiness.is_loading(name)

    async def start(self) -> None:
        """Asks every replica what it is; at least one has to answer.

        Raises:
            ConfigError: there are no replicas.
            EngineUnavailableError: nobody is there.
            EngineError: a server refuses to say, or is something else than expected.
        """
        if self._capabilities is not None:
            return
        if not self._readiness.members:
            raise ConfigError(f"engine {self._what!r} needs at least one replica")
        try:
            await self._ask_all()
        except BaseException:
            await self.close()
            raise
        if self._probe_after:
            self._watching = asyncio.create_task(self._watch())

    async def add_replica(self, replica: Replica) -> None:
        """Takes in a replica, before the start or while requests go on; it loads the current weights first.

        Raises:
            EngineError: it is not there (`ReplicaUnavailableError`), or cannot do what the others can: a run
                that relies on that must not meet it.
        """
        members = self._readiness.members
        if replica.name in members:
            return
        if self._capabilities is not None:
            is_ready = await self._readiness.join(replica)
        else:  # what all of them are, the start finds out
            await replica.describe()
            if is_ready := await replica.health():
                members[replica.name] = Member(replica)
        if not is_ready:
            raise ReplicaUnavailableError(f"{replica.name} is not healthy")

    async def remove_replica(self, name: str) -> None:
        """Sends nothing more to a replica; its requests in flight go on elsewhere. Unknown names: fine."""
        await self._readiness.remove(name)

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        images: list[object] | None = None,
        chat: ChatPrompt | None = None,
        weights: Weights | None = None,
    ) -> Completion:
        """See `Engine.generate`, `HoldsAdapters`; `chat`: the same as messages, for replicas that speak messages."""
        check_request(prompt_ids, sampling, self.capabilities, images=images)
        sent = ReplicaRequest(prompt_ids, sampling, request_id, "", list(images or ()), False, weights, chat)
        request = self._requests[request_id] = _PoolRequest(sent)
        readiness, failures, has_waited = self._readiness, request.failures, False
        try:
            while not request.sent.aborted:
                if self._closed:
                    raise EngineUnavailableError("the engine is closed")
                if weights is None and not readiness.settled.is_set():
                    await readiness.settled.wait()
                    continue
                candidates = [member for member in readiness.ready.values() if member.name not in failures]
                if candidates:
                    completion = await self._attempt(request, self._router.pick(candidates, request_id))
                    if completion is not None:
                        return completion
                elif has_waited or not readiness.causes().keys() - failures.keys():
                    raise self._refusal(failures)
                else:
                    has_waited = True
                    await readiness.try_now(_TRY_WAIT_S)
        finally:
            self._requests.pop(request_id, None)
        # Aborted, and its replica is gone: what that had is lost, and it is not worth another one.
        return Completion([], [] if sampling.logprobs else None, "abort")

    async def abort(self, request_id: str) -> None:
        if (request := self._requests.get(request_id)) is not None:
            request.sent.aborted = True
            request.end_wait(after=_ABORT_TIMEOUT_S)
            if request.member is not None and not await request.member.replica.abort(request.sent.rid):
                request.end_wait()

    async def score(self, ids: list[int], start: int = 1, top_k: int = 0) -> TopScores:
        """See `ScoresIds.score`; asks the replicas that are ready in turn."""
        check_request(ids, SamplingParams(1), self.capabilities, images=None)
        ready = list(self._readiness.ready.values())
        first = next(self._counter) % max(1, len(ready))
        for member in ready[first:] + ready[:first]:
            if (scores := await self._score_on(member.replica, ids, start, top_k)) is not None:
                return scores
        raise EngineUnavailableError(f"no {self._what} server gives log-probs of given ids now")

    async def update_weights(self, source: str, version: int) -> None:
        """Loads weights on all replicas. One that fails to load is sent no request until it has them.

        New requests wait meanwhile. Requests in flight are the caller's to end first, see `ContinuingEngine`; a
        server may wait for them, or go on with them under the new weights.

        Raises:
            EngineError: none could; the old weights stay. The exact contract: `Readiness.update`.
        """
        check_takes(self._what, self.capabilities, source)
        await self._readiness.update(source, version)
        await self._keep_adapters({self._readiness.wanted, *self._held})

    async def hold(self, held: Collection[Weights]) -> None:
        self._held = {*held}
        await self._keep_adapters(self._held)

    async def health(self) -> bool:
        """Whether at least one replica is ready and healthy; when none is ready, tries to change that."""
        if self._closed or not (self._readiness.ready or await self._readiness.try_now(_TRY_WAIT_S)):
            return False
        return await any_true(member.replica.health() for member in self._readiness.ready.values())

    async def recheck(self) -> bool:
        """Asks each replica for a token. One that has other weights than the last update's gets these again first.

        Returns:
            whether there was one: where others send the requests, nobody here sees it.
        """

        async def is_other(member: Member) -> bool:
            rid = f"recheck.{self._nonce}{next(self._counter)}"
            sent = ReplicaRequest([1], SamplingParams(1, logprobs=False), rid, rid)
            try:
                async with asyncio.timeout(_ABORT_TIMEOUT_S):
                    await self._generate(member.replica, sent)
            except ReplicaUnavailableError as error:
                self._readiness.lost(member, str(error))
                return True
            except (EngineError, TimeoutError):  # it is there, and says nothing of its weights
                pass
            return False

        await self._readiness.settled.wait()
        return any(await asyncio.gather(*map(is_other, [*self._readiness.ready.values()])))

    async def load(self) -> EngineLoad | None:
        """The sum over the replicas that say theirs; None when nobody does."""
        replicas = {name: member.replica for name, member in self._readiness.members.items()}
        asked = {name: replica for name, replica in replicas.items() if isinstance(replica, ReportsLoad)}
        loads = await asyncio.gather(*(replica.load() for replica in asked.values()))
        return self._loads.add(zip(asked, loads, strict=True))

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait((self._watching,))
        try:
            await self._readiness.close()
        finally:
            if self._aborts:
                await asyncio.wait(self._aborts, timeout=_ABORT_TIMEOUT_S)
            await asyncio.gather(*(member.replica.close() for member in self._readiness.members.values()))
        if self._watching is not None and not self._watching.cancelled():
            self._watching.result()  # a bug in it is raised

    async def _attempt(self, request: _PoolRequest, member: Member) -> Completion | None:
        """A replica's answer; None, with the cause in `request.failures`, when others may do better.

        Raises:
            EngineError: the request is at fault.
        """
        name, now = member.name, asyncio.get_running_loop().time
        sent = request.sent
        sent.rid = f"{sent.request_id}.{self._nonce}{next(self._counter)}"
        request.member = member
        if not member.in_flight:
            member.alive_at = now()
        member.in_flight += 1
        try:
            async with asyncio.timeout(None) as request.timeout:
                completion = await self._generate(member.replica, sent)
            self._answered(member)
            return completion
        except TimeoutError:
            if sent.aborted:
                return None
            error: EngineError = ReplicaUnavailableError(f"{name} does not answer, and it is not healthy")
        except (ReplicaUnavailableError, TransientEngineError) as caught:
            error = caught
        except EngineError:
            self._answered(member)
            raise
        except asyncio.CancelledError:
            # Cancellation itself is not delayed; `close` waits for the abort.
            abort = asyncio.create_task(member.replica.abort(sent.rid))
            self._aborts.add(abort)
            abort.add_done_callback(self._aborts.discard)
            raise
        finally:
            request.member = None
            member.in_flight -= 1
        request.failures[name] = error
        member.alive_at = now()
        member.failures += 1
        if isinstance(error, ReplicaUnavailableError):
            self._readiness.lost(member, str(error))
        elif member.failures >= _FAILURES_MAX and len(self._readiness.ready) > 1:
            self._readiness.lost(member, f"{name} failed {member.failures} requests in a row: {error}")
        return None

    async def _generate(self, replica: Replica, sent: ReplicaRequest) -> Completion:
        """A replica's answer. Raises `ReplicaUnavailableError` also when it is not by the wanted weights."""
        wanted = self._readiness.wanted
        completion = await replica.generate(sent)
        if sent.weights is None and wanted != INITIAL_WEIGHTS and completion.token_ids:
            version = completion.policy_versions[-1][1]
            first, last = sorted((wanted.version, self._readiness.newest.version))
            if not first <= version <= last:  # several updates may have begun since it was sent
                raise ReplicaUnavailableError(
                    f"{replica.name} answers with weights of version {version}, but had loaded version "
                    f"{wanted.version}: it was started anew, or somebody else updates it"
                )
        return completion

    def _answered(self, member: Member) -> None:
        member.alive_at = asyncio.get_running_loop().time()
        member.failures = 0
        member.backoff.reset()

    def _refusal(self, failures: Mapping[str, EngineError]) -> EngineError:
        """The error when no replica is left for a request, with what each of them failed at."""
        for error in failures.values():
            if not isinstance(error, ReplicaUnavailableError):
                return error  # one that is there failed at it: trying again may help, and is charged
        causes = self._readiness.causes() | {name: str(error) for name, error in failures.items()}
        return EngineUnavailableError(
            f"no {self._what} server answers ({'; '.join(causes.values()) or 'there is none'})"
        )

    async def _ask_all(self) -> None:
        """Asks all replicas what they are; the common capabilities are the pool's."""
        members = [*self._readiness.members.values()]
        answers = await asyncio.gather(
            *(member.replica.describe() for member in members), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, ReplicaUnavailableError):
                raise answer
        common = common_capabilities([answer for answer in answers if isinstance(answer, Capabilities)])
        if common is None:
            raise EngineUnavailableError(f"no {self._what} server answers ({'; '.join(map(str, answers))})")
        self._capabilities = replace(common, max_model_len=least(common.max_model_len, self._max_model_len))
        for member, answer in zip(members, answers, strict=True):
            cause = "" if isinstance(answer, Capabilities) else str(answer)
            if cause:
                logger.warning("%s server does not answer, going on without it: %s", self._what, cause)
            self._readiness.begin(member, cause)

    async def _keep_adapters(self, kept: Collection[Weights]) -> None:
        """Has the replicas unload all adapters but these."""
        given = [getattr(member.replica, "adapters", None) for member in self._readiness.ready.values()]
        await asyncio.gather(*(adapters.keep(kept) for adapters in given if adapters is not None))

    async def _check_capabilities(self, replica: Replica) -> None:
        if missing := missing_capabilities(await replica.describe(), self.capabilities):
            raise EngineError(f"{replica.name} is not what the run began with: it has {missing}")

    async def _score_on(
        self, replica: Replica, ids: list[int], start: int = 1, top_k: int = 0
    ) -> TopScores | None:
        """Log-probs of ids by one replica; None of one that gives none."""
        can = self.capabilities
        fits = len(ids) < (can.max_model_len or len(ids) + 1) and ids_fit(ids, can.vocab_size)
        if not can.scores or not fits or top_k > can.score_top_k or not isinstance(replica, ScoresIds):
            return None
        return await replica.score(ids, start, top_k)

    async def _watch(self) -> None:
        """Looks for replicas that take requests and answer none."""
        while True:
            await asyncio.sleep(self._probe_after / 4)
            before = asyncio.get_running_loop().time() - self._probe_after
            ready = self._readiness.ready.values()
            silent = [member for member in ready if member.in_flight and member.alive_at < before]
            await asyncio.gather(*map(self._probe, silent))

    async def _probe(self, member: Member) -> None:
        """Asks a silent replica for its health. If it says no, or nothing, twice, its requests go elsewhere."""
        for _ in range(_HEALTH_CHECKS):
            if self.is_loading(member.name) or not member.is_ready or await member.replica.health():
                member.alive_at = asyncio.get_running_loop().time()
                return
        held = [request for request in self._requests.values() if request.member is member]
        cause = f"{member.name} has answered nothing for {self._probe_after:g} s and is not healthy"
        logger.warning("%s: its %d requests go elsewhere", cause, len(held))
        self._readiness.lost(member, cause)
        for request in held:
            request.end_wait()


def common_capabilities(replicas: Sequence[Capabilities]) -> Capabilities | None:
    """The capabilities that all replicas have; None without replicas."""
    if not replicas:
        return None
    values: dict[str, Any] = {
        each.name: all(getattr(replica, each.name) for replica in replicas) for each in fields(Capabilities)
    }
    for name in ("adapters", "score_top_k"):
        values[name] = min(getattr(replica, name) for replica in replicas)
    for name in ("max_model_len", "vocab_size"):
        values[name] = least(*(getattr(replica, name) for replica in replicas))
    kinds = {replica.logprobs for replica in replicas}
    # Log-probs of two kinds in one dataset would be worse than none.
    values["logprobs"] = kinds.pop() if len(kinds) == 1 else "none"
    extra = set.intersection(*({*replica.extra_sampling} for replica in replicas))
    return Capabilities(**{**values, "extra_sampling": tuple(sorted(extra))})


def missing_capabilities(server: Capabilities, expected: Capabilities) -> str:
    """Capabilities that a run which began with `expected` would miss in another server; empty if none."""
    common = common_capabilities([server, replace(expected, extra_sampling=())])
    lost = [
        f"{each.name} {getattr(server, each.name)} (not {getattr(expected, each.name)})"
        for each in fields(Capabilities)
        if each.name != "extra_sampling" and getattr(common, each.name) != getattr(expected, each.name)
    ]
    lost += [f"no {name}" for name in expected.extra_sampling if name not in server.extra_sampling]
    return ", ".join(lost)
