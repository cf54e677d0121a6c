"""How a worker with verl's loops is made: in a `WorkerHost`, as the workers of `executor=ray` are.

The actor, its reports and its window are rollstream's, and so are attempts, time limits and rewards; inside it
verl's own worker runs verl's own loops.
"""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from omegaconf import DictConfig

from rollstream.agent.base import AgentLoop, AgentResources
from rollstream.agent.interactions import Interactions
from rollstream.agent.registry import AgentLoops, LoopEntry
from rollstream.agent.tools.toolbox import ToolBox
from rollstream.config.settings import Settings
from rollstream.engine.base import Capabilities, Engine
from rollstream.engine.ray_package import submit
from rollstream.engine.registry import engine_kind
from rollstream.errors import ConfigError, EngineError, EngineLostError
from rollstream.generation.execution import follower, worker_log_dir
from rollstream.integrations.verl.compose import NAME
from rollstream.integrations.verl.rows import VerlRow
from rollstream.integrations.verl.sampling import Lengths, to_verl
from rollstream.integrations.verl.server import ReplicaServer
from rollstream.integrations.verl.worker import SampleCalls, to_trajectories
from rollstream.rollout.setup import Agents, RolloutSetup, build_setup
from rollstream.rollout.worker import RolloutWorker
from rollstream.rollout.worker_host import BuiltWorker
from rollstream.sampling import PENALTIES, SERVER_SAMPLING
from rollstream.trajectory import Completion, Failure, PromptRow, Rollout, SamplingParams, Trajectory
from rollstream.user_calls import in_daemon_thread

_HEALTH_S = 10.0
"""For a server's actor to answer; one that is started anew takes some seconds."""

_row: ContextVar[tuple[VerlRow, int]] = ContextVar("rollstream_verl_row")


def verl_servers(name: str) -> Capabilities:
    """What is believed of servers behind a client of verl's: they don't say, and refuse what they can't.

    Sampling parameters go to them by the engine's own names: `seed` is vLLM's, SGLang's is another. rollstream's
    backend takes them all.
    """
    extra = {NAME: SERVER_SAMPLING, "vllm": (*PENALTIES, "min_p"), "sglang": (*PENALTIES, "min_p")}
    return Capabilities(
        token_ids=True,
        logprobs="processed",
        seeds=name in ("vllm", NAME),
        stop_strings=True,
        stop_token_ids=True,
        images=True,
        update_weights=False,
        max_model_len=None,
        extra_sampling=extra.get(name, ()),
    )


@dataclass(frozen=True, slots=True)
class VerlRecipe:
    """A worker with verl's loops."""

    settings: Settings
    """Of the run, as a worker needs them."""
    verl_config: DictConfig
    worker: Callable[[DictConfig, Any], Any]
    """Makes verl's own worker of `verl_config` and a client: a class, for it travels by its name."""
    client: Any
    """A `StreamingLLMServerClient` of servers that verl started; None: each worker has an engine of rollstream's."""
    loop_names: tuple[str, ...]
    data_sources: tuple[str, ...]
    """Their rules are tried at start."""
    log_dir: str = ""
    """Of the run, for an engine's log."""
    follows: bool = False
    """Whether the URLs of the engine's servers may change."""

    async def build(self, number: int) -> BuiltWorker:
        """See `WorkerRecipe`."""
        loops = VerlLoops()
        setup = await plain_setup(self.settings, loops)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(setup.close)
            client, follow = self.client, None
            if client is None:
                plain = setup.create_plain_engine(worker_log_dir(self.log_dir, number))
                engine = setup.interruptible(plain)
                stack.push_async_callback(engine.close)
                await setup.start_engine(engine)
                client = await in_daemon_thread(self._client_of, engine)
                follow = follower(setup, plain) if self.follows else None
            else:
                engine = ClientEngine(client, verl_servers(self.verl_config.actor_rollout_ref.rollout.name))
            await setup.prepare_reward(self.data_sources)
            loops.worker, context = await in_daemon_thread(self._make_worker, client)
            stack.push_async_callback(in_daemon_thread, _end_traces, context)
            built = setup.make_worker(engine, list(self.loop_names))
            client.meter = built.meter
            is_embedded = (
                self.client is None and engine_kind(setup.settings.actor_rollout_ref.rollout.name).is_embedded
            )
            return replace(
                built,
                worker=SampleWorker(built.worker, context),  # type: ignore[arg-type]
                close=stack.pop_all().aclose,
                engine=engine if is_embedded else None,
                follow=follow,
            )

    def _client_of(self, engine: Engine) -> Any:
        """A client of verl's whose only server is in this process."""
        from rollstream.integrations.verl.client import StreamingLLMServerClient

        server = ReplicaServer(Lengths.read(self.verl_config.actor_rollout_ref.rollout), engine=engine)
        methods = {name: SimpleNamespace(remote=getattr(server, name)) for name in ("generate", "health")}
        return StreamingLLMServerClient(self.verl_config, servers={"engine": SimpleNamespace(**methods)})

    def _make_worker(self, client: Any) -> tuple[Any, "_Context"]:
        """A worker of verl's, and what it left in the context of its thread: a tracer's run."""
        from verl.workers.rollout.utils import get_max_position_embeddings

        before = copy_context()
        worker = self.worker(self.verl_config, client)
        rollout = client.config.actor_rollout_ref.rollout
        if rollout.max_model_len is None:  # verl's servers take the model's, if it has one
            with suppress(ValueError):
                rollout.max_model_len = int(get_max_position_embeddings(worker.model_config.hf_config))
        return worker, [(var, value) for var, value in copy_context().items() if before.get(var) is not value]


_Context = list[tuple[ContextVar[Any], Any]]


def _end_traces(context: _Context) -> None:
    """Sends what a tracer of verl's has not sent yet: it does that beside the rollouts, and is told no end."""
    from verl.utils.rollout_trace import RolloutTraceConfig

    for variable, value in context:
        variable.set(value)
    end = {"mlflow": "flush_trace_async_logging", "trackio": "finish", "weave": "finish"}
    with suppress(Exception):  # the rollouts are safe, whatever becomes of their traces
        getattr(RolloutTraceConfig.get_client(), end[str(RolloutTraceConfig.get_backend())])()


async def plain_setup(settings: Settings, loops: AgentLoops) -> RolloutSetup:
    """What a run has of rollstream's: tokenizer, reward, sampling. Raises `ConfigError`.

    Tools and interactions are verl's: those of its kind are no classes of rollstream's.
    """
    plain = replace(settings, data=replace(settings.data, tool_config_path=None))
    return await build_setup(plain, Agents(loops, ToolBox(), Interactions()))


class VerlLoop(AgentLoop):
    """Runs the verl loop that a row names; `shared` is the worker that has them."""

    async def run(self, sampling: SamplingParams, **row: Any) -> list[Trajectory]:
        verl_row, repeat = _row.get()
        calls = SampleCalls(seed=sampling.seed)
        params = to_verl(sampling, max_tokens=sampling.max_tokens != self.resources.response_length)
        outputs = await self.shared.run_sample(
            verl_row.sample, index=verl_row.index, repeat=repeat, sampling_params=params, calls=calls
        )
        return to_trajectories(
            outputs,
            calls.calls,
            messages=verl_row.messages,
            decode=lambda ids: self.tokenizer.decode(list(ids)),
        )


class VerlLoops(AgentLoops):
    """Every name is a loop of verl's; whether there is one, the worker knows."""

    worker: Any = None
    """A `StreamingAgentLoopWorker`; None where nothing is executed."""

    def entry(self, name: str) -> LoopEntry:
        return LoopEntry(VerlLoop)

    def check(self, names: Iterable[str], resources: AgentResources) -> None:
        check_loop_names(names)

    def create(self, name: str, resources: AgentResources, *, request_id: str) -> AgentLoop:
        return VerlLoop(resources, request_id=request_id, shared=self.worker)


def check_loop_names(names: Iterable[str], given: Iterable[str] = ()) -> None:
    """Refuses names of loops that verl does not know here.

    Args:
        names: that rows use.
        given: those of the user's YAML, where verl has not read it yet.

    Raises:
        ConfigError: with the names that there are.
    """
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry

    known = {*_agent_loop_registry, *given}
    if missing := sorted(set(names) - known):
        raise ConfigError(
            f"verl knows no agent loop {missing[0]!r} (known: {', '.join(sorted(known))}); others come by "
            "actor_rollout_ref.rollout.agent.agent_loop_config_path"
        )


class SampleWorker:
    """A `RolloutWorker` whose loops know their row as verl has it, and run in the context of verl's worker."""

    def __init__(self, worker: RolloutWorker, context: _Context) -> None:
        self._worker = worker
        self._context = context

    async def run(self, row: PromptRow, repeat: int) -> Rollout | Failure:
        """See `RolloutWorker.run`; `row` is a `VerlRow`."""
        assert isinstance(row, VerlRow)
        for variable, value in self._context:
            variable.set(value)
        token = _row.set((row, repeat))
        try:
            return await self._worker.run(row, repeat)
        finally:
            _row.reset(token)


class ClientEngine:
    """verl's client as an engine: rollstream's loops generate by it, and workers wait for its servers.

    Args:
        client: verl's `LLMServerClient`. A `StreamingLLMServerClient` knows its servers, which are asked how they
            are; without, requests that fail say it.
        capabilities: of the servers behind it.
    """

    def __init__(self, client: Any, capabilities: Capabilities) -> None:
        self._client = client
        self.capabilities = capabilities

    async def start(self) -> None:
        """Nothing: verl's servers run, and who started them ends them."""

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        images: list[object] | None = None,
    ) -> Completion:
        if images:
            raise EngineError("verl's client takes pixels, and rollstream's loops have files of images")
        params = to_verl(sampling, max_tokens=True)
        output = await self._client.generate(
            request_id=request_id, prompt_ids=list(prompt_ids), sampling_params=params
        )
        ids, fields = list(output.token_ids), output.extra_fields
        lengths = Lengths.read(self._client.config.actor_rollout_ref.rollout)
        is_longest = len(ids) >= lengths.most(sampling.max_tokens, len(prompt_ids))
        is_aborted = output.stop_reason in ("aborted", "abort")
        return Completion(
            token_ids=ids,
            logprobs=list(output.log_probs) if sampling.logprobs and output.log_probs is not None else None,
            finish_reason="abort" if is_aborted else "length" if is_longest else "stop",
            policy_versions=[(0, int(fields.get("global_steps") or 0))],
            cached_prompt_tokens=int(fields.get("num_cached_tokens") or 0),
        )

    async def abort(self, request_id: str) -> None:
        """Nothing: who is cut off cancels its own request, see `StreamingLLMServerClient`."""

    async def update_weights(self, source: str, version: int) -> None:
        raise EngineError("the weights of verl's servers are verl's to update")

    async def health(self) -> bool:
        """Whether one of the actors lives, and says that it is well where it can say so.

        Raises:
            EngineLostError: all servers have ended, and nobody starts them anew.
        """
        from ray.exceptions import ActorDiedError

        if (servers := getattr(self._client, "servers", None)) is None:
            return True
        answers = await asyncio.gather(*map(_ask, servers.values()))
        if all(isinstance(answer, ActorDiedError) for answer in answers):
            raise EngineLostError(
                "all of verl's servers have ended, and nobody starts them anew (see Ray's logs of their actors). "
                "What is done is safe; run the same command again."
            )
        return any(answer is True for answer in answers)

    async def close(self) -> None:
        """See `start`."""


async def _ask(server: Any) -> object:
    """What a server's actor says of its health, True if it has no such method and lives; or the error."""
    try:
        async with asyncio.timeout(_HEALTH_S):
            if hasattr(server, "health"):
                return await submit(server.health)
            await submit(server.__ray_ready__)
            return True
    except Exception as error:
        return error
