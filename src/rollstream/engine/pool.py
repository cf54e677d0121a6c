"""An engine made of replicas: servers of the same model that come and go.

The way of a request:

    wait for the end of an update --> a ready replica --> it answers                               --> done
                                        ^                 it is gone, or failed at the request  --+
                                        |                 it was too slow: the request moves      |
                                        +--- another one, with the tokens that it has ------------+

    no replica is ready, or all are gone    --> EngineUnavailableError: the caller waits, nothing is charged
    some are there, and all failed at it    --> TransientEngineError: charged as an attempt
    the request is at fault                 --> EngineError, at once

Which replicas are ready, and their weights: `readiness`. Which of them gets a request: `routing`. Which
requests move from a slow replica to an idle faster one near the end of a run: `stragglers`.
"""

import asyncio
import itertools
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollstream.aio import any_true
from rollstream.engine.base import Capabilities, ChatPrompt, EngineLoad, ReportsLoad
from rollstream.engine.checks import check_request
from rollstream.engine.continuation import PartialCompletion
from rollstream.engine.load import LoadSum
from rollstream.engine.readiness import Readiness
from rollstream.engine.replica import (
    INITIAL_WEIGHTS,
    Replica,
    ReplicaRequest,
    ReplicaUnavailableError,
    ResumesAborted,
)
from rollstream.engine.routing import Outcome, Pick, Router
from rollstream.engine.stragglers import Running, choose_moves, has_slower
from rollstream.errors import (
    ConfigError,
    EngineError,
    EngineUnavailableError,
    RollstreamError,
    TransientEngineError,
)
from rollstream.trajectory import Completion, SamplingParams

logger = logging.getLogger(__name__)

POOL_KWARGS: dict[str, Any] = {
    # Seconds with requests and without an answer after which a server is asked for its health; 0: never. Long
    # answers take longer; asking costs next to nothing.
    "probe_after": 30.0,
    "move_stragglers": True,  # from slow servers to idle faster ones
}
"""Keys of `engine_kwargs` for every pool, with their defaults."""

_ABORT_TIMEOUT_S = 10.0
"""For a replica to end a request that was aborted: a step of the model, or a round trip. Then what the replica
has of it is given up: an update empties the engine first, and must not wait for a server."""

_TRY_WAIT_S = 2.0
"""For a replica to become ready when none is: asking a server what it is takes milliseconds, loading weights
takes longer than anybody should wait here."""

_FAILURES_MAX = 5
"""One bad reply is an accident; five in a row, with requests in between going well elsewhere, are a state."""

_TICK_S = 0.25
"""Between two looks at stragglers and silent replicas. While all are busy a look takes less than a
millisecond, whatever is in flight."""

_HEALTH_CHECKS = 2
"""Health checks in a row that must fail: one that takes too long may be a server that is very busy."""


@dataclass(slots=True, eq=False)
class _Attempt:
    """What one replica does of a request: from a pick to an answer, an error or an abort."""

    pick: Pick
    replica: Replica
    sent: ReplicaRequest
    timeout: asyncio.Timeout

    def cut(self, after: float = 0.0) -> None:
        """Ends the wait for the replica in so many seconds, as if its connection was lost."""
        at = asyncio.get_running_loop().time() + after
        if (when := self.timeout.when()) is None or at < when:
            self.timeout.reschedule(at)


@dataclass(slots=True, eq=False)
class _Request:
    """The request of a caller, over all the replicas that have a part in it."""

    request_id: str
    partial: PartialCompletion
    seeded: bool
    images: list[object]
    chat: ChatPrompt | None
    attempt: _Attempt | None = None
    """None between two replicas."""
    reserved: Pick | None = None
    """Its place on the replica that it moves to, while it still is where it was."""
    moves: int = 0
    aborted: bool = False
    """The caller wants what there is."""
    has_waited: bool = False
    """For replicas that were not ready."""
    failures: dict[str, RollstreamError] = field(default_factory=dict)
    """Replicas that failed at it or went away under it."""

    @property
    def may_move(self) -> bool:
        """Whether it may leave its replica with what it has, and its tokens are as good.

        Not with a seed: its tokens are to be repeatable. Not with images: a server makes the prompt's ids from
        them.
        """
        attempt = self.attempt
        return (
            attempt is not None
            and self.reserved is None
            and not (self.aborted or self.seeded or self.images)
            and self.partial.sampling.can_be_continued
            and isinstance(attempt.replica, ResumesAborted)
            and attempt.replica.resumes_aborted
        )


class PoolEngine:
    """Drives one or several replicas as one engine.

    There is no limit on time or on connections here: the caller bounds both.

    Args:
        replicas: those that are there from the start.
        own: the user's limits, laid over what the replicas say of themselves.
        what: the engine's name, for messages.
        hint: what to check when nobody answers at start.
        kwargs: see `POOL_KWARGS`; None takes the defaults.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        own: Callable[[Capabilities], Capabilities] = lambda capabilities: capabilities,
        what: str = "engine",
        hint: str = "check actor_rollout_ref.rollout.server_urls, and that the servers are running",
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        self._replicas = {replica.name: replica for replica in replicas}
        self._router = Router(self._replicas)
        self._readiness = Readiness(self._check_capabilities)
        self._own = own
        self._what = what
        self._hint = hint
        self._kwargs = POOL_KWARGS | (kwargs or {})
        self._capabilities: Capabilities | None = None
        # A rid of our own on the wire: one that was cancelled may still be known to the server when the same
        # request comes again, and two runs may share a server.
        self._nonce = secrets.token_hex(4)
        self._counter = itertools.count()
        self._requests: dict[str, _Request] = {}
        self._loads = LoadSum()
        self._watching: asyncio.Task[None] | None = None
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._aborts: set[asyncio.Task[None]] = set()
        self._moved = 0
        self._closed = False

    @property
    def capabilities(self) -> Capabilities:
        if self._capabilities is None:
            raise EngineError("the engine has not been started")
        return self._capabilities

    @property
    def replicas(self) -> list[str]:
        """Names of the replicas, in the order they came."""
        return list(self._replicas)

    @property
    def ready(self) -> list[str]:
        """Names of the replicas that take requests now."""
        return list(self._readiness.ready)

    def replica_counts(self) -> tuple[int, int]:
        """How many replicas take requests now, and how many there are."""
        return len(self._readiness.ready), len(self._replicas)

    @property
    def moved(self) -> int:
        """How many requests were moved from a slow replica to a faster one."""
        return self._moved

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
        if not self._replicas:
            raise ConfigError(f"engine {self._what!r} needs at least one replica")
        try:
            await self._ask_all()
        except BaseException:
            await self.close()
            raise
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def add_replica(self, replica: Replica) -> None:
        """Takes in a replica, before the start or while requests go on; it loads the current weights first.

        Raises:
            EngineError: it is not there (`ReplicaUnavailableError`), or cannot do what the others can: a run
                that relies on that must not meet it.
        """
        if replica.name in self._replicas:
            return
        if self._capabilities is not None:
            is_ready = await self._readiness.make_ready(replica)
        else:  # what all of them are, the start finds out
            await replica.describe()
            is_ready = await replica.health()
        if not is_ready:
            raise ReplicaUnavailableError(f"{replica.name} is not healthy")
        self._replicas[replica.name] = replica
        self._router.add(replica.name)
        if self._capabilities is not None:
            self._readiness.add(replica)

    async def remove_replica(self, name: str) -> None:
        """Sends nothing more to a replica; its requests in flight go on elsewhere. Unknown names: fine."""
        self._router.remove(name)
        self._readiness.remove(name)
        if (replica := self._replicas.pop(name, None)) is not None:
            await replica.close()

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        images: list[object] | None = None,
        chat: ChatPrompt | None = None,
    ) -> Completion:
        """As `Engine.generate`; `chat`: the same as messages, for replicas that speak messages."""
        check_request(prompt_ids, sampling, self.capabilities, images=images, is_chat=chat is not None)
        partial = PartialCompletion(prompt_ids, sampling)
        request = _Request(request_id, partial, sampling.seed is not None, list(images or ()), chat)
        self._requests[request_id] = request
        try:
            while not request.aborted:
                if self._closed:
                    raise EngineUnavailableError("the engine is closed")
                if not self._readiness.is_settled:
                    await self._readiness.settled()
                    continue
                if (pick := self._pick(request)) is None:
                    if request.has_waited or not self._readiness.causes().keys() - request.failures.keys():
                        raise self._refusal(request)
                    request.has_waited = True
                    await self._readiness.try_now(_TRY_WAIT_S)
                    continue
                piece = await self._attempt(request, pick)
                if piece is None:
                    continue
                if piece.finish_reason != "abort" or request.reserved is None or request.aborted:
                    return partial.finish(piece)
                partial.add(piece)  # it goes on where its place is reserved
                if partial.is_full:
                    return partial.result("length")
        finally:
            self._requests.pop(request_id, None)
            if request.reserved is not None:  # not needed: the request was done where it was
                self._router.release(request.reserved, "cancelled")
        # Aborted, and its replica is gone: what that had is lost, and it is not worth another one.
        return partial.result("abort")

    async def abort(self, request_id: str) -> None:
        if (request := self._requests.get(request_id)) is not None:
            request.aborted = True
            if (attempt := request.attempt) is not None:
                attempt.sent.aborted = True
                attempt.cut(after=_ABORT_TIMEOUT_S)
                await attempt.replica.abort(attempt.sent.rid)

    async def update_weights(self, source: str, version: int) -> None:
        """Loads weights on all replicas; those that cannot get no request before they have them.

        New requests wait meanwhile. Requests in flight are the caller's to end first, see `ContinuingEngine`; a
        server may wait for them, or go on with them under the new weights.

        Raises:
            EngineError: none could; the old weights stay. The exact contract: `Readiness.update`.
        """
        if not self.capabilities.update_weights:
            raise EngineError(f"engine {self._what!r} cannot update weights")
        await self._readiness.update(source, version)

    async def health(self) -> bool:
        """Whether at least one replica is ready and healthy; when none is ready, tries to change that."""
        if self._closed or not (self._readiness.ready or await self._readiness.try_now(_TRY_WAIT_S)):
            return False
        return await any_true(replica.health() for replica in self._readiness.ready.values())

    async def load(self) -> EngineLoad | None:
        """Of all replicas that say theirs; None when nobody does."""
        asked = {name: one for name, one in self._replicas.items() if isinstance(one, ReportsLoad)}
        loads = await asyncio.gather(*(replica.load() for replica in asked.values()))
        return self._loads.add(zip(asked, loads, strict=True))

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        tasks = [task for task in (self._watching, *self._probes.values()) if task is not None]
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        try:
            await self._readiness.close()
        finally:
            if self._aborts:
                await asyncio.wait(self._aborts, timeout=_ABORT_TIMEOUT_S)
            await asyncio.gather(*(replica.close() for replica in self._replicas.values()))
        for result in results:
            if isinstance(result, Exception):
                raise result

    def _pick(self, request: _Request) -> Pick | None:
        """The replica that gets the request next: where its place is reserved, else where the router says."""
        ready, failures = self._readiness.ready, request.failures
        reserved, request.reserved = request.reserved, None
        if reserved is not None:
            if reserved.name in ready and reserved.name not in failures:
                return reserved
            self._router.release(reserved, "cancelled")
        candidates = [name for name in ready if name not in failures] if failures else ready
        return self._router.pick(candidates, request.request_id)

    async def _attempt(self, request: _Request, pick: Pick) -> Completion | None:
        """A replica's answer; None, with the cause in `request.failures`, when others may do better.

        Raises:
            EngineError: the request is at fault.
        """
        name, partial = pick.name, request.partial
        replica = self._replicas[name]
        sent = ReplicaRequest(
            partial.prompt_ids,
            partial.sampling,
            request.request_id,
            f"{request.request_id}.{self._nonce}{next(self._counter)}",
            request.images,
            request.aborted,
            request.chat,
        )
        outcome: Outcome = "cancelled"
        tokens, gone = 0, ""
        try:
            async with asyncio.timeout(None) as timeout:
                request.attempt = _Attempt(pick, replica, sent, timeout)
                piece = await self._generate(replica, sent)
            outcome, tokens = "answered", len(piece.token_ids)
            return piece
        except TimeoutError:
            what = "end what was aborted" if request.aborted else "answer, and it is not healthy"
            request.failures[name] = ReplicaUnavailableError(f"{name} does not {what}")
            outcome, gone = "failed", str(request.failures[name])
        except ReplicaUnavailableError as error:
            request.failures[name] = error
            outcome, gone = "failed", str(error)
        except TransientEngineError as error:
            if request.reserved is None:
                request.failures[name] = error
                outcome = "failed"
                gone = self._fails_again_and_again(name, error)
            # Else it was taken away before the server had anything of it, which not every server can say.
        except EngineError:
            outcome = "answered"
            raise
        except asyncio.CancelledError:
            self._abort_soon(request.attempt)
            raise
        finally:
            request.attempt = None
            self._router.release(pick, outcome, tokens=tokens)
            if gone:
                self._readiness.lost(name, gone)
            elif outcome == "answered":
                self._readiness.answered(name)
        return None

    async def _generate(self, replica: Replica, sent: ReplicaRequest) -> Completion:
        """A replica's answer, which must be by the wanted weights.

        Raises:
            ReplicaUnavailableError: also when it is by others.
        """
        weights = self._readiness.weights
        asked = weights.wanted
        completion = await replica.generate(sent)
        if asked != INITIAL_WEIGHTS and completion.token_ids:
            version = completion.policy_versions[-1][1]
            if version not in (asked.version, weights.wanted.version):
                raise ReplicaUnavailableError(
                    f"{replica.name} answers with weights of version {version}, but had loaded version "
                    f"{asked.version}: it was started anew, or somebody else updates it"
                )
        return completion

    def _fails_again_and_again(self, name: str, error: TransientEngineError) -> str:
        """Why a replica that has failed once more should get no work for a while; empty if it should."""
        stats = self._router.replicas.get(name)
        if stats is None or stats.failures + 1 < _FAILURES_MAX or len(self._readiness.ready) < 2:
            return ""
        return f"{name} failed {stats.failures + 1} requests in a row, the last with: {error}"

    def _refusal(self, request: _Request) -> RollstreamError:
        """What to say when no replica is left for a request."""
        for error in request.failures.values():
            if not isinstance(error, ReplicaUnavailableError):
                return error  # one that is there failed at it: trying again may help, and is charged
        causes = self._readiness.causes() | {name: str(error) for name, error in request.failures.items()}
        return EngineUnavailableError(
            f"no {self._what} server answers ({'; '.join(causes.values()) or 'there is none'})"
        )

    def _abort_soon(self, attempt: _Attempt | None) -> None:
        """Tells the replica to end a request, without waiting for that."""
        if attempt is not None:
            # Held by the set until it is done; `close` waits for it. Cancellation itself is not delayed.
            task = asyncio.get_running_loop().create_task(attempt.replica.abort(attempt.sent.rid))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    async def _ask_all(self) -> None:
        """Asks all replicas what they are; the common capabilities are the pool's."""
        answers = await asyncio.gather(
            *(replica.describe() for replica in self._replicas.values()), return_exceptions=True
        )
        found: list[Capabilities] = []
        causes: dict[str, str | None] = {}
        for name, answer in zip(self._replicas, answers, strict=True):
            if isinstance(answer, Capabilities):
                found.append(answer)
                causes[name] = None
            elif isinstance(answer, ReplicaUnavailableError):
                causes[name] = str(answer)
            else:
                raise answer
        silent = [cause for cause in causes.values() if cause is not None]
        if not found:
            raise EngineUnavailableError(
                f"no {self._what} server answers ({'; '.join(silent)}): {self._hint}"
            )
        self._capabilities = self._own(common_capabilities(found))
        for cause in silent:
            logger.warning("%s server does not answer, going on without it: %s", self._what, cause)
        for name, replica in self._replicas.items():
            self._readiness.add(replica, cause=causes[name])

    async def _check_capabilities(self, replica: Replica) -> None:
        found = await replica.describe()
        if missing := missing_capabilities(found, self.capabilities):
            raise EngineError(f"{replica.name} is not what the run began with: it has {missing}")

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            if self._kwargs["move_stragglers"]:
                self._move_stragglers()
            if self._kwargs["probe_after"]:
                for name in self._router.silent_for(self._kwargs["probe_after"]):
                    if name in self._readiness.ready and name not in self._probes:
                        self._probes[name] = asyncio.get_running_loop().create_task(self._probe(name))

    def _move_stragglers(self) -> None:
        """Sends stragglers on their way to replicas that are idle and faster, if there are any."""
        loads = self._router.loads(self._readiness.ready)
        if not has_slower(loads):
            return
        now = self._router.now()
        running = [
            Running(
                request.request_id,
                attempt.pick.name,
                now - attempt.pick.began,
                len(attempt.sent.prompt_ids),
                attempt.sent.sampling.max_tokens,
                request.moves,
            )
            for request in self._requests.values()
            if request.may_move and (attempt := request.attempt) is not None
        ]
        for move in choose_moves(loads, running):
            request = self._requests[move.request_id]
            if (attempt := request.attempt) is not None:
                logger.debug("%s moves from %s to %s", move.request_id, attempt.pick.name, move.to)
                request.reserved = self._router.take(move.to, move.request_id)
                request.moves += 1
                self._moved += 1
                attempt.sent.aborted = True
                self._abort_soon(attempt)

    async def _probe(self, name: str) -> None:
        """Asks a silent replica for its health. If it says no, or nothing, twice, its requests go elsewhere."""
        try:
            for _ in range(_HEALTH_CHECKS):
                replica = self._readiness.ready.get(name)
                if replica is None or self.is_loading(name) or await replica.health():
                    self._router.mark_alive(name)
                    return
            attempts = [request.attempt for request in self._requests.values() if request.attempt is not None]
            held = [attempt for attempt in attempts if attempt.pick.name == name]
            cause = f"{name} has answered nothing for {self._kwargs['probe_after']:g} s and is not healthy"
            logger.warning("%s: its %d requests go elsewhere", cause, len(held))
            self._readiness.lost(name, cause)
            for attempt in held:
                attempt.cut()
        finally:
            del self._probes[name]


def common_capabilities(found: Sequence[Capabilities]) -> Capabilities:
    """What all of several replicas can give."""
    lengths = [one.max_model_len for one in found if one.max_model_len is not None]
    vocab_sizes = [one.vocab_size for one in found if one.vocab_size is not None]
    kinds = {one.logprobs for one in found}
    return Capabilities(
        # Log-probs of two kinds in one dataset would be worse than none.
        logprobs=kinds.pop() if len(kinds) == 1 else "none",
        max_model_len=min(lengths, default=None),
        vocab_size=min(vocab_sizes, default=None),
        extra_sampling=tuple(sorted(set.intersection(*({*one.extra_sampling} for one in found)))),
        **{name: all(getattr(one, name) for one in found) for name in _ABILITIES},
    )


def missing_capabilities(found: Capabilities, expected: Capabilities) -> str:
    """What a run that began with `expected` would miss in another server; empty if nothing."""
    missing = []
    if found.logprobs != expected.logprobs:
        missing.append(f"log-probs of another kind ({found.logprobs}, not {expected.logprobs})")
    for name, what in _ABILITIES.items():
        if getattr(expected, name) and not getattr(found, name):
            missing.append(f"no {what}")
    if lost := ", ".join(sorted({*expected.extra_sampling} - {*found.extra_sampling})):
        missing.append(f"no sampling parameter {lost}")
    if found.max_model_len is not None and (
        expected.max_model_len is None or found.max_model_len < expected.max_model_len
    ):
        missing.append(f"sequences of {found.max_model_len} tokens at most")
    if found.vocab_size is not None and found.vocab_size < (expected.vocab_size or 2**31):
        missing.append(f"a vocabulary of {found.vocab_size} ids, not {expected.vocab_size}")
    return ", ".join(missing)


_ABILITIES = {
    "token_ids": "exact token ids",
    "seeds": "seeds",
    "stop_strings": "stop strings",
    "stop_token_ids": "stop token ids",
    "images": "images",
    "update_weights": "weight updates",
    "stop_token_ids_with_ignore_eos": "stop token ids that hold with ignore_eos",
}
"""Fields of `Capabilities` that are yes or no, and what they are called in messages."""
