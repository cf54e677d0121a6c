"""Workers on scripted engines, importable where workers run, and an executor over a run directory."""

import asyncio
import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollstream.agent.base import AgentLoop, AgentResources
from rollstream.agent.conversation import Conversation
from rollstream.agent.prompt import PromptRenderer
from rollstream.agent.registry import register
from rollstream.chat.tokenizer import load_tokenizer
from rollstream.demo import MODEL_PATH
from rollstream.engine.continuation import ContinuingEngine
from rollstream.errors import ConfigError, EngineOverloadedError, EngineUnavailableError
from rollstream.rollout.availability import EngineAvailability
from rollstream.rollout.executor import Executor, WorkerBackend
from rollstream.rollout.retry import RetryPolicy
from rollstream.rollout.worker import RolloutWorker
from rollstream.rollout.worker_host import BuiltWorker, WorkerRecipe
from rollstream.store.writer import StoreWriter
from rollstream.testing.scripted import ScriptedEngine
from rollstream.trajectory import PromptRow, SamplingParams, Trajectory
from tests.support.until import until
from tests.unit.store.fabric import N, open_dir


@register("deadly_agent")
class DeadlyAgent(AgentLoop):
    """Ends its process in row 7, and is an answer of one token elsewhere."""

    async def run(self, sampling: SamplingParams, *, raw_prompt: Any, **row: Any) -> Trajectory:
        if row["index"] == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(0.02)
        return Trajectory([1], [2], [1], [-0.5], raw_prompt, "stop")


@register("patient_agent")
class PatientAgent(AgentLoop):
    """Hears two answers and waits for ever; in another process it hears the third one."""

    resumable = True

    async def run(self, sampling: SamplingParams, *, raw_prompt: Any, **row: Any) -> Trajectory:
        prompt_ids = await self.render(raw_prompt, prompt_key=row["prompt_key"])
        conversation = Conversation(self, raw_prompt, prompt_ids)
        while conversation.assistant_turns < 3:
            if conversation.assistant_turns == 2 and conversation.resumed is None:
                await asyncio.Event().wait()
            await conversation.generate(replace(sampling, max_tokens=4))
        return conversation.trajectory("stop")


class LostEngine(ScriptedEngine):
    """One that has gone for good."""

    async def health(self) -> bool:
        return False

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        raise EngineUnavailableError("it has gone")


class FullEngine(ScriptedEngine):
    """One that refuses two of three requests for want of room."""

    async def generate(self, *args: Any, request_id: str, **kwargs: Any) -> Any:
        if random.random() < 2 / 3:
            raise EngineOverloadedError("no room")
        return await super().generate(*args, request_id=request_id, **kwargs)


@dataclass(frozen=True)
class ScriptedRecipe:
    """A worker on a scripted engine."""

    loop: str = "single_turn_agent"
    latency: float = 0.0
    broken: str = ""
    """What is wrong with the configuration."""
    lost: tuple[int, ...] = ()
    """Numbers of workers whose engine has gone."""
    full: bool = False

    async def build(self, number: int) -> BuiltWorker:
        if self.broken:
            raise ConfigError(self.broken)
        kind = LostEngine if number in self.lost else FullEngine if self.full else ScriptedEngine
        engine = kind(latency=self.latency, record=False)
        await engine.start()
        metered = ContinuingEngine(engine)
        tokenizer = load_tokenizer(str(MODEL_PATH))
        availability = EngineAvailability(engine, timeout=0.3 if self.lost else 30)
        worker = RolloutWorker(
            AgentResources(
                metered, tokenizer, PromptRenderer(tokenizer, prompt_length=64, truncation="error"), 16
            ),
            sampling=SamplingParams(16),
            seed=3,
            default_agent_loop=self.loop,
            retry=RetryPolicy(100 if self.full else 3, 0.001, 0.002),
            attempt_timeout=30,
            availability=availability,
            counts=metered.meter.counts,
        )
        return BuiltWorker(
            worker, metered.meter, availability, close=engine.close, engine=engine, continuing=metered
        )


def load_row(index: int) -> PromptRow:
    return PromptRow(index, f"{index:032x}", [{"role": "user", "content": f"{index} + 1 ="}], "test")


class Harness:
    """An executor of several workers over a run directory."""

    def __init__(
        self,
        root: Path,
        backend: Callable[[Callable[[], WorkerRecipe]], WorkerBackend],
        recipe: ScriptedRecipe,
        **settings: Any,
    ) -> None:
        self.run = open_dir(root)
        self.writer = StoreWriter(self.run, save_batch_size=1000, pull_timeout=60)
        defaults = {"max_in_flight": 16, "workers": 2, "attempt_timeout": 30}
        defaults["load_row"] = lambda key: load_row(key.index)
        self.executor = Executor(self.writer, backend(lambda: recipe), **{**defaults, **settings})

    async def __aenter__(self) -> "Harness":
        self.writer.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.executor.close()
        await self.writer.close()
        self.run.close()

    async def start(self, workers: int = 1) -> None:
        """Returns when so many workers are ready."""
        await self.executor.start()
        await until(lambda: len(self.executor.pids) >= workers)

    async def work(self, rows: int) -> None:
        await self.executor.run(self.run.state.keys.owed(range(rows), retry_failed=False))


def every_key(rows: int) -> list[tuple[int, int, int]]:
    return [(index, repeat, 0) for index in range(rows) for repeat in range(N)]
