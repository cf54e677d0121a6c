"""The engine of Hugging Face models: transformers' continuous batching in this process, on a CPU or one GPU.

It serves a model folder, or a model that a trainer in the same process owns and goes on changing.
"""

import asyncio
import contextlib
import logging
import random
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from rollstream.aio import finish_despite_cancellation
from rollstream.daemon_threads import DaemonThreads
from rollstream.engine.base import Capabilities, EngineLoad
from rollstream.engine.checks import check_request
from rollstream.engine.hf_batch import Batch, BatchSettings
from rollstream.engine.hf_cache import cache_size
from rollstream.engine.hf_model import LiveModel, copy_weights, load_module, read_weights, tokenizer_file
from rollstream.engine.hf_request import Request
from rollstream.engine.hf_settings import (
    DATA_DECIDING_KWARGS,
    ENGINE_KWARGS,
    check_model_path,
    check_packages,
    read_kwargs,
)
from rollstream.engine.kind import EngineKind, EngineOptions
from rollstream.engine.openvino_worker import StopTexts
from rollstream.errors import ConfigError, EngineError, EngineUnavailableError
from rollstream.trajectory import Completion, SamplingParams

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")

_GB = 1e9

_RESTART_DELAY_S = 0.5
"""Before the second restart in a row; the first one is immediate. Doubles up to the next constant."""

_RESTART_DELAY_MAX_S = 30.0
"""A thread that keeps dying is started twice a minute: cheap, and soon enough when the cause has gone."""


class HFEngine:
    """Serves a transformers model: exact tokens, log-probs of what was drawn from, seeds, new weights.

    Its memory is this process's, and its thread shares the GIL: where that hurts, `openvino` is the other
    embedded engine. When the thread dies (out of memory, say), what was in flight ends with
    `EngineUnavailableError`, and `health` starts a new one. Stop strings and stop ids end a generation after
    the token that completes them; that token is part of what is returned, like every sampled token.

    Args:
        model_path: folder with `config.json`, weights and, for stop strings, `tokenizer.json`; or a hub name.
        model: a model that is there already, instead of the one at `model_path`, which then only says where
            the tokenizer is. It stays its owner's: weights are shared, not copied. Change them in place, and
            only inside `changing_weights`. Its `dtype` and `device` are as they are.
        max_model_len: prompt plus response tokens at most; None takes the model's `max_position_embeddings`,
            or what the KV cache holds if that is less.
        engine_kwargs: see `hf_settings.ENGINE_KWARGS`.

    Raises:
        ConfigError: a package is not installed, no model, unknown key, a value out of range.
    """

    def __init__(
        self,
        model_path: str | Path | None = None,
        *,
        model: Any = None,
        max_model_len: int | None = None,
        engine_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._kwargs = read_kwargs(engine_kwargs or {})
        check_packages()
        if model is None and model_path is None:
            raise ConfigError("engine 'hf' needs actor_rollout_ref.model.path")
        self._model_path = None if model_path is None else check_model_path(str(model_path))
        self._lent = model
        self._max_model_len = max_model_len
        self._keep_cache: bool = self._kwargs["keep_cache"]
        self._threads = DaemonThreads("hf-engine")
        self._loaded: _Loaded | None = None
        self._batch: Batch | None = None
        self._end: weakref.finalize[[], HFEngine] | None = None
        self._starting: asyncio.Task[None] | None = None
        self._capabilities: Capabilities | None = None
        self._closed = False
        self._weight_changes = 0
        self._in_flight: dict[str, Request] = {}
        self._restart_lock = asyncio.Lock()
        self._restart_delay = 0.0
        self._restart_at = 0.0

    @property
    def capabilities(self) -> Capabilities:
        if self._capabilities is None:
            raise EngineError("the engine has not been started")
        return self._capabilities

    @property
    def version(self) -> int:
        """Of the weights that the next token will be sampled with."""
        return 0 if self._loaded is None else self._loaded.model.version

    @property
    def weight_changes(self) -> int:
        """How often weights were changed: several times a version, where a batch has several steps."""
        return self._weight_changes

    async def start(self) -> None:
        """Loads the model and takes the memory of the KV cache.

        Raises:
            EngineError: the model cannot be loaded, there is no room, or transformers is of a release whose
                continuous batching this engine does not know.
        """
        async with self._restart_lock:
            if self._batch is None and not self._closed:
                await self._start_batch()

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        images: list[object] | None = None,
    ) -> Completion:
        check_request(prompt_ids, sampling, self.capabilities, images=images)
        batch, model = self._batch, self._live_model()
        if batch is None:
            raise EngineUnavailableError("the engine is closed")
        request = Request(
            prompt_ids=prompt_ids,
            sampling=sampling,
            end_ids=model.end_ids(sampling),
            future=asyncio.get_running_loop().create_future(),
            random=random.Random(sampling.seed),
        )
        batch.submit(request)
        self._in_flight[request_id] = request
        try:
            completion = await request.future
        except asyncio.CancelledError:
            batch.cancel(request)
            raise
        finally:
            if self._in_flight.get(request_id) is request:
                del self._in_flight[request_id]
        self._restart_delay = 0.0  # this thread works
        return completion

    async def abort(self, request_id: str) -> None:
        if self._batch is not None and (request := self._in_flight.get(request_id)) is not None:
            self._batch.abort(request)

    async def update_weights(self, source: str, version: int) -> None:
        """Loads the weights of another model folder (or hub name) of the same architecture, in place.

        While they are read, generation goes on; it pauses while they are copied. See `changing_weights` for
        what becomes of requests in flight.

        Raises:
            EngineError: they cannot be read, or do not fit the model. Nothing has been changed then.
        """
        module = self._live_model().module
        await self.load_state_dict(await self._in_thread(lambda: read_weights(source, module)), version)

    async def load_state_dict(self, state: Mapping[str, Any], version: int) -> None:
        """Copies `state` (names to tensors, as `module.state_dict()` gives it) into the model, in place.

        Raises:
            EngineError: it does not fit the model. Nothing has been changed then.
        """
        pairs = self._live_model().match(state)
        async with self.changing_weights(version):
            await finish_despite_cancellation(self._in_thread(lambda: copy_weights(pairs)))

    @contextlib.asynccontextmanager
    async def changing_weights(self, version: int) -> AsyncIterator[None]:
        """Inside it no step runs, and weights may be changed in place: a trainer's optimizer step, say.

        Every token sampled after it is stamped with `version`. When it ends with an error, the version stays
        as it was.

        What is in flight ends with what was sampled and finish reason `abort`; what has no token yet begins
        anew. Whoever asked can go on from those ids, as `ContinuingEngine` does: everything before is then
        computed anew, with the new weights.

        With `engine_kwargs.keep_cache` it goes on instead, over the keys and values that the old weights left
        behind. Its tokens come from neither the old model nor the new one, and their log-probs are those of
        that mixture.
        """
        model = self._live_model()
        try:
            await finish_despite_cancellation(
                self._in_thread(model.lock.acquire)
            )  # waits for the step that is under way
        except asyncio.CancelledError:
            model.lock.release()
            raise
        try:
            if self._batch is not None and not self._keep_cache:
                self._batch.interrupt()
            yield
            if model.module.device.type == "cuda":
                await finish_despite_cancellation(self._in_thread(_synchronize))
            model.version = version
            self._weight_changes += 1
        finally:
            model.lock.release()

    async def health(self) -> bool:
        """Whether the thread is alive. Starts a new one if not, with back-off."""
        async with self._restart_lock:
            if self._closed or self._batch is None:
                return False
            if self._batch.error is None:
                return True
            now = asyncio.get_running_loop().time()
            if now < self._restart_at:
                return False
            _LOG.warning("starting the hf engine anew: %s", self._batch.error)
            delay = self._restart_delay
            self._restart_at = now + delay
            self._restart_delay = min(_RESTART_DELAY_MAX_S, max(_RESTART_DELAY_S, 2 * delay))
            try:
                await self._start_batch()
            except EngineError as error:
                _LOG.warning("%s", error)
                return False
            return True

    async def load(self) -> EngineLoad | None:
        """What the batch knows of itself."""
        return None if self._batch is None or self._batch.error is not None else self._batch.load()

    async def close(self) -> None:
        self._closed = True
        # A second cancellation would interrupt the clean-up after the first one.
        if self._starting is not None and not self._starting.cancelling():
            self._starting.cancel()
        async with self._restart_lock:
            if self._batch is not None:
                batch, self._batch = self._batch, None
                batch.close()
                await finish_despite_cancellation(self._in_thread(batch.stop))
                if self._end is not None:
                    self._end.detach()
            self._loaded = None
            self._threads.close()

    def _live_model(self) -> LiveModel:
        if self._loaded is None or self._closed:
            raise EngineUnavailableError("the engine is closed, or was not started")
        return self._loaded.model

    async def _start_batch(self) -> None:
        self._starting = asyncio.create_task(self._load_and_start())
        try:
            await self._starting
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                self._starting.cancel()
                raise
            raise EngineUnavailableError("the engine was closed while it was starting") from None
        finally:
            self._starting = None

    async def _load_and_start(self) -> None:
        if self._batch is not None:
            await finish_despite_cancellation(self._in_thread(self._batch.stop))  # frees its cache
        if self._loaded is None:
            self._loaded = await self._in_thread(self._load)
        model, settings, stop_texts = self._loaded.model, self._loaded.settings, self._loaded.stop_texts
        batch = Batch(model, settings, stop_texts)
        try:
            await self._in_thread(batch.start)
        except asyncio.CancelledError:
            batch.close()  # its start, which nobody waits for any more, then starts no thread
            raise
        if self._end is not None:
            self._end.detach()
        # At the latest when the interpreter exits: a thread in the middle of a step would crash it.
        self._end = weakref.finalize(self, batch.stop)
        self._batch = batch
        lengths = (model.max_model_len, self._max_model_len, settings.cache.longest)
        self._capabilities = Capabilities(
            token_ids=True,
            logprobs="processed",
            seeds=True,
            stop_strings=stop_texts is not None,
            stop_token_ids=True,
            images=False,
            update_weights=True,
            max_model_len=min(length for length in lengths if length is not None),
            vocab_size=model.vocab_size,
        )

    def _load(self) -> "_Loaded":
        kwargs = self._kwargs
        if self._lent is not None:
            model = LiveModel(self._lent, lent=True)
        else:
            names = ("dtype", "device", "attn_implementation")
            model = LiveModel(load_module(str(self._model_path), **{name: kwargs[name] for name in names}))
        lengths = [n for n in (model.max_model_len, self._max_model_len) if n is not None]
        cache = cache_size(
            model.module,
            bytes_at_most=kwargs["cache_size"] * _GB,
            block_size=kwargs["block_size"],
            max_num_batched_tokens=kwargs["max_num_batched_tokens"],
            max_num_seqs=kwargs["max_num_seqs"],
            longest=min(lengths, default=None),
            num_blocks=kwargs["num_kv_blocks"],
        )
        tokenizer = None if self._model_path is None else tokenizer_file(self._model_path)
        settings = BatchSettings(
            cache, kwargs["max_num_seqs"], kwargs["max_num_batched_tokens"], kwargs["num_threads"]
        )
        return _Loaded(model, settings, None if tokenizer is None else StopTexts(tokenizer.parent))

    async def _in_thread(self, function: Callable[[], _T]) -> _T:
        """Calls a function off the event loop; one that is cancelled is left behind."""
        return cast(_T, _result(await self._threads.start(function)))


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What lasts from one life of the thread to the next."""

    model: LiveModel
    settings: BatchSettings
    stop_texts: StopTexts | None
    """None when the model has no `tokenizer.json`."""


def _result(outcome: Any) -> Any:
    if outcome.error is not None:
        raise outcome.error
    return outcome.value


def _synchronize() -> None:
    import torch

    torch.cuda.synchronize()


def _create(options: EngineOptions) -> HFEngine:
    return HFEngine(
        options.model_path, max_model_len=options.max_model_len, engine_kwargs=options.engine_kwargs
    )


KIND = EngineKind("hf", _create, ENGINE_KWARGS, DATA_DECIDING_KWARGS, is_embedded=True)
