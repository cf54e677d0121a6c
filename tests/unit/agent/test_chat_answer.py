"""Loops over an engine that speaks messages: a stub endpoint, and the demo model's tokenizer."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from rollstream.agent.base import AgentLoop
from rollstream.agent.chat_answer import calls_of, read_answer
from rollstream.agent.registry import AgentLoops, LoopEntry
from rollstream.agent.tools.toolbox import ToolBox
from rollstream.chat.template import TurnTemplate
from rollstream.engine.openai import OpenAIEngine
from rollstream.testing.stub_chat import ChatFault, ChatStub
from rollstream.trajectory import Message, PromptRow, SamplingParams, Trajectory
from tests.unit.agent.rollouts import (
    completed,
    contents,
    demo_tokenizer,
    failed,
    make_row,
    make_worker,
    resources,
)
from tests.unit.agent.tools.tools import functions, opened

ADD = """
@function_tool
def add(a: int, b: int) -> int:
    '''Adds.

    Args:
        a: One.
        b: The other.
    '''
    return a + b
"""


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def calling(arguments: Any, *, call_id: str = "c00000000", text: str = "") -> Message:
    call = {"type": "function", "id": call_id, "function": {"name": "add", "arguments": arguments}}
    return {"role": "assistant", "content": text, "tool_calls": [call]}


async def play(
    *answers: str | Message,
    row: PromptRow | None = None,
    loop: str = "tool_agent",
    loops: AgentLoops | None = None,
    tools: ToolBox | None = None,
    faults: list[ChatFault] | None = None,
    engine_kwargs: dict[str, Any] | None = None,
    **given: Any,
) -> tuple[Any, ChatStub]:
    """What becomes of a rollout that hears these answers in turn."""
    left = list(answers)
    async with ChatStub(lambda body: left.pop(0) if len(left) > 1 else left[0]) as stub:
        stub.faults += faults or []
        engine = OpenAIEngine([stub.url], model_path="stub", engine_kwargs=engine_kwargs)
        await engine.start()
        try:
            parts: Any = resources(engine, tools=tools, **given)  # type: ignore[arg-type]
            worker = make_worker(parts, loop=loop, loops=loops, seed=None, logprobs=False)
            return await worker.run(row or make_row(), 0), stub
        finally:
            await engine.close()


def text_of(trajectory: Trajectory) -> str:
    ids = trajectory.prompt_ids + trajectory.response_ids
    return demo_tokenizer().decode(ids, skip_special_tokens=False)


def by_mask(trajectory: Trajectory, value: int) -> str:
    pairs = zip(trajectory.response_ids, trajectory.response_mask, strict=True)
    return demo_tokenizer().decode([i for i, m in pairs if m == value], skip_special_tokens=False)


async def test_a_single_turn() -> None:
    result, stub = await play("12", loop="single_turn_agent")
    final = completed(result).final
    assert stub.requests[0]["messages"] == [{"role": "user", "content": "3 + 9 ="}]
    assert final.prompt_ids == demo_tokenizer().render([{"role": "user", "content": "3 + 9 ="}])
    assert by_mask(final, 1) == "12<|im_end|>"
    assert set(final.response_mask) == {1}
    assert final.messages[-1] == {"role": "assistant", "content": "12"}
    assert final.response_logprobs is None
    assert final.extra["token_exact"] is False


async def test_tools_are_called_as_the_endpoint_says(tmp_path: Path) -> None:
    async with opened(functions(tmp_path, ADD)) as tools:
        result, stub = await play(calling({"a": 3, "b": 9}, text="I add."), "12", tools=tools)
    final = completed(result).final
    assert contents(final) == ["12"]
    assert final.metrics.tool_calls == 1
    assert final.metrics.tool_errors == 0
    assert final.extra["token_exact"] is False
    # The whole is what the template writes of the conversation: nothing is lost between the turns.
    whole = demo_tokenizer().render_text(final.messages, tools=tools.schemas, add_generation_prompt=False)
    assert text_of(final) == whole.rstrip("\n")
    said, given = by_mask(final, 1), by_mask(final, 0)
    assert "I add." in said
    assert said.endswith("12<|im_end|>")
    assert "<tool_response>" in given
    assert "<tool_call>" not in given
    first, second = stub.requests
    assert [tool["function"]["name"] for tool in first["tools"]] == ["add"]
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "tool"]
    (call,) = second["messages"][1]["tool_calls"]
    assert orjson.loads(call["function"]["arguments"]) == {"a": 3, "b": 9}
    assert second["messages"][2]["tool_call_id"] == call["id"]


@pytest.mark.parametrize("arguments", ['{"a": 3, "b"', "[1]", "what"])
async def test_arguments_that_cannot_be_read_are_told_to_the_model(tmp_path: Path, arguments: str) -> None:
    async with opened(functions(tmp_path, ADD)) as tools:
        result, stub = await play(calling(arguments), "12", tools=tools)
    final = completed(result).final
    assert final.metrics.tool_errors == 1
    assert contents(final)[0].startswith("Error: the arguments")
    assert final.messages[1]["tool_calls"][0]["function"]["arguments"] == arguments
    (sent,) = stub.requests[1]["messages"][1]["tool_calls"]
    assert orjson.loads(sent["function"]["arguments"]) == {"unreadable": arguments}


async def test_a_length_is_kept_also_where_the_endpoint_counts_otherwise() -> None:
    result, stub = await play("twelve " * 200, loop="single_turn_agent", response_length=20)
    final = completed(result).final
    assert stub.requests[0]["max_tokens"] == 20
    assert (len(final.response_ids), final.finish_reason) == (20, "length")
    cut = ChatFault("finish", code="length")
    result, _ = await play("12", loop="single_turn_agent", faults=[cut])
    final = completed(result).final
    assert (by_mask(final, 1), final.finish_reason) == ("12", "length")  # no end of turn: there was none


class Careless(AgentLoop):
    async def run(self, sampling: SamplingParams, **row: Any) -> Trajectory:
        ids = await self.render(row["raw_prompt"], prompt_key=row["prompt_key"])
        await self.generate(ids, sampling)
        raise AssertionError("unreachable")


async def test_a_loop_that_has_only_ids_is_told_what_to_do() -> None:
    loops = AgentLoops({"careless": LoopEntry(Careless, {})})
    result, stub = await play("12", loop="careless", loops=loops)
    failure = failed(result)
    assert "takes messages, not token ids, and Careless gives it none" in failure.error
    assert (failure.attempts, stub.requests) == (1, [])


def test_answers_as_templates_want_them() -> None:
    template = TurnTemplate(demo_tokenizer())
    assert read_answer(None, template, turn=1) == {"role": "assistant", "content": ""}
    given = calling('{"a": 1}', text=" 12 ") | {"reasoning_content": "hm", "odd": 1}
    answer = read_answer(given, template, turn=1)
    assert answer == {
        "role": "assistant",
        "content": "12",
        "reasoning_content": "hm",
        "tool_calls": calling({"a": 1})["tool_calls"],
    }
    (call,) = calls_of(answer)
    assert (call.name, call.arguments, call.call_id, call.error) == ("add", {"a": 1}, "c00000000", None)
    (empty,) = calls_of(read_answer(calling(""), template, turn=1))
    assert empty.arguments == {}
