"""One life of the `hf` engine's thread: it takes requests in, steps the model, and draws tokens.

Imported when a model is loaded, like `hf_forward`.
"""

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rollstream.aio import finish_despite_cancellation
from rollstream.engine.base import EngineLoad
from rollstream.engine.embedded import StopTexts, stop_window
from rollstream.engine.hf_forward import DRAW_BITS, KeyValues, check_model, draw_tokens, next_logits
from rollstream.engine.hf_model import LiveModel
from rollstream.engine.replica import Weights
from rollstream.errors import EngineError, EngineUnavailableError
from rollstream.trajectory import Completion, FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """What does not change from one life to the next."""

    cache_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_threads: int
    """Of torch, in the engine's thread; 0 leaves it alone."""
    tokenizer_file: Path | None
    """None when the model has no `tokenizer.json`."""


_Sampled = list[tuple[int, float, int]]
"""Token, log-prob, and version of the weights."""


@dataclass(slots=True, eq=False)
class _SampledRequest:
    """What is asked for, and what has been sampled so far."""

    name: str
    prompt_ids: list[int]
    sampling: SamplingParams
    end_ids: frozenset[int]
    """Ids that end it: the model's own, unless ignored, and the request's stop ids."""
    future: "asyncio.Future[Completion]"
    draws: random.Random
    """One draw for each sampled token, so that a seed repeats its tokens whatever else is in the batch."""
    weights: Weights | None = None
    """Of the adapter that it is answered under; None: the active one's."""
    sampled: _Sampled = field(default_factory=list)
    """The thread appends, the event loop reads."""

    @property
    def longest(self) -> int:
        """Tokens it may come to."""
        return len(self.prompt_ids) + self.sampling.max_tokens

    def completion(self, sampled: _Sampled, reason: FinishReason, version: int) -> Completion:
        """Its answer; `version` stands where nothing was sampled."""
        versions: list[tuple[int, int]] = []
        for at, (_, _, one) in enumerate(sampled):
            if not versions or versions[-1][1] != one:
                versions.append((at, one))
        return Completion(
            token_ids=[token for token, _, _ in sampled],
            logprobs=[logprob for _, logprob, _ in sampled] if self.sampling.logprobs else None,
            finish_reason=reason,
            policy_versions=versions or [(0, version)],
        )


_Answered = tuple[_SampledRequest, Completion | EngineError]


class Batch:
    """Answers requests, as many at a time as the keys and values of all, at their longest, have room for.

    They begin in the order of arrival, and none is ever evicted. A task takes the model's lock, lets a thread make
    steps until a request ends or somebody else wants the lock, and answers what has ended. The event loop may answer
    a request earlier (`abort`, `interrupt`): it leaves the batch before the next step.
    """

    def __init__(self, model: LiveModel, settings: BatchSettings) -> None:
        self.cause = ""
        """Why it serves nobody any more; "" while it serves."""
        self._error: BaseException | None = None
        self._model = model
        self._settings = settings
        self._stop_texts = StopTexts(settings.tokenizer_file) if settings.tokenizer_file else None
        self._in_flight: set[_SampledRequest] = set()
        self._waiting: deque[_SampledRequest] = deque()
        self._running: list[_SampledRequest] = []
        """In the order of the cache's rows."""
        self._cache = KeyValues(settings.cache_tokens)
        self._loop = asyncio.get_running_loop()
        self._work = asyncio.Event()
        self._stopping = False
        self._serving: asyncio.Task[None] | None = None
        # Its thread is joined when the interpreter exits: one in the middle of a step would crash that.
        self._thread = ThreadPoolExecutor(1, "rollstream-hf", self._set_threads)

    async def start(self) -> None:
        """Takes the memory of keys and values, and begins to serve.

        Raises:
            EngineError: it cannot, with the cause.
        """
        async with self._model.lock:
            await self._loop.run_in_executor(self._thread, check_model, self._model.module, self._cache)
        self._serving = asyncio.create_task(self._serve(), name="rollstream-hf")

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        request_id: str,
        weights: Weights | None = None,
    ) -> Completion:
        """Answers one request; cancelling this forgets it.

        Raises:
            EngineUnavailableError: there is no thread to serve it.
        """
        if self.cause:
            raise self._unavailable()
        request = _SampledRequest(
            request_id,
            prompt_ids,
            sampling,
            self._model.end_ids(sampling),
            self._loop.create_future(),
            random.Random(sampling.seed),
            weights,
        )
        self._in_flight.add(request)
        self._waiting.append(request)
        self._work.set()
        try:
            return await request.future
        finally:
            self._in_flight.discard(request)

    def abort(self, request_id: str) -> None:
        """Answers a request, if it is in flight, with what was sampled."""
        self._give_up([request for request in self._in_flight if request.name == request_id])

    def interrupt(self) -> None:
        """Ends what runs, with what was sampled. While no step runs.

        So nothing that is in flight rests on keys and values of other weights.
        """
        self._give_up(self._running)

    def load(self) -> EngineLoad:
        """How busy it is."""
        running = [request for request in list(self._running) if not request.future.done()]
        waiting = sum(not request.future.done() for request in list(self._waiting))
        longest = max((request.longest for request in running), default=0)
        return EngineLoad(len(running), waiting, len(running) * longest / self._settings.cache_tokens, 0)

    def stop(self) -> None:
        """Ends after the step under way, from any thread."""
        self._stopping = True
        self._thread.shutdown(wait=False)
        if self._serving is not None:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                self._loop.call_soon_threadsafe(self._serving.cancel)

    async def close(self) -> None:
        """Fails what is in flight, ends the thread after the step under way and frees its memory."""
        self._fail("the engine was closed", None)
        self.stop()
        if self._serving is not None:
            await finish_despite_cancellation(asyncio.wait((self._serving,)))
        self._cache.free()

    def _give_up(self, requests: Iterable[_SampledRequest]) -> None:
        for request in requests:
            sampled = list(request.sampled)  # the thread may append meanwhile, or its answer be under way
            ended = self._ended(request, sampled)
            _answer(request, ended or request.completion(sampled, "abort", self._model.version))

    def _fail(self, cause: str, error: BaseException | None) -> None:
        if not self.cause:
            self.cause, self._error = cause, error
            for request in self._in_flight:
                _answer(request, self._unavailable())  # each its own: an exception is raised once

    def _unavailable(self) -> EngineUnavailableError:
        unavailable = EngineUnavailableError(self.cause)
        unavailable.__cause__ = self._error
        return unavailable

    async def _serve(self) -> None:
        try:
            while True:
                await self._work.wait()
                async with self._model.lock:
                    steps = self._loop.run_in_executor(self._thread, self._make_steps)
                    try:
                        answered = await asyncio.shield(steps)
                    except asyncio.CancelledError:
                        self._stopping = True
                        await asyncio.wait((steps,))
                        raise
                for request, answer in answered:
                    _answer(request, answer)
                if not self._running and not self._waiting:
                    self._work.clear()
        except asyncio.CancelledError:
            self._fail("the engine was closed", None)
            raise
        except BaseException as error:  # SystemExit, too: those who wait are to hear of it
            self._cache.free()  # the error's traceback holds on to it
            self._fail(f"the engine's thread ended: {type(error).__name__}: {error}", error)

    # The thread.

    def _set_threads(self) -> None:
        if self._settings.num_threads:
            torch.set_num_threads(self._settings.num_threads)  # OpenMP keeps it per thread

    def _make_steps(self) -> list[_Answered]:
        with torch.inference_mode():
            while self._running or self._waiting:
                answered = self._step()
                if answered or self._model.wanted or self._stopping:
                    return answered
        return []

    def _step(self) -> list[_Answered]:
        """One more token for each that runs, and the first one of some that wait."""
        for row in reversed(range(len(self._running))):
            if self._running[row].future.done():
                self._remove(row)
        answered = self._begin()
        if self._running:
            newest = [[request.sampled[-1][0]] for request in self._running]
            answered += self._draw(0, self._next_logits(0, newest))
        return answered

    def _next_logits(self, first: int, tokens: list[list[int]]) -> Any:
        module, more = self._model.answering([request.weights for request in self._running[first:]])
        return next_logits(module, self._cache, first, tokens, **more)

    def _begin(self) -> list[_Answered]:
        """Takes in what there is room for, and computes the prompts."""
        if not (group := self._admit()):
            return []
        cache, first, step = self._cache, len(self._running), self._settings.max_num_batched_tokens
        self._running += group
        cache.lengths += [0] * len(group)
        prompts = [request.prompt_ids for request in group]
        for begin in range(0, max(map(len, prompts)), step):  # one that is longer than a step is alone
            parts = [prompt[begin : begin + step] for prompt in prompts]
            logits = self._next_logits(first, parts)
        return self._draw(first, logits)

    def _admit(self) -> list[_SampledRequest]:
        """The next ones, while the cache has room at the longest of all, and a step for their prompts."""
        settings, cache = self._settings, self._cache
        group: list[_SampledRequest] = []
        columns = max((request.longest for request in self._running), default=0)
        width, rows = 0, len(self._running)
        while self._waiting:
            request = self._waiting[0]
            if not request.future.done():
                longest, widest = max(columns, request.longest), max(width, len(request.prompt_ids))
                fits_step = not group or widest * (len(group) + 1) <= settings.max_num_batched_tokens
                fits_cache = rows < settings.max_num_seqs and (rows + 1) * longest <= settings.cache_tokens
                if not fits_step or not fits_cache:
                    break
                group.append(request)
                columns, width, rows = longest, widest, rows + 1
            self._waiting.popleft()
        if group and (columns > cache.columns or rows * cache.columns > settings.cache_tokens):
            cache.reshape(columns)
        return group

    def _draw(self, first: int, logits: Any) -> list[_Answered]:
        """Gives the rows from `first` on a token each; those that end with it leave."""
        requests = self._running[first:]
        draws = [request.draws.getrandbits(DRAW_BITS) / 2**DRAW_BITS for request in requests]
        ids, logprobs = draw_tokens(logits, [request.sampling for request in requests], draws)
        answered: list[_Answered] = []
        for row in reversed(range(len(requests))):
            version = (requests[row].weights or self._model).version
            requests[row].sampled.append((ids[row], logprobs[row], version))
            if (answer := self._ended(requests[row], requests[row].sampled)) is not None:
                answered.append((requests[row], answer))
                self._remove(first + row, broken=isinstance(answer, EngineError))
        return answered

    def _remove(self, row: int, *, broken: bool = False) -> None:
        self._cache.remove(row, broken=broken)
        last = self._running.pop()
        if row < len(self._running):
            self._running[row] = last

    def _ended(self, request: _SampledRequest, sampled: _Sampled) -> Completion | EngineError | None:
        """Its answer, if the newest token is its last one."""
        if not sampled:
            return None
        token, logprob, version = sampled[-1]
        if logprob != logprob:
            return EngineError(
                f"the model's logits are not numbers after {len(sampled) - 1} response tokens: its weights, "
                "or its dtype, are broken"
            )
        if token in request.end_ids or self._has_stop_text(request.sampling.stop, sampled):
            return request.completion(sampled, "stop", version)
        is_full = len(sampled) == request.sampling.max_tokens
        return request.completion(sampled, "length", version) if is_full else None

    def _has_stop_text(self, stop: tuple[str, ...], sampled: _Sampled) -> bool:
        if not stop or self._stop_texts is None:
            return False
        return self._stop_texts.found([one[0] for one in sampled[-stop_window(stop) :]], stop)


def _answer(request: _SampledRequest, answer: Completion | EngineError) -> None:
    if request.future.done():  # given up
        return
    if isinstance(answer, EngineError):
        request.future.set_exception(answer)
    else:
        request.future.set_result(answer)
