"""ATIF and inspect_ai's log: their documents (tests/compat/test_inspect.py lets inspect_ai read its own)."""

import zipfile
from pathlib import Path
from typing import Any

import orjson

from rollstream.store.export.run import export_run
from rollstream.trajectory import Metrics, Rollout, Trajectory
from tests.unit.store.export.artifacts import trajectory
from tests.unit.store.fabric import commit_all
from tests.unit.store.test_export import set_total

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "what"}, {"type": "image"}]},
    {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]},
    {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
    {"role": "assistant", "content": "two"},
]


def with_tools(reward: float | None) -> Trajectory:
    one = trajectory([1, 2], [[4, 5], [6], [7]], reward=reward, reward_extra={"acc": True})
    one.messages, one.metrics = MESSAGES, Metrics(engine_calls=2, tool_calls=1)
    return one


async def a_run(root: Path) -> Path:
    made = [
        Rollout(0, at, "0" * 32, [with_tools(reward)], "test", "2") for at, reward in enumerate((1.0, 0.5))
    ]
    made.append(Rollout(1, 0, "1" * 32, [with_tools(None)], "test", {"x": 2}))
    await commit_all(root, made)
    set_total(root, 3)
    return root


async def test_atif_has_a_step_of_each_message_and_the_calls_tokens(tmp_path: Path) -> None:
    done = export_run(await a_run(tmp_path / "run"), "atif")
    documents = [orjson.loads(line) for line in done.target.read_bytes().splitlines()]
    assert (done.rows, len(documents)) == (3, 3)
    first = documents[0]
    assert first.keys() == {"schema_version", "session_id", "agent", "steps", "final_metrics", "extra"}
    assert first["schema_version"] == "ATIF-v1.6"
    assert len({one["session_id"] for one in documents}) == 3
    steps = first["steps"]
    assert [(step["step_id"], step["source"], step["message"]) for step in steps] == [
        (1, "system", "s"),
        (2, "user", "what\n[image]"),
        (3, "agent", ""),
        (4, "agent", "two"),
    ]
    assert steps[2]["reasoning_content"] == "hm"
    assert steps[2]["tool_calls"] == [{"tool_call_id": "c1", "function_name": "add", "arguments": {"a": 1}}]
    assert steps[2]["observation"] == {"results": [{"source_call_id": "c1", "content": "2"}]}
    seen = [
        (step["metrics"]["prompt_token_ids"], step["metrics"]["completion_token_ids"]) for step in steps[2:]
    ]
    assert seen == [([1, 2], [4, 5]), ([1, 2, 4, 5, 6], [7])] == list(with_tools(None).generations())
    assert first["final_metrics"]["total_steps"] == 4


async def test_an_inspect_log_has_a_sample_of_each_rollout(tmp_path: Path) -> None:
    done = export_run(await a_run(tmp_path / "run"), "inspect")
    assert (done.target.name, done.rows) == ("trajectories.eval", 3)
    with zipfile.ZipFile(done.target) as archive:
        header, summaries = (orjson.loads(archive.read(f"{name}.json")) for name in ("header", "summaries"))
        sample = orjson.loads(archive.read("samples/0_epoch_2.json"))
    assert header["eval"]["dataset"]["samples"] == 2
    assert header["eval"]["config"]["epochs"] == 2
    assert header["results"]["scores"][0]["metrics"]["mean"]["value"] == 0.75
    assert [(one["id"], one["epoch"], one["input"]) for one in summaries] == [
        (0, 1, "what\n[image]"),
        (0, 2, "what\n[image]"),
        (1, 1, "what\n[image]"),
    ]
    assert (sample["target"], sample["scores"]["reward"]["value"]) == ("2", 0.5)
    assert [message["role"] for message in sample["input"]] == ["system", "user"]
