"""The loop for hosted models: a stub endpoint, and no tokenizer."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from rollstream.agent.base import AgentResources, TurnLimits
from rollstream.agent.chat_answer import read_answer
from rollstream.agent.conversation import ChatConversation
from rollstream.agent.images import ImageReader
from rollstream.agent.interactions import Interaction, Interactions
from rollstream.agent.tools.toolbox import ToolBox
from rollstream.chat.tool_schema import schema_digest
from rollstream.engine.openai import OpenAIEngine
from rollstream.testing.stub_chat import ChatFault, ChatStub
from rollstream.trajectory import Message, PromptRow, Trajectory
from tests.unit.agent.rollouts import completed, contents, failed, make_row, make_worker
from tests.unit.agent.tools.tools import functions, opened
from tests.unit.chat.vision import png

ADD = """
from rollstream.agent.tools.base import ToolResponse

@function_tool
def add(a: int, b: int) -> int:
    '''Adds.

    Args:
        a: One.
        b: The other.
    '''
    return a + b

@function_tool
def look() -> ToolResponse:
    '''Looks.'''
    return ToolResponse(text="this", image=["shown.png"])
"""
OTHER = {"type": "function", "function": {"name": "other", "description": "."}}


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def calling(arguments: Any, *, name: str = "add", call_id: str = "c1", text: str = "") -> Message:
    call = {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": text, "tool_calls": [call]}


async def play(
    *answers: str | Message,
    row: PromptRow | None = None,
    tools: ToolBox | None = None,
    faults: list[ChatFault] | None = None,
    engine_kwargs: dict[str, Any] | None = None,
    length: int = 1000,
    **given: Any,
) -> tuple[Any, list[dict[str, Any]]]:
    """What becomes of a rollout that hears these answers in turn, and what was asked."""
    left = list(answers)
    async with ChatStub(lambda body: left.pop(0) if len(left) > 1 else left[0]) as stub:
        stub.faults += faults or []
        engine = OpenAIEngine([stub.url], model_path="stub", engine_kwargs=engine_kwargs)
        await engine.start()
        try:
            resources = AgentResources(engine, None, None, length, tools=tools or ToolBox(), **given)
            worker = make_worker(resources, loop="chat_agent", seed=None, logprobs=False)
            return await worker.run(row or make_row(), 0), stub.requests
        finally:
            await engine.close()


def roles(trajectory: Trajectory) -> list[str]:
    return [message["role"] for message in trajectory.messages]


async def test_without_tools_it_asks_once() -> None:
    result, asked = await play("12")
    final = completed(result).final
    assert asked[0]["messages"] == [{"role": "user", "content": "3 + 9 ="}]
    assert "tools" not in asked[0]
    assert (final.prompt_ids, final.response_ids, final.response_mask) == ([], [], [])
    assert final.response_logprobs is None
    assert final.messages[-1] == {"role": "assistant", "content": "12"}
    assert (final.finish_reason, final.num_turns, final.metrics.engine_calls) == ("stop", 2, 1)
    assert final.extra == {
        "token_exact": False,
        "usage": {"prompt_tokens": 10, "response_tokens": 5},
    }
    result, _ = await play("12", faults=[ChatFault("finish", code="length")])
    assert completed(result).final.finish_reason == "length"


async def test_tools_are_called_as_the_endpoint_says(tmp_path: Path) -> None:
    async with opened(functions(tmp_path, ADD)) as tools:
        result, asked = await play(calling({"a": 3, "b": 9}, text="I add."), "12<|im_end|>", tools=tools)
        shown = [schema_digest(schema) for schema in tools.schemas]
    final = completed(result).final
    assert roles(final) == ["user", "assistant", "tool", "assistant"]
    assert contents(final) == ["12"]
    assert final.messages[-1]["content"] == "12<|im_end|>"
    assert (final.metrics.tool_calls, final.metrics.tool_errors, final.metrics.engine_calls) == (1, 0, 2)
    assert final.extra["usage"] == {"prompt_tokens": 10, "response_tokens": 10}
    assert final.extra["tool_counts"] == {"add": [1, 0]}
    assert final.extra["shown_tools"] == shown
    assert final.num_turns == 4
    assert [tool["function"]["name"] for tool in asked[0]["tools"]] == ["add", "look"]
    (call,) = asked[1]["messages"][1]["tool_calls"]
    assert orjson.loads(call["function"]["arguments"]) == {"a": 3, "b": 9}
    assert asked[1]["messages"][2]["tool_call_id"] == call["id"] == "c1"


@pytest.mark.parametrize("arguments", ['{"a": 3, "b"', "[1]", "what"])
async def test_arguments_that_cannot_be_read_are_told_to_the_model(tmp_path: Path, arguments: str) -> None:
    async with opened(functions(tmp_path, ADD)) as tools:
        result, asked = await play(calling(arguments), "12", tools=tools)
    final = completed(result).final
    assert final.metrics.tool_errors == 1
    assert contents(final)[0].startswith("Error: the arguments")
    assert final.messages[1]["tool_calls"][0]["function"]["arguments"] == arguments
    (sent,) = asked[1]["messages"][1]["tool_calls"]
    assert orjson.loads(sent["function"]["arguments"]) == {"unreadable": arguments}


async def test_calls_that_nobody_executes_end_it(tmp_path: Path) -> None:
    """Schemas of `data.tool_config_path` and of a row are shown; with tools, such a call is told to the model."""
    row = make_row(columns={"tools": [OTHER]})
    result, asked = await play(calling({}, name="other"), row=row, shown_tools=[OTHER])
    final = completed(result).final
    assert [tool["function"]["name"] for tool in asked[0]["tools"]] == ["other"]
    assert (roles(final), final.finish_reason) == (["user", "assistant"], "stop")
    assert final.messages[-1]["tool_calls"][0]["function"]["name"] == "other"
    async with opened(functions(tmp_path, ADD)) as tools:
        result, asked = await play(calling({}, name="other"), "12", row=row, tools=tools)
    assert [tool["function"]["name"] for tool in asked[0]["tools"]] == ["add", "look", "other"]
    assert completed(result).final.extra["tool_counts"] == {"other": [1, 1]}


async def test_lengths_and_turns_are_kept_by_the_endpoints_count(tmp_path: Path) -> None:
    call = calling({"a": 3, "b": 9})
    async with opened(functions(tmp_path, ADD)) as tools:
        result, asked = await play(call, "12", tools=tools, length=6)
        assert [body["max_tokens"] for body in asked] == [6, 1]  # an answer counts 5
        result, asked = await play(call, tools=tools, length=5)
        assert (completed(result).final.finish_reason, len(asked)) == ("tool_overflow", 1)
        result, asked = await play(call, "12", tools=tools, max_model_len=17)
        assert [body["max_tokens"] for body in asked] == [17, 2]
        result, asked = await play(call, tools=tools, turns=TurnLimits(max_assistant_turns=3))
        assert (completed(result).final.finish_reason, len(asked)) == ("max_turns", 3)
        own = make_row(columns={"sampling_params": {"max_tokens": 3, "temperature": 0.5}})
        _, asked = await play("12", row=own, tools=tools)
        assert (asked[0]["max_tokens"], asked[0]["temperature"]) == (3, 0.5)
        uncounted = {"omit": ["stream_options"]}
        result, asked = await play(call, tools=tools, engine_kwargs=uncounted)
        assert "does not say how many tokens" in failed(result).error
        assert len(asked) == 1
        result, _ = await play("12", engine_kwargs=uncounted)
        assert "usage" not in completed(result).final.extra


def test_thinking_that_is_not_sent_again_counts_all_the_same() -> None:
    loop: Any = SimpleNamespace(room=lambda *counted: counted, turns=None, kept_turns=lambda asked: [])
    conversation = ChatConversation(loop, [], tools=[], executes=False)
    counted = []
    for usage in [
        (10, 500),
        (540, 7),
        (60, 3),
        None,
    ]:  # a result of 30 comes between; the thinking is left out
        conversation._count(usage)
        counted.append(conversation.room)
    assert counted == [(10, 500), (10, 537), (10, 540), (0, 0)]


class Partner(Interaction):
    """Says once that it is wrong."""

    async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
        is_right = messages[-1]["content"] == "12"
        return is_right, "wrong", float(is_right), {}


async def test_a_partner_answers() -> None:
    row = make_row(extra_info={"interaction_kwargs": {"name": "partner"}})
    result, asked = await play("11", "12", row=row, interactions=Interactions({"partner": Partner({})}))
    final = completed(result).final
    assert [message["content"] for message in final.messages] == ["3 + 9 =", "11", "wrong", "12"]
    assert final.extra["turn_scores"] == [0.0, 1.0]
    assert asked[1]["messages"][-1] == {"role": "user", "content": "wrong"}


async def test_images_of_rows_and_tools_are_sent_as_data_urls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shown.png").write_bytes(png(56, 84))
    content = [{"type": "text", "text": "see"}, {"type": "image", "image": "a"}]
    row = make_row(messages=[{"role": "user", "content": content}], images=(png(56, 56),))
    async with opened(functions(tmp_path, ADD)) as tools:
        given = {"tools": tools, "engine_kwargs": {"takes_images": True}, "images": ImageReader(None)}
        result, asked = await play(calling({}, name="look"), "seen", row=row, **given)
        blind, _ = await play(calling({}, name="look"), "seen", tools=tools)
    final = completed(result).final
    urls = [
        [part["image_url"]["url"] for part in message["content"] if part["type"] == "image_url"]
        for message in asked[1]["messages"]
        if isinstance(message["content"], list)
    ]
    assert [len(each) for each in urls] == [1, 1]
    assert all(url.startswith("data:image/png;base64,") for (url,) in urls)
    assert {"type": "image", "image": "shown.png"} in final.messages[2]["content"]
    assert "an image that cannot be shown" in contents(completed(blind).final)[0]


def test_answers_as_templates_want_them() -> None:
    assert read_answer(None, turn=1) == ({"role": "assistant", "content": ""}, [])
    given = calling('{"a": 1}', text=" 12 ") | {"reasoning_content": "hm", "odd": 1}
    answer, (call,) = read_answer(given, turn=1)
    assert answer == {
        "role": "assistant",
        "content": "12",
        "reasoning_content": "hm",
        "tool_calls": calling({"a": 1})["tool_calls"],
    }
    assert (call.name, call.arguments, call.call_id, call.error) == ("add", {"a": 1}, "c1", None)
    _, (empty,) = read_answer(calling("", call_id=""), turn=1)
    assert (empty.arguments, empty.call_id) == ({}, "c00010000")
