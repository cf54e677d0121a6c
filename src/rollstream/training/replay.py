"""A training's store again, group by group, without an engine: for another loss, or a bug to find.

groups = ReplayGroups("outputs/rollouts")
with BatchesAhead(groups.plan, groups, groups_per_step=groups.groups_per_step) as batches:
    …
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rollstream.errors import ConfigError, RunDirectoryError
from rollstream.store.journal import ScanReport
from rollstream.store.run import Run
from rollstream.store.scores import notes_path
from rollstream.training.group import GroupGenerator
from rollstream.training.plan import FunctionPlan, PlannedGroup
from rollstream.training.store import (
    GroupHistory,
    GroupReader,
    History,
    prompt_keys,
    read_history,
)
from rollstream.trajectory import Failure, Rollout
from rollstream.user_calls import in_daemon_thread


class ReplayGroups(GroupGenerator):
    """A `GroupGenerator` of the groups that another training was trained on, in its order.

    Args:
        root: the store of that training, as it is now. Nothing is written to it.
        prompt_key: of a row, where somebody knows it: rows that are others now are refused at the start.
        stand_in: what stands in its group for a rollout that failed; None: it is left out.

    Raises:
        RunDirectoryError: it is no training's store, or rollouts of a batch are not there any more.
        ConfigError: its batches have different sizes; the last one may be smaller.
    """

    bounds_groups = replays = True

    def __init__(
        self,
        root: Path | str,
        *,
        prompt_key: Callable[[int], str] | None = None,
        stand_in: Callable[[Failure], Any] | None = None,
    ) -> None:
        self.root = Path(root).expanduser()
        self._run = Run.open(self.root)
        self.manifest = self._run.manifest
        """Of the store."""
        self._prompt_key, self._stand_in = prompt_key, stand_in
        self._history = _read_notes(self._run)
        batches = self._history.batches
        self.steps = max(batches, default=-1) + 1
        """Batches that there are."""
        state = self._run.state()
        self._failures = [*self._run.failures(state)] if state.keys.failed else []
        failed = {(failure.index, failure.repeat) for failure in self._failures}
        groups: list[GroupHistory] = []
        self.groups_per_step = 0
        """Groups of each batch."""
        for step in range(self.steps):
            batch = (
                [self._history.groups[one] for one in sorted(batches[step].positions)]
                if step in batches
                else []
            )
            keys = [(group.planned.position, place) for group in batch for place in self._places(group)]
            if not batch or not all(key in failed or state.keys.is_done(*key) for key in keys):
                why = next(iter(state.damage), "deleted (keep_steps), or made before there was a store")
                raise RunDirectoryError(f"{self.root} does not have all rollouts of step {step}: {why}")
            self.groups_per_step = self.groups_per_step or len(batch)
            if len(batch) != self.groups_per_step and (
                step < self.steps - 1 or len(batch) > self.groups_per_step
            ):
                raise ConfigError(
                    f"the batches of {self.root} have different sizes: step {step} has {len(batch)} groups, those "
                    f"before it {self.groups_per_step}"
                )
            groups += batch
        if not groups:
            raise RunDirectoryError(f"{self.root} has no batch that was trained yet")
        self._groups = groups
        self.plan = FunctionPlan(
            lambda position: (groups[position].planned.epoch, groups[position].planned.index),
            identity={"replay_of": self.manifest.run_id},
            length=len(groups),
        )
        """Batch after batch; a position of it is not the store's."""
        self._reader: GroupReader | None = None

    def state_at(self, step: int) -> dict[str, Any]:
        """For `BatchesAhead.load_state_dict`: goes on with batch `step`, as from a checkpoint of that training."""
        if not 0 <= step <= self.steps:
            raise ConfigError(f"{self.root} has {self.steps} batches: step {step} is not one of them")
        watermark = min(step * self.groups_per_step, len(self._groups))
        settled = {"step": step, "watermark": watermark, "trained": [], "dropped": []}
        return {"plan": self.plan.identity(), "plan_state": {}, **settled}

    async def start(self) -> None:
        if self._prompt_key is not None:
            await in_daemon_thread(self._check_rows, self._prompt_key)
        self._reader = GroupReader(
            self.root, self.manifest, self._history, lambda: self._failures, together=self.groups_per_step
        )
        self._reader.waiting.update(dict.fromkeys(group.planned.position for group in self._groups))

    async def generate(self, group: PlannedGroup) -> Sequence[Any]:
        assert self._reader is not None, "start() comes first"
        known, rollouts = self._groups[group.position], list[Any]()
        results = await self._reader.read(known.planned.position)
        places = self._places(known)
        for place in places:
            one = results.get(place)
            if isinstance(one, Rollout):
                rollouts.append(one.without_side_calls())
            elif one is not None and self._stand_in is not None:
                rollouts.append(self._stand_in(one))
        if len(rollouts) < len(places):
            step = group.position // self.groups_per_step
            raise RunDirectoryError(
                f"{self.root} does not have all rollouts of step {step} any more, or damaged ones"
            )
        return rollouts

    async def update_weights(self, source: str, version: int) -> None:
        """Does nothing: no engine takes them."""

    def _places(self, group: GroupHistory) -> Sequence[int]:
        return range(self.manifest.n) if self._stand_in is not None else group.places or ()

    def _check_rows(self, prompt_key: Callable[[int], str]) -> None:
        stored = {failure.index: failure.prompt_key for failure in self._failures}
        stored.update(prompt_keys(self._run))
        for number, group in enumerate(self._groups):
            key, row = stored.get(group.planned.position), group.planned.index
            if key is not None and prompt_key(row) != key:
                raise ConfigError(
                    f"prompt row {row} is another one than at step {number // self.groups_per_step} of {self.root}: "
                    "a replay needs the rows of that training, in their order"
                )


def _read_notes(run: Run) -> History:
    report, history = ScanReport(), None
    try:
        if notes_path(run.root).is_file():
            history = read_history(run.root, run.manifest, report)
    except KeyError:  # of a group that was begun in what is damaged
        pass
    if report.damage:
        raise RunDirectoryError(
            f"the notes of {run.root} are damaged, and so its order is lost: {report.damage[0]}"
        )
    if history is None:
        raise RunDirectoryError(f"{run.root} is not the store of a training: it has no {notes_path(Path())}")
    return history
