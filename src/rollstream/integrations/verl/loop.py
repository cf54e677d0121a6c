"""verl's loops as rollstream's worker sees them: attempts, retries, time limits and rewards are the same."""

import asyncio
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from typing import Any

from rollstream.agent.base import AgentLoop, AgentResources
from rollstream.agent.registry import AgentLoops, LoopEntry
from rollstream.engine.base import Capabilities
from rollstream.engine.ray_package import one_line
from rollstream.errors import ConfigError, EngineError, EngineLostError
from rollstream.integrations.verl.rows import VerlRow
from rollstream.integrations.verl.streaming import SampleCalls
from rollstream.integrations.verl.trajectories import to_trajectories
from rollstream.rollout.stats import Counts
from rollstream.rollout.worker import RolloutWorker
from rollstream.trajectory import Completion, Failure, PromptRow, Rollout, SamplingParams, Trajectory

_HEALTH_S = 10.0
"""For a server's actor to answer; one that is started anew takes some seconds."""

_NO_SERVER_LEFT = (
    "all of verl's servers have ended, and nobody starts them anew (Ray's logs of their actors say why). "
    "What is done is safe; run the same command again."
)

_row: ContextVar[tuple[VerlRow, int] | None] = ContextVar("rollstream_verl_row", default=None)


class VerlLoop(AgentLoop):
    """Runs the verl loop that a row names; `shared` is the worker that has them."""

    async def run(self, sampling: SamplingParams, **row: Any) -> list[Trajectory]:
        found = _row.get()
        assert found is not None, "a SampleWorker runs it"
        verl_row, repeat = found
        calls = SampleCalls(seed=sampling.seed)
        outputs = await self.shared.run_sample(
            verl_row.sample,
            index=verl_row.index,
            repeat=repeat,
            sampling_params=_extra_params(sampling),
            calls=calls,
        )
        return to_trajectories(
            outputs, calls, messages=verl_row.messages, decode=lambda ids: self.tokenizer.decode(list(ids))
        )


class VerlLoops(AgentLoops):
    """Every name is a loop of verl's; whether there is one, the worker knows."""

    def __init__(self, worker: Any = None) -> None:
        """`worker`: a `StreamingAgentLoopWorker`; None where nothing is executed."""
        super().__init__()
        self._worker = worker

    def entry(self, name: str) -> LoopEntry:
        return LoopEntry(VerlLoop)

    def check(self, names: Iterable[str], resources: AgentResources) -> None:
        if self._worker is None:
            return
        check_loop_names(names)

    def create(self, name: str, resources: AgentResources, *, request_id: str) -> AgentLoop:
        return VerlLoop(resources, request_id=request_id, shared=self._worker)


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
            f"verl knows no agent loop {missing[0]!r}; it knows {', '.join(sorted(known))}. Others come by "
            "actor_rollout_ref.rollout.agent.agent_loop_config_path"
        )


class SampleWorker:
    """A `RolloutWorker` whose loops know their row as verl has it."""

    def __init__(self, worker: RolloutWorker) -> None:
        self._worker = worker

    @property
    def counters(self) -> Counts:
        return self._worker.counters

    async def run(self, row: PromptRow, repeat: int) -> Rollout | Failure:
        """See `RolloutWorker.run`; `row` is a `VerlRow`."""
        assert isinstance(row, VerlRow)
        token = _row.set((row, repeat))
        try:
            return await self._worker.run(row, repeat)
        finally:
            _row.reset(token)


class VerlServers:
    """verl's servers, as workers that wait for them see them. verl's client generates, so `generate` does not.

    Args:
        handles: of their actors; none: requests that fail say how they are.
        capabilities: of the engine behind them, where it is rollstream's; else what verl's servers can.
        balancer: the actor that says which server gets a request; None: there is none to ask.
    """

    def __init__(self, handles: Sequence[Any], capabilities: Capabilities, *, balancer: Any = None) -> None:
        self._handles = list(handles)
        self._capabilities = capabilities
        self._balancer = balancer

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    async def start(self) -> None:
        """Nothing: they run."""

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        images: list[object] | None = None,
    ) -> Completion:
        raise EngineError("verl's client asks verl's servers")

    async def abort(self, request_id: str) -> None:
        """Nothing: a loop that is cut off cancels its own request, see `StreamingLLMServerClient`."""

    async def update_weights(self, source: str, version: int) -> None:
        raise EngineError("the weights of verl's servers are verl's to update")

    async def health(self) -> bool:
        """Whether one of the actors lives, and says that it is well where it can say so; and the balancer.

        Raises:
            EngineLostError: the balancer or all servers have ended, and nobody starts them anew.
        """
        from ray.exceptions import ActorDiedError

        if self._balancer is not None and not await self._is_balanced():
            return False
        answers = await asyncio.gather(*map(self._asked, self._handles), return_exceptions=True)
        if answers and all(isinstance(answer, ActorDiedError) for answer in answers):
            raise EngineLostError(_NO_SERVER_LEFT)
        return not answers or any(answer is True for answer in answers)

    async def _is_balanced(self) -> bool:
        from ray.exceptions import ActorDiedError, RayError

        try:
            async with asyncio.timeout(_HEALTH_S):
                if hasattr(self._balancer, "get_all_servers"):  # a router of the user's may lack it
                    # Those that ended are taken from it; the actor of one may well be alive.
                    if not await self._balancer.get_all_servers.remote():
                        raise EngineLostError(_NO_SERVER_LEFT)
                else:
                    await self._balancer.__ray_ready__.remote()
        except ActorDiedError as error:
            raise EngineLostError(
                f"verl's load balancer has ended, and without it no server can be asked: {one_line(error)}. "
                "What is done is safe; run the same command again."
            ) from error
        except (RayError, TimeoutError):
            return False
        return True

    async def _asked(self, handle: Any) -> bool:
        async with asyncio.timeout(_HEALTH_S):
            if hasattr(handle, "health"):
                return bool(await handle.health.remote())
            await handle.__ray_ready__.remote()
            return True

    async def close(self) -> None:
        """Nothing: who started them ends them."""


def _extra_params(sampling: SamplingParams) -> dict[str, Any]:
    """What rollstream's keys say beyond what verl's worker gives its loops."""
    params: dict[str, Any] = {}
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        params["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.ignore_eos:
        params["ignore_eos"] = True
    return params
