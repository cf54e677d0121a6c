"""Which messages are the prompt: exactly, or not at all."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.store.export.dataproto import prompt_messages
from tests.unit.store.export.artifacts import conversation


@given(st.integers(1, 6), st.integers(0, 4))
def test_the_prompt_ends_before_the_first_sampled_answer(answers: int, few_shot: int) -> None:
    found = prompt_messages(
        conversation(answers, few_shot=few_shot), stated=None, engine_calls=answers, sampled_stretches=answers
    )
    assert found == conversation(0, few_shot=few_shot)


@given(
    st.lists(st.sampled_from(["system", "user", "assistant", "tool"]), max_size=8),
    st.one_of(st.none(), st.booleans(), st.integers(-2, 9), st.text(max_size=2)),
    st.integers(0, 9),
    st.integers(0, 9),
    st.booleans(),
)
def test_it_is_a_beginning_of_the_conversation_or_unknown(
    roles: list[str], stated: Any, calls: int, stretches: int, aborted: bool
) -> None:
    messages = [{"role": role, "at": at} for at, role in enumerate(roles)]
    found = prompt_messages(
        messages, stated=stated, engine_calls=calls, sampled_stretches=stretches, aborted=aborted
    )
    if found is not None:
        assert found == messages[: len(found)]
    if isinstance(stated, int) and not isinstance(stated, bool) and 0 <= stated <= len(messages):
        assert found == messages[:stated]
    elif found is not None:
        assert sum(message["role"] == "assistant" for message in messages[len(found) :]) == calls > 0


@pytest.mark.parametrize(
    ("calls", "stretches", "aborted", "known"),
    [
        (2, 2, False, True),
        (2, 1, True, True),  # cut off before the first token of the second answer
        (2, 1, False, False),  # the loop threw one answer away, say
        (3, 1, True, False),
        (1, 2, False, False),
        (0, 0, False, False),  # a loop that does not use `generate`
        (4, 4, False, False),  # more calls than answers
    ],
)
def test_what_does_not_fit_is_unknown(calls: int, stretches: int, aborted: bool, known: bool) -> None:
    found = prompt_messages(
        conversation(2, few_shot=1),
        stated=None,
        engine_calls=calls,
        sampled_stretches=stretches,
        aborted=aborted,
    )
    assert (found is not None) == known
