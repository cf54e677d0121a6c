"""Rows that go on with stored conversations: by the very ids that the model saw then, or refused with the reason."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollstream.agent.prompt import PromptRenderer
from rollstream.agent.tools.base import Tool
from rollstream.config.load import compose, to_settings
from rollstream.data import stored
from rollstream.data.prompts import PromptDataset, load_prompts
from rollstream.data.stored import pinned
from rollstream.errors import ConfigError, DataError
from rollstream.show import print_trajectory
from rollstream.store.run import Run
from rollstream.testing.scripted import ScriptedEngine
from rollstream.trajectory import STREAMS, Failure, PromptRow, Rollout, Trajectory
from tests.support.view_runs import write_run
from tests.unit.agent.rollouts import (
    completed,
    demo_tokenizer,
    failed,
    make_row,
    make_worker,
    resources,
    started,
)
from tests.unit.agent.test_turns import ANSWERS, COUNTS, by_context
from tests.unit.agent.tools.tools import class_tool, functions, opened

TOKENIZER = {"model.tokenizer": demo_tokenizer().digest()}


async def play(
    tools: Sequence[Any], row: PromptRow, **given: Any
) -> tuple[Rollout | Failure, ScriptedEngine]:
    engine = await started(by_context)
    async with opened(tools) as box:
        limits = {"prompt_length": given.pop("prompt_length", 2000)}
        return await make_worker(resources(engine, tools=box, **limits), **given).run(row, 0), engine


def rows(text: str, **data: Any) -> PromptDataset:
    return load_prompts(to_settings(compose(layers=[{"data": {"train_files": text, **data}}])).data)


@pytest.fixture
def source(tmp_path: Path) -> tuple[Rollout, ScriptedEngine, list[Any]]:
    """A rollout of three calls, stored in a run; the engine that was asked; its tools."""
    tools = functions(tmp_path, COUNTS)
    row = make_row(ground_truth="12", columns={"level": 3}, extra_info={"hint": "no"})
    result, engine = asyncio.run(play(tools, row))
    write_run(tmp_path / "run", [completed(result)], **TOKENIZER)
    return completed(result), engine, tools


def all_ids(trajectory: Trajectory) -> list[int]:
    return trajectory.prompt_ids + trajectory.response_ids


def test_each_turn_is_gone_on_with_as_if_it_had_not_ended(
    tmp_path: Path, source: tuple[Rollout, ScriptedEngine, list[Any]]
) -> None:
    whole, engine, tools = source
    for turn in range(len(ANSWERS)):
        row = rows(f"run:{tmp_path / 'run'}?at=turn:{turn}").row(0)
        assert (row.ground_truth, row.extra_info, row.columns["level"]) == ("12", {"hint": "no"}, 3)
        result, again = asyncio.run(play(tools, row))
        final = completed(result).final
        assert final.prompt_ids == engine.requests[turn].prompt_ids == again.requests[0].prompt_ids
        assert final.response_mask[0] == 1 and len(again.requests) == len(ANSWERS) - turn
        assert [one["role"] for one in final.messages] == [one["role"] for one in whole.final.messages]
        assert final.messages[: 2 * turn + 1] == whole.final.messages[: 2 * turn + 1]
        begun = final.extra["continues"]
        assert begun == {"run": begun["run"], "index": 0, "repeat": 0, "trajectory": 0, "turn": turn}
    with pytest.raises(
        DataError, match=r"none of 1 trajectories can be continued \(1: turns count from 0, and it has 4\)"
    ):
        rows(f"run:{tmp_path / 'run'}?at=turn:4")


def test_what_a_training_noted_of_a_rollout_is_not_of_the_next_one(
    tmp_path: Path, source: tuple[Rollout, ScriptedEngine, list[Any]]
) -> None:
    """Else its teacher would count as asked, and the numbers of other tokens as its."""
    whole, _, tools = source
    values = [0.5] * len(whole.final.response_ids)
    noted = {STREAMS: {"teacher": values}, "teacher_error": "away", "training_store": {"start": 0}}
    whole.trajectories = [replace(whole.final, extra={**whole.final.extra, **noted})]
    root = write_run(tmp_path / "store", [whole], **TOKENIZER)
    final = completed(asyncio.run(play(tools, rows(f"run:{root}?at=turn:1").row(0)))[0]).final
    assert final.extra["level"] == 3 and not noted.keys() & final.extra.keys() and not final.streams


def test_an_answer_that_was_cut_off_goes_on_within_its_words(tmp_path: Path) -> None:
    row = make_row()
    for loop in ("single_turn_agent", "tool_agent"):
        tools = functions(tmp_path, COUNTS)
        whole = completed(asyncio.run(play(tools, row, loop=loop))[0]).final
        end = whole.response_mask.index(0) if 0 in whole.response_mask else len(whole.response_ids)
        for cut in (end - 2, end // 2, end):
            cut_off = replace(
                whole,
                response_ids=whole.response_ids[:cut],
                response_mask=whole.response_mask[:cut],
                response_logprobs=(whole.response_logprobs or [])[:cut],
                messages=[*row.messages, {"role": "assistant", "content": "cut off"}],
                finish_reason="length",
                num_turns=2,
            )
            rollout = Rollout(0, 0, row.prompt_key, [cut_off], "test")
            write_run(tmp_path / f"{loop}-{cut}", [rollout], **TOKENIZER)
            again = rows(f"run:{tmp_path / f'{loop}-{cut}'}?at=end").row(0)
            rest = demo_tokenizer().decode(whole.response_ids[cut:end], skip_special_tokens=False)
            result, engine = asyncio.run(_says(again, tools, rest, loop))
            if cut == end:
                assert "has ended" in failed(result).error
                continue
            final = completed(result).final
            assert engine.requests[0].prompt_ids == final.prompt_ids == all_ids(cut_off)
            assert final.messages[: len(row.messages) + 1] == whole.messages[: len(row.messages) + 1]


def test_an_answer_that_is_cut_off_again_keeps_its_beginning(tmp_path: Path) -> None:
    row = make_row()
    for loop in ("single_turn_agent", "tool_agent"):
        said = [demo_tokenizer().encode(text) for text in ("one", " two", " three<|im_end|>")]
        first = Trajectory(
            prompt_ids=[1, 2, 3],
            response_ids=said[0],
            response_mask=[1] * len(said[0]),
            response_logprobs=None,
            messages=[*row.messages, {"role": "assistant", "content": "one"}],
            finish_reason="length",
            num_turns=2,
            policy_versions=[(0, 0)],
        )
        write_run(tmp_path / f"{loop}-1", [Rollout(0, 0, row.prompt_key, [first], "test")], **TOKENIZER)
        again = completed(
            asyncio.run(_says(rows(f"run:{tmp_path / f'{loop}-1'}?at=end").row(0), [], " two", loop))[0]
        )
        again.trajectories = [replace(again.final, finish_reason="length")]
        root = write_run(tmp_path / f"{loop}-2", [again], **TOKENIZER)
        for at in ("end", "turn:0"):
            rest = " three<|im_end|>" if at == "end" else " two three<|im_end|>"
            final = completed(asyncio.run(_says(rows(f"run:{root}?at={at}").row(0), [], rest, loop))[0]).final
            assert final.messages[-1]["content"] == "one two three"
            assert all_ids(final) == [1, 2, 3, *said[0], *said[1], *said[2]]


async def _says(
    row: PromptRow, tools: Sequence[Any], text: str, loop: str
) -> tuple[Rollout | Failure, ScriptedEngine]:
    said = [demo_tokenizer().encode(text), demo_tokenizer().encode("enough<|im_end|>")]
    engine = await started(lambda request: said[min(len(engine.requests) - 1, 1)])
    async with opened(tools) as box:
        return await make_worker(resources(engine, tools=box), loop=loop).run(row, 0), engine


def test_a_question_follows_the_end_as_the_template_writes_it(
    tmp_path: Path, source: tuple[Rollout, ScriptedEngine, list[Any]]
) -> None:
    whole, _, tools = source
    row = rows(f"run:{tmp_path / 'run'}?at=end&ask=Are you sure = certain?").row(0)
    assert row.messages == [*whole.final.messages, {"role": "user", "content": "Are you sure = certain?"}]
    asked = asyncio.run(_says(row, tools, "enough<|im_end|>", "tool_agent"))[1].requests[0].prompt_ids
    tail = demo_tokenizer().decode(asked[len(all_ids(whole.final)) :], skip_special_tokens=False)
    assert asked[: len(all_ids(whole.final))] == all_ids(whole.final)
    assert tail == "\n<|im_start|>user\nAre you sure = certain?<|im_end|>\n<|im_start|>assistant\n"
    prompts = PromptRenderer(demo_tokenizer(), prompt_length=len(asked) - 1, truncation="error")
    shown = [tool.schema for tool in tools]
    assert prompts.lengths([row], lambda row: shown) == [len(asked)]  # what filter_overlong_prompts goes by


def test_rows_are_in_the_order_of_their_keys_and_those_of_the_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: tuple[Rollout, ScriptedEngine, list[Any]]
) -> None:
    monkeypatch.setattr(stored, "_READ_TOGETHER", 2)
    made = [replace(source[0], index=at // 2, repeat=at % 2, finished_at=1e9 + at) for at in (5, 2, 3, 0, 7)]
    for one in made:
        one.trajectories = [replace(one.final, reward=float(one.repeat))]
    root = write_run(tmp_path / "more", made, rows=2, **TOKENIZER)
    text = f"run:{root}?at=turn:1&where=reward = 1"
    found = rows(text)
    keys = [found.row(at).columns["continues"] for at in range(len(found))]
    assert [(key["index"], key["repeat"]) for key in keys] == [(1, 1), (2, 1), (3, 1)]
    monkeypatch.chdir(tmp_path)
    once = pinned("run:more?at=turn:1&where=reward = 1", [])
    assert once == f"{text}&until={1e9 + 7!r}" and pinned(once, []) == once
    late = replace(source[0], index=9, finished_at=2e9, trajectories=made[-1].trajectories)
    write_run(root, [late], rows=2, **TOKENIZER)
    monkeypatch.chdir("/")
    assert pinned(text, ["other.jsonl", once]) == once
    assert rows(once).fingerprint == found.fingerprint != rows(text).fingerprint
    assert len(rows(f"run:{root}?at=turn:1")) == len(made) + 1


def test_what_cannot_be_continued_says_why(
    tmp_path: Path, source: tuple[Rollout, ScriptedEngine, list[Any]]
) -> None:
    class Counts(Tool):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            return "it was so"

    tools, row = source[2], rows(f"run:{tmp_path / 'run'}?at=turn:2").row(0)
    other = write_run(tmp_path / "other", [source[0]], **{"model.tokenizer": "of another model"})
    for tried, reason in (
        (play([class_tool(Counts, "next")], row), "has a state"),
        (play([], row, loop="single_turn_agent"), "shows other tools"),
        (play(tools, row, loop="context_agent"), "it numbers the messages anew"),
        (play(tools, rows(f"run:{other}?at=turn:2").row(0)), "another tokenizer, chat template"),
        (play(tools, row, prompt_length=50), "it is never cut"),
    ):
        result = asyncio.run(tried)
        assert reason in failed(result[0]).error
        assert not result[1].requests and failed(result[0]).attempts == 1


@pytest.mark.parametrize(
    ("change", "at", "reason"),
    [
        ({"extra": {"prompt_messages": 1}}, "turn:1", "an agent program made it"),
        ({"extra": {"token_exact": False}}, "turn:1", "no token ids that were sampled"),
        (
            {"prompt_ids": [], "response_ids": [], "response_mask": [], "response_logprobs": None},
            "end",
            "no token ids",
        ),
        ({"num_turns": 3}, "turn:1", "cannot be told apart"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "turn:0", "it shows images"),
        ({}, "end", r"was not cut off, and nothing is asked after it \(ask=TEXT\)"),
        ({"finish_reason": "max_turns", "calls": True}, "end&ask=Well?", "its end is no answer in words"),
    ],
)
def test_trajectories_that_are_left_out(
    tmp_path: Path,
    source: tuple[Rollout, ScriptedEngine, list[Any]],
    change: dict[str, Any],
    at: str,
    reason: str,
) -> None:
    final = source[0].final
    if change.pop("calls", False):
        change |= {"messages": [*final.messages[:-1], {**final.messages[-1], "tool_calls": [{"id": "1"}]}]}
    root = write_run(
        tmp_path / "left", [replace(source[0], trajectories=[replace(final, **change)])], **TOKENIZER
    )
    with pytest.raises(DataError, match=reason):
        rows(f"run:{root}?at={at}")


@pytest.mark.parametrize(
    "query",
    [
        "",
        "at=",
        "at=turn:x",
        "at=turn:1&ask=Why?",
        "at=end&until=now",
        "at=turn:1&when=reward=0",
        "at=turn:-1",
    ],
)
def test_references_that_mean_nothing(query: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.train_files: run:d\?"):
        rows(f"run:d?{query}")


def test_a_filter_that_means_nothing_names_its_place(
    tmp_path: Path, source: tuple[Rollout, ScriptedEngine, list[Any]]
) -> None:
    with pytest.raises(ConfigError, match="where, character 0: 'rewart'"):
        rows(f"run:{tmp_path / 'run'}?at=end&where=rewart = 0")


def test_rows_survive_what_a_trainer_does_to_them_and_show_says_where_they_began(
    tmp_path: Path, source: tuple[Rollout, ScriptedEngine, list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"run:{tmp_path / 'run'}?at=turn:1"
    named = rows(text, prompt_key="question", ground_truth_key="gold.text").row(0)
    assert (named.messages, named.ground_truth) == (rows(text).row(0).messages, "12")
    result, engine = asyncio.run(play(source[2], named))
    root = write_run(tmp_path / "next", [completed(result)], **TOKENIZER)
    print_trajectory(Run.open(root).find(), tokens=False)
    assert "index 0, repeat 0, trajectory 0, turn 1" in capsys.readouterr().out
    twice = rows(f"run:{root}?at=turn:1").row(0).stored_prompt
    assert twice is not None and twice["ids"] == engine.requests[1].prompt_ids
