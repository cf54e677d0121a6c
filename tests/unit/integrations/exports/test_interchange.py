"""ATIF and inspect_ai's log: their documents (tests/compat/test_inspect.py lets inspect_ai read its own)."""

import zipfile
from pathlib import Path
from typing import Any

import orjson

from rollstream.store.export.run import export_run
from rollstream.trajectory import Metrics, Rollout, Trajectory
from tests.support.atif import check_atif
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
    assert first["final_metrics"]["total_prompt_tokens"] == 2 + 5


def odd_trajectories() -> Rollout:
    """What agents and loops of all kinds leave behind."""
    call = {"function": {"name": "f", "arguments": "no JSON"}}
    talks: list[list[dict[str, Any]]] = [
        [],
        MESSAGES,
        [{"role": "tool", "content": "of nobody"}],
        [{"role": "developer", "content": None}, {"role": "user", "content": "q", "reasoning_content": "x"}],
        [
            {"role": "assistant", "tool_calls": [call, call]},
            *({"role": "tool", "content": text} for text in "abc"),
        ],
    ]
    found = []
    for messages in talks:
        one = with_tools(0.5)
        one.messages, one.is_snapshot = messages, True
        one.response_logprobs = [float("-inf"), 0.0, 0.0, -1.0]
        found.append(one)
    found[-1].is_snapshot = False
    return Rollout(0, 0, "0" * 32, found, "test", None)


async def documents_of(root: Path, *rollouts: Rollout) -> list[dict[str, Any]]:
    await commit_all(root, list(rollouts))
    set_total(root, len(rollouts))
    return [orjson.loads(line) for line in export_run(root, "atif").target.read_bytes().splitlines()]


async def test_atif_is_what_its_schema_asks_for_whatever_the_agent_left(tmp_path: Path) -> None:
    documents = await documents_of(tmp_path, odd_trajectories())
    for document in documents:
        check_atif(document)
    empty, first, *_, last = documents
    assert [step["source"] for step in empty["steps"]] == ["agent"]
    # A snapshot's successor begins with what the snapshot had.
    assert [step.get("is_copied_context", False) for step in first["steps"]] == [True, True, False, False]
    assert "logprobs" not in first["steps"][2]["metrics"] and first["steps"][3]["metrics"]["logprobs"] == [
        -1.0
    ]
    results = last["steps"][0]["observation"]["results"]
    assert [one.get("source_call_id") for one in results] == ["call_0", "call_1", None]
    assert last["steps"][0]["tool_calls"][0]["arguments"] == {"raw": "no JSON"}


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
