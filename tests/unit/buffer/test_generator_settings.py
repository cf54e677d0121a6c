import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.buffer.generator_settings import _KEYS, _SAMPLING_KEYS, GeneratorSettings
from rollstream.errors import ConfigError

STOCK: dict[str, Any] = {
    "num_process": "100",
    "num_epoch": "3",
    "remote_engine_url": "http://10.0.0.1:3000",
    "remote_buffer_url": "http://10.0.0.1:8889",
    "task_type": "math",
    "input_file": "/data/prompts.jsonl",
    "num_repeat_per_sample": "16",
    "max_tokens": "4096",
    "sampling_params": {"max_tokens": 4096, "temperature": 0.8, "top_p": 1},
    "tokenizer_path": "/models/m",
    "skip_instance_ids": [1, "a", 1],
}
"""As slime's trainer sends it."""


def test_the_payload_of_slime_is_understood() -> None:
    read = GeneratorSettings.read(STOCK)
    assert (read.repeats, read.epochs, read.in_flight) == (16, 3, 100)
    assert read.engine_urls == ("http://10.0.0.1:3000",)
    assert read.sampling.max_tokens == 4096 and read.sampling.temperature == 0.8
    assert read.skip_instance_ids == (1, "a", 1)
    assert read.sampling.seed is None and read.wants_logprobs is None
    same = GeneratorSettings.read({**STOCK, "remote_engine_url": "http://10.0.0.1:3000/v1/"})
    assert same.engine_urls == read.engine_urls
    beside = GeneratorSettings.read({**STOCK, "sampling_params": {"temperature": 1}})
    assert beside.sampling.max_tokens == 4096
    native = GeneratorSettings.read(
        {**STOCK, "max_tokens": None, "sampling_params": {"max_new_tokens": "7", "stop": "\n", "top_k": 0}}
    )
    assert native.sampling.max_tokens == 7 and native.sampling.stop == ("\n",)
    assert native.sampling.top_k == -1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"remote_engine_url": "10.0.0.1:3000"}, "remote_engine_url: '10.0.0.1:3000'"),
        ({"remote_engine_url": []}, "remote_engine_url"),
        ({"input_file": None}, "input_file: None"),
        ({"engine": "sglan"}, "engine: 'sglan'"),
        ({"attempt_timeout": 0}, "attempt_timeout"),
        ({"num_epoch": "1.5"}, "num_epoch: '1.5'"),
        ({"sampling_params": "hot"}, "sampling_params: 'hot'"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature: -1"),
        ({"sampling_params": {"top_p": "nan"}}, "sampling_params.top_p: 'nan'"),
        ({"sampling_params": {"seed": -1}}, "sampling_params.seed: -1"),
        ({"sampling_params": {"repetition_penalty": 1.1}}, "sampling_params.repetition_penalty is not known"),
        ({"sampling_params": {"max_tokens": 1, "max_new_tokens": 1}}, "both"),
        ({"sampling_params": {"ignore_eos": 1}}, "sampling_params.ignore_eos: 1"),
    ],
)
def test_a_wrong_parameter_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        GeneratorSettings.read({**STOCK, **change})


def test_a_key_that_is_nearly_known_is_told(caplog: pytest.LogCaptureFixture) -> None:
    GeneratorSettings.read({**STOCK, "num_procces": 3, "my_own": 1})
    assert "did you mean 'num_process'" in caplog.text and "my_own" not in caplog.text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)


@given(
    change=st.dictionaries(st.sampled_from(_KEYS), JSON, max_size=3),
    sampling=st.dictionaries(st.sampled_from(_SAMPLING_KEYS), JSON, max_size=3),
)
def test_anything_is_read_or_refused_by_name(change: dict[str, Any], sampling: dict[str, Any]) -> None:
    given = {**STOCK, "sampling_params": {**STOCK["sampling_params"], **sampling}, **change}
    try:
        read = GeneratorSettings.read(given)
    except ConfigError as error:
        assert any(key in str(error) for key in (*_KEYS, "sampling_params"))
    else:
        assert read.repeats >= 1 and read.epochs >= 1 and read.in_flight >= 1
        assert read.sampling.max_tokens >= 1 and 0 <= read.sampling.top_p <= 1
