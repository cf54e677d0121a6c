"""Replicas of a pool that need no server."""

import asyncio
from dataclasses import dataclass, field

from rollstream.engine.base import Capabilities, TopScores
from rollstream.engine.replica import ReplicaRequest, ReplicaUnavailableError
from rollstream.trajectory import Completion

CAPABILITIES = Capabilities(
    token_ids=True,
    logprobs="raw",
    seeds=True,
    stop_strings=True,
    stop_token_ids=True,
    images=False,
    update_weights=True,
    max_model_len=None,
)


@dataclass(eq=False)
class FakeReplica:
    """Answers at once with the version of its weights, unless it is told otherwise."""

    name: str
    capabilities: Capabilities = CAPABILITIES
    version: int = 0
    away: bool = False
    hangs: bool = False
    """Takes requests and aborts, and does nothing."""
    drops: bool = False
    """Answers questions, but loses the connection of each request."""
    paused: bool = False
    """Is not healthy, but takes weights, which end the pause."""
    deaf_while_loading: bool = False
    mistake: Exception | None = None
    """What its answers to questions raise."""
    keeps_old: bool = False
    """Says that it has loaded weights, and has not."""
    logprobs: float = -1.0
    """Of each id, by the weights that it has; each version has others."""
    load_errors: list[Exception] = field(default_factory=list)
    """Of the next loads."""
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Loads end when it is set."""
    described: int = 0
    served: int = 0
    in_flight: int = 0
    loads: list[int] = field(default_factory=list)
    loading: int = 0
    cut_off_loads: int = 0

    def __post_init__(self) -> None:
        self.gate.set()

    def restart(self) -> None:
        """It is another process, with its first weights."""
        self.version, self.away = 0, False

    async def describe(self) -> Capabilities:
        self.described += 1
        if self.mistake is not None:
            raise self.mistake
        if self.away or self.hangs:
            raise ReplicaUnavailableError(f"{self.name} is away")
        return self.capabilities

    async def generate(self, request: ReplicaRequest) -> Completion:
        self.in_flight += 1
        try:
            if self.away or self.drops:
                raise ReplicaUnavailableError(f"{self.name} is away")
            if self.hangs:
                await asyncio.Event().wait()
            await asyncio.sleep(0.001)
            self.served += 1
            return Completion([5], [-1.0], "length", [(0, self.version)])
        finally:
            self.in_flight -= 1

    async def score(self, ids: list[int], start: int = 1, top_k: int = 0) -> TopScores:
        if self.away:
            raise ReplicaUnavailableError(f"{self.name} is away")
        return TopScores([self.logprobs] * (len(ids) - start))

    async def abort(self, rid: str) -> bool:
        return True

    async def health(self) -> bool:
        return not (self.away or self.hangs or self.paused or (self.deaf_while_loading and self.loading))

    async def update_weights(self, source: str, version: int) -> None:
        self.loads.append(version)
        self.loading += 1
        try:
            await self.gate.wait()
            if self.away:
                raise ReplicaUnavailableError(f"{self.name} is away")
            if self.load_errors:
                raise self.load_errors.pop(0)
            self.version, self.paused = version, False
            if not self.keeps_old:
                self.logprobs = -1.0 - version
        except asyncio.CancelledError:
            self.cut_off_loads += 1
            raise
        finally:
            self.loading -= 1

    async def close(self) -> None: ...
