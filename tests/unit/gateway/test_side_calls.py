"""A program that works with a tool and has its conversation named: its answer is the final trajectory by each door."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollstream.agent.registry import AgentLoops, LoopEntry
from rollstream.evaluate.samples import samples_of
from rollstream.gateway.function_agent import FunctionAgent
from rollstream.integrations.exports.examples import export_preference, export_sft
from rollstream.rollout.worker import RolloutWorker
from rollstream.testing.scripted import ScriptedEngine, ScriptedRequest
from rollstream.training.plan import PlannedGroup
from rollstream.training.rollout_groups import RolloutGroups
from rollstream.trajectory import CALL_TIMES, PromptRow, Rollout
from tests.support.programs import command_worker, program
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
from tests.unit.sessions.test_service import MemorySink, serving
from tests.unit.store.export.artifacts import write_artifact

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds numbers.",
        "parameters": {"type": "object", "properties": {"terms": {"type": "array"}}},
    },
}
WHEN = ("before", "beside", "after")
N = 2

AGENT = """
NAME = [
    {"role": "system", "content": "You name conversations."},
    {"role": "user", "content": "Name this: " + task[-1]["content"]},
]
if when == "before":
    await ask(NAME)
work = [{"role": "system", "content": "You add."}, *task]
call = (await ask(work, [TOOL])).pop("tool_calls")
work += [
    {"role": "assistant", "content": "", "tool_calls": call},
    {"role": "tool", "tool_call_id": call[0]["id"], "content": "12"},
]
answer, *_ = await asyncio.gather(ask(work, [TOOL]), *([ask(NAME)] if when == "beside" else []))
if when == "after":
    await ask(NAME)
"""
"""The program, by whatever means it asks: `task` and `when` are there, `ask` gives a message."""


def model(request: ScriptedRequest) -> list[int]:
    seen = demo_tokenizer().decode(request.prompt_ids, skip_special_tokens=False)
    repeat = int(request.request_id.split("-")[1]) if request.request_id[0].isdigit() else 0
    if "You name" in seen:
        text = f"A small sum {repeat}"
    elif "tool_response" in seen:
        text = f"It is {12 + repeat}."
    else:
        text = call_text("add", terms=[3, 9])
    return demo_tokenizer().encode(text + END)


def body(indent: str = "    ") -> str:
    return "".join(f"{indent}{line}\n" for line in AGENT.strip().splitlines())


def by_function(engine: ScriptedEngine, folder: Path, when: str) -> RolloutWorker:
    pytest.importorskip("openai")
    source = f"""
import asyncio
TOOL, when = {TOOL!r}, {when!r}

async def run(client, row):
    task = row["prompt"]
    async def ask(messages, tools=None):
        more = {{"tools": tools}} if tools else {{}}
        done = await client.chat.completions.create(model="any", messages=messages, **more)
        return done.choices[0].message.model_dump(exclude_none=True)
{body()}    return answer["content"]
"""
    file = folder / f"{when}.py"
    file.write_text(source)
    loops = AgentLoops({"function_agent": LoopEntry(FunctionAgent, {"function": f"{file}:run"})})
    return make_worker(resources(engine), loop="function_agent", loops=loops, reward=Right(), max_attempts=1)


def by_command(engine: ScriptedEngine, folder: Path, when: str) -> RolloutWorker:
    script = f"""
import asyncio
TOOL, when, task = {TOOL!r}, {when!r}, row["prompt"]

async def main():
    async def ask(messages, tools=None):
        return await asyncio.to_thread(ask_message, messages, **({{"tools": tools}} if tools else {{}}))
{body()}    result(answer=answer["content"])

asyncio.run(main())
"""
    return command_worker(engine, program(folder, script, f"{when}.py"), reward=Right())


class Right:
    """Scores by what the answer says."""

    async def score(self, row: PromptRow, solution_str: str) -> tuple[float | None, dict[str, Any]]:
        return float(solution_str == "It is 12."), {}


async def by_service(engine: ScriptedEngine, when: str) -> Rollout:
    sink = MemorySink()
    async with serving(sink, engine) as served:
        session = await served.create(id="job")
        url = f"{session['base_url']}/chat/completions"

        async def ask(messages: list[Any], tools: list[Any] | None = None) -> dict[str, Any]:
            request = {"messages": messages, **({"tools": tools} if tools else {})}
            status, answer = await served.ask("POST", url, request)
            assert status == 200, answer
            return answer["choices"][0]["message"]  # type: ignore[no-any-return]

        names = {"asyncio": asyncio, "TOOL": TOOL, "when": when, "task": session["messages"], "ask": ask}
        exec(f"async def run():\n{body()}    return answer['content']\n", names)
        await served.finish(session["id"], answer=await names["run"](), reward=1.0)  # type: ignore[operator]
        return sink.finished[session["id"]]


def check(rollouts: Iterable[Rollout]) -> None:
    for rollout in rollouts:
        *others, final = rollout.trajectories
        assert final.messages[-1]["content"] == f"It is {12 + rollout.repeat}."
        assert [one.is_side_call for one in others] == [True]
        assert others[0].messages[-1]["content"].startswith("A small sum")
        assert rollout.without_side_calls().trajectories == [final]
        assert (final.num_turns, final.extra["prompt_messages"], final.extra["shown_tools"]) == (4, 2, [TOOL])
        assert (final.metrics.engine_calls, final.metrics.tool_calls, final.metrics.tool_errors) == (2, 1, 0)
        assert (others[0].metrics.engine_calls, others[0].extra["prompt_messages"]) == (1, 2)
        assert "shown_tools" not in others[0].extra
        assert [[kind for kind, *_ in one.extra[CALL_TIMES]] for one in (final, others[0])] == [
            ["generate"] * 2,
            ["generate"],
        ]


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("door", [by_function, by_command])
async def test_by_a_loop(door: Any, when: str, tmp_path: Path) -> None:
    worker = door(await started(model), tmp_path, when)
    results = await asyncio.gather(*(worker.run(make_row(), repeat) for repeat in range(N)))
    rollouts = [completed(result) for result in results]
    check(rollouts)
    artifact = write_artifact(tmp_path / "a.parquet", rollouts)
    assert export_sft(artifact, tmp_path / "sft") == N
    assert export_preference(artifact, tmp_path / "pairs") == 1
    best = orjson.loads((tmp_path / "sft").read_bytes().splitlines()[0])
    assert (best["messages"][-1]["content"], orjson.loads(best["tools"])) == ("It is 12.", [TOOL])
    pair = orjson.loads((tmp_path / "pairs").read_bytes())
    assert [message["role"] for message in pair["prompt"]] == ["system", "user"]
    ends = [pair[name][-1]["content"] for name in ("chosen", "rejected")]
    assert (ends, orjson.loads(pair["tools"])) == (["It is 12.", "It is 13."], [TOOL])
    samples = samples_of(rollouts)
    assert samples.turns.tolist() == [4.0] * N
    assert samples.tokens.tolist() == [rollout.final.response_length for rollout in rollouts]


@pytest.mark.parametrize("when", WHEN)
async def test_by_the_service(when: str) -> None:
    check([await by_service(await started(model), when)])


async def test_a_trainer_gets_none_and_whoever_stores_them_gets_all(tmp_path: Path) -> None:
    stored: list[Any] = []

    async def store(result: Any) -> None:
        stored.append(result)

    worker = by_function(await started(model), tmp_path, "after")
    groups = RolloutGroups(worker, make_row, N, on_result=store)
    await groups.start()
    rollouts = await groups.generate(PlannedGroup(0, epoch=0, index=0))
    assert [len(one.trajectories) for one in rollouts] == [1] * N
    check(stored)
