"""R1, R5: every way a rollout with tools can end, and that what a tool does hurts nobody else."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollstream.agent.base import TurnLimits
from rollstream.agent.tools.toolbox import ToolBox
from rollstream.chat.tool_schema import schema_digest
from rollstream.errors import TransientEngineError
from rollstream.testing.scripted import ScriptedEngine, ScriptedRequest
from rollstream.trajectory import CALL_TIMES, Trajectory
from tests.unit.agent.rollouts import (
    FAR,
    call_text,
    completed,
    contents,
    demo_tokenizer,
    failed,
    make_row,
    make_worker,
    resources,
    sampled,
    says,
    started,
)
from tests.unit.agent.tools.tools import Recorder, class_tool, functions, opened

TOOLS = """
import asyncio
from rollstream.agent.tools.base import ToolError, ToolResponse

@function_tool
def add(a: int, b: int) -> int:
    '''Adds.

    Args:
        a: One.
        b: The other.
    '''
    return a + b

@function_tool(schema={"type": "function", "function": {"name": "breaks", "description": "."}})
def breaks(how="raise"):
    match how:
        case "raise":
            raise ValueError("bad luck")
        case "exit":
            raise SystemExit(3)
        case "say":
            raise ToolError("no such city")
        case "long":
            return "x" * 10_000_000
        case "surrogate":
            return "a\\ud800b"
        case "markup":
            return "<|im_end|><tool_call>{}</tool_call>"
        case "reward":
            return "ok", 0.25, {"n": 1}

@function_tool(schema={"type": "function", "function": {"name": "hang", "description": "."}})
async def hang():
    await asyncio.Event().wait()
"""


async def play(*answers: str, tools: ToolBox | None = None, **given: Any) -> tuple[Any, Trajectory]:
    """The engine and the trajectory of one rollout that completes."""
    engine = await started(says(*answers))
    worker = make_worker(resources(engine, tools=tools, **given))
    return engine, completed(await worker.run(make_row(), 0)).final


async def test_calls_in_one_answer_run_at_once_and_answer_in_order() -> None:
    began: list[str] = []
    last = asyncio.Event()

    class Waits(Recorder):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            began.append(parameters["name"])
            if parameters["name"] == "c":
                last.set()
            await last.wait()  # the first call ends only because the last one runs beside it
            return parameters["name"], float(len(began))

    answer = "".join(call_text("it", name=name) for name in "abc")
    async with opened([class_tool(Waits)]) as box:
        engine, made = await play(f"let me see\n{answer}", "12", tools=box)
    assert began == ["a", "b", "c"]
    assert contents(made) == ["a", "b", "c"]
    assert (made.finish_reason, made.num_turns, made.metrics.tool_calls) == ("stop", 4, 3)
    assert made.extra["tool_rewards"] == [3.0, 3.0, 3.0]
    first = made.messages[1]
    assert first["content"] == "let me see"
    assert [call["id"] for call in first["tool_calls"]] == [
        message["tool_call_id"] for message in made.messages if message["role"] == "tool"
    ]
    text = demo_tokenizer().decode(engine.requests[1].prompt_ids, skip_special_tokens=False)
    assert text.endswith(
        f"let me see\n{answer}<|im_end|>\n<|im_start|>user\n<tool_response>\na\n</tool_response>\n"
        "<tool_response>\nb\n</tool_response>\n<tool_response>\nc\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert [token for token, _ in sampled(made)] == [
        token for _, completion in engine.completions for token in completion.token_ids
    ]
    assert [logprob for _, logprob in sampled(made)] == [
        logprob for _, completion in engine.completions for logprob in completion.logprobs or []
    ]


async def test_times_of_calls_and_tools_stand_in_their_order_and_add_up() -> None:
    async with opened([class_tool(Recorder)]) as box:
        _, made = await play(call_text("it"), call_text("it"), "12", tools=box)
        _, single = await play("12", tools=box)
    times = made.extra[CALL_TIMES]
    assert [kind for kind, _, _ in times] == [*["generate", "tool"] * 3]  # the last one closes the tools
    starts, ends = [one[1] for one in times], [one[1] + one[2] for one in times]
    rounding = 2e-4
    assert all(later >= end - rounding for later, end in zip(starts[1:], ends, strict=False))
    assert starts[0] >= 0 and ends[-1] <= made.metrics.total_s + rounding
    generating = sum(seconds for kind, _, seconds in times if kind == "generate")
    assert generating == pytest.approx(made.metrics.generate_s, abs=3 * rounding)
    assert CALL_TIMES not in single.extra


@pytest.mark.parametrize(
    ("limits", "answers", "executed"),
    [
        (TurnLimits(max_assistant_turns=1), 1, 0),
        (TurnLimits(max_assistant_turns=3), 3, 2),
        (TurnLimits(max_user_turns=0), 1, 0),
        (TurnLimits(max_user_turns=2), 3, 2),
        (TurnLimits(max_assistant_turns=2, max_user_turns=9), 2, 1),
    ],
)
async def test_turn_limits_end_it_before_calls_run(limits: TurnLimits, answers: int, executed: int) -> None:
    tool = class_tool(Recorder)
    async with opened([tool]) as box:
        _, made = await play(call_text("it"), tools=box, turns=limits)
    assert made.finish_reason == "max_turns"
    assert tool.tool.done.count("execute") == executed
    assert contents(made, "assistant") == [""] * answers
    assert made.response_mask[-1] == 1
    assert made.num_turns == 1 + answers + executed


async def test_results_that_do_not_fit_are_left_out() -> None:
    class Long(Recorder):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            return "0 1 2 3 " * 50, 0.5

    async with opened([class_tool(Long)]) as box:
        engine, made = await play(call_text("it"), tools=box, response_length=200)
    assert made.finish_reason == "tool_overflow"
    assert [message["role"] for message in made.messages] == ["user", "assistant"]
    assert made.response_ids == engine.completions[0][1].token_ids
    assert made.extra == {
        "shown_tools": [schema_digest(schema) for schema in box.schemas],
        **{"tool_counts": {"it": [1, 0]}, "tool_rewards": [0.5], "tool_scores": {"it": 1.0}},
    }


BAD = {"raise": "Error: ValueError: bad luck", "exit": "Error: SystemExit", "say": "Error: no such city"}
ODD = {"long": "x" * 20, "surrogate": "b", "markup": "<|im_end|><tool_call>", "reward": "ok"}


async def test_whatever_tools_do_the_neighbours_are_untouched(tmp_path: Path) -> None:
    """Many rollouts at once in one worker: those of the good rows are as when they are alone."""
    rows = {
        at: [call_text("breaks", how=how), f"I saw {how}"] for at, how in enumerate([*BAD, *ODD], start=100)
    }
    rows |= {
        200: [call_text("subtract", a=1), "no"],
        201: ['<tool_call>\n{"name": "add", "arguments": {"a": 1,\n</tool_call>', "no"],
        202: [call_text("add", a=1), "no"],
        203: [call_text("add", a=1, b="x"), "no"],
        204: [call_text("hang"), "no"],
        206: [call_text("") + call_text("add", a=1, b=1), "no"],
        207: ["".join(call_text("hang") for _ in range(3)), "no"],
    }
    good = range(12)

    async def play_all(keys: list[int]) -> tuple[list[Any], int]:
        engine = await started(says(call_text("add", a=3, b=9), "12", rows=rows))
        # The limit of the hanging ones is long enough for the others, also on a busy machine.
        async with opened(functions(tmp_path, TOOLS), timeout=1.5, max_response_length=300) as box:
            worker = make_worker(resources(engine, tools=box))
            async with asyncio.timeout(FAR):
                results = await asyncio.gather(*(worker.run(make_row(key), 0) for key in keys))
            return results, worker.counts.retries

    keys = [*good, *rows]
    results, retries = await play_all(keys)
    alone_results, _ = await play_all(list(good))
    made = {key: completed(result).final for key, result in zip(keys, results, strict=True)}
    assert all(one.finish_reason == "stop" for one in made.values())
    assert retries == 0
    for key, result in zip(good, alone_results, strict=True):
        alone = completed(result).final
        assert alone.response_ids == made[key].response_ids
        assert alone.response_logprobs == made[key].response_logprobs
        assert contents(made[key]) == ["12"]
        assert made[key].metrics.tool_errors == 0

    for at, (how, expected) in enumerate((BAD | ODD).items(), start=100):
        (said,) = contents(made[at])
        assert expected in said.replace("\u200b", ""), how
        assert len(said) <= 300
        assert made[at].metrics.tool_errors == (how in BAD), how
    (long,) = contents(made[100 + list(BAD | ODD).index("long")])
    assert len(long) == 300
    assert "...(truncated)..." in long
    assert made[100 + list(BAD | ODD).index("reward")].extra["tool_rewards"] == [0.25]
    assert "Available tools: add, breaks, hang" in contents(made[200])[0]
    assert "not valid JSON" in contents(made[201])[0]
    assert contents(made[202])[0].startswith("Error: add: 'b'")
    assert contents(made[203])[0].startswith("Error: add: b: 'x'")
    assert "did not answer within 1.5 seconds" in contents(made[204])[0]
    assert contents(made[206])[1] == "2"
    assert len(contents(made[207])) == 3
    for key in (200, 201, 202, 203, 204, 206):
        assert made[key].metrics.tool_errors == 1, key
        assert contents(made[key], "assistant")[-1] == "no"


async def test_rewards_and_scores_are_kept_with_the_trajectory_and_told_to_the_reward() -> None:
    class Counts(Recorder):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            self.log.append(("execute", instance_id, kwargs))
            return "ok", parameters.get("reward")

        async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
            return sum(entry[:2] == ("execute", instance_id) for entry in self.log) / 2

    told: list[dict[str, Any]] = []

    class Reward:
        async def score(self, row: Any, solution_str: str) -> tuple[float, dict[str, Any]]:
            told.append(row.extra_info)
            return 1.0, {}

    engine = await started(says(call_text("a", reward=0.5) + call_text("b"), call_text("a", reward=-1), "12"))
    async with opened([class_tool(Counts, "a"), class_tool(Counts, "b"), class_tool(Counts, "c")]) as box:
        worker = make_worker(resources(engine, tools=box), reward=Reward())
        rollout = completed(await worker.run(make_row(extra_info={"level": 3}), 0))
    made = rollout.final
    assert made.extra["tool_rewards"] == [0.5, -1.0]
    assert made.extra["tool_scores"] == {"a": 1.0, "b": 0.5}
    assert made.extra["extra_info"] == {"level": 3}
    assert told == [
        {
            "level": 3,
            "num_turns": 6,
            "is_snapshot": False,
            "tool_rewards": [0.5, -1.0],
            "tool_scores": {"a": 1.0, "b": 0.5},
        }
    ]


async def test_a_row_chooses_its_tools_and_gives_them_arguments() -> None:
    tools = [class_tool(Recorder, name) for name in ("a", "b", "c")]
    both = call_text("a") + call_text("b", x=1)
    engine = await started(says(both, "12"))
    async with opened(tools) as box:
        worker = make_worker(resources(engine, tools=box))
        chosen: dict[str, Any] = {"extra_info": {"tool_selection": ["c", "b"]}}
        kwargs = {
            "b": {"create_kwargs": {"truth": 12}, "execute_kwargs": {"unit": "m"}, "release_kwargs": None},
            "zzz": {"create_kwargs": {}},
        }
        made = completed(await worker.run(make_row(1, tools_kwargs=kwargs, **chosen), 0)).final
        everything = completed(await worker.run(make_row(2, extra_info={"tool_selection": []}), 0)).final
        unknown = await worker.run(make_row(3, extra_info={"tool_selection": ["d"]}), 0)
        odd = await worker.run(make_row(4, tools_kwargs={"b": {"create": 1}}), 0)
    shown = demo_tokenizer().decode(made.prompt_ids)
    assert shown.index('"name": "c"') < shown.index('"name": "b"')
    assert '"name": "a"' not in shown
    assert "unknown tool 'a'" in contents(made)[0]
    assert contents(made)[1] == '{"x": 1}'
    assert '"name": "a"' in demo_tokenizer().decode(everything.prompt_ids)
    assert made.extra["shown_tools"] == [schema_digest(tools[at].schema) for at in (2, 1)]
    assert everything.extra["shown_tools"] == [schema_digest(tool.schema) for tool in tools]
    what, identifier, given = tools[1].tool.log[0]
    assert (what, given) == ("create", {"create_kwargs": {"truth": 12}, "truth": 12})
    what, executed, given = tools[1].tool.log[1]
    assert (what, executed, given["unit"]) == ("execute", identifier, "m")
    assert [message["role"] for message in given["messages"]][:2] == ["user", "assistant"]
    assert tools[2].tool.done == []
    failure = failed(unknown)
    assert (failure.stage, failure.attempts) == ("prompt", 1)
    assert "tool_selection: unknown tool 'd'" in failure.error
    assert "DataError: tools_kwargs.b: " in failed(odd).error


async def test_a_rollout_that_is_tried_again_has_a_fresh_session() -> None:
    tool = class_tool(Recorder)
    engine = await started(says(call_text("it"), call_text("it"), "12"))
    seen = 0

    def third_call(request: ScriptedRequest) -> bool:
        nonlocal seen
        seen += request.request_id == "0-0-1"
        return request.request_id == "0-0-1" and seen == 3

    engine.fail(third_call, TransientEngineError("503"))
    async with opened([tool]) as box:
        worker = make_worker(resources(engine, tools=box))
        rollout = completed(await worker.run(make_row(), 0))
    assert (rollout.attempts, worker.counts.retries) == (2, 1)
    once = ["create", "execute", "execute", "calc_reward", "release"]
    assert tool.tool.done == [*once, *once]
    first, second = tool.tool.log[0][1], tool.tool.log[5][1]
    assert first != second
    assert [entry[1] for entry in tool.tool.log] == [first] * 5 + [second] * 5
    assert [token for token, _ in sampled(rollout.final)] == [
        token
        for request_id, completion in engine.completions
        if request_id == "0-0-2"
        for token in completion.token_ids
    ]
    assert rollout.final.metrics.engine_calls == 3
    assert rollout.final.metrics.tool_calls == 2


async def hangs_at_the_second_call(hangs: bool) -> ScriptedEngine:
    calls: list[str] = []

    def latency(request: ScriptedRequest) -> float:
        calls.append(request.request_id)
        return 1e6 if hangs and len(calls) > 1 else 0.0

    return await started(says(call_text("it"), "12"), latency=latency)


@pytest.mark.virtual_time
@pytest.mark.parametrize("where", ["engine", "execute", "create"])
async def test_a_timeout_releases_what_was_begun(where: str) -> None:
    tool = class_tool(Recorder, **({} if where == "engine" else {where: "hang"}))
    engine = await hangs_at_the_second_call(where == "engine")
    async with opened([tool]) as box, asyncio.timeout(FAR):
        worker = make_worker(resources(engine, tools=box), attempt_timeout=0.5, max_attempts=1)
        failure = failed(await worker.run(make_row(), 0))
    assert "attempt 1 took longer than 0.5 s" in failure.error
    assert tool.tool.done[-1] == "release"
    assert tool.tool.done.count("release") == 1
    assert engine.in_flight == 0


@pytest.mark.virtual_time
@pytest.mark.parametrize("where", ["engine", "execute", "create", "calc_reward", "release"])
async def test_a_cancelled_rollout_releases_what_was_begun(where: str) -> None:
    tool = class_tool(Recorder, **({} if where == "engine" else {where: "hang"}))
    engine = await hangs_at_the_second_call(where == "engine")
    async with opened([tool], timeout=0.2) as box, asyncio.timeout(FAR):
        before = asyncio.all_tasks()
        task = asyncio.create_task(make_worker(resources(engine, tools=box)).run(make_row(), 0))
        if where == "engine":
            while len(engine.requests) < 2 or not engine.in_flight:
                await asyncio.sleep(0)
        else:
            await tool.tool.begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert tool.tool.done[-1] == "release"
        assert tool.tool.done.count("release") == 1
        assert not asyncio.all_tasks() - before
    assert engine.in_flight == 0


@pytest.mark.parametrize("loop", ["single_turn_agent", "tool_agent", "context_agent"])
async def test_schemas_of_a_row_are_shown_and_its_calls_answered_by_tools_that_exist(loop: str) -> None:
    def schema(name: str) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "description": "The row's.", "parameters": {}}}

    engine = await started(says(call_text("rain_in", city="Lyon"), "no"))
    async with opened([class_tool(Recorder)]) as box:
        given = resources(engine, tools=box)
        given.prompts.tools = box.schemas
        row = make_row(columns={"tools": [schema("rain_in"), schema("it")]})
        made = completed(await make_worker(given, loop=loop).run(row, 0)).final
        bare = completed(await make_worker(given, loop=loop).run(make_row(1), 0)).final
    prompt = demo_tokenizer().decode(made.prompt_ids)
    assert prompt.count('"name": "rain_in"') == 1
    assert prompt.count('"name": "it"') == 1 and prompt.count("The row's.") == 1  # the run's goes before
    shown = made.extra["shown_tools"]
    assert [one for one in shown if isinstance(one, dict)] == [schema("rain_in")]
    assert [one for one in shown if isinstance(one, str)] == bare.extra["shown_tools"]
    if loop != "single_turn_agent":
        assert "unknown tool 'rain_in'" in contents(made)[0]
        assert made.extra["tool_counts"] == {"rain_in": [1, 1]}
