"""Everybody's requests to one engine: counted, bounded, found again for an abort, sampled again when it dies."""

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rollstream.aio import SharedCheck, finish_despite_cancellation
from rollstream.chat.wires.requests import RequestError, Sampling
from rollstream.engine.base import Capabilities, Engine, EngineLoad
from rollstream.engine.checks import check_request, ids_fit
from rollstream.engine.continuation import ContinuingEngine
from rollstream.errors import EngineUnavailableError
from rollstream.trajectory import Completion, SamplingParams

_LOG = logging.getLogger(__name__)

_RECOVERY_S = 30.0
"""How long requests wait for an engine that died. A large model loads longer; clients may ask again."""

_RECOVERY_POLL_S = 0.25
"""Between two attempts to bring it back; engines have a back-off of their own."""

_SEEDS = 2**31
"""Engines take seeds below it. A larger or negative one is folded: still one seed, one answer."""

_MAX_STOPS = 64
"""Each stop is searched for after each token; OpenAI takes four."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sample to generate."""

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    prompt_name: str = ""
    """What all samples of its prompt can be aborted by."""
    scored_from: int | None = None
    """Log-probs of its prompt are asked for, after this id."""


@dataclass(slots=True)
class _InFlight:
    names: tuple[str, ...]
    """What it can be aborted by."""
    aborted: bool = False


class EngineService:
    """A started engine, shared by all who ask. What pauses and new weights do is `ContinuingEngine`'s affair.

    Args:
        engine: started.
        max_queue: samples in flight at most, those included that the engine queues itself.
        model_path: of the weights.
    """

    def __init__(self, engine: Engine, *, max_queue: int, model_path: str) -> None:
        self._engine = ContinuingEngine(engine)
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
        self._in_flight: dict[str, _InFlight] = {}
        self._closed = False
        self._update = asyncio.Lock()
        self._trials = itertools.count()
        self._recovery = SharedCheck(self._recover)

    @property
    def capabilities(self) -> Capabilities:
        """Of the engine."""
        return self._engine.capabilities

    @property
    def running(self) -> int:
        """Samples that the engine has, whether it works on them or queues them."""
        return self._engine.inside

    @property
    def waiting(self) -> int:
        """Samples that are held back: by a pause or an update, or because the engine has to come back."""
        return len(self._in_flight) - self.running

    @property
    def paused(self) -> bool:
        """Whether new requests wait."""
        return self._engine.paused

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
        self._in_flight |= {
            one.request_id: _InFlight((one.request_id, one.prompt_name, group)) for one in requests
        }
        try:
            async with asyncio.TaskGroup() as tasks:
                answers = [tasks.create_task(self._answer(request)) for request in requests]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            for request in requests:
                del self._in_flight[request.request_id]
        return [answer.result() for answer in answers]

    async def abort(self, name: str | None = None) -> None:
        """Ends requests early: all of that id, prompt or group, or with None all. They return what they have."""
        for request_id, one in list(self._in_flight.items()):
            if name is None or name in one.names:
                one.aborted = True
                await self._engine.abort(request_id)

    async def pause(self) -> None:
        """Aborts what is in the engine and holds back what comes, until `resume`."""
        await self._engine.pause()

    def resume(self) -> None:
        """Ends a pause."""
        self._engine.resume()

    async def update_weights(self, source: str, version: int | None) -> int:
        """Loads weights; returns their version. By default it is one more than the last.

        Cancelling this takes effect when they have been loaded, or have not: two folders never share a version.

        Raises:
            RequestError: the engine cannot.
            EngineError: it failed; the old weights stay.
        """
        if not self.capabilities.update_weights:
            raise RequestError("this engine cannot update its weights", code="unsupported")
        async with self._update:
            number = self.weight_version + 1 if version is None else version
            await finish_despite_cancellation(self._load_weights(source, number))
        return number

    async def _load_weights(self, source: str, version: int) -> None:
        await self._engine.update_weights(source, version)
        self.weight_version, self.model_path = version, source

    async def score(self, ids: list[int], start: int) -> list[float]:
        """See `ScoresIds.score`."""
        return await self._engine.score(ids, start)

    async def health(self) -> bool:
        """Whether requests are served; brings back an engine that died."""
        return not self._closed and await self._engine.health()

    async def load(self) -> EngineLoad | None:
        """How busy the engine is; None when it does not say."""
        return await self._engine.load()

    async def try_out(self) -> None:
        """Samples one token, also during a pause. Raises `EngineError` if that does not work."""
        sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=False)
        async with self._update:  # by the engine inside, which must not be asked while it loads weights
            await self._engine.engine.generate([0], sampling, request_id=f"health-{next(self._trials)}")

    async def close(self) -> None:
        """Closes the engine; requests in flight end with `EngineUnavailableError`."""
        self._closed = True
        await self._recovery.close()
        await self._engine.close()

    def check_count(self, count: int) -> None:
        """Refuses more samples in one request than are queued at all: a mistyped `n` must fill no memory."""
        if count > self.max_queue:
            raise RequestError(
                f"a request for {count} samples: the server queues {self.max_queue} at most", param="n"
            )

    def _admit(self, requests: Sequence[EngineRequest]) -> None:
        if self._closed:
            raise RequestError("the server is shutting down", status=503)
        self.check_count(len(requests))
        seen = set()
        for request in requests:
            check_request(request.prompt_ids, request.sampling, self.capabilities, images=None)
            if request.request_id in self._in_flight or request.request_id in seen:
                raise RequestError(f"request id {request.request_id!r} is in use", param="rid")
            seen.add(request.request_id)
        if len(self._in_flight) + len(requests) > self.max_queue:
            raise RequestError(
                f"the queue is full: {len(self._in_flight)} of {self.max_queue} samples", status=503
            )

    async def _answer(self, request: EngineRequest) -> Completion:
        try:
            completion = await self._ask(request)
        except EngineUnavailableError:
            # The engine has died. That was probably not this request's fault; a second time it may have been.
            if not self._closed and not await self._recovery.ask() and not self._closed:
                raise EngineUnavailableError("the engine has died and does not come back") from None
            if self._closed:
                raise EngineUnavailableError("the server is shutting down") from None
            if self._in_flight[request.request_id].aborted:
                completion = Completion([], [] if request.sampling.logprobs else None, "abort")
            else:
                completion = await self._ask(request)
        if not completion.token_ids:
            completion.policy_versions = [(0, self.weight_version)]
        self.finished[completion.finish_reason] += 1
        self.prompt_tokens += len(request.prompt_ids)
        self.generated_tokens += len(completion.token_ids)
        return completion

    async def _ask(self, request: EngineRequest) -> Completion:
        return await self._engine.generate(
            request.prompt_ids, request.sampling, request_id=request.request_id
        )

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


def build_sampling(
    asked: Sampling,
    capabilities: Capabilities,
    *,
    max_tokens: int,
    logprobs: bool,
    more_stop_ids: Sequence[int] = (),
) -> SamplingParams:
    """What a request asks for, as the engine can honour it; `check_request` looks at ranges.

    Args:
        asked: by the client.
        capabilities: of the engine.
        max_tokens: where it does not say how many.
        logprobs: whether they are asked for.
        more_stop_ids: ids that end the answer as well.

    Raises:
        RequestError: seeds, stops or log-probs that the engine does not have, ids outside its vocabulary.
    """
    if asked.n < 1:
        raise RequestError(f"n must be at least 1, not {asked.n}", param="n")
    if not all(asked.stops):
        raise RequestError("a stop string is empty: it would stop everything", param="stop")
    if len(asked.stops) > _MAX_STOPS or len(asked.stop_token_ids) > _MAX_STOPS:
        raise RequestError(f"more than {_MAX_STOPS} stops", param="stop")
    if asked.stop_token_ids and not capabilities.stop_token_ids:
        raise RequestError("this engine cannot stop at token ids", param="stop_token_ids")
    vocab_size = capabilities.vocab_size
    if not ids_fit(asked.stop_token_ids, vocab_size):
        raise RequestError(
            f"stop_token_ids hold an id outside the vocabulary of {vocab_size} ids", param="stop_token_ids"
        )
    if asked.seed is not None and not capabilities.seeds:
        raise RequestError("this engine does not honour seeds", param="seed")
    if logprobs and capabilities.logprobs == "none":
        raise RequestError("this engine gives no log-probs", param="logprobs")
    # Beyond the vocabulary top-k takes nothing away, and not every engine takes such a number.
    has_top_k = asked.top_k is not None and (vocab_size is None or asked.top_k < vocab_size)
    return SamplingParams(
        max_tokens=max_tokens if asked.max_tokens is None else asked.max_tokens,
        temperature=1.0 if asked.temperature is None else asked.temperature,
        top_p=1.0 if asked.top_p is None else asked.top_p,
        top_k=asked.top_k if has_top_k and asked.top_k is not None else -1,
        logprobs=logprobs,
        seed=None if asked.seed is None else asked.seed % _SEEDS,
        stop=asked.stops,
        stop_token_ids=tuple(dict.fromkeys([*asked.stop_token_ids, *more_stop_ids])),
        ignore_eos=asked.ignore_eos,
    )


def samples(name: str, prompt_ids: list[int], sampling: SamplingParams, n: int) -> Iterator[EngineRequest]:
    """The samples of a prompt: each has a seed of its own, the first one the request's."""
    for sample in range(n):
        seed = None if sampling.seed is None else (sampling.seed + sample) % _SEEDS
        request_id = name if n == 1 else f"{name}_{sample}"
        yield EngineRequest(request_id, prompt_ids, replace(sampling, seed=seed), name)
