"""R1 of sessions: whatever is called in whatever order, each sampled token is kept once, behind what it saw."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.gateway.sessions import Ask, Session, Turn
from rollstream.trajectory import Completion, Message, Trajectory

CLOSE, OPEN = 1, 2
"""Ids of the end of an answer's turn and of the beginning of the next one."""


class Plain:
    """Renders a message as the bytes of its content, from 256 on."""

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Any], *, first: bool
    ) -> tuple[Sequence[Message], list[int]]:
        return messages, [len(tools), *self.ids(messages), OPEN]

    def after(self, turn: Turn, messages: Sequence[Message]) -> tuple[Sequence[Message], list[int]]:
        return messages, [CLOSE, *self.ids(messages), OPEN]

    def ids(self, messages: Sequence[Message]) -> list[int]:
        return [256 + byte for message in messages for byte in message["content"].encode()]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


@dataclass
class Client:
    """A program and a model whose sampled ids never come twice, so that each can be told apart."""

    session: Session = field(default_factory=lambda: Session(Plain(), name="s", logprobs=True))
    prompts: dict[str, list[int]] = field(default_factory=dict)
    sampled: dict[str, list[int]] = field(default_factory=dict)

    def begin(self, messages: Sequence[Message], *tools: dict[str, Any]) -> Ask:
        return self.session.begin(list(messages), list(tools))

    def answer(self, ask: Ask, length: int = 2, version: int = 0) -> Message:
        """Answers an open call; returns the answer's message."""
        number = len(self.sampled)
        ids = [10_000 + 10 * number + at for at in range(length)]
        completion = Completion(ids, [-0.5 * i for i in ids], "stop", [(0, version)])
        message: Message = {"role": "assistant", "content": f"answer {number % 3}"}  # some say the same
        self.prompts[str(number)] = list(ask.track(logprobs=True).context)
        self.sampled[str(number)] = ids
        self.session.answer(ask, str(number), message, completion)
        return message

    def ask(self, messages: Sequence[Message], *tools: dict[str, Any]) -> list[Message]:
        """The conversation with its answer."""
        return [*messages, self.answer(self.begin(messages, *tools))]

    def check(self, kept: set[str] | None = None) -> list[Trajectory]:
        """The trajectories, of which each has its answers behind their prompts, and all have each once."""
        found = self.session.trajectories(kept)
        owed, last = dict(self.sampled), []
        for trajectory in found:
            for seen, ids in trajectory.generations():
                name = str((ids[0] - 10_000) // 10)
                assert (seen, ids) == (self.prompts[name], owed.pop(name))
            columns = zip(trajectory.response_ids, trajectory.response_mask, strict=True)
            logprobs = [-0.5 * token if mask else 0.0 for token, mask in columns]
            assert trajectory.response_logprobs == logprobs
            assert trajectory.response_mask[-1] == 1
            last.append(int(name))
        assert last == sorted(last)
        assert not (owed if kept is None else kept & owed.keys())
        return found


steps = st.lists(
    st.tuples(
        st.sampled_from(["begin", "begin", "begin", "answer", "answer", "give up"]),
        st.integers(0, 30),
        st.integers(0, 4),
        st.booleans(),
        st.integers(0, 2),
    ),
    max_size=25,
)


@given(steps, st.data())
@settings(max_examples=200)
def test_any_calls_are_exact(steps: list[tuple[str, int, int, bool, int]], data: st.DataObject) -> None:
    """A call takes an earlier conversation, cuts it off or edits it, and adds something; many are open at once."""
    client = Client()
    histories: list[list[Message]] = [[]]
    calls: list[tuple[list[Message], Ask]] = []
    for verb, which, cut, edited, word in steps:
        if verb == "begin":
            history = histories[which % len(histories)]
            history = history[: max(0, len(history) - cut)]
            if edited and history:
                history = [*history[:-1], {**history[-1], "content": "edited"}]
            messages = [*history, user(f"words {word}")]
            calls.append((messages, client.begin(messages, *([{"name": "tool"}] if word == 2 else []))))
            ids = [ask.request_id for _, ask in calls]
            assert len(set(ids)) == len(ids)  # an engine knows open calls by their ids
        elif calls:
            messages, ask = calls.pop(which % len(calls))
            if verb == "answer":
                histories.append([*messages, client.answer(ask, 1 + word)])
            else:
                client.session.give_up(ask)
    client.check()
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


def test_calls_open_at_once() -> None:
    client = Client()
    first = client.ask([user("q")])
    more = [*first, user("more")]
    one, two = client.begin(more), client.begin(more)
    assert one.request_id == "s" != two.request_id
    second = [*more, client.answer(two)]
    client.answer(one)
    assert [t.num_turns for t in client.check()] == [4, 4]
    # The answer that was asked for first continues the segment, in whatever order they end.
    assert [len(t.response_mask) for t in client.session.trajectories()] == [2, 10]
    client.ask([*second, user("and more")])
    assert len(client.check()) == 2


def test_a_call_that_is_given_up_leaves_nothing_behind() -> None:
    client = Client()
    first = client.ask([user("q")])
    client.session.give_up(client.begin([*first, user("more")]))
    client.session.give_up(client.begin([user("other")]))
    client.ask([*first, user("more")])
    assert len(client.check()) == 1


def test_answers_that_do_not_count_end_no_trajectory() -> None:
    client = Client()
    messages: list[Message] = []
    for turn in range(3):
        messages = client.ask([*messages, user(f"turn {turn}")])
    client.ask([user("a helper's question")])
    (trajectory,) = client.check({"0", "1"})
    assert sum(trajectory.response_mask) == 4
    assert client.check(set()) == []


def test_policy_versions_and_finish_reasons() -> None:
    client = Client()
    messages = [user("q")]
    messages = [*messages, client.answer(client.begin(messages), version=3), user("more")]
    ask = client.begin(messages)
    client.session.answer(ask, "1", user("x"), Completion([7], [0.0], "abort", [(0, 4)]))
    (trajectory,) = client.session.trajectories()
    assert trajectory.policy_versions == [(0, 3), (len(trajectory.response_ids) - 1, 4)]
    assert trajectory.finish_reason == "aborted"


def test_thinking_that_a_client_leaves_out_is_no_other_message() -> None:
    client = Client()
    ask = client.begin([user("q")])
    said: Message = {"role": "assistant", "content": "a", "reasoning_content": "hm"}
    client.session.answer(ask, "0", said, Completion([7], [0.0], "stop", [(0, 0)]))
    without = {key: value for key, value in said.items() if key != "reasoning_content"}
    for repeated, parent in ((said, True), (without, True), ({**said, "reasoning_content": "no"}, False)):
        asked = client.begin([user("q"), repeated, user("more")])
        assert (asked.parent is not None) == parent
        client.session.give_up(asked)
