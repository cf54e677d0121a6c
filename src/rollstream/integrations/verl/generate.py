"""`generate_sequences(batch) -> DataProto` by rollstream's agent loops and engine, in memory.

For people who write a trainer on verl's parts themselves: what verl's `AgentLoopManager` is to its trainers,
without Ray and without files. Needs verl.
"""

import asyncio
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack
from statistics import fmean
from typing import Any

import numpy as np
import torch
from verl import DataProto

from rollstream.config.load import to_settings
from rollstream.errors import ConfigError, DataError, GroupFailedError
from rollstream.generation.plan import runs_in_workers
from rollstream.integrations.configured_groups import Layers, build_worker, resolve_config
from rollstream.integrations.verl.loop import to_row
from rollstream.rollout.setup import build_setup, in_flight_limit, load_agents
from rollstream.scratch import ScratchFolder
from rollstream.training.collate import as_array, pad
from rollstream.training.generation_thread import GenerationThread
from rollstream.trajectory import Failure, PromptRow, Rollout, of_rollout

_GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": -1}


class SequenceGenerator(GenerationThread):
    """Agent loop, tools, reward and engine by configuration keys, for batches as verl's trainers make them.

        with SequenceGenerator(["actor_rollout_ref.model.path=…", "actor_rollout_ref.rollout.name=hf"]) as rollouts:
            batch = batch.repeat(8, interleave=True)
            output = rollouts.generate_sequences(batch)
            rollouts.update_weights("weights/step-1", 1)

    Engine and loops live in a thread of their own, so the methods are plain ones; they may be called from any
    thread, and from async code by `asyncio.to_thread`.

    Args:
        overrides: `key=value` words, as of `rollstream generate`. Rows are the batch's.
        config: layers under them: mappings, or YAML files.

    Raises:
        ConfigError: keys that are unknown, cannot work or have no effect here, or an engine without token ids.
    """

    def __init__(self, overrides: Sequence[str] = (), *, config: Layers = ()) -> None:
        super().__init__()
        self._settings = to_settings(resolve_config(overrides, config))
        if runs_in_workers(self._settings):
            raise ConfigError("generation.processes and generation.executor: no effect here")
        self._slots = asyncio.Semaphore(in_flight_limit(self._settings))
        self._opened = AsyncExitStack()
        try:
            self._start_thread()
        except BaseException:
            self.stop()
            raise

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Executes one rollout for each row of a batch, and returns all of their trajectories.

        Args:
            prompts: with `raw_prompt` (messages); `agent_name`, `data_source`, `reward_model`, `extra_info`,
                `tools_kwargs` and `sampling_params` mean what they mean in a file of prompt rows. A row of
                `__do_sample__` False is answered greedily, and so are all with `meta_info["do_sample"]` False.

        Returns:
            As verl's: `prompts`, `responses`, `response_mask`, `input_ids`, `attention_mask`, `position_ids`,
            `rollout_log_probs` and, where every row has a reward, `rm_scores`, padded to `prompt_length` and
            `response_length`; the columns of `prompts` beside them. A loop that gives several trajectories
            makes more rows than came in: `row` is the place of the row in `prompts`, `is_snapshot` tells a
            rollout's final row (R of them) from those before it.

        Raises:
            GroupFailedError: a rollout failed, after its attempts.
            DataError: the batch has no rows.
            GenerationStoppedError: this is closed, or was meanwhile.
        """
        if not len(prompts):
            raise DataError("the batch has no rows")
        columns, info = prompts.non_tensor_batch, prompts.meta_info
        sampled = columns.get("__do_sample__", np.full(len(prompts), info.get("do_sample", True)))
        step = int(info.get("global_steps", 0))
        rows = []
        for at in range(len(prompts)):
            sample = {name: values[at] for name, values in columns.items() if name != "__do_sample__"}
            rows.append(to_row(sample, at, None if sampled[at] else _GREEDY))
        rollouts = self.run(lambda: self._generate(rows, repeat=step))
        return self._to_dataproto(prompts, rollouts)

    def update_weights(self, source: str, version: int) -> None:
        """Loads the weights in a folder; tokens carry `version` from then on. See `Engine.update_weights`."""
        self.run(lambda: self._engine.update_weights(source, version))

    def close(self) -> None:
        """Ends batches that are under way, engine, tools and thread. May be called twice."""
        self.stop()

    async def _open(self) -> None:
        logs = ScratchFolder("engine")
        self._opened.callback(logs.cleanup)
        self._setup = await build_setup(self._settings, await load_agents(self._settings))
        self._opened.push_async_callback(self._setup.close)
        self._engine = self._setup.create_engine(logs.path)
        self._opened.push_async_callback(self._engine.close)
        await self._engine.start()
        self._worker = build_worker(self._setup, self._engine, ()).worker

    async def _close(self) -> None:
        await self._opened.aclose()

    async def _work(self) -> None:
        await asyncio.Event().wait()

    async def _generate(self, rows: Sequence[PromptRow], *, repeat: int) -> list[Rollout]:
        batch = uuid.uuid4().hex  # several may be under way, of one step

        async def run(row: PromptRow) -> Rollout:
            async with self._slots:
                result = await self._worker.run(row, repeat, name=f"{batch}-{row.index}")
            if isinstance(result, Failure):
                raise GroupFailedError(f"row {row.index} failed: {result.error}\n{result.traceback}")
            return result.without_side_calls()

        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(run(row)) for row in rows]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in running]

    def _to_dataproto(self, prompts: DataProto, rollouts: Sequence[Rollout]) -> DataProto:
        rollout = self._settings.actor_rollout_ref.rollout
        trajectories = [trajectory for done in rollouts for trajectory in done.trajectories]
        places = np.repeat(np.arange(len(rollouts)), [len(done.trajectories) for done in rollouts])
        tensors = pad(
            trajectories,
            self._setup.pad_id or 0,
            prompt_width=rollout.prompt_length,
            response_width=rollout.response_length,
        )
        columns: dict[str, list[Any]] = {
            name: [getattr(trajectory, name) for trajectory in trajectories]
            for name in ("is_snapshot", "finish_reason", "messages", "policy_versions")
        }
        columns["__num_turns__"] = [trajectory.num_turns for trajectory in trajectories]
        extras = sorted({name for trajectory in trajectories for name in trajectory.reward_extra})
        columns |= {
            name: [trajectory.reward_extra.get(name) for trajectory in trajectories] for name in extras
        }
        arrays = {name: values[places] for name, values in prompts.non_tensor_batch.items()}
        arrays |= {"row": places} | {name: as_array(name, values) for name, values in columns.items()}
        seconds = {"generate_sequences": "generate_s", "tool_calls": "tool_s", "compute_score": "reward_s"}
        timing = {
            f"agent_loop/{name}/mean": fmean(
                getattr(trajectory.metrics, field) for trajectory in trajectories
            )
            for name, field in seconds.items()
        }
        meta: dict[str, Any] = {"timing": timing}
        if "rm_scores" in tensors:
            meta["reward_extra_keys"] = sorted(
                {name for trajectory in trajectories for name in of_rollout(trajectory.reward_extra)}
            )
        return DataProto.from_dict(
            {name: torch.from_numpy(one) for name, one in tensors.items()}, arrays, meta
        )
