"""Everybody's requests to one engine: counted, bounded, found again for an abort, held back by a pause."""

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollstream.engine.base import Capabilities, Engine, EngineLoad
from rollstream.engine.checks import check_request
from rollstream.engine.load import ask_load
from rollstream.errors import EngineUnavailableError
from rollstream.serving.refusals import RequestError
from rollstream.trajectory import Completion, SamplingParams

_LOG = logging.getLogger(__name__)

_LIVES = 2
"""How often a request is given to an engine that dies under it. More than once, since it was probably not
this request's fault; not often, since it may have been."""

_RECOVERY_S = 30.0
"""How long requests wait for an engine that died. A large model loads longer; clients may ask again."""

_RECOVERY_POLL_S = 0.25
"""Between two attempts to bring it back; engines have a back-off of their own."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sample to generate."""

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams


@dataclass(slots=True)
class _Flight:
    group: str
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a reason to wait may have gone."""
    sent: bool = False
    """Whether the engine has it."""
    aborted: bool = False


class EngineService:
    """A started engine, shared by all who ask.

        waiting ----------------> in the engine ---> answered
           ^  a pause, or the          |
           +-- engine died ------------+

    Args:
        engine: started.
        max_queue: samples in flight at most, those included that the engine queues itself.
        model_path: of the weights.
    """

    def __init__(self, engine: Engine, *, max_queue: int, model_path: str) -> None:
        self._engine = engine
        self.max_queue = max_queue
        self.model_path = model_path
        """Where the weights came from; changed by an update."""
        self.weight_version = 0
        """Of answers that begin now."""
        self.finished: Counter[str] = Counter()
        """Samples that ended, by finish reason."""
        self.prompt_tokens = 0
        """Of samples that ended."""
        self.generated_tokens = 0
        self.running = 0
        """Samples that the engine has, whether it works on them or queues them."""
        self._flights: dict[str, _Flight] = {}
        self._paused = False
        self._closed = False
        self._update = asyncio.Lock()
        self._trials = itertools.count()
        self._idle = asyncio.Event()
        self._idle.set()
        self._recovery: asyncio.Task[bool] | None = None

    @property
    def capabilities(self) -> Capabilities:
        """Of the engine."""
        return self._engine.capabilities

    @property
    def waiting(self) -> int:
        """Samples that are held back: by a pause, or because the engine has to come back."""
        return len(self._flights) - self.running

    @property
    def paused(self) -> bool:
        """Whether new requests wait."""
        return self._paused

    async def generate(self, group: str, requests: Sequence[EngineRequest]) -> list[Completion]:
        """Answers the samples of one request, in order; all or none.

        Cancelling this aborts them in the engine.

        Args:
            group: a name by which all of them can be aborted.
            requests: their ids must not be in flight.

        Raises:
            RequestError: too many, too many at once, or an id that is in flight.
            EngineError: the engine's.
        """
        self._admit(requests)
        flights = [_Flight(group) for _ in requests]
        names = [request.request_id for request in requests]
        self._flights.update(zip(names, flights, strict=True))
        try:
            if len(requests) == 1:
                return [await self._answer(requests[0], flights[0])]
            try:
                async with asyncio.TaskGroup() as tasks:
                    answers = [
                        tasks.create_task(self._answer(request, flight))
                        for request, flight in zip(requests, flights, strict=True)
                    ]
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
            return [answer.result() for answer in answers]
        finally:
            for name in names:
                del self._flights[name]

    async def abort(self, name: str | None = None) -> None:
        """Ends requests early: that id, all of that group, or with None all. They return what they have."""
        for request_id, flight in list(self._flights.items()):
            if name is None or name in (request_id, flight.group):
                flight.aborted = True
                flight.wake.set()
                if flight.sent:
                    await self._engine.abort(request_id)

    async def pause(self) -> None:
        """Aborts what is in the engine and holds back what comes, until `resume`.

        Returns when nothing is in the engine any more, or the pause has ended.
        """
        self._paused = True
        for request_id, flight in list(self._flights.items()):
            if flight.sent:
                flight.aborted = True
                await self._engine.abort(request_id)
        if self.running and self._paused:
            self._idle.clear()  # a resume may have set it
            await self._idle.wait()

    def resume(self) -> None:
        """Ends a pause."""
        self._paused = False
        self._idle.set()
        self._wake_all()

    async def update_weights(self, source: str, version: int | None) -> int:
        """Loads weights; returns their version. By default it is one more than the last.

        Raises:
            RequestError: the engine cannot.
            EngineError: it failed; the old weights stay.
        """
        if not self.capabilities.update_weights:
            raise RequestError("this engine cannot update its weights", code="unsupported")
        async with self._update:
            number = self.weight_version + 1 if version is None else version
            await self._engine.update_weights(source, number)
            self.weight_version, self.model_path = number, source
        return number

    async def health(self) -> bool:
        """Whether requests are served; brings back an engine that died."""
        return not self._closed and await self._engine.health()

    async def load(self) -> EngineLoad | None:
        """How busy the engine is; None when it does not say."""
        return await ask_load(self._engine)

    async def try_out(self) -> None:
        """Samples one token, also during a pause. Raises `EngineError` if that does not work."""
        sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=False)
        await self._engine.generate([0], sampling, request_id=f"health-{next(self._trials)}")

    async def close(self) -> None:
        """Closes the engine; requests in flight end with `EngineUnavailableError`."""
        self._closed = True
        self._wake_all()
        if self._recovery is not None:
            self._recovery.cancel()
            await asyncio.wait((self._recovery,))
        await self._engine.close()

    def _admit(self, requests: Sequence[EngineRequest]) -> None:
        if self._closed:
            raise RequestError("the server is shutting down", status=503)
        if len(requests) > self.max_queue:
            raise RequestError(
                f"a request for {len(requests)} samples: the server queues {self.max_queue} at most"
            )
        seen = set()
        for request in requests:
            check_request(request.prompt_ids, request.sampling, self.capabilities, images=None)
            if request.request_id in self._flights or request.request_id in seen:
                raise RequestError(f"request id {request.request_id!r} is in use", param="rid")
            seen.add(request.request_id)
        if len(self._flights) + len(requests) > self.max_queue:
            raise RequestError(
                f"the queue is full: {len(self._flights)} of {self.max_queue} samples", status=503
            )

    async def _answer(self, request: EngineRequest, flight: _Flight) -> Completion:
        lives = _LIVES
        while True:
            while self._paused and not (flight.aborted or self._closed):
                flight.wake.clear()
                await flight.wake.wait()
            if self._closed:
                raise EngineUnavailableError("the server is shutting down")
            if flight.aborted:
                completion = Completion([], [] if request.sampling.logprobs else None, "abort")
                completion.policy_versions = [(0, self.weight_version)]
                break
            flight.sent = True
            self.running += 1
            self._idle.clear()
            try:
                completion = await self._engine.generate(
                    request.prompt_ids, request.sampling, request_id=request.request_id
                )
                break
            except EngineUnavailableError:
                lives -= 1
                if self._closed:
                    raise EngineUnavailableError("the server is shutting down") from None
                if not lives:
                    raise
            finally:
                flight.sent = False
                self.running -= 1
                if not self.running:
                    self._idle.set()
            if not await self._recovered():
                raise EngineUnavailableError("the engine has died and does not come back")
        self.finished[completion.finish_reason] += 1
        self.prompt_tokens += len(request.prompt_ids)
        self.generated_tokens += len(completion.token_ids)
        return completion

    async def _recovered(self) -> bool:
        """Whether the engine came back. All who wait share the attempt."""
        if self._recovery is None or self._recovery.done():
            self._recovery = asyncio.create_task(self._recover())
        recovery = self._recovery
        await asyncio.wait((recovery,))
        return not recovery.cancelled() and recovery.result()

    async def _recover(self) -> bool:
        _LOG.warning("the engine has died; starting it again")
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + _RECOVERY_S
        while not await self._engine.health():
            if loop.time() > give_up_at:
                _LOG.error("the engine does not come back; who waited is answered 503")
                return False
            await asyncio.sleep(_RECOVERY_POLL_S)
        return True

    def _wake_all(self) -> None:
        for flight in self._flights.values():
            flight.wake.set()
