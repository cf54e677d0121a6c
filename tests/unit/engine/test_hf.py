"""What the `hf` engine decides without running a model."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollstream.demo import MODEL_PATH
from rollstream.engine.hf import HFEngine
from rollstream.errors import ConfigError, EngineError, EngineUnavailableError
from rollstream.trajectory import SamplingParams


def installed() -> None:
    pytest.importorskip("torch")


def test_wrong_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed()
    for path, message in [
        (None, r"needs actor_rollout_ref\.model\.path"),
        (tmp_path, r"has no config\.json"),
        (tmp_path / "nothing", "there is no folder"),
        ("./org/name", "there is no folder"),
    ]:
        with pytest.raises(ConfigError, match=message):
            HFEngine(path)
    wrong: dict[str, Any] = {
        "num_kv_blocks": -1,
        "max_num_seqs": 0,
        "max_num_batched_tokens": 0,
        "num_threads": -1,
        "cache_size": 0.0,
        "attn_implementation": "flash_attention_2",
    }
    for key, value in wrong.items():
        with pytest.raises(ConfigError, match=rf"engine_kwargs\.{key} is {value!r}, want"):
            HFEngine(MODEL_PATH, engine_kwargs={key: value})
    with pytest.raises(ConfigError, match="max_num_seqs"):
        HFEngine(MODEL_PATH, engine_kwargs={"max_num_seqs": 300})
    HFEngine("org/name")  # a hub name: seen to at start
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else object())
    with pytest.raises(ConfigError, match=r"needs torch, .*pip install 'rollstream\[hf\]'"):
        HFEngine(MODEL_PATH)


def test_making_one_imports_neither_torch_nor_transformers() -> None:
    installed()
    code = (
        "import sys; from rollstream.demo import MODEL_PATH; from rollstream.engine.hf import HFEngine; "
        "HFEngine(MODEL_PATH); print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


async def test_before_start_and_after_close_nothing_is_served() -> None:
    installed()
    engine = HFEngine(MODEL_PATH)
    with pytest.raises(EngineError, match="has not been started"):
        await engine.generate([1], SamplingParams(5), request_id="a")
    with pytest.raises(EngineUnavailableError, match="was not started"):
        await engine.load_state_dict({}, 1)
    assert not await engine.health()
    await engine.close()
    await engine.close()
    assert not await engine.health()
