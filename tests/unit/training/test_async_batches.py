"""The façade: real threads, every failure, within its bound."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from rollstream.errors import (
    BatchTimeoutError,
    ConfigError,
    EngineUnavailableError,
    GenerationFailedError,
    GenerationStoppedError,
    TrainingError,
    TransientError,
)
from rollstream.rollout.retry import RetryPolicy
from rollstream.training.async_batches import AsyncBatchGenerator, BatchRequest
from tests.unit.training.test_ahead import causes, within

QUICK = RetryPolicy(max_attempts=3, delay=0.01, delay_max=0.02)


async def double(request: BatchRequest) -> Any:
    await asyncio.sleep(0.002)
    return request.inputs * 2


def generator(generate: Callable[[BatchRequest], Any] = double, **options: Any) -> AsyncBatchGenerator:
    return AsyncBatchGenerator(generate, **{"retry": QUICK, **options})


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_training_loop(ahead: int) -> None:
    with generator(num_steps_async=ahead) as batches:
        submitted = 0
        for step in range(8):
            while submitted <= step or batches.should_submit_more():
                assert batches.submit_batch(BatchRequest(submitted, inputs=submitted, version=step))
                submitted += 1
            result = batches.get_batch(step)
            assert (result.batch_id, result.results) == (step, 2 * step)
            assert 0 <= step - result.version <= ahead
        assert batches.get_average_generation_time() > 0.001


def test_plain_functions_and_other_orders() -> None:
    with generator(lambda request: request.inputs + 1, num_steps_async=4) as batches:
        for batch_id in range(4):
            assert batches.submit_batch(BatchRequest(batch_id, inputs=batch_id))
        assert [batches.get_batch(batch_id).results for batch_id in (3, 1, 2, 0)] == [4, 2, 3, 1]


def test_the_queue_is_bounded_and_counted() -> None:
    gate = threading.Event()

    async def held(request: BatchRequest) -> int:
        while not gate.is_set():
            await asyncio.sleep(0.002)
        return request.batch_id

    with generator(held, num_steps_async=1) as batches:
        assert batches.async_max_queue_size == 2
        assert batches.get_average_generation_time() == 0.0
        assert batches.submit_batch(BatchRequest(0))
        assert batches.should_submit_more() is False
        assert batches.submit_batch(BatchRequest(1))
        assert batches.submit_batch(BatchRequest(2)) is False
        assert batches.submit_batch(BatchRequest(1))  # is pending already: not twice
        assert (batches.get_pending_count(), batches.get_completed_count()) == (2, 0)
        with within(), pytest.raises(BatchTimeoutError):
            batches.get_batch(0, timeout=0)
        gate.set()
        wait_for(lambda: batches.get_completed_count() == 2)
        assert batches.get_pending_count() == 0
        assert batches.get_batch(0, timeout=0).results == 0
        assert batches.get_completed_count() == 1
        with pytest.raises(TrainingError, match="fetched before"):
            batches.get_batch(0)
        with pytest.raises(TrainingError, match="not submitted"):
            batches.get_batch(77)


@pytest.mark.parametrize("ahead", [0, 1])
def test_batches_that_nobody_fetches_count(ahead: int) -> None:
    with generator(num_steps_async=ahead, async_max_queue_size=2) as batches:
        for batch_id in range(2):
            assert batches.submit_batch(BatchRequest(batch_id, inputs=batch_id))
        wait_for(lambda: not ahead or batches.get_completed_count() == 2)
        assert batches.submit_batch(BatchRequest(2)) is False
        assert batches.submit_batch(BatchRequest(1)) is True  # is there
        assert batches.get_batch(0).results == 0
        assert batches.submit_batch(BatchRequest(2, inputs=2))
        assert [batches.get_batch(batch_id).results for batch_id in (1, 2)] == [2, 4]


def test_a_batch_that_failed_keeps_its_place_until_it_is_fetched_or_submitted_again() -> None:
    with generator(broken, num_steps_async=1, async_max_queue_size=2) as batches:
        for batch_id in range(2):
            assert batches.submit_batch(BatchRequest(batch_id))
        wait_for(lambda: batches.get_pending_count() == 0)
        assert batches.submit_batch(BatchRequest(2)) is False
        assert batches.submit_batch(BatchRequest(1))  # takes its own place
        with pytest.raises(GenerationFailedError):
            batches.get_batch(1)
        assert batches.submit_batch(BatchRequest(2))
        assert [batches.get_batch(batch_id).results for batch_id in (0, 2)] == [0, 2]


def test_priority_among_those_that_wait() -> None:
    gate = threading.Event()
    order = []

    async def noting(request: BatchRequest) -> None:
        order.append(request.batch_id)
        while not gate.is_set():
            await asyncio.sleep(0.002)

    with generator(noting, num_steps_async=1, async_max_queue_size=5) as batches:
        batches.submit_batch(BatchRequest(0))
        wait_for(lambda: order == [0])
        for batch_id, priority in ((1, 0.0), (2, 5.0), (3, 0.0), (4, 1.0)):
            batches.submit_batch(BatchRequest(batch_id, priority=priority))
        gate.set()
        wait_for(lambda: batches.get_completed_count() == 5)
    assert order == [0, 2, 4, 1, 3]


def test_synchronous_generates_when_asked() -> None:
    begun = []

    async def noting(request: BatchRequest) -> int:
        begun.append(request.batch_id)
        return request.batch_id

    with generator(noting, use_async_generation=False, num_steps_async=4) as batches:
        assert batches.num_steps_async == 0
        assert batches.submit_batch(BatchRequest(0))
        time.sleep(0.05)
        assert begun == []
        with pytest.raises(BatchTimeoutError):
            batches.get_batch(0, timeout=0)
        assert batches.get_batch(0).results == 0
        assert batches.should_submit_more() is False


def broken(request: BatchRequest) -> int:
    if request.batch_id == 1:
        raise KeyError("the environment is broken")
    return request.batch_id


def test_an_error_reaches_who_asks_at_once_and_only_for_that_batch() -> None:
    with generator(broken, num_steps_async=3) as batches:
        for batch_id in range(3):
            batches.submit_batch(BatchRequest(batch_id))
        with within(), pytest.raises(GenerationFailedError, match="batch 1 failed with KeyError") as raised:
            batches.get_batch(1)
        assert isinstance(causes(raised.value)[-1], KeyError)
        assert causes(raised.value)[-1].__traceback__ is not None
        assert batches.get_batch(2).results == 2
        assert batches.submit_batch(BatchRequest(1))  # once more
        with pytest.raises(GenerationFailedError):
            batches.get_batch(1)


def test_a_cancellation_of_its_own_is_a_failure_not_a_hang() -> None:
    async def cancels(request: BatchRequest) -> int:
        raise asyncio.CancelledError

    with generator(cancels) as batches:
        batches.submit_batch(BatchRequest(0))
        with within(), pytest.raises(GenerationFailedError, match="escape"):
            batches.get_batch(0)


def test_errors_that_may_pass_are_tried_again_with_back_off() -> None:
    tries: list[float] = []

    async def flaky(request: BatchRequest) -> int:
        tries.append(time.monotonic())
        if len(tries) < 3:
            raise TransientError("busy")
        return 7

    policy = RetryPolicy(max_attempts=3, delay=0.1, delay_max=1.0)
    with generator(flaky, retry=policy) as batches:
        batches.submit_batch(BatchRequest(0))
        result = batches.get_batch(0)
    assert (result.results, result.attempts) == (7, 3)
    assert tries[1] - tries[0] >= 0.05
    assert tries[2] - tries[1] >= 0.1
    assert result.generation_time >= 0.15


def test_an_engine_that_is_away_is_waited_for() -> None:
    tries = 0

    async def away(request: BatchRequest) -> int:
        nonlocal tries
        tries += 1
        if tries < 9:
            raise EngineUnavailableError("gone")
        return 1

    with generator(away) as batches:
        batches.submit_batch(BatchRequest(0))
        assert batches.get_batch(0).attempts == 1


def test_repeated_failure_ends_it_gracefully() -> None:
    async def fails(request: BatchRequest) -> int:
        raise ValueError(f"no. {request.batch_id}")

    batches = generator(fails, num_steps_async=1, max_failures=2)
    batches.start()
    for batch_id in range(3):
        assert batches.submit_batch(BatchRequest(batch_id))
        with within(), pytest.raises(GenerationFailedError):
            batches.get_batch(batch_id)
    wait_for(lambda: not batches._thread.alive)
    with within(), pytest.raises(GenerationFailedError, match=r"no. 2") as raised:
        batches.submit_batch(BatchRequest(9))
    assert isinstance(raised.value.__cause__, ValueError)
    assert batches.stop()


@pytest.mark.parametrize("plain", [False, True])
def test_a_batch_that_hangs_fails_at_its_time_limit(plain: bool) -> None:
    release = threading.Event()

    async def hangs(request: BatchRequest) -> int:
        await asyncio.Event().wait()
        return 0

    try:
        with generator(
            (lambda request: release.wait(30)) if plain else hangs, async_generation_timeout=0.2
        ) as batches:
            batches.submit_batch(BatchRequest(0))
            with within(), pytest.raises((GenerationFailedError, BatchTimeoutError), match=r"0\.2 s"):
                batches.get_batch(0)
            wait_for(lambda: batches.get_pending_count() == 0)
    finally:
        release.set()


def test_a_thread_that_dies_reaches_who_waits() -> None:
    async def dies(request: BatchRequest) -> int:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(10)
        return 0

    batches = generator(dies)
    batches.start()
    batches.submit_batch(BatchRequest(0))
    with within(), pytest.raises(GenerationFailedError):
        batches.get_batch(0)
    assert batches.stop()


def test_stop_in_the_middle_tells_who_waits() -> None:
    async def hangs(request: BatchRequest) -> int:
        await asyncio.Event().wait()
        return 0

    batches = generator(hangs)
    with pytest.raises(GenerationStoppedError, match=r"start\(\) comes first"):
        batches.submit_batch(BatchRequest(0))
    batches.start()
    batches.start()  # again is nothing
    batches.submit_batch(BatchRequest(0))
    threading.Timer(0.1, batches.stop).start()
    with within(), pytest.raises(GenerationStoppedError):
        batches.get_batch(0)
    with within():
        assert batches.stop()
    with pytest.raises(GenerationStoppedError):
        batches.start()


def test_something_else_runs_in_its_loop() -> None:
    loops = []

    async def noting(request: BatchRequest) -> None:
        loops.append(asyncio.get_running_loop())

    async def update() -> str:
        loops.append(asyncio.get_running_loop())
        return "done"

    async def fails() -> None:
        raise OSError("unreachable")

    async def hangs() -> None:
        await asyncio.Event().wait()

    with generator(noting) as batches:
        batches.submit_batch(BatchRequest(0))
        batches.get_batch(0)
        assert batches.run(update) == "done"
        assert loops[0] is loops[1]
        with pytest.raises(OSError, match="unreachable"):
            batches.run(fails)
        with within(), pytest.raises(BatchTimeoutError):
            batches.run(hangs, timeout=0.1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_steps_async": -1},
        {"async_generation_timeout": 0},
        {"num_steps_async": 3, "async_max_queue_size": 2},
        {"async_max_queue_size": 0},
        {"max_concurrent_batches": 0},
    ],
)
def test_nonsense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        generator(**wrong)
