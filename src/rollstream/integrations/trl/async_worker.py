"""rollstream's rollouts for TRL's experimental `AsyncGRPOTrainer`: its worker, and its weight transfer.

    weights = EngineWeights()
    worker = EnvRolloutWorker(environment, dataset, model_path=…, num_generations=8, weights=weights)
    AsyncGRPOTrainer(…, rollout_worker=worker, weight_transfer=weights)

The trainer takes samples one by one from a queue, in whatever batches it likes, and throws away what is older
than its `max_staleness`. So the worker does not know batches: it keeps some groups ahead, each stamped with
the version at its dispatch. Source: TRL 1.16, `RolloutWorkerProtocol` and `WeightTransferProtocol`.
"""

import functools
import queue
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollstream.errors import (
    ConfigError,
    GenerationFailedError,
    GenerationStoppedError,
    GroupFailedError,
    WeightUpdateError,
)
from rollstream.integrations.trl.environment import (
    EnvironmentGroups,
    RolloutEnvironment,
    TrainerSays,
    read_row,
)
from rollstream.integrations.trl.failures import failure_of
from rollstream.integrations.trl.fields import to_fields
from rollstream.integrations.trl.session import OfBatches, cause_first
from rollstream.scratch import ScratchFolder
from rollstream.training.ahead import BatchesAhead
from rollstream.training.group import Group
from rollstream.training.plan import PlannedGroup, ShuffledPlan
from rollstream.training.weight_updates import load_within
from rollstream.trajectory import Rollout

_POLL_S = 0.2
"""Between looks at whether to stop, while the queue is full or no group has come."""

_HANDED_OVER = 2
"""Groups that are neither being generated nor waiting at most: one in the queue, one about to go there."""

_EPSILON = 1e-4
"""Added to a group's standard deviation, as TRL does."""


class EnvRolloutWorker:
    """TRL's `RolloutWorkerProtocol` over an environment.

    Args:
        environment: agent loop, rewards and engine; not the `hf` engine, whose weights would have to be the
            trainer's own.
        dataset: prompt rows, see `GRPOEnvTrainer`.
        model_path: of the model that the trainer begins with.
        num_generations: rollouts of a group, > 1.
        max_completion_length: tokens of a response at most.
        weights: how the trainer's weights reach the engine; give the same object to the trainer.
        temperature: as the trainer's.
        seed: of the order of the prompts and of the sampling.
        groups_ahead: groups on their way or in the queue at most, > 1; with fewer samples of each step in the
            trainer, older ones come out.
        timeout: seconds for one group, and for a weight update.
        max_failed_groups: groups in a row that may fail, because all their rollouts did or they took longer
            than `timeout`; one more ends the generation. A single rollout that failed brings no sample.

    Raises:
        ConfigError: these do not go together.
    """

    def __init__(
        self,
        environment: RolloutEnvironment,
        dataset: Any,
        *,
        model_path: str,
        num_generations: int,
        max_completion_length: int,
        weights: "EngineWeights",
        temperature: float = 1.0,
        seed: int = 0,
        groups_ahead: int = 32,
        timeout: float = 300.0,
        max_failed_groups: int = 8,
    ) -> None:
        if environment.engine_name == "hf":
            raise ConfigError("engine 'hf' shares the trainer's weights: use openvino, or servers")
        if num_generations < 2:
            raise ConfigError(f"num_generations={num_generations}: a group needs 2 rollouts or more")
        if groups_ahead < _HANDED_OVER:
            raise ConfigError(f"groups_ahead={groups_ahead}: at least {_HANDED_OVER}")
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(maxsize=num_generations)
        """Scored samples, which the trainer takes. Of one group: the others wait where they are counted."""
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        """Of dicts, which the trainer logs."""
        self._dataset = dataset
        self._timeout = timeout
        self._weights = weights
        trainer = TrainerSays(model_path, temperature, max_completion_length, num_generations, seed)
        self._groups = _StampedGroups(
            environment,
            trainer,
            lambda index: read_row(dataset[index], index),
            first_weights=None,
            max_failed_groups=sys.maxsize,  # in a row they are counted below, with those that took too long
            to_score=lambda: (read_row(dataset[index], index) for index in range(len(dataset))),
        )
        self._batches = BatchesAhead(
            ShuffledPlan(len(dataset), seed=seed),
            self._groups,
            groups_per_step=1,
            max_staleness=None,
            ahead=groups_ahead - _HANDED_OVER,
            order="first",
            window=groups_ahead,
            max_groups_in_flight=groups_ahead,
            group_timeout=timeout,
            on_group_failure="drop_and_refill",
            max_failures=max_failed_groups,
            token_versions="ignore",  # a group counts by the trainer's version, see `_StampedGroups`
            weights="in_flight",
            weight_timeout=timeout,
        )
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._alive_at = time.monotonic()

    def start(self) -> None:
        """Starts the engine with the trainer's weights, and the thread that fills the queue."""
        self._groups.first_weights = self._weights.folder
        self._groups.first_version = self._groups.version
        self._batches.start()
        self._weights.push = self._push
        self._thread = threading.Thread(target=self._fill, name="rollstream-trl-worker", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the generation and the engine; bounded."""
        self._stopping.set()
        self._weights.push = None
        self._batches.stop()
        if self._thread is not None:
            self._thread.join(10.0)

    def update_model_version(self, model_version: int) -> None:
        """The trainer's version; what is begun from now on is stamped with it.

        The weights of it have been loaded by `EngineWeights` before.
        """
        self._groups.version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raises when generation has ended, or has brought nothing for `stale_after_s` seconds.

        Raises:
            GenerationFailedError: with the cause.
        """
        if self._error is not None:
            raise GenerationFailedError(
                f"generation ended with {type(self._error).__name__}: {self._error}"
            ) from self._error
        silent = time.monotonic() - self._alive_at
        if silent > stale_after_s:
            raise GenerationFailedError(f"no rollout for {silent:.0f} s")

    def _push(self, folder: str) -> None:
        """In the trainer's thread: the weights of the version that is about to be announced."""
        version, running = self._groups.version + 1, OfBatches(self._batches)
        with cause_first(running):
            update = functools.partial(self._groups.update_weights, folder, version)
            load_within(running.submit, update, version, self._timeout)

    def _fill(self) -> None:
        try:
            while not self._stopping.is_set():
                batch = self._batches.next_batch(None)
                for group in batch.groups:
                    self._alive_at = time.monotonic()
                    for sample in self._samples(group):
                        self._put(sample)
                self._batches.trained(batch.step)  # not before: until it is in the queue it counts
                self._batches.update_weights()  # the next one may be begun; its weights come by `_push`
                self.metrics_queue.put(
                    {
                        "rollstream/generation_s": batch.groups[0].generation_s,
                        "rollstream/wait_s": batch.wait_s,
                    }
                )
        except GenerationStoppedError:
            return
        except BaseException as error:  # it has to reach `check_health`, whatever it is
            self._error = error

    def _put(self, sample: Any) -> None:
        while not self._stopping.is_set():
            try:
                self.rollout_buffer.put(sample, timeout=_POLL_S)
            except queue.Full:
                self._alive_at = time.monotonic()  # the trainer is busy, not this
            else:
                return

    def _samples(self, group: Group) -> list[Any]:
        """A group as TRL's samples: advantages are normalised over those that have a reward.

        Rollouts that failed are none.
        """
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        fields = to_fields(group.rollouts, end_id=0)
        version = self._groups.stamps.pop(group.position)
        given = fields["env_reward"]
        rewards = np.array([np.nan if reward is None else reward for reward in given], np.float64)
        scored = rewards[~np.isnan(rewards)]
        mean = float(scored.mean()) if scored.size else 0.0
        std = float(scored.std(ddof=1)) if scored.size > 1 else 0.0
        advantages = np.nan_to_num((rewards - mean) / (std + _EPSILON), nan=0.0)
        samples = []
        enqueued_at = time.time() - (time.monotonic() - group.finished_at)
        for place, failed in enumerate(fields["env_failed"]):
            if failed:
                continue
            prompt, completion = fields["prompt_ids"][place], fields["completion_ids"][place]
            messages = fields["env_messages"][place]
            asked = list(self._dataset[group.index]["prompt"])
            samples.append(
                RolloutSample(
                    prompt=asked,
                    completion=messages[len(asked) :],
                    input_ids=np.array([*prompt, *completion], np.int64),
                    completion_mask=np.array([0] * len(prompt) + fields["env_mask"][place], np.int64),
                    old_log_probs=np.array([0.0] * len(prompt) + fields["logprobs"][place], np.float32),
                    advantage=float(advantages[place]),
                    model_version=version,
                    group_id=group.position,
                    metrics={"reward": mean, "reward_std": std},
                    enqueued_at=enqueued_at,
                )
            )
        return samples


class _StampedGroups(EnvironmentGroups):
    """Groups stamped with the trainer's version at their dispatch: it counts weight updates, not batches."""

    version: int = 0

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.stamps: dict[int, int] = {}
        """By position, of the groups that the trainer has not got yet."""

    async def generate(self, group: PlannedGroup) -> Sequence[Rollout]:
        self.stamps[group.position] = self.version
        try:
            rollouts = await super().generate(group)
            errors = [error for error in map(failure_of, rollouts) if error is not None]
            if len(errors) == len(rollouts):
                raise GroupFailedError(f"all {len(errors)} rollouts of row {group.index}: {errors[-1]}")
        except BaseException:
            del self.stamps[group.position]
            raise
        return rollouts

    async def update_weights(self, source: str, version: int) -> None:
        """Loads the folder `source`; "" is for a group that was handed over, and brings no weights."""
        if source:
            await super().update_weights(source, version)


class EngineWeights:
    """TRL's `WeightTransferProtocol`: weights go to the engine through a folder.

    Args:
        parent: where the folder is made: one that the engine's servers see; None: the temporary folder.
    """

    def __init__(self, parent: str | None = None) -> None:
        self._root = ScratchFolder("weights", parent)
        self._sent = 0
        self.folder: str | None = None
        """Of the last weights; None before the first."""
        self.push: Any = None
        """Loads a folder into the engine; None while there is none: it takes `folder` when it starts."""

    def init_weight_transfer(self) -> None:
        """Nothing to set up."""

    def pause(self) -> None:
        """Nothing: the engine pauses by itself while it loads."""

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Writes the weights, and has the engine load them.

        Raises:
            WeightUpdateError: they cannot be written, or the engine refused.
        """
        from safetensors.torch import save_file

        folder = self._root.path / str(self._sent)
        self._sent += 1
        try:
            folder.mkdir()
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in iterator}
            save_file(_untied(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        except OSError as error:
            raise WeightUpdateError(f"weights cannot be written to {folder}: {error}") from error
        before, self.folder = self.folder, str(folder)
        if self.push is not None:
            self.push(self.folder)
        if before is not None:
            for file in Path(before).iterdir():
                file.unlink()
            Path(before).rmdir()

    def resume(self) -> None:
        """Nothing: see `pause`."""

    def destroy(self) -> None:
        """Removes the folder."""
        self._root.cleanup()


def _untied(tensors: dict[str, Any]) -> dict[str, Any]:
    """Of tensors that are one, the first: so they are in a model's own files."""
    seen: set[int] = set()
    kept = {}
    for name, tensor in tensors.items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            kept[name] = tensor
    return kept
