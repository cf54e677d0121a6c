"""Batches that are generated ahead of the step: what a training loop holds in its hands.

    with BatchesAhead(ShuffledPlan(len(rows)), generator, groups_per_step=32) as batches:
        for _ in range(steps):
            batch = batches.next_batch()                # waits only if it must
            train_on(batch)
            batches.trained(batch.step)                 # from now on it is never delivered again
            save(model, batches.state_dict())           # a checkpoint: both, or neither
            batches.update_weights("path/to/weights")   # the engine is at version batch.step + 1

The trainer's thread calls everything here; the generator's coroutines run in a thread of their own.
"""

import math
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, get_args

from rollstream.errors import ConfigError, PlanEndedError, TrainingError
from rollstream.rollout.retry import RetryPolicy
from rollstream.training.generation_thread import GenerationThread, OnGroupFailure
from rollstream.training.generator import GroupGenerator
from rollstream.training.group import GroupBatch, unscored_share
from rollstream.training.group_buffer import BufferCounters, GroupBuffer
from rollstream.training.plan import Plan
from rollstream.training.schedule import GroupSchedule, Order
from rollstream.training.selection import GroupFilter, GroupRank, TokenBudget
from rollstream.training.staleness import StalenessRule
from rollstream.training.timing import StepTime, StepTimes, mean
from rollstream.training.versions import TokenVersions, VersionLedger
from rollstream.training.weight_updates import WeightUpdates

T = TypeVar("T")

WeightMode = Literal["drain", "in_flight"]
"""`drain`: an update waits until nothing is being generated; `in_flight`: it comes between the tokens of what
is, whose per-token versions tell."""

_RETRY = RetryPolicy(max_attempts=3, delay=1.0, delay_max=30.0)
"""As the configuration's defaults for rollouts."""

_START_S = 600.0
"""For a generator to get ready: engines that load large models take minutes."""

_GROUP_S = 300.0
"""For one group: as long as trainers with asynchronous generation wait for a whole batch."""

_MAX_FAILURES = 8
"""Groups in a row that may fail: as many do not fail by chance."""


class BatchesAhead:
    """An endless (or finite) sequence of batches, generated while the trainer works on earlier ones.

    Args:
        plan: which prompt row stands where.
        generator: makes the groups.
        groups_per_step: groups of a batch, > 0.
        max_staleness: steps by which a group may be older than the weights that it trains, >= 0: a bound that
            holds always, by pacing and never by throwing away. None: none is kept; order and window bound it
            only as long as the engine gets every update before the next batch is asked for.
        ahead: batches that may be there or on their way beyond the one being trained, >= 0; 0 generates only
            between the steps. None: `max_staleness` (or 1).
        order: `plan`: batches hold the plan's groups in order, whatever finishes first: the same sequence
            every time. `first`: what is finished first, as far as the bound allows.
        window: with `first`: groups within which it may differ from the plan's order; None: no limit.
        max_groups_in_flight: groups being generated at once at most; None: all that may be begun.
        group_timeout: seconds for one group, retries included; infinity: none. None: 300, and none for a
            generator that says that it bounds its groups itself (`bounds_groups`), as `RolloutGroups`.
        retry: for errors of the generator's that may pass.
        on_group_failure: what happens when a group has failed for good.
        max_failures: groups that may fail one after the other, with `drop_and_refill`.
        filters: each may throw finished groups away; they are replaced.
        max_drops: groups that filters may throw away one after the other; None: 16 batches, at least 100.
        rank: what goes first with `order="first"`; None: what finished first.
        batch_size: batches of a dynamic size, in place of `groups_per_step` (which must be its `smallest`);
            with a `max_staleness` of 1 or more.
        token_versions: `ignore` what an engine stamps on tokens that does not know versions.
        weights: whether weight updates wait for an idle engine.
        weight_timeout: seconds for a weight update, that wait included.
        start_timeout: seconds for the generator to get ready.

    Raises:
        ConfigError: these do not go together.
    """

    def __init__(
        self,
        plan: Plan,
        generator: GroupGenerator,
        *,
        groups_per_step: int,
        max_staleness: int | None = 1,
        ahead: int | None = None,
        order: Order = "plan",
        window: int | None = None,
        max_groups_in_flight: int | None = None,
        group_timeout: float | None = None,
        retry: RetryPolicy = _RETRY,
        on_group_failure: OnGroupFailure = "fail",
        max_failures: int = _MAX_FAILURES,
        filters: Sequence[GroupFilter] = (),
        max_drops: int | None = None,
        rank: GroupRank | None = None,
        batch_size: TokenBudget | None = None,
        token_versions: TokenVersions = "check",
        weights: WeightMode = "drain",
        weight_timeout: float = 300.0,
        start_timeout: float = _START_S,
    ) -> None:
        for name, value, there_is in (
            ("on_group_failure", on_group_failure, get_args(OnGroupFailure)),
            ("weights", weights, get_args(WeightMode)),
            ("token_versions", token_versions, get_args(TokenVersions)),
        ):
            if value not in there_is:
                raise ConfigError(f"{name}={value!r}: {' or '.join(map(repr, there_is))}")
        if batch_size is not None and batch_size.smallest != groups_per_step:
            raise ConfigError(
                f"groups_per_step={groups_per_step} must be batch_size.smallest={batch_size.smallest}: what "
                "the staleness rule counts on"
            )
        if max_groups_in_flight is not None and max_groups_in_flight < 1:
            raise ConfigError(f"max_groups_in_flight={max_groups_in_flight}: at least 1")
        if ahead is None:
            ahead = 1 if max_staleness is None else max_staleness
        rule = StalenessRule(
            groups_per_step, max_staleness, ahead, None if batch_size is None else batch_size.largest
        )
        self._schedule = GroupSchedule(
            plan,
            rule,
            order=order,
            window=window,
            token_budget=None if batch_size is None else batch_size.tokens,
        )
        self._ledger = VersionLedger(token_versions=token_versions)
        self._buffer = GroupBuffer(
            self._schedule, self._ledger, rank=rank, filters=filters, describe=lambda: self._thread.describe()
        )
        self._thread = GenerationThread(
            self._buffer,
            generator,
            max_groups_in_flight=max_groups_in_flight,
            group_timeout=_group_timeout(group_timeout, generator),
            retry=retry,
            on_group_failure=on_group_failure,
            max_failures=max_failures,
            max_drops=max(100, 16 * groups_per_step) if max_drops is None else max_drops,
        )
        self._updates = WeightUpdates(self._thread, generator, self._buffer.raise_if_broken)
        self._weights = weights
        self._weight_timeout = weight_timeout
        self._start_timeout = start_timeout
        self._started = False
        self._asked_at = 0.0
        self._busy_before = 0.0
        self._current: StepTime | None = None
        self.times = StepTimes()
        """Where the time of each whole step went."""

    @property
    def bound(self) -> int | None:
        """The staleness that no group ever exceeds, whatever the engine does: `max_staleness`.

        None: there is no such bound. (A window has one, as long as the engine gets every update.)
        """
        return self._schedule.rule.max_staleness

    @property
    def step(self) -> int:
        """Batches trained so far: the trainer's version."""
        return self._schedule.trained_steps

    @property
    def engine_version(self) -> int:
        """What groups that are begun now are stamped with."""
        return self._ledger.engine_version

    @property
    def counters(self) -> BufferCounters:
        """Groups begun, finished, dropped, failed and trained on."""
        return self._buffer.counters

    @property
    def under_way(self) -> StepTime | None:
        """The step that was begun by the last `next_batch`, up to now; None before the first one.

        It ends with the next `next_batch`, or `stop`; what happens to be known better of it may be changed.
        """
        if self._current is not None:
            self._current.total_s = time.monotonic() - self._asked_at
            self._current.engine_busy_s = self._thread.busy_seconds() - self._busy_before
        return self._current

    def get_pending_count(self) -> int:
        """Batches that are begun, and whose groups are not all there yet."""
        return -(-self._schedule.generating // self._schedule.rule.groups_per_step)

    def get_average_generation_time(self) -> float:
        """Seconds for the slowest group of a batch, on the average; 0.0 before the first batch."""
        return mean([step.generation_max_s for step in self.times.steps])

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Runs a coroutine in the generator's event loop. Raises `GenerationStoppedError`."""
        return self._thread.submit(coroutine)

    def raise_if_over(self) -> None:
        """Raises `GenerationFailedError`, with the cause, or `GenerationStoppedError` when there is nothing
        to wait for any more.
        """
        self._buffer.raise_if_broken()

    def staleness_histogram(self) -> Counter[int]:
        """Groups delivered so far, by staleness."""
        return Counter(self._ledger.histogram)

    def start(self, engine_version: int | None = None, *, weights: str | None = None) -> None:
        """Starts the generator and begins groups.

        Args:
            engine_version: what the engine serves then; None: the trainer's, 0 or that of the loaded state.
            weights: given to the engine before the first group, as by `update_weights`, with
                `engine_version`: what a new engine needs after `load_state_dict`, also one that has loaded
                these weights by itself, for it takes them for version 0. None: it serves that version.

        Raises:
            WeightUpdateError: the engine did not take `weights`.
            Exception: the generator's own, when it cannot start.
        """
        if self._started:
            raise TrainingError("these batches were started before")
        version = self._schedule.trained_steps if engine_version is None else engine_version
        self._check_version(version)
        self._started = True
        self._ledger.engine_version = version
        if weights is not None:
            self._buffer.begin_update(version, hold=True)
        self._thread.start(self._start_timeout)
        if weights is None:
            return
        timeout = self._weight_timeout
        try:
            self._updates.push(weights, version, timeout=timeout, whole=timeout)
        except BaseException as error:
            self._buffer.fail(error)
            self.stop()
            raise
        self._buffer.end_update(taken=True)

    def stop(self, timeout: float = 10.0) -> bool:
        """Ends generation: what is in flight is cut off. Idempotent.

        Returns:
            whether the generation thread ended within `timeout` seconds; one that hangs is left behind.
        """
        self._end_step()
        return self._thread.stop(timeout)

    def __enter__(self) -> Self:
        if not self._started:
            self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def __iter__(self) -> Iterator[GroupBatch]:
        """All batches; that before is reported as trained when the next one is asked for, if it was not.

        The loop's body updates the weights after `trained`, or not at all (an engine that shares the
        trainer's weights still has to be told its version: `update_weights()`).
        """
        while True:
            try:
                batch = self.next_batch()
            except PlanEndedError:
                return
            yield batch
            if self._schedule.trained_steps == batch.step:
                self.trained(batch.step)

    def next_batch(self, timeout: float | None = 300.0) -> GroupBatch:
        """The next batch to train on, see `GroupBuffer.get` for its errors.

        Args:
            timeout: seconds, 0 for what is there already; None: as long as generation goes on.
        """
        if not self._started:
            raise TrainingError("start() comes first")
        self._end_step()
        self._asked_at = time.monotonic()
        self._busy_before = self._thread.busy_seconds()
        batch = self._buffer.get(timeout)
        self._current = StepTime(
            step=batch.step,
            wait_s=batch.wait_s,
            generation_s=mean([group.generation_s for group in batch.groups]),
            generation_max_s=max(group.generation_s for group in batch.groups),
            queue_s=mean([batch.delivered_at - group.finished_at for group in batch.groups]),
            staleness=batch.staleness,
            unscored=unscored_share(batch.rollouts),
        )
        return batch

    def trained(self, step: int) -> None:
        """Batch `step` has been trained: a state saved from now on does not owe it any more."""
        self._buffer.trained(step)
        if self._current is not None and self._current.step == step:
            self._current.train_s = time.monotonic() - self._asked_at - self._current.wait_s

    def update_weights(
        self, source: str = "", version: int | None = None, *, timeout: float | None = None
    ) -> None:
        """Gives the engine the trainer's weights; returns when it has them.

        Args:
            source: what the generator's engine understands by it; "" for weights that it shares.
            version: of the weights; None: the trainer's, the number of batches trained.
            timeout: seconds; None: `weight_timeout`.

        Raises:
            WeightUpdateError: the engine refused (the cause is attached), or it took too long. Groups go on
                to be stamped with the version before. It may be tried again; an update that took too long is
                not called back, and the next one waits until it has ended.
            GenerationFailedError: generation has ended.
        """
        timeout = self._weight_timeout if timeout is None else timeout
        version = self._schedule.trained_steps if version is None else version
        self._check_version(version)
        began = time.monotonic()
        self._buffer.raise_if_broken()
        self._buffer.begin_update(version, hold=self._weights == "drain")
        taken = False
        try:
            if self._weights == "drain":
                self._buffer.wait_idle(timeout)
            drained = time.monotonic()
            self._updates.push(source, version, timeout=began + timeout - drained, whole=timeout)
            taken = True
        finally:
            self._buffer.end_update(taken=taken)
        if self._current is not None:
            self._current.weights_s += time.monotonic() - began
            self._current.drain_s += drained - began

    def state_dict(self) -> dict[str, Any]:
        """What has been trained on, and what the plan and the policies have learnt: JSON values.

        Save it with the weights of the same step. What was delivered and not trained is owed again.
        """
        return self._buffer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on after what was trained; before `start`, which gives the engine the weights of that step.

        Raises:
            ConfigError: the state is of another plan; nothing is changed then.
        """
        if self._started:
            raise TrainingError("load_state_dict comes before start")
        self._buffer.load_state_dict(state)

    def _check_version(self, version: int) -> None:
        if not 0 <= version <= self._schedule.trained_steps:
            raise ConfigError(
                f"version {version} of the weights: the trainer has made {self.step} updates, "
                "and a version is a number of updates"
            )

    def _end_step(self) -> None:
        """The step under way is whole."""
        current = self.under_way
        if current is not None:
            self.times.add(current)
            self._current = None


def _group_timeout(asked: float | None, generator: GroupGenerator) -> float | None:
    if asked is None:
        return None if getattr(generator, "bounds_groups", False) else _GROUP_S
    if asked <= 0:
        raise ConfigError(f"group_timeout={asked}: more than 0 seconds")
    return None if math.isinf(asked) else asked
