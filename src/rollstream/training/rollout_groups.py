"""Groups of rollouts: n for each prompt row, by the rollout worker with its retries and its waits for the engine."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

from rollstream.engine.base import Engine
from rollstream.engine.continuation import ContinuingEngine
from rollstream.errors import (
    ConfigError,
    DroppedGroupError,
    GroupFailedError,
    TrainingError,
    WeightUpdateError,
)
from rollstream.rollout.group_reward import Judge
from rollstream.rollout.in_workers import WorkerRollouts
from rollstream.rollout.worker import RolloutWorker
from rollstream.training.group import GroupGenerator, Kept
from rollstream.training.plan import PlannedGroup
from rollstream.trajectory import Failure, PromptRow, Rollout

Late = Literal["drop", "partial"]
"""At its deadline a group is dropped (and replaced), or the partial group is trained on."""

_IN_FLIGHT = 256
"""Rollouts at once; the configuration's default, and what engines with continuous batching can use."""


class RolloutGroups(GroupGenerator):
    """A `GroupGenerator` over a rollout worker.

    A rollout's `repeat` is `epoch * n + its place in the group`: seeds differ from epoch to epoch, and
    `(index, repeat)` names a rollout once and for all. A group takes as long as it takes: the worker bounds
    each attempt, `EngineAvailability` the time without an engine.

    Args:
        worker: runs the rollouts; or makes what does, in the event loop that it will run in.
        load_row: the prompt row of an index of the plan.
        n: rollouts of a group that are begun, > 0.
        first: that many are waited for, and the others are cut off when these are completed; None: all n.
        min_rollouts: a group with some failed rollouts (or late ones, with `late="partial"`) is good enough
            with so many; None: `first`.
        deadline: seconds for a group, from its dispatch; None: none.
        late: what becomes of a group at its deadline.
        engine: started before the first group, given the trainer's weights, and closed at the end; None: all
            that is done elsewhere, and an update may only tell the version (`source=""`).
        push_weights: gives the engine weights, in place of `engine.update_weights(source, version)`: as
            `lambda source, version: hf_engine.load_state_dict(model.state_dict(), version)`.
        max_in_flight: rollouts at once, over all groups.
        on_result: told of every rollout, side calls included, and failure, as to store it; the group waits for it.
        judge: gives the rollouts of a group their rewards, in place, when all are there.
    """

    bounds_groups = keeps_rollouts = True

    def __init__(
        self,
        worker: RolloutWorker | Callable[[], Awaitable[RolloutWorker | WorkerRollouts]],
        load_row: Callable[[int], PromptRow],
        n: int,
        *,
        first: int | None = None,
        min_rollouts: int | None = None,
        deadline: float | None = None,
        late: Late = "drop",
        engine: Engine | None = None,
        push_weights: Callable[[str, int], Awaitable[None]] | None = None,
        max_in_flight: int = _IN_FLIGHT,
        on_result: Callable[[Rollout | Failure], Awaitable[None]] | None = None,
        judge: Judge | None = None,
    ) -> None:
        wanted = n if first is None else first
        least = wanted if min_rollouts is None else min_rollouts
        if not 1 <= least <= wanted <= n:
            raise ConfigError(
                f"min_rollouts={least}, first={wanted}, n={n}: each at most the next, at least 1"
            )
        if late not in ("drop", "partial") or max_in_flight < 1 or (deadline is not None and deadline <= 0):
            raise ConfigError(
                f"{late=}, {max_in_flight=}, {deadline=}: 'drop' or 'partial', at least 1, more than 0 seconds"
            )
        self._make_worker = worker
        self._worker: RolloutWorker | WorkerRollouts | None = None
        self._load_row = load_row
        self._n = n
        self._wanted = wanted
        self._least = least
        self._deadline = deadline
        self._late = late
        self._engine = engine
        self._push_weights = push_weights
        self._places = asyncio.Semaphore(max_in_flight)
        self._on_result = on_result
        self._judge = judge
        self._versions = 0  # that weights are pinned to
        self.group_size = n

    def pin_weights(self, versions: int) -> None:
        """Has rollouts end under the adapter that they began with; before `start`, which checks the engine.

        Args:
            versions: see `ContinuingEngine.pin_weights`.

        Raises:
            ConfigError: its engine is not one that goes on after updates, or is given weights elsewhere.
        """
        if not isinstance(self._engine, ContinuingEngine) or self._push_weights is not None:
            raise ConfigError("weights='pinned' needs engine=ContinuingEngine(…), and no push_weights")
        self._versions = versions

    def prompt_key(self, index: int) -> str:
        """The key of the prompt row of an index of the plan."""
        return self._load_row(index).prompt_key

    async def start(self) -> None:
        if self._engine is not None:
            await self._engine.start()
        if self._versions and isinstance(self._engine, ContinuingEngine):
            self._engine.pin_weights(self._versions)
        made = self._make_worker
        self._worker = made if isinstance(made, RolloutWorker) else await made()

    async def generate(self, group: PlannedGroup) -> Sequence[Rollout]:
        name = f"group {group.position} (prompt {group.index})"
        return await self._group(name, self._load_row(group.index), group.epoch, group)

    async def generate_rows(self, rows: Sequence[PromptRow], epoch: int = 0) -> list[Rollout]:
        """A batch of prompt rows in, all their rollouts out, row by row: for loops without a plan.

        Args:
            rows: of different indices.
            epoch: passes over the same rows differ in it, and so in their seeds.

        Raises:
            GroupFailedError: too few rollouts of a row were completed; the others are cut off.
        """
        try:
            async with asyncio.TaskGroup() as running:
                groups = [running.create_task(self._group(f"row {row.index}", row, epoch)) for row in rows]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [rollout for group in groups for rollout in group.result()]

    async def _group(
        self, name: str, row: PromptRow, epoch: int, planned: PlannedGroup | None = None
    ) -> list[Rollout]:
        kept = Kept() if planned is None else await self.keeper.kept(planned)
        rollouts = await self._rollouts(name, row, epoch, planned, kept)
        if self._judge is not None and not kept.is_judged:
            await self._judge(rollouts)
            if planned is not None:
                await self.keeper.keep_rewards(
                    planned, {one.repeat - epoch * self._n: one for one in rollouts}
                )
        return rollouts

    async def _rollouts(
        self, name: str, row: PromptRow, epoch: int, planned: PlannedGroup | None, kept: Kept
    ) -> list[Rollout]:
        failures = list[Failure]()
        done = [one.without_side_calls() for one in kept.results.values() if isinstance(one, Rollout)]
        if kept.is_whole or len(done) >= self._wanted:
            return sorted(done, key=lambda rollout: rollout.repeat)[: self._wanted]
        tasks = [
            asyncio.create_task(self._run(row, epoch * self._n + place, planned, place))
            for place in range(self._n)
            if place not in kept.results
        ]
        # A group that has to be whole is hopeless with fewer.
        most_failures = self._n - (self._wanted if self._least == self._wanted else 0)
        late = False
        try:
            async with asyncio.timeout(self._deadline) as limit:
                for task in asyncio.as_completed(tasks):
                    result = await task
                    (done if isinstance(result, Rollout) else failures).append(result)  # type: ignore[arg-type]
                    if len(done) >= self._wanted or len(failures) > most_failures:
                        break
        except TimeoutError:
            if not (late := limit.expired()):
                raise
        finally:
            for task in tasks:
                task.cancel()
            # The first error is raised; asyncio would log the others, one by one.
            await asyncio.gather(*tasks, return_exceptions=True)
        done.sort(key=lambda rollout: rollout.repeat)
        enough = self._least if not late or self._late == "partial" else self._wanted
        if len(done) >= enough:
            return done[: self._wanted]
        if late:
            raise DroppedGroupError(
                f"{name} had {len(done)} of {self._wanted} rollouts after {self._deadline:g} s (deadline)"
            )
        last = failures[-1]
        raise GroupFailedError(
            f"{len(failures)} of {self._n} rollouts of {name} failed, {enough} are needed; the last one, after "
            f"{last.attempts} attempts, with {last.error}\n{last.traceback}"
        )

    async def update_weights(self, source: str, version: int) -> None:
        if self._push_weights is not None:
            await self._push_weights(source, version)
        elif self._engine is not None:
            await self._engine.update_weights(source, version)
        elif source:
            raise WeightUpdateError(
                f"these groups have neither an engine nor push_weights: nobody would load {source!r}"
            )

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.close()

    async def _run(
        self, row: PromptRow, repeat: int, planned: PlannedGroup | None, place: int
    ) -> Rollout | Failure:
        async with self._places:
            if self._worker is None:
                raise TrainingError("start() comes first")
            turns = None if planned is None else self.keeper.turns(planned, place, row.prompt_key)
            result = await self._worker.run(row, repeat, turns=turns)
        if planned is not None:
            result = await self.keeper.keep(planned, place, result)
        if self._on_result is not None:
            await self._on_result(result)
        return result.without_side_calls() if isinstance(result, Rollout) else result
