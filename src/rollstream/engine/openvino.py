"""The embedded engine: openvino-genai's continuous batching on the CPU, in a process of its own.

The model runs in another process because its `step()` holds the GIL for up to 90 ms at a time; see
`openvino_worker.py` for what happens there.
"""

import asyncio
import importlib.util
import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from rollstream.aio import finish_despite_cancellation
from rollstream.engine.base import Capabilities, EngineLoad
from rollstream.engine.checks import check_request, read_model_limits
from rollstream.engine.embedded import Restarted, read_settings
from rollstream.engine.kind import EngineKind, EngineOptions
from rollstream.engine.openvino_process import WorkerProcess
from rollstream.engine.openvino_weights import lay_out_weights
from rollstream.engine.openvino_worker import Add, Load
from rollstream.errors import ConfigError, EngineError, EngineUnavailableError, TransientEngineError
from rollstream.sampling import sampling_changes
from rollstream.scratch import ScratchFolder
from rollstream.trajectory import Completion, SamplingParams

ENGINE_KWARGS: dict[str, Any] = {
    "cache_size": 1,  # GB of KV cache; memory is taken as it is used
    "num_kv_blocks": 0,  # the same in blocks of 32 tokens, if not 0
    "max_num_seqs": 256,  # requests in one step, not more than max_num_batched_tokens
    "max_num_batched_tokens": 256,  # prompt and response tokens in one step; more was slower for small models
    "enable_prefix_caching": False,  # faster for shared prompts; log-probs are then wrong by up to 0.1 at times
    "num_threads": 0,  # CPU threads of the model; 0 takes all cores
    "kv_cache_precision": "f32",  # u8 and f16 are smaller; log-probs are then off by about 0.1
    "inference_precision": "f32",  # bf16 is faster where the CPU has it; log-probs are then off by about 0.1
    "start_timeout": 300.0,  # seconds to load the model, or other weights
}
"""Keys of `engine_kwargs` with their defaults."""

DATA_DECIDING_KWARGS = ("enable_prefix_caching", "inference_precision", "kv_cache_precision")
"""Those that change tokens or log-probs beyond the noise of float32."""

_LEAST: dict[str, float] = {
    "num_kv_blocks": 0,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "num_threads": 0,
    "start_timeout": 1.0,
}
"""The least value of a key; without it openvino-genai fails with words of its own, or never answers."""


class OpenVINOEngine:
    """Runs an OpenVINO model in a worker process; exact tokens, log-probs of the raw model, seeds.

    When the worker dies, what was in flight ends with `EngineUnavailableError`, and `health` starts a new
    one. Stop strings and stop ids end a generation after the token that completes them; that token is part
    of what is returned, like every sampled token. A request without a seed gets a random one.

    Args:
        model_path: folder with `openvino_model.xml`, `config.json` and, for stop strings, `tokenizer.json`.
        log_path: the worker's stderr is appended here.
        max_model_len: prompt plus response tokens at most; None takes the model's `max_position_embeddings`,
            or what the KV cache holds if that is less.
        engine_kwargs: see `ENGINE_KWARGS`.
        logprobs_temperature: log-probs are those of this temperature; a request with log-probs must have it, and
            neither top-p nor top-k. None: those of the raw model.

    Raises:
        ConfigError: openvino-genai is not installed, the folder holds no OpenVINO model, unknown key, a value
            out of range.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        log_path: Path,
        max_model_len: int | None = None,
        engine_kwargs: Mapping[str, Any] | None = None,
        logprobs_temperature: float | None = None,
    ) -> None:
        kwargs = _read_kwargs(engine_kwargs or {})
        self._model_path = _check_model_folder(Path(model_path).expanduser())
        self._limits = read_model_limits(self._model_path)
        if self._limits.vocab_size is None:
            # Without it a prompt id beyond the embedding would silently read other memory.
            raise ConfigError(f"{self._model_path / 'config.json'} does not say vocab_size")
        self._log_path = log_path
        self._max_model_len = max_model_len
        self._start_timeout: float = kwargs["start_timeout"]
        self._load = _load_message(self._model_path, kwargs, logprobs_temperature)
        self._weights: ScratchFolder | None = None
        self._life = Restarted("openvino", self._start_worker)
        self._capabilities: Capabilities | None = None
        self._numbers = itertools.count()
        self._in_flight: dict[str, int] = {}

    @property
    def capabilities(self) -> Capabilities:
        if self._capabilities is None:
            raise EngineError("the engine has not been started")
        return self._capabilities

    @property
    def version(self) -> int:
        """Of the weights that the next request is given."""
        return self._load.version

    @property
    def worker_pid(self) -> int | None:
        """The living worker's process id."""
        worker = self._life.backend
        return worker.pid if worker is not None and not worker.cause else None

    async def start(self) -> None:
        """Loads the model.

        Raises:
            EngineError: the worker cannot; one line with the cause and the name of its log.
        """
        await self._life.start()

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        images: list[object] | None = None,
    ) -> Completion:
        check_request(prompt_ids, sampling, self.capabilities, images=images)
        scale = self._load.temperature
        if sampling.logprobs and scale is not None and sampling_changes(sampling) != {"temperature": scale}:
            raise EngineError(
                f"with logprobs_mode=processed_logprobs every request samples at temperature {scale:g}, without "
                "top_p and top_k: this one asks for something else"
            )
        worker = self._life.backend
        if worker is None:
            raise EngineUnavailableError("the engine is closed")
        number = next(self._numbers)
        self._in_flight[request_id] = number
        try:
            done = await worker.run(Add(number, prompt_ids, sampling))
        finally:
            if self._in_flight.get(request_id) == number:
                del self._in_flight[request_id]
        if done.reason == "refused":
            raise EngineError(f"request {request_id!r} was refused: {done.error}")
        if done.reason == "broken":
            raise TransientEngineError(f"request {request_id!r} failed in the model: {done.error}")
        self._life.worked()
        return Completion(
            token_ids=done.tokens,
            logprobs=done.logprobs,
            finish_reason=done.reason,
            policy_versions=[(0, done.version)],
        )

    async def score(self, ids: list[int], start: int = 1) -> list[float]:
        """See `ScoresIds.score`."""
        sampling = SamplingParams(1, temperature=0.0)
        check_request(ids, sampling, self.capabilities, images=None)
        worker = self._life.backend
        if worker is None:
            raise EngineUnavailableError("the engine is closed")
        add = Add(next(self._numbers), ids, replace(sampling, max_tokens=0), scores=True)
        done = await worker.run(add)
        if done.logprobs is None or done.tokens != ids:
            raise EngineError(f"log-probs of {len(ids)} ids were refused: {done.error}")
        return done.logprobs[start:]  # the one at 0 is a placeholder

    async def abort(self, request_id: str) -> None:
        if self._life.backend is not None and (number := self._in_flight.get(request_id)) is not None:
            self._life.backend.abort(number)

    async def update_weights(self, source: str, version: int) -> None:
        """Loads other weights of the same model: an export of it, or safetensors (see `lay_out_weights`).

        They are copied first, so what is at `source` may go or change after this, and a worker that has to be
        started again has them too. What is in flight when they are loaded ends with finish reason `abort` and
        what was sampled; what has no token yet begins with the new ones. So every completion is of one
        version.

        Cancelling this takes effect when the weights have been loaded, or have not.

        Raises:
            EngineError: they cannot be loaded. The old ones go on, and nothing was interrupted, unless the
                worker died of it; `health` then starts another one with the old weights.
        """
        async with self._life.lock:
            worker = self._life.backend
            if self._life.closed or worker is None:
                raise EngineUnavailableError("the engine is closed, or was not started")
            await finish_despite_cancellation(self._update(worker, Path(source).expanduser(), version))

    async def health(self) -> bool:
        """Whether the worker is alive. Starts a new one if not, at most one at a time, with back-off."""
        return await self._life.health()

    async def load(self) -> EngineLoad | None:
        """How busy the worker was when the last request ended."""
        return None if self._life.backend is None else self._life.backend.load

    async def close(self) -> None:
        if self._life.lock.locked() and self._life.backend is not None:
            self._life.backend.give_up("the engine was closed")  # in the middle of an update
        await self._life.close()
        if self._weights is not None:
            self._weights.cleanup()
            self._weights = None

    async def _update(self, worker: WorkerProcess, source: Path, version: int) -> None:
        weights = await asyncio.to_thread(_copy_weights, self._model_path, source)
        before = self._load
        load = msgspec.structs.replace(before, model_path=str(weights.path), version=version)
        try:
            if self._life.closed:
                raise EngineUnavailableError("the engine was closed")
            if worker.cause:
                self._load = load
                await self._life.replace()
            else:
                await worker.load_model(load, timeout_s=self._start_timeout)
                self._load = load
        except BaseException as error:
            self._load = before
            weights.cleanup()
            if type(error) is EngineError and not worker.cause:
                raise EngineError(f"engine 'openvino' cannot load {source}: {error}") from error
            raise
        old, self._weights = self._weights, weights
        if old is not None:
            await asyncio.to_thread(old.cleanup)

    async def _start_worker(self) -> WorkerProcess:
        worker = await WorkerProcess.start(self._load, log_path=self._log_path, timeout_s=self._start_timeout)
        lengths = (self._limits.max_model_len, self._max_model_len, worker.cache_tokens)
        self._capabilities = Capabilities(
            token_ids=True,
            logprobs="raw" if self._load.temperature is None else "processed",
            seeds=True,
            stop_strings=(self._model_path / "tokenizer.json").is_file(),
            stop_token_ids=True,
            images=False,
            update_weights=True,
            max_model_len=min(length for length in lengths if length is not None),
            vocab_size=self._limits.vocab_size,
            scores=self._load.temperature is None,
        )
        return worker


def _copy_weights(model: Path, source: Path) -> ScratchFolder:
    weights = ScratchFolder("weights")
    try:
        lay_out_weights(model, source, weights.path)
    except BaseException:
        weights.cleanup()
        raise
    return weights


def _read_kwargs(engine_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    kwargs = read_settings("openvino", engine_kwargs, ENGINE_KWARGS, _LEAST)
    if kwargs["cache_size"] < 1 and not kwargs["num_kv_blocks"]:
        raise ConfigError(
            f"engine_kwargs.cache_size is {kwargs['cache_size']}, want 1 (GB) or more; "
            "for a smaller KV cache set engine_kwargs.num_kv_blocks"
        )
    return kwargs


def _check_model_folder(path: Path) -> Path:
    """The folder, absolute, if openvino-genai can load it."""
    if importlib.util.find_spec("openvino_genai") is None:
        raise ConfigError("engine 'openvino' is not installed: pip install 'rollstream[openvino]'")
    if not path.is_dir():
        hub = (
            "If it is a name of the hub: actor_rollout_ref.rollout.name=hf loads it (needs "
            "pip install 'rollstream[hf]'). Engine 'openvino' loads no model from the hub: it needs a local folder "
            f"with openvino_model.xml. {_how_to_export(path)}"
        )
        raise ConfigError(
            f"actor_rollout_ref.model.path: there is no folder {path}{'' if path.is_absolute() else f'. {hub}'}"
        )
    if not (path / "openvino_model.xml").is_file():
        raise ConfigError(
            f"actor_rollout_ref.model.path: {path} has no openvino_model.xml. {_how_to_export(path)}"
        )
    return path.resolve()


def _how_to_export(model: Path) -> str:
    return (
        "Export the model once, in an environment of its own: pip install 'optimum-intel[openvino]' && "
        f"optimum-cli export openvino --model {model} --task text-generation-with-past "
        "--weight-format fp32 OUTPUT_FOLDER"
    )


def _load_message(model_path: Path, kwargs: Mapping[str, Any], temperature: float | None) -> Load:
    properties: dict[str, str | int] = {
        "KV_CACHE_PRECISION": kwargs["kv_cache_precision"],
        "INFERENCE_PRECISION_HINT": kwargs["inference_precision"],
    }
    if kwargs["num_threads"]:
        properties["INFERENCE_NUM_THREADS"] = kwargs["num_threads"]
    cache = "num_kv_blocks" if kwargs["num_kv_blocks"] else "cache_size"
    names = (cache, "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching")
    scheduler = {name: kwargs[name] for name in names}
    return Load(str(model_path), properties, scheduler, str(model_path), temperature=temperature)


def _create(options: EngineOptions) -> OpenVINOEngine:
    if options.model_path is None:
        raise ConfigError("engine 'openvino' needs actor_rollout_ref.model.path")
    return OpenVINOEngine(
        options.model_path,
        max_model_len=options.max_model_len,
        engine_kwargs=options.engine_kwargs,
        logprobs_temperature=options.logprobs_temperature,
        log_path=options.log_dir / "engine-openvino.log",
    )


KIND = EngineKind("openvino", _create, ENGINE_KWARGS, DATA_DECIDING_KWARGS, is_embedded=True, logprobs="raw")
