"""The embedded engine: openvino-genai's continuous batching on the CPU, in a process of its own.

The model runs in another process because its `step()` holds the GIL for up to 90 ms at a time; see
`openvino_worker.py` for what happens there. The messages between the two stand here.
"""

import asyncio
import importlib.util
import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from rollstream.aio import finish_despite_cancellation
from rollstream.childproc import Child, ChildDiedError, packed
from rollstream.engine.adapters import is_adapter
from rollstream.engine.base import Capabilities, EngineLoad, TopScores
from rollstream.engine.checks import check_request, least, read_model_limits
from rollstream.engine.embedded import Restarted, read_settings
from rollstream.engine.kind import EngineKind, EngineOptions
from rollstream.engine.openvino_weights import lay_out_weights
from rollstream.errors import ConfigError, EngineError, EngineUnavailableError
from rollstream.sampling import PLAIN, sampling_changes
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

_EXIT_TIMEOUT_S = 5.0
"""A worker whose input has ended goes at once, or after the step it is in; then it is killed."""


class Load(msgspec.Struct, tag=True):
    """To the worker: a model, or other weights of it. Answered with `Loaded`."""

    model_path: str
    properties: dict[str, str | int]
    """OpenVINO properties of the compiled model."""
    scheduler: dict[str, int | bool]
    """Attributes of openvino_genai.SchedulerConfig."""
    tokenizer_path: str
    version: int = 0
    temperature: float | None = None
    """Logits are divided by it in the model, so that log-probs are of that; None: they stay the raw model's."""


class Add(msgspec.Struct, tag=True):
    """To the worker: a request."""

    id: int
    """Never used twice in the life of a worker."""
    prompt: list[int]
    sampling: SamplingParams
    scores: bool = False
    """Only the log-probs of the prompt are asked for: the answer has the prompt's ids, and nothing is sampled."""


class End(msgspec.Struct, tag=True):
    """To the worker: a request is to end early."""

    id: int
    answer: bool
    """With what was sampled; else nobody waits for it any more."""


class Loaded(msgspec.Struct, tag=True):
    """From the worker: results are of these weights from now on."""

    cache_tokens: int
    """Tokens that the KV cache holds."""
    error: str = ""
    """Why not. Then the worker ends, or goes on with what it had, and nothing was interrupted."""


class Done(msgspec.Struct):
    """The end of one request."""

    id: int
    tokens: list[int]
    logprobs: list[float] | None
    reason: Literal["stop", "length", "abort", "refused"]
    """refused: the pipeline does not take this request."""
    version: int
    """Of the weights that sampled all of its tokens."""
    error: str = ""


class StepResults(msgspec.Struct, tag=True):
    """From the worker: the requests that ended in one step, and how busy the pipeline is after it."""

    done: list[Done]
    running: int
    kv_usage: float


TO_WORKER = packed(Load | Add | End)
FROM_WORKER = packed(Loaded | StepResults)


class WorkerProcess:
    """One life of the worker. Made by `start`, ended by `close` or by the worker's death.

    Attributes:
        cause: why it is not alive any more; "" while it is.
        cache_tokens: tokens that its KV cache holds.
    """

    def __init__(self, child: Child, log_path: Path) -> None:
        self.cause = ""
        self.cache_tokens = 0
        self._child = child
        self._log_path = log_path
        self._log_begin = log_path.stat().st_size
        self._pending: dict[int, asyncio.Future[Done]] = {}
        self._loading: asyncio.Future[Loaded] | None = None
        self._last: StepResults | None = None
        self._reader = asyncio.create_task(self._read_messages(), name="openvino-worker-messages")

    @classmethod
    async def start(cls, load: Load, *, log_path: Path, timeout_s: float) -> "WorkerProcess":
        """Starts a worker and waits until it can generate. Raises `EngineError`, as `load_model`."""
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            child = await Child.start("rollstream.engine.openvino_worker:main", codec=FROM_WORKER, output=log)
        worker = cls(child, log_path)
        try:
            await worker.load_model(load, source=load.model_path, timeout_s=timeout_s)
        except BaseException:
            await worker.close()
            raise
        return worker

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def load(self) -> EngineLoad | None:
        """As it was when the last request ended; None before that."""
        if self._last is None or self.cause:
            return None
        running = min(self._last.running, len(self._pending))
        # Room for the longest answer is reserved for each request, so none is ever preempted.
        usage = self._last.kv_usage if running else 0.0
        return EngineLoad(running, len(self._pending) - running, usage, preemptions=0)

    async def load_model(self, load: Load, *, source: str, timeout_s: float) -> None:
        """Has the worker load a model, or other weights. StepResults that come after this are of those.

        Raises:
            EngineError: it cannot, in one line with the cause and the name of its log; what it had goes on.
            EngineUnavailableError: the worker is dead, or dies, or takes too long and is killed: nobody would
                know which weights it has.
        """
        self._check_alive()
        self._loading = asyncio.get_running_loop().create_future()
        try:
            self._child.post(load)
            async with asyncio.timeout(timeout_s):
                loaded = await self._loading
        except TimeoutError:
            self.give_up(f"the worker process (pid {self.pid}) was not ready within {timeout_s:g} s")
            raise EngineUnavailableError(self.cause) from None
        finally:
            self._loading = None
        if loaded.error:
            raise EngineError(
                f"engine 'openvino' cannot load {source}: {loaded.error} (its log: {self._log_path})"
            )
        self.cache_tokens = loaded.cache_tokens

    async def run(self, add: Add) -> Done:
        """Answers one request. Cancelling this cancels it in the worker.

        Raises:
            EngineError: the pipeline does not take it.
            EngineUnavailableError: the worker is dead, or dies.
        """
        self._check_alive()
        future: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        self._pending[add.id] = future
        self._child.post(add)
        try:
            done = await future
        finally:
            if self._pending.pop(add.id, None) is not None:
                self._child.post(End(add.id, answer=False))
        if done.reason == "refused":
            raise EngineError(f"the request was refused: {done.error}")
        return done

    def abort(self, number: int) -> None:
        """Makes `run` return soon with what was sampled."""
        if number in self._pending:
            self._child.post(End(number, answer=True))

    def give_up(self, cause: str) -> None:
        """Kills the process; what is in flight ends with `EngineUnavailableError`. `close` it as well."""
        self._fail(cause)
        self._child.kill()

    async def close(self) -> None:
        """Ends the process, also when this is cancelled; what is in flight ends with `EngineUnavailableError`."""
        self._fail("the engine was closed")
        await finish_despite_cancellation(self._close())

    async def _close(self) -> None:
        await self._child.close(_EXIT_TIMEOUT_S)
        await self._reader

    async def _read_messages(self) -> None:
        """Hands messages to those who wait, until the worker is gone."""
        try:
            while True:
                message: Loaded | StepResults = await self._child.receive()
                if isinstance(message, StepResults):
                    self._last = message
                    for done in message.done:
                        if (future := self._pending.pop(done.id, None)) is not None and not future.done():
                            future.set_result(done)
                elif self._loading is not None and not self._loading.done():
                    self._loading.set_result(message)
        except ChildDiedError as error:
            lines = self._log_path.read_bytes()[self._log_begin :].decode(errors="replace").split("\n")
            last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing")
            self._fail(
                f"the worker process (pid {self.pid}) {error}; its last words in {self._log_path}: {last}"
            )

    def _check_alive(self) -> None:
        if self.cause:
            raise EngineUnavailableError(self.cause)

    def _fail(self, cause: str) -> None:
        """Ends what is in flight; the first cause counts."""
        self.cause = self.cause or cause
        pending, self._pending = self._pending, {}
        for future in (*pending.values(), self._loading):
            if future is not None and not future.done():
                future.set_exception(EngineUnavailableError(self.cause))


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
        kwargs = read_settings("openvino", engine_kwargs or {}, ENGINE_KWARGS, _LEAST)
        if kwargs["cache_size"] < 1 and not kwargs["num_kv_blocks"]:
            raise ConfigError("engine_kwargs.cache_size is below 1 (GB); num_kv_blocks takes less")
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
        """Loads the model. Raises `EngineError`: one line with the cause and the name of the worker's log."""
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
        number = next(self._numbers)
        self._in_flight[request_id] = number
        try:
            done = await self._life.serving().run(Add(number, prompt_ids, sampling))
        finally:
            if self._in_flight.get(request_id) == number:
                del self._in_flight[request_id]
        self._life.worked()
        assert done.reason != "refused"
        return Completion(
            token_ids=done.tokens,
            logprobs=done.logprobs,
            finish_reason=done.reason,
            policy_versions=[(0, done.version)],
        )

    async def score(self, ids: list[int], start: int = 1, top_k: int = 0) -> TopScores:
        """See `ScoresIds.score`; it knows no likeliest ids."""
        sampling = SamplingParams(1, temperature=0.0)
        check_request(ids, sampling, self.capabilities, images=None)
        add = Add(next(self._numbers), ids, replace(sampling, max_tokens=0), scores=True)
        done = await self._life.serving().run(add)
        if done.logprobs is None or done.tokens != ids:
            raise EngineError(f"the pipeline gives no log-probs of {len(ids)} ids")
        return TopScores(done.logprobs[start:])  # the one at 0 is a placeholder

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
        if is_adapter(source):
            raise EngineError(
                f"engine 'openvino' takes no LoRA adapter such as {source}: openvino-genai would answer all requests "
                "under it, and ignores that of a single one"
            )
        await self.health()  # a worker that has died is started first
        async with self._life.lock:
            await finish_despite_cancellation(self._update(self._life.serving(), source, version))

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

    async def _update(self, worker: WorkerProcess, source: str, version: int) -> None:
        weights = ScratchFolder("weights")
        load = msgspec.structs.replace(self._load, model_path=str(weights.path), version=version)
        try:
            folder = Path(source).expanduser()
            await asyncio.to_thread(lay_out_weights, self._model_path, folder, weights.path)
            await worker.load_model(load, source=source, timeout_s=self._start_timeout)
        except BaseException:
            weights.cleanup()
            raise
        old, self._weights, self._load = self._weights, weights, load
        if old is not None:
            await asyncio.to_thread(old.cleanup)

    async def _start_worker(self) -> WorkerProcess:
        worker = await WorkerProcess.start(self._load, log_path=self._log_path, timeout_s=self._start_timeout)
        self._capabilities = Capabilities(
            token_ids=True,
            logprobs="raw" if self._load.temperature is None else "processed",
            seeds=True,
            stop_strings=(self._model_path / "tokenizer.json").is_file(),
            stop_token_ids=True,
            images=False,
            update_weights=True,
            max_model_len=least(self._limits.max_model_len, self._max_model_len, worker.cache_tokens),
            vocab_size=self._limits.vocab_size,
            extra_sampling=PLAIN if self._load.temperature is None else (),
            scores=self._load.temperature is None,
        )
        return worker


def _check_model_folder(path: Path) -> Path:
    """The folder, absolute, if openvino-genai can load it."""
    if importlib.util.find_spec("openvino_genai") is None:
        raise ConfigError("engine 'openvino' is not installed: pip install 'rollstream[openvino]'")
    if (path / "openvino_model.xml").is_file():
        return path.resolve()
    missing = f"{path} has no openvino_model.xml" if path.is_dir() else f"there is no folder {path}"
    # Names of the hub are given here, too.
    raise ConfigError(
        f"actor_rollout_ref.model.path: {missing}. Engine 'openvino' takes what `optimum-cli export openvino` "
        "writes (docs/engines.md); engine 'hf' takes models as the hub has them"
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
