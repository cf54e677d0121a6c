"""Counts the requests that go through an engine."""

import asyncio
import time
from collections.abc import Awaitable
from typing import Any, Protocol, TypeVar

from rollstream.engine.base import Capabilities, ChatEngine, ChatPrompt, Engine
from rollstream.errors import EngineError, EngineOverloadedError
from rollstream.rollout.stats import Counts
from rollstream.trajectory import Completion, SamplingParams


class Answered(Protocol):
    """What an engine gave, as far as it is counted."""

    @property
    def token_ids(self) -> list[int]:
        """The sampled ids."""
        ...


_Answered = TypeVar("_Answered", bound=Answered)


class InstrumentedEngine:
    """An engine as it is, whose requests are counted."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.calls = 0
        """Requests at the engine now."""
        self._counts = Counts()
        self._counted_at = time.monotonic()

    @property
    def capabilities(self) -> Capabilities:
        return self.engine.capabilities

    @property
    def counts(self) -> Counts:
        """Of requests until now; a worker that uses this engine counts here, too."""
        self._count(0)
        return self._counts

    async def start(self) -> None:
        await self.engine.start()

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        images: list[object] | None = None,
    ) -> Completion:
        return await self.counted(
            self.engine.generate(prompt_ids, sampling, request_id=request_id, images=images)
        )

    async def chat(self, prompt: ChatPrompt, sampling: SamplingParams, *, request_id: str) -> Completion:
        if not isinstance(self.engine, ChatEngine):
            raise EngineError("this engine speaks token ids, not messages")
        completion = await self.counted(self.engine.chat(prompt, sampling, request_id=request_id))
        if not completion.token_ids and completion.usage is not None:
            self._counts.tokens += completion.usage[1]
        return completion

    async def counted(self, request: Awaitable[_Answered]) -> _Answered:
        """Awaits a request that goes to the engine by another way, and counts it."""
        started = self._count(1)
        try:
            completion = await request
        except EngineOverloadedError:
            self._counts.overloads += 1
            raise
        except asyncio.CancelledError:
            self._counts.cut_off += 1
            raise
        finally:
            ended = self._count(-1)
        self._counts.finished += 1
        self._counts.tokens += len(completion.token_ids)
        self._counts.seconds += ended - started
        return completion

    async def abort(self, request_id: str) -> None:
        await self.engine.abort(request_id)

    async def update_weights(self, source: str, version: int) -> None:
        await self.engine.update_weights(source, version)

    async def health(self) -> bool:
        return await self.engine.health()

    async def close(self) -> None:
        await self.engine.close()

    def _count(self, change: int) -> float:
        now = time.monotonic()
        self._counts.call_seconds += self.calls * (now - self._counted_at)
        self._counted_at = now
        self.calls += change
        return now

    def __getattr__(self, name: str) -> Any:
        # What an engine has beyond the protocol stays within the reach of agent loops.
        return getattr(self.engine, name)
