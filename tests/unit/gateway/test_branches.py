"""Which conversation is a program's answer, and which had no part in it."""

from collections.abc import Callable
from typing import Any

import pytest

from rollstream.gateway.branches import find_branches
from rollstream.trajectory import Message
from tests.unit.gateway.test_sessions import Client, user

TOOL = {"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}
TASK = user("How many bricks does a wall of 9 by 14 have?")
NAMING = [
    {"role": "system", "content": "You name conversations."},
    user(f"Name this one: {TASK['content']}"),
]


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def said(client: Client, messages: list[Message], text: str, *tools: Any, **more: Any) -> list[Message]:
    """The conversation with its answer."""
    return [*messages, client.answer(client.begin(messages, *tools, **more), content=text)]


def sorted_out(client: Client, **options: Any) -> tuple[str, list[str], bool]:
    """The last text of the final trajectory, of all side calls, and whether it is a guess."""
    found = find_branches(client.session, prompt=[TASK], **options)
    last = {branch: str(branch.last.message["content"]) for branch in found.branches}
    sides = [text for branch, text in last.items() if branch.is_side_call]
    return last[found.branches[-1]], sides, found.is_guess


def name_it(client: Client) -> None:
    said(client, NAMING, "Bricks of a garden wall")


@pytest.mark.parametrize("when", ["before", "beside", "after"])
@pytest.mark.parametrize("answer", ["126", " 126\n", None])
def test_a_title_is_a_side_call_whenever_it_is_asked(when: str, answer: str | None) -> None:
    client = Client()
    if when == "before":
        name_it(client)
    work = said(client, [system("You work."), TASK], "I multiply.", TOOL)
    last = client.begin([*work, user("go on")], TOOL)
    if when == "beside":
        name_it(client)
    client.answer(last, content="126")
    if when == "after":
        name_it(client)
    assert sorted_out(client, answer=answer) == ("126", ["Bricks of a garden wall"], False)


@pytest.mark.parametrize(
    ("ends", "answer", "final"),
    [
        (["It is 126.", "126"], "126", "126"),
        (["The wall has **126** bricks.", "Wall of 9 by 14"], "126", "The wall has **126** bricks."),
        (["1 brick", "Wall of 11 bricks"], "1", "1 brick"),
        (["so be it", "anything"], "something else", "so be it"),
    ],
)
def test_the_final_one_says_the_answer_or_has_it_among_its_words(
    ends: list[str], answer: str, final: str
) -> None:
    client = Client()
    said(client, [TASK], ends[0])
    said(client, NAMING, ends[1])
    assert sorted_out(client, answer=answer)[0] == final


def test_a_title_that_is_the_answer_is_a_side_call() -> None:
    client = Client()
    said(client, [TASK], "126")
    said(client, [system("You name conversations."), TASK], "126")
    assert sorted_out(client, answer="126") == ("126", ["126"], False)
    assert client.check(answer="126", prompt=[TASK])[-1].messages[0] == TASK


def test_one_that_chose_among_answers_is_none() -> None:
    client = Client()
    for vote in ("126", "125"):
        said(client, [TASK], vote)
    said(client, [system("Choose."), TASK, user("126 or 125?")], "126")
    assert sorted_out(client, answer="126") == ("126", [], False)
    assert client.check(answer="126", prompt=[TASK])[-1].messages[0] == system("Choose.")


def test_an_answer_may_be_the_argument_of_a_call() -> None:
    client = Client()
    call = {"id": "c1", "function": {"name": "submit", "arguments": {"answer": "126 bricks"}}}
    client.answer(client.begin([system("You work."), TASK]), content="", tool_calls=[call])
    said(client, [TASK], "Bricks")
    assert sorted_out(client, answer="126 bricks")[0] == ""


def test_what_a_conversation_goes_on_with_after_its_answer_is_a_side_call() -> None:
    client = Client()
    work = said(client, [TASK], "126")
    said(client, [*work, user("Name this conversation.")], "Bricks of a garden wall")
    assert sorted_out(client, answer="126") == ("126", ["Bricks of a garden wall"], False)
    assert [one.response_mask.count(1) for one in client.check(answer="126")] == [2, 2]


def test_a_conversation_whose_end_has_the_answer_is_not_cut() -> None:
    client = Client()
    said(client, [*said(client, [TASK], "126"), user("Are you sure?")], "Yes: 126.")
    assert sorted_out(client, answer="126") == ("Yes: 126.", [], False)


@pytest.mark.parametrize(
    "told",
    [
        lambda hint: user(f"It said: {hint}!"),
        lambda hint: {"role": "tool", "tool_call_id": "c1", "content": hint},
        lambda hint: user(hint.partition("\n")[2]),
        lambda hint: {"role": "assistant", "content": hint},
    ],
)
def test_a_sub_agent_is_none(told: Callable[[str], Message]) -> None:
    client = Client()
    work = said(client, [TASK], "I ask for help.")
    hint = said(client, [user("How does one count bricks?")], "Steps:\nmultiply the two sides")[-1]["content"]
    said(client, [user("How does one count bricks?"), user("again")], "Take the sum.")
    said(client, [*work, told(hint), user("go on")], "126")
    assert sorted_out(client, answer="126") == ("126", ["Take the sum."], False)


def test_what_a_conversation_was_shown_itself_is_no_quotation() -> None:
    client = Client()
    said(client, NAMING, "a wall of 9 by 14")
    said(client, [system("You work."), TASK], "126")
    assert sorted_out(client)[1] == ["a wall of 9 by 14"]


def test_votes_and_retries_are_none() -> None:
    client = Client()
    for ask in [client.begin([TASK]) for _ in range(3)]:
        client.answer(ask)
    work = said(client, [TASK], "I multiply.")
    said(client, [*work, user("go on")], "125")
    said(client, [*work, user("go on")], "126")
    assert sorted_out(client, answer="126") == ("126", [], False)


@pytest.mark.parametrize("frame", [[system("You work.")], []])
def test_a_compacted_history_is_carried_on(frame: list[Message]) -> None:
    client = Client()
    work = said(client, [*frame, TASK], "I multiply.", TOOL)
    said(client, [*work, user("Sum up.")], "The sides are 9 and 14.", TOOL)
    said(client, [*frame, user("So far: The sides are 9 and 14. Go on.")], "They are 126.", TOOL)
    name_it(client)
    assert sorted_out(client) == ("They are 126.", ["Bricks of a garden wall"], False)


def test_a_call_that_says_so_is_a_side_call() -> None:
    client = Client()
    work = said(client, [TASK], "I multiply.")
    asked = client.session.begin([*work, user("Name it.")], [], is_side_call=True)
    client.answer(asked, content="multiply the two sides")
    work = said(client, [*work, user("Go on: multiply the two sides")], "126")
    client.answer(client.session.begin([*work, user("Name it.")], [], is_side_call=True), content="126")
    assert sorted_out(client, answer="126") == ("126", ["multiply the two sides", "126"], False)
    assert sorted_out(client, answer="126", find_side_calls=False)[1] == ["multiply the two sides", "126"]
    assert client.check(answer="126")[-1].num_turns == 4  # they cut nothing


def test_it_is_a_guess_where_nothing_tells() -> None:
    client = Client()
    said(client, [user("a prompt of its own")], "one")
    said(client, [user("another prompt")], "two")
    assert sorted_out(client) == ("two", [], True)
    assert sorted_out(client, answer="one") == ("one", ["two"], False)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("tools", [[], [TOOL]])
def test_of_conversations_that_begin_alike_those_with_tools_come_first(after: bool, tools: list[Any]) -> None:
    client = Client()
    asked = [system("You work."), user(f"Task: {TASK['content']}")]
    for is_title in (False, True) if after else (True, False):
        if is_title:
            name_it(client)
        else:
            said(client, asked, "126", *tools)
    title = "Bricks of a garden wall"
    decided = bool(tools) and not after
    final = title if after and not tools else "126"
    assert sorted_out(client) == (final, [title] if decided else [], not decided)


def test_a_session_without_answers_has_none() -> None:
    client = Client()
    client.begin([TASK])
    assert not find_branches(client.session, answer="126", prompt=[TASK]).branches


def test_of_thousands_of_conversations_not_all_is_searched() -> None:
    client = Client()
    for at in range(600):
        said(client, [TASK], f"a vote, {at}")
        said(client, [user(f"{at} " * 20)], f"a text of its own, {at}")
    said(client, [TASK], "126")
    assert sorted_out(client, answer="126") == ("126", [], False)  # what was not searched counts as used
