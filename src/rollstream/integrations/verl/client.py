"""verl's client and manager of servers, as rollstream extends them. Imported where verl is."""

import asyncio
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout, suppress
from typing import Any

import ray
from ray.util import remove_placement_group
from verl.workers.rollout.llm_server import GlobalRequestLoadBalancer, LLMServerClient, LLMServerManager

from rollstream.agent.base import turn_seed
from rollstream.engine.load import RequestMeter
from rollstream.engine.ray_package import one_line, submit
from rollstream.errors import ConfigError, EngineUnavailableError, RollstreamError
from rollstream.integrations.verl.compose import NO_ROUTER, OWN_SERVERS
from rollstream.integrations.verl.sampling import Lengths
from rollstream.integrations.verl.worker import EngineCall, current_calls

_CONVERSATIONS = 100_000
"""Whose server a client remembers; one that is forgotten costs its next turn the server's prefix cache."""


class StreamingLLMServerClient(LLMServerClient):  # type: ignore[misc]
    """A client of verl that notes a sample's generations, and tells servers that are gone from a refusal.

    It chooses among `servers` itself, by verl's balancer in its own process: the one that has a conversation in
    its cache, else the one with the least of this client's requests.

    Args:
        config: of verl.
        servers: actors by their addresses.
    """

    meter: RequestMeter | None = None
    """Counts requests, where somebody wants to know."""

    def __init__(self, config: Any, *, servers: Mapping[str, Any], **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self.servers = dict(servers)
        """Those that have not ended."""
        self._balancer = GlobalRequestLoadBalancer(self.servers, max_cache_size=_CONVERSATIONS)

    async def generate(self, request_id: Any, **request: Any) -> Any:
        """See `LLMServerClient.generate`.

        Raises:
            EngineUnavailableError: the server's actor is not there; Ray starts those of rollstream anew, and
                one that verl started is asked no more.
            RollstreamError: what a server of rollstream's raised, as it was raised there.
        """
        calls = current_calls()
        # By the order in which they begin: a loop may ask for several at once, each another sample.
        number = 0 if calls is None else calls.begin()
        if calls is not None and calls.seed is not None:
            seed = turn_seed(calls.seed, number)
            request["sampling_params"] = {**request["sampling_params"], "seed": seed}
        prompt_tokens = len(request["prompt_ids"])  # a loop may go on to extend it
        asked = super().generate(request_id, **request)
        output = await (asked if self.meter is None else self.meter.counted(asked))
        fields = output.extra_fields
        call = EngineCall(
            prompt_tokens,
            token_ids=tuple(output.token_ids),
            finish_reason=fields.pop("finish_reason", None) or self._finish_reason(output, request),
            policy_versions=fields.pop("policy_versions", None)
            or [(0, int(fields.get("global_steps") or 0))],
            cached_prompt_tokens=int(fields.get("num_cached_tokens") or 0),
        )
        if calls is not None:
            calls.complete(number, call)
        return output

    def _finish_reason(self, output: Any, request: Mapping[str, Any]) -> str:
        """Of what a server of verl's own gave.

        vLLM's says `completed` of what ended by itself and of what was cut off, TensorRT-LLM's nothing: what
        is as long as it could be was cut off. (Also where its last token is the model's end token.)
        """
        if output.stop_reason not in (None, "completed"):
            return str(output.stop_reason)
        params = request["sampling_params"]
        # TensorRT-LLM's takes no limit of a request: its own holds.
        asked = None if output.stop_reason is None else params.get("max_tokens", params.get("max_new_tokens"))
        most = Lengths.read(self.config.actor_rollout_ref.rollout).most(asked, len(request["prompt_ids"]))
        return "length" if len(output.token_ids) >= most else "stop"

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        if not self.servers:
            raise EngineUnavailableError("none of verl's servers is left")
        server_id, actor = self._balancer.acquire_server(request_id)
        return server_id, _ServerActor(self, server_id, actor)

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        self._balancer.release_server(server_id)

    def leave_out(self, server_id: str) -> None:
        """Asks a server no more."""
        self.servers.pop(server_id, None)
        self._balancer.remove_servers([server_id])


_DEAD_ENGINES = frozenset({"EngineDeadError", "AsyncEngineDeadError"})
"""vLLM's errors, by name, of an engine that ended and whose actor lives on. SGLang's end with their actor."""


class _ServerActor:
    """A server's actor as verl's client asks it.

    A generation ends there when who waits for it is cut off: Ray ends a task of an actor when it is told, not
    when nobody waits for its result any more. A server that verl started and that has ended is asked no more:
    nobody starts it anew.
    """

    def __init__(self, client: StreamingLLMServerClient, server_id: str, actor: Any) -> None:
        self._client, self._id, self._actor = client, server_id, actor

    @property
    def generate(self) -> "_ServerActor":
        return self

    async def remote(self, *args: Any, **kwargs: Any) -> Any:
        try:
            reference = submit(self._actor.generate, *args, **kwargs)
            return await reference
        except asyncio.CancelledError:
            with suppress(Exception):  # Ray may be gone; who is cut off stays so
                ray.cancel(reference)
            raise
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, RollstreamError):
                raise error.cause from None
            if _DEAD_ENGINES.isdisjoint(cls.__name__ for cls in type(error.cause).__mro__):
                raise
            why, for_good = error.cause, True
        except ray.exceptions.RayActorError as error:
            why, for_good = error, isinstance(error, ray.exceptions.ActorDiedError)
        if not (for_good and self._client.config.actor_rollout_ref.rollout.name in OWN_SERVERS):
            raise EngineUnavailableError(f"a server's actor is gone: {one_line(why)}") from why
        self._client.leave_out(self._id)
        raise EngineUnavailableError(
            f"verl's server {self._id} has ended and is asked no more: {one_line(why)}"
        ) from why


class StreamingLLMServerManager(LLMServerManager):  # type: ignore[misc]
    """verl's manager of servers, whose clients choose their servers themselves.

    verl's load balancer is an actor on any node that runs once: when it ends, no server can be asked any more.

    Raises:
        ConfigError: a balancer is asked for, by its class or by `router_config_path`.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if self._load_balancer_cls is not None or self.rollout_config.get("router_config_path"):
            raise ConfigError(NO_ROUTER)

    async def start(self) -> None:
        """What `create` does to a new one: who has that can end what was started when this fails halfway."""
        with redirect_stdout(sys.stderr):  # it prints where servers are
            await self._initialize_llm_servers()

    async def _init_global_load_balancer(self) -> None:
        self.global_load_balancer = None

    def get_client(
        self, client_cls: type[StreamingLLMServerClient] | None = None, **kwargs: Any
    ) -> StreamingLLMServerClient:
        client_cls = client_cls or StreamingLLMServerClient
        if not issubclass(client_cls, StreamingLLMServerClient):
            raise ConfigError(
                f"{client_cls.__name__} asks a load balancer: derive it from StreamingLLMServerClient"
            )
        servers = dict(zip(self.server_addresses, self.server_handles, strict=True))
        return client_cls(self.config, servers=servers, **kwargs)

    def close(self) -> None:
        """Ends what was started and verl has no way to end: on a cluster that stays, it would stay, with its GPUs.

        Also of one that was started halfway, and lacks what comes later.
        """
        if not ray.is_initialized():
            return  # and to be asked for anything, it would start a cluster
        actors, groups = list(getattr(self, "server_handles", ())), list[Any]()
        for replica in getattr(self, "rollout_replicas", ()):
            actors += [*replica.servers, *replica.workers]
            groups += getattr(replica.resource_pool, "pgs", None) or []
        for actor in actors:
            with suppress(Exception):  # Ray may be gone
                ray.kill(actor)
        for group in groups:
            with suppress(Exception):
                remove_placement_group(group)
