"""R1, R3: a rollout goes on behind its finished turns, in another process, as if nothing had been."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollstream.agent.base import AgentResources
from rollstream.agent.registry import AgentLoops, LoopEntry
from rollstream.agent.tool_agent import ToolAgent
from rollstream.agent.tools.base import Tool
from rollstream.agent.turns import Turns
from rollstream.engine.openai import OpenAIEngine
from rollstream.errors import EngineUnavailableError, TransientEngineError
from rollstream.store.records import EncodedTurn, RecordCodec
from rollstream.testing.scripted import ScriptedEngine, ScriptedRequest
from rollstream.testing.stub_chat import ChatStub
from rollstream.trajectory import CALL_TIMES, PromptRow, Rollout, RolloutKey, Trajectory
from tests.unit.agent.rollouts import (
    call_text,
    completed,
    demo_tokenizer,
    make_row,
    make_worker,
    resources,
    started,
)
from tests.unit.agent.tools.tools import class_tool, functions, opened

COUNTS = """
calls = []

@function_tool(schema={"type": "function", "function": {"name": "next", "description": "."}})
def next(n=0):
    calls.append(n)
    return f"it was {n}", n / 4, {"n": n}
"""
ANSWERS = [*(call_text("next", n=n) for n in range(3)), "enough"]


def by_context(request: ScriptedRequest) -> list[int]:
    """The answer of a turn, whichever process asks for it, with the seed in it."""
    turn = demo_tokenizer().decode(request.prompt_ids, skip_special_tokens=False).count("assistant\n") - 1
    return demo_tokenizer().encode(f"{request.sampling.seed}: {ANSWERS[turn]}<|im_end|>")


async def play(
    tools: Sequence[Any],
    kept: Sequence[EncodedTurn] = (),
    *,
    row: PromptRow | None = None,
    engine: ScriptedEngine | None = None,
    **given: Any,
) -> tuple[Rollout, list[EncodedTurn], ScriptedEngine]:
    """A rollout that goes on behind `kept`, what it keeps besides, and its engine."""
    more: list[EncodedTurn] = []
    engine, row = engine or await started(by_context), row or make_row()
    async with opened(tools) as box:
        worker = make_worker(resources(engine, tools=box), **given)
        turns = Turns(
            RolloutKey(0, 0), row.prompt_key, [one.body for one in kept], more.append, RecordCodec()
        )
        return completed(await worker.run(row, 0, turns=turns)), more, engine


def without_times(trajectory: Trajectory) -> dict[str, Any]:
    metrics = trajectory.metrics
    counts = metrics.engine_calls, metrics.tool_calls, metrics.tool_errors, metrics.cached_prompt_tokens
    fields = {name: getattr(trajectory, name) for name in trajectory.__slots__ if name != "metrics"}
    extra = {name: value for name, value in trajectory.extra.items() if name != CALL_TIMES}
    return fields | {"counts": counts, "extra": extra}


async def test_it_goes_on_behind_each_turn(tmp_path: Path) -> None:
    tools = functions(tmp_path, COUNTS)
    whole, turns, _ = await play(tools)
    assert [turn.number for turn in turns] == [0, 1, 2, 3]
    assert whole.final.extra["tool_rewards"] == [0.0, 0.25, 0.5]
    for finished in range(5):
        rollout, more, engine = await play(tools, turns[:finished])
        assert without_times(rollout.final) == without_times(whole.final)
        assert len(engine.requests) == 4 - finished
        assert [turn.number for turn in more] == [*range(finished, 4)]
    kept = RecordCodec().decode_turn(turns[2].body)
    assert rollout.final.metrics.total_s > kept.metrics.total_s > 0.0


async def test_other_content_of_the_row_begins_anew(tmp_path: Path) -> None:
    tools = functions(tmp_path, COUNTS)
    _, turns, _ = await play(tools)
    row = make_row()
    for other in (make_row(text="5 + 5 ="), PromptRow(0, "another", row.messages, "test")):
        _, more, engine = await play(tools, turns[:2], row=other)
        assert len(engine.requests) == len(more) == 4


async def test_a_turn_of_another_attempt_is_not_taken_for_the_next(tmp_path: Path) -> None:
    """Damage may have taken the first turn of that attempt, so that one of the attempt before stands there."""
    tools = functions(tmp_path, COUNTS)
    _, turns, _ = await play(tools)
    _, others, _ = await play(tools, seed=4)
    for kept, calls in (([*turns[:2], *others[2:]], 2), ([*others[:1], *turns[1:]], 3)):
        _, _, engine = await play(tools, kept)
        assert len(engine.requests) == calls


async def test_a_tool_with_a_state_keeps_none_and_a_loop_says_it_itself(tmp_path: Path) -> None:
    class Counts(Tool):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            return "it was so"

    class Stateless(Counts):
        stateless = True

    class Mine(ToolAgent):
        """Has not thought about it."""

    assert (await play([class_tool(Counts, "next")]))[1] == []
    assert len((await play([class_tool(Stateless, "next")]))[1]) == 4
    loops = AgentLoops({"mine": LoopEntry(Mine)})
    assert (await play(functions(tmp_path, COUNTS), loop="mine", loops=loops))[1] == []


async def test_an_outage_goes_on_and_another_attempt_begins_anew(tmp_path: Path) -> None:
    def third(request: ScriptedRequest) -> bool:
        return len(engine.requests) == 3

    for error, calls, numbers in (
        (EngineUnavailableError("away"), 5, [0, 1, 2, 3]),
        (TransientEngineError("busy"), 7, [0, 1, 0, 1, 2, 3]),
    ):
        engine = await started(by_context)
        engine.fail(third, error)
        rollout, more, _ = await play(functions(tmp_path, COUNTS), engine=engine)
        assert len(engine.requests) == calls
        assert [turn.number for turn in more] == numbers
        assert len(rollout.final.messages) == 8


async def test_a_hosted_model_is_asked_for_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def answer(body: dict[str, Any]) -> str | dict[str, Any]:
        turn = len(body["messages"]) // 2
        function = {"name": "next", "arguments": orjson.dumps({"n": turn}).decode()}
        call = {"type": "function", "id": f"c{turn}", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]} if turn < 3 else "enough"

    async with ChatStub(answer) as stub, opened(functions(tmp_path, COUNTS)) as box:
        engine = OpenAIEngine([stub.url], model_path="stub")
        await engine.start()
        worker = make_worker(
            AgentResources(engine, None, None, 1000, tools=box), loop="chat_agent", seed=None, logprobs=False
        )
        turns: list[EncodedTurn] = []
        made: list[Trajectory] = []
        for finished in (0, 2, 4):
            before, bodies = len(stub.requests), [turn.body for turn in turns[:finished]]
            keeping = Turns(RolloutKey(0, 0), make_row().prompt_key, bodies, turns.append, RecordCodec())
            made.append(completed(await worker.run(make_row(), 0, turns=keeping)).final)
            assert len(stub.requests) - before == 4 - finished
        await engine.close()
    assert without_times(made[0]) == without_times(made[1]) == without_times(made[2])
    assert len(made[0].messages) == 8
