"""An engine whose generations outlive an interruption: new weights, a pause or an abort at the server.

The way of a request:

    at the door --> in the engine --> ended by itself, or aborted by its caller          --> answered
        ^                |
        +-- interrupted -+  `continue`: with the tokens it has; `restart`: with none; `abort`: --> answered

The way of an update: close the door, abort what is in the engine, wait until all of it is at the door, load,
open the door. So no request has tokens of two versions without a fresh prompt in between, and the log-probs
of every token are those of a forward pass under the version that it is stamped with.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, runtime_checkable

from rollstream.engine.base import (
    Capabilities,
    ChatEngine,
    ChatPrompt,
    Engine,
    EngineLoad,
    HasReplicas,
    ReportsLoad,
)
from rollstream.engine.partial import PartialCompletion
from rollstream.errors import EngineError, EngineUnavailableError, TransientEngineError
from rollstream.trajectory import Completion, SamplingParams

_LOG = logging.getLogger(__name__)

OnUpdate = Literal["continue", "restart", "abort"]
"""What becomes of a generation that is interrupted."""

_DRAIN_S = 60.0
"""For what is in the engine to end after an abort: a step of the model, or a round trip; more when the CPU is
taken. An engine that needs longer is not going to."""

_ABORT_AGAIN_S = 1.0
"""An abort that arrives while a request is on its way (from one replica to another) may miss it."""

_FIRST_REST_S = 0.05
_REST_S_MAX = 1.0
"""Before a request that was interrupted without a new token is sent again: an engine that ends all it is
given must not be asked in a hot loop, and one that is back should be used soon. Doubles from the first."""

_FRUITLESS_AT_MOST = 64
"""Interruptions in a row without a new token: about a minute with the rests."""


@runtime_checkable
class _Versioned(Protocol):
    """An engine that says which weights it has, such as `hf`."""

    @property
    def version(self) -> int: ...


@runtime_checkable
class _CountsChanges(Protocol):
    """An engine whose weights others change in place, several times in one version."""

    @property
    def weight_changes(self) -> int: ...


@dataclass(slots=True, eq=False)
class _Flight:
    request_id: str
    partial: PartialCompletion
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a reason to wait may have gone."""
    aborted: bool = False
    """By its caller, who wants what there is."""
    drained: bool = False
    """Aborted by an update, since it was last sent."""
    weights: int | None = None
    """Which weights the engine had when it was last sent, if the engine says so."""
    most: int = 0
    """Tokens it has had at once: more than that is progress."""
    fruitless: int = 0
    """Interruptions in a row without progress."""
    fruitless_since: float = 0.0


class InterruptibleEngine:
    """Wraps an engine: `update_weights` may be called while requests are in flight.

    An interruption is a completion with finish reason `abort` that the caller did not ask for. What becomes
    of its tokens is up to `on_update`:

    - `continue`: they stay, each with its log-prob and version; the request goes on after them. Requests with
      stop strings begin anew: see `PartialCompletion`. So do those with a seed, unless it was for new
      weights: the same seed and weights must give the same tokens.
    - `restart`: they are dropped and the request begins anew.
    - `abort`: the caller gets them, with finish reason `abort`. Without any, the request begins anew.

    This is about one generation: earlier turns of a rollout keep the tokens and versions that they have.

    What a request has is lost when the engine goes away (or fails) before its end: the error goes to the
    caller, who begins anew.

    Args:
        engine: what generates; started, updated and closed through this one.
        on_update: see above.
    """

    def __init__(self, engine: Engine, *, on_update: OnUpdate = "continue") -> None:
        self._engine = engine
        self._on_update = on_update
        self._flights: dict[str, _Flight] = {}
        self._inside: set[_Flight] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._door_is_open = True
        self._updating = asyncio.Lock()
        self._closed = False
        self._version = 0
        self._progress_at = float("-inf")

    @property
    def engine(self) -> Engine:
        """The one inside."""
        return self._engine

    @property
    def capabilities(self) -> Capabilities:
        return self._engine.capabilities

    async def start(self) -> None:
        await self._engine.start()

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        images: list[object] | None = None,
    ) -> Completion:
        """See `Engine.generate`; the completion may have several policy versions.

        Raises:
            TransientEngineError: also when the engine ends this request again and again without a token, and
                others go on; `EngineUnavailableError` when none goes on.
        """
        flight = _Flight(request_id, PartialCompletion(prompt_ids, sampling))
        self._flights[request_id] = flight
        try:
            while True:
                await self._wait_at_the_door(flight)
                if flight.aborted:
                    return self._what_there_is(flight)
                piece = await self._send(flight, images)
                if piece.finish_reason != "abort" or flight.aborted:
                    return flight.partial.finish(piece)
                if self._on_update == "abort" and (piece.token_ids or len(flight.partial)):
                    return flight.partial.finish(piece)
                self._keep(flight, piece)
                if flight.partial.is_full:
                    return flight.partial.result("length")
                if flight.fruitless:
                    await self._rest(flight)
        finally:
            if self._flights.get(request_id) is flight:
                del self._flights[request_id]

    async def chat(self, prompt: ChatPrompt, sampling: SamplingParams, *, request_id: str) -> Completion:
        """See `ChatEngine.chat`; goes to the engine as it is: one that speaks messages updates no weights."""
        if not isinstance(self._engine, ChatEngine):
            raise EngineError("this engine takes token ids: ask `generate`")
        return await self._engine.chat(prompt, sampling, request_id=request_id)

    async def abort(self, request_id: str) -> None:
        """See `Engine.abort`; its `generate` returns what was sampled over all interruptions."""
        flight = self._flights.get(request_id)
        if flight is not None:
            flight.aborted = True
            flight.wake.set()
        if flight is None or flight in self._inside:
            await self._engine.abort(request_id)

    async def update_weights(self, source: str, version: int) -> None:
        """Loads other weights; one update at a time, in the order of the calls.

        Requests that arrive meanwhile wait. Cancelling this while the engine loads is left to the engine.

        Raises:
            EngineError: the engine's, or it does not let go of its requests. The old weights stand then, and
                what was interrupted goes on with them.
        """
        async with self._updating:
            if self._closed:
                raise EngineUnavailableError("the engine is closed")
            self._door_is_open = False
            try:
                await self._drain()
                await self._engine.update_weights(source, version)
                _LOG.info("weights of version %d, from %s; before it was %d", version, source, self._version)
                self._version = version
            finally:
                self._door_is_open = True
                self._wake_all()

    async def load(self) -> EngineLoad | None:
        """The engine's, if it says it."""
        return await self._engine.load() if isinstance(self._engine, ReportsLoad) else None

    def replica_counts(self) -> tuple[int, int] | None:
        """The engine's, if it has replicas."""
        return self._engine.replica_counts() if isinstance(self._engine, HasReplicas) else None

    async def health(self) -> bool:
        return await self._engine.health()

    async def close(self) -> None:
        self._closed = True
        self._wake_all()
        await self._engine.close()

    async def _wait_at_the_door(self, flight: _Flight) -> None:
        await self._sleep(flight, until=lambda: self._door_is_open)
        if self._closed:
            raise EngineUnavailableError("the engine is closed")

    async def _send(self, flight: _Flight, images: list[object] | None) -> Completion:
        """Asks the engine for the next piece. From the door to the engine nothing else can happen."""
        flight.drained, flight.weights = False, self._weights_inside()
        self._inside.add(flight)
        self._empty.clear()
        try:
            piece = await self._engine.generate(
                flight.partial.prompt_ids,
                flight.partial.sampling,
                request_id=flight.request_id,
                images=images,
            )
        finally:
            self._inside.discard(flight)
            if not self._inside:
                self._empty.set()
        if piece.finish_reason != "abort":
            self._progress_at = asyncio.get_running_loop().time()
        return piece

    def _keep(self, flight: _Flight, piece: Completion) -> None:
        """Takes a piece that ended too early."""
        partial = flight.partial
        if self._on_update == "restart":
            length = len(piece.token_ids)
        else:
            partial.add(piece)
            length = len(partial)
            # The same seed and weights must give the same tokens, whoever paused a server meanwhile.
            has_new_weights = flight.drained or self._weights_inside() != flight.weights
            must_repeat = partial.sampling.seed is not None and not has_new_weights
            if must_repeat or not partial.can_go_on:
                partial.clear()
        now = asyncio.get_running_loop().time()
        if length > flight.most:
            flight.most, flight.fruitless = length, 0
            self._progress_at = now
        elif not flight.drained:
            flight.fruitless += 1
            if flight.fruitless == 1:
                flight.fruitless_since = now

    async def _rest(self, flight: _Flight) -> None:
        if flight.fruitless >= _FRUITLESS_AT_MOST:
            what = f"the engine ended request {flight.request_id!r} {flight.fruitless} times without a token"
            if self._progress_at > flight.fruitless_since:
                raise TransientEngineError(f"{what}, while others go on")
            raise EngineUnavailableError(f"{what}, and no other one has got any: is it paused?")
        pause = min(_REST_S_MAX, _FIRST_REST_S * 2 ** (flight.fruitless - 1))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self._sleep(flight, until=lambda: False)

    async def _sleep(self, flight: _Flight, *, until: Callable[[], bool]) -> None:
        """Returns when `until` holds, the caller aborts, or the engine is closed."""
        while not (until() or flight.aborted or self._closed):
            flight.wake.clear()
            await flight.wake.wait()

    def _what_there_is(self, flight: _Flight) -> Completion:
        completion = flight.partial.result("abort")
        return (
            completion if len(flight.partial) else replace(completion, policy_versions=[(0, self._version)])
        )

    async def _drain(self) -> None:
        """Aborts what is in the engine and returns when it has left it."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + _DRAIN_S
        while self._inside:
            if loop.time() > give_up_at:
                raise EngineError(
                    f"{len(self._inside)} requests did not end within {_DRAIN_S:g} s of their abort; "
                    "the old weights stay"
                )
            inside = list(self._inside)
            for flight in inside:
                flight.drained = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(give_up_at):
                    await asyncio.gather(*(self._engine.abort(flight.request_id) for flight in inside))
                    async with asyncio.timeout(_ABORT_AGAIN_S):
                        await self._empty.wait()
        if self._closed:
            raise EngineUnavailableError("the engine was closed while it was updated")

    def _weights_inside(self) -> int | None:
        """Which weights an engine in this process has: whoever owns the model may change them beside us.

        A number that differs for other weights: their version, unless the engine counts every change.
        """
        if isinstance(self._engine, _CountsChanges):
            return self._engine.weight_changes
        return self._engine.version if isinstance(self._engine, _Versioned) else None

    def _wake_all(self) -> None:
        for flight in self._flights.values():
            flight.wake.set()
