"""The requests to one engine: bounded, counted, aborted by name, and asked again when the engine dies."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from rollstream.aio import finish_despite_cancellation
from rollstream.chat.wires.requests import NEUTRAL, RequestError, Sampling, unsupported
from rollstream.engine.base import Capabilities, Engine
from rollstream.engine.checks import ids_fit
from rollstream.engine.continuation import ContinuingEngine
from rollstream.errors import EngineUnavailableError
from rollstream.sampling import PLAIN
from rollstream.trajectory import Completion, SamplingParams

_RECOVERY_S = 30.0
"""How long requests wait for an engine that died. A large model loads longer; clients may ask again."""

_RECOVERY_POLL_S = 0.25
"""Between two attempts to bring it back; engines have a back-off of their own."""

_SEEDS = 2**31
"""Engines take seeds below it. A larger or negative one is folded: still one seed, one answer."""

_MAX_STOPS = 64
"""Each stop is searched for after each token; OpenAI takes four."""


@dataclass(slots=True)
class EngineRequest:
    """One sample to generate."""

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    skip_special_tokens: bool = True
    scored_from: int | None = None
    """The log-probs of its prompt are asked for, after this id."""
    top_logprobs: int = 0
    """Of so many likeliest ids, too."""
    aborted: bool = False


class EngineService:
    """A started engine, shared by all clients. Pauses and new weights are `ContinuingEngine`'s affair.

    Args:
        engine: started.
        max_queue: samples in flight at most, those included that the engine queues itself.
        model_path: of the weights.

    Attributes:
        engine: takes no requests but through `generate`.
        model_path: where the weights came from.
        weight_version: of answers that begin now.
        finished: samples that ended, by finish reason.
        prompt_tokens: of samples that ended.
        generated_tokens: of samples that ended.
    """

    def __init__(self, engine: Engine, *, max_queue: int, model_path: str) -> None:
        self.engine = ContinuingEngine(engine)
        self.max_queue = max_queue
        self.model_path = model_path
        self.weight_version = 0
        self.finished: Counter[str] = Counter()
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self._in_flight: dict[str, EngineRequest] = {}
        self._closed = False
        self._update = asyncio.Lock()

    @property
    def capabilities(self) -> Capabilities:
        return self.engine.capabilities

    @property
    def limit(self) -> int:
        """Tokens of a prompt and its answer at most: an embedded engine knows it."""
        length = self.capabilities.max_model_len
        assert length is not None
        return length

    @property
    def running(self) -> int:
        """Samples that the engine has, whether it works on them or queues them."""
        return self.engine.inside

    @property
    def waiting(self) -> int:
        """Samples that are held back: by a pause or an update, or because the engine has to come back."""
        return len(self._in_flight) - self.running

    async def generate(self, requests: Iterable[EngineRequest]) -> list[tuple[EngineRequest, Completion]]:
        """Answers samples in their order; all or none. Cancelling this aborts them in the engine.

        Raises:
            RequestError: too many, too many at once, or an id that is in flight.
            EngineError: the engine's.
        """
        batch = self._admit(requests)
        self._in_flight |= batch
        try:
            async with asyncio.TaskGroup() as tasks:
                answers = [tasks.create_task(self._answer(request)) for request in batch.values()]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            for name in batch:
                del self._in_flight[name]
        return [(request, answer.result()) for request, answer in zip(batch.values(), answers, strict=True)]

    async def abort(self, name: str | None = None) -> None:
        """Ends samples early, with what they have: those of a request or a prompt, or with None all.

        As in SGLang a name reaches all whose ids begin with it: `a` also `a_0` and `a_0_1`, see `samples`.
        """
        for request in list(self._in_flight.values()):
            if name is None or f"{request.request_id}_".startswith(f"{name}_"):
                request.aborted = True
                await self.engine.abort(request.request_id)

    async def update_weights(self, source: str, version: int | None) -> int:
        """Loads weights; returns their version. By default it is one more than the last.

        Cancelling this takes effect when they have been loaded, or have not: two folders never share a version.

        Raises:
            EngineError: it failed; the old weights stay.
        """
        async with self._update:
            number = self.weight_version + 1 if version is None else version
            await finish_despite_cancellation(self._load_weights(source, number))
        return number

    async def health(self) -> bool:
        """Whether requests are served; brings back an engine that died."""
        return not self._closed and await self.engine.health()

    async def close(self) -> None:
        """Closes the engine; requests in flight end with `EngineUnavailableError`."""
        self._closed = True
        await self.engine.close()

    def _admit(self, requests: Iterable[EngineRequest]) -> dict[str, EngineRequest]:
        if self._closed:
            raise RequestError("the server is shutting down", status=503)
        batch: dict[str, EngineRequest] = {}
        for request in requests:  # a mistyped `n` must fill no memory: no more than this are made
            if len(batch) == self.max_queue:
                raise RequestError(f"the server takes {self.max_queue} samples at most", param="n")
            if request.request_id in self._in_flight or request.request_id in batch:
                raise RequestError(f"request id {request.request_id!r} is in use", param="rid")
            batch[request.request_id] = request
        if len(self._in_flight) + len(batch) > self.max_queue:
            raise RequestError(
                f"the queue is full: {len(self._in_flight)} of {self.max_queue} samples", status=503
            )
        return batch

    async def _answer(self, request: EngineRequest) -> Completion:
        try:
            completion = await self._ask(request)
        except EngineUnavailableError:
            # The engine has died. That was probably not this request's fault; a second time it may have been.
            if not self._closed and not await self._recover():
                raise
            if self._closed:
                raise EngineUnavailableError("the server is shutting down") from None
            if request.aborted:
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
        return await self.engine.generate(request.prompt_ids, request.sampling, request_id=request.request_id)

    async def _load_weights(self, source: str, version: int) -> None:
        await self.engine.update_weights(source, version)
        self.weight_version, self.model_path = version, source

    async def _recover(self) -> bool:
        """Waits until the engine is back, or the server ends."""
        give_up_at = time.monotonic() + _RECOVERY_S
        while not self._closed and not await self.engine.health():
            if time.monotonic() > give_up_at:
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
    """The sampling that a request asks for; the engine looks at ranges.

    Args:
        asked: by the client.
        capabilities: of the engine.
        max_tokens: where the request does not say how many.
        logprobs: whether they are asked for.
        more_stop_ids: ids that end the answer as well.

    Raises:
        RequestError: stops that cannot be, ids outside the vocabulary, or what the engine does not know.
    """
    if asked.n < 1:
        raise RequestError(f"n must be at least 1, not {asked.n}", param="n")
    if not all(asked.stops):
        raise RequestError("a stop string is empty: it would stop everything", param="stop")
    if len(asked.stops) > _MAX_STOPS or len(asked.stop_token_ids) > _MAX_STOPS:
        raise RequestError(f"more than {_MAX_STOPS} stops", param="stop")
    vocab_size = capabilities.vocab_size
    if not ids_fit(asked.stop_token_ids, vocab_size):
        raise RequestError(
            f"stop_token_ids hold an id outside the vocabulary of {vocab_size} ids", param="stop_token_ids"
        )
    extra = {name: value for name in PLAIN if (value := getattr(asked, name)) is not None}
    for name in extra.keys() - capabilities.extra_sampling:
        raise unsupported(name, f"is supported with the value {NEUTRAL[name]} only")
    top_k = -1 if asked.top_k is None else asked.top_k
    if vocab_size is not None and top_k >= vocab_size:
        top_k = -1  # beyond the vocabulary it takes nothing away, and not every engine takes such a number
    return SamplingParams(
        max_tokens=max_tokens if asked.max_tokens is None else asked.max_tokens,
        temperature=1.0 if asked.temperature is None else asked.temperature,
        top_p=1.0 if asked.top_p is None else asked.top_p,
        top_k=top_k,
        logprobs=logprobs,
        seed=None if asked.seed is None else asked.seed % _SEEDS,
        stop=asked.stops,
        stop_token_ids=tuple(dict.fromkeys([*asked.stop_token_ids, *more_stop_ids])),
        ignore_eos=asked.ignore_eos,
        extra=extra,
    )


def samples(name: str, prompt_ids: list[int], sampling: SamplingParams, n: int) -> Iterator[EngineRequest]:
    """The samples of a prompt, one when it is needed: each has a seed of its own, the first one the request's."""
    for sample in range(n):
        seed = None if sampling.seed is None else (sampling.seed + sample) % _SEEDS
        request_id = name if n == 1 else f"{name}_{sample}"
        yield EngineRequest(request_id, prompt_ids, replace(sampling, seed=seed))
