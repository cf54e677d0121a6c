"""What the embedded engine decides without running a model, and its worker without a parent."""

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from rollstream.demo import MODEL_PATH
from rollstream.engine.openvino import OpenVINOEngine
from rollstream.errors import ConfigError


def make(folder: Path, **kwargs: Any) -> OpenVINOEngine:
    return OpenVINOEngine(folder, log_path=folder / "log", engine_kwargs=kwargs)


def test_wrong_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openvino_genai")
    for folder in (tmp_path / "nothing", tmp_path):
        with pytest.raises(ConfigError, match=r"model\.path"):
            make(folder)
    (tmp_path / "openvino_model.xml").touch()
    with pytest.raises(ConfigError, match="vocab_size"):
        make(tmp_path)
    for key, value in {
        "cachesize": 3,
        "cache_size": 0,
        "num_kv_blocks": -1,
        "max_num_seqs": 300,
        "max_num_batched_tokens": 0,
        "num_threads": -1,
        "start_timeout": 0.0,
    }.items():
        with pytest.raises(ConfigError, match=key):
            make(tmp_path, **{key: value})
    make(MODEL_PATH, cache_size=0, num_kv_blocks=4)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="not installed"):
        make(tmp_path)


async def test_who_is_cancelled_while_it_closes_leaves_nothing_behind(tmp_path: Path) -> None:
    pytest.importorskip("openvino_genai")
    engine = OpenVINOEngine(MODEL_PATH, log_path=tmp_path / "log", engine_kwargs={})
    await engine.start()
    closing = asyncio.create_task(engine.close())
    await asyncio.sleep(0)  # it has begun
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_causes_are_one_line_without_the_source_of_openvino() -> None:
    pytest.importorskip("openvino_genai")
    from rollstream.engine.openvino_worker import cause_of

    wrapped = "Exception from src/a.cpp:84:\nCheck 'x' failed at src/b.cpp:9:\nEmpty weights!\n\n"
    assert cause_of(RuntimeError(wrapped)) == "Empty weights!"
    assert cause_of(KeyError("a")) == "KeyError: 'a'"
    assert cause_of(RuntimeError()) == "RuntimeError: "
