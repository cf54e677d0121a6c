"""An environment's rollout ends with the engine's error, also one whose clean-up does not end."""

import asyncio

import pytest

from rollstream.errors import ConfigError, EngineError
from rollstream.integrations.verifiers import VerifiersLoop, loop
from tests.unit.agent.rollouts import resources, started


async def cut_off(work: object, error: Exception) -> None:
    broken: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
    task = asyncio.ensure_future(loop._unless_broken(work, broken))
    await asyncio.sleep(0)
    broken.set_result(error)
    with pytest.raises(EngineError, match="refused"):
        await task


async def test_what_the_environment_makes_of_an_engines_error_is_not_told() -> None:
    cleaned = []

    async def environment() -> list[object]:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cleaned.append(True)
            raise ValueError("no answer") from None
        return []

    await cut_off(environment(), EngineError("refused"))
    assert cleaned == [True]


async def test_a_clean_up_without_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_CLEAN_UP_S", 0.01)
    over = asyncio.Event()

    async def environment() -> list[object]:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await over.wait()
        return []

    await cut_off(environment(), EngineError("refused"))
    over.set()
    await asyncio.sleep(0)


async def test_options_that_are_wrong() -> None:
    given = resources(await started())
    with pytest.raises(ConfigError, match="environment"):
        VerifiersLoop(given, request_id="x")
    with pytest.raises(ConfigError, match="mapping"):
        VerifiersLoop(given, request_id="x", environment="e", arguments=[1])  # type: ignore[arg-type]
