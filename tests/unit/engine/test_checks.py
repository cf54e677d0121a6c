from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.engine.base import Capabilities
from rollstream.engine.checks import (
    ModelLimits,
    check_capabilities,
    check_request,
    ids_fit,
    read_engine_kwargs,
    read_model_limits,
)
from rollstream.errors import ConfigError, EngineError
from rollstream.trajectory import SamplingParams
from tests.support.replicas import CAPABILITIES

ALL = replace(CAPABILITIES, max_model_len=100, vocab_size=50)
NO_TEXTS = replace(ALL, stop_strings=False)
NO_STOP_IDS = replace(ALL, stop_token_ids_with_ignore_eos=False)


@given(st.lists(st.integers(-(2**70), 2**70) | st.integers(-2, 60)), st.none() | st.integers(1, 60))
def test_ids_fit_is_min_and_max(ids: list[int], vocab_size: int | None) -> None:
    limit = 2**31 if vocab_size is None else vocab_size
    assert ids_fit(ids, vocab_size) == all(0 <= i < limit for i in ids)


@pytest.mark.parametrize(
    ("prompt", "sampling", "capabilities", "key"),
    [
        ([], SamplingParams(1), ALL, "empty"),
        ([50], SamplingParams(1), ALL, "vocabulary of 50"),
        ([-1], SamplingParams(1), ALL, "vocabulary"),
        ([1], SamplingParams(0), ALL, "max_tokens"),
        ([1], SamplingParams(1, temperature=-0.1), ALL, "temperature"),
        ([1], SamplingParams(1, temperature=float("nan")), ALL, "temperature"),
        ([1], SamplingParams(1, top_p=1.1), ALL, "top_p"),
        ([1], SamplingParams(1, top_k=-2), ALL, "top_k"),
        ([1] * 50, SamplingParams(51), ALL, "max_model_len 100"),
        ([1], SamplingParams(1, stop=("a",)), NO_TEXTS, "stop"),
        ([1], SamplingParams(1, extra={"min_p": 0.1}), ALL, "extra_sampling.min_p"),
        ([1], SamplingParams(1, stop_token_ids=(3,), ignore_eos=True), NO_STOP_IDS, "ignore_eos"),
    ],
)
def test_requests_that_cannot_be_served(
    prompt: list[int], sampling: SamplingParams, capabilities: Capabilities, key: str
) -> None:
    with pytest.raises(EngineError, match=key):
        check_request(prompt, sampling, capabilities, images=None)


def test_requests_up_to_the_limits() -> None:
    check_request([1] * 50, SamplingParams(50, stop=("a",)), ALL, images=None)
    check_request([1], SamplingParams(1, stop_token_ids=(3,), ignore_eos=True), ALL, images=None)
    with pytest.raises(EngineError, match="images"):
        check_request([1], SamplingParams(1), ALL, images=[object()])


def check(
    capabilities: Capabilities, sampling: SamplingParams, *, limit: int | None = None, mode: str | None = None
) -> None:
    check_capabilities(
        capabilities,
        sampling,
        prompt_length=60,
        response_length=sampling.max_tokens,
        max_model_len=limit,
        logprobs_mode=mode,
    )


STRONG = replace(ALL, vocab_size=512)
WEAK = replace(STRONG, logprobs="none", seeds=False, stop_strings=False, stop_token_ids=False)


def test_what_an_engine_cannot_give_is_an_error_at_start() -> None:
    asked = SamplingParams(40, logprobs=True, seed=1, stop=("a",), stop_token_ids=(3,))
    check(STRONG, asked)
    check(WEAK, SamplingParams(40, logprobs=False))
    with pytest.raises(ConfigError) as caught:
        check(WEAK, asked)
    for key in ("calculate_log_probs", "generation.seed", "rollout.stop:", "rollout.stop_token_ids"):
        assert key in str(caught.value)
    penalised = replace(asked, extra={"min_p": 0.1, "repetition_penalty": 1.1})
    check(replace(STRONG, extra_sampling=("min_p", "repetition_penalty")), penalised)
    for sampling, key in [
        (penalised, "extra_sampling.min_p"),
        (SamplingParams(41), "100 tokens"),
        (SamplingParams(40, stop_token_ids=(3, 512)), "stop_token_ids: 512"),
        (SamplingParams(40, stop_token_ids=(-1,)), "stop_token_ids: -1"),
    ]:
        with pytest.raises(ConfigError, match=key):
            check(STRONG, sampling)
    with pytest.raises(ConfigError, match=r"90 tokens .* by actor_rollout_ref\.rollout\.max_model_len"):
        check(STRONG, SamplingParams(40), limit=90)
    check(replace(STRONG, max_model_len=None), SamplingParams(4000))


@pytest.mark.parametrize("kind", ["raw", "processed"])
def test_log_probs_of_the_other_kind_are_refused_where_they_differ(kind: Any) -> None:
    engine = replace(STRONG, logprobs=kind, extra_sampling=("min_p",))
    other = "raw_logprobs" if kind == "processed" else "processed_logprobs"
    changes: tuple[dict[str, Any], ...] = ({"temperature": 0.7}, {"top_p": 0.9}, {"extra": {"min_p": 0.1}})
    for changed in changes:
        check(engine, SamplingParams(1, **changed), mode=f"{kind}_logprobs")
        check(engine, SamplingParams(1, **changed))
        check(engine, SamplingParams(1, logprobs=False, **changed), mode=other)
        with pytest.raises(ConfigError, match="logprobs_mode"):
            check(engine, SamplingParams(1, **changed), mode=other)
    check(engine, SamplingParams(1, stop=("a",)), mode=other)  # both are the same


def test_engine_kwargs() -> None:
    defaults = {"size": 1, "timeout": 2.0, "fast": False, "name": ""}
    values = read_engine_kwargs("x", {"timeout": 3, "fast": True, "vllm": {}, "trtllm": None}, defaults)
    assert values == {"size": 1, "timeout": 3.0, "fast": True, "name": ""}
    for key in ("timeuot", "sglang"):  # the latter is verl's place for arguments of a server
        with pytest.raises(ConfigError, match=key):
            read_engine_kwargs("x", {key: 3}, defaults)
    for wrong in ({"size": True}, {"size": 1.5}, {"size": None}, {"fast": 1}, {"timeout": True}):
        with pytest.raises(ConfigError, match="must be"):
            read_engine_kwargs("x", wrong, defaults)


def test_model_limits(tmp_path: Path) -> None:
    assert read_model_limits(tmp_path) == ModelLimits(None, None, ())
    config, generation = tmp_path / "config.json", tmp_path / "generation_config.json"
    config.write_text('{"text_config": {"vocab_size": 7, "max_position_embeddings": 9}, "eos_token_id": 1}')
    assert read_model_limits(tmp_path) == ModelLimits(9, 7, (1,), tied_embeddings=True)
    generation.write_text('{"eos_token_id": [2, 3]}')
    assert read_model_limits(tmp_path).eos_token_ids == (2, 3)
    for broken in ("{", "[]"):
        config.write_text(broken)
        with pytest.raises(ConfigError, match=r"config\.json"):
            read_model_limits(tmp_path)
