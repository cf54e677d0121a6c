"""Environments of the installed verifiers as agent loops, on an engine that is listened to."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson

from rollstream.agent.registry import AgentLoops, load_agent_loops
from rollstream.data.row import parse_row
from rollstream.engine.openvino import OpenVINOEngine
from rollstream.integrations.verifiers import write_prompts
from rollstream.integrations.verifiers.loading import installed_version
from rollstream.rollout.worker import RolloutWorker
from rollstream.trajectory import Completion, PromptRow, SamplingParams, Trajectory
from tests.unit.agent.rollouts import demo_tokenizer, make_worker, resources

IS_V1 = installed_version() >= (0, 3)
FILE = Path(__file__).with_name(f"sums_v{int(IS_V1)}.py")
MODEL = Path(__file__).parents[3] / "src" / "rollstream" / "demo" / "model"


class Listened:
    """An engine whose answers are kept."""

    def __init__(self, engine: OpenVINOEngine) -> None:
        self.engine = engine
        self.heard: list[tuple[list[int], Completion]] = []
        self.fails: list[Exception] = []
        """Raised by the next calls."""
        self.hangs = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def generate(self, prompt_ids: list[int], sampling: SamplingParams, **given: Any) -> Completion:
        if self.fails:
            raise self.fails.pop()
        if self.hangs:
            await asyncio.Event().wait()
        completion = await self.engine.generate(prompt_ids, sampling, **given)
        self.heard.append((list(prompt_ids), completion))
        return completion


@asynccontextmanager
async def listened(folder: Path) -> AsyncIterator[Listened]:
    engine = OpenVINOEngine(MODEL, log_path=folder / "engine.log", engine_kwargs={"num_threads": 1})
    await engine.start()
    try:
        yield Listened(engine)
    finally:
        await engine.close()


def environment(folder: Path, **arguments: Any) -> tuple[AgentLoops, list[PromptRow]]:
    """The loops and the rows of an environment, by the files that a run has."""
    written = write_prompts(f"{FILE}:load_environment", folder, arguments=arguments, name="sums")
    rows = [
        parse_row(orjson.loads(line), at, "prompt")[0]
        for at, line in enumerate(written.prompts.read_bytes().splitlines())
    ]
    return AgentLoops(load_agent_loops(str(written.agents))), rows


def worker(engine: Any, loops: AgentLoops | None = None, **given: Any) -> RolloutWorker:
    more = {
        name: given.pop(name)
        for name in ("reward", "seed", "max_attempts", "attempt_timeout")
        if name in given
    }
    return make_worker(resources(engine, **{"response_length": 400, **given}), loops=loops, **more)


def seen() -> dict[str, dict[str, Any]]:
    """What the environment had of each answer."""
    modules = [
        module
        for name, module in sys.modules.items()
        if name == "sums_v1" or name.startswith("rollstream_user_sums_v0")
    ]
    return {name: answer for module in modules for name, answer in module.SEEN.items()}


def turns(trajectory: Trajectory) -> list[tuple[list[int], list[int], list[float]]]:
    """Of each answer: what came before it, its ids, its log-probs."""
    found = []
    for before, ids in trajectory.generations():
        at = len(before) - len(trajectory.prompt_ids)
        found.append((before, ids, (trajectory.response_logprobs or [])[at : at + len(ids)]))
    return found


def text(ids: list[int]) -> str:
    """What ids say, without the end of the turn."""
    tokenizer = demo_tokenizer()
    ends = tokenizer.end_ids
    return tokenizer.decode(ids[:-1] if ids[-1] in ends else ids, skip_special_tokens=False)
