import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.agent.tools.base import OpenAIFunctionToolSchema, Tool, ToolResponse
from rollstream.agent.tools.session import (
    ToolLimits,
    ToolResult,
    ToolSession,
    TruncateSide,
    read_result,
    select_tools,
    truncate_text,
)
from rollstream.agent.tools.toolbox import ToolBox
from rollstream.errors import DataError

from .tools import Recorder, call, class_tool, function_of, opened, schema


def session_of(box: ToolBox, tools_kwargs: Any = None, selection: Any = None) -> ToolSession:
    return box.session(tools_kwargs=tools_kwargs or {}, selection=selection, request_id="r")


async def test_order_is_kept_and_concurrency_bounded() -> None:
    now, most = 0, 0

    async def slow(n: int) -> Any:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.001 * (10 - n))
        now -= 1
        return n, n / 10, {"n": n}

    async with opened([function_of(slow)], max_parallel_calls=3) as box:
        session = session_of(box)
        results = await session.run([call("slow", n=n) for n in range(10)])
        assert [result.text for result in results] == [str(n) for n in range(10)]
        assert [result.reward for result in results] == [n / 10 for n in range(10)]
        assert (results[4].metrics, most) == ({"n": 4.0}, 3)
        assert await session.run([]) == []
        assert await session.close() == {}


async def test_the_life_of_an_instance() -> None:
    entry = class_tool(Recorder)
    async with opened([entry]) as box:
        row = {
            "it": {
                "create_kwargs": {"x": 1},
                "execute_kwargs": {"y": 2},
                "calc_reward_kwargs": {"z": 3},
                "release_kwargs": {"w": 4},
            },
            "another": {"create_kwargs": {"x": 5}, "execute_kwargs": None},
            "a third": None,
        }
        session, other, unused = session_of(box, row), session_of(box), session_of(box)
        await session.run([call("it"), call("it")], agent_data="data")
        await session.run([call("it", a=1)], agent_data="data")
        assert (await other.run([call("it")]))[0].text == "{}"
        assert await session.close() == await session.close() == {"it": 1.0}
        assert await other.close() == {"it": 1.0}
        assert await unused.close() == {}
        identifier = entry.tool.log[0][1]
        assert [part for part in entry.tool.log if part[1] == identifier] == [
            ("create", identifier, {"x": 1, "create_kwargs": {"x": 1}}),
            *[("execute", identifier, {"y": 2, "agent_data": "data"})] * 3,
            ("calc_reward", identifier, {"z": 3}),
            ("release", identifier, {"w": 4}),
        ]
        assert entry.tool.done.count("release") == entry.tool.done.count("create") == 2
        with pytest.raises(RuntimeError, match="closed"):
            await session.run([call("it")])


async def test_what_was_not_created_has_no_reward_and_is_tried_again() -> None:
    entry = class_tool(Recorder, create="raise")
    async with opened([entry], max_parallel_calls=4) as box:
        session = session_of(box)
        results = await session.run([call("it")] * 4)
        assert [result.text for result in results] == ["Error: ValueError: create"] * 4
        assert entry.tool.done == ["create"]  # the others waited for it
        await session.run([call("it")])
        assert await session.close() == {}
        assert entry.tool.done == ["create", "create"]


async def test_messages_are_copied_for_who_takes_them() -> None:
    class Changes(Recorder):
        async def execute(  # type: ignore[override]
            self, instance_id: str, parameters: dict[str, Any], messages: Any, data: Any
        ) -> Any:
            messages[0]["content"][0]["text"] = "changed"
            messages.clear()
            data.append("kept")
            return "done"

    entries = [class_tool(Changes, "changes")]
    async with opened(entries) as box:
        session = session_of(box)
        messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
        data: list[str] = []
        results = await session.run([call("changes")] * 2, messages=messages, data=data)
        assert [result.text for result in results] == ["done", "done"]
        assert messages == [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
        assert data == ["kept", "kept"]  # what else a loop gives is as it is
        await session.close()


class OlderVerl(Tool):
    """Takes the row's arguments by name, as verl's tools did before `create_kwargs`."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema) -> None:
        super().__init__(config, tool_schema)
        assert tool_schema.function.name == "it" and tool_schema.model_dump(exclude_none=True) == schema("it")
        self._instance_dict: dict[str, Any] = {}

    async def create(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        assert instance_id is not None and kwargs["create_kwargs"]["ground_truth"] == ground_truth
        self._instance_dict[instance_id] = {"ground_truth": ground_truth, "reward": 0.0}
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        reward = float(parameters["answer"] == self._instance_dict[instance_id]["ground_truth"])
        self._instance_dict[instance_id]["reward"] = reward
        return ToolResponse(text=f"{reward=}"), -0.05, {"calls": 1}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return float(self._instance_dict[instance_id]["reward"])

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self._instance_dict[instance_id]


async def test_a_tool_written_for_verl() -> None:
    entry = class_tool(OlderVerl)
    async with opened([entry]) as box:
        sessions = [session_of(box, {"it": {"create_kwargs": {"ground_truth": str(i)}}}) for i in range(5)]
        results = await asyncio.gather(*(session.run([call("it", answer="3")]) for session in sessions))
        assert [result[0].text for result in results] == [f"reward={float(i == 3)}" for i in range(5)]
        assert results[0][0].reward == -0.05 and results[0][0].metrics == {"calls": 1.0}
        rewards = await asyncio.gather(*(session.close() for session in sessions))
        assert rewards == [{"it": float(i == 3)} for i in range(5)]
        assert entry.tool._instance_dict == {}


@pytest.mark.parametrize("row", [{"a": 1}, {"a": {"create_kwarg": {}}}, {"a": {"create_kwargs": [1]}}])
async def test_arguments_of_another_shape(row: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"tools_kwargs\.a"):
        ToolBox().session(tools_kwargs=row, selection=None, request_id="r")


@pytest.mark.parametrize(
    ("selection", "expected"),
    [(None, ["a", "b"]), ([], ["a", "b"]), (["b", "a", "b"], ["b", "a"]), (np.array(["b"]), ["b"])],
)
def test_selection(selection: Any, expected: list[str]) -> None:
    assert select_tools(selection, ["a", "b"]) == expected


@pytest.mark.parametrize("selection", [["serch"], [3], "search", {"search": 1}])
def test_a_selection_of_nothing_there_is(selection: Any) -> None:
    with pytest.raises(DataError, match="tool_selection"):
        select_tools(selection, ["search", "b"])


LIMITS = ToolLimits(max_response_length=40, truncate_side="right")


class Silent:
    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"a": "é", 1: {2}}, ToolResult('{"a": "é", "1": "{2}"}')),
        (None, ToolResult("None")),
        (bytearray(b"\xffa"), ToolResult("\ufffda")),
        ("\ud800", ToolResult("\ufffd")),
        (ToolResponse(), ToolResult("")),
        (ToolResponse(text=3), ToolResult("3")),  # type: ignore[arg-type]
        (ToolResponse(text="a", image=["i", None]), ToolResult("a", images=["i"])),
        (SimpleNamespace(text="verl's", image=None, video=None), ToolResult("verl's")),
        (("a",), ToolResult("a")),
        (("a", 0), ToolResult("a", reward=0.0)),
        (("a", float("nan")), ToolResult("a")),
        (("a", "no number"), ToolResult("a")),
        ((ToolResponse("a"), np.float32(0.5)), ToolResult("a", reward=0.5)),
        (({"b": 1}, True, {"c": 1}), ToolResult('{"b": 1}', reward=1.0, metrics={"c": 1.0})),
        (("a", 1, "no mapping"), ToolResult("a", reward=1.0)),
    ],
)
def test_what_tools_return(value: Any, expected: ToolResult) -> None:
    assert read_result(value, LIMITS) == expected


def test_metrics_are_kept_small() -> None:
    metrics = {
        "n": np.int64(3),
        "nan": np.nan,
        "flag": False,
        "text": "x" * 1000,
        "list": [1, 2],
        4: "\ud800",
    }
    read = read_result(("a", None, {**metrics, "silent": Silent()}), LIMITS).metrics
    assert len(read.pop("text")) == 200
    silent = "RuntimeError: no"
    assert read == {"n": 3.0, "nan": None, "flag": False, "list": "[1, 2]", "silent": silent, "4": "\ufffd"}
    assert len(read_result(("a", None, dict.fromkeys(range(1000))), LIMITS).metrics) == 64


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ((), TypeError),
        ((1, 2, 3, 4), TypeError),
        (ToolResponse(video=[1]), NotImplementedError),
        (SimpleNamespace(text="a", image="no list", video=None), TypeError),
        ((x for x in ()), TypeError),
        (Silent(), RuntimeError),
    ],
)
def test_what_no_model_can_read(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        read_result(value, LIMITS)


MARKERS = {"left": "(truncated)...", "right": "...(truncated)", "middle": "...(truncated)..."}


@given(
    st.text(st.characters(exclude_characters="("), max_size=80),
    st.integers(1, 60),
    st.sampled_from(["left", "right", "middle"]),
)
def test_truncation(text: str, max_length: int, side: TruncateSide) -> None:
    cut = truncate_text(text, max_length, side)
    if len(text) <= max_length:
        assert cut == text
        return
    assert len(cut) == max_length
    assert ("(" in cut) == (max_length > len(MARKERS[side]))
    before, marker, after = cut.partition(MARKERS[side])
    if marker:
        assert text.startswith(before) and text.endswith(after)
        kept = (len(before), len(after))
        assert {"left": kept[0] == 0, "right": kept[1] == 0, "middle": 0 <= kept[1] - kept[0] <= 1}[side]
