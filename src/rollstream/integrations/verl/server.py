"""verl's servers' methods before a rollstream engine: the actor behind a `RollstreamReplica`, or in a worker.

The actor holds a pool of all servers by their URLs, so one that goes away costs time and nothing else; what it
is asked while none is there waits in the callers, who are told `EngineUnavailableError`. Ray may start it anew
at any time: it has no state but its arguments.
"""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from omegaconf import OmegaConf

from rollstream.chat.images import encode_for_engine
from rollstream.engine.base import Engine
from rollstream.engine.checks import refuse_raw_logprobs
from rollstream.engine.continuation import ContinuingEngine
from rollstream.engine.registry import create_engine
from rollstream.errors import ConfigError, EngineError
from rollstream.integrations.verl.sampling import Lengths, from_verl
from rollstream.trajectory import SamplingParams

logger = logging.getLogger(__name__)


class _Custom(msgspec.Struct, forbid_unknown_fields=True):
    """`rollout.custom` of verl's configuration."""

    urls: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    engine: Literal["sglang", "vllm"] = "sglang"
    """The language of the servers. `rollstream serve` speaks as SGLang does."""
    engine_kwargs: dict[str, Any] | None = None
    weights_dir: str | None = None


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The arguments of an actor."""

    urls: tuple[str, ...]
    engine: str
    engine_kwargs: Mapping[str, Any]
    model_path: str
    lengths: Lengths
    sampling: SamplingParams | None = None
    """How verl's training samples, where it wants log-probs."""

    @classmethod
    def read(cls, rollout: Any, model_path: str) -> "ServerOptions":
        """From `rollout` of verl's configuration: its `custom`, and its lengths.

        Raises:
            ConfigError: a key that is not known, no URLs, or another engine.
        """
        try:
            tree = OmegaConf.to_container(OmegaConf.create(dict(rollout.custom or {})))
            custom = msgspec.convert(tree, _Custom)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"rollout.custom: {error} (as in '+actor_rollout_ref.rollout.custom.urls=[http://host:30000]')"
            ) from error
        values = {name: getattr(rollout, name, None) for name in ("temperature", "top_p", "top_k")}
        sampling = SamplingParams(1, **{name: value for name, value in values.items() if value is not None})
        return cls(
            custom.urls,
            custom.engine,
            custom.engine_kwargs or {},
            model_path,
            Lengths.read(rollout),
            sampling if getattr(rollout, "calculate_log_probs", False) else None,
        )


@dataclass
class GivenTokens:
    """verl's `TokenOutput`, field by field. A class of its own spares this process verl, which takes
    seconds of CPU and hundreds of megabytes to import.
    """

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: Any = None
    stop_reason: str | None = None
    """`completed` or `aborted`."""
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = field(default_factory=dict)


class ReplicaServer:
    """The methods that verl calls of its servers' actors.

    Args:
        lengths: limit what is sampled.
        options: of the engine that it connects to when it is first asked.
        engine: started; who gives it closes it.
    """

    def __init__(
        self, lengths: Lengths, *, options: ServerOptions | None = None, engine: Engine | None = None
    ) -> None:
        self._lengths = lengths
        self._options = options
        self._engine = engine
        self._starting = asyncio.Lock()
        self._admitted = asyncio.Event()
        self._admitted.set()
        self._rejects = False
        self._in_flight: set[str] = set()

    async def start(self) -> None:
        """Connects. Raises `EngineError` when no server answers."""
        await self._started()

    async def _started(self) -> Engine:
        async with self._starting:
            if self._engine is None:
                options = self._options
                assert options is not None
                pool = create_engine(
                    options.engine,
                    model_path=options.model_path,
                    server_urls=options.urls,
                    max_model_len=self._lengths.max_model_len,
                    engine_kwargs=options.engine_kwargs,
                    log_dir=Path(),
                )
                await pool.start()
                if options.sampling is not None:
                    try:
                        refuse_raw_logprobs(pool.capabilities, options.sampling)
                    except ConfigError:
                        await pool.close()
                        raise
                self._engine = ContinuingEngine(pool)
            return self._engine

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        audio_data: list[Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        priority: int = 0,
    ) -> GivenTokens:
        """Tokens in, tokens out: ids and log-probs as they were sampled.

        `extra_fields` have verl's `global_steps` (the newest version) and `num_cached_tokens`, and
        `policy_versions` and `finish_reason`, which verl has no names for.

        Raises:
            EngineError: what the engine raises; videos and sound, which it does not take.
        """
        if video_data or audio_data:
            raise EngineError("rollstream's engines take text and images, no videos and no sound")
        engine = await self._started()
        images: list[object] = [
            await asyncio.to_thread(encode_for_engine, image) for image in image_data or ()
        ]
        if self._rejects:
            return GivenTokens(token_ids=[], log_probs=[], stop_reason="aborted")
        await self._admitted.wait()
        sampling = from_verl(sampling_params, prompt_tokens=len(prompt_ids), lengths=self._lengths)
        self._in_flight.add(request_id)
        try:
            completion = await engine.generate(
                list(map(int, prompt_ids)), sampling, request_id=request_id, images=images or None
            )
        finally:
            self._in_flight.discard(request_id)
        versions = completion.policy_versions
        return GivenTokens(
            token_ids=completion.token_ids,
            log_probs=completion.logprobs,
            stop_reason="aborted" if completion.finish_reason == "abort" else "completed",
            extra_fields={
                "global_steps": max((version for _, version in versions), default=0),
                "num_cached_tokens": completion.cached_prompt_tokens,
                "policy_versions": versions,
                "finish_reason": completion.finish_reason,
            },
        )

    async def health(self) -> bool:
        """Whether a request sent now would be served."""
        try:
            return await (await self._started()).health()
        except EngineError as error:
            logger.info("no server answers: %s", error)
            return False

    async def update_weights(self, source: str, version: int) -> None:
        """Loads weights into all servers; see `Engine.update_weights`."""
        await (await self._started()).update_weights(source, version)

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Ends what is in flight with what was sampled; what comes waits, or is sent back, until resumed."""
        self._admitted.clear()
        self._rejects = reject_request
        engine = await self._started()
        await asyncio.gather(*(engine.abort(request) for request in list(self._in_flight)))

    async def resume_generation(self) -> None:
        """Lets requests through again."""
        self._rejects = False
        self._admitted.set()

    async def _nothing(self, *args: Any, **kwargs: Any) -> None:
        """Servers look after their memory themselves, versions come with weights, nothing of verl's is profiled."""

    wake_up = sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = _nothing
    set_global_steps = start_profile = stop_profile = _nothing

    async def close(self) -> None:
        """Leaves the servers."""
        if self._engine is not None:
            with suppress(EngineError):
                await self._engine.close()
