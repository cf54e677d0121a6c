"""The loop without the package: what its environment and engine do to a rollout, and what rollouts share."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rollstream.errors import ConfigError, EngineError
from rollstream.gateway import agents
from rollstream.integrations.verifiers import VerifiersLoop
from rollstream.integrations.verifiers.loop import SharedEnvironment
from rollstream.integrations.verifiers.outcome import OpenSession, Played
from rollstream.testing.scripted import ScriptedEngine
from rollstream.trajectory import SamplingParams
from tests.unit.agent.rollouts import resources, started
from tests.unit.gateway.test_recorder import ask, user


class Environment:
    """Asks once; what it makes of an error is another error. Counts how often it was opened and closed."""

    name = "scripted"

    def __init__(self) -> None:
        self.opened = self.closed = 0
        self.fails_to_open = False
        self.over = asyncio.Event()
        """Until then a clean-up goes on."""
        self.over.set()

    @asynccontextmanager
    async def serving(self, url: str, model: str) -> AsyncIterator[None]:
        await asyncio.sleep(0)
        if self.fails_to_open:
            raise OSError("no port")
        self.opened += 1
        task = asyncio.current_task()
        try:
            yield
        finally:
            assert asyncio.current_task() is task
            self.closed += 1

    async def run(
        self, row: Any, messages: Any, open_session: OpenSession, sampling: SamplingParams
    ) -> list[Played]:
        recorder = open_session(uuid.uuid4().hex)
        try:
            await ask(recorder, messages)
        except EngineError:
            try:
                await asyncio.Event().wait()  # it would wait for ever
            finally:
                while not self.over.is_set():  # and cancelled twice it would clean up still
                    await self.over.wait()
        return [Played(recorder, 1.0, "max_turns")]


async def play(opened: SharedEnvironment, engine: ScriptedEngine) -> Any:
    name = uuid.uuid4().hex
    one = VerifiersLoop(resources(engine), request_id=name, shared=opened, environment="e")
    return await one.run(SamplingParams(8), verifiers={}, raw_prompt=[user("q")])


def opened_for(environment: Environment) -> SharedEnvironment:
    return SharedEnvironment(environment, "m", None)  # type: ignore[arg-type]


async def test_what_the_environment_makes_of_an_engines_error_is_not_told() -> None:
    engine, opened = await started(response_tokens=3), opened_for(Environment())
    engine.fail(lambda request: True, EngineError("refused"))
    with pytest.raises(EngineError, match="refused"):
        await play(opened, engine)
    (trajectory,) = await play(opened, engine)
    assert (trajectory.reward, trajectory.finish_reason) == (1.0, "max_turns")


async def test_a_clean_up_without_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "_CLEAN_UP_S", 0.01)
    environment = Environment()
    environment.over.clear()
    engine = await started()
    engine.fail(lambda request: True, EngineError("refused"))
    with pytest.raises(EngineError, match="refused"):
        await play(opened_for(environment), engine)
    environment.over.set()


def test_rollouts_of_an_event_loop_share_one_opening() -> None:
    environment = Environment()
    opened = opened_for(environment)

    async def many() -> None:
        engine = await started(response_tokens=3)
        environment.fails_to_open = True
        results = await asyncio.gather(*(play(opened, engine) for _ in range(2)), return_exceptions=True)
        assert [str(result) for result in results] == ["no port", "no port"]
        environment.fails_to_open = False
        first, *others = (asyncio.create_task(play(opened, engine)) for _ in range(5))
        await asyncio.sleep(0)
        first.cancel()  # while it opens: the others are not disturbed
        await asyncio.gather(*others)

    for times in (1, 2):
        asyncio.run(many())
        assert (environment.opened, environment.closed) == (times, times)


async def test_options_that_are_wrong() -> None:
    given = resources(await started())
    with pytest.raises(ConfigError, match="environment"):
        VerifiersLoop(given, request_id="x")
    with pytest.raises(ConfigError, match="mapping"):
        VerifiersLoop(given, request_id="x", environment="e", arguments=[1])  # type: ignore[arg-type]
