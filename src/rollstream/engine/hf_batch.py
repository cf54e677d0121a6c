"""One life of transformers' continuous batching: its manager, the manager's thread, and what is in it."""

import asyncio
import contextlib
import logging
import math
import random
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollstream.aio import finish_despite_cancellation
from rollstream.daemon_threads import in_daemon_thread
from rollstream.engine.base import EngineLoad
from rollstream.engine.embedded import StopTexts, stop_window
from rollstream.engine.hf_model import LiveModel, attention_kinds
from rollstream.engine.hf_sampler import Request, Sampler
from rollstream.errors import EngineError, EngineUnavailableError
from rollstream.trajectory import Completion, SamplingParams

_STOP_TIMEOUT_S = 30.0
"""For the step that is under way when the engine is closed; after that its thread is left behind."""

_MANAGER_PARTS = (
    *("add_request", "cancel_request", "fatal_error", "is_running"),
    *("logit_processor", "output_router", "start", "stop", "warmup"),
)
"""Members of transformers' manager that this file uses or sets. All of them are public."""


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The manager's KV cache: blocks of tokens, taken by each group of layers for itself."""

    blocks: int
    block_size: int
    """Tokens in a block."""
    groups: int = 1
    """Groups of layers: one, but for models that mix full and sliding attention."""

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a sequence may take: the manager takes one more than it needs when the last is full."""
        return (tokens // self.block_size + 1) * self.groups

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that fits."""
        return self.blocks // self.groups * self.block_size - 1


def cache_size(
    module: Any,
    *,
    bytes_at_most: float,
    num_blocks: int,
    block_size: int,
    max_num_seqs: int,
    longest: int | None,
) -> CacheSize:
    """The cache of a model that fits into so much memory; less where less is enough.

    Args:
        module: the model.
        bytes_at_most: of keys and values.
        num_blocks: the size, if not 0; then `bytes_at_most` does not matter.
        block_size: tokens in a block.
        max_num_seqs: sequences in one step.
        longest: tokens in a sequence; None when only the cache limits them.

    Raises:
        EngineError: the memory does not hold a block for each group of layers.
    """
    config = module.config
    kinds = Counter(attention_kinds(config))
    # The manager makes groups of one kind each and all of one size, and keeps tensors for one group.
    layers = math.gcd(*kinds.values())
    groups = kinds.total() // layers
    if num_blocks:
        return CacheSize(num_blocks, block_size, groups)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token_bytes = 2 * layers * heads * head * module.dtype.itemsize
    cache = CacheSize(int(bytes_at_most / (token_bytes * block_size)), block_size, groups)
    if cache.longest < 1:
        raise EngineError(
            f"engine_kwargs.cache_size of {bytes_at_most / 1e9:g} GB does not hold one block of {block_size} "
            f"tokens, of {token_bytes} bytes each, for each of {groups} groups of layers"
        )
    enough = cache.blocks if longest is None else max_num_seqs * cache.blocks_for(longest)
    return CacheSize(min(cache.blocks, enough), block_size, groups)


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """What does not change from one life to the next."""

    cache: CacheSize
    max_num_seqs: int
    max_num_batched_tokens: int
    num_threads: int
    """Of torch, in the manager's thread; 0 leaves it alone."""
    tokenizer_file: Path | None
    """None when the model has no `tokenizer.json`."""


class Batch:
    """Gives requests to the manager and answers them as they end. Belongs to the event loop it is made on.

    A request enters the manager when the KV cache has room for it at its longest, in the order of arrival.
    So nothing is ever evicted: the manager resumes what it evicts on another path than it was begun on.

    Tokens are drawn in the manager's thread, by `Sampler`. All else is decided on the event loop, which is
    told when a request may have ended.
    """

    def __init__(self, model: LiveModel, settings: BatchSettings) -> None:
        self._model = model
        self._settings = settings
        self._stop_texts = StopTexts(settings.tokenizer_file) if settings.tokenizer_file else None
        self._loop = asyncio.get_running_loop()
        self.in_flight: dict[str, Request] = {}
        """By the callers' names."""
        self._error: EngineUnavailableError | None = None
        self._waiting: deque[Request] = deque()
        self._running: dict[str, Request] = {}
        self._free_blocks = settings.cache.blocks
        self._names = 0
        self._manager: Any = None

    @property
    def cause(self) -> str:
        """Why it serves nobody any more; "" while it serves. Notices a thread that has ended."""
        manager = self._manager
        if manager is not None and (manager.fatal_error is not None or not manager.is_running()):
            self._fail(manager.fatal_error)
        return str(self._error or "")

    def start(self) -> None:
        """Takes the memory of the cache and starts the thread. Blocks.

        Call it in a daemon thread: the manager's thread is one then as well, and keeps no program from
        exiting.

        Raises:
            EngineError: it cannot, with the cause.
        """
        assert threading.current_thread().daemon
        manager = _make_manager(self._model.module, self._settings)
        manager.logit_processor = Sampler(
            self._model,
            self._running,
            self._settings.num_threads,
            lambda requests: self._tell_loop(self._look, requests),
        )
        manager.output_router = self
        try:
            manager.warmup()  # takes the memory now, where an error has somewhere to go
        except Exception as error:
            raise EngineError(f"engine 'hf' cannot make its KV cache: {error}") from error
        self._manager = manager
        manager.start()

    async def generate(self, prompt_ids: list[int], sampling: SamplingParams, request_id: str) -> Completion:
        """Answers one request; cancelling this forgets it.

        Raises:
            EngineUnavailableError: there is no thread to serve it.
        """
        if cause := self.cause:
            raise EngineUnavailableError(cause) from (self._error and self._error.__cause__)
        request = Request(
            prompt_ids=prompt_ids,
            sampling=sampling,
            end_ids=self._model.end_ids(sampling),
            future=self._loop.create_future(),
            blocks=self._settings.cache.blocks_for(len(prompt_ids) + sampling.max_tokens),
        )
        self.in_flight[request_id] = request
        self._waiting.append(request)
        self._admit()
        try:
            return await request.future
        except asyncio.CancelledError:
            self._take_out(request)
            raise
        finally:
            self.in_flight.pop(request_id, None)

    def abort(self, request_id: str) -> None:
        """Answers a request, if it is in flight, with what was sampled."""
        if (request := self.in_flight.get(request_id)) is not None:
            self._look([request])
            self._take_out(request)
            _answer(request, request.completion("abort", self._model.version))

    def interrupt(self) -> None:
        """Ends what has tokens, and begins anew what has none. Under the model's lock.

        So nothing that is in flight rests on keys and values of other weights.
        """
        self._look(list(self._running.values()))  # what has its last token has ended, and was not interrupted
        for request in list(self._running.values()):
            self._remove(request)
            if request.seen:
                _answer(request, request.completion("abort", self._model.version))
            else:
                self._enter(request)
        self._admit()

    def load(self) -> EngineLoad:
        """How busy it is. Nothing is ever evicted, see above."""
        usage = 1 - self._free_blocks / self._settings.cache.blocks
        return EngineLoad(len(self._running), len(self._waiting), max(0.0, min(1.0, usage)), 0)

    async def close(self) -> None:
        """Fails what is in flight, ends the thread and frees the cache."""
        self._fail(None, "the engine was closed")
        await finish_despite_cancellation(in_daemon_thread(self.stop))

    def stop(self) -> None:
        """Ends the thread. Blocks for the step under way, but not for ever."""
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.stop(block=True, timeout=_STOP_TIMEOUT_S, hard_stop=True)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._settings.max_num_seqs:
            if self._waiting[0].blocks > self._free_blocks:
                return
            self._enter(self._waiting.popleft())

    def _enter(self, request: Request) -> None:
        self._names += 1
        request.name = str(self._names)
        request.draws = random.Random(request.sampling.seed)
        self._running[request.name] = request
        self._free_blocks -= request.blocks
        self._manager.add_request(
            request.prompt_ids,
            request_id=request.name,
            max_new_tokens=request.sampling.max_tokens,
            eos_token_id=list(request.end_ids),
        )

    def _remove(self, request: Request, *, ended: bool = False) -> None:
        """Takes a request out of the manager; one that has `ended` left it by itself."""
        del self._running[request.name]
        self._free_blocks += request.blocks
        if not ended:
            self._manager.cancel_request(request.name)

    def _take_out(self, request: Request) -> None:
        if self._running.get(request.name) is request:
            self._remove(request)
        elif request in self._waiting:
            self._waiting.remove(request)
        else:
            return
        self._admit()

    def _look(self, requests: list[Request]) -> None:
        """Answers those of some requests that have ended. They may have several new tokens."""
        for request in requests:
            if self._running.get(request.name) is request and (answer := self._ended(request)) is not None:
                is_full = len(request.sampled) == request.sampling.max_tokens
                by_itself = is_full or request.sampled[-1][0] in request.end_ids
                self._remove(request, ended=by_itself)
                _answer(request, answer)
        self._admit()

    def _ended(self, request: Request) -> Completion | EngineError | None:
        version, sampled = self._model.version, request.sampled
        while request.seen < len(sampled):
            token, logprob, _ = sampled[request.seen]
            if logprob != logprob:
                return EngineError(
                    f"the model's logits are not numbers after {request.seen} response tokens: its weights, "
                    "or its dtype, are broken"
                )
            request.seen += 1
            if token in request.end_ids or self._has_stop_text(request):
                return request.completion("stop", version)
        return request.completion("length", version) if request.seen == request.sampling.max_tokens else None

    def _has_stop_text(self, request: Request) -> bool:
        stop = request.sampling.stop
        if not stop or self._stop_texts is None:
            return False
        begin = max(0, request.seen - stop_window(stop))
        return self._stop_texts.found([one[0] for one in request.sampled[begin : request.seen]], stop)

    def _fail(self, error: Exception | None, cause: str = "") -> None:
        if self._error is not None:
            return
        why = "" if error is None else f": {type(error).__name__}: {error}"
        cause = cause or f"the engine's thread ended{why}"
        left = [*self._running.values(), *self._waiting]
        self._running.clear()
        self._waiting.clear()
        for request in left:
            _answer(request, _unavailable(cause, error))  # each its own: an exception is raised once
        self._error = _unavailable(cause, error)

    # What the manager calls in its thread, as its `OutputRouter`.

    def deliver_batch(self, outputs: list[Any]) -> None:
        """Takes requests that are finished; the sampler has said so before."""

    def deliver(self, output: Any) -> None:
        """Takes a request that has failed: alone, or with all others when the thread ends."""
        if self._manager is not None and self._manager.fatal_error is not None:
            self._tell_loop(self._fail, self._manager.fatal_error)
        else:
            self._tell_loop(self._refused, output.request_id, output.error)

    def _refused(self, name: str, error: str) -> None:
        if (request := self._running.get(name)) is not None:
            self._remove(request, ended=True)
            _answer(request, EngineError(f"the manager refused the request: {error}"))
            self._admit()

    def _tell_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there any more
            self._loop.call_soon_threadsafe(function, *arguments)


def _answer(request: Request, answer: Completion | EngineError) -> None:
    if request.future.done():  # cancelled
        return
    if isinstance(answer, EngineError):
        request.future.set_exception(answer)
    else:
        request.future.set_result(answer)


def _unavailable(cause: str, error: Exception | None) -> EngineUnavailableError:
    unavailable = EngineUnavailableError(cause)
    unavailable.__cause__ = error
    return unavailable


def _make_manager(module: Any, settings: BatchSettings) -> Any:
    import transformers
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    # Its warnings are of what happens here all the time: a request cancelled before it had blocks.
    logger = logging.getLogger("ContinuousBatchingLogger")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.ERROR)
    unsupported = (
        f"engine 'hf' is written for the continuous batching of transformers 5.10, and transformers "
        f"{transformers.__version__} differs: "
    )
    try:
        config = ContinuousBatchingConfig(
            block_size=settings.cache.block_size,
            num_blocks=settings.cache.blocks,
            max_batch_tokens=settings.max_num_batched_tokens,
            # Blocks are found again by their tokens, whatever weights computed them.
            allow_block_sharing=False,
            # With it a step's tokens come one step later, when the weights may be others.
            use_async_batching=False,
            # The sampler is Python that looks at the batch: a graph would replay its first answer.
            use_cuda_graph=False,
            max_blocks_per_request=0,
            # The other one holds a fifth of the cache back; here each request has its blocks reserved.
            scheduler_type="prefill_first",
        )
        # Greedy takes the token that the sampler has drawn.
        generation = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=1)
        # It also switches the model to paged attention, after each `stop` anew.
        manager = module.init_continuous_batching(
            generation_config=generation, continuous_batching_config=config
        )
    except (TypeError, AttributeError) as error:
        raise EngineError(unsupported + str(error)) from error
    absent = [name for name in _MANAGER_PARTS if not hasattr(manager, name)]
    if absent:
        raise EngineError(unsupported + f"its manager has no {', '.join(absent)}")
    return manager
