"""Weights on their way to a server, as far as one process shows them; real servers: tests/compat."""

import asyncio
import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rollstream.demo import MODEL_PATH
from rollstream.engine.weight_channel import WeightChannel, checkpoint_tensors, find_difference, transfer
from rollstream.engine.weight_group import WeightGroup, connect_to
from rollstream.errors import EngineError

URL = "http://127.0.0.1:9"  # nobody is there, and nobody is asked


def test_a_copy_has_the_names_of_the_checkpoint_and_outlasts_the_trainers_step() -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL_PATH)
    weights = WeightChannel().put(model)
    own = checkpoint_tensors(MODEL_PATH)
    assert weights.tensors.keys() == own.keys()  # lm_head is the embedding
    assert find_difference(weights.listed(), own, tied=True) is None  # float32, and the file has bfloat16
    assert weights.logprobs is not None
    before = weights.tensors["model.norm.weight"].clone()
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    assert torch.equal(weights.tensors["model.norm.weight"], before)
    assert "weights" in str(weights)
    with pytest.raises(TypeError, match="memory of the trainer's process"):
        pickle.dumps(weights)


def test_a_model_that_holds_its_weights_otherwise_gives_the_names_that_it_is_saved_by(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64}
    config = AutoConfig.for_model("qwen3_moe", **sizes, **heads, num_experts=4, num_experts_per_tok=2)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    weights = WeightChannel().put(model)
    assert find_difference(weights.listed(), checkpoint_tensors(tmp_path), tied=False) is None
    assert any("experts.3." in name for name in weights.tensors)


def test_a_checkpoint_of_several_files(tmp_path: Path) -> None:
    for name, dtype in (("a", torch.bfloat16), ("b", torch.int8), ("left-over", torch.float32)):
        save_file({name: torch.zeros(2, 3, dtype=dtype)}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert checkpoint_tensors(tmp_path) == {"a": ("bfloat16", [2, 3]), "b": ("int8", [2, 3])}


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        ({"a": ("float32", [2]), "b": ("int8", [3])}, None),
        ({"a": ("float16", [2]), "b": ("int8", [3]), "lm_head.weight": ("float16", [2])}, None),
        ({"b": ("int8", [3])}, "1 of 2 tensors are missing, a first"),
        ({"a": ("float16", [2]), "b": ("int8", [3]), "c": ("int8", [3])}, "not known to it, c first"),
        ({"a": ("float16", [2, 1]), "b": ("int8", [3])}, r"a has the shape \[2, 1\], and it expects \[2\]"),
        ({"a": ("float16", [2]), "b": ("float16", [3])}, "b is float16, and it expects int8"),
    ],
)
def test_tensors_are_compared(sent: dict[str, Any], problem: str | None) -> None:
    found = find_difference(sent, {"a": ("float16", [2]), "b": ("int8", [3])}, tied=True)
    assert found == problem if problem is None else __import__("re").search(problem, found or "")


@contextmanager
def worker(address: str, port: int, received: list[Any], shapes: list[list[int]]) -> Iterator[None]:
    """Another member in a thread of its own, which closes its end when it has what it waits for."""

    def run() -> None:
        group = WeightGroup("gloo", connect_to(address, port), address, rank=1, size=2, timeout=20)
        for shape in shapes:
            tensor = torch.empty(shape)
            group.broadcast(tensor)
            received.append(tensor)
        group.close()

    thread = Thread(target=run)
    thread.start()
    yield
    thread.join()


async def test_tensors_arrive_and_a_server_that_refuses_ends_the_sending() -> None:
    state = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4), "c": torch.ones(1)}
    weights = WeightChannel().put(None, state)
    received: list[Any] = []

    async def meet(address: str, port: int) -> None:
        joined = worker(address, port, received, [[2, 3], [4]])
        await asyncio.to_thread(joined.__enter__)
        threads.append(joined)

    async def answer(error: str) -> None:
        if error:
            raise EngineError(error)

    threads: list[Any] = []
    async with transfer(weights, URL, 1, meet, timeout=20) as send:
        await send(["a", "b"], answer(""))
        await asyncio.to_thread(threads[0].__exit__, None, None, None)
        assert [tensor.tolist() for tensor in received] == [state["a"].tolist(), state["b"].tolist()]
        with pytest.raises(EngineError, match="no room"):  # and not in 20 seconds
            await send(["c"], answer("no room"))


async def test_a_server_that_refuses_to_meet_is_not_waited_for() -> None:
    async def refuse(address: str, port: int) -> None:
        assert address == "127.0.0.1"
        raise EngineError("who are you?")

    weights = WeightChannel().put(None, {"a": torch.ones(1)})
    async with asyncio.timeout(20):
        with pytest.raises(EngineError, match="who are you"):
            async with transfer(weights, URL, 1, refuse, timeout=600):
                pass
