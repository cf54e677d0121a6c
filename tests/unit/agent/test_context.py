"""R1 when a model edits its context: every sampled token is trained on once, and what stays is as sampled."""

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.agent.base import TurnLimits
from rollstream.agent.context import SCHEMAS, ContextAgent
from rollstream.agent.interactions import Interaction, Interactions
from rollstream.agent.registry import AgentLoops, LoopEntry
from rollstream.chat.tool_schema import schema_digest
from rollstream.errors import RewardError
from rollstream.testing.scripted import ScriptedEngine
from rollstream.trajectory import Message, PromptRow, Rollout, Trajectory
from tests.unit.agent.rollouts import (
    END,
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
from tests.unit.agent.tools.tools import Recorder, class_tool, opened
from tests.unit.chat.templates import load


def delete(*ids: Any) -> str:
    """An answer that asks for messages to be deleted."""
    return "".join(call_text("deleteContext", msg_id=each) for each in ids)


class Reward:
    """1 for an answer 12; says what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, bool]] = []

    async def score(self, row: PromptRow, solution_str: str) -> tuple[float | None, dict[str, Any]]:
        self.told.append((solution_str, row.extra_info["is_snapshot"]))
        if solution_str == "unscorable":
            raise RewardError("cannot be scored")
        return float(solution_str == "12"), {}


async def play(
    *answers: str, options: dict[str, Any] | None = None, row: PromptRow | None = None, **given: Any
) -> tuple[Rollout, ScriptedEngine]:
    """One rollout of a context agent with a user's tool `it`, and its engine."""
    reward = given.pop("reward", None)
    engine = await started(says(*answers))
    async with opened([class_tool(Recorder)]) as box:
        worker = make_worker(
            resources(engine, tools=box, **given),
            loop="context_agent",
            loops=AgentLoops({"context_agent": LoopEntry(ContextAgent, options or {})}),
            reward=reward,
        )
        return completed(await worker.run(row or make_row(), 0)), engine


def check_every_token_once(rollout: Rollout, engine: ScriptedEngine) -> None:
    """The engine's completions, in order, are what is masked over the trajectories, in order."""
    spoken = [
        pair
        for _, completion in engine.completions
        for pair in zip(completion.token_ids, completion.logprobs or [], strict=True)
    ]
    assert [pair for one in rollout.trajectories for pair in sampled(one)] == spoken
    requests = iter(engine.requests)
    answers = iter(engine.completions)
    for one in rollout.trajectories:
        whole = [*one.prompt_ids, *one.response_ids]
        at = len(one.prompt_ids)
        for _ in range(int(one.metrics.engine_calls)):
            request, (_, completion) = next(requests), next(answers)
            assert request.prompt_ids == whole[: len(request.prompt_ids)]
            assert set(one.response_mask[at - len(one.prompt_ids) :][: len(request.prompt_ids) - at]) <= {0}
            at = len(request.prompt_ids) + len(completion.token_ids)
            assert whole[len(request.prompt_ids) : at] == completion.token_ids
        assert at == len(whole)
    assert next(requests, None) is None
    assert [one.is_snapshot for one in rollout.trajectories] == [True] * (len(rollout.trajectories) - 1) + [
        False
    ]


def text(ids: list[int]) -> str:
    return demo_tokenizer().decode(ids, skip_special_tokens=False)


async def test_a_deletion_ends_a_trajectory_and_the_next_one_begins_with_a_stub() -> None:
    rollout, engine = await play(call_text("it", secret=17), f"ok {delete(2)}", "12")
    check_every_token_once(rollout, engine)
    snapshot, final = rollout.trajectories
    assert (snapshot.finish_reason, final.finish_reason) == ("stop", "stop")
    assert snapshot.response_mask[-1] == 1
    assert (snapshot.extra["deleted_msg_ids"], "deleted_msg_ids" in final.extra) == ([2], False)
    assert snapshot.messages[2]["content"] == '[msg_id: 2]\n{"secret": 17}'
    assert (snapshot.num_turns, final.num_turns) == (4, 6)
    assert final.messages[:2] == snapshot.messages[:2]
    assert final.messages[2] == {**snapshot.messages[2], "content": "[msg_id: 2] [deleted]"}
    assert final.messages[3] == snapshot.messages[3]
    assert [message["content"] for message in final.messages[4:]] == [
        "[msg_id: 4]\nMessage 2 is deleted.",
        "12",
    ]
    turns = text(final.prompt_ids).split("<|im_start|>")
    assert turns[2:] == [
        f"user\n[msg_id: 0]\n3 + 9 ={END}\n",
        f"assistant\n{call_text('it', secret=17)}{END}\n",
        f"user\n<tool_response>\n[msg_id: 2] [deleted]\n</tool_response>{END}\n",
        f"assistant\nok {delete(2)}{END}\n",
        f"user\n<tool_response>\n[msg_id: 4]\nMessage 2 is deleted.\n</tool_response>{END}\n",
        "assistant\n",
    ]
    assert final.response_ids == demo_tokenizer().encode("12" + END)
    assert final.extra["tool_scores"] == {"it": 1.0}
    assert final.extra["shown_tools"] == snapshot.extra["shown_tools"]
    assert final.extra["shown_tools"][1:] == [schema_digest(schema) for schema in SCHEMAS]
    assert [snapshot.metrics.tool_calls, final.metrics.tool_calls] == [2, 0]
    assert (
        snapshot.extra["tool_counts"] == {"it": [1, 0], "deleteContext": [1, 0]}
        and "tool_counts" not in final.extra
    )


async def test_refusals_are_told_and_take_no_snapshot() -> None:
    row = make_row(messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "hm"}])
    bad: list[tuple[Any, str]] = [
        (0, "the system message cannot be deleted"),
        (2, "no message has msg_id 2"),
        (99, "no message has msg_id 99"),
        ("x", "deleteContext: msg_id: 'x' is not of type 'integer'"),
        *((value, "deleteContext: msg_id: ") for value in ("1", True, None, [1], 1.5)),
    ]
    rollout, engine = await play(delete(*(given for given, _ in bad)), "12", row=row)
    check_every_token_once(rollout, engine)
    assert len(rollout.trajectories) == 1
    said = contents(rollout.final)
    assert len(said) == len(bad)
    for told, (_, expected) in zip(said, bad, strict=True):
        assert f"Error: {expected}" in told
    assert rollout.final.metrics.tool_errors == len(bad)
    assert rollout.final.messages[0] == {"role": "system", "content": "be brief"}
    assert rollout.final.messages[1]["content"] == "[msg_id: 1]\nhm"


async def test_after_the_last_snapshot_deletions_are_refused() -> None:
    rollout, engine = await play(
        delete(0), delete(1), delete(3), "12", options={"max_snapshots": 2}, turns=TurnLimits(9, 9)
    )
    check_every_token_once(rollout, engine)
    assert len(rollout.trajectories) == 3
    assert "nothing more can be deleted" in contents(rollout.final)[-1]
    none, _ = await play(delete(0), "12", options={"max_snapshots": 0})
    assert len(none.trajectories) == 1
    endless, _ = await play(*(delete(at) for at in range(60)), turns=TurnLimits(40))
    assert (len(endless.trajectories), endless.final.finish_reason) == (17, "max_turns")


async def test_notes() -> None:
    asked = [
        ("note", {"key": "a", "content": "1"}, "Note 'a' is written."),
        ("readNote", {"key": "a"}, "1"),
        ("updateNote", {"key": "a", "content": "2"}, "Note 'a' is updated."),
        ("note", {"key": "a", "content": "3"}, "Error: there is a note 'a' already"),
        ("updateNote", {"key": "b", "content": "3"}, "Error: no note 'b'"),
        ("readNote", {"key": "b"}, "Error: no note 'b'"),
        ("note", {"key": "c", "content": "x" * 65_535}, "Error: notes may have"),
        ("readNote", {"key": "a"}, "2"),
    ]
    calls = "".join(call_text(name, **arguments) for name, arguments, _ in asked)
    rollout, _ = await play(calls, "12", response_length=100_000)
    for (_, _, expected), result in zip(asked, contents(rollout.final), strict=True):
        assert result.partition("\n")[2].startswith(expected)


async def test_a_prompt_that_had_to_be_truncated_stays_as_it_was_seen() -> None:
    row = make_row(text="1 + " * 400)
    rollout, engine = await play(
        call_text("it"), delete(2), "12", row=row, prompt_length=500, truncation="left"
    )
    check_every_token_once(rollout, engine)
    snapshot, final = rollout.trajectories
    assert final.prompt_ids[:500] == snapshot.prompt_ids


@pytest.mark.parametrize(
    ("scoring", "rewards"),
    [("outcome", [1.0, 1.0, 1.0]), ("own", [0.0, 1.0, 1.0]), ("none", [None, None, 1.0])],
)
async def test_scoring_of_snapshots(scoring: str, rewards: list[float | None]) -> None:
    reward = Reward()
    rollout, _ = await play(
        f"11 {delete(0)}", f"12 {delete(1)}", "12", options={"snapshot_scoring": scoring}, reward=reward
    )
    assert [one.reward for one in rollout.trajectories] == rewards
    told = {"own": [("12", False), ("11", True), ("12", True)]}.get(scoring, [("12", False)])
    assert reward.told == told


async def test_a_penalty_is_for_tokens_beyond_the_budget_and_stays() -> None:
    answers = (call_text("it", long="0 1 2 3 " * 30), delete(2), delete(1), "12")
    plain, _ = await play(*answers)
    sizes = [len(one.prompt_ids) + len(one.response_ids) for one in plain.trajectories]
    budget = sizes[1] + 10
    assert sizes[0] > budget
    for scoring in ("outcome", "own", "none"):
        rollout, _ = await play(
            *answers,
            options={"context_penalty": 0.5, "context_budget": budget, "snapshot_scoring": scoring},
            reward=Reward(),
        )
        assert [one.reward for one in rollout.trajectories] == [-0.5 * (sizes[0] - budget), 0.0, 1.0]


async def test_no_room_after_a_deletion_ends_it_before_the_deletion() -> None:
    whole, _ = await play(call_text("it", x="0 1 2 3 4 5 6 7"), delete(1), "12")
    prompt = len(whole.final.prompt_ids)
    rollout, engine = await play(call_text("it", x="0 1 2 3 4 5 6 7"), delete(1), "12", max_model_len=prompt)
    check_every_token_once(rollout, engine)
    assert [one.finish_reason for one in rollout.trajectories] == ["length"]
    assert rollout.final.response_ids[-1] == engine.completions[-1][1].token_ids[-1]
    assert len(engine.requests) == 2
    one_more, _ = await play(call_text("it", x="0 1 2 3 4 5 6 7"), delete(1), "12", max_model_len=prompt + 1)
    assert (one_more.final.finish_reason, len(one_more.final.response_ids)) == ("length", 1)


class Asks(Interaction):
    """Asks again until the answer is 12."""

    async def generate_response(self, instance_id: str, messages: list[Message], **kwargs: Any) -> Any:
        right = messages[-1]["content"] == "12"
        return right, "try again", float(right), {}


async def test_an_interactions_messages_have_ids_and_can_be_deleted() -> None:
    engine = await started(says("10", "11", delete(2, 1), "12"))
    partners = Interactions({"asks": Asks({})})
    worker = make_worker(resources(engine, interactions=partners), loop="context_agent")
    row = make_row(extra_info={"interaction_kwargs": {"name": "asks"}})
    rollout = completed(await worker.run(row, 0))
    check_every_token_once(rollout, engine)
    snapshot, final = rollout.trajectories
    assert contents(snapshot, "user") == [
        "[msg_id: 0]\n3 + 9 =",
        "[msg_id: 2]\ntry again",
        "[msg_id: 4]\ntry again",
    ]
    assert [message["content"] for message in final.messages] == [
        "[msg_id: 0]\n3 + 9 =",
        "[msg_id: 1] [deleted]",
        "[msg_id: 2] [deleted]",
        "11",
        "[msg_id: 4]\ntry again",
        "",
        "[msg_id: 6]\nMessage 2 is deleted.",
        "[msg_id: 7]\nMessage 1 is deleted.",
        "12",
    ]
    assert final.extra["turn_scores"] == [0.0, 0.0, 1.0]
    shown = text(final.prompt_ids)
    assert f"assistant\n[msg_id: 1] [deleted]{END}\n<|im_start|>user\n[msg_id: 2] [deleted]{END}" in shown


async def test_a_template_without_a_role_for_tools() -> None:
    tokenizer = load("gemma")
    spoken = iter([delete(0), "12"])
    engine = await started(lambda request: tokenizer.encode(next(spoken) + "<end_of_turn>"))
    worker = make_worker(resources(engine, tokenizer=tokenizer), loop="context_agent")
    rollout = completed(await worker.run(make_row(), 0))
    check_every_token_once(rollout, engine)
    shown = tokenizer.decode(rollout.final.prompt_ids, skip_special_tokens=False)
    assert shown == (
        "<bos><start_of_turn>user\n[msg_id: 0] [deleted]<end_of_turn>\n<start_of_turn>model\n"
        f"{delete(0)}<end_of_turn>\n<start_of_turn>user\n[msg_id: 2]\n<tool_response>\n"
        "Message 0 is deleted.\n</tool_response><end_of_turn>\n<start_of_turn>model\n"
    )


steps = st.lists(
    st.one_of(
        st.integers(-1, 14).map(lambda at: call_text("deleteContext", msg_id=at)),
        st.integers(0, 99).map(lambda x: call_text("it", x=x)),
        st.sampled_from([call_text("note", key="a", content="b"), call_text("readNote", key="a")]),
        st.sampled_from(["<tool_call>{", "hm ", "<think>so</think>"]),
    ),
    min_size=1,
    max_size=4,
).map("".join)


@settings(max_examples=60, deadline=None)
@given(
    answers=st.lists(steps, min_size=1, max_size=6),
    system=st.booleans(),
    max_snapshots=st.integers(0, 4),
    response_length=st.integers(20, 400) | st.just(4000),
    beyond=st.none() | st.integers(0, 600),
)
def test_whatever_is_deleted_every_token_is_trained_on_once(
    answers: list[str], system: bool, max_snapshots: int, response_length: int, beyond: int | None
) -> None:
    messages: list[Message] = [{"role": "system", "content": "be brief"}] if system else []
    messages.append({"role": "user", "content": "3 + 9 ="})

    async def run() -> tuple[Rollout, ScriptedEngine]:
        return await play(
            *answers,
            "12",
            options={"max_snapshots": max_snapshots},
            row=make_row(messages=messages),
            response_length=response_length,
            max_model_len=None if beyond is None else 1200 + beyond,
        )

    rollout, engine = asyncio.run(run())
    check_every_token_once(rollout, engine)
    parts = rollout.trajectories
    assert len(parts) <= max_snapshots + 1
    deleted: set[int] = set()
    for before, after in pairwise(parts):
        asked = before.extra["deleted_msg_ids"]
        assert asked and deleted.isdisjoint(asked) and len(set(asked)) == len(asked)
        deleted.update(asked)
        assert not (system and 0 in deleted)
        stub = [message["content"] for message in after.messages]
        for at, message in enumerate(before.messages):
            assert after.messages[at]["role"] == message["role"]
            if at in deleted:
                assert stub[at] == f"[msg_id: {at}] [deleted]"
            else:
                assert after.messages[at] == message
        check_kept_answers(after, engine, deleted)
    for one in parts:
        assert len(one.response_ids) <= response_length
        if beyond is not None:
            assert not one.response_ids or len(one.prompt_ids) + len(one.response_ids) <= 1200 + beyond


def check_kept_answers(after: Trajectory, engine: ScriptedEngine, deleted: set[int]) -> None:
    """The prompt has the ids of kept answers as they were sampled, in order."""
    spoken = [completion.token_ids for _, completion in engine.completions]
    whole = [*after.prompt_ids, *after.response_ids]
    at = answer = 0
    for number, message in enumerate(after.messages):
        if message["role"] != "assistant":
            continue
        ids = spoken[answer]
        answer += 1
        if number in deleted:
            continue
        at = next(i for i in range(at, len(whole)) if whole[i : i + len(ids)] == ids) + len(ids)


async def test_settings_that_cannot_be_used() -> None:
    engine = await started(says("12"))
    async with opened([class_tool(Recorder, "note")]) as box:  # a name of the loop's own
        failed(await make_worker(resources(engine, tools=box), loop="context_agent").run(make_row(), 0))
    loops = AgentLoops({"it": LoopEntry(ContextAgent, {"snapshot_scoring": "last"})})
    failed(await make_worker(resources(engine), loop="it", loops=loops).run(make_row(), 0))
    assert engine.requests == []
