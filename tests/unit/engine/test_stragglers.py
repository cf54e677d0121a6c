"""Requests leave a slow server for a faster one with room, with the tokens they have."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.engine import pool as pool_module
from rollstream.engine.kind import EngineOptions
from rollstream.engine.sglang import SGLangEngine, SGLangReplica
from rollstream.engine.stragglers import FASTER, should_move
from rollstream.testing.stub_answers import book_rule
from rollstream.testing.stub_faults import Latency
from rollstream.testing.stub_server import StubServer
from rollstream.trajectory import Completion, SamplingParams
from tests.support.until import until

LONG, SHORT = (book_rule(length, prompt_tokens=4) for length in (200, 10))


@given(
    prompt_tokens=st.integers(1, 100_000),
    max_tokens=st.integers(1, 100_000),
    seconds=st.floats(0.0, 1e5),
    here=st.floats(1e-4, 10.0),
    there=st.floats(1e-4, 10.0),
)
def test_only_to_faster_servers_and_only_what_saves_time(
    prompt_tokens: int, max_tokens: int, seconds: float, here: float, there: float
) -> None:
    moves = should_move(
        prompt_tokens=prompt_tokens, max_tokens=max_tokens, seconds=seconds, here=here, there=there
    )
    if moves:
        assert here >= FASTER * there
        assert 0 < seconds / here < max_tokens  # it has begun, and is not at its end
        assert not should_move(  # never back again
            prompt_tokens=prompt_tokens, max_tokens=max_tokens, seconds=seconds, here=there, there=here
        )


def test_a_long_answer_moves_and_a_new_or_a_nearly_done_one_stays() -> None:
    speeds = {"here": 0.1, "there": 0.02}
    assert should_move(prompt_tokens=100, max_tokens=1000, seconds=20.0, **speeds)
    assert not should_move(prompt_tokens=100, max_tokens=1000, seconds=0.1, **speeds)
    assert not should_move(prompt_tokens=100, max_tokens=1000, seconds=99.9, **speeds)
    assert not should_move(prompt_tokens=10**6, max_tokens=1000, seconds=20.0, **speeds)  # read again


@dataclass
class Straggler:
    """A request that has begun at a slow server, and a fast one that is idle."""

    slow: StubServer
    fast: StubServer
    pool: SGLangEngine
    task: "asyncio.Task[Completion]"


def ask(pool: SGLangEngine, number: int, **changes: Any) -> "asyncio.Task[Completion]":
    sampling = replace(SamplingParams(max_tokens=500), **changes)
    return asyncio.create_task(pool.generate([number, 1, 2, 3], sampling, request_id=f"r{number}"))


def at_speed(speed: float) -> Latency:
    return Latency(token_s=0.005 / speed)


def whole(server: StubServer, seed: int | None = None) -> tuple[list[int], list[float]]:
    """What the request gets that stays where it is."""
    return server.book.answer([1, 1, 2, 3], seed, 200)


@asynccontextmanager
async def straggler(
    slow_speed: float = 0.05, *, moves: bool = True, **changes: Any
) -> AsyncIterator[Straggler]:
    """Answers of 200 tokens take 1 s at speed 1; both servers have shown how fast they are."""
    kwargs = {"health_timeout": 60.0, "probe_after": 0.2}
    async with (
        StubServer(SHORT, latency=at_speed(10 * slow_speed)) as slow,
        StubServer(SHORT, latency=at_speed(10.0)) as fast,
    ):
        pool = SGLangEngine([slow.url], engine_kwargs=kwargs | {"move_stragglers": moves})
        await pool.start()
        slow.latency = at_speed(slow_speed)
        await ask(pool, 50)
        slow.rule = LONG
        task = ask(pool, 1, **changes)
        await until(lambda: slow.stats.in_flight == 1)
        await pool.add_replica(SGLangReplica(fast.url, EngineOptions(None, engine_kwargs=kwargs)))
        await ask(pool, 100)  # goes to the idle one
        assert fast.stats.requests == 1
        fast.rule = LONG
        yield Straggler(slow, fast, pool, task)
        await pool.close()
        await until(lambda: not slow.stats.in_flight and not fast.stats.in_flight)


async def test_it_goes_on_at_the_fast_server_with_its_tokens() -> None:
    async with straggler() as at:
        completion = await at.task
        assert (at.slow.stats.aborts, at.fast.stats.requests) == (1, 2)
        # Exactly as if it had not moved; only the token that the abort came with is sampled twice.
        assert (completion.token_ids, completion.logprobs) == whole(at.fast)
        assert at.slow.stats.tokens + at.fast.stats.tokens <= 10 + 10 + 200 + 1
        assert completion.finish_reason == "stop"


@pytest.mark.parametrize(
    "changes", [{"seed": 7}, {"stop": ("x",)}, {"moves": False}], ids=lambda changes: next(iter(changes))
)
async def test_it_stays(changes: dict[str, Any]) -> None:
    """Where its tokens would be others, or moves are turned off."""
    async with straggler(0.5, **changes) as at:
        completion = await at.task
        assert (at.slow.stats.aborts, at.fast.stats.requests) == (0, 1)
        assert completion.token_ids == whole(at.fast, changes.get("seed"))[0]


async def test_the_caller_aborts_after_a_move() -> None:
    async with straggler() as at:
        at.fast.latency = at_speed(0.05)
        await until(lambda: at.fast.stats.in_flight == 1)
        await at.pool.abort("r1")
        completion = await at.task
        assert completion.finish_reason == "abort"
        assert completion.token_ids == whole(at.fast)[0][: len(completion.token_ids)]
        assert len(completion.logprobs or ()) == len(completion.token_ids)


async def test_the_fast_server_dies_after_a_move() -> None:
    """The request goes on with the tokens that it had before."""
    async with straggler() as at:
        at.fast.latency = at_speed(0.5)
        await until(lambda: at.fast.stats.in_flight == 1)
        at.slow.latency = at_speed(10.0)
        at.fast.kill()
        completion = await at.task
        assert (completion.token_ids, completion.logprobs) == whole(at.slow)


async def test_cancelling_a_request_that_moves_leaves_nothing() -> None:
    async with straggler() as at:
        await until(lambda: at.slow.stats.aborts == 1)
        at.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await at.task


async def test_a_fault_of_the_look_for_stragglers_surfaces_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(**_: Any) -> bool:
        raise ZeroDivisionError

    monkeypatch.setattr(pool_module, "should_move", broken)
    async with straggler(0.5) as at:
        await at.task
        with pytest.raises(ZeroDivisionError):
            await at.pool.close()
