"""Store and schedule against a plain reference in memory: any order of events, kills, power failures and restarts."""

import asyncio
import json
import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rollstream.rollout.worker import make_failure
from rollstream.training import Group, GroupBatch, ShuffledPlan
from rollstream.training.ledger import read_ledger
from rollstream.training.schedule import GroupSchedule
from rollstream.training.staleness import StalenessRule
from rollstream.training.store import Resume, TrainingStore, plain_facts
from rollstream.trajectory import Failure, Rollout, Trajectory

N = 3
SHM = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # a sync costs nothing there

Content = list[tuple[int, int, list[int]]]
"""Position, stamp, and what its rollouts are."""


class Synced:
    """Notes how much of each file was made durable."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self._plain = os.fdatasync, os.fsync
        self._patches = [mock.patch.object(os, one.__name__, self._noting(one)) for one in self._plain]

    def _noting(self, sync: Any) -> Any:
        def noting(fd: int) -> None:
            status = os.fstat(fd)
            sync(fd)
            self.sizes[status.st_ino] = status.st_size

        return noting

    def start(self) -> None:
        for patch in self._patches:
            patch.start()

    def stop(self) -> None:
        for patch in self._patches:
            patch.stop()


def cut(root: Path, target: Path, synced: dict[int, int], chance: random.Random) -> None:
    """Copies a folder as a power failure leaves it: of what was not synced to a journal, any part from its start."""
    shutil.copytree(root, target)
    for path in root.rglob("*.rsj"):
        size = path.stat().st_size
        durable = min(size, synced.get(path.stat().st_ino, 0))
        os.truncate(target / path.relative_to(root), chance.randint(durable, size))


class Life(RuleBasedStateMachine):
    """A training, its crashes, and what must not be lost of it."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=SHM))
        self.loop = asyncio.new_event_loop()
        self.synced = Synced()
        self.synced.start()
        self.lives = self.made = 0
        self.went_back: int | None = None
        self.alive = False
        self.running: dict[int, tuple[Group, dict[int, Rollout | Failure]]] = {}
        self.taken: list[GroupBatch] = []
        self.durable: dict[int, dict[int, int]] = {}
        """What was said to be on disk, by position and place."""
        self.perhaps: dict[int, dict[int, int]] = {}
        """What may be there: it was cut off while it was written."""
        self.trained: dict[int, Content] = {}
        self.saved: list[dict[str, Any]] = []

    def run(self, work: Any) -> Any:
        result = self.loop.run_until_complete(work)
        while tasks := asyncio.all_tasks(self.loop):  # so that it is at rest
            self.loop.run_until_complete(asyncio.wait(tasks))
        return result

    @initialize(
        order=st.sampled_from(["plan", "first"]),
        size=st.integers(1, 3),
        stale=st.integers(0, 2),
        ahead=st.integers(0, 3),
        bounded=st.booleans(),
    )
    def begins(self, order: Any, size: int, stale: int, ahead: int, bounded: bool) -> None:
        self.order, self.rule, self.bounded = order, StalenessRule(size, stale, ahead), bounded
        self.opens(None)

    def opens(self, state: dict[str, Any] | None, *, replay: bool = True) -> None:
        """As `BatchesAhead` does it."""
        plan = ShuffledPlan(5, seed=1)
        self.schedule = GroupSchedule(plan, self.rule, order=self.order)
        if state is not None:
            self.schedule.load_state_dict(state)
        self.version = self.schedule.trained_steps
        bounds: dict[str, Any] = {"keep_steps": 10**6, "max_bytes": 0} if self.bounded else {}
        self.store = TrainingStore(self.folder / str(self.lives), resume=True, **bounds)
        named = None if state is None else state["store"]
        resume = Resume(plan, self.version, self.schedule.settled, named, replay)
        restored = self.run(
            self.store.open(
                plain_facts(N),
                resume,
                rows=N,
                whole_groups=False,
                keep_turns=False,
                prompt_key=lambda index: None,
            )
        )
        late = self.schedule.restore(restored.groups, restored.batches, restored.dropped)
        assert not late  # the rule is the same, and no state is older than the versions there were
        self.running, self.taken, self.ended, self.alive = {}, [], 0, True

    # -- the generation

    @precondition(lambda self: self.alive and (self.schedule.room(self.version) or not self.running))
    @rule(times=st.integers(1, 4))
    def begin_some(self, times: int) -> None:
        for _ in range(times):
            self.begin()

    def begin(self) -> None:
        group = self.schedule.admit(self.version)
        if group is None:
            return
        assert group.start <= self.version
        self.store.begin(group)
        kept = self.run(self.store.kept(group.planned))
        there, position = self.durable.setdefault(group.position, {}), group.position
        perhaps = self.perhaps.pop(position, {})
        found = {
            at: one.final.response_ids[0] for at, one in kept.results.items() if isinstance(one, Rollout)
        }
        there |= {at: number for at, number in found.items() if perhaps.get(at) == number}
        assert found.items() <= there.items() and (kept.is_whole or found == there)
        self.running[position] = (group, dict(kept.results))
        if kept.is_whole:
            self.end(position, [*kept.results])

    @precondition(lambda self: self.running)
    @rule(data=st.data(), times=st.integers(2, 9))
    def finish_some(self, data: Any, times: int) -> None:
        for _ in range(times):
            self.finish_one(data, False)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), fails=st.sampled_from([False, True]))
    def finish_one(self, data: Any, fails: bool) -> None:
        if (chosen := self.choose(data)) is not None:
            group, results, place = chosen
            result = self.make(group, place, fails=fails)
            assert self.run(self.store.keep(group.planned, place, result)) is result
            results[place] = result
            if isinstance(result, Rollout):
                assert place not in self.durable[group.position]
                self.durable[group.position][place] = self.made

    def choose(self, data: Any) -> tuple[Group, dict[int, Rollout | Failure], int] | None:
        missing = [
            (group, results, place)
            for group, results in self.running.values()
            for place in range(N)
            if place not in results
        ]
        return missing[data.draw(st.integers(0, len(missing) - 1))] if missing else None

    def make(self, group: Group, place: int, *, fails: bool) -> Rollout | Failure:
        self.made += 1
        key = (group.index, N * group.epoch + place, "key")
        if fails:
            return make_failure(*key, 1, "agent", ValueError(str(self.made)))
        stamps = [(0, self.version)]
        one = Trajectory([1], [self.made], [1], [-0.5], [], "stop", stamps, reward=float(place))
        return Rollout(*key, [one], "sums")

    @precondition(lambda self: any(results for _, results in self.running.values()))
    @rule(data=st.data(), all_of_it=st.booleans())
    def end_one(self, data: Any, all_of_it: bool) -> None:
        """A group ends with all its results, or with those that there are."""
        ready = [
            position
            for position, (_, results) in self.running.items()
            if len(results) == N or (results and not all_of_it)
        ]
        if ready:
            position = data.draw(st.sampled_from(ready))
            places = [*self.running[position][1]]
            self.end(position, places if all_of_it else places[:2])

    def end(self, position: int, places: list[int]) -> None:
        group, results = self.running.pop(position)
        chosen = [results[place] for place in sorted(places)]
        group.rollouts = [one for one in chosen if isinstance(one, Rollout)]
        filtered = bool(group.rollouts) and position % 7 == 3 and not self.store.is_whole(group)
        if filtered or not group.rollouts:
            self.schedule.drop(position)
            self.store.dropped(group, "a filter" if filtered else "all failed", failed=not filtered)
        else:
            self.ended += 1
            self.store.ended(group)
            self.schedule.finish(position, rank=float(self.ended), tokens=1)

    # -- the trainer

    @precondition(lambda self: len(self.taken) < 2)
    @rule()
    def deliver(self) -> None:
        batch = self.schedule.deliver(self.version)
        if batch is None:
            if self.schedule.blocked(self.version) is None:
                assert self.running or self.schedule.room(self.version) or self.schedule.generating == 0
            return
        self.taken.append(batch)
        assert all(0 <= staleness <= self.rule.max_staleness for staleness in batch.staleness)
        content = content_of(batch)
        assert self.trained.get(batch.step, content) == content
        before = {one for step, groups in self.trained.items() if step != batch.step for one, _, _ in groups}
        assert not before & {position for position, _, _ in content}
        for position, _, numbers in content:
            assert {*numbers} <= {*self.durable[position].values()}

    @precondition(lambda self: self.taken)
    @rule(dies=st.integers(0, 19))
    def train(self, dies: int) -> None:
        if self.taken:
            batch = self.taken.pop(0)
            self.store.trained(batch.step, self.schedule.delivered(batch.step), self.schedule.watermark)
            self.trained[batch.step] = content_of(batch)
            if dies == 0 and self.saved:  # before anybody knows
                self.kill(-1, self.synced.sizes)
            else:
                self.schedule.trained(batch.step)

    @precondition(lambda self: self.alive and self.version < self.schedule.trained_steps)
    @rule()
    def update(self) -> None:
        self.version = self.schedule.trained_steps

    @rule()
    def save(self) -> None:
        state = self.schedule.state_dict()
        self.store.checkpoint(self.schedule.trained_steps)
        self.saved.append(json.loads(json.dumps({**state, "store": self.store.run_id})))

    # -- what goes wrong

    @rule(
        number=st.integers(0, 9), replay=st.sampled_from([True] * 9 + [False]), in_keep=st.booleans(),
        seed=st.integers(0, 2**32), data=st.data(),
    )  # fmt: skip
    def crash(self, number: int, replay: bool, in_keep: bool, seed: int, data: Any) -> None:
        synced = dict(self.synced.sizes)
        if in_keep and (chosen := self.choose(data)) is not None:  # nobody was told that it is there
            group, _, place = chosen
            self.run(self.store.keep(group.planned, place, self.make(group, place, fails=False)))
            self.perhaps.setdefault(group.position, {})[place] = self.made
        self.kill(number, synced, replay=replay, seed=seed)

    def kill(self, number: int, synced: dict[int, int], *, replay: bool = True, seed: int = 0) -> None:
        """Goes on from a checkpoint that may be needed, or from none."""
        self.alive = False
        if self.bounded:
            steps = sorted({state["step"] for state in self.saved})[-2:]
            usable = [at for at, state in enumerate(self.saved) if state["step"] in steps]
        else:
            usable = [-1, *range(len(self.saved))]
        if self.bounded and len({state["step"] for state in self.saved}) < 3:
            usable = [-1, *usable]
        at = usable[number % len(usable)]
        state = None if at < 0 else self.saved[at]
        self.lives += 1
        cut(self.folder / str(self.lives - 1), self.folder / str(self.lives), synced, random.Random(seed))
        self.run(self.store.close())
        self.closes()
        step = 0 if state is None else state["step"]
        went_back, self.went_back = self.went_back, None if replay else step
        if not replay and went_back != step:  # else it crashed on that way: it goes on
            self.saved = self.saved[: at + 1]
            self.trained = {one: content for one, content in self.trained.items() if one < step}
            settled = {position for content in self.trained.values() for position, _, _ in content}
            self.durable = {at: one for at, one in self.durable.items() if at in settled}
            self.perhaps = {}
        self.opens(state, replay=replay)

    def closes(self) -> None:
        """The ledger of what is on disk now."""
        ledger = read_ledger(self.folder / str(self.lives))
        assert ledger is not None
        parts = (ledger.trained, ledger.waiting, ledger.in_flight, ledger.filtered, ledger.in_failed_groups)
        rest = (*ledger.failed.values(), *ledger.set_aside.values(), ledger.not_needed, ledger.cut_off)
        assert ledger.begun == sum(parts) + sum(rest) and min((*parts, *rest)) >= 0, ledger
        assert (ledger.groups_skipped, ledger.groups_doubled) == (0, 0), ledger
        assert ledger.batches == len(self.trained)
        assert ledger.trained == sum(len(one) for content in self.trained.values() for _, _, one in content)

    def teardown(self) -> None:
        """It goes on to three more batches, whatever was before: it is never stuck."""
        try:
            if self.alive:
                self.goes_on()
        finally:
            if hasattr(self, "store"):
                self.run(self.store.close())
            self.synced.stop()
            self.loop.close()
            shutil.rmtree(self.folder)

    def goes_on(self) -> None:
        end = max([self.schedule.next_step, *self.trained]) + 3
        for _ in range(2000):
            self.begin()
            for position, (group, results) in [*self.running.items()]:
                for place in range(N):
                    if place not in results:
                        results[place] = self.make(group, place, fails=False)
                        self.run(self.store.keep(group.planned, place, results[place]))
                        self.durable[position][place] = self.made
                self.end(position, [0, 1, 2])
            self.deliver()
            self.train(1)
            self.update()
            if self.schedule.trained_steps >= end:
                break
        assert self.schedule.trained_steps >= end
        self.run(self.store.close())
        self.closes()


def content_of(batch: GroupBatch) -> Content:
    return [
        (one.position, one.start, [rollout.final.response_ids[0] for rollout in one.rollouts])
        for one in batch.groups
    ]


def test_store_and_schedule_lose_nothing() -> None:
    """`TRAINING_EVENTS=10000` plays longer."""
    events = int(os.environ.get("TRAINING_EVENTS", "600"))
    run_state_machine_as_test(
        Life,
        settings=settings(
            max_examples=events // 40,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
