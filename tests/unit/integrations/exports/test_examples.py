"""SFT examples and preference pairs: which rollouts they are made of, once each."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from rollstream.errors import ConfigError
from rollstream.integrations.exports.examples import (
    PreferenceOptions,
    SftOptions,
    export_preference,
    export_sft,
)
from rollstream.trajectory import Metrics, Rollout, Trajectory
from tests.unit.store.export.artifacts import conversation, rollouts, trajectory, write_artifact


def answered(
    text: str, reward: float | None, *, prompt: str = "q", calls: int = 1, finish: str = "stop"
) -> Trajectory:
    one = trajectory(turns=[[ord(text[0])]], reward=reward)
    question = {"role": "user", "content": prompt}
    one.messages = [question, {"role": "assistant", "content": text}]
    one.metrics, one.finish_reason = Metrics(engine_calls=calls), finish
    return one


def artifact(path: Path, *groups: list[Trajectory]) -> Path:
    made = [
        Rollout(index, repeat, f"{index:032x}", [one], "test")
        for index, group in enumerate(groups)
        for repeat, one in enumerate(group)
    ]
    return write_artifact(path / "a.parquet", made)


def lines(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


GROUPS = (
    [answered("a", 0.2), answered("b", 0.9), answered("b", 0.9), answered("c", 0.5), answered("d", None)],
    [answered("e", 0.4, prompt="r"), answered("f", 0.4, prompt="r")],
    [answered("g", 0.1, prompt="s"), answered("h", 1.0, prompt="s", finish="aborted")],
)


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        (SftOptions(), ["a", "b", "c", "e", "f", "g"]),
        (SftOptions(best=1), ["b", "e", "g"]),
        (SftOptions(best=2), ["b", "c", "e", "f", "g"]),
        (SftOptions(min_reward=0.4), ["b", "c", "e", "f"]),
        (SftOptions(best=1, min_reward=0.4), ["b", "e"]),
    ],
)
def test_examples_are_the_best_ones_once_each(tmp_path: Path, options: SftOptions, chosen: list[str]) -> None:
    made = export_sft(artifact(tmp_path, *GROUPS), tmp_path / "x", options)
    rows = lines(tmp_path / "x")
    assert ([row["messages"][-1]["content"] for row in rows], made) == (chosen, len(chosen))
    assert rows[0].keys() == {"messages", "index", "repeat", "prompt_key", "data_source", "reward"}


def test_tokens_are_those_that_were_sampled_with_their_mask(tmp_path: Path) -> None:
    one = trajectory([1, 2], [[4, 5], [6], [7]])
    snapshot = trajectory([9], [[9]], is_snapshot=True)
    path = write_artifact(tmp_path / "a", [Rollout(0, 0, "0" * 32, [snapshot, one], "test")])
    assert export_sft(path, tmp_path / "x", SftOptions(tokens=True)) == 1
    (row,) = lines(tmp_path / "x")
    assert row["input_ids"] == [1, 2, 4, 5, 6, 7]
    assert row["assistant_masks"] == [0, 0, 1, 1, 0, 1]


def test_what_cannot_be_an_example_says_so_and_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("old")
    text = answered("a", 1.0)
    text.prompt_ids, text.response_ids, text.response_mask, text.response_logprobs = [], [], [], None
    for groups, options, why in [
        (GROUPS, SftOptions(min_reward=2.0), "high enough"),
        (GROUPS, SftOptions(best=0), "--best must be at least 1"),
        ([[text]], SftOptions(tokens=True), "without token ids"),
        ([[answered("a", None)]], SftOptions(), "no rollout has a reward"),
    ]:
        with pytest.raises(ConfigError, match=why):
            export_sft(artifact(tmp_path, *groups), tmp_path / "x", options)
    assert (tmp_path / "x").read_text() == "old"


@pytest.mark.parametrize(
    ("options", "pairs"),
    [
        (PreferenceOptions(), [("b", "a")]),
        (PreferenceOptions("all"), [("b", "c"), ("b", "a"), ("c", "a")]),
        (PreferenceOptions("all", min_margin=0.35), [("b", "c"), ("b", "a")]),
    ],
)
def test_pairs_of_a_prompt(tmp_path: Path, options: PreferenceOptions, pairs: list[tuple[str, str]]) -> None:
    assert export_preference(artifact(tmp_path, *GROUPS), tmp_path / "x", options) == len(pairs)
    rows = lines(tmp_path / "x")
    assert [(row["chosen"][0]["content"], row["rejected"][0]["content"]) for row in rows] == pairs
    for row in rows:
        assert row["prompt"] == [{"role": "user", "content": "q"}]
        assert row["margin"] == row["score_chosen"] - row["score_rejected"] >= options.min_margin
    with pytest.raises(ConfigError, match="no two rollouts"):
        export_preference(artifact(tmp_path, GROUPS[1]), tmp_path / "x", options)


@pytest.mark.parametrize(
    "pair",
    [
        [
            answered("a", 1.0, prompt="t", calls=3),
            answered("b", 0.0, prompt="t", calls=3),
        ],  # whose prompt is unknown
        [answered("a", 1.0, prompt="t"), answered("a", 0.0, prompt="t")],  # of the same messages
    ],
)
def test_a_pair_that_teaches_nothing_is_left_out_and_counted(
    tmp_path: Path, pair: list[Trajectory], caplog: pytest.LogCaptureFixture
) -> None:
    assert export_preference(artifact(tmp_path, *GROUPS, pair), tmp_path / "x") == 1
    assert "1 pairs are left out" in caplog.text
    with pytest.raises(ConfigError):
        export_preference(artifact(tmp_path, pair), tmp_path / "x")


def test_turns_of_a_tool_agent_are_in_chosen_and_rejected(tmp_path: Path) -> None:
    path = write_artifact(
        tmp_path / "a", rollouts(trajectory(reward=1.0), trajectory(turns=[[4]], reward=0.0))
    )
    export_preference(path, tmp_path / "x")
    (row,) = lines(tmp_path / "x")
    assert row["prompt"] + row["chosen"] == conversation(2)
    assert row["prompt"] + row["rejected"] == conversation(1)


def shown(one: Trajectory, *digests: str) -> Trajectory:
    one.extra = {"shown_tools": list(digests)}
    return one


def test_lines_have_the_schemas_that_their_prompts_showed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tools = {"d1": {"function": {"name": "b", "a": 1}}, "d2": {"function": {"name": "a"}}}
    groups = (
        [shown(answered("a", 1.0), "d2", "d1"), shown(answered("b", 0.0), "d2", "d1")],
        [shown(answered("a", 1.0), "d1"), shown(answered("b", 0.0), "d2")],
        [answered("a", 1.0), answered("b", 0.0)],
    )
    path = artifact(tmp_path, *groups)
    texts = [orjson.dumps([tools[one] for one in each]).decode() for each in (["d2", "d1"], ["d1"], ["d2"])]
    assert export_sft(path, tmp_path / "x", tools=tools) == 6
    found = [line.get("tools", "none") for line in lines(tmp_path / "x")]
    assert found == [texts[0], texts[0], texts[1], texts[2], "none", "none"]
    assert not caplog.text
    assert export_preference(path, tmp_path / "x", tools=tools) == 2
    assert [line.get("tools", "none") for line in lines(tmp_path / "x")] == [texts[0], "none"]
    assert "1 pairs are left out: the prompts of the two showed different tools" in caplog.text


def test_a_program_s_schemas_stand_with_the_trajectory(tmp_path: Path) -> None:
    schema = {"function": {"name": "f"}}
    one = answered("a", 1.0)
    one.extra = {"shown_tools": [schema]}
    export_sft(artifact(tmp_path, [one]), tmp_path / "x")
    assert [orjson.loads(line["tools"]) for line in lines(tmp_path / "x")] == [[schema]]


def test_schemas_that_a_run_does_not_have_are_said_to_be_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    called = trajectory(reward=1.0)
    called.messages = [
        *called.messages[:1],
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c"}]},
    ]
    group = [shown(answered("a", 1.0), "d1", "d2"), called, answered("b", 0.0)]
    for export in (export_sft, export_preference):
        caplog.clear()
        export(artifact(tmp_path, group), tmp_path / "x", tools={"d1": {}})
        assert all("tools" not in line for line in lines(tmp_path / "x"))
        assert f"{2 if export is export_sft else 1} examples have tools and no schemas of them" in caplog.text
