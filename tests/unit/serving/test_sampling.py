from dataclasses import replace

import pytest

from rollstream.engine.base import Capabilities
from rollstream.serving.refusals import RequestError
from rollstream.serving.sampling import MAX_STOPS, Sampling, build_sampling, seed_of
from rollstream.testing.scripted import ScriptedEngine
from rollstream.trajectory import SamplingParams

ABLE = ScriptedEngine().capabilities


def test_what_is_asked_for_is_what_is_sampled() -> None:
    asked = Sampling(
        max_tokens=5,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        logprobs=True,
        seed=3,
        stop="x",
        stop_token_ids=[4],
        ignore_eos=True,
    )
    assert build_sampling(asked, ABLE) == SamplingParams(5, 0.5, 0.9, 7, True, 3, ("x",), (4,), True)


def test_seeds_fit_the_engine_and_samples_have_their_own() -> None:
    assert build_sampling(Sampling(max_tokens=1, seed=2**63 - 1), ABLE).seed == 2**31 - 1
    assert build_sampling(Sampling(max_tokens=1, seed=-1), ABLE).seed == 2**31 - 1
    assert [seed_of(2**31 - 1, sample) for sample in range(3)] == [2**31 - 1, 0, 1]
    assert seed_of(None, 5) is None


def test_a_top_k_of_all_is_none() -> None:
    assert build_sampling(Sampling(max_tokens=1, top_k=2**62), ABLE).top_k == -1
    assert build_sampling(Sampling(max_tokens=1, top_k=511), ABLE).top_k == 511


@pytest.mark.parametrize(
    ("asked", "capabilities", "words"),
    [
        (Sampling(max_tokens=1, stop=["a", ""]), ABLE, "empty"),
        (Sampling(max_tokens=1, stop=["a"] * (MAX_STOPS + 1)), ABLE, "stops"),
        (Sampling(max_tokens=1, stop_token_ids=[512]), ABLE, "outside the vocabulary"),
        (Sampling(max_tokens=1, stop_token_ids=[-1]), ABLE, "outside the vocabulary"),
        (Sampling(max_tokens=1, stop_token_ids=[1]), replace(ABLE, stop_token_ids=False), "token ids"),
        (Sampling(max_tokens=1, seed=1), replace(ABLE, seeds=False), "seeds"),
        (Sampling(max_tokens=1, logprobs=True), replace(ABLE, logprobs="none"), "log-probs"),
    ],
)
def test_what_the_engine_cannot_give_is_refused(
    asked: Sampling, capabilities: Capabilities, words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        build_sampling(asked, capabilities)
