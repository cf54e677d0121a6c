import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollstream.demo import MODEL_PATH
from rollstream.engine.registry import check_engine_config, data_deciding_kwargs
from rollstream.errors import ConfigError


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
        ({"name": "sglang", "server_urls": ["localhost:30000"]}, "http://host:port"),
        ({"name": "hf", "server_urls": ["http://a:1"]}, "embedded"),
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
    with pytest.raises(ConfigError, match="no folder Qwen/Qwen3-8B"):
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
    assert data_deciding_kwargs("hf").keys() == {"attn_implementation", "device", "dtype"}
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
