"""R7: memory does not grow with the number of finished rollouts, whatever they did with tools."""

import asyncio
import gc
import sys
import threading
from typing import Any

import pytest

from rollstream.agent.base import AgentResources
from rollstream.agent.interactions import Interaction, Interactions
from rollstream.agent.tools.base import Tool
from rollstream.rollout.worker import RolloutWorker
from rollstream.testing.scripted import AnswerRule, ScriptedRequest
from tests.unit.agent.rollouts import (
    END,
    call_text,
    completed,
    demo_tokenizer,
    make_row,
    make_worker,
    resources,
    started,
)
from tests.unit.agent.tools.tools import class_tool, opened

WARM, IN_FLIGHT = 1_500, 64
"""After 500 rollouts the lists that Python keeps for reuse still fill (166 blocks in 500 more), after 1,500 hardly."""
NOISE = 0.1
"""Objects per rollout. A rollout makes thousands; one that is kept for each shows as 1.0."""


class Doubles(Tool):
    """With a state for each rollout, and an error now and then."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        super().__init__(config, tool_schema)
        self.begun: dict[str, int] = {}

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
        assert instance_id is not None
        self.begun[instance_id] = 0
        return instance_id

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.begun[instance_id] += 1
        return str(2 * parameters["x"]), 0.5

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self.begun[instance_id]


class Partner(Interaction):
    """Ends at once."""

    async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
        return True, "", 1.0, {}


def two_turns() -> AnswerRule:
    """A call, then an answer; it keeps nothing. Every seventh row calls what is not there."""
    tokenizer = demo_tokenizer()
    calls = [tokenizer.encode(call_text(name, x=6) + END) for name in ("it", "none")]
    answer = tokenizer.encode("12" + END)
    asked = tokenizer.encode(f"3 + 9 ={END}\n<|im_start|>assistant\n")

    def rule(request: ScriptedRequest) -> list[int]:
        if request.prompt_ids[-len(asked) :] != asked:
            return list(answer)
        return list(calls[int(request.request_id.split("-")[0]) % 7 == 0])

    return rule


async def run_rows(worker: RolloutWorker, first: int, last: int, **given: Any) -> None:
    waiting = iter(range(first, last))

    async def work() -> None:
        for index in waiting:
            rollout = completed(await worker.run(make_row(index, **given), 0))
            assert len(rollout.final.messages) == 4

    async with asyncio.TaskGroup() as group:
        for _ in range(IN_FLIGHT):
            group.create_task(work())


def count_objects() -> tuple[int, int]:
    """Blocks of memory that Python has given out, and objects that its collector knows.

    Both are counted at no cost; tracing allocations makes a rollout three times as slow.
    """
    gc.collect()
    return sys.getallocatedblocks(), len(gc.get_objects())


@pytest.mark.soak
@pytest.mark.parametrize("last", [10_000])
async def test_thousands_of_rollouts_leave_nothing_behind(last: int) -> None:
    engine = await started(two_turns(), record=False)
    tool = class_tool(Doubles)
    tasks, threads = asyncio.all_tasks(), threading.active_count()
    info = {"extra_info": {"interaction_kwargs": {"name": "partner"}}}
    async with opened([tool]) as box:
        given: AgentResources = resources(
            engine, tools=box, interactions=Interactions({"partner": Partner({})})
        )
        worker = make_worker(given)
        await run_rows(worker, 0, WARM, **info)
        before = count_objects()
        await run_rows(worker, WARM, last, **info)
        after = count_objects()
        assert asyncio.all_tasks() == tasks
    assert tool.tool.begun == {}
    assert engine.in_flight == 0
    assert threading.active_count() <= threads
    for was, now in zip(before, after, strict=True):
        assert (now - was) / (last - WARM) < NOISE
