"""Batches by number, in real threads: what comes, and how each failure reaches who asks."""

import asyncio
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
from rollstream.training import AsyncBatchGenerator, BatchRequest
from tests.support.training import LONG_S, QUICK, Gate, causes, eventually


def generator(generate: Callable[[BatchRequest], Any], **options: Any) -> AsyncBatchGenerator:
    return AsyncBatchGenerator(generate, **{"retry": QUICK, **options})


def noting(order: list[int], gate: Gate | None = None) -> Callable[[BatchRequest], Any]:
    async def generate(request: BatchRequest) -> int:
        order.append(request.batch_id)
        if gate is not None:
            await gate.passed()
        return request.batch_id

    return generate


async def hangs(request: BatchRequest) -> int:
    await asyncio.Event().wait()
    return 0


def broken(request: BatchRequest) -> int:
    if request.batch_id == 1:
        raise KeyError("the environment is broken")
    return request.batch_id


def test_figures() -> None:
    errors = [TransientError("busy"), EngineUnavailableError("gone"), TransientError("busy")]

    def generate(request: BatchRequest) -> None:
        if errors:
            raise errors.pop()  # an engine that is away is no attempt
        time.sleep(0.05)

    with generator(generate) as batches:  # a plain function
        batches.start()  # again is nothing
        assert batches.get_average_generation_time() == 0.0
        for batch_id in range(2):
            batches.submit_batch(BatchRequest(batch_id))
            result = batches.get_batch(batch_id)
            assert result.generation_time >= 0.05 and result.queue_time >= 0.0
            assert result.attempts == (1 if batch_id else 3)
        assert batches.get_average_generation_time() >= 0.05


def test_the_queue_is_bounded_and_counted() -> None:
    gate = Gate()
    with generator(noting([], gate), num_steps_async=1) as batches:
        assert batches.async_max_queue_size == 2
        assert batches.submit_batch(BatchRequest(0))
        assert batches.should_submit_more() is False
        assert batches.submit_batch(BatchRequest(1))
        assert batches.submit_batch(BatchRequest(2)) is False
        assert batches.submit_batch(BatchRequest(1))  # is pending already: not twice
        assert (batches.get_pending_count(), batches.get_completed_count()) == (2, 0)
        with pytest.raises(BatchTimeoutError):
            batches.get_batch(0, timeout=0)
        gate.set()
        eventually(lambda: batches.get_completed_count() == 2)
        assert batches.get_pending_count() == 0
        assert batches.submit_batch(BatchRequest(2)) is False  # nobody has fetched one
        assert batches.get_batch(0, timeout=0).results == 0
        assert batches.get_completed_count() == 1
        assert batches.submit_batch(BatchRequest(2))
        for missing, message in ((0, "fetched before"), (77, "not submitted")):
            with pytest.raises(TrainingError, match=message):
                batches.get_batch(missing)


def test_a_batch_that_failed_keeps_its_place_until_it_is_fetched_or_submitted_again() -> None:
    with generator(broken, num_steps_async=1, async_max_queue_size=2) as batches:
        for batch_id in range(2):
            assert batches.submit_batch(BatchRequest(batch_id))
        eventually(lambda: batches.get_pending_count() == 0)
        assert batches.submit_batch(BatchRequest(2)) is False
        assert batches.submit_batch(BatchRequest(1))  # takes its own place
        with pytest.raises(GenerationFailedError, match="batch 1 failed with KeyError") as raised:
            batches.get_batch(1)
        cause = causes(raised.value)[-1]
        assert isinstance(cause, KeyError) and cause.__traceback__ is not None
        assert batches.submit_batch(BatchRequest(2))
        assert [batches.get_batch(batch_id).results for batch_id in (0, 2)] == [0, 2]


def test_priority_among_those_that_wait() -> None:
    gate, order = Gate(), list[int]()
    with generator(noting(order, gate), num_steps_async=1, async_max_queue_size=5) as batches:
        batches.submit_batch(BatchRequest(0))
        eventually(lambda: order == [0])
        for batch_id, priority in ((1, 0.0), (2, 5.0), (3, 0.0), (4, 1.0)):
            batches.submit_batch(BatchRequest(batch_id, priority=priority))
        gate.set()
        eventually(lambda: batches.get_completed_count() == 5)
    assert order == [0, 2, 4, 1, 3]


def test_synchronous_generates_when_asked() -> None:
    begun: list[int] = []
    with generator(noting(begun), use_async_generation=False, num_steps_async=4) as batches:
        assert batches.num_steps_async == 0
        assert batches.submit_batch(BatchRequest(0))
        batches.run(lambda: asyncio.sleep(0))  # it had its turn
        assert begun == []
        with pytest.raises(BatchTimeoutError):
            batches.get_batch(0, timeout=0)
        assert batches.get_batch(0).results == 0
        assert batches.should_submit_more() is False


def test_repeated_failure_ends_it_gracefully() -> None:
    async def fails(request: BatchRequest) -> int:
        raise ValueError(f"no. {request.batch_id}")

    batches = generator(fails, num_steps_async=1, max_failures=2)
    batches.start()
    for batch_id in range(3):
        assert batches.submit_batch(BatchRequest(batch_id))
        with pytest.raises(GenerationFailedError):
            batches.get_batch(batch_id)

    def refused() -> bool:
        try:
            batches.submit_batch(BatchRequest(9))
        except GenerationFailedError as error:
            return isinstance(error.__cause__, ValueError) and "no. 2" in str(error)
        return False

    eventually(refused)
    with pytest.raises(GenerationFailedError, match=r"no\. 2"):
        batches.start()
    assert batches.stop(LONG_S)


def test_a_reader_outlasts_the_time_limit_of_a_batch_and_hears_the_cause() -> None:
    with generator(hangs, use_async_generation=False, async_generation_timeout=0.2) as batches:
        batches.submit_batch(BatchRequest(0))
        with pytest.raises(GenerationFailedError, match=r"0\.2 s \(async_generation_timeout\)"):
            batches.get_batch(0)


def test_something_else_runs_in_its_loop() -> None:
    loops = []

    async def note(request: BatchRequest | None = None) -> str:
        loops.append(asyncio.get_running_loop())
        return "done"

    async def fails() -> None:
        raise OSError("unreachable")

    async def for_ever() -> None:
        await asyncio.Event().wait()

    async def stops() -> None:
        batches.stop()
        await for_ever()

    with generator(note) as batches:
        batches.submit_batch(BatchRequest(0))
        batches.get_batch(0)
        assert batches.run(note) == "done"
        assert loops[0] is loops[1]
        with pytest.raises(OSError, match="unreachable"):
            batches.run(fails)
        with pytest.raises(BatchTimeoutError):
            batches.run(for_ever, timeout=0.1)
        with pytest.raises(GenerationStoppedError):
            batches.run(stops)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_steps_async": -1},
        {"async_generation_timeout": 0},
        {"num_steps_async": 3, "async_max_queue_size": 2},
        {"async_max_queue_size": 0},
    ],
)
def test_nonsense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        generator(broken, **wrong)
