"""verl's worker, client and manager of agent loops, with rollstream's stream of results.

Imported where verl is.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

import ray
from verl.experimental.agent_loop.agent_loop import AgentLoopManager, AgentLoopWorker
from verl.workers.rollout.llm_server import GlobalRequestLoadBalancer, LLMServerClient, LLMServerManager

from rollstream.agent.base import turn_seed
from rollstream.engine.ray_package import one_line
from rollstream.errors import DataError, EngineUnavailableError, RollstreamError
from rollstream.integrations.verl import worker_recipe
from rollstream.integrations.verl.composed import OWN_SERVERS
from rollstream.integrations.verl.inbox import Inbox
from rollstream.integrations.verl.rows import sample_row
from rollstream.integrations.verl.streaming import (
    EngineCall,
    StreamingAgentLoopWorkerMixin,
    current_calls,
    token_limit,
)
from rollstream.rollout.instrumented import InstrumentedEngine
from rollstream.rollout.ray import RayBackend, here
from rollstream.rollout.ray_cluster import RayCluster
from rollstream.rollout.workers import WorkersExecutor
from rollstream.store.records import EncodedRollout
from rollstream.trajectory import Failure, RolloutKey


class StreamingAgentLoopWorker(StreamingAgentLoopWorkerMixin, AgentLoopWorker):  # type: ignore[misc]
    """verl's agent loop worker, which also runs single samples."""


class StreamingLLMServerClient(LLMServerClient):  # type: ignore[misc]
    """A client of verl that notes a sample's generations, and tells servers that are gone from a refusal.

    Outside of `run_sample` it is verl's.
    """

    meter: InstrumentedEngine | None = None
    """Counts requests, where somebody wants to know."""

    max_positions: int | None = None
    """Of the model: what verl's servers take where `max_model_len` is null; None: nobody knows."""

    @property
    def balancer(self) -> Any:
        """The actor that says which server gets a request."""
        return self._load_balancer

    async def generate(self, request_id: Any, **request: Any) -> Any:
        """See `LLMServerClient.generate`.

        Raises:
            EngineUnavailableError: the actor of the server or of the load balancer is not there; Ray starts
                those of rollstream anew, and one that verl started is asked no more.
            RollstreamError: what a server of rollstream's raised, as it was raised there.
        """
        calls = current_calls()
        # By the order in which they begin: a loop may ask for several at once, each another sample.
        number = 0 if calls is None else calls.begin()
        if calls is not None and calls.seed is not None:
            seed = turn_seed(calls.seed, number)
            request["sampling_params"] = {**request["sampling_params"], "seed": seed}
        asked = self._asked(request_id, request)
        output = await (asked if self.meter is None else self.meter.counted(asked))
        if calls is not None:
            fields = output.extra_fields
            step = fields.get("global_steps") or 0
            calls.complete(
                number,
                EngineCall(
                    prompt_tokens=len(request["prompt_ids"]),
                    tokens=len(output.token_ids),
                    policy_versions=fields.get("policy_versions") or [(0, int(step))],
                    finish_reason=fields.get("finish_reason") or self._finish_reason(output, request),
                    cached_prompt_tokens=int(fields.get("num_cached_tokens") or 0),
                ),
            )
            fields.pop("policy_versions", None)
        return output

    def _finish_reason(self, output: Any, request: Mapping[str, Any]) -> str:
        """Of what a server of verl's own gave.

        vLLM's says `completed` of what ended by itself and of what was cut off, TensorRT-LLM's nothing: what
        is as long as it could be was cut off. (Also where its last token is the model's end token.)
        """
        if output.stop_reason not in (None, "completed"):
            return str(output.stop_reason)
        rollout = self.config.actor_rollout_ref.rollout
        limit = token_limit(
            # TensorRT-LLM's takes no limit of a request: its own holds.
            {} if output.stop_reason is None else request["sampling_params"],
            prompt_tokens=len(request["prompt_ids"]),
            prompt_length=rollout.prompt_length,
            response_length=rollout.response_length,
            max_model_len=rollout.max_model_len or self.max_positions,
        )
        return "length" if len(output.token_ids) >= limit else "stop"

    async def _asked(self, request_id: Any, request: dict[str, Any]) -> Any:
        try:
            # A prompt that the loop goes on to extend must not change on its way.
            return await super().generate(request_id, **request)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, RollstreamError):
                raise error.cause from None
            raise
        except ray.exceptions.RayActorError as error:
            raise EngineUnavailableError(f"a server's actor is gone: {error}".partition("\n")[0]) from error

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        try:
            server_id, server = await super()._acquire_server(request_id, **extra)
        except ray.exceptions.RayTaskError as error:
            if _NO_SERVERS in str(error.cause):
                raise EngineUnavailableError("none of verl's servers is left") from error
            raise
        except ray.exceptions.RayActorError as error:
            raise EngineUnavailableError(f"verl's load balancer is gone: {one_line(error)}") from error
        return server_id, AskedServer(server, partial(self._failed, server_id))

    async def _failed(self, server_id: str, error: BaseException) -> None:
        """Sees that a server that verl started and that has ended is asked no more.

        Nobody starts it anew, and the balancer would prefer it: with nothing in flight for long it has the
        least. (Those of rollstream come back.)

        Raises:
            EngineUnavailableError: that is what happened.
        """
        if self.config.actor_rollout_ref.rollout.name not in OWN_SERVERS or not _has_ended(error):
            return
        with suppress(ray.exceptions.RayError):  # a balancer that is gone is the next request's to find
            await self._load_balancer.remove_servers.remote([server_id])
        why = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
        raise EngineUnavailableError(
            f"verl's server {server_id} has ended and is asked no more: {one_line(why)}"
        ) from error


_NO_SERVERS = "No available servers"
"""What verl's load balancer says without any."""

_DEAD_ENGINES = frozenset({"EngineDeadError", "AsyncEngineDeadError"})
"""vLLM's errors, by name, of an engine that ended and whose actor lives on. SGLang's end with their actor."""


def _has_ended(error: BaseException) -> bool:
    """Whether an error of a server says that it will never answer again."""
    if isinstance(error, ray.exceptions.RayTaskError):
        return not _DEAD_ENGINES.isdisjoint(one.__name__ for one in type(error.cause).__mro__)
    return isinstance(error, ray.exceptions.ActorDiedError)


class AskedServer:
    """A server's actor, whose `generate` ends there when who waits for it is cut off.

    Ray ends a task of an actor when it is told, not when nobody waits for its result any more.

    Args:
        server: the actor.
        failed: told how a generation failed; may raise another error instead.
    """

    def __init__(self, server: Any, failed: Callable[[BaseException], Awaitable[None]]) -> None:
        self._server = server
        self._failed = failed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    @property
    def generate(self) -> "_AskedMethod":
        return _AskedMethod(self._server.generate, self._failed)


class _AskedMethod:
    def __init__(self, method: Any, failed: Callable[[BaseException], Awaitable[None]]) -> None:
        self._method = method
        self._failed = failed

    async def remote(self, *args: Any, **kwargs: Any) -> Any:
        reference = self._method.remote(*args, **kwargs)
        try:
            return await reference
        except asyncio.CancelledError:
            with suppress(Exception):  # Ray may be gone; who is cut off stays so
                ray.cancel(reference)
            raise
        except ray.exceptions.RayError as error:
            await self._failed(error)
            raise


class StreamingLLMServerManager(LLMServerManager):  # type: ignore[misc]
    """verl's manager of servers, whose load balancer runs beside the driver and is started anew when it ends.

    verl's own runs on any node and once: when it ends, no server can be asked any more. What it forgets is
    which server has which conversation in its cache. A router of a plugin stays verl's to start.
    """

    async def start(self) -> None:
        """What `create` does to a new one: who has that can end what was started when this fails halfway."""
        await self._initialize_llm_servers()
        await self._init_global_load_balancer()

    async def _init_global_load_balancer(self) -> None:
        if getattr(self.rollout_config, "router_config_path", None) and self._load_balancer_cls is None:
            await super()._init_global_load_balancer()
            return
        balancer = self._load_balancer_cls or GlobalRequestLoadBalancer
        # Held here: an actor that starts anew gets its arguments again, if they are still there.
        self._balanced = ray.put(dict(zip(self.server_addresses, self.server_handles, strict=True)))
        kwargs: dict[str, Any] = {"servers": self._balanced}
        if balancer is GlobalRequestLoadBalancer:  # as verl gives it: one of the user's routes as it likes
            kwargs["full_determinism"] = getattr(self.rollout_config, "full_determinism", False)
        self.global_load_balancer = (
            ray.remote(balancer)
            .options(num_cpus=0, max_restarts=-1, scheduling_strategy=here())
            .remote(**kwargs)
        )


class GenerationLoopManager(AgentLoopManager):  # type: ignore[misc]
    """verl's manager of agent loops, whose workers take samples one by one and deliver each as it completes.

        servers = await LLMServerManager.create(config)
        client = servers.get_client(client_cls=StreamingLLMServerClient)
        manager = await GenerationLoopManager.create(config, client)
        async for result in manager.stream(samples):
            ...

    Any number of samples over any number of workers: a worker gets the next one when it has room. A sample
    that fails is delivered as its `Failure`; a worker that dies costs what it had in flight, which is begun
    again. `generate_sequences` is verl's own, over verl's workers, which are started when it is first called.
    """

    worker_class = StreamingAgentLoopWorker

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.agent_loop_workers_class = ray.remote(self.worker_class)
        self.agent_loop_workers: list[Any] = []
        self.server_handles: list[Any] = []
        """Of the servers, asked whether they are well; without, requests that fail say it."""
        super().__init__(*args, **kwargs)

    async def _init_agent_loop_workers(self) -> None:
        """Not yet: the workers of a stream are other ones."""

    async def generate_sequences(self, prompts: Any) -> Any:
        """verl's: a batch, in equal chunks."""
        if not self.agent_loop_workers:
            await super()._init_agent_loop_workers()
        return await super().generate_sequences(prompts)

    async def stream(
        self, samples: Iterable[Mapping[str, Any]], *, max_in_flight: int = 256, max_attempts: int = 3
    ) -> AsyncGenerator[EncodedRollout | Failure, None]:
        """Runs samples, and yields what became of each as soon as it is there.

        Args:
            samples: rows as verl's dataset gives them, each with an `index` of its own, from 0 on.
            max_in_flight: at once, over all workers.
            max_attempts: tries at one sample where trying again may help.

        Raises:
            DataError: an `index` that is missing, no number, negative, or there twice. (A sample without
                messages is a failed one.)
        """
        rows: dict[int, Mapping[str, Any]] = {}
        seen: set[int] = set()

        def keys() -> Any:
            for sample in samples:
                index = _index(sample)
                if index is None or index in seen:
                    raise DataError(
                        f"sample index {sample.get('index')!r}: every sample needs an index of its own, "
                        "0 or more (verl's dataset gives 0 to every row that has none in its extra_info)"
                    )
                seen.add(index)
                rows[index] = sample
                yield RolloutKey(index, 0)

        inbox = Inbox()
        executor = self.make_executor(
            worker_recipe.bare_recipe(self, max_attempts=max_attempts),
            inbox,
            load_row=lambda index: sample_row(index, rows[index]),
            max_in_flight=max_in_flight,
            max_attempts=max_attempts,
        )
        cluster = RayCluster({})
        await cluster.start()
        try:
            await executor.start()
            work = asyncio.ensure_future(executor.run(keys()))
            work.add_done_callback(lambda _: inbox.end())
            try:
                async with aclosing(inbox.results()) as results:
                    async for result in results:
                        rows.pop(result.index, None)
                        yield result
                await work
            finally:
                executor.drop()
                inbox.abandon()  # nobody takes what is delivered from now on
                await asyncio.gather(work, return_exceptions=True)
        finally:
            await executor.close()
            await cluster.close()

    def make_executor(
        self,
        recipe: Any,
        writer: Any,
        *,
        load_row: Callable[[int], Any],
        max_in_flight: int,
        attempt_timeout: float = 600.0,
        max_attempts: int = 3,
        options: Mapping[str, Any] | None = None,
        adaptive: bool = False,
        engine: object = None,
        on_durable: Callable[[EncodedRollout | Failure], None] | None = None,
    ) -> WorkersExecutor:
        """The executor of `recipe`'s workers, `agent.num_workers` of them; see `WorkersExecutor`."""
        return WorkersExecutor(
            lambda: recipe,
            writer,
            RayBackend(options),
            load_row=load_row,
            max_in_flight=max_in_flight,
            workers=self.rollout_config.agent.num_workers,
            attempt_timeout=attempt_timeout,
            max_attempts=max_attempts,
            adaptive=adaptive,
            engine=engine,
            on_durable=on_durable,
        )


def _index(sample: Mapping[str, Any]) -> int | None:
    """Of a sample; None: it has none that can be used."""
    try:
        index = int(sample["index"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return index if index >= 0 else None
