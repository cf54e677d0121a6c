"""rollstream's agent loops as loops of verl's: in its training, and wherever else verl's worker runs loops.

    verl's AgentLoopWorker -> RollstreamLoop -> ContextAgent (or another) -> verl's client -> verl's servers

Imported where verl is.
"""

import asyncio
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from rollstream.agent.context import ContextAgent
from rollstream.data.row import parse_row
from rollstream.data.values import to_jsonable
from rollstream.errors import ConfigError, DataError, GroupFailedError
from rollstream.integrations.verl.compose import to_rollstream
from rollstream.integrations.verl.recipe import ClientEngine, verl_servers
from rollstream.integrations.verl.sampling import row_sampling
from rollstream.integrations.verl.worker import current_calls
from rollstream.rollout.setup import build_setup, load_agents
from rollstream.rollout.worker import RolloutWorker
from rollstream.trajectory import CALL_TIMES, Failure, PromptRow, Trajectory, of_rollout

_workers: dict[Any, "asyncio.Task[RolloutWorker]"] = {}
"""One for every entry of the YAML of loops, as long as its process lives. One that cannot be made is tried anew."""


class RollstreamLoop(AgentLoopBase):  # type: ignore[misc]
    """An agent loop of rollstream's, by its name, in the YAML of verl's `agent_loop_config_path`.

        - name: context_agent
          _target_: rollstream.integrations.verl.loop.RollstreamLoop
          loop: context_agent
          overrides: [actor_rollout_ref.rollout.multi_turn.function_tool_path=/path/tools.py]

    Model, lengths, sampling, turns and tools are those of verl's configuration; `overrides` are keys of
    rollstream's laid over them. A rollout of several trajectories is a list of outputs, the final one last.
    verl's reward scores it, unless `overrides` name a `custom_reward_function`. A snapshot that has a reward of its
    own keeps it; the others get the final one's.
    """

    def __init__(self, *args: Any, loop: str, overrides: Iterable[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._name = loop
        self._overrides = tuple(map(str, overrides))

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        key = (self.server_manager, self._name, self._overrides)
        making = _workers.get(key)
        if making is None or (making.done() and (making.cancelled() or making.exception() is not None)):
            making = _workers[key] = asyncio.create_task(self._make_worker())
        worker = await asyncio.shield(making)
        prompt = to_row(row, int(row.get("index", 0)), sampling_params)
        # By its id a conversation has its server, and verl's index is 0 for every row that does not say.
        result = await worker.run(prompt, int(row.get("session_id", 0)), name=uuid.uuid4().hex)
        if isinstance(result, Failure):
            raise GroupFailedError(f"{result.error}\n{result.traceback}")
        *snapshots, final = result.without_side_calls().trajectories
        own_rewards = any(snapshot.reward not in (None, final.reward) for snapshot in snapshots)
        self._check_snapshots(bool(snapshots), own_rewards=own_rewards)
        outputs = [to_output(trajectory, prompt.columns) for trajectory in (*snapshots, final)]
        return outputs if snapshots else outputs[0]

    async def _make_worker(self) -> RolloutWorker:
        words = [f"actor_rollout_ref.rollout.agent.default_agent_loop={self._name}", *self._overrides]
        settings = to_rollstream(self.config, words)
        has_template = self.config.actor_rollout_ref.model.get("custom_chat_template")
        if has_template and settings.actor_rollout_ref.model.custom_chat_template is None:
            raise ConfigError(
                "verl's custom_chat_template is a text, and rollstream takes a file: name one in this loop's "
                "overrides (actor_rollout_ref.model.custom_chat_template=FILE)"
            )
        setup = await build_setup(settings, await load_agents(settings))
        has_reward = settings.custom_reward_function.path is not None
        if not has_reward:  # verl scores
            setup.reward = None  # type: ignore[assignment]
        servers = verl_servers(self.config.actor_rollout_ref.rollout.name)
        engine = ClientEngine(self.server_manager, replace(servers, images=False))
        show = settings.actor_rollout_ref.rollout.multi_turn.show_tools
        setup.agents.check({self._name}, setup.tokenizer, show_tools=show, images=False)
        loop = setup.agents.loops.create(self._name, setup.agent_resources(engine), request_id="check")
        if isinstance(loop, ContextAgent):
            takes_outcome, has_penalty = loop.snapshot_scoring == "outcome", loop.context_penalty is not None
            self._check_snapshots(True, own_rewards=not takes_outcome or has_penalty)
            is_scored = takes_outcome or has_penalty or (loop.snapshot_scoring == "own" and has_reward)
            if current_calls() is None and not is_scored:
                raise ConfigError(
                    f"agent loop {self._name!r}: verl's trainer gives a snapshot without a reward the final one's: "
                    "with snapshot_scoring=own name a custom_reward_function in overrides, and leave out none"
                )
        return setup.make_worker(engine, [self._name]).worker

    def _check_snapshots(self, has_some: bool, *, own_rewards: bool) -> None:
        """Raises `ConfigError` where verl's trainer would drop a snapshot, or its own reward."""
        if not has_some or current_calls() is not None:
            return
        if not self.config.trainer.get("use_v1", True):
            raise ConfigError(
                f"agent loop {self._name!r} gives several trajectories a rollout, and verl's old trainer takes "
                "one: set trainer.use_v1=true"
            )
        if own_rewards and self.config.algorithm.adv_estimator == "grpo":
            raise ConfigError(
                f"agent loop {self._name!r}: a snapshot has a reward of its own, and verl's grpo gives every "
                "trajectory of a rollout the final one's advantage: set algorithm.adv_estimator=grpo_vectorized, "
                "which has the same formula over all trajectories, or another one"
            )


class _OwnReward(AgentLoopOutput):  # type: ignore[misc]
    """A snapshot with a reward of its own: verl's worker sets that of all but the final output to the final one's."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "reward_score":
            super().__setattr__(name, value)


def to_row(sample: Mapping[str, Any], index: int, sampling: Mapping[str, Any] | None = None) -> PromptRow:
    """A row as verl's batches have it, as rollstream's loops take it.

    Args:
        sample: with `raw_prompt`; what JSON does not know is left out.
        index: of the row.
        sampling: the request's parameters, as verl has them.

    Raises:
        DataError: its prompt cannot be used.
    """
    plain = {}
    for name, value in sample.items():
        try:
            plain[name] = to_jsonable(value.tolist() if hasattr(value, "tolist") else value, drop_none=True)
        except Exception:
            continue
    if sampling:
        plain["sampling_params"] = row_sampling(sampling) | (plain.get("sampling_params") or {})
    try:
        return parse_row(plain, index, "raw_prompt")[0]
    except Exception as error:
        raise DataError(f"sample {index}: {error}") from error


def to_output(trajectory: Trajectory, columns: Mapping[str, Any]) -> AgentLoopOutput:
    """A trajectory as verl's loops give one; `columns` of the row are not repeated."""
    versions = [version for _, version in trajectory.policy_versions]
    left_out = {*columns, "extra_info", CALL_TIMES}
    extra = {key: value for key, value in trajectory.extra.items() if key not in left_out}
    said = of_rollout(trajectory.reward_extra)
    extra |= {key: value for key, value in trajectory.reward_extra.items() if key not in said}
    metrics = trajectory.metrics
    kind = _OwnReward if trajectory.is_snapshot and trajectory.reward is not None else AgentLoopOutput
    return kind(
        prompt_ids=trajectory.prompt_ids,
        response_ids=trajectory.response_ids,
        response_mask=trajectory.response_mask,
        response_logprobs=trajectory.response_logprobs,
        reward_score=trajectory.reward,
        num_turns=trajectory.num_turns,
        metrics=AgentLoopMetrics(generate_sequences=metrics.generate_s, tool_calls=metrics.tool_s),
        extra_fields={
            "turn_scores": [],
            "tool_rewards": [],
            **extra,
            "messages": trajectory.messages,
            "finish_reason": trajectory.finish_reason,
            "is_snapshot": trajectory.is_snapshot,
            "reward_extra_info": said,
            "min_global_steps": min(versions),
            "max_global_steps": max(versions),
        },
    )
