"""R1 of sessions: whatever is called in whatever order, each sampled token is kept once, behind what it saw."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.gateway.branches import find_branches
from rollstream.gateway.sessions import AnsweredCall, PendingCall, Session
from rollstream.trajectory import Completion, Message, Trajectory

CLOSE, OPEN = 1, 2
"""Ids of the end of an answer's turn and of the beginning of the next one."""


class Plain:
    """Renders a message as the bytes of its content, from 256 on."""

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Any], *, first: bool
    ) -> tuple[Sequence[Message], list[int]]:
        return messages, [len(tools), *self.ids(messages), OPEN]

    def after(self, turn: AnsweredCall, messages: Sequence[Message]) -> tuple[Sequence[Message], list[int]]:
        return messages, [CLOSE, *self.ids(messages), OPEN]

    def ids(self, messages: Sequence[Message]) -> list[int]:
        return [256 + byte for message in messages for byte in message["content"].encode()]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def trajectories_of(session: Session, **options: Any) -> list[Trajectory]:
    return [session.trajectory(branch.turns) for branch in find_branches(session, **options).branches]


@dataclass
class Client:
    """A program and a model whose sampled ids never come twice, so that each can be told apart."""

    session: Session = field(default_factory=lambda: Session(Plain(), name="s", logprobs=True))
    prompts: dict[str, list[int]] = field(default_factory=dict)
    sampled: dict[str, list[int]] = field(default_factory=dict)

    def begin(self, messages: Sequence[Message], *tools: dict[str, Any]) -> PendingCall:
        return self.session.begin(list(messages), list(tools))

    def answer(self, ask: PendingCall, length: int = 2, version: int = 0, **said: Any) -> Message:
        """Answers an open call; returns the answer's message."""
        number = len(self.sampled)
        ids = [10_000 + 10 * number + at for at in range(length)]
        completion = Completion(ids, [-0.5 * i for i in ids], "stop", [(0, version)])
        # Some say the same.
        message: Message = {"role": "assistant", "content": f"answer {number % 3}", **said}
        self.prompts[str(number)] = ask.context
        self.sampled[str(number)] = ids
        self.session.answer(ask, str(number), message, completion)
        return message

    def ask(self, messages: Sequence[Message], *tools: dict[str, Any]) -> list[Message]:
        """The conversation with its answer."""
        return [*messages, self.answer(self.begin(messages, *tools))]

    def check(self, kept: set[str] | None = None, **options: Any) -> list[Trajectory]:
        """The trajectories, of which each has its answers behind their prompts, and all have each once."""
        found = trajectories_of(self.session, kept=kept, **options)
        owed, last = dict(self.sampled), []
        for trajectory in found:
            for seen, ids in trajectory.generations():
                name = str((ids[0] - 10_000) // 10)
                assert (seen, ids) == (self.prompts[name], owed.pop(name))
            columns = zip(trajectory.response_ids, trajectory.response_mask, strict=True)
            logprobs = [-0.5 * token if mask else 0.0 for token, mask in columns]
            assert trajectory.response_logprobs == logprobs
            assert trajectory.response_mask[-1] == 1
            last.append(self.session.turns[int(name)])
        if not options:
            assert all(last[-1].answered > earlier.ask.begun for earlier in last)
        assert not (owed if kept is None else kept & owed.keys())
        return found

    def parent_of(self, messages: Sequence[Message], tools: Sequence[Any]) -> AnsweredCall | None:
        """What a call goes on after, by comparing it with every conversation there is."""
        found = []
        for at, turn in enumerate(self.session.turns):
            known = turn.conversation
            is_known = turn.ask.tools == tools and len(known) < len(messages)
            if is_known and all(map(same, known, messages)):
                found.append((len(known), turn.following is None, at, turn))
        return max(found)[-1] if found else None


def same(ours: Message, theirs: Message) -> bool:
    is_answer = ours["role"] == "assistant"
    thought = (theirs.get("reasoning_content") or "").strip() if is_answer else ""
    return (
        ours["role"] == theirs["role"]
        and ours["content"].strip() == theirs["content"].strip()
        and ours.get("tool_calls", []) == theirs.get("tool_calls", [])
        and thought in ("", ours.get("reasoning_content", ""))
    )


def sent_back(history: Sequence[Message], how: int) -> list[Message]:
    """A history as some clients have it when they send it back."""
    found = []
    for message in history:
        changed = dict(message)
        if message["role"] == "assistant" and how & 1:
            changed["content"] = f" {message['content']}\n"
        if how & 2:
            changed.pop("reasoning_content", None)
        if calls := message.get("tool_calls"):  # written anew, in another order
            function = calls[0]["function"]
            arguments = dict(reversed(function["arguments"].items()))
            changed["tool_calls"] = [{**calls[0], "function": {**function, "arguments": arguments}}]
        found.append(changed)
    return found


steps = st.lists(
    st.tuples(
        st.sampled_from(["begin", "begin", "begin", "answer", "answer", "give up"]),
        st.integers(0, 30),
        st.integers(0, 4),
        st.sampled_from([None, None, "content", "reasoning_content"]),
        st.integers(0, 3),
    ),
    max_size=25,
)
SAID: list[dict[str, Any]] = [
    {},
    {"reasoning_content": "hm"},
    {"reasoning_content": "so"},
    {"tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": {"a": 1, "b": [2]}}}]},
]


@given(steps, st.data())
@settings(max_examples=300)
def test_any_calls_are_exact(steps: list[tuple[str, int, int, str | None, int]], data: st.DataObject) -> None:
    """A call takes an earlier conversation, cuts it off or edits it, and adds something; many are open at once."""
    client = Client()
    histories: list[list[Message]] = [[]]
    calls: list[tuple[list[Message], PendingCall]] = []
    for verb, which, cut, edited, word in steps:
        if verb == "begin":
            history = histories[which % len(histories)]
            history = history[: max(0, len(history) - cut)]
            if edited and history:
                history = [*history[:-1], {**history[-1], edited: "edited"}]
            messages = [*sent_back(history, word), user(f"words {word}")]
            tools = [{"name": "tool"}] if word == 2 else []
            parent = client.parent_of(messages, tools)
            ask = client.begin(messages, *tools)
            assert ask.parent is parent
            calls.append(([*history, messages[-1]], ask))
            ids = [ask.request_id for _, ask in calls]
            assert len(set(ids)) == len(ids)  # an engine knows open calls by their ids
        elif calls:
            messages, ask = calls.pop(which % len(calls))
            if verb == "answer":
                histories.append([*messages, client.answer(ask, 1 + word, **SAID[cut % 4])])
            else:
                client.session.give_up(ask)
    assert client.session.open_calls == len(calls)
    client.check()
    client.check(answer=f"answer {data.draw(st.integers(0, 3))}")
    if client.sampled:
        client.check(data.draw(st.sets(st.sampled_from(sorted(client.sampled)))))


@given(st.integers(1, 6), st.integers(0, 5), st.sampled_from(["", "edited", "tools", "cut"]))
def test_what_a_later_call_does_to_segments(turns: int, at: int, change: str) -> None:
    """Calls that extend the conversation are one trajectory; one that edits it begins another."""
    client = Client()
    messages: list[Message] = []
    for turn in range(turns):
        messages = client.ask([*messages, user(f"turn {turn}")])
    (only,) = client.check()
    assert only.num_turns == 2 * turns
    assert [m["content"] for m in only.messages] == [m["content"] for m in messages]
    at = 2 * (at % turns)  # a user's message
    if change == "edited":
        client.ask([*messages[:at], user("edited"), *messages[at + 1 :], user("more")])
    elif change == "tools":
        client.ask([*messages, user("more")], {"name": "tool"})
    elif change == "cut":
        client.ask([*messages[:at], user("more")])
    else:
        client.ask([*messages, user("more")])
    trajectories = client.check()
    assert len(trajectories) == (2 if change else 1)
    if change:  # what is still known is the new one's prompt, with the ids that were sampled
        known = 0 if change == "tools" else at // 2
        owed = [token for turn in range(known) for token in client.sampled[str(turn)]]
        assert [token for token in trajectories[1].prompt_ids if token >= 10_000] == owed


def test_policy_versions_and_finish_reasons() -> None:
    client = Client()
    messages = [user("q")]
    messages = [*messages, client.answer(client.begin(messages), version=3), user("more")]
    ask = client.begin(messages)
    client.session.answer(ask, "1", user("x"), Completion([7], [0.0], "abort", [(0, 4)]))
    (trajectory,) = trajectories_of(client.session)
    assert trajectory.policy_versions == [(0, 3), (len(trajectory.response_ids) - 1, 4)]
    assert trajectory.finish_reason == "aborted"


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1.0, "b": "x"}}}
ANSWER: Message = {"role": "assistant", "content": "a\n", "reasoning_content": "hm", "tool_calls": [CALL]}


def call_with(**function: Any) -> list[dict[str, Any]]:
    return [{"id": function.pop("id", "c1"), "function": {**CALL["function"], **function}}]  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("repeated", "known"),
    [
        ([ANSWER], True),
        ([{**ANSWER, "content": "a"}], True),
        ([{**ANSWER, "reasoning_content": None}], True),
        ([{**ANSWER, "reasoning_content": "hm\n"}], True),
        ([{**ANSWER, "reasoning_content": "no"}], False),
        ([{**ANSWER, "tool_calls": call_with(arguments={"b": "x", "a": 1})}], True),
        ([{**ANSWER, "tool_calls": call_with(arguments={"b": "x", "a": 1.5})}], False),
        ([{**ANSWER, "tool_calls": call_with(name="g")}], False),
        ([{**ANSWER, "tool_calls": call_with(id="c2")}], True),
        ([{**ANSWER, "tool_calls": []}], False),
        ([{**ANSWER, "refusal": None, "annotations": []}], True),
        # One answer, as messages of what was thought, said and called.
        ([{**ANSWER, "tool_calls": []}, {**ANSWER, "content": None, "reasoning_content": ""}], True),
        ([{**ANSWER, "tool_calls": []}, {**ANSWER, "content": "more"}], False),
    ],
)
def test_an_answer_as_clients_send_it_back(repeated: list[Message], known: bool) -> None:
    client = Client()
    client.session.answer(client.begin([user("q")]), "0", ANSWER, Completion([7], [0.0], "stop"))
    result = {"role": "tool", "tool_call_id": "c1", "content": "r"}
    asked = client.begin([user("q"), *({**one, "content": one["content"] or ""} for one in repeated), result])
    assert (asked.parent is not None) == known
    assert [one["role"] for one in asked.given][-1:] == ["tool"]
    assert not (known and asked.again)


def test_calls_that_a_client_renames_go_on_under_their_own_ids() -> None:
    client = Client()

    def calls(*ids: str) -> list[dict[str, Any]]:
        return [{"id": name, "function": {"name": "f", "arguments": {}}} for name in ids]

    def result(name: str) -> Message:
        return {"role": "tool", "tool_call_id": name, "content": "r"}

    answer = client.answer(client.begin([user("q")]), tool_calls=calls("functions.f:0", "functions.f:1"))
    told = [user("q"), {**answer, "tool_calls": calls("a", "b")}, result("a"), result("b")]
    ask = client.begin(told)
    assert [one["tool_call_id"] for one in ask.given] == ["functions.f:0", "functions.f:1"]
    told.append(client.answer(ask))
    # Results that changed places are another history.
    assert client.begin([*told, user("more")]).number == 3
    assert client.begin([*told[:2], *reversed(told[2:4]), told[4], user("more")]).number == 2


def test_of_the_same_answers_the_one_whose_ids_come_back_goes_on() -> None:
    client = Client()
    said = [[{**CALL, "id": name}] for name in ("c1", "c2", "c3")]
    for calls in said:
        client.answer(client.begin([user("q")]), content="", tool_calls=calls)
    for calls in (said[1], said[0]):
        told = [user("q"), {"role": "assistant", "content": "", "tool_calls": calls}, user("more")]
        parent = client.begin(told).parent
        assert parent is not None and parent.message["tool_calls"] == calls


@pytest.mark.parametrize(
    ("system", "first", "changed"),
    [("at 10:01", "q", True), ("at 10:00", "q", False), ("at 10:01", "another question", False)],
)
def test_a_conversation_that_goes_on_under_another_system_text_is_found_out(
    system: str, first: str, changed: bool
) -> None:
    client = Client()
    told = client.ask([{"role": "system", "content": "at 10:00"}, user("q")])
    client.begin([{"role": "system", "content": system}, user(first), told[-1], user("more")])
    assert client.session.system_changed == changed


def test_a_history_that_was_rewritten_has_its_answers_again() -> None:
    client = Client()
    messages = client.ask([user("q")])
    ask = client.begin([user("the story so far"), messages[1], user("more")])
    assert (ask.parent, [turn.message for turn in ask.again]) == (None, [messages[1]])
