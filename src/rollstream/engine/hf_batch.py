"""One life of transformers' continuous batching: its manager, the manager's thread, and what is in it."""

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollstream.engine.base import EngineLoad
from rollstream.engine.hf_cache import CacheSize
from rollstream.engine.hf_model import LiveModel
from rollstream.engine.hf_request import Request
from rollstream.engine.hf_sampler import Sampler
from rollstream.engine.openvino_worker import StopTexts
from rollstream.errors import EngineError, EngineUnavailableError
from rollstream.trajectory import FinishReason

_STOP_TIMEOUT_S = 30.0
"""For the step that is under way when the engine is closed; after that its thread is left behind."""

_MANAGER_PARTS = (
    "add_request",
    "batch_processor",
    "cancel_request",
    "logit_processor",
    "output_router",
    "fatal_error",
    "start",
    "stop",
    "warmup",
    "_generation_step",
    "_run_generation_loop",
)
"""Members of transformers' manager that this file uses or replaces."""


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """What does not change from one life to the next."""

    cache: CacheSize
    max_num_seqs: int
    max_num_batched_tokens: int
    num_threads: int
    """Of torch, in the manager's thread; 0 leaves it alone."""


class Batch:
    """Gives requests to the manager and answers them as they end. Made on an event loop, for that loop.

    A request enters the manager when the KV cache has room for it at its longest, in the order of arrival.
    So nothing is ever evicted: a request that the manager evicts and resumes ends too early when its tokens
    are streamed (transformers 5.10), and it is resumed on another path than it was begun on.

    Tokens come from the manager's thread, in `deliver_batch`; requests, aborts and cancellations from the
    event loop. A lock that is held for moments guards what both touch. Where the model's lock is needed as
    well, it is taken first.
    """

    def __init__(self, model: LiveModel, settings: BatchSettings, stop_texts: StopTexts | None) -> None:
        self._model = model
        self._settings = settings
        self._stop_texts = stop_texts
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()  # guards what follows
        self._error: EngineUnavailableError | None = None
        self._waiting: deque[Request] = deque()
        self._running: dict[str, Request] = {}
        self._free_blocks = settings.cache.blocks
        self._names = 0
        self._step_version = 0
        self._manager: Any = None
        self._compute: Callable[[], None] = lambda: None
        self._compute_all: Callable[[], None] = lambda: None

    @property
    def error(self) -> EngineUnavailableError | None:
        """Why it is not alive any more; None while it serves."""
        return self._error

    def start(self) -> None:
        """Takes the memory of the cache and starts the thread. Blocks.

        Call it in a daemon thread: the manager's thread is one then as well, and keeps no program from
        exiting.

        Raises:
            EngineError: it cannot, with the cause.
        """
        assert threading.current_thread().daemon
        manager = _make_manager(self._model.module, self._settings)
        manager.logit_processor = Sampler(self._running)
        manager.output_router = self
        self._compute, manager._generation_step = manager._generation_step, self._step
        self._compute_all, manager._run_generation_loop = manager._run_generation_loop, self._run
        try:
            manager.warmup()  # takes the memory now, where an error has somewhere to go
        except Exception as error:
            raise EngineError(f"engine 'hf' cannot make its KV cache: {error}") from error
        with self._lock:
            self._manager = manager
            if self._error is None:
                manager.start()

    # On the event loop.

    def submit(self, request: Request) -> None:
        """Takes a request. Raises `EngineUnavailableError` when there is no thread to serve it."""
        with self._lock:
            if self._error is not None:
                raise EngineUnavailableError(str(self._error)) from self._error.__cause__
            self._waiting.append(request)
            self._admit()

    def abort(self, request: Request) -> None:
        """Answers a request with what was sampled."""
        with self._lock:
            found = self._take_out(request)
            self._admit()
        if found and not request.future.done():
            request.future.set_result(request.completion("abort", self._model.version))

    def cancel(self, request: Request) -> None:
        """Forgets a request."""
        with self._lock:
            self._take_out(request)
            self._admit()

    def interrupt(self) -> None:
        """Ends what has tokens, and begins anew what has none. Under the model's lock.

        So nothing that is in flight rests on keys and values of other weights.
        """
        with self._lock:
            running = list(self._running.values())
        for request in running:
            if request.token_ids:
                self.abort(request)
            else:
                with self._lock:
                    if self._take_out(request):
                        self._enter(request)

    def load(self) -> EngineLoad:
        """How busy it is. Nothing is ever evicted, see above."""
        with self._lock:
            usage = 1 - self._free_blocks / self._settings.cache.blocks
            return EngineLoad(len(self._running), len(self._waiting), max(0.0, min(1.0, usage)), 0)

    def close(self) -> None:
        """Fails what is in flight; `stop` then ends the thread."""
        self._fail(EngineUnavailableError("the engine was closed"))

    def stop(self) -> None:
        """Ends the thread and frees the cache. Blocks for the step under way, but not for ever."""
        self.close()
        with self._lock:
            manager, self._manager = self._manager, None
        if manager is not None:
            manager.stop(block=True, timeout=_STOP_TIMEOUT_S, hard_stop=True)

    # Under the lock.

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._settings.max_num_seqs:
            request = self._waiting[0]
            request.blocks = self._settings.cache.blocks_for(request.length)
            if request.blocks > self._free_blocks:
                return
            self._waiting.popleft()
            self._enter(request)

    def _enter(self, request: Request) -> None:
        self._names += 1
        request.name = str(self._names)
        self._running[request.name] = request
        self._free_blocks -= request.blocks
        self._manager.add_request(
            request.prompt_ids + request.token_ids,
            request_id=request.name,
            max_new_tokens=request.sampling.max_tokens - len(request.token_ids),
            eos_token_id=list(request.end_ids),
            streaming=True,  # or nothing would come of a request that is ended early
        )

    def _take_out(self, request: Request) -> bool:
        """Whether it was in flight."""
        if self._running.pop(request.name, None) is not None:
            self._free_blocks += request.blocks
            self._manager.cancel_request(request.name)
            return True
        if request in self._waiting:
            self._waiting.remove(request)
            return True
        return False

    # In the manager's thread.

    def _run(self) -> None:
        if self._settings.num_threads:
            import torch

            torch.set_num_threads(self._settings.num_threads)  # OpenMP keeps it per thread
        cause: BaseException | None = None
        try:
            self._compute_all()
        except BaseException as uncaught:  # the manager catches none but `Exception`
            cause = uncaught
        if cause is None and self._manager is not None:
            cause = self._manager.fatal_error
        error = EngineUnavailableError(f"the engine's thread ended: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        self._fail(error)

    def _step(self) -> None:
        with self._model.lock:
            self._step_version = self._model.version
            self._compute()

    def deliver_batch(self, outputs: list[Any]) -> None:
        """Takes the tokens of a step: one output for each request that has a new one."""
        done: list[tuple[Request, FinishReason | EngineError]] = []
        with self._lock:
            for output in outputs:
                request = self._running.get(output.request_id)
                if request is None:  # it was ended early while the step was under way
                    continue
                request.append(output.generated_tokens[-1], self._step_version)
                ended = output.is_finished()
                reason = self._why_done(request, ended)
                if reason is None:
                    continue
                if ended:
                    del self._running[request.name]
                    self._free_blocks += request.blocks
                else:
                    self._take_out(request)
                done.append((request, reason))
            if done:
                self._admit()
        self._answer(done)

    def deliver(self, output: Any) -> None:
        """Takes an output that is no token: a request failed. When all do, `_run` says it."""
        with self._lock:
            if self._manager is None or self._manager.fatal_error is not None:
                return
            request = self._running.pop(output.request_id, None)
            if request is None:
                return
            self._free_blocks += request.blocks
            self._admit()
        self._answer([(request, EngineError(f"the manager refused the request: {output.error}"))])

    def _why_done(self, request: Request, ended: bool) -> FinishReason | EngineError | None:
        if request.drawn_logprob != request.drawn_logprob:
            return EngineError(
                f"the model's logits are not numbers after {len(request.token_ids) - 1} response tokens: "
                "its weights, or its dtype, are broken"
            )
        if request.token_ids[-1] in request.end_ids:
            return "stop"
        stop = request.sampling.stop
        if stop and self._stop_texts is not None and self._stop_texts.found(request.token_ids, stop):
            return "stop"
        return "length" if ended else None

    # From any thread.

    def _answer(self, done: list[tuple[Request, FinishReason | EngineError]]) -> None:
        def answer() -> None:
            for request, reason in done:
                if request.future.done():
                    continue
                if isinstance(reason, EngineError):
                    request.future.set_exception(reason)
                else:
                    request.future.set_result(request.completion(reason, self._step_version))

        if done:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there any more
                self._loop.call_soon_threadsafe(answer)

    def _fail(self, error: EngineUnavailableError) -> None:
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            left = [*self._running.values(), *self._waiting]
            self._running.clear()
            self._waiting.clear()
        done: list[tuple[Request, FinishReason | EngineError]] = []
        for request in left:
            own = EngineUnavailableError(str(error))  # an exception object is raised once
            own.__cause__ = error.__cause__
            done.append((request, own))
        self._answer(done)


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
