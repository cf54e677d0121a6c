"""The engine of Hugging Face models: transformers in this process, on a CPU or one GPU, in batches of our own.

It serves a model folder, or a model that a trainer in the same process owns and goes on changing.
"""

import contextlib
import importlib.util
import weakref
from collections.abc import AsyncIterator, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollstream.aio import finish_despite_cancellation
from rollstream.engine.adapters import check_takes, is_adapter
from rollstream.engine.base import MOST_TOP, Capabilities, EngineLoad, TopScores
from rollstream.engine.checks import check_request, least, read_model_limits
from rollstream.engine.embedded import Restarted, read_settings
from rollstream.engine.hf_model import (
    ATTENTION,
    LiveModel,
    copy_weights,
    load_module,
    read_weights,
    tokenizer_file,
)
from rollstream.engine.kind import EngineKind, EngineOptions
from rollstream.engine.replica import Weights
from rollstream.errors import ConfigError, EngineError, EngineUnavailableError
from rollstream.trajectory import Completion, SamplingParams
from rollstream.user_calls import in_daemon_thread

if TYPE_CHECKING:
    from rollstream.engine.hf_batch import Batch, BatchSettings

ENGINE_KWARGS: dict[str, Any] = {
    "device": "auto",  # as torch names it; auto: cuda where there is one, else cpu
    "dtype": "auto",  # as torch names it; auto: float32 on a CPU, the model's own elsewhere
    "attn_implementation": "",  # sdpa or eager; empty: transformers' choice
    "cache_size": 1.0,  # GB of KV cache; taken at start, less where less is enough
    "num_kv_blocks": 0,  # the same in blocks of 32 tokens, if not 0
    "max_num_seqs": 32,  # requests in one step, not more than max_num_batched_tokens
    "max_num_batched_tokens": 256,  # prompt tokens in one step; a longer prompt takes several
    "num_threads": 0,  # CPU threads of the model; 0: torch's number; 1 is best for a small model or shared cores
}

DATA_DECIDING_KWARGS = ("attn_implementation", "device", "dtype")
"""Those that change tokens or log-probs beyond the noise of float32."""

_LEAST = {
    "num_kv_blocks": 0,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "num_threads": 0,
}

_PACKAGES = ("torch", "transformers")

_ADAPTERS = 64
"""At once: of one batch each takes a small product of its own in each layer."""

_BLOCK = 32
"""Tokens in one of `num_kv_blocks`."""


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
        engine_kwargs: see `ENGINE_KWARGS`.

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
        self._kwargs = _read_kwargs(engine_kwargs or {})
        if missing := [name for name in _PACKAGES if importlib.util.find_spec(name) is None]:
            raise ConfigError(
                f"engine 'hf' needs {' and '.join(missing)}, which is not installed: "
                "pip install 'rollstream[hf]'"
            )
        if model is None and model_path is None:
            raise ConfigError("engine 'hf' needs actor_rollout_ref.model.path")
        self._model_path = None if model_path is None else _check_model_path(str(model_path))
        self._lent = model
        self._max_model_len = max_model_len
        self._life = Restarted("hf", self._start_batch)
        self._loaded: tuple[LiveModel, BatchSettings] | None = None
        """Outlives the thread."""
        self._capabilities: Capabilities | None = None
        self._weight_changes = 0
        self._held: set[Weights] | None = None

    @property
    def capabilities(self) -> Capabilities:
        if self._capabilities is None:
            raise EngineError("the engine has not been started")
        return self._capabilities

    @property
    def version(self) -> int:
        """Of the weights that the next token will be sampled with."""
        return 0 if self._loaded is None else self._loaded[0].version

    @property
    def weight_changes(self) -> int:
        """How often weights were changed: several times a version, where a batch has several steps."""
        return self._weight_changes

    async def start(self) -> None:
        """Loads the model and takes the memory of the KV cache.

        Raises:
            EngineError: the model cannot be loaded, there is no room, or it is of a kind that this engine
                does not know.
        """
        await self._life.start()

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        images: list[object] | None = None,
        weights: Weights | None = None,
    ) -> Completion:
        check_request(prompt_ids, sampling, self.capabilities, images=images)
        completion = await self._life.serving().generate(prompt_ids, sampling, request_id, weights)
        self._life.worked()
        return completion

    async def score(self, ids: list[int], start: int = 1, top_k: int = 0) -> TopScores:
        """See `ScoresIds.score`. No step runs meanwhile."""
        check_request(ids, SamplingParams(1), self.capabilities, images=None)
        from rollstream.engine.hf_forward import score_ids

        model = self._live_model()
        async with model.changing():
            return await finish_despite_cancellation(
                in_daemon_thread(score_ids, model.module, ids, start, top_k)
            )

    async def abort(self, request_id: str) -> None:
        if self._life.backend is not None:
            self._life.backend.abort(request_id)

    async def update_weights(self, source: str, version: int) -> None:
        """Loads the weights of another model folder (or hub name) of the same architecture, or an adapter, in place.

        While they are read, generation goes on; it pauses while they are copied. See `changing_weights` for
        what becomes of requests in flight.

        Raises:
            EngineError: they cannot be read, or do not fit the model. Nothing has been changed then.
        """
        model = self._live_model()
        check_takes("hf", self.capabilities, source)
        if is_adapter(source):
            await finish_despite_cancellation(self._add_adapter(model, Weights(source, version)))
            return
        module = model.module
        await self.load_state_dict(await in_daemon_thread(read_weights, source, module), version)

    async def load_state_dict(self, state: Mapping[str, Any], version: int) -> None:
        """Copies `state` (names to tensors, as `module.state_dict()` gives it) into the model, in place.

        Cancelling this takes effect when the weights have been copied, or before that begins.

        Raises:
            EngineError: it does not fit the model. Nothing has been changed then.
        """
        await finish_despite_cancellation(self._copy(self._live_model().match(state), version))

    async def hold(self, held: Collection[Weights]) -> None:
        self._held = {*held}

    async def _add_adapter(self, model: LiveModel, weights: Weights) -> None:
        held = self._held
        async with self.changing_weights(weights.version, interrupts=held is None):
            await in_daemon_thread(model.add_adapter, weights, held or ())

    async def _copy(self, pairs: list[tuple[Any, Any]], version: int) -> None:
        async with self.changing_weights(version):
            await in_daemon_thread(copy_weights, pairs)

    @contextlib.asynccontextmanager
    async def changing_weights(self, version: int, *, interrupts: bool = True) -> AsyncIterator[None]:
        """Inside it no step runs, and weights may be changed in place: a trainer's optimizer step, say.

        Every token sampled after it is stamped with `version`. When it ends with an error, the version stays
        as it was.

        What is in flight ends with what was sampled and finish reason `abort`; what has no token yet begins
        anew. Whoever asked can go on from those ids, as `ContinuingEngine` does: everything before is then
        computed anew, with the new weights.

        Nothing is interrupted without `interrupts`: what is in flight rests on other weights.
        """
        model = self._live_model()
        async with model.changing():
            if self._life.backend is not None and interrupts:
                self._life.backend.interrupt()
            await _synchronize(model)
            yield
            model.version = version
            self._weight_changes += 1
            await _synchronize(model)

    async def health(self) -> bool:
        """Whether the thread is alive. Starts a new one if not, with back-off."""
        return await self._life.health()

    async def load(self) -> EngineLoad | None:
        """What the batch knows of itself."""
        batch = self._life.backend
        return None if batch is None or batch.cause else batch.load()

    async def close(self) -> None:
        await self._life.close()
        self._loaded = None

    def _live_model(self) -> LiveModel:
        if self._loaded is None or self._life.closed:
            raise EngineUnavailableError("the engine is closed, or was not started")
        return self._loaded[0]

    async def _start_batch(self) -> "Batch":
        if self._loaded is None:
            self._loaded = await in_daemon_thread(self._load)
        from rollstream.engine.hf_batch import Batch

        model, settings = self._loaded
        batch = Batch(model, settings)
        try:
            await batch.start()
        except BaseException:
            await batch.close()
            raise
        weakref.finalize(self, batch.stop)
        self._capabilities = Capabilities(
            token_ids=True,
            logprobs="processed",
            seeds=True,
            stop_strings=settings.tokenizer_file is not None,
            stop_token_ids=True,
            images=False,
            update_weights=True,
            max_model_len=least(model.max_model_len, self._max_model_len, settings.cache_tokens),
            vocab_size=model.vocab_size,
            scores=True,
            score_top_k=MOST_TOP,
            adapters=0 if self._lent is not None or importlib.util.find_spec("peft") is None else _ADAPTERS,
        )
        return batch

    def _load(self) -> "tuple[LiveModel, BatchSettings]":
        from rollstream.engine.hf_batch import BatchSettings  # takes seconds

        kwargs = self._kwargs
        if self._lent is not None:
            model = LiveModel(self._lent, lent=True)
        else:
            names = ("dtype", "device", "attn_implementation")
            model = LiveModel(load_module(str(self._model_path), **{name: kwargs[name] for name in names}))
        return model, BatchSettings(
            self._cache_tokens(model, least(model.max_model_len, self._max_model_len)),
            kwargs["max_num_seqs"],
            kwargs["max_num_batched_tokens"],
            kwargs["num_threads"],
            None if self._model_path is None else tokenizer_file(self._model_path),
        )

    def _cache_tokens(self, model: LiveModel, longest: int | None) -> int:
        """How many tokens the cache holds: as memory allows, or less where less is enough."""
        from rollstream.engine.hf_forward import token_bytes

        if blocks := self._kwargs["num_kv_blocks"]:
            return int(blocks) * _BLOCK
        gigabytes, size = self._kwargs["cache_size"], token_bytes(model.module)
        if (tokens := int(gigabytes * 1e9 / size)) < _BLOCK:
            raise EngineError(
                f"engine_kwargs.cache_size of {gigabytes:g} GB does not hold {_BLOCK} tokens of {size} bytes each"
            )
        return tokens if longest is None else min(tokens, self._kwargs["max_num_seqs"] * longest)


async def _synchronize(model: LiveModel) -> None:
    """Waits until a GPU has done what it was told."""
    if model.module.device.type == "cuda":
        import torch

        await finish_despite_cancellation(in_daemon_thread(torch.cuda.synchronize))


def _read_kwargs(engine_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    kwargs = read_settings("hf", engine_kwargs, ENGINE_KWARGS, _LEAST)
    if not kwargs["cache_size"] > 0:
        raise ConfigError(f"engine_kwargs.cache_size is {kwargs['cache_size']}, want more than 0 (GB)")
    if kwargs["attn_implementation"] not in ("", *ATTENTION):
        raise ConfigError(
            f"engine_kwargs.attn_implementation is {kwargs['attn_implementation']!r}, want {' or '.join(ATTENTION)}"
        )
    return kwargs


def _check_model_path(path: str) -> str:
    """The folder, absolute, if transformers can load it; a hub name as it is. Raises `ConfigError`."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"actor_rollout_ref.model.path: {folder} has no config.json")
        read_model_limits(folder)
        return str(folder.resolve())
    if path.startswith(("/", ".", "~")) or path.count("/") != 1:
        raise ConfigError(f"actor_rollout_ref.model.path: there is no folder {folder}")
    return path


def _create(options: EngineOptions) -> HFEngine:
    return HFEngine(
        options.model_path, max_model_len=options.max_model_len, engine_kwargs=options.engine_kwargs
    )


KIND = EngineKind("hf", _create, ENGINE_KWARGS, DATA_DECIDING_KWARGS, is_embedded=True, logprobs="processed")
