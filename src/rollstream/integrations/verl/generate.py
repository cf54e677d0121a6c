"""`generate_sequences(batch) -> DataProto` by rollstream's agent loops and engine, in memory.

For people who write a trainer on verl's parts themselves: what verl's `AgentLoopManager` is to its trainers,
without Ray and without files. Needs verl.
"""

import asyncio
import threading
import uuid
from collections.abc import Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from statistics import fmean
from typing import Any, Self, TypeVar

import numpy as np
import torch
from verl import DataProto

from rollstream.config.load import to_settings
from rollstream.engine.base import Engine
from rollstream.errors import DataError, GenerationStoppedError, GroupFailedError
from rollstream.integrations.configured_groups import Layers, build_worker, resolve_config
from rollstream.integrations.verl.loop import to_row
from rollstream.rollout.setup import RolloutSetup, build_setup, in_flight_limit, load_agents
from rollstream.rollout.worker import RolloutWorker
from rollstream.scratch import ScratchFolder
from rollstream.training.collate import as_array, pad
from rollstream.trajectory import Failure, PromptRow, Rollout

T = TypeVar("T")

_GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": -1}


class SequenceGenerator:
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
        self._settings = to_settings(resolve_config(overrides, config))
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._under_way: set[Future[Any]] = set()
        self._is_closed = False
        threading.Thread(target=self._loop.run_forever, name="rollstream-rollouts", daemon=True).start()
        self._places = asyncio.Semaphore(in_flight_limit(self._settings))
        self._logs = ScratchFolder("engine")
        self._setup: RolloutSetup | None = None
        self._engine: Engine | None = None
        self._worker: RolloutWorker | None = None
        try:
            self._wait(self._start())
        except BaseException:
            self.close()
            raise

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Executes one rollout for each row of a batch, and gives all of their trajectories.

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
        rollouts = self._wait(self._generate(rows, repeat=step))
        return self._to_dataproto(prompts, rollouts)

    def update_weights(self, source: str, version: int) -> None:
        """Loads the weights in a folder; tokens carry `version` from then on. See `Engine.update_weights`."""
        assert self._engine is not None
        self._wait(self._engine.update_weights(source, version))

    def close(self) -> None:
        """Ends batches that are under way, engine, tools and thread. May be called twice."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for one in self._under_way.copy():
                one.cancel()
            closing = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        try:
            closing.result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._logs.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        with self._lock:
            if self._is_closed:
                work.close()
                raise GenerationStoppedError("this SequenceGenerator is closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._under_way.add(future)
        try:
            return future.result()
        except CancelledError as error:
            raise GenerationStoppedError("the SequenceGenerator was closed meanwhile") from error
        finally:
            future.cancel()  # where Ctrl-C ends the wait: nothing of it goes on
            self._under_way.discard(future)

    async def _start(self) -> None:
        self._setup = await build_setup(self._settings, await load_agents(self._settings))
        self._engine = self._setup.create_engine(self._logs.path)
        await self._engine.start()
        self._worker = build_worker(self._setup, self._engine, ()).worker

    async def _close(self) -> None:
        if self._engine is not None:
            await self._engine.close()
        if self._setup is not None:
            await self._setup.close()

    async def _generate(self, rows: Sequence[PromptRow], *, repeat: int) -> list[Rollout]:
        worker, batch = self._worker, uuid.uuid4().hex  # several may be under way, of one step
        assert worker is not None

        async def run(row: PromptRow) -> Rollout:
            async with self._places:
                result = await worker.run(row, repeat, name=f"{batch}-{row.index}")
            if isinstance(result, Failure):
                raise GroupFailedError(f"row {row.index} failed: {result.error}\n{result.traceback}")
            return result.without_side_calls()

        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(run(row)) for row in rows]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in running]

    def _to_dataproto(self, given: DataProto, rollouts: Sequence[Rollout]) -> DataProto:
        assert self._setup is not None
        rollout = self._settings.actor_rollout_ref.rollout
        rows = [(at, one) for at, done in enumerate(rollouts) for one in done.trajectories]
        trajectories = [one for _, one in rows]
        places = np.array([at for at, _ in rows])
        tensors = pad(
            trajectories,
            self._setup.tokenizer.pad_id or 0,
            prompt_width=rollout.prompt_length,
            response_width=rollout.response_length,
        )
        named: dict[str, list[Any]] = {
            name: [getattr(one, name) for one in trajectories]
            for name in ("is_snapshot", "finish_reason", "messages", "policy_versions")
        }
        named["__num_turns__"] = [one.num_turns for one in trajectories]
        extras = sorted({name for one in trajectories for name in one.reward_extra})
        named |= {name: [one.reward_extra.get(name) for one in trajectories] for name in extras}
        own = {"row": places} | {name: as_array(name, values) for name, values in named.items()}
        own |= {name: values[places] for name, values in given.non_tensor_batch.items() if name not in own}
        seconds = {"generate_sequences": "generate_s", "tool_calls": "tool_s", "compute_score": "reward_s"}
        timing = {
            f"agent_loop/{name}/mean": fmean(getattr(one.metrics, field) for one in trajectories)
            for name, field in seconds.items()
        }
        meta: dict[str, Any] = {"timing": timing}
        if "rm_scores" in tensors:
            meta["reward_extra_keys"] = extras
        return DataProto.from_dict({name: torch.from_numpy(one) for name, one in tensors.items()}, own, meta)
