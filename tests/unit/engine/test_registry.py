import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rollstream.engine.base import Capabilities
from rollstream.engine.registry import check_capabilities, create_engine
from rollstream.errors import ConfigError
from rollstream.trajectory import SamplingParams

WEAK = Capabilities(
    token_ids=True,
    logprobs="none",
    seeds=False,
    stop_strings=False,
    stop_token_ids=False,
    images=False,
    update_weights=False,
    max_model_len=100,
)
STRONG = replace(WEAK, logprobs="raw", seeds=True, stop_strings=True, stop_token_ids=True)


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
    with pytest.raises(ConfigError, match="exact token ids"):
        check(replace(STRONG, token_ids=False), asked)
    with pytest.raises(ConfigError, match="ignore_eos"):
        check(replace(STRONG, stop_token_ids_with_ignore_eos=False), replace(asked, ignore_eos=True))


def test_lengths_that_cannot_fit() -> None:
    with pytest.raises(ConfigError, match="more than the 100 tokens"):
        check(STRONG, SamplingParams(41))
    with pytest.raises(ConfigError, match="more than the 90 tokens"):
        check(STRONG, SamplingParams(40), limit=90)
    check(replace(STRONG, max_model_len=None), SamplingParams(4000))


def test_unknown_engines_and_missing_parts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'openvino'"):
        create_engine("openvin", model_path=None, log_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"model\.path"):
        create_engine("openvino", model_path=None, log_dir=tmp_path)
    with pytest.raises(ConfigError, match="server_urls"):
        create_engine("sglang", model_path=None, log_dir=tmp_path)
    with pytest.raises(ConfigError, match="embedded"):
        create_engine("openvino", model_path=tmp_path, server_urls=["http://a:1"], log_dir=tmp_path)
    engine = create_engine("sglang", model_path="org/name", server_urls=["http://a:1/"], log_dir=tmp_path)
    assert type(engine).__name__ == "SGLangEngine"


def test_engines_are_imported_only_when_asked_for() -> None:
    code = (
        "import sys, rollstream.engine.registry; "
        "print([m for m in ('aiohttp', 'openvino', 'openvino_genai', 'rollstream.engine.openvino') "
        "if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
