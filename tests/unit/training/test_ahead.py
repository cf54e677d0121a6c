"""Real threads: what the trainer is given, and how each failure reaches it."""

import asyncio
import json
import re
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
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
from rollstream.training import (
    BatchesAhead,
    FunctionPlan,
    Group,
    NoSignal,
    PlannedGroup,
    Priority,
    ShuffledPlan,
    TokenBudget,
)
from tests.support.interrupts import interrupted
from tests.support.training import (
    LONG_S,
    Gate,
    batches_of,
    causes,
    echo,
    eventually,
    rollout_of,
    scored,
    train,
)


async def forever() -> None:
    await asyncio.Event().wait()


def let_it_begin(batches: BatchesAhead) -> None:
    """Returns when the generation thread has begun all that it may."""
    for _ in range(5):
        batches.submit(asyncio.sleep(0)).result(LONG_S)


# --- what comes


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"on_group_failure": "drop"}, "'fail' or 'drop_and_refill'"),
        ({"weights": "inflight"}, "'drain' or 'in_flight'"),
        ({"token_versions": "x"}, "'check' or 'ignore'"),
        ({"max_groups_in_flight": 0}, "max_groups_in_flight"),
        ({"group_timeout": 0}, "group_timeout"),
        ({"batch_size": TokenBudget(10, 2, 4)}, "groups_per_step"),
    ],
)
def test_options_that_cannot_be_are_refused(option: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        batches_of(**option)


@pytest.mark.parametrize("most", [0, 1, 3])
def test_batches_in_the_plans_order_over_epochs(most: int) -> None:
    plan = ShuffledPlan(10, seed=5)
    with batches_of(max_staleness=most) as batches:
        for step in range(8):
            batch = batches.next_batch(LONG_S)
            assert batch.step == step
            positions = range(4 * step, 4 * step + 4)
            assert [group.planned for group in batch.groups] == [plan.at(p) for p in positions]
            assert batch.rollouts == [group.index for group in batch.groups]
            assert batch.trajectories == []
            assert all(0 <= one <= most for one in batch.staleness)
            batch.groups.clear()  # the trainer may do with them what it likes
            batches.trained(step)
            batches.update_weights()
        assert batches.state_dict()["watermark"] == batches.staleness_histogram().total() == 32
        assert max(batches.staleness_histogram()) <= most


def test_the_first_finished_go_first() -> None:
    release = Gate()

    async def generate(group: PlannedGroup) -> list[int]:
        if group.position == 0:
            await release.passed()
        return [group.index]

    with batches_of(generate, order="first", max_staleness=2, ahead=2, weights="in_flight") as batches:
        first = train(batches, 2)
        assert 0 not in first[0] + first[1]
        release.set()
        assert 0 in train(batches, 1)[0]  # its last chance: the batch waits for it
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
            batches.next_batch(LONG_S)


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


def test_a_timeout_loses_nothing() -> None:
    gate = Gate()

    async def generate(group: PlannedGroup) -> list[int]:
        await gate.passed()
        return [group.index]

    with batches_of(generate) as batches:
        with pytest.raises(BatchTimeoutError, match="0 groups are finished"):
            batches.next_batch(0)
        with pytest.raises(TimeoutError):  # it is one of these, too
            batches.next_batch(0.05)
        gate.set()
        batch = batches.next_batch(LONG_S)
        assert batch.step == 0 and batch.wait_s >= 0.05  # the time of both is in it


# --- failures


async def broken(group: PlannedGroup) -> list[int]:
    if group.position == 5:
        raise KeyError("the environment is broken")
    return [group.index]


def raising(error: BaseException) -> Any:
    async def generate(group: PlannedGroup) -> list[int]:
        raise error

    return generate


def returning(what: Any) -> Any:
    async def generate(group: PlannedGroup) -> Any:
        return what if group.position == 2 else [group.index]

    return generate


async def hangs(group: PlannedGroup) -> list[int]:
    if group.position == 1:
        await forever()
    return [group.index]


async def refuses_to_be_cut_off(group: PlannedGroup) -> list[int]:
    try:
        await forever()
    except asyncio.CancelledError:
        raise ConnectionError("cut off") from None  # may pass, of itself
    return []


async def stops_the_loop(group: PlannedGroup) -> list[int]:
    asyncio.get_running_loop().stop()
    await forever()
    return []


async def straggler(group: PlannedGroup) -> list[Any]:
    return [rollout_of(versions=[0])]  # a replica that never takes new weights


async def alike(group: PlannedGroup) -> list[Any]:
    return scored(1.0, 1.0)


class SaysWhether(NoSignal):
    """Not why."""

    def drops(self, group: Group) -> Any:
        return True


def breaks_at_5(position: int) -> tuple[int, int]:
    if position == 5:
        raise ZeroDivisionError("the sampler")
    return 0, position


BROKEN_PLAN = {"plan": FunctionPlan(breaks_at_5, identity={}), "groups_per_step": 2, "max_staleness": 0}
NO_SERVER = EngineUnavailableError("no server")
REFILL = {"on_group_failure": "drop_and_refill"}


@pytest.mark.parametrize(
    ("generate", "options", "message", "cause"),
    [
        (broken, {}, "the environment is broken", KeyError),
        (raising(asyncio.CancelledError()), {}, "escape", asyncio.CancelledError),
        (raising(TransientError("busy")), {}, "busy", TransientError),
        (raising(ValueError("no")), {**REFILL, "max_failures": 5}, "6 groups failed one after", ValueError),
        (raising(EngineLostError("away for 600 s")), REFILL, "away for 600 s", EngineLostError),
        (raising(KeyboardInterrupt()), {}, "KeyboardInterrupt of its own", KeyboardInterrupt),
        (raising(SystemExit(3)), REFILL, "9 groups .* SystemExit of its own", SystemExit),
        (stops_the_loop, {}, "generation ended", RuntimeError),
        (hangs, {"group_timeout": 0.2}, r"group 1 .* longer than 0.2 s \(group_timeout\)", asyncio.CancelledError),
        (raising(NO_SERVER), {"group_timeout": 0.2}, "longer .* no server", asyncio.CancelledError),
        (refuses_to_be_cut_off, {"group_timeout": 0.2}, "longer than 0.2 s", ConnectionError),
        (returning([]), {}, r"\[\] for group 2 \(prompt \d+\)", GroupFailedError),
        (returning(5), {}, "5 for group 2", GroupFailedError),
        (straggler, {}, "missed an update", StalenessError),
        (alike, {"filters": [SaysWhether()]}, "no_signal", ConfigError),
        (echo, BROKEN_PLAN, "the sampler", ZeroDivisionError),
        (alike, {"filters": [NoSignal()], "max_drops": 9}, "10 groups were thrown away .* are all 1", TrainingError),
    ],
)  # fmt: skip
def test_what_goes_wrong_reaches_the_trainer_with_its_cause(
    generate: Any, options: dict[str, Any], message: str, cause: type[BaseException]
) -> None:
    with batches_of(generate, **options) as batches:
        with pytest.raises(GenerationFailedError, match=message) as raised:
            train(batches, 4)
        assert isinstance(causes(raised.value)[-1], cause)
        with pytest.raises(GenerationFailedError):  # it stays so
            batches.next_batch(0)
        assert batches.stop(LONG_S)
    if generate is broken:
        assert "in broken" in "".join(traceback.format_exception(raised.value))


def test_errors_that_may_pass_are_tried_again() -> None:
    tries: dict[int, int] = {}

    async def generate(group: PlannedGroup) -> list[int]:
        tries[group.position] = tries.get(group.position, 0) + 1
        if group.position == 2 and tries[2] < 3:
            raise TransientError("busy")
        if group.position == 3 and tries[3] < 9:
            raise EngineUnavailableError("gone")  # charged to nobody
        return [group.index]

    with batches_of(generate) as batches:
        batch = batches.next_batch(LONG_S)
    assert [group.attempts for group in batch.groups] == [1, 1, 3, 1]


@pytest.mark.parametrize(
    ("generate", "counted"),
    [(broken, (0, 1)), (returning(DroppedGroupError), (1, 0)), (returning([]), (0, 1))],
)
def test_a_group_that_failed_or_was_dropped_is_replaced_by_the_plans_next(
    generate: Any, counted: tuple[int, int]
) -> None:
    missing = 5 if generate is broken else 2

    async def generate_or_drop(group: PlannedGroup) -> Any:
        made = await generate(group)
        if made is DroppedGroupError:
            raise DroppedGroupError("late")
        return made

    with batches_of(generate_or_drop, **REFILL) as batches:
        sequence = train(batches, 3)
        positions = [position for position in range(13) if position != missing]
        assert sequence == [positions[4 * step : 4 * step + 4] for step in range(3)]
        assert (batches.counters.dropped, batches.counters.failed) == counted


def test_only_failures_and_drops_in_a_row_count() -> None:
    async def generate(group: PlannedGroup) -> list[Any]:
        if group.position % 3 == 1:
            raise ValueError("now and then")
        return scored(1.0, 1.0) if group.position % 3 == 2 else scored(0.0, 1.0)

    with batches_of(
        generate,
        **REFILL,
        filters=[NoSignal()],
        max_failures=1,
        max_drops=1,
        max_groups_in_flight=1,  # one after the other, indeed
    ) as batches:
        assert train(batches, 2) == [[0, 3, 6, 9], [12, 15, 18, 21]]


def test_code_that_blocks_the_loop_is_named_and_left_behind() -> None:
    begun, release = threading.Event(), threading.Event()

    async def blocks_the_loop(group: PlannedGroup) -> list[int]:
        begun.set()
        release.wait(LONG_S)  # does not await
        return [group.index]

    batches = batches_of(blocks_the_loop, max_groups_in_flight=1)
    batches.start()
    try:
        assert begun.wait(LONG_S)
        with pytest.raises(BatchTimeoutError, match=r"(?s)code that blocks it.*blocks_the_loop"):
            batches.next_batch(0)
        assert batches.stop(timeout=0.2) is False
        with pytest.raises(GenerationStoppedError):
            batches.next_batch(None)
    finally:
        release.set()


# --- start and stop


async def no_device() -> None:
    raise OSError("no such device")


async def no_session() -> None:
    raise AttributeError("it has no session yet")


async def leaves() -> None:
    raise SystemExit(3)


async def no_file(source: str, version: int) -> None:
    raise ValueError(f"no file {source}")


async def never_taken(source: str, version: int) -> None:
    await forever()


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ({"start": no_device}, OSError, "no such device"),
        ({"start": no_device, "close": no_session}, OSError, "no such device"),
        ({"start": no_device, "close": leaves}, OSError, "no such device"),
        ({"update": no_file}, WeightUpdateError, "no file checkpoint"),
        ({"update": never_taken, "weight_timeout": 0.2}, WeightUpdateError, "within"),
    ],
)
def test_what_cannot_start_says_so(
    parts: dict[str, Any], error: type[Exception], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    batches = batches_of(**parts)
    with pytest.raises(error, match=message):
        batches.start(weights="checkpoint")
    with pytest.raises(GenerationFailedError, match=message):
        batches.next_batch(LONG_S)
    assert batches.counters.begun == 0 and not batches.alive
    if parts.get("close"):  # that it could not be closed either does not hide why
        assert re.search("AttributeError: it has no session yet|SystemExit: 3", caplog.text)


def test_a_program_that_forgets_to_stop_ends_all_the_same() -> None:
    code = (
        "import asyncio\n"
        "from rollstream.training import BatchesAhead, CallableGenerator, ShuffledPlan\n"
        "async def generate(group):\n"
        "    await asyncio.sleep(0 if group.position < 4 else 1000)\n"
        "    return [group.index]\n"
        "batches = BatchesAhead(ShuffledPlan(9), CallableGenerator(generate), groups_per_step=4)\n"
        "batches.start()\n"
        "print(batches.next_batch(60).step)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


# --- selection


async def every_third_without_signal(group: PlannedGroup) -> list[Any]:
    await asyncio.sleep(0.001 * (group.position * 7 % 5))
    return scored(1.0, 1.0) if group.position % 3 == 0 else scored(0.0, 1.0)


class Counts(NoSignal):
    """Remembers how many it has dropped."""

    dropped = 0

    def observe_dropped(self, group: Group) -> None:
        self.dropped += 1

    def state_dict(self) -> dict[str, Any]:
        return {"dropped": self.dropped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.dropped = state["dropped"]


def test_groups_without_signal_are_replaced_exactly() -> None:
    with batches_of(every_third_without_signal, filters=[Counts()]) as batches:
        assert train(batches, 3) == [[1, 2, 4, 5], [7, 8, 10, 11], [13, 14, 16, 17]]
        assert batches.counters.dropped >= 5
        assert max(batches.staleness_histogram()) <= 1
        state = json.loads(json.dumps(batches.state_dict()))
    again = Counts()
    batches_of(filters=[again]).load_state_dict(state)
    assert again.dropped == state["policies"]["no_signal"]["dropped"] >= 5
    batches_of(filters=[NoSignal()]).load_state_dict(state)  # it has nothing to remember


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
    state: dict[str, Any] | None = None
    for step in range(6):
        batches = batches_of(
            every_third_without_signal, plan=Remembers(), filters=[NoSignal()], max_staleness=2
        )
        if state is not None:
            batches.load_state_dict(state)
        with batches:  # a crash after every step, with groups on their way
            train(batches, 1)
            state = json.loads(json.dumps(batches.state_dict()))
        assert state is not None
        told, watermark = state["plan_state"], state["watermark"]
        for what in ("trained", "dropped"):
            assert len(set(told[what])) == len(told[what])
            assert sorted(p for p in told[what] if p >= watermark) == state[what]
        assert len(told["trained"]) == 4 * (step + 1)
        assert {p for p in range(watermark) if p % 3 == 0} <= set(told["dropped"])


def test_a_rank_decides_among_the_finished() -> None:
    async def generate(group: PlannedGroup) -> list[Any]:
        return scored(float(group.position), 0.0)

    rank = Priority("greatest", lambda group: group.rewards[0] or 0.0)
    with batches_of(generate, order="first", max_staleness=3, ahead=3, rank=rank) as batches:
        eventually(lambda: batches.counters.finished == 16)
        assert train(batches, 1) == [[12, 13, 14, 15]]


def test_batches_by_tokens() -> None:
    async def generate(group: PlannedGroup) -> list[Any]:
        return [rollout_of(5), rollout_of(5 if group.position % 2 else 45)]  # 10 and 50 tokens in turns

    budget = TokenBudget(tokens=115, smallest=1, largest=4)
    with batches_of(generate, groups_per_step=1, batch_size=budget) as batches:
        assert train(batches, 3) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


# --- weights


def test_an_update_that_comes_late_never_overwrites_a_newer_one() -> None:
    answer, arrived, answered = threading.Event(), list[str](), list[str]()
    servers: list[threading.Thread] = []

    async def update(source: str, version: int) -> None:
        def server() -> None:  # what it was asked for cannot be called back
            if version == 1:
                answer.wait(LONG_S)
            arrived.append(source)

        servers.append(threading.Thread(target=server))
        servers[-1].start()
        while source not in arrived:
            await asyncio.sleep(0.005)
        answered.append(source)

    with batches_of(update=update, weights="in_flight", max_staleness=2) as batches:
        for step in range(2):
            batches.next_batch(LONG_S)
            batches.trained(step)
            if step == 0:
                while not servers:  # a busy machine had not come so far
                    with pytest.raises(WeightUpdateError, match=r"has not taken version 1"):
                        batches.update_weights("w1", timeout=0.1)
        threading.Timer(0.2, answer.set).start()
        batches.update_weights("w2")
        for one in servers:
            one.join(LONG_S)
        assert batches.engine_version == 2
        assert arrived == answered == ["w1", "w2"]


def test_versions_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="version 7"):
        batches_of().start(engine_version=7)
    with batches_of() as batches:
        for version in (1, -1, True):
            with pytest.raises(ConfigError, match=f"version {version} of the weights"):
                batches.update_weights(version=version)
        step = batches.next_batch(LONG_S).step
        with pytest.raises(WeightUpdateError, match=r"call trained\(0\) before"):
            batches.update_weights()  # it would stamp the trained batch's weights with the version before
        batches.update_weights(version=0)  # in the middle of a batch, and known as such
        batches.trained(step)
        with pytest.raises(WeightUpdateError, match=r"cannot load 'file.safetensors'"):
            batches.update_weights("file.safetensors")
        batches.update_weights()
        with pytest.raises(WeightUpdateError, match="does not fall to 0"):
            batches.update_weights(version=0)


def test_a_trainer_that_does_not_do_its_part_is_told_what_is_missing() -> None:
    with batches_of(max_staleness=2, ahead=1) as batches:
        for step in range(3):
            batch = batches.next_batch(LONG_S)
            assert max(batch.staleness) == step <= 2
            batches.trained(batch.step)
        with pytest.raises(StalenessError, match="give the engine newer weights"):
            batches.next_batch(None)
        batches.update_weights()
        assert batches.next_batch(LONG_S).step == 3
    with batches_of(max_staleness=0) as batches:
        batches.next_batch(LONG_S)
        with pytest.raises(StalenessError, match=r"call trained\(0\)"):
            batches.next_batch(None)


def test_tokens_count_by_their_groups_stamp() -> None:
    async def newer(group: PlannedGroup) -> list[Any]:
        return [rollout_of(versions=[batches.engine_version, batches.engine_version + 3])]

    batches = batches_of(newer)
    with batches:
        train(batches, 3)
        assert max(batches.staleness_histogram()) <= 1
    with batches_of(straggler, token_versions="ignore") as ignoring:
        train(ignoring, 4)


# --- resume


def test_a_run_goes_on_where_its_state_was_saved() -> None:
    with batches_of() as batches:
        whole = train(batches, 6)
    with batches_of() as batches:
        first = train(batches, 2)
        state = json.loads(json.dumps(batches.state_dict()))
        batches.next_batch(LONG_S)  # delivered, and never trained: owed again
        with pytest.raises(TrainingError, match="before start"):
            batches.load_state_dict(state)
    with pytest.raises(ConfigError, match="rows was 10, is 11"):
        batches_of(rows=11).load_state_dict(state)
    resumed = batches_of()
    resumed.load_state_dict(state)
    with resumed:
        assert resumed.step == resumed.engine_version == 2
        assert first + train(resumed, 4) == whole


# --- what is seen


class Closing:
    """Notes the tasks in which it was started and closed."""

    def __init__(self, loads: bool = False) -> None:
        self.loading, self.closed = threading.Event(), list[bool]()
        self._loads = loads
        self._task: Any = None

    async def start(self) -> None:
        self._task = asyncio.current_task()
        self.loading.set()
        if self._loads:
            await forever()

    async def close(self) -> None:
        self.closed.append(asyncio.current_task() is self._task)  # what it opened may be bound to the task

    def batches_of(self, *arguments: Any, **options: Any) -> BatchesAhead:
        return batches_of(*arguments, start=self.start, close=self.close, **options)


@pytest.mark.parametrize("ends", ["fails", "is stopped"])
def test_a_waiting_trainer_is_woken_at_once(ends: str) -> None:
    """Though what is in flight is slow to end."""
    fails, release, generator = Gate(), Gate(), Closing()

    async def generate(group: PlannedGroup) -> list[int]:
        if group.position == 3:
            await fails.passed()
            raise ValueError("now")
        try:
            await forever()
        finally:
            await release.passed()
        return []

    batches = generator.batches_of(generate)
    batches.start()
    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(batches.next_batch, None)
        submitted = batches.submit(forever())
        eventually(lambda: batches.counters.begun == 8)
        let_it_begin(batches)
        if ends == "fails":
            fails.set()
        else:
            assert batches.stop(timeout=0.1) is False
        with pytest.raises(GenerationFailedError if ends == "fails" else GenerationStoppedError):
            waiting.result(LONG_S)
        assert not generator.closed
        release.set()
        assert batches.stop(LONG_S) and batches.stop(LONG_S)  # again is nothing
    assert generator.closed == [True] and not batches.alive and submitted.done()
    with pytest.raises(GenerationStoppedError):
        batches.submit(forever())


def test_a_stop_while_it_starts_ends_it_and_one_before_keeps_it_from_beginning() -> None:
    generator = Closing(loads=True)
    batches = generator.batches_of()
    with ThreadPoolExecutor(1) as trainer:
        starting = trainer.submit(batches.start)
        assert generator.loading.wait(LONG_S)
        assert batches.stop(LONG_S) and generator.closed == [True]
        with pytest.raises(GenerationStoppedError):
            starting.result(LONG_S)
    never = batches_of()
    with pytest.raises(GenerationStoppedError, match=r"start\(\) comes first"):
        never.next_batch(0)
    assert never.stop()
    with pytest.raises(GenerationStoppedError):
        never.start()
    assert not never.alive


def test_ctrl_c_while_it_starts_ends_it() -> None:
    generator = Closing(loads=True)
    batches = generator.batches_of()
    with interrupted(generator.loading), pytest.raises(KeyboardInterrupt), batches:
        pytest.fail("it has no end")
    assert generator.closed and not batches.alive


@pytest.mark.parametrize("weights", ["drain", "in_flight"])
def test_weights_come_first_and_between_groups_or_tokens(weights: Any) -> None:
    generating, seen = 0, list[Any]()

    async def generate(group: PlannedGroup) -> list[int]:
        nonlocal generating
        seen.append(group.position)
        generating += 1
        while weights == "in_flight" and group.position == 5 and batches.engine_version < 1:
            await asyncio.sleep(0.005)  # with drain the update would wait for it, and it for the update
        await asyncio.sleep(0.01)
        generating -= 1
        return [group.index]

    async def update(source: str, version: int) -> None:
        seen.append((source, version))
        await asyncio.sleep(0.02)
        assert generating == 0 or weights == "in_flight"  # nor is anything begun meanwhile

    # Few at once, so that at any time more could be begun.
    batches = batches_of(generate, update=update, weights=weights, max_groups_in_flight=2)
    batches.start(weights="checkpoint")
    with batches:
        for step in range(2):
            batch = batches.next_batch(LONG_S)
            assert max(batch.staleness) <= step
            if weights == "in_flight" and step == 0:
                eventually(lambda: 5 in seen)
            elif weights == "in_flight":
                assert batch.staleness[1] == 1  # stamped at dispatch, whatever came then
            batches.trained(batch.step)
            batches.update_weights(f"weights {step}")
            assert batches.engine_version == step + 1
    assert seen[0] == ("checkpoint", 0)
    updates = [item for item in seen if isinstance(item, tuple)]
    assert updates == [("checkpoint", 0), ("weights 0", 1), ("weights 1", 2)]


def test_an_update_that_hangs_or_is_refused_is_a_clear_error_and_may_be_tried_again() -> None:
    behaviours, last = ["hang", "refuse", "exit", "away for long", "away", "work"], ""

    async def update(source: str, version: int) -> None:
        nonlocal last
        last = last if last == "away for long" and source == "first" else behaviours.pop(0)
        match last:
            case "hang":
                await forever()
            case "refuse":
                raise ValueError("shapes differ")
            case "exit":
                raise SystemExit(3)
            case "away" | "away for long":
                raise ExceptionGroup("replicas", [EngineUnavailableError("no server is there")])

    with batches_of(update=update, weights="in_flight") as batches:
        batches.trained(batches.next_batch(LONG_S).step)
        for message in ("has not taken version 1 within", "is cut off"):
            with pytest.raises(WeightUpdateError, match=message):
                batches.update_weights("w", timeout=1.5)
            assert len(behaviours) == 5  # nothing is sent behind its back
        for message in ("shapes differ", "SystemExit of its own"):
            with pytest.raises(WeightUpdateError, match=message) as raised:
                batches.update_weights("w")
            assert raised.value.__cause__ is not None
        with pytest.raises(WeightUpdateError, match="replicas"):
            batches.update_weights("first", timeout=2.0)
        assert batches.engine_version == 0
        batches.update_weights("w")  # waits for the engine that is away
        assert (batches.engine_version, behaviours) == (1, [])
        assert batches.next_batch(LONG_S).step == 1


def test_an_engine_that_does_not_get_idle_is_a_clear_error() -> None:
    async def generate(group: PlannedGroup) -> list[int]:
        if group.position == 5:
            await forever()
        return [group.index]

    with batches_of(generate) as batches:
        batches.trained(batches.next_batch(LONG_S).step)
        eventually(lambda: batches.counters.finished == 7)
        with pytest.raises(WeightUpdateError, match=r"1 groups are still being generated after 0.2 s"):
            batches.update_weights(timeout=0.2)
        assert batches.engine_version == 0


# --- what is seen


def test_where_the_time_went_and_what_waits_in_memory() -> None:
    async def generate(group: PlannedGroup) -> list[Any]:
        await asyncio.sleep(0.02)
        return [rollout_of(3), rollout_of(4)]

    async def update(source: str, version: int) -> None:
        await asyncio.sleep(0.02)

    with batches_of(generate, update=update, token_versions="ignore") as batches:
        assert batches.under_way is None and batches.times.last() == {}
        assert batches.get_average_generation_time() == 0.0
        for step in range(3):
            eventually(lambda: len(batches.waiting) == 8)
            assert batches.get_pending_count() == 0
            batch = batches.next_batch(LONG_S)
            assert len(batch.trajectories) == len(batch.rollouts) == 8
            under_way = batches.under_way
            assert under_way is not None and under_way.step == step
            assert under_way.numbers()["rollstream/waiting_rollouts"] == len(batches.waiting) * 2
            assert under_way.numbers()["rollstream/waiting_tokens"] == len(batches.waiting) * 7
            time.sleep(0.04)
            batches.trained(batch.step)
            batches.update_weights()
    steps = batches.times.steps
    assert [step.step for step in steps] == [0, 1, 2]
    for one in steps:
        assert one.train_s >= 0.04 and one.weights_s >= 0.02 and one.generation_max_s >= 0.02
        assert one.total_s >= one.wait_s + one.train_s + one.weights_s
        assert 0.0 <= one.drain_s <= one.weights_s - 0.02  # the update itself is no part of it
    assert batches.get_average_generation_time() >= 0.02
