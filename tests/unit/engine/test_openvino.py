"""What the embedded engine decides without running a model, and its worker without a parent."""

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from rollstream.demo import MODEL_PATH
from rollstream.engine import openvino_worker as protocol
from rollstream.engine.openvino import OpenVINOEngine
from rollstream.engine.openvino_worker import Worker, cause_of
from rollstream.errors import ConfigError
from rollstream.trajectory import SamplingParams


def make(folder: Path, **kwargs: Any) -> OpenVINOEngine:
    return OpenVINOEngine(folder, log_path=folder / "log", engine_kwargs=kwargs)


def test_wrong_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openvino_genai")
    with pytest.raises(ConfigError, match="there is no folder"):
        make(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="optimum-cli export openvino"):
        make(tmp_path)
    (tmp_path / "openvino_model.xml").touch()
    with pytest.raises(ConfigError, match="vocab_size"):
        make(tmp_path)
    with pytest.raises(ConfigError, match="did you mean 'cache_size'"):
        make(tmp_path, cachesize=3)
    with pytest.raises(ConfigError, match="max_num_seqs 300"):
        make(tmp_path, max_num_seqs=300)
    for key, value in {
        "cache_size": 0,
        "num_kv_blocks": -1,
        "max_num_seqs": 0,
        "max_num_batched_tokens": 0,
        "num_threads": -1,
        "start_timeout": 0.0,
    }.items():
        with pytest.raises(ConfigError, match=rf"engine_kwargs\.{key} is {value}, want"):
            make(tmp_path, **{key: value})
    with pytest.raises(ConfigError, match=r"set engine_kwargs\.num_kv_blocks"):
        make(tmp_path, cache_size=0)
    make(MODEL_PATH, cache_size=0, num_kv_blocks=4)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'rollstream\[openvino\]'"):
        make(tmp_path)


class Script:
    """Stands in for the worker's channel: gives it these orders, batch by batch when it is idle, then ends it."""

    def __init__(self, *batches: list[protocol.Add]) -> None:
        self.batches = list(batches)
        self.done: list[protocol.Done] = []

    def send(self, message: protocol.Results) -> None:
        self.done += message.done

    def receive(self, *, wait: bool) -> list[protocol.Orders]:
        if wait and not self.batches:
            raise EOFError
        return [protocol.Orders(self.batches.pop(0), [], [])] if wait else []


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


def order(number: int, prompt: list[int]) -> protocol.Add:
    return protocol.Add(number, prompt, SamplingParams(4, seed=1, ignore_eos=True))


def test_the_worker_survives_what_the_pipeline_cannot_do(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    genai = pytest.importorskip("openvino_genai")
    # The engine refuses the first two before they get here; the last one fills the cache.
    script = Script(
        [order(0, []), order(1, [1] * 300), order(2, [1])],
        [order(3, [1]), order(4, [2])],
        [order(5, [3] * 240)],
    )

    class Pipeline(genai.ContinuousBatchingPipeline):  # type: ignore[misc]
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.breaks = len(script.batches) == 3  # the first one, at the second batch

        def step(self) -> None:
            if self.breaks and len(script.batches) == 1:
                raise RuntimeError("the model broke")
            super().step()

    monkeypatch.setattr(genai, "ContinuousBatchingPipeline", Pipeline)
    load = protocol.Load(str(MODEL_PATH), {}, {"num_kv_blocks": 8, "max_num_seqs": 4}, str(MODEL_PATH))
    worker = Worker(load, script)  # type: ignore[arg-type]
    assert worker.cache_blocks == 8
    with pytest.raises(EOFError):
        worker.run()
    refused, broken = [(0, "refused"), (1, "refused")], [(3, "broken"), (4, "broken")]
    assert [(d.id, d.reason) for d in script.done] == [*refused, (2, "length"), *broken, (5, "length")]
    assert "do not fit the KV cache of 256" in script.done[1].error
    assert "the model broke" in script.done[3].error
    assert "Traceback" in capfd.readouterr().err


def test_causes_are_one_line_without_the_source_of_openvino() -> None:
    wrapped = "Exception from src/a.cpp:84:\nCheck 'x' failed at src/b.cpp:9:\nEmpty weights!\n\n"
    assert cause_of(RuntimeError(wrapped)) == "Empty weights!"
    assert cause_of(RuntimeError("Exception from src/a.cpp:84:")) == "Exception from src/a.cpp:84:"
    assert cause_of(KeyError("a")) == "KeyError: 'a'"
    assert cause_of(RuntimeError()) == "RuntimeError: "
