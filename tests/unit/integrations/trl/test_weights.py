"""Weights on their way: lent without a copy, and written where the engine reads them."""

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import pytest

from rollstream.engine.openvino_weights import read_safetensors
from rollstream.errors import GenerationFailedError, WeightUpdateError
from rollstream.integrations.trl.weights import FolderWeights, SharedWeights, lend
from rollstream.training import BatchesAhead, CallableGenerator, ShuffledPlan

torch = pytest.importorskip("torch")


class Accelerator:
    """One process."""

    is_main_process = True

    def unwrap_model(self, model: Any) -> Any:
        return model

    def get_state_dict(self, model: Any) -> Any:
        return model.state_dict()


@pytest.fixture
def model() -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config)


def test_a_lent_model_shares_weights_and_has_its_own_forward(model: Any) -> None:
    original = model.forward
    model.forward = MethodType(lambda self, *args, **kwargs: original(*args, **kwargs), model)
    lent = lend(model)
    assert lent is not model and "forward" not in lent.__dict__ and "forward" in model.__dict__
    for mine, theirs in zip(model.parameters(), lent.parameters(), strict=True):
        assert mine.data_ptr() == theirs.data_ptr()
    again = copy.deepcopy(lent, {id(tensor): tensor for tensor in lent.parameters()})
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(again(input_ids=ids).logits, original(input_ids=ids).logits)


def test_lent_weights_are_computed_with_as_the_trainer_does(model: Any) -> None:
    def autocast() -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16)

    ids = torch.tensor([[1, 2, 3]])
    with autocast():
        wanted = model(input_ids=ids).logits
    lent = lend(model, autocast)
    again = copy.deepcopy(lent, {id(tensor): tensor for tensor in lent.parameters()})
    for one in (lent, again):
        assert torch.equal(one(input_ids=ids).logits, wanted)
    assert not torch.equal(model(input_ids=ids).logits, wanted)


def test_weights_stay_until_the_engine_has_those_after_them(model: Any, tmp_path: Path) -> None:
    weights = FolderWeights(Accelerator(), str(tmp_path))
    folders = [Path(weights.write(model, step) or "") for step in range(2)]
    assert [folder.exists() for folder in folders] == [True, True]
    weights.forget_older()
    folders.append(Path(weights.write(model, 2) or ""))
    assert [folder.exists() for folder in folders] == [False, True, True]
    weights.forget_older()
    assert [folder.exists() for folder in folders] == [False, False, True]
    written = read_safetensors(folders[-1])
    assert "lm_head.weight" not in written  # tied: as in the model's own files
    embedding = model.model.embed_tokens.weight.detach().numpy()
    assert (written["model.embed_tokens.weight"] == embedding).all()
    weights.close()
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_written_is_said(model: Any, tmp_path: Path) -> None:
    with pytest.raises(WeightUpdateError, match="weights_dir"):
        FolderWeights(Accelerator(), str(tmp_path / "none")).write(model, 0)


class Groups:
    """Whose engine may be held, and whose `generate` fails when it is told to."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.held: list[int] = []

    async def start(self) -> None:
        self.engine = self
        self.loop, self.fail = asyncio.get_running_loop(), asyncio.Event()

    async def generate(self, group: Any) -> Any:
        await self.fail.wait()
        raise ValueError("the tool shop is closed")

    @contextlib.asynccontextmanager
    async def changing_weights(self, version: int) -> AsyncIterator[None]:
        self.held.append(version)
        yield
        self.held.append(-version)


@pytest.fixture
def running() -> Iterator[tuple[Groups, BatchesAhead, SharedWeights]]:
    groups = Groups()
    made = BatchesAhead(
        ShuffledPlan(1), CallableGenerator(groups.generate, start=groups.start), groups_per_step=1
    )
    yield groups, made, SharedWeights(groups, made, 10.0)  # type: ignore[arg-type]
    made.stop()


def test_an_engine_is_held_until_it_is_released(running: Any) -> None:
    groups, batches, shared = running
    shared.hold(1)  # nothing has started: there is nothing to hold
    shared.release()
    batches.start()
    shared.hold(1)
    assert groups.held == [1]
    shared.release()
    assert groups.held == [1, -1]


def test_an_engine_that_does_not_halt_is_said(running: Any) -> None:
    groups, batches, _ = running
    batches.start()

    @contextlib.asynccontextmanager
    async def never(version: int) -> AsyncIterator[None]:
        await asyncio.Event().wait()
        yield

    groups.changing_weights = never
    with pytest.raises(WeightUpdateError, match=r"did not halt within 0.05 s"):
        SharedWeights(groups, batches, 0.05).hold(1)

    @contextlib.asynccontextmanager
    async def broken(version: int) -> AsyncIterator[None]:
        raise RuntimeError("out of memory")
        yield

    groups.changing_weights = broken
    with pytest.raises(WeightUpdateError, match="out of memory"):
        SharedWeights(groups, batches, 10.0).hold(1)


@pytest.mark.parametrize("during", ["before", "held"])
def test_an_end_of_generation_is_raised_with_its_cause(during: str, running: Any) -> None:
    groups, batches, shared = running
    batches.start()
    if during == "held":
        shared.hold(2)
    groups.loop.call_soon_threadsafe(groups.fail.set)
    with pytest.raises(GenerationFailedError):
        batches.next_batch(60.0)
    with pytest.raises(GenerationFailedError, match="the tool shop is closed") as failure:
        shared.hold(2) if during == "before" else shared.release()
    assert isinstance(failure.value.__cause__, ValueError)
    with pytest.raises(GenerationFailedError, match="the tool shop is closed"):
        batches.run(groups.start, 10.0)
    shared.let_go()
