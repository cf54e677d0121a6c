"""The agent loop: what happens within one rollout, and the register of loops by name."""

import difflib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from rollstream.agent.prompt import PromptRenderer
from rollstream.chat.tokenizer import ChatTokenizer
from rollstream.engine.base import Engine
from rollstream.errors import ConfigError
from rollstream.trajectory import Completion, Metrics, SamplingParams, Trajectory


@dataclass(frozen=True, slots=True)
class AgentResources:
    """What the loops of one worker share: built once, used by all."""

    engine: Engine
    tokenizer: ChatTokenizer
    prompts: PromptRenderer
    response_length: int
    """Response tokens of a trajectory at most."""
    max_model_len: int | None = None
    """Prompt plus response tokens at most; None: no limit is known."""


class AgentLoop(ABC):
    """One rollout's loop; instantiated for each rollout.

    A subclass implements `run` and calls `generate` for every generation, so that time, calls and
    request ids are kept in one place.
    """

    def __init__(self, resources: AgentResources, *, request_id: str) -> None:
        """`request_id` stays the same over all turns, so that an engine can reuse its prefix cache."""
        self.resources = resources
        self.request_id = request_id
        self.metrics = Metrics()

    @abstractmethod
    async def run(self, sampling: SamplingParams, **row: Any) -> Trajectory | list[Trajectory]:
        """Executes the rollout.

        Args:
            sampling: how to sample; `max_tokens` is the response length.
            row: `raw_prompt` (messages), `prompt_key`, `index`, `data_source`, `ground_truth`,
                `extra_info`, `tools_kwargs`, and the prompt row's other columns.

        Returns:
            One trajectory, or several: snapshots first, the final one last.
        """

    async def generate(self, prompt_ids: list[int], sampling: SamplingParams) -> Completion:
        """Asks the engine for one continuation and counts it."""
        started = time.monotonic()
        try:
            completion = await self.resources.engine.generate(
                prompt_ids, sampling, request_id=self.request_id
            )
        finally:
            self.metrics.generate_s += time.monotonic() - started
            self.metrics.engine_calls += 1
        self.metrics.cached_prompt_tokens += completion.cached_prompt_tokens
        return completion


AgentLoopFactory = Callable[..., AgentLoop]
_LoopT = TypeVar("_LoopT", bound=type[AgentLoop])
_loops: dict[str, AgentLoopFactory] = {}


def register(name: str) -> Callable[[_LoopT], _LoopT]:
    """Class decorator: makes an agent loop known under a name."""

    def decorate(loop: _LoopT) -> _LoopT:
        _loops[name] = loop
        return loop

    return decorate


def get_agent_loop(name: str) -> AgentLoopFactory:
    """The loop registered under a name. Raises `ConfigError` with the nearest name."""
    import rollstream.agent.single_turn  # noqa: F401  (registers the built-in loop)

    if name not in _loops:
        near = difflib.get_close_matches(name, _loops, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"unknown agent loop {name!r}{hint} Known: {', '.join(sorted(_loops))}")
    return _loops[name]
