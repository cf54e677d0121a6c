"""Real threads: what the trainer is given, and how each failure reaches it, within which time."""

import asyncio
import json
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from rollstream.errors import (
    BatchTimeoutError,
    ConfigError,
    DroppedGroupError,
    EngineLostError,
    EngineUnavailableError,
    GenerationFailedError,
    GenerationStoppedError,
    GroupFailedError,
    PlanEndedError,
    StalenessError,
    TrainingError,
    TransientError,
    WeightUpdateError,
)
from rollstream.rollout.retry import RetryPolicy
from rollstream.training.ahead import BatchesAhead
from rollstream.training.curriculum import Curriculum
from rollstream.training.generator import CallableGenerator
from rollstream.training.group import Group
from rollstream.training.plan import FunctionPlan, PlannedGroup, ShuffledPlan
from rollstream.training.selection import NoSignal, Priority, TokenBudget

SOON_S = 15.0
"""What must come at once comes within this, on a machine that is busy with other things, too."""

QUICK = RetryPolicy(max_attempts=3, delay=0.01, delay_max=0.02)

Generate = Callable[[PlannedGroup], Awaitable[Sequence[Any]]]


async def echo(group: PlannedGroup) -> list[int]:
    await asyncio.sleep(0.001 * (group.position * 7 % 5))
    return [group.index]


def batches_of(
    generate: Generate = echo, *, rows: int = 10, epochs: int | None = None, **options: Any
) -> BatchesAhead:
    pushed = options.pop("update", None)
    generator = CallableGenerator(generate, update_weights=pushed)
    options = {"groups_per_step": 4, "retry": QUICK, "weight_timeout": 10.0, **options}
    return BatchesAhead(ShuffledPlan(rows, seed=5, epochs=epochs), generator, **options)


def train(batches: BatchesAhead, steps: int, *, timeout: float = 20.0) -> list[list[int]]:
    """Positions of each batch."""
    sequence = []
    for _ in range(steps):
        batch = batches.next_batch(timeout)
        sequence.append([group.position for group in batch.groups])
        batches.trained(batch.step)
        batches.update_weights()
    return sequence


@contextmanager
def within(seconds: float = SOON_S) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


def causes(error: BaseException) -> list[BaseException]:
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    return chain


# --- what comes


@pytest.mark.parametrize(
    ("option", "there_is"),
    [
        ({"on_group_failure": "drop"}, "'fail' or 'drop_and_refill'"),
        ({"weights": "inflight"}, "'drain' or 'in_flight'"),
        ({"token_versions": "x"}, "'check' or 'ignore'"),
        ({"order": "last"}, "'plan' or 'first'"),
    ],
)
def test_words_that_it_does_not_know_are_refused(option: dict[str, Any], there_is: str) -> None:
    with pytest.raises(ConfigError, match=there_is):
        batches_of(**option)


@pytest.mark.parametrize("most", [0, 1, 3])
def test_batches_in_the_plans_order_over_epochs(most: int) -> None:
    plan = ShuffledPlan(10, seed=5)
    with batches_of(max_staleness=most) as batches:
        for step in range(8):
            batch = batches.next_batch(20)
            assert batch.step == step
            assert [group.position for group in batch.groups] == list(range(4 * step, 4 * step + 4))
            assert [group.planned for group in batch.groups] == [
                plan.at(p) for p in range(4 * step, 4 * step + 4)
            ]
            assert batch.rollouts == [group.index for group in batch.groups]
            assert all(0 <= one <= most for one in batch.staleness)
            batches.trained(step)
            batches.update_weights()
        assert batches.staleness_histogram().total() == 32
        assert max(batches.staleness_histogram()) <= most == batches.bound


def test_the_first_finished_go_first() -> None:
    release = threading.Event()

    async def generate(group: PlannedGroup) -> list[int]:
        while group.position == 0 and not release.is_set():
            await asyncio.sleep(0.005)
        return [group.index]

    with batches_of(generate, order="first", max_staleness=2, ahead=2, weights="in_flight") as batches:
        first = train(batches, 2)
        assert 0 not in first[0] + first[1]
        threading.Timer(0.1, release.set).start()
        third = train(batches, 1)  # its last chance: the batch waits for it
        assert 0 in third[0]
        assert batches.staleness_histogram()[2] >= 1
        assert max(batches.staleness_histogram()) == 2


def test_a_finite_plan_ends_with_a_smaller_batch() -> None:
    with batches_of(epochs=1) as batches:
        seen = []
        for batch in batches:
            seen.append(len(batch.groups))
            batches.trained(batch.step)
            batches.update_weights()
        assert seen == [4, 4, 2]
        with pytest.raises(PlanEndedError, match="batch 3"):
            batches.next_batch(5)


def test_nothing_is_begun_beyond_what_may_be_trained_on() -> None:
    with batches_of(max_staleness=1) as batches:
        batch = batches.next_batch(20)
        deadline = time.monotonic() + 20
        while batches.counters.begun < 8 and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.1)  # long enough for more, if more was begun
        assert batches.counters.begun == 8
        batches.trained(batch.step)
        time.sleep(0.1)
        assert batches.counters.begun == 8  # weights are on their way: what was begun now would be stale
        batches.update_weights()
        batches.next_batch(20)
        deadline = time.monotonic() + 20
        while batches.counters.begun < 12 and time.monotonic() < deadline:
            time.sleep(0.005)
        assert batches.counters.begun == 12


def test_groups_at_once_are_bounded() -> None:
    now, most = 0, 0

    async def generate(group: PlannedGroup) -> list[int]:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.005)
        now -= 1
        return [0]

    with batches_of(generate, max_groups_in_flight=3, max_staleness=4) as batches:
        train(batches, 5)
    assert most == 3


def test_a_timeout_of_zero_is_zero() -> None:
    gate = threading.Event()

    async def generate(group: PlannedGroup) -> list[int]:
        while not gate.is_set():
            await asyncio.sleep(0.005)
        return [group.index]

    with batches_of(generate) as batches:
        with within(), pytest.raises(BatchTimeoutError, match="0 groups are finished"):
            batches.next_batch(0)
        with pytest.raises(TimeoutError):  # it is one of these, too
            batches.next_batch(0.05)
        gate.set()
        assert batches.next_batch(20).step == 0  # nothing was lost by asking


# --- failures of groups


async def boom(group: PlannedGroup) -> list[int]:
    if group.position == 5:
        raise KeyError("the environment is broken")
    return [group.index]


def test_a_generator_that_raises_reaches_the_trainer_at_once_with_the_cause() -> None:
    with batches_of(boom) as batches:
        with within(), pytest.raises(GenerationFailedError, match="the environment is broken") as raised:
            train(batches, 3)
        cause = causes(raised.value)[-1]
        assert isinstance(cause, KeyError)
        assert "in boom" in "".join(traceback.format_exception(raised.value))
        with pytest.raises(GenerationFailedError):  # it stays so
            batches.next_batch(0)


def test_a_waiting_trainer_is_woken() -> None:
    gate = threading.Event()

    async def generate(group: PlannedGroup) -> list[int]:
        while not gate.is_set():
            await asyncio.sleep(0.005)
        raise ValueError("now")

    with batches_of(generate) as batches:
        threading.Timer(0.1, gate.set).start()
        with within(), pytest.raises(GenerationFailedError, match="now"):
            batches.next_batch(None)


@pytest.mark.parametrize("returned", [[], None, 5])
def test_a_group_without_rollouts_has_failed(returned: Any) -> None:
    async def generate(group: PlannedGroup) -> Any:
        return returned if group.position == 2 else [group.index]

    with batches_of(generate) as batches:
        with within(), pytest.raises(GenerationFailedError, match=r"group 2 \(prompt \d+\)") as raised:
            batches.next_batch(20)
        assert isinstance(raised.value.__cause__, GroupFailedError)
    with batches_of(generate, on_group_failure="drop_and_refill") as batches:
        assert [group.position for group in batches.next_batch(20).groups] == [0, 1, 3, 4]


def test_nor_does_it_wait_for_what_is_slow_to_end() -> None:
    async def generate(group: PlannedGroup) -> list[int]:
        if group.position == 3:
            raise KeyError("broken")
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1.0)
        return []

    closing, closed = threading.Event(), list[bool]()

    async def close() -> None:
        closing.set()
        await asyncio.sleep(3.0)
        closed.append(True)

    batches = BatchesAhead(ShuffledPlan(9), CallableGenerator(generate, close=close), groups_per_step=4)
    batches.start()
    with pytest.raises(GenerationFailedError, match="broken"):
        batches.next_batch(20)
    assert not closed  # nobody waits for the end of the others
    assert batches.stop(timeout=0.1) is False
    assert closing.wait(20)
    assert batches.stop(timeout=20)
    assert closed  # `stop` does not cut off how it cleans up


def test_a_generator_is_closed_where_it_was_started() -> None:
    """What it opens may be bound to a task, as a cancel scope is."""
    tasks: list[asyncio.Task[Any] | None] = []

    async def note() -> None:
        tasks.append(asyncio.current_task())

    with BatchesAhead(
        ShuffledPlan(9), CallableGenerator(echo, start=note, close=note), groups_per_step=4
    ) as batches:
        train(batches, 1)
    assert len(tasks) == 2 and tasks[0] is tasks[1]


def test_a_cancellation_of_the_generators_own_is_a_failure_not_a_hang() -> None:
    async def generate(group: PlannedGroup) -> list[int]:
        raise asyncio.CancelledError

    with batches_of(generate) as batches, within(), pytest.raises(GenerationFailedError, match="escape"):
        batches.next_batch(20)


def test_a_plan_that_raises_reaches_the_trainer() -> None:
    def index_at(position: int) -> tuple[int, int]:
        if position == 5:
            raise ZeroDivisionError("the sampler")
        return 0, position

    plan = FunctionPlan(index_at, identity={})
    with (
        BatchesAhead(plan, CallableGenerator(echo), groups_per_step=2, max_staleness=0) as batches,
        within(),
        pytest.raises(GenerationFailedError, match="the sampler"),
    ):
        train(batches, 3)


def test_errors_that_may_pass_are_tried_again() -> None:
    tries: dict[int, int] = {}

    async def generate(group: PlannedGroup) -> list[int]:
        tries[group.position] = tries.get(group.position, 0) + 1
        if group.position == 2 and tries[2] < 3:
            raise TransientError("busy")
        return [group.index]

    with batches_of(generate) as batches:
        batch = batches.next_batch(20)
    assert [group.attempts for group in batch.groups] == [1, 1, 3, 1]


def test_but_not_for_ever() -> None:
    async def generate(group: PlannedGroup) -> list[int]:
        raise TransientError("busy")

    with batches_of(generate) as batches, within(), pytest.raises(GenerationFailedError, match="busy"):
        batches.next_batch(20)


def test_a_failed_group_is_replaced_by_the_plans_next() -> None:
    with batches_of(boom, on_group_failure="drop_and_refill") as batches:
        sequence = train(batches, 3)
        assert sequence == [[0, 1, 2, 3], [4, 6, 7, 8], [9, 10, 11, 12]]
        assert batches.counters.failed == 1


def test_failures_one_after_the_other_end_it() -> None:
    async def generate(group: PlannedGroup) -> list[int]:
        raise ValueError(f"no. {group.position}")

    with batches_of(generate, on_group_failure="drop_and_refill", max_failures=5) as batches:
        with (
            within(),
            pytest.raises(GenerationFailedError, match="6 groups failed one after the other") as raised,
        ):
            batches.next_batch(20)
        assert isinstance(causes(raised.value)[-1], ValueError)


def test_only_failures_and_drops_in_a_row_count() -> None:
    async def generate(group: PlannedGroup) -> list[Any]:
        if group.position % 3 == 1:
            raise ValueError("now and then")
        return scored(1.0, 1.0) if group.position % 3 == 2 else scored(0.0, 1.0)

    with batches_of(
        generate,
        on_group_failure="drop_and_refill",
        filters=[NoSignal()],
        max_failures=1,
        max_drops=1,
        max_groups_in_flight=1,  # one after the other, indeed
    ) as batches:
        assert train(batches, 2) == [[0, 3, 6, 9], [12, 15, 18, 21]]


def test_a_group_that_hangs_fails_at_its_time_limit() -> None:
    async def generate(group: PlannedGroup) -> list[int]:
        if group.position == 1:
            await asyncio.Event().wait()
        return [group.index]

    with (
        batches_of(generate, group_timeout=0.2) as batches,
        within(),
        pytest.raises(GenerationFailedError, match=r"group 1 .* longer than 0.2 s"),
    ):
        batches.next_batch(20)


def test_code_that_blocks_the_loop_is_named_and_left_behind() -> None:
    release = threading.Event()

    async def blocks_the_loop(group: PlannedGroup) -> list[int]:
        release.wait(30)  # does not await
        return [group.index]

    batches = batches_of(blocks_the_loop, max_groups_in_flight=1)
    batches.start()
    try:
        with pytest.raises(BatchTimeoutError, match="blocked for") as raised:
            batches.next_batch(4.0)
        assert "blocks_the_loop" in str(raised.value)
        with within():
            assert batches.stop(timeout=0.2) is False
        with pytest.raises(GenerationStoppedError):
            batches.next_batch(None)
    finally:
        release.set()


@pytest.mark.parametrize("way", ["exit", "stop the loop", "interrupt"])
def test_a_thread_that_dies_reaches_the_trainer(way: str) -> None:
    async def generate(group: PlannedGroup) -> list[int]:
        if way == "exit":
            sys.exit(3)
        if way == "interrupt":
            raise KeyboardInterrupt
        asyncio.get_running_loop().stop()
        await asyncio.sleep(5)
        return []

    batches = batches_of(generate)
    batches.start()
    with within(), pytest.raises(GenerationFailedError) as raised:
        batches.next_batch(20)
    assert raised.value.__cause__ is not None
    with within():
        assert batches.stop()


def test_an_engine_that_is_away_is_waited_for() -> None:
    back_at = 0.0
    asked = 0

    async def generate(group: PlannedGroup) -> list[int]:
        nonlocal back_at, asked
        asked += 1
        if group.position == 6 and not back_at:
            back_at = time.monotonic() + 0.5
        if time.monotonic() < back_at:
            raise EngineUnavailableError("gone")
        return [group.index]

    with batches_of(generate) as batches:
        sequence = train(batches, 4)
    assert sequence == [[4 * step + place for place in range(4)] for step in range(4)]
    assert asked > 16  # more often than three attempts would be


def test_an_engine_that_is_lost_ends_it_whatever_happens_to_groups() -> None:
    async def generate(group: PlannedGroup) -> list[int]:
        raise EngineLostError("away for 600 s")

    with (
        batches_of(generate, on_group_failure="drop_and_refill") as batches,
        within(),
        pytest.raises(GenerationFailedError, match="away for 600 s"),
    ):
        batches.next_batch(20)


# --- start and stop


def test_what_cannot_start_says_so_at_once() -> None:
    async def start() -> None:
        raise OSError("no such device")

    closed = []

    async def close() -> None:
        closed.append(True)

    batches = BatchesAhead(
        ShuffledPlan(3), CallableGenerator(echo, start=start, close=close), groups_per_step=1
    )
    with within(), pytest.raises(OSError, match="no such device"):
        batches.start()
    assert closed == [True]
    with pytest.raises(GenerationFailedError):
        batches.next_batch(1)


def test_what_does_not_get_ready_in_time_says_so() -> None:
    batches = BatchesAhead(
        ShuffledPlan(3),
        CallableGenerator(echo, start=lambda: asyncio.sleep(30)),
        groups_per_step=1,
        start_timeout=0.2,
    )
    with within(), pytest.raises(TrainingError, match=r"did not start within 0.2 s"):
        batches.start()
    with within(), pytest.raises(GenerationFailedError, match=r"did not start within 0.2 s"):
        batches.next_batch(20)


def test_a_close_that_fails_too_does_not_hide_why_it_did_not_start(caplog: Any) -> None:
    async def start() -> None:
        raise OSError("no such device")

    async def close() -> None:
        raise AttributeError("it has no session yet")

    generator = CallableGenerator(echo, start=start, close=close)
    batches = BatchesAhead(ShuffledPlan(3), generator, groups_per_step=1)
    with within(), pytest.raises(OSError, match="no such device"):
        batches.start()
    with pytest.raises(GenerationFailedError, match="no such device"):
        batches.next_batch(1)
    assert "AttributeError: it has no session yet" in caplog.text


def test_nothing_is_begun_before_the_first_weights_are_there() -> None:
    seen: list[Any] = []

    async def generate(group: PlannedGroup) -> list[int]:
        seen.append(group.position)
        return [group.index]

    async def update(source: str, version: int) -> None:
        await asyncio.sleep(0.05)
        seen.append((source, version))

    batches = batches_of(generate, update=update)
    batches.start(weights="checkpoint")
    with batches:
        batches.next_batch(20)
    assert seen[0] == ("checkpoint", 0)
    assert sorted(seen[1:5]) == [0, 1, 2, 3]


@pytest.mark.parametrize("way", ["refuse", "hang"])
def test_first_weights_that_are_not_taken_end_it(way: str) -> None:
    async def update(source: str, version: int) -> None:
        if way == "hang":
            await asyncio.Event().wait()
        raise ValueError("no such file")

    batches = batches_of(update=update, weight_timeout=0.2)
    with within(), pytest.raises(WeightUpdateError, match=r"no such file|within 0\.2 s"):
        batches.start(weights="checkpoint")
    assert batches.counters.begun == 0
    with within(), pytest.raises(GenerationFailedError, match=r"no such file|within 0\.2 s"):
        batches.next_batch(20)


def test_stop_in_the_middle() -> None:
    cut_off, closed = [], []

    async def generate(group: PlannedGroup) -> list[int]:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cut_off.append(group.position)
            raise
        return []

    async def close() -> None:
        closed.append(True)

    batches = BatchesAhead(ShuffledPlan(9), CallableGenerator(generate, close=close), groups_per_step=4)
    batches.start()
    told: list[BaseException] = []

    def wait() -> None:
        try:
            batches.next_batch(None)
        except GenerationStoppedError as error:
            told.append(error)

    trainer = threading.Thread(target=wait)
    trainer.start()
    deadline = time.monotonic() + 10
    while batches.counters.begun < 8 and time.monotonic() < deadline:
        time.sleep(0.005)
    with within():
        assert batches.stop()
        assert batches.stop()  # again is nothing
        trainer.join()
    assert told
    assert sorted(cut_off) == list(range(8))
    assert closed == [True]


def test_a_program_that_forgets_to_stop_ends_all_the_same() -> None:
    code = (
        "import asyncio\n"
        "from rollstream.training import BatchesAhead, CallableGenerator, ShuffledPlan\n"
        "async def generate(group):\n"
        "    await asyncio.sleep(0 if group.position < 4 else 1000)\n"
        "    return [group.index]\n"
        "batches = BatchesAhead(ShuffledPlan(9), CallableGenerator(generate), groups_per_step=4)\n"
        "batches.start()\n"
        "print(batches.next_batch(20).step)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


# --- selection


def scored(*rewards: float) -> list[Any]:
    return [SimpleNamespace(reward=reward) for reward in rewards]


def test_groups_without_signal_are_replaced_exactly() -> None:
    async def generate(group: PlannedGroup) -> list[Any]:
        return scored(1.0, 1.0) if group.position % 3 == 0 else scored(0.0, 1.0)

    with batches_of(generate, filters=[NoSignal()]) as batches:
        sequence = train(batches, 3)
        assert sequence == [[1, 2, 4, 5], [7, 8, 10, 11], [13, 14, 16, 17]]
        assert batches.counters.dropped >= 5
        assert max(batches.staleness_histogram()) <= 1


def test_a_curriculum_stops_drawing_what_is_always_thrown_away() -> None:
    drawn: list[int] = []

    async def generate(group: PlannedGroup) -> list[Any]:
        drawn.append(group.index)  # 30 of 40 prompts are always solved
        return scored(1.0, 1.0) if group.index < 30 else scored(0.0, 1.0)

    plan = Curriculum(40, seed=1)
    generator = CallableGenerator(generate)
    batches = BatchesAhead(plan, generator, groups_per_step=8, filters=[NoSignal()], max_drops=10_000)
    with batches:
        train(batches, 40)
    assert max(plan.success(index) for index in range(30)) > 0.9
    assert sum(index < 30 for index in drawn[-200:]) < 100  # 150 of 200 would be by chance


class Remembers(ShuffledPlan):
    """Learns which groups it was told of, and saves it."""

    def __init__(self) -> None:
        super().__init__(10, seed=5)
        self.told: dict[str, list[int]] = {"trained": [], "dropped": []}

    def observe(self, group: Group) -> None:
        self.told["trained"].append(group.position)

    def observe_dropped(self, group: Group) -> None:
        self.told["dropped"].append(group.position)

    def state_dict(self) -> dict[str, Any]:
        return {what: list(positions) for what, positions in self.told.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.told = state


def test_what_is_learnt_is_saved_with_what_it_was_learnt_from() -> None:
    """At any moment: nothing is learnt twice after a restart, and nothing is forgotten."""

    async def generate(group: PlannedGroup) -> list[Any]:
        await asyncio.sleep(0.001 * (group.position * 7 % 5))
        return scored(1.0, 1.0) if group.position % 3 == 0 else scored(0.0, 1.0)

    def resumed(state: dict[str, Any] | None) -> BatchesAhead:
        batches = BatchesAhead(
            Remembers(), CallableGenerator(generate), groups_per_step=4, filters=[NoSignal()], max_staleness=2
        )
        if state is not None:
            batches.load_state_dict(state)
        return batches

    state: dict[str, Any] | None = None
    for step in range(6):
        with resumed(state) as batches:  # a crash after every step, with groups on their way
            train(batches, 1)
            state = json.loads(json.dumps(batches.state_dict()))
        assert state is not None
        told, watermark = state["plan_state"], state["watermark"]
        for what in ("trained", "dropped"):
            assert len(set(told[what])) == len(told[what])
            assert sorted(p for p in told[what] if p >= watermark) == state[what]
        assert len(told["trained"]) == 4 * (step + 1)
        assert {p for p in range(watermark) if p % 3 == 0} <= set(told["dropped"])


def test_nothing_but_groups_without_signal_ends_with_the_reason() -> None:
    async def generate(group: PlannedGroup) -> list[Any]:
        return scored(1.0, 1.0)

    with (
        batches_of(generate, filters=[NoSignal()], max_drops=10) as batches,
        within(),
        pytest.raises(GenerationFailedError, match=r"11 groups were thrown away .* are all 1"),
    ):
        batches.next_batch(20)


def test_a_generator_may_drop_a_group_itself() -> None:
    async def generate(group: PlannedGroup) -> list[int]:
        if group.position == 1:
            raise DroppedGroupError("late")
        return [group.index]

    with batches_of(generate) as batches:
        assert train(batches, 1) == [[0, 2, 3, 4]]
        assert (batches.counters.dropped, batches.counters.failed) == (1, 0)


def test_a_rank_decides_among_the_finished() -> None:
    async def generate(group: PlannedGroup) -> list[Any]:
        return scored(float(group.position), 0.0)

    rank = Priority("greatest", lambda group: group.rewards[0] or 0.0)
    batches = batches_of(generate, order="first", max_staleness=3, ahead=3, rank=rank)
    with batches:
        deadline = time.monotonic() + 10
        while batches.counters.finished < 16 and time.monotonic() < deadline:
            time.sleep(0.005)
        assert train(batches, 1) == [[12, 13, 14, 15]]


@pytest.mark.parametrize("most", [1, 4])
def test_batches_by_tokens(most: int) -> None:
    def sized(tokens: int) -> Any:
        one = SimpleNamespace(prompt_ids=[0] * 2, response_ids=[0] * (tokens - 2), policy_versions=[])
        return SimpleNamespace(trajectories=[one])

    async def generate(group: PlannedGroup) -> list[Any]:
        return [sized(5), sized(5 if group.position % 2 else 45)]  # 10 and 50 tokens in turns

    budget = TokenBudget(tokens=115, smallest=1, largest=4)
    with batches_of(generate, groups_per_step=1, batch_size=budget, max_staleness=most, ahead=1) as batches:
        assert train(batches, 3) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


# --- weights


def test_an_update_waits_for_an_idle_engine() -> None:
    generating = 0
    seen = []

    async def generate(group: PlannedGroup) -> list[int]:
        nonlocal generating
        generating += 1
        await asyncio.sleep(0.01)
        generating -= 1
        return [group.index]

    async def update(source: str, version: int) -> None:
        seen.append((source, version, generating))
        await asyncio.sleep(0.02)
        assert generating == 0  # nor is anything begun meanwhile

    # Few at once, so that at any time more could be begun.
    with batches_of(generate, update=update, max_staleness=2, max_groups_in_flight=2) as batches:
        for step in range(4):
            batch = batches.next_batch(20)
            batches.trained(batch.step)
            batches.update_weights(f"weights {step}")
            assert batches.engine_version == step + 1
    assert seen == [(f"weights {step}", step + 1, 0) for step in range(4)]


def test_or_comes_in_flight() -> None:
    async def generate(group: PlannedGroup) -> list[int]:
        if group.position == 5:
            while batches.engine_version < 1:
                await asyncio.sleep(0.005)
        return [group.index]

    async def update(source: str, version: int) -> None:
        return None

    batches = batches_of(generate, update=update, weights="in_flight")
    with batches:
        train(batches, 1)  # with drain it would wait for group 5, which waits for it
        batch = batches.next_batch(20)
        assert batch.staleness == [1, 1, 1, 1]  # stamped at dispatch, whatever came in flight


def test_an_engine_that_does_not_get_idle_is_a_clear_error() -> None:
    async def generate(group: PlannedGroup) -> list[int]:
        if group.position == 5:
            await asyncio.Event().wait()
        return [group.index]

    with batches_of(generate, weight_timeout=0.2) as batches:
        batch = batches.next_batch(20)
        batches.trained(batch.step)
        with (
            within(),
            pytest.raises(WeightUpdateError, match=r"1 groups are still being generated after 0.2 s"),
        ):
            batches.update_weights()
        assert batches.engine_version == 0


def test_an_update_that_hangs_or_is_refused_is_a_clear_error_and_may_be_tried_again() -> None:
    behaviours: list[str] = ["hang", "refuse", "time out", "work"]

    async def update(source: str, version: int) -> None:
        behaviour = behaviours.pop(0)
        if behaviour == "hang":
            await asyncio.Event().wait()
        if behaviour == "refuse":
            raise ValueError("shapes differ")
        if behaviour == "time out":
            raise TimeoutError("the server's own")

    with batches_of(update=update, weight_timeout=0.3) as batches:
        batch = batches.next_batch(20)
        batches.trained(batch.step)
        with within(), pytest.raises(WeightUpdateError, match=r"has not taken version 1 within 0.3 s"):
            batches.update_weights("w")
        with within(), pytest.raises(WeightUpdateError, match=r"version 1 has been on its way .* is cut off"):
            batches.update_weights("w")
        assert behaviours == ["refuse", "time out", "work"]  # nothing was sent behind its back
        with pytest.raises(WeightUpdateError, match="shapes differ") as raised:
            batches.update_weights("w")
        assert isinstance(raised.value.__cause__, ValueError)
        with pytest.raises(WeightUpdateError, match="the server's own"):
            batches.update_weights("w")
        assert batches.engine_version == 0
        batches.update_weights("w")
        assert batches.engine_version == 1
        assert batches.next_batch(20).step == 1


def test_an_update_waits_for_an_engine_that_is_away() -> None:
    asked: list[int] = []

    async def update(source: str, version: int) -> None:
        asked.append(version)
        if len(asked) < 3:
            raise ExceptionGroup("replicas", [EngineUnavailableError("no server is there")])

    with batches_of(update=update) as batches:
        batches.trained(batches.next_batch(20).step)
        with within():
            batches.update_weights("w")
        assert batches.engine_version == 1
    assert asked == [1, 1, 1]


@pytest.mark.parametrize("first", [True, False])
def test_an_engine_that_stays_away_is_an_error_of_the_update_in_time(first: bool) -> None:
    asked = []

    async def update(source: str, version: int) -> None:
        asked.append(version)
        raise EngineUnavailableError("no server is there")

    batches = batches_of(update=update, weight_timeout=1.0)
    with within(), pytest.raises(WeightUpdateError, match=r"within 1 s .*no server is there") as raised:
        if first:
            batches.start(weights="w")
        with batches:
            batches.trained(batches.next_batch(20).step)
            batches.update_weights("w")
    assert isinstance(raised.value.__cause__, EngineUnavailableError)
    assert len(asked) >= 2


def test_an_update_that_comes_late_never_overwrites_a_newer_one() -> None:
    answer, arrived, answered = threading.Event(), [], []

    async def update(source: str, version: int) -> None:
        def server() -> None:  # what it was asked for cannot be called back
            if version == 1:
                answer.wait(20)
            arrived.append(source)

        servers.append(threading.Thread(target=server))
        servers[-1].start()
        while source not in arrived:
            await asyncio.sleep(0.005)
        answered.append(source)

    servers: list[threading.Thread] = []
    with batches_of(update=update, max_staleness=2) as batches:
        for step in range(2):
            batches.next_batch(20)
            batches.trained(step)
            if step == 0:
                with pytest.raises(WeightUpdateError, match=r"within 0\.1 s"):
                    batches.update_weights("w1", timeout=0.1)
        threading.Timer(0.2, answer.set).start()
        batches.update_weights("w2")
        for one in servers:
            one.join(20)
        assert batches.engine_version == 2
        assert arrived == answered == ["w1", "w2"]


def test_an_update_that_is_slow_to_be_cut_off_is_waited_for() -> None:
    begun, ended, release = [], [], threading.Event()

    async def update(source: str, version: int) -> None:
        begun.append(source)
        try:
            if source == "first":
                await asyncio.Event().wait()
        finally:
            while source == "first" and not release.is_set():
                await asyncio.sleep(0.005)
            ended.append(source)

    with batches_of(update=update) as batches:
        batches.next_batch(20)
        batches.trained(0)
        for _ in range(3):
            with within(), pytest.raises(WeightUpdateError):
                batches.update_weights("second" if begun else "first", timeout=0.1)
        assert begun == ["first"]
        release.set()
        batches.update_weights("second")
    assert begun == ended == ["first", "second"]


def test_weights_that_nobody_takes_are_refused() -> None:
    with batches_of() as batches:
        batch = batches.next_batch(20)
        batches.trained(batch.step)
        with pytest.raises(WeightUpdateError, match=r"cannot load 'file.safetensors'"):
            batches.update_weights("file.safetensors")


def test_an_engine_that_gets_no_weights_is_an_error_not_a_hang() -> None:
    with batches_of(max_staleness=1) as batches:
        for step in range(2):
            batch = batches.next_batch(20)
            assert max(batch.staleness) == step
            batches.trained(batch.step)
        with within(), pytest.raises(StalenessError, match="give the engine newer weights"):
            batches.next_batch(None)
        batches.update_weights()
        assert batches.next_batch(20).step == 2


def test_a_bound_is_promised_only_where_it_is_kept() -> None:
    with batches_of(max_staleness=None, ahead=1) as batches:
        for _ in range(5):  # and the engine gets no weights
            batches.trained(batches.next_batch(20).step)
        assert max(batches.staleness_histogram()) == 4
        assert batches.bound is None
    with batches_of(max_staleness=3, ahead=1) as batches:
        for _ in range(4):
            batches.trained(batches.next_batch(20).step)
        assert max(batches.staleness_histogram()) == 3 == batches.bound


def test_a_batch_that_is_never_reported_as_trained_is_an_error_not_a_hang() -> None:
    with batches_of(max_staleness=0) as batches:
        batches.next_batch(20)
        with within(), pytest.raises(StalenessError, match=r"call trained\(0\)"):
            batches.next_batch(None)


def test_tokens_older_than_their_group_make_it_fail() -> None:
    def stamped(version: int) -> Any:
        one = SimpleNamespace(prompt_ids=[], response_ids=[1], policy_versions=[(0, version)])
        return SimpleNamespace(trajectories=[one])

    async def straggler(group: PlannedGroup) -> list[Any]:
        return [stamped(0)]  # a replica that never takes new weights

    with batches_of(straggler) as batches, pytest.raises(GenerationFailedError, match="missed an update"):
        train(batches, 4)
    with batches_of(straggler, token_versions="ignore") as batches:
        train(batches, 4)


# --- resume


def test_a_run_goes_on_where_its_state_was_saved() -> None:
    with batches_of() as batches:
        whole = train(batches, 6)
    with batches_of() as batches:
        first = train(batches, 2)
        state = json.loads(json.dumps(batches.state_dict()))
        batches.next_batch(20)  # delivered, and never trained: owed again
    resumed = batches_of()
    resumed.load_state_dict(state)
    with resumed:
        assert resumed.step == resumed.engine_version == 2
        assert first + train(resumed, 4) == whole


def test_a_state_is_for_the_same_plan_and_a_fresh_run() -> None:
    with batches_of() as batches:
        state = batches.state_dict()
        with pytest.raises(TrainingError, match="before start"):
            batches.load_state_dict(state)
    with pytest.raises(ConfigError, match="rows was 10, is 11"):
        batches_of(rows=11).load_state_dict(state)


def test_filters_remember() -> None:
    async def generate(group: PlannedGroup) -> list[Any]:
        return scored(1.0, 1.0) if group.position == 0 else scored(0.0, 1.0)

    filters = [NoSignal()]
    with batches_of(generate, filters=filters) as batches:
        train(batches, 2)
        state = batches.state_dict()
    again = NoSignal()
    batches_of(generate, filters=[again]).load_state_dict(state)
    assert again.dropped == 1


# --- what is seen


def test_where_the_time_went() -> None:
    async def generate(group: PlannedGroup) -> list[int]:
        await asyncio.sleep(
            1.0
        )  # it begins before the trainer asks: by milliseconds, or more on a busy machine
        return [group.index]

    with batches_of(generate, max_staleness=0) as batches:
        for _ in range(4):
            batch = batches.next_batch(20)
            time.sleep(0.03)
            batches.trained(batch.step)
            batches.update_weights()
    steps = batches.times.steps
    assert [step.step for step in steps] == [0, 1, 2, 3]
    for step in steps:
        assert step.train_s >= 0.03
        assert step.wait_s >= 0.02
        assert step.generation_s >= 0.02
        assert step.total_s >= step.wait_s + step.train_s + step.weights_s
        assert 0.02 <= step.engine_busy_s <= step.total_s
    logged = batches.times.last()
    assert logged["rollstream/unscored"] == 0.0  # what is no rollout has no reward to miss
    assert logged["rollstream/staleness_max"] == 0.0
    assert 0 < logged["rollstream/engine_idle"] < 1
    json.dumps(batches.times.summary())
    assert "staleness               0: 100 %" in batches.times.table()


@pytest.mark.parametrize(
    "wrong",
    [
        {"groups_per_step": 0},
        {"max_staleness": -1},
        {"order": "plan", "window": 4},
        {"max_groups_in_flight": 0},
        {"group_timeout": 0},
        {"batch_size": TokenBudget(10, 2, 4)},
    ],
)
def test_what_does_not_go_together_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        batches_of(**wrong)


def test_a_version_is_a_number_of_updates() -> None:
    with pytest.raises(ConfigError, match="version 7"):
        batches_of().start(engine_version=7)
    with batches_of() as batches, pytest.raises(ConfigError, match="version 1 of the weights"):
        batches.update_weights(version=1)


def test_the_step_under_way_and_its_rollouts_without_reward() -> None:
    async def generate(group: PlannedGroup) -> list[SimpleNamespace]:
        return [SimpleNamespace(reward=None if group.position == 0 else 1.0) for _ in range(2)]

    with batches_of(generate) as batches:
        assert batches.under_way is None
        batch = batches.next_batch(20)
        batches.trained(batch.step)
        batches.update_weights()
        now = batches.under_way
        assert now is not None and now.step == 0
        assert 0 < now.train_s <= now.total_s and now.weights_s > 0
        assert now.numbers()["rollstream/unscored"] == 0.25
        assert batches.times.last() == {}
        batches.next_batch(20)
        assert batches.times.last()["rollstream/step_s"] >= now.weights_s
    assert "rollouts not scored" in batches.times.table()
    assert "12.5 %" in batches.times.table()
