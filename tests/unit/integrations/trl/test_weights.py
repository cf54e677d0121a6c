"""Weights on their way: lent without a copy, and written where the engine reads them."""

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest

from rollstream.engine.openvino_weights import read_safetensors
from rollstream.errors import ConfigError, GenerationFailedError, WeightUpdateError
from rollstream.integrations.trl.session import EnvironmentThread, run_rows
from rollstream.integrations.trl.weights import FolderWeights, SharedWeights, lend

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
    model.peft_config = {}
    with pytest.raises(ConfigError, match="PEFT"):
        FolderWeights(Accelerator(), None).write(model, 0)


def test_holding_an_engine_that_has_not_started_is_nothing() -> None:
    groups = SimpleNamespace(loop=None, engine=None)
    shared = SharedWeights(groups, EnvironmentThread(groups), 1.0)  # type: ignore[arg-type]
    shared.hold(1)
    shared.release()


class Groups:
    """Whose engine may be held, and whose `generate` fails when it is told to."""

    def __init__(self) -> None:
        self.loop: Any = None
        self.engine = self
        self.held: list[int] = []

    async def start(self) -> None:
        self.loop = asyncio.get_running_loop()

    async def close(self) -> None: ...

    @contextlib.asynccontextmanager
    async def changing_weights(self, version: int) -> AsyncIterator[None]:
        self.held.append(version)
        yield
        self.held.append(-version)


@pytest.mark.parametrize("during", ["before", "held"])
def test_an_end_of_the_thread_is_raised_with_its_cause(during: str) -> None:
    class Breaking(EnvironmentThread):
        async def _run(self) -> None:
            await self._groups.start()
            self._ready.set_result(None)
            self.fail = asyncio.Event()
            await self.fail.wait()
            raise ValueError("the tool shop is closed")

    groups = Groups()
    thread = Breaking(groups)  # type: ignore[arg-type]
    thread.start()
    shared = SharedWeights(groups, thread, 10.0)  # type: ignore[arg-type]
    shared.hold(1)
    shared.release()
    assert groups.held == [1, -1]
    if during == "held":
        shared.hold(2)
    groups.loop.call_soon_threadsafe(thread.fail.set)
    assert thread._thread._thread is not None
    thread._thread._thread.join(10.0)
    with pytest.raises(GenerationFailedError, match="the tool shop is closed") as failure:
        shared.hold(2) if during == "before" else shared.release()
    assert isinstance(failure.value.__cause__, ValueError)
    with pytest.raises(GenerationFailedError, match="the tool shop is closed"):
        run_rows(groups, thread, [], 10.0)  # type: ignore[arg-type]
    shared.let_go()
