"""Servers that go wrong, one by one and in a whole run: nothing is lost and no rollout pays for it."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollstream.engine.sglang import SGLangEngine
from rollstream.errors import EngineError
from rollstream.generation.run import run_generation
from rollstream.store.validate import validate_run
from rollstream.testing.stub_faults import Faults, Latency
from rollstream.testing.stub_server import StubModel, StubServer
from rollstream.trajectory import Completion, SamplingParams
from tests.faults.runs import overrides, rows_of, stub_in_thread, write_prompts
from tests.support.until import until

SAMPLING = SamplingParams(max_tokens=16)


def ask(pool: SGLangEngine, number: int) -> "asyncio.Task[Completion]":
    return asyncio.create_task(
        pool.generate([number % 500, number // 500], SAMPLING, request_id=f"{number}-0-0")
    )


async def test_a_server_that_comes_later_with_another_model_gets_no_work(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with StubServer(model=StubModel("/models/good", vocab_size=512)) as good:
        async with StubServer() as placeholder:
            url, port = placeholder.url, int(placeholder.url.rpartition(":")[2])
        pool = SGLangEngine([good.url, url], model_path="/models/good")
        await pool.start()
        assert "going on without it" in caplog.text
        caplog.clear()
        rounds = 0

        async def asking(check: Callable[[], bool]) -> bool:
            nonlocal rounds
            rounds += 1
            await asyncio.gather(*(ask(pool, rounds * 10 + at) for at in range(10)))
            return check()

        async with StubServer(port=port, model=StubModel("/models/bad")) as bad:
            await until(lambda: asking(lambda: "gets no work" in caplog.text))
            await asyncio.sleep(1.0)  # it is asked again
            assert bad.stats.requests == 0
        assert caplog.text.count("gets no work") == 1
        assert "serves '/models/bad'" in caplog.text
        caplog.clear()
        async with StubServer(port=port, model=StubModel("/models/good", vocab_size=100)) as small:
            await until(lambda: asking(lambda: "vocab_size 100 (not 512)" in caplog.text))
            assert small.stats.requests == 0
        async with StubServer(port=port, model=StubModel("/elsewhere/good")) as late:
            await until(lambda: asking(lambda: late.stats.answered > 0))
        await pool.close()


def run(tmp_path: Path, urls: list[str], **settings: object) -> list[dict[str, object]]:
    """A whole run of 120 prompts; its rows."""
    prompts = write_prompts(tmp_path / "prompts.jsonl", 120)
    result = run_generation(overrides(tmp_path / "run", prompts, ",".join(urls), **settings))
    assert (result.total, result.completed, result.failed) == (120, 120, 0)
    assert validate_run(tmp_path / "run").sound
    return rows_of(tmp_path / "run")


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_a_run_loses_a_server(tmp_path: Path, how: str) -> None:
    """Killed: its sockets close. Frozen: it takes connections and says nothing. No attempt is charged."""
    slow: dict[str, Any] = {"latency": Latency("fixed", 0.1), "max_running": 8}
    lost: list[int] = []
    with stub_in_thread(**slow) as one, stub_in_thread(**slow, faults=Faults(die_after=10)) as other:
        die = other.on_death

        def lose() -> None:
            lost.append(other.stats.in_flight)
            if how == "killed":
                die()
            else:
                other.faults = Faults(frozen=True)

        other.on_death = lose
        rows = run(
            tmp_path,
            [one.url, other.url],
            actor_rollout_ref__rollout__engine_kwargs="{probe_after: 0.5, health_timeout: 0.5}",
            generation__max_in_flight=24,
            generation__max_attempts=1,
        )
    assert len(rows) == 120
    assert lost and lost[0] > 0


def test_a_server_of_another_model_ends_the_run_at_its_start(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 3)
    with (
        stub_in_thread(model=StubModel("/models/another")) as server,
        pytest.raises(EngineError, match="serves '/models/an"),
    ):
        run_generation(overrides(tmp_path / "run", prompts, server.url))
