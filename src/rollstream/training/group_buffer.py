"""The group buffer: between the generation thread, which fills it, and the trainer's, which empties it.

    generation thread                    buffer                            trainer's thread
    admit() ---------------------> generating(start)
    finish() | drop() -----------> finished | dropped
                                   finished -> delivered(k) ------------>  get()
                                   delivered(k) -> trained  <------------  trained(k)
    fail(cause) -----------------> broken: every get() raises, at once, with the cause
    on_room() <------------------- room to begin more, or no more reason to go on

What may happen when is `GroupSchedule`'s; here are the lock, the waits and the rollouts themselves. One
condition guards all of it. Nothing here blocks but `get` and `wait_idle`, which have bounds.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rollstream.errors import (
    BatchTimeoutError,
    GenerationFailedError,
    GenerationStoppedError,
    PlanEndedError,
    StalenessError,
    WeightUpdateError,
)
from rollstream.training.group import Group, GroupBatch, count_tokens
from rollstream.training.plan import PlannedGroup
from rollstream.training.schedule import GroupSchedule
from rollstream.training.selection import GroupFilter, GroupRank, Learns, LearnsFromDrops
from rollstream.training.versions import VersionLedger


@dataclass(frozen=True, slots=True)
class Begun:
    """A group that the generation thread has to generate."""

    planned: PlannedGroup
    start: int
    begun_at: float


@dataclass(slots=True)
class BufferCounters:
    """What happened so far."""

    begun: int = 0
    finished: int = 0
    dropped: int = 0
    """Groups that were generated and thrown away, as those without signal."""
    failed: int = 0
    """Groups that could not be generated."""
    trained: int = 0


class GroupBuffer:
    """Groups between generation and training.

    Args:
        schedule: decides.
        ledger: of versions.
        rank: where the order leaves a choice, the smaller goes first; None: what finished first.
        filters: each may throw a finished group away.
        describe: what generation does, for the message of a wait that timed out.
    """

    def __init__(
        self,
        schedule: GroupSchedule,
        ledger: VersionLedger,
        *,
        rank: GroupRank | None = None,
        filters: Sequence[GroupFilter] = (),
        describe: Callable[[], str] = lambda: "",
    ) -> None:
        self._schedule = schedule
        self._ledger = ledger
        self._rank = rank
        self._filters = filters
        self._describe = describe
        candidates: list[object] = [schedule.plan, rank, *filters]
        self._learners = [one for one in candidates if isinstance(one, Learns)]
        self._drop_learners = [one for one in candidates if isinstance(one, LearnsFromDrops)]
        self._changed = threading.Condition(threading.RLock())
        self._groups: dict[int, Group] = {}  # finished and undelivered
        self._untrained: dict[int, list[Group]] = {}  # delivered, by step
        self._error: BaseException | None = None
        self._stopped = False
        self._held = False
        self.counters = BufferCounters()
        self.on_room: Callable[[], object] = lambda: None
        """Called, with the lock held, when more may be begun or all is over; must not block."""

    # --- the generation thread's side

    def admit(self) -> Begun | None:
        """Begins the next group; None: there is no room now, `on_room` will tell."""
        with self._changed:
            if self._held or self._stopped or self._error is not None:
                return None
            scheduled = self._schedule.admit(self._ledger.engine_version)
            if scheduled is None:
                return None
            self.counters.begun += 1
            return Begun(scheduled.planned, scheduled.start, time.monotonic())

    def finish(self, begun: Begun, rollouts: Sequence[Any], *, attempts: int = 1) -> str | None:
        """A group has been generated; returns why it was thrown away, or None.

        Raises:
            StalenessError: its tokens are older than its stamp; it is still generating then.
        """
        with self._changed:
            if self._stopped or self._error is not None:
                return None
            oldest = self._ledger.oldest(begun.start, rollouts)
            group = Group(
                begun.planned, begun.start, rollouts, oldest, begun.begun_at, time.monotonic(), attempts
            )
            self.counters.finished += 1
            for one in self._filters:
                reason = one.drops(group)
                if reason is not None:
                    for policy in self._drop_learners:
                        policy.observe_dropped(group)
                    self.drop(begun, failed=False)
                    return reason
            rank = float(self.counters.finished) if self._rank is None else self._rank.rank(group)
            self._schedule.finish(group.position, rank=rank, tokens=count_tokens(rollouts))
            self._groups[group.position] = group
            self._changed.notify_all()
            return None

    def drop(self, begun: Begun, *, failed: bool) -> None:
        """A group that is being generated will not come; the plan's next one may take its place."""
        with self._changed:
            if self._stopped or self._error is not None:
                return
            self._schedule.drop(begun.planned.position)
            if failed:
                self.counters.failed += 1
            else:
                self.counters.dropped += 1
            self._moved()

    def fail(self, error: BaseException) -> None:
        """Generation is over: whoever waits hears of it at once. The first cause counts."""
        with self._changed:
            if self._error is None and not self._stopped:
                self._error = error
            self._moved()

    # --- the trainer's side

    def get(self, timeout: float | None) -> GroupBatch:
        """The next batch.

        Args:
            timeout: seconds, 0 for what is there already; None: as long as it takes, or until generation
                fails.

        Raises:
            BatchTimeoutError: it did not come in time; ask again.
            GenerationFailedError: generation has ended, the cause is its `__cause__`.
            GenerationStoppedError: it was stopped.
            PlanEndedError: the plan's last batch was delivered before.
            StalenessError: no batch can come until the trainer moves: it says how.
        """
        began = time.monotonic()
        with self._changed:
            while True:
                self.raise_if_broken()
                delivery = self._schedule.deliver(self._ledger.engine_version)
                if delivery is not None:
                    break
                if self._schedule.ended:
                    raise PlanEndedError(f"the plan has ended: batch {self._schedule.next_step} is not in it")
                self.on_room()  # asking may make room, and so does what a batch takes while it fills up
                reason = self._schedule.blocked(self._ledger.engine_version)
                if reason is not None and self._ledger.updating is None:
                    raise StalenessError(reason)
                left = None if timeout is None else began + timeout - time.monotonic()
                if left is not None and left <= 0:
                    raise BatchTimeoutError(self._late(time.monotonic() - began))
                self._changed.wait(left)
            now = time.monotonic()
            groups = [self._groups.pop(group.position) for group in delivery.groups]
            batch = GroupBatch(delivery.step, groups, delivered_at=now, wait_s=now - began)
            self._untrained[delivery.step] = groups
            batch.staleness = self._ledger.record(delivery.step, [group.oldest for group in groups])
            self._moved()
            return batch

    def trained(self, step: int) -> None:
        """Batch `step` has been trained."""
        with self._changed:
            self.counters.trained += len(self._schedule.trained(step))
            for group in self._untrained.pop(step):
                for policy in self._learners:
                    policy.observe(group)
            self._moved()

    def begin_update(self, version: int, *, hold: bool) -> None:
        """New weights are on their way; with `hold`, nothing is begun until `end_update`."""
        with self._changed:
            self._ledger.begin_update(version)
            self._held = hold

    def wait_idle(self, timeout: float) -> None:
        """Waits until nothing is being generated.

        Raises:
            WeightUpdateError: that took longer than `timeout` seconds.
            GenerationFailedError: generation has ended.
        """
        until = time.monotonic() + timeout
        with self._changed:
            while self._schedule.generating:
                self.raise_if_broken()
                left = until - time.monotonic()
                if left <= 0:
                    raise WeightUpdateError(
                        f"{self._schedule.generating} groups are still being generated after {timeout:g} s "
                        "of waiting for an idle engine: give it longer (weight_timeout), or update in flight "
                        f"(weights='in_flight'); {self._describe()}"
                    )
                self._changed.wait(left)

    def end_update(self, *, taken: bool) -> None:
        """The update came to its end; work goes on."""
        with self._changed:
            self._ledger.end_update(taken=taken)
            self._held = False
            self._moved()

    def stop(self) -> None:
        """Nothing is begun any more, and nobody waits any more. Idempotent."""
        with self._changed:
            self._stopped = True
            self._moved()

    def raise_if_broken(self) -> None:
        """Raises `GenerationFailedError` or `GenerationStoppedError` when there is nothing to wait for."""
        with self._changed:
            if self._error is not None:
                cause = self._error
                raise GenerationFailedError(
                    f"generation ended with {type(cause).__name__}: {cause}"
                ) from cause
            if self._stopped:
                raise GenerationStoppedError("generation was stopped")

    def state_dict(self) -> dict[str, Any]:
        """What was trained and what the policies have learnt from it: JSON values."""
        with self._changed:
            return {
                **self._schedule.state_dict(),
                "policies": {policy.name: policy.state_dict() for policy in self._policies()},
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on after what was trained, see `GroupSchedule.load_state_dict`."""
        with self._changed:
            self._schedule.load_state_dict(state)
            for policy in self._policies():
                if policy.name in state.get("policies", {}):
                    policy.load_state_dict(state["policies"][policy.name])

    def _policies(self) -> list[GroupFilter | GroupRank]:
        return [*self._filters, *([] if self._rank is None else [self._rank])]

    def _moved(self) -> None:
        self._changed.notify_all()
        self.on_room()

    def _late(self, waited: float) -> str:
        schedule = self._schedule
        size = schedule.rule.groups_per_step
        return (
            f"batch {schedule.next_step} did not come within {waited:.1f} s: {len(self._groups)} groups are "
            f"finished and {schedule.generating} are being generated, of {size} that it needs; "
            f"{self._describe()}"
        )
