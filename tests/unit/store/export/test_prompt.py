"""Which messages are the prompt: exactly, or not at all."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.store.export.dataproto import shown_prompt
from tests.unit.store.export.artifacts import conversation


def row_of(
    messages: list[dict[str, Any]], calls: int, stretches: int, *, stated: Any = None, aborted: bool = False
) -> dict[str, Any]:
    return {
        "messages": messages,
        "extra": {"prompt_messages": stated},
        "metrics": {"engine_calls": float(calls)},
        "response_mask": [1, 0] * stretches,
        "finish_reason": "aborted" if aborted else "stop",
    }


@given(st.integers(1, 6), st.integers(0, 4))
def test_the_prompt_ends_before_the_first_sampled_answer(answers: int, few_shot: int) -> None:
    row = row_of(conversation(answers, few_shot=few_shot), answers, answers)
    assert shown_prompt(row) == conversation(0, few_shot=few_shot)
    assert shown_prompt(row | {"response_mask": [], "prompt_ids": []}) == shown_prompt(row)  # no tokenizer


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
    prompt = shown_prompt(row_of(messages, calls, stretches, stated=stated, aborted=aborted))
    if prompt is not None:
        assert prompt == messages[: len(prompt)]
    if isinstance(stated, int) and not isinstance(stated, bool) and 0 <= stated <= len(messages):
        assert prompt == messages[:stated]
    elif prompt is not None:
        assert sum(message["role"] == "assistant" for message in messages[len(prompt) :]) == calls > 0


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
    row = row_of(conversation(2, few_shot=1), calls, stretches, aborted=aborted)
    assert (shown_prompt(row) is not None) == known
