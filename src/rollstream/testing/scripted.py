"""An engine in this process that says what it is told to say, and fails when it is told to."""

import asyncio
import contextlib
import copy
import inspect
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace

from rollstream.engine.base import Capabilities
from rollstream.engine.checks import check_request
from rollstream.errors import EngineError, EngineUnavailableError
from rollstream.testing.answers import AnswerBook
from rollstream.trajectory import Completion, SamplingParams


@dataclass(frozen=True, slots=True)
class ScriptedRequest:
    """A call of `generate`."""

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    images: tuple[object, ...] = ()


Answer = Completion | list[int]
"""A whole completion, or ids only (log-probs are then made up, and the finish reason is worked out)."""

AnswerRule = Callable[[ScriptedRequest], Answer | Awaitable[Answer]]
"""Decides what is answered; what it raises is raised by `generate`."""

LatencyRule = Callable[[ScriptedRequest], float]
"""Seconds until the answer."""

_CAPABILITIES = Capabilities(
    token_ids=True,
    logprobs="raw",
    seeds=True,
    stop_strings=False,
    stop_token_ids=True,
    images=False,
    update_weights=True,
    max_model_len=None,
    vocab_size=512,
)


@dataclass(slots=True)
class _InFlight:
    """A request in flight."""

    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by an abort, an outage or `close`."""
    aborted: bool = False


class ScriptedEngine:
    """Answers by a rule, or with tokens that are a pure function of prompt ids and seed (`AnswerBook`).

    Example:
        >>> engine = ScriptedEngine(lambda request: [1, 2, 3])
        >>> engine.fail(lambda request: request.request_id == "a", TransientEngineError("busy"), times=2)

    Args:
        rule: what to answer; None answers with `response_tokens` tokens of the answer book.
        response_tokens: length of an answer without a rule, at most `max_tokens`.
        latency: seconds until an answer, or a rule for it.
        capabilities: what the engine says it can do; by default everything but images and stop
            strings, which it could not honour.
        vocab_size: of the model that is played, in place of that of `capabilities`.
        record: keep every request and completion, in `requests` and `completions`.
    """

    def __init__(
        self,
        rule: AnswerRule | None = None,
        *,
        response_tokens: int = 16,
        latency: float | LatencyRule = 0.0,
        capabilities: Capabilities = _CAPABILITIES,
        vocab_size: int | None = None,
        record: bool = True,
    ) -> None:
        if vocab_size is not None:
            capabilities = replace(capabilities, vocab_size=vocab_size)
        self.capabilities = capabilities
        self.requests: list[ScriptedRequest] = []
        """Every request that arrived, in order."""
        self.completions: list[tuple[str, Completion]] = []
        """All answers, `(request id, completion)`, in order."""
        self.peak_in_flight = 0
        self.policy_version = 0
        self.started = False
        self._rule = rule
        self._response_tokens = response_tokens
        self._latency = latency
        self._record = record
        self._book = AnswerBook(capabilities.vocab_size or 512)
        self._faults: list[tuple[Callable[[ScriptedRequest], bool], Iterator[Exception]]] = []
        self._calls: dict[str, _InFlight] = {}
        self._down = False

    def fail(
        self,
        matches: str | Callable[[ScriptedRequest], bool],
        error: Exception,
        *,
        times: int | None = 1,
    ) -> None:
        """Raises `error` for the next `times` matching requests (None: for all of them).

        Args:
            matches: a request id, or a rule.
            error: raised by `generate`, after the latency.
            times: how often.
        """
        rule = (lambda request: request.request_id == matches) if isinstance(matches, str) else matches
        # A raised instance collects tracebacks.
        errors = (copy.copy(error) for _ in (itertools.count() if times is None else range(times)))
        self._faults.append((rule, errors))

    def go_down(self) -> None:
        """From now on, and for what is in flight: `EngineUnavailableError`; `health` says False."""
        self._down = True
        self._end_calls()

    def come_back(self) -> None:
        """Ends `go_down`."""
        self._down = False

    @property
    def in_flight(self) -> int:
        """Requests being answered now."""
        return len(self._calls)

    async def start(self) -> None:
        self.started = True

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        images: list[object] | None = None,
    ) -> Completion:
        self._check_up()
        check_request(prompt_ids, sampling, self.capabilities, images=images)
        if request_id in self._calls:
            raise EngineError(f"request {request_id!r} is already in flight")
        request = ScriptedRequest(request_id, list(prompt_ids), sampling, tuple(images or ()))
        call = self._calls[request_id] = _InFlight()
        self.peak_in_flight = max(self.peak_in_flight, len(self._calls))
        if self._record:
            self.requests.append(request)
        try:
            completion = await self._answer(request, call)
        finally:
            del self._calls[request_id]
        if self._record:
            self.completions.append((request_id, completion))
        return completion

    async def abort(self, request_id: str) -> None:
        if call := self._calls.get(request_id):
            call.aborted = True
            call.ended.set()

    async def update_weights(self, source: str, version: int) -> None:
        """Stamps tokens with `version`; there are no weights to load."""
        if not self.capabilities.update_weights:
            raise EngineError("updating weights is not supported")
        self.policy_version = version

    async def health(self) -> bool:
        return self.started and not self._down

    async def close(self) -> None:
        self.started = False
        self._end_calls()

    def _end_calls(self) -> None:
        for call in self._calls.values():
            call.ended.set()

    def _check_up(self) -> None:
        if not self.started or self._down:
            raise EngineUnavailableError("the scripted engine is down" if self._down else "not started")

    async def _answer(self, request: ScriptedRequest, call: _InFlight) -> Completion:
        latency = self._latency(request) if callable(self._latency) else self._latency
        began = time.monotonic()
        with contextlib.suppress(TimeoutError):
            if latency > 0:
                async with asyncio.timeout(latency):
                    await call.ended.wait()
            else:
                await asyncio.sleep(0)  # an engine always lets others run
        self._check_up()
        for matches, errors in self._faults:
            if matches(request) and (error := next(errors, None)) is not None:
                raise error
        if self._rule is not None:
            completion = await ask_rule(self._rule, request, self._book, version=self.policy_version)
        else:
            length = min(self._response_tokens, request.sampling.max_tokens)
            ids, _ = self._book.answer(request.prompt_ids, request.sampling.seed, length)
            completion = _completion(ids, request, self._book, self.policy_version)
        if not call.aborted:
            return completion
        share = min(1.0, (time.monotonic() - began) / latency) if latency > 0 else 1.0
        length = int(share * len(completion.token_ids))
        logprobs = None if completion.logprobs is None else completion.logprobs[:length]
        ids = completion.token_ids[:length]
        return replace(completion, token_ids=ids, logprobs=logprobs, finish_reason="abort")


async def ask_rule(
    rule: AnswerRule, request: ScriptedRequest, book: AnswerBook, *, version: int = 0
) -> Completion:
    """Asks a rule, and makes a completion of its answer; a whole one as it is, of ids at most `max_tokens`.

    Args:
        rule: asked once.
        request: what it is asked.
        book: where log-probs of ids come from.
        version: the policy version of ids.
    """
    answer = rule(request)
    answer = await answer if inspect.isawaitable(answer) else answer
    if isinstance(answer, Completion):
        return replace(answer)
    sampling = request.sampling
    ids = answer[: sampling.max_tokens]
    # A stop id ends the answer, and belongs to it.
    end = next((at for at, token in enumerate(ids, 1) if token in sampling.stop_token_ids), len(ids))
    return _completion(ids[:end], request, book, version)


def _completion(ids: list[int], request: ScriptedRequest, book: AnswerBook, version: int) -> Completion:
    sampling = request.sampling
    logprobs = book.answer(request.prompt_ids, sampling.seed, len(ids))[1] if sampling.logprobs else None
    return Completion(
        token_ids=ids,
        logprobs=logprobs,
        finish_reason="length" if len(ids) == sampling.max_tokens else "stop",
        policy_versions=[(0, version)],
    )
