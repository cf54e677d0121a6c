from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.engine.checks import (
    ModelLimits,
    check_request,
    ids_fit,
    read_engine_kwargs,
    read_model_limits,
    unknown_name,
)
from rollstream.errors import ConfigError, EngineError
from rollstream.trajectory import SamplingParams
from tests.support.replicas import CAPABILITIES

ALL = replace(CAPABILITIES, max_model_len=100, vocab_size=50)


@given(st.lists(st.integers(-(2**70), 2**70) | st.integers(-2, 60)), st.none() | st.integers(1, 60))
def test_ids_fit_is_min_and_max(ids: list[int], vocab_size: int | None) -> None:
    limit = 2**31 if vocab_size is None else vocab_size
    assert ids_fit(ids, vocab_size) == all(0 <= i < limit for i in ids)


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], SamplingParams(1), "empty"),
        ([50], SamplingParams(1), "vocabulary of 50"),
        ([-1], SamplingParams(1), "vocabulary"),
        ([1], SamplingParams(0), "max_tokens"),
        ([1], SamplingParams(1, temperature=-0.1), "temperature"),
        ([1], SamplingParams(1, temperature=float("nan")), "temperature"),
        ([1], SamplingParams(1, top_p=1.1), "top_p"),
        ([1], SamplingParams(1, top_k=-2), "top_k"),
        ([1] * 50, SamplingParams(51), "max_model_len 100"),
    ],
)
def test_requests_that_cannot_be_served(prompt: list[int], sampling: SamplingParams, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        check_request(prompt, sampling, ALL, images=None)


def test_requests_beyond_the_capabilities() -> None:
    check_request([1] * 50, SamplingParams(50, stop=("a",)), ALL, images=None)
    with pytest.raises(EngineError, match="images"):
        check_request([1], SamplingParams(1), ALL, images=[object()])
    with pytest.raises(EngineError, match="texts"):
        check_request([1], SamplingParams(1, stop=("a",)), replace(ALL, stop_strings=False), images=None)
    with pytest.raises(EngineError, match="takes no sampling parameter 'min_p'"):
        check_request([1], SamplingParams(1, extra={"min_p": 0.1}), ALL, images=None)
    both = SamplingParams(1, stop_token_ids=(3,), ignore_eos=True)
    check_request([1], both, ALL, images=None)
    with pytest.raises(EngineError, match="ignore_eos"):
        check_request([1], both, replace(ALL, stop_token_ids_with_ignore_eos=False), images=None)


def test_engine_kwargs() -> None:
    defaults = {"size": 1, "timeout": 2.0, "fast": False, "name": ""}
    values = read_engine_kwargs("x", {"timeout": 3, "fast": True}, defaults)
    assert values == {"size": 1, "timeout": 3.0, "fast": True, "name": ""}
    with pytest.raises(ConfigError, match=r"'timeuot'; did you mean 'timeout'\?"):
        read_engine_kwargs("x", {"timeuot": 3}, defaults)
    for wrong in ({"size": True}, {"size": 1.5}, {"size": None}, {"fast": 1}, {"timeout": True}):
        with pytest.raises(ConfigError, match="must be"):
            read_engine_kwargs("x", wrong, defaults)
    assert "did you mean" not in str(unknown_name("engine", "qqqq", ["openvino"]))


def test_model_limits(tmp_path: Path) -> None:
    assert read_model_limits(tmp_path) == ModelLimits(None, None, ())
    (tmp_path / "config.json").write_text(
        '{"text_config": {"vocab_size": 7, "max_position_embeddings": 9}, "eos_token_id": 1}'
    )
    assert read_model_limits(tmp_path) == ModelLimits(9, 7, (1,))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    assert read_model_limits(tmp_path).eos_token_ids == (2, 3)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_model_limits(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="JSON object"):
        read_model_limits(tmp_path)


def test_verls_place_for_arguments_of_a_server_is_told_from_a_typing_error() -> None:
    with pytest.raises(ConfigError, match=r"engine_kwargs\.sglang.*launch\.args"):
        read_engine_kwargs("sglang", {"sglang": {"attention_backend": "fa3"}}, {"timeout": 1.0})
