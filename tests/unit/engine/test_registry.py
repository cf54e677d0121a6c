import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollstream.demo import MODEL_PATH
from rollstream.engine.base import Capabilities
from rollstream.engine.registry import (
    check_capabilities,
    check_engine_config,
    data_deciding_kwargs,
)
from rollstream.errors import ConfigError
from rollstream.trajectory import SamplingParams
from tests.support.replicas import CAPABILITIES

STRONG = replace(CAPABILITIES, max_model_len=100)
WEAK = replace(STRONG, logprobs="none", seeds=False, stop_strings=False, stop_token_ids=False)


def check(capabilities: Capabilities, sampling: SamplingParams, *, limit: int | None = None) -> None:
    check_capabilities(
        capabilities, sampling, prompt_length=60, response_length=sampling.max_tokens, max_model_len=limit
    )


def test_what_an_engine_cannot_give_is_an_error_at_start() -> None:
    asked = SamplingParams(40, logprobs=True, seed=1, stop=("a",), stop_token_ids=(3,))
    check(STRONG, asked)
    check(WEAK, SamplingParams(40, logprobs=False))
    with pytest.raises(ConfigError) as caught:
        check(WEAK, asked)
    for key in ("calculate_log_probs", "generation.seed", "rollout.stop ", "rollout.stop_token_ids"):
        assert key in str(caught.value)
    with pytest.raises(ConfigError, match="ignore_eos"):
        check(replace(STRONG, stop_token_ids_with_ignore_eos=False), replace(asked, ignore_eos=True))
    penalised = replace(asked, extra={"min_p": 0.1, "repetition_penalty": 1.1})
    check(replace(STRONG, extra_sampling=("min_p", "repetition_penalty")), penalised)
    with pytest.raises(ConfigError, match=r"no .*extra_sampling\.repetition_penalty \(it takes: min_p\)"):
        check(replace(STRONG, extra_sampling=("min_p",)), penalised)


@pytest.mark.parametrize("kind", ["raw", "processed"])
def test_log_probs_of_the_other_kind_are_refused_where_they_differ(kind: Any) -> None:
    engine = replace(STRONG, logprobs=kind, extra_sampling=("min_p",))

    def start(wanted: Any, sampling: SamplingParams) -> None:
        lengths = {"prompt_length": 1, "response_length": 1, "max_model_len": None}
        check_capabilities(engine, sampling, logprobs_mode=wanted, **lengths)

    other = "raw_logprobs" if kind == "processed" else "processed_logprobs"
    changes: list[dict[str, Any]] = [
        {"temperature": 0.7},
        {"top_p": 0.9},
        {"top_k": 20},
        {"extra": {"min_p": 0.1}},
    ]
    for changed in changes:
        start(f"{kind}_logprobs", SamplingParams(1, **changed))
        start(None, SamplingParams(1, **changed))
        start(other, SamplingParams(1, logprobs=False, **changed))
        with pytest.raises(ConfigError, match="logprobs_mode"):
            start(other, SamplingParams(1, **changed))
    start(other, SamplingParams(1, stop=("a",)))  # both are the same


def test_lengths_that_cannot_fit() -> None:
    with pytest.raises(ConfigError, match="more than the 100 tokens"):
        check(STRONG, SamplingParams(41))
    with pytest.raises(ConfigError, match="more than the 90 tokens"):
        check(STRONG, SamplingParams(40), limit=90)
    check(replace(STRONG, max_model_len=None), SamplingParams(4000))


def test_stop_ids_are_in_the_vocabulary() -> None:
    strong = replace(STRONG, vocab_size=512)
    check(strong, SamplingParams(40, stop_token_ids=(0, 511)))
    for token in (512, 99999, -1):
        with pytest.raises(ConfigError, match=rf"stop_token_ids has {token}, but its ids are below 512"):
            check(strong, SamplingParams(40, stop_token_ids=(3, token)))
    check(STRONG, SamplingParams(40, stop_token_ids=(99999,)))
    with pytest.raises(ConfigError, match="fit 31 bits"):
        check(STRONG, SamplingParams(40, stop_token_ids=(2**31,)))


def test_engines_are_imported_only_when_asked_for() -> None:
    code = (
        "import sys, rollstream.engine.registry; "
        "print([m for m in ('aiohttp', 'openvino', 'openvino_genai', 'rollstream.engine.openvino') "
        "if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_a_configuration_is_checked_without_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_engine_config("sglang", model_path="org/name", server_urls=["http://a:1"])
    for kwargs, message in [
        ({"name": "openvin"}, "did you mean 'openvino'"),
        ({"name": "sglang"}, "server_urls"),
        ({"name": "sglang", "server_urls": ["http://a:1"], "engine_kwargs": {"x": 1}}, "unknown key"),
        ({"model_path": None}, r"model\.path"),
        ({"server_urls": ["http://a:1"]}, "embedded"),
        ({"engine_kwargs": {"cachesize": 3}}, "did you mean 'cache_size'"),
    ]:
        given: dict[str, Any] = {"name": "openvino", "model_path": MODEL_PATH} | kwargs
        with pytest.raises(ConfigError, match=message):
            check_engine_config(given.pop("name"), **given)
    pytest.importorskip("openvino_genai")
    check_engine_config("openvino", model_path=MODEL_PATH)
    with pytest.raises(
        ConfigError,
        match=r"no folder Qwen/Qwen3-8B.*rollout\.name=hf .*local folder with openvino_model\.xml",
    ):
        check_engine_config("openvino", model_path="Qwen/Qwen3-8B")
    with pytest.raises(ConfigError, match=r"has no openvino_model\.xml"):
        check_engine_config("openvino", model_path=tmp_path)
    (tmp_path / "openvino_model.xml").touch()
    with pytest.raises(ConfigError, match="vocab_size"):
        check_engine_config("openvino", model_path=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["openvino_model.xml"]


def test_the_settings_that_decide_data() -> None:
    defaults = {"enable_prefix_caching": False, "inference_precision": "f32", "kv_cache_precision": "f32"}
    assert data_deciding_kwargs("openvino") == defaults
    given = {"kv_cache_precision": "u8", "num_threads": 2}
    assert data_deciding_kwargs("openvino", given) == defaults | {"kv_cache_precision": "u8"}
    assert data_deciding_kwargs("sglang", {"connect_timeout": 3.0}) == {}
    given = {"extra_body": {"top_k": 2}, "requests_per_minute": 5}
    assert data_deciding_kwargs("openai", given) == {
        "token_exact": False,
        "extra_body": {"top_k": 2},
        "send_reasoning": False,
    }
    with pytest.raises(ConfigError, match="unknown engine"):
        data_deciding_kwargs("no such engine")
    with pytest.raises(ConfigError, match="unknown key"):
        data_deciding_kwargs("openvino", {"kv_precision": "u8"})
