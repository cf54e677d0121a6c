"""An engine made of replicas: servers of the same model that come and go.

The way of a request:

    pick a replica --> it answers                                             --> done
          ^            it is away, or failed at the request, others are left --+
          |                                                                    |
          +--------------------------------------------------------------------+
                       all are away    --> EngineUnavailableError: the caller waits, nothing is charged
                       some are there, all failed at it --> TransientEngineError: charged as an attempt
                       the request is at fault          --> EngineError, at once

Near the end of a run a request on a slow replica may be taken away from it and go on at an idle faster one,
with the tokens it has: see `stragglers`. A replica that was away, or has other weights than the others, is
made fit before it gets work: see `fitting`. One that takes requests and says nothing is away when its health
says no: see `watch`.
"""

import asyncio
import contextlib
import itertools
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rollstream.engine.base import Capabilities, ChatPrompt, EngineLoad, ReportsLoad
from rollstream.engine.checks import check_request
from rollstream.engine.fitting import Fitting
from rollstream.engine.flight import Flight, Stretch, pull
from rollstream.engine.introductions import Introductions, missing_capabilities
from rollstream.engine.load import LoadSum
from rollstream.engine.partial import PartialCompletion
from rollstream.engine.pool_weights import PoolWeights
from rollstream.engine.replica import Replica, ReplicaAwayError, ReplicaRequest
from rollstream.engine.routing import Outcome, Pick, Router
from rollstream.engine.watch import PoolWatch
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
"""An abort is a courtesy to the server: not worth waiting longer."""

_LET_GO_S = 10.0
"""For a replica to end a request that its caller has aborted: a step of the model, or a round trip. Then what
the replica has of it is given up: an update empties the engine first, and must not wait for a server."""

_HEALTH_WAIT_S = 2.0
"""That a question for the health waits for a replica to be made fit: an introduction takes milliseconds."""


class PoolEngine:
    """Drives one or several replicas as one engine.

    There is no limit on time or on connections here: the caller bounds both.

    Args:
        replicas: at least one.
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
        if not replicas:
            raise ConfigError(f"engine {what!r} needs at least one replica")
        self._replicas = {replica.name: replica for replica in replicas}
        self._router = Router(self._replicas)
        self._own = own
        self._what = what
        self._hint = hint
        self._capabilities: Capabilities | None = None
        # A rid of our own on the wire: one that was cancelled may still be known to the server when the same
        # request comes again, and two runs may share a server.
        self._nonce = secrets.token_hex(4)
        self._counter = itertools.count()
        self._in_flight: dict[str, Flight] = {}
        self._introductions = Introductions(lambda: self.capabilities)
        self._weights = PoolWeights()
        self._fitting = Fitting(self._introductions, self._weights, on_fit=self._router.heard)
        kwargs = POOL_KWARGS | (kwargs or {})
        self._watch = PoolWatch(
            self._router,
            self._replicas,
            self._in_flight,
            probe_after=kwargs["probe_after"],
            move=kwargs["move_stragglers"],
            abort=self._abort_soon,
            is_excused=self.is_loading,
        )
        self._aborts: set[asyncio.Task[None]] = set()
        self._loads = LoadSum()
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

    def replica_counts(self) -> tuple[int, int]:
        """How many replicas take requests now, and how many there are."""
        up = sum(self._router.is_there(name) and self._fitting.is_fit(name) for name in self._replicas)
        return up, len(self._replicas)

    @property
    def moved(self) -> int:
        """How many requests were moved from a slow replica to a faster one."""
        return self._watch.moved

    def is_loading(self, name: str) -> bool:
        """Whether a replica loads weights, in an update or by itself: it may be deaf meanwhile."""
        return not self._weights.is_settled or self._fitting.is_loading(name)

    async def start(self) -> None:
        """Asks every replica what it is; at least one has to answer.

        Raises:
            EngineUnavailableError: nobody is there.
            EngineError: a server refuses to say, or is something else than expected.
        """
        if self._capabilities is not None:
            return
        try:
            self._capabilities = self._own(await self._ask_all())
        except BaseException:
            await self.close()
            raise
        self._watch.start()

    async def add_replica(self, replica: Replica) -> None:
        """Takes in a replica while requests go on.

        Raises:
            ReplicaAwayError: it does not answer.
            EngineError: it cannot do what the others can: a run that relies on that must not meet it.
        """
        if replica.name in self._replicas:
            return
        found = await replica.describe()
        if self._capabilities is not None and (missing := missing_capabilities(found, self._capabilities)):
            raise EngineError(
                f"{replica.name} is another kind of server than {', '.join(self._replicas)}: it has {missing}"
            )
        self._replicas[replica.name] = replica
        self._weights.ledger.join(replica.name)
        self._router.add(replica.name)

    async def remove_replica(self, name: str) -> None:
        """Sends nothing more to a replica; its requests in flight begin anew on others. Unknown names: fine.

        Raises:
            EngineError: it is the last one.
        """
        if len(self._replicas) == 1 and name in self._replicas:
            raise EngineError(f"{name} is the last replica")
        replica = self._replicas.pop(name, None)
        self._router.remove(name)
        self._fitting.forget(name)
        self._weights.forget(name)
        self._introductions.forget(name)
        if replica is not None:
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
        check_request(prompt_ids, sampling, self.capabilities, images=images)
        partial = PartialCompletion(prompt_ids, sampling)
        seeded = sampling.seed is not None
        flight = Flight(request_id, partial, list(images or ()), seeded=seeded, chat=chat)
        self._in_flight[request_id] = flight
        causes: dict[str, RollstreamError] = {}
        try:
            while not flight.aborted:
                if self._closed:
                    raise EngineUnavailableError("the engine is closed")
                if not self._weights.is_settled:
                    await self._wait(flight, self._weights.settled())
                    continue
                pick = self._pick(flight, causes)
                if pick is None:
                    if not await self._wait_for_one(flight, causes):
                        raise self._refusal(causes)
                    continue
                piece = await self._ask(flight, pick, causes)
                if piece is None:
                    continue
                if piece.finish_reason != "abort" or flight.seat is None or flight.aborted:
                    return partial.finish(piece)
                partial.add(piece)  # it goes on where its seat is
                if partial.is_full:
                    return partial.result("length")
        finally:
            self._in_flight.pop(request_id, None)
            self._leave_seat(flight)
        # Aborted, and its replica is away: what that had is lost, and it is not worth another one.
        return partial.result("abort")

    async def abort(self, request_id: str) -> None:
        if (flight := self._in_flight.get(request_id)) is not None:
            flight.aborted = True
            if flight.leash is not None:
                pull(flight.leash)
            if (stretch := flight.stretch) is not None:
                stretch.request.aborted = True
                stretch.pull(after=_LET_GO_S)
                await stretch.replica.abort(stretch.request.rid)

    async def update_weights(self, source: str, version: int) -> None:
        """Loads weights on all replicas; those that cannot get no request before they have them.

        New requests wait meanwhile. Requests in flight are the caller's to end first, see
        `InterruptibleEngine`; a server may wait for them, or go on with them under the new weights.

        Raises:
            EngineError: none could; the old weights stay. The exact contract: `PoolWeights.update`.
        """
        if not self.capabilities.update_weights:
            raise EngineError(f"engine {self._what!r} cannot update weights")
        await self._weights.update(list(self._replicas.values()), source, version)

    async def health(self) -> bool:
        """Whether at least one replica is healthy and fit; begins to make those fit that are not."""
        if self._closed:
            return False
        checks = [asyncio.ensure_future(self._ask_health(name)) for name in self._replicas]
        try:
            for check in asyncio.as_completed(checks):
                if await check:
                    return True
            return False
        finally:
            for task in checks:
                task.cancel()
            await asyncio.gather(*checks, return_exceptions=True)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            await self._watch.close()
        finally:
            await self._fitting.close()
            if self._aborts:
                await asyncio.wait(self._aborts, timeout=_ABORT_TIMEOUT_S)
            await asyncio.gather(*(replica.close() for replica in self._replicas.values()))

    def _pick(self, flight: Flight, causes: dict[str, RollstreamError]) -> Pick | None:
        """The replica that gets the request next: where it has a seat, else where the router says."""
        unfit = [name for name in self._replicas if not self._fitting.is_fit(name)]
        for name in unfit:
            if name not in causes:
                self._begin_fitting(name)
        seat, flight.seat = flight.seat, None
        if seat is not None:
            if self._router.is_there(seat.name) and seat.name not in causes and seat.name not in unfit:
                return seat
            self._router.release(seat, "cancelled")
        return self._router.pick(flight.request_id, {*causes, *unfit} if unfit else causes)

    def _begin_fitting(self, name: str) -> "asyncio.Task[ReplicaAwayError | None] | None":
        """See `Fitting.begin`. One that hangs is healthy first, unless it is not for want of weights."""
        if name in self._router.hung and not self._weights.ledger.must_load(name):
            return None
        return self._fitting.begin(self._replicas[name])

    async def _wait_for_one(self, flight: Flight, causes: dict[str, RollstreamError]) -> bool:
        """Waits until one of the replicas that are not fit may be; those that cannot be get into `causes`.

        Returns:
            whether there was one to wait for.
        """
        tasks = {}
        for name in self._replicas:
            if name in causes or self._fitting.is_fit(name):
                continue
            if (task := self._begin_fitting(name)) is not None:
                tasks[name] = task
            elif name not in self._router.hung:
                causes[name] = self._fitting.failure(name)
        if not tasks:
            return False
        await self._wait(flight, asyncio.wait(tasks.values(), return_when=asyncio.FIRST_COMPLETED))
        for name, task in tasks.items():
            if task.done() and not task.cancelled() and (error := task.result()) is not None:
                causes[name] = error
        return True

    async def _wait(self, flight: Flight, event: Awaitable[object]) -> None:
        """Waits for something other than a replica's answer; the caller's abort ends that."""
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None) as flight.leash:
                    await event
        finally:
            flight.leash = None

    async def _ask(self, flight: Flight, pick: Pick, causes: dict[str, RollstreamError]) -> Completion | None:
        """A replica's answer to a request; None, with the cause in `causes`, when others may do better.

        Raises:
            EngineError: the request is at fault.
        """
        replica = self._replicas[pick.name]
        rid = f"{flight.request_id}.{self._nonce}{next(self._counter)}"
        partial = flight.partial
        request = ReplicaRequest(
            partial.prompt_ids,
            partial.sampling,
            flight.request_id,
            rid,
            flight.images,
            flight.aborted,
            flight.chat,
        )
        outcome: Outcome = "cancelled"
        tokens = 0
        try:
            async with asyncio.timeout(None) as leash:
                flight.stretch = Stretch(pick, replica, request, leash)
                piece = await self._weights.generate(replica, request)
            outcome, tokens = "answered", len(piece.token_ids)
            return piece
        except TimeoutError:
            outcome = "away"
            what = (
                "does not end what was aborted"
                if flight.aborted
                else "does not answer, and it is not healthy"
            )
            causes[pick.name] = ReplicaAwayError(f"{pick.name} {what}")
        except ReplicaAwayError as error:
            outcome = "away"
            causes[pick.name] = error
        except TransientEngineError as error:
            if flight.seat is None:
                outcome = "failed"
                causes[pick.name] = error
            # Else it was taken away before the server had anything of it, which not every server can say.
        except EngineError:
            outcome = "answered"
            raise
        except asyncio.CancelledError:
            self._abort_soon(flight.stretch)
            raise
        finally:
            flight.stretch = None
            if outcome == "away":
                self._introductions.owe(pick.name)
            self._router.release(pick, outcome, tokens=tokens)
        return None

    def _leave_seat(self, flight: Flight) -> None:
        """Gives back a seat that was not needed: the request was done where it was."""
        if flight.seat is not None:
            self._router.release(flight.seat, "cancelled")
            flight.seat = None

    async def _ask_health(self, name: str) -> bool:
        replica = self._replicas.get(name)
        if replica is None:  # it went away since it was chosen to be asked
            return False
        if not self._fitting.is_fit(name):
            if not self._weights.ledger.must_load(name) and not await replica.health():
                return False
            if (task := self._fitting.begin(replica)) is not None:
                await asyncio.wait((task,), timeout=_HEALTH_WAIT_S)
            if not self._fitting.is_fit(name):
                return False
        if await replica.health():
            self._router.heard(name)
            return True
        return False

    def _refusal(self, causes: dict[str, RollstreamError]) -> RollstreamError:
        """What to say when every replica was tried."""
        for error in causes.values():
            if not isinstance(error, ReplicaAwayError):
                return error  # one that is there failed at it: trying again may help, and is charged
        said = [str(error) for error in causes.values()]
        said += [f"{name} hangs" for name in self._router.hung if name not in causes]
        return EngineUnavailableError(f"no {self._what} server answers ({'; '.join(said)})")

    def _abort_soon(self, stretch: Stretch | None) -> None:
        if stretch is None:
            return
        # Held by the set until it is done; `close` waits for it. Cancellation itself is not delayed.
        task = asyncio.get_running_loop().create_task(stretch.replica.abort(stretch.request.rid))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _ask_all(self) -> Capabilities:
        answers = await asyncio.gather(
            *(replica.describe() for replica in self._replicas.values()), return_exceptions=True
        )
        found: list[Capabilities] = []
        silent: list[str] = []
        for name, answer in zip(self._replicas, answers, strict=True):
            if isinstance(answer, Capabilities):
                found.append(answer)
            elif isinstance(answer, ReplicaAwayError):
                silent.append(str(answer))
                self._introductions.owe(name)
            else:
                raise answer
        if not found:
            raise EngineUnavailableError(
                f"no {self._what} server answers ({'; '.join(silent)}): {self._hint}"
            )
        for cause in silent:
            logger.warning("%s server does not answer, going on without it: %s", self._what, cause)
        return common_capabilities(found)

    async def load(self) -> EngineLoad | None:
        """Of all replicas that say theirs; None when nobody does."""
        asked = {name: one for name, one in self._replicas.items() if isinstance(one, ReportsLoad)}
        loads = await asyncio.gather(*(replica.load() for replica in asked.values()))
        return self._loads.add(zip(asked, loads, strict=True))


def common_capabilities(found: Sequence[Capabilities]) -> Capabilities:
    """What all of several replicas can give."""
    lengths = [one.max_model_len for one in found if one.max_model_len is not None]
    vocab_sizes = [one.vocab_size for one in found if one.vocab_size is not None]
    kinds = {one.logprobs for one in found}
    return Capabilities(
        token_ids=all(one.token_ids for one in found),
        # Log-probs of two kinds in one dataset would be worse than none.
        logprobs=kinds.pop() if len(kinds) == 1 else "none",
        seeds=all(one.seeds for one in found),
        stop_strings=all(one.stop_strings for one in found),
        stop_token_ids=all(one.stop_token_ids for one in found),
        images=all(one.images for one in found),
        update_weights=all(one.update_weights for one in found),
        max_model_len=min(lengths, default=None),
        vocab_size=min(vocab_sizes, default=None),
        stop_token_ids_with_ignore_eos=all(one.stop_token_ids_with_ignore_eos for one in found),
        extra_sampling=tuple(sorted(set.intersection(*({*one.extra_sampling} for one in found)))),
    )
