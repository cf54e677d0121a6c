"""Batches that are generated ahead of the step: what a training loop holds in its hands.

    with BatchesAhead(ShuffledPlan(len(rows)), generator, groups_per_step=32) as batches:
        for _ in range(steps):
            batch = batches.next_batch()                # waits only if it must
            train_on(batch)
            batches.trained(batch.step)                 # from now on it is never delivered again
            save(model, batches.state_dict())           # a checkpoint: both, or neither
            batches.update_weights("path/to/weights")   # the engine is at version batch.step + 1

The trainer's thread calls everything here; the generator's coroutines run in a thread of their own:

    generation thread                      here                            trainer's thread
    take work ---------------------> generating(start)
    work is done, has failed ------> finished | dropped
                                     finished -> delivered(k) ---------->  next_batch()
                                     delivered(k) -> trained  <----------  trained(k)

What may happen when is `GroupSchedule`'s; here are the lock, the waits, the versions and the rollouts.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from rollstream.errors import (
    BatchTimeoutError,
    ConfigError,
    DroppedGroupError,
    EngineLostError,
    GenerationFailedError,
    GroupFailedError,
    PlanEndedError,
    StalenessError,
    StorageError,
    TrainingError,
    WeightUpdateError,
)
from rollstream.rollout.retry import RetryPolicy
from rollstream.rollout.teachers import Teachers
from rollstream.training.generation_thread import (
    RETRY,
    STOP_S,
    GenerationThread,
    logger,
    try_again,
    try_within,
)
from rollstream.training.group import (
    Group,
    GroupBatch,
    GroupGenerator,
    TaughtFirst,
    count_tokens,
    token_versions,
    unscored_share,
)
from rollstream.training.ledger import Ledger, read_ledger
from rollstream.training.plan import Plan, PlannedGroup
from rollstream.training.schedule import GroupSchedule, Order
from rollstream.training.selection import GroupFilter, GroupRank, Policy, TokenBudget
from rollstream.training.staleness import StalenessRule
from rollstream.training.store import Resume, StoreFacts, TrainingStore, plain_facts
from rollstream.training.timing import StepTime, StepTimes, mean
from rollstream.trajectory import Rollout
from rollstream.user_calls import in_daemon_thread

OnGroupFailure = Literal["fail", "drop_and_refill"]
"""`fail`: the first group that fails ends generation; `drop_and_refill`: the plan's next one replaces it."""

WeightMode = Literal["drain", "in_flight", "pinned"]
"""`drain`: an update waits until nothing is being generated; `in_flight`: an update may come in the
middle of a generation; each token's version says which weights sampled it; `pinned`: a rollout ends under the
LoRA adapter that it began with, and those that begin later have the new one."""

TokenVersions = Literal["check", "ignore"]
"""`check`: a group with tokens older than its stamp has failed; `ignore`: the tokens' stamps mean nothing."""

_GROUP_S = 300.0
"""For one group: as long as trainers with asynchronous generation wait for a whole batch."""

_UPDATE_AGAIN = RetryPolicy(max_attempts=1, delay=0.5, delay_max=5.0)
"""Waits for an engine that is away; its attempts do not count. Asking costs little, and an engine that is
back is kept waiting for no longer than this."""

_CAUSE_S = 1.0
"""For the cause of an update's last try, at the time limit, to be heard of before the limit itself is told."""


@dataclass(slots=True)
class GroupCounters:
    """Counts of groups since the start."""

    begun: int = 0
    finished: int = 0
    dropped: int = 0
    """Groups that were generated and thrown away, as those without signal."""
    failed: int = 0
    """Groups that could not be generated."""


class BatchesAhead(GenerationThread):
    """An endless (or finite) sequence of batches, generated while the trainer works on earlier ones.

    Args:
        plan: which prompt row stands where.
        generator: makes the groups.
        groups_per_step: groups of a batch, > 0.
        max_staleness: steps by which a group may be older than the weights that it trains, >= 0: a bound that
            holds always, by pacing and never by throwing away.
        ahead: batches that may be there or on their way beyond the one being trained, >= 0; 0 generates only
            between the steps. None: `max_staleness`.
        order: `plan`: batches hold the plan's groups in order, whatever finishes first: the same sequence
            every time. `first`: what is finished first, as far as the bound allows.
        max_groups_in_flight: groups being generated at once at most; None: all that may be begun.
        group_timeout: seconds for one group, retries included; infinity: none. None: 300, and none for a
            generator that says that it bounds its groups itself (`bounds_groups`), as `RolloutGroups`.
        retry: for errors of the generator's that may pass.
        on_group_failure: what happens when a group has failed for good.
        max_failures: groups that may fail one after the other, with `drop_and_refill`.
        filters: each may throw finished groups away; they are replaced.
        max_drops: groups that may be thrown away one after the other; None: as many as 16 batches have, at least 100.
        rank: what goes first with `order="first"`; None: what finished first.
        batch_size: batches of a dynamic size, in place of `groups_per_step` (which must be its `smallest`);
            with a `max_staleness` of 1 or more.
        token_versions: `ignore` what an engine stamps on tokens that does not know versions.
        weights: whether weight updates wait for an idle engine, end generations, or leave them alone.
        weight_timeout: seconds for a weight update, that wait included.
        store: a folder in which each finished rollout is on disk before it counts. After a crash what was finished
            goes on (`load_state_dict`); None: it is made again.
        teachers: are asked for the log-probs of each rollout's tokens as soon as it is finished (`Trajectory.streams`),
            and closed at the end. None: nobody is.

    Raises:
        ConfigError: these do not go together.
    """

    def __init__(
        self,
        plan: Plan,
        generator: GroupGenerator,
        *,
        groups_per_step: int,
        max_staleness: int = 1,
        ahead: int | None = None,
        order: Order = "plan",
        max_groups_in_flight: int | None = None,
        group_timeout: float | None = None,
        retry: RetryPolicy = RETRY,
        on_group_failure: OnGroupFailure = "fail",
        max_failures: int = 8,
        filters: Sequence[GroupFilter] = (),
        max_drops: int | None = None,
        rank: GroupRank | None = None,
        batch_size: TokenBudget | None = None,
        token_versions: TokenVersions = "check",
        weights: WeightMode = "drain",
        weight_timeout: float = 300.0,
        store: TrainingStore | Path | str | None = None,
        teachers: Teachers | None = None,
    ) -> None:
        if not isinstance(generator, GroupGenerator):
            raise ConfigError(
                f"a {type(generator).__name__} generates groups if it inherits from GroupGenerator; of a coroutine "
                "function alone CallableGenerator makes a generator"
            )
        for value, known in (
            (on_group_failure, OnGroupFailure),
            (weights, WeightMode),
            (token_versions, TokenVersions),
        ):
            if value not in get_args(known):
                raise ConfigError(f"{value!r}: {' or '.join(map(repr, get_args(known)))}")
        if batch_size is not None and batch_size.smallest != groups_per_step:
            raise ConfigError(f"groups_per_step={groups_per_step} must be {batch_size}'s smallest")
        if max_groups_in_flight is not None and max_groups_in_flight < 1:
            raise ConfigError(f"max_groups_in_flight={max_groups_in_flight}: at least 1")
        if group_timeout is None:
            group_timeout = math.inf if generator.bounds_groups else _GROUP_S
        if group_timeout <= 0:
            raise ConfigError(f"group_timeout={group_timeout}: more than 0 seconds")
        if store is not None and not generator.group_size:
            raise ConfigError("store: it keeps groups of a known size, and the generator has no group_size")
        super().__init__()
        self._store = store if isinstance(store, TrainingStore | None) else TrainingStore(store)
        self._keeps_itself = generator.keeps_rollouts
        if self._store is not None:
            generator.keeper = self._store
        self._teachers = teachers
        if teachers is not None:
            generator.keeper = TaughtFirst(generator.keeper, teachers)
        self._state: dict[str, Any] = {}  # that was loaded
        self._replays = True
        rule = StalenessRule(
            groups_per_step,
            max_staleness,
            max_staleness if ahead is None else ahead,
            None if batch_size is None else batch_size.largest,
        )
        budget = None if batch_size is None else batch_size.tokens
        if weights == "pinned":
            # Groups begun at an engine's version are trained by then, or within so many steps.
            generator.pin_weights(max_staleness + 1)
        self._schedule = GroupSchedule(plan, rule, order=order, token_budget=budget)
        self._generator = generator
        self._max_in_flight = math.inf if max_groups_in_flight is None else max_groups_in_flight
        self._group_timeout = group_timeout
        self._retry = retry
        self._busy_s = self._busy_since = 0.0  # groups were being generated for so long, and since then
        self._room = asyncio.Event()  # a group may be begun, perhaps
        self._on_group_failure = on_group_failure
        self._max_failures = max_failures
        self._filters = filters
        self._max_drops = max(100, 16 * groups_per_step) if max_drops is None else max_drops
        self._rank = rank
        policies: list[Policy] = [*filters, *([] if rank is None else [rank])]
        self._policies = list({id(policy): policy for policy in policies}.values())  # one object may be both
        self._check_tokens = token_versions == "check" and not generator.replays
        self._drains = weights == "drain"
        self._weight_timeout = weight_timeout
        self._failures = self._drops = 0  # one after the other
        self._engine_version = 0
        self._updating = False
        self._sending: asyncio.Task[Any] | None = None  # the last update, which may be late
        self._held = False  # nothing is begun
        self._asked_at = self._busy_before = 0.0
        self._asked_in_vain = False
        self._current: StepTime | None = None
        self.counters = GroupCounters()
        self._dropped = 0  # of them, those told with the batches before
        self.times = StepTimes()
        """The times of each whole step."""

    @property
    def step(self) -> int:
        """Batches trained so far: the trainer's version."""
        return self._schedule.trained_steps

    @property
    def engine_version(self) -> int:
        """The version that groups begun now are stamped with; during an update, the one before it."""
        return self._engine_version

    @property
    def under_way(self) -> StepTime | None:
        """The step that was begun by the last `next_batch`, up to now; None before the first one.

        It ends with the next `next_batch`, or `stop`. Its figures may be corrected by the caller until then.
        """
        if self._current is not None:
            self._current.total_s = time.monotonic() - self._asked_at
            self._current.engine_busy_s = self._busy_seconds() - self._busy_before
        return self._current

    @property
    def waiting(self) -> list[Group]:
        """The groups that are finished and not delivered: the memory that asynchrony costs."""
        with self._changed:
            return self._schedule.waiting

    def get_pending_count(self) -> int:
        """Batches that the groups now being generated amount to, rounded up."""
        return -(-self._schedule.generating // self._schedule.rule.groups_per_step)

    def staleness_histogram(self) -> Counter[int]:
        """Groups delivered so far, by staleness."""
        return self.times.histogram + Counter([] if self._current is None else self._current.staleness)

    def start(self, engine_version: int | None = None, *, weights: str | None = None) -> None:
        """Starts the generator and begins groups.

        Args:
            engine_version: what the engine serves then; None: the trainer's, 0 or that of the loaded state.
            weights: given to the engine before the first group, as by `update_weights`, with `engine_version`. A new
                engine needs them after `load_state_dict`, even one that loaded them itself: it believes that
                they are version 0. None: it serves that version.

        Raises:
            WeightUpdateError: the engine did not take `weights`.
            Exception: the generator's own, when it cannot start.
        """
        if self._thread is not None:
            raise TrainingError("these batches were started before")
        version = self.step if engine_version is None else engine_version
        self._check_version(version)
        self._engine_version, self._held = version, weights is not None
        try:
            self._start_thread()
            if weights is not None:
                self._push(weights, version, self._weight_timeout)
        except BaseException as error:  # Ctrl-C while an engine loads, too: nobody else would end it
            self._fail(error)
            self.stop()
            raise
        self._release()

    def stop(self, timeout: float = STOP_S) -> bool:
        self._end_step()
        return super().stop(timeout)

    def __iter__(self) -> Iterator[GroupBatch]:
        """Yields all batches. Asking for the next one marks the last as trained, unless the loop did.

        The loop's body updates the weights after `trained`, or not at all (an engine that shares the
        trainer's weights still has to be told its version: `update_weights()`).
        """
        while True:
            try:
                batch = self.next_batch()
            except PlanEndedError:
                return
            yield batch
            if self.step == batch.step:
                self.trained(batch.step)

    def next_batch(self, timeout: float | None = 300.0) -> GroupBatch:
        """The next batch to train on.

        Args:
            timeout: seconds, 0 for what is there already; None: as long as generation goes on.

        Raises:
            BatchTimeoutError: it did not come in time; ask again.
            GenerationFailedError: generation has ended, the cause is its `__cause__`.
            GenerationStoppedError: it was stopped, or not started.
            PlanEndedError: the plan's last batch was delivered before.
            StalenessError: no batch can come until the trainer moves: it says how.
        """
        self._end_step()
        if not self._asked_in_vain:
            self._asked_at, self._busy_before = time.monotonic(), self._busy_seconds()
        self._asked_in_vain = False
        batch = self._wait_for(self._deliver, timeout)
        waiting = self.waiting
        if batch is None:
            self._asked_in_vain = True
            schedule = self._schedule
            raise BatchTimeoutError(
                f"batch {schedule.next_step} did not come within {timeout:g} s: of its "
                f"{schedule.rule.groups_per_step} groups {len(waiting)} groups are finished and "
                f"{schedule.generating} are being generated; {self._describe()}"
            )
        groups = batch.groups
        self._current = StepTime(
            step=batch.step,
            wait_s=batch.wait_s,
            generation_s=mean([group.generation_s for group in groups]),
            generation_max_s=max(group.generation_s for group in groups),
            queue_s=mean([batch.delivered_at - group.finished_at for group in groups]),
            staleness=batch.staleness,
            unscored=unscored_share(batch.rollouts),
            waiting_rollouts=sum(len(group.rollouts) for group in waiting),
            waiting_tokens=sum(group.tokens for group in waiting),
            dropped=self.counters.dropped - self._dropped,
        )
        self._dropped += self._current.dropped
        return batch

    def trained(self, step: int, scored: Sequence[Sequence[Rollout]] = ()) -> None:
        """Notes that batch `step` was trained: a state saved from now on does not owe it any more.

        Args:
            step: of the batch.
            scored: of each group of the batch the rollouts that the trainer gave other rewards than they had: readers
                of the store see these.

        Raises:
            GenerationFailedError: with a store, which generation has closed when it ended.
        """
        if self._store is not None:
            # Before anybody counts on it, and without the lock: the disk may be slow.
            try:
                groups = self._schedule.delivered(step)
                self._store.trained(step, groups, self._schedule.watermark, scored)
            except StorageError:
                self.raise_if_over()
                raise
        with self._changed:
            groups = self._schedule.trained(step)
            for group in groups:
                self._tell("observe", group)
            self._moved()
        if self._current is not None and self._current.step == step:
            self._current.train_s = time.monotonic() - self._asked_at - self._current.wait_s

    def update_weights(
        self, source: str = "", version: int | None = None, *, timeout: float | None = None
    ) -> None:
        """Gives the engine the trainer's weights; returns when it has them.

        Updates reach the engine one after the other, however late one of them is. While no engine is there,
        an update is sent again and again, within its time.

        Args:
            source: what the generator's engine understands by it; "" for weights that it shares.
            version: of the weights; None: the trainer's, the number of batches trained.
            timeout: seconds; None: `weight_timeout`.

        Raises:
            WeightUpdateError: the engine refused (the cause is attached), or it took too long. Groups go on
                to be stamped with the version before. It may be tried again. An update that took too long is
                not called back: the next one waits until it has ended, and cuts it off when it does not.
            GenerationFailedError: generation has ended.
        """
        timeout = self._weight_timeout if timeout is None else timeout
        if version is None:
            version = self.step
            if version == self._engine_version and self._schedule.untrained:
                raise WeightUpdateError(
                    f"the engine is at version {version} already, for batch {version} is not trained: call "
                    f"trained({version}) before, or name the version of weights in the middle of a batch"
                )
        self._check_version(version)
        began = drained = time.monotonic()
        self.raise_if_over()
        with self._changed:
            if version < self._engine_version:
                raise WeightUpdateError(
                    f"the engine is at version {self._engine_version}, which does not fall to {version}"
                )
            self._updating, self._held = True, self._drains
        try:
            if self._drains:
                if not self._wait_for(lambda: None if self._schedule.generating else True, timeout):
                    raise WeightUpdateError(
                        f"{self._schedule.generating} groups are still being generated after {timeout:g} s of "
                        "waiting for an idle engine: give it longer (weight_timeout), or update in flight "
                        f"(weights='in_flight'); {self._describe()}"
                    )
                drained = time.monotonic()
            self._push(source, version, began + timeout - drained)
            self._engine_version = version  # else the old stamp stays, which is never too new
        finally:
            self._release()
        if self._current is not None:
            self._current.weights_s += time.monotonic() - began
            self._current.drain_s += drained - began

    def ledger(self) -> Ledger:
        """What became of each rollout that was begun, by the store. Reads all of its keys.

        Raises:
            ConfigError: there is no store.
        """
        if self._store is None or (found := read_ledger(self._store.root)) is None:
            raise ConfigError("these batches have no store: give one by BatchesAhead(store=…)")
        return found

    def state_dict(self) -> dict[str, Any]:
        """The trained positions, and what the plan and the policies have learnt, as JSON values.

        Save it with the weights of the same step. What was delivered and not trained is owed again, but for what a
        store has.
        """
        with self._changed:
            learnt = {
                policy.name: policy.state_dict() for policy in self._policies if hasattr(policy, "state_dict")
            }
            state = {**self._schedule.state_dict(), "policies": learnt}
        if self._store is not None:
            self._store.checkpoint(state["step"])
            state["store"] = self._store.run_id or self._state.get("store")
        return state

    def load_state_dict(self, state: dict[str, Any], *, replay: bool = True) -> None:
        """Goes on after what was trained. Call it before `start(weights=…)`, with the weights of that step.

        Args:
            state: of `state_dict`.
            replay: whether batches that were trained after it was saved are trained again from the store, and groups
                that were finished are used. False: all that is newer is set aside, as for a change of mind.

        Raises:
            ConfigError: the state is of another plan; nothing is changed then.
            TrainingError: it has been started.
        """
        if self._thread is not None:
            raise TrainingError("load_state_dict comes before start")
        self._schedule.load_state_dict(state)
        self._state, self._replays = state, replay
        for policy in self._policies:
            if policy.name in state.get("policies", {}) and hasattr(policy, "load_state_dict"):
                policy.load_state_dict(state["policies"][policy.name])

    # --- in the generation thread

    async def _open(self) -> None:
        await self._generator.start()
        if self._store is None and self._teachers is None:
            return
        facts = await in_daemon_thread(self._generator.store_facts)
        if self._teachers is not None:
            await self._teachers.start(None if facts is None else facts.tokenizer)
        if self._store is not None:
            facts = facts or plain_facts(self._generator.group_size)
            made = {} if self._teachers is None else self._teachers.made
            await self._restore(self._store, replace(facts, streams=made))

    async def _restore(self, store: TrainingStore, facts: StoreFacts) -> None:
        """Opens the store, and takes up the groups that it has from before a restart."""
        schedule, generator, size = self._schedule, self._generator, self._generator.group_size
        settled = schedule.settled
        resume = Resume(schedule.plan, self.step, settled, self._state.get("store"), self._replays)
        restored = await store.open(
            facts,
            resume,
            rows=schedule.rule.groups_per_step * size,
            whole_groups=not self._keeps_itself,
            keep_turns=generator.keep_turns,
            prompt_key=generator.prompt_key,
        )
        with self._changed:
            late = schedule.restore(restored.groups, restored.batches, restored.dropped)
        learns = any(hasattr(one, "observe_dropped") for one in (schedule.plan, *self._policies))
        async for group in store.filtered(restored.dropped if learns else ()):
            with self._changed:
                self._tell("observe_dropped", group)
        last = schedule.rule.max_staleness
        await store.set_aside(
            {
                group.position: f"begun with version {group.start}, not trained by step {group.start + last}"
                for group in late
            }
        )

    async def _close(self) -> None:
        try:
            await self._generator.close()
        finally:
            try:
                if self._teachers is not None:
                    await self._teachers.close()
            finally:
                if self._store is not None:
                    await self._store.close()

    async def _work(self) -> None:
        async with asyncio.TaskGroup() as running:
            while True:
                self._room.clear()
                while (group := self._begin()) is not None:
                    running.create_task(self._generate(group))
                await self._room.wait()

    def _begin(self) -> Group | None:
        with self._changed:
            if self._over or self._held or self._schedule.generating >= self._max_in_flight:
                return None
            try:
                group = self._schedule.admit(self._engine_version)
            except Exception as error:  # the plan's
                self._fail(error)
                return None
            if group is not None:
                if self._store is not None:
                    self._store.begin(group)
                self.counters.begun += 1
                group.begun_at = time.monotonic()
                if self._schedule.generating == 1:
                    self._busy_since = group.begun_at
            return group

    async def _generate(self, group: Group) -> None:
        result: Any
        try:
            result, group.attempts = await try_within(
                lambda: self._make(group.planned),
                str(group),
                self._retry,
                self._group_timeout,
                "group_timeout",
            )
        except Exception as error:
            result = error
        group.finished_at = time.monotonic()
        with self._changed:
            if not self._over:
                try:
                    self._settle(group, result)
                except Exception as error:
                    self._fail(error)
                if not self._schedule.generating:
                    self._busy_s += group.finished_at - self._busy_since
                self._changed.notify_all()
        self._room.set()

    async def _make(self, planned: PlannedGroup) -> Sequence[Any]:
        """Makes a group's rollouts. Where there is a store, they are in it when this returns; so with teachers."""
        if self._keeps_itself or (self._store is None and self._teachers is None):
            return await self._generator.generate(planned)
        keeper = self._generator.keeper
        kept = await keeper.kept(planned)
        if kept.is_whole:
            return [one for _, one in sorted(kept.results.items())]
        rollouts = await self._generator.generate(planned)
        if self._store is not None and len(rollouts) > self._generator.group_size:
            raise ConfigError(f"store: the generator gave {len(rollouts)} rollouts, more than its group_size")
        for rollout in rollouts:
            if not isinstance(rollout, Rollout):
                raise ConfigError(
                    f"store and teachers take rollstream.Rollout, the generator gave {rollout!r:.100}"
                )
        await asyncio.gather(*(keeper.keep(planned, place, one) for place, one in enumerate(rollouts)))
        return rollouts

    def _settle(self, group: Group, result: Any) -> None:
        """Keeps a group, or has it replaced. What this raises ends generation."""
        if not isinstance(result, Exception):
            result = self._wrong_with(group, result) or result
        if isinstance(result, DroppedGroupError):
            self._drop(group, str(result))
        elif isinstance(result, Exception):
            self._replace_failed(group, result)
        else:
            group.rollouts, group.tokens = result, count_tokens(result)
            self.counters.finished += 1
            self._failures = 0
            chosen_before = self._store is not None and self._store.is_whole(group)
            for policy in () if chosen_before else self._filters:
                if (reason := policy.drops(group)) is not None:
                    if not isinstance(reason, str):
                        raise ConfigError(f"filter {policy.name!r}: drops() says why, not {reason!r:.100}")
                    self._tell("observe_dropped", group)
                    self._drop(group, reason)
                    return
            self._drops = 0
            if self._store is not None:
                self._store.ended(group)
            rank = float(self.counters.finished) if self._rank is None else self._rank.rank(group)
            self._schedule.finish(group.position, rank=rank, tokens=group.tokens)

    def _wrong_with(self, group: Group, rollouts: Any) -> TrainingError | None:
        if not isinstance(rollouts, Sized) or not len(rollouts):
            return GroupFailedError(
                f"the generator returned {rollouts!r:.100} for {group}: a group is a sequence of rollouts, "
                "one at least (raise DroppedGroupError for a group that is not wanted)"
            )
        versions = token_versions(rollouts) if self._check_tokens else []  # type: ignore[arg-type]
        if versions and min(versions) < group.start:
            return StalenessError(
                f"the engine stamped tokens with version {min(versions)}, but was at version {group.start} "
                f"when {group} was begun: a replica missed an update, an engine that is new was not told its "
                "version (start(weights=…)), or it does not stamp versions (token_versions='ignore' then)"
            )
        return None

    def _drop(self, group: Group, reason: str) -> None:
        self._schedule.drop(group.position)
        if self._store is not None:
            self._store.dropped(group, reason, failed=False)
        self.counters.dropped += 1
        self._failures, self._drops = 0, self._drops + 1
        if self._drops > self._max_drops:
            raise TrainingError(
                f"{self._drops} groups were thrown away one after the other, the last one because {reason}: "
                "nothing is left to train on"
            )

    def _replace_failed(self, group: Group, error: Exception) -> None:
        if self._on_group_failure == "fail" or isinstance(error, EngineLostError | StorageError):
            raise error  # no other group would fare better without an engine, or a disk
        self._failures += 1
        if self._failures > self._max_failures:
            raise GenerationFailedError(
                f"{self._failures} groups failed one after the other, the last one with "
                f"{type(error).__name__}: {error}"
            ) from error
        logger.warning("%s failed and is replaced: %s: %s", group, type(error).__name__, error)
        self._schedule.drop(group.position, failed=True)
        if self._store is not None:
            self._store.dropped(group, f"{type(error).__name__}: {error}", failed=True)
        self.counters.failed += 1

    async def _send(self, source: str, version: int, timeout: float) -> None:
        """Lets the engine take an update, after the one before has ended."""
        until = time.monotonic() + timeout
        if self._sending is not None and not await _ends(self._sending, until):
            if not self._sending.cancelling():  # a second time would cut off how it cleans up
                self._sending.cancel()
            raise WeightUpdateError(
                f"an update before version {version} has been on its way to the engine all the while: it is cut "
                "off now, try again (and give weight_timeout more than the engine's own time limits)"
            )
        trying = try_again(
            lambda: self._generator.update_weights(source, version),
            f"weights of version {version}",
            _UPDATE_AGAIN,
            until=until,
        )
        self._sending = asyncio.create_task(trying)
        self._sending.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen
        if not await _ends(self._sending, until):
            raise _late(version, timeout)
        try:
            self._sending.result()
        except Exception as error:
            refusal = f"the engine did not take version {version}: {type(error).__name__}: {error}"
            raise WeightUpdateError(refusal) from error

    # --- in the trainer's thread

    def _deliver(self) -> GroupBatch | None:
        schedule = self._schedule
        batch = schedule.deliver(self._engine_version)
        if batch is None:
            if schedule.ended:
                raise PlanEndedError(f"the plan has ended: batch {schedule.next_step} is not in it")
            self._call_soon(
                self._room.set
            )  # asking may make room, and so does what a batch takes while it fills up
            reason = schedule.blocked(self._engine_version)
            if reason is not None and not self._updating:
                raise StalenessError(reason)
            return None
        begun = min(group.begun_at for group in batch.groups)
        self._times.append(max(group.finished_at for group in batch.groups) - begun)
        self._moved()
        batch.delivered_at = time.monotonic()
        batch.wait_s = batch.delivered_at - self._asked_at
        return batch

    def _push(self, source: str, version: int, timeout: float) -> None:
        """Has `_send` done in the engine's event loop."""
        try:
            self.run(lambda: self._send(source, version, timeout), timeout + _CAUSE_S)
        except BatchTimeoutError as error:  # the event loop is blocked
            raise _late(version, timeout) from error

    def _check_version(self, version: int) -> None:
        if type(version) is not int or not 0 <= version <= self.step:
            raise ConfigError(f"version {version!r} of the weights: a number of updates, 0 to {self.step}")

    def _busy_seconds(self) -> float:
        return self._busy_s + (time.monotonic() - self._busy_since if self._schedule.generating else 0.0)

    def _end_step(self) -> None:
        if (current := self.under_way) is not None:
            self.times.add(current)
            self._current = None

    def _tell(self, learns: str, group: Group) -> None:
        """Tells plan, filters and rank of a group, if they learn."""
        for learner in (self._schedule.plan, *self._policies):
            if (learn := getattr(learner, learns, None)) is not None:
                learn(group)

    def _release(self) -> None:
        """Groups may be begun again."""
        with self._changed:
            self._updating = self._held = False
            self._moved()

    def _moved(self) -> None:
        self._changed.notify_all()
        self._call_soon(self._room.set)


def _late(version: int, timeout: float) -> WeightUpdateError:
    return WeightUpdateError(
        f"the engine has not taken version {version} within {timeout:.1f} s (weight_timeout); what it was sent "
        "may still come, and the next update waits for its end"
    )


async def _ends(task: "asyncio.Task[Any]", until: float) -> bool:
    await asyncio.wait({task}, timeout=max(0.0, until - time.monotonic()))
    return task.done()
