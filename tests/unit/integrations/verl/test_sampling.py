"""verl's sampling parameters and rollstream's."""

from typing import Any

import pytest

from rollstream.errors import EngineError
from rollstream.integrations.verl.sampling import Lengths, from_verl, to_verl
from rollstream.trajectory import SamplingParams

VERLS = {"temperature": 1.0, "top_p": 1, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


def read(prompt_tokens: int = 1, **given: Any) -> SamplingParams:
    return from_verl({**VERLS, **given}, prompt_tokens=prompt_tokens, lengths=Lengths(32, 16, None))


@pytest.mark.parametrize(
    ("given", "prompt", "most"),
    [
        ({}, 10, 16),  # the response
        ({}, 40, 8),  # what is left of both
        ({"max_tokens": 5}, 10, 5),
        ({"max_new_tokens": 5}, 10, 5),
        ({"max_tokens": 500}, 10, 38),  # the model's room
    ],
)
def test_the_most_tokens_are_those_of_verls_own_servers(given: Any, prompt: int, most: int) -> None:
    assert read(prompt, **given).max_tokens == most


def test_a_prompt_without_room_is_refused() -> None:
    with pytest.raises(EngineError, match="leaves no room within 48"):
        read(60)


def test_parameters() -> None:
    sampling = read(stop=".", stop_token_ids=[2], seed=4, repetition_penalty=1.2, min_p=0.0)
    assert (sampling.stop, sampling.stop_token_ids, sampling.seed) == ((".",), (2,), 4)
    assert sampling.logprobs and not read(logprobs=False).logprobs
    assert sampling.extra == {"repetition_penalty": 1.2}
    with pytest.raises(EngineError, match="guided_json"):
        read(guided_json="{}")


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(7),
        SamplingParams(7, 0.0, 0.5, 3, logprobs=False, stop=("a",), stop_token_ids=(1,), ignore_eos=True),
        SamplingParams(7, extra={"min_p": 0.1, "repetition_penalty": 1.1}),
    ],
)
def test_there_and_back(sampling: SamplingParams) -> None:
    given = to_verl(sampling, max_tokens=True)
    assert from_verl(given, prompt_tokens=1, lengths=Lengths(8, 8, None)) == sampling
    assert "max_tokens" not in to_verl(sampling, max_tokens=False)
