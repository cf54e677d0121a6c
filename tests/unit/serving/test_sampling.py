from dataclasses import replace

import pytest

from rollstream.chat.wires.requests import RequestError, Sampling
from rollstream.engine.base import Capabilities
from rollstream.serving.service import build_sampling, samples
from rollstream.testing.scripted import ScriptedEngine
from rollstream.trajectory import SamplingParams

ABLE = ScriptedEngine().capabilities


def build(asked: Sampling, capabilities: Capabilities = ABLE, *, logprobs: bool = False) -> SamplingParams:
    return build_sampling(asked, capabilities, max_tokens=16, logprobs=logprobs)


def test_what_is_asked_for_is_what_is_sampled() -> None:
    asked = Sampling(
        max_tokens=5,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        seed=3,
        stop="x",
        stop_token_ids=[4],
        ignore_eos=True,
    )
    assert build(asked, logprobs=True) == SamplingParams(5, 0.5, 0.9, 7, True, 3, ("x",), (4,), True)
    assert build(Sampling()) == SamplingParams(16, logprobs=False)


def test_seeds_fit_the_engine_and_samples_have_their_own() -> None:
    for given in (2**63 - 1, -1):
        sampling = build(Sampling(seed=given))
        asked = list(samples("a", [5], sampling, 3))
        assert [one.sampling.seed for one in asked] == [2**31 - 1, 0, 1]
    assert [one.request_id for one in asked] == ["a_0", "a_1", "a_2"]
    (alone,) = samples("a", [5], build(Sampling()), 1)
    assert (alone.request_id, alone.sampling.seed) == ("a", None)


def test_a_top_k_of_all_is_none() -> None:
    assert build(Sampling(top_k=2**62)).top_k == -1
    assert build(Sampling(top_k=511)).top_k == 511


@pytest.mark.parametrize(
    ("asked", "capabilities", "words"),
    [
        (Sampling(stop=["a", ""]), ABLE, "empty"),
        (Sampling(stop=["a"] * 65), ABLE, "more than 64 stops"),
        (Sampling(stop_token_ids=[512]), ABLE, "outside the vocabulary"),
        (Sampling(stop_token_ids=[-1]), ABLE, "outside the vocabulary"),
        (Sampling(stop_token_ids=[1]), replace(ABLE, stop_token_ids=False), "token ids"),
        (Sampling(seed=1), replace(ABLE, seeds=False), "seeds"),
        (Sampling(), replace(ABLE, logprobs="none"), "log-probs"),
        (Sampling(n=0), ABLE, "n must be from 1"),
    ],
)
def test_what_the_engine_cannot_give_is_refused(
    asked: Sampling, capabilities: Capabilities, words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        build(asked, capabilities, logprobs=True)
