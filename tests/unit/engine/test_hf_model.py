"""Sharing a model with its owner, which weights fit it, and when they may change."""

from typing import Any

import pytest

from rollstream.demo import MODEL_PATH
from rollstream.engine.hf_model import LiveModel, copy_weights, load_module
from rollstream.errors import EngineError

torch = pytest.importorskip("torch")


@pytest.fixture
def module() -> Any:
    return load_module(str(MODEL_PATH), dtype="auto", device="cpu", attn_implementation="")


def test_a_lent_model_shares_its_weights_and_nothing_else(module: Any) -> None:
    module.train()
    live = LiveModel(module, lent=True)
    own, lent = dict(live.module.named_parameters()), dict(module.named_parameters())
    assert own.keys() == lent.keys()
    assert all(own[name] is lent[name] for name in own)
    inner = zip(live.module.modules(), module.modules(), strict=True)
    assert all(one is not other for one, other in inner)
    assert live.module.config is not module.config
    assert module.training
    assert not live.module.training
    assert live.module.lm_head.weight is live.module.model.embed_tokens.weight  # still tied


def test_weights_that_fit_and_weights_that_do_not(module: Any) -> None:
    live = LiveModel(module)
    state = {name: tensor.clone() + 1 for name, tensor in module.state_dict().items()}
    del state["lm_head.weight"]  # tied to the embedding
    copy_weights(live.match(state))
    assert torch.equal(module.lm_head.weight, state["model.embed_tokens.weight"])
    norm = "model.norm.weight"
    for wrong, message in [
        ({**state, "other.weight": state[norm]}, r"unknown: other\.weight"),
        ({k: v for k, v in state.items() if k != norm}, r"missing: model\.norm\.weight"),
        ({**state, norm: state[norm][:5]}, r"model\.norm\.weight \(5,\) instead of \(128,\)"),
        ({norm: state[norm]}, r"missing: .* and \d+ more"),
        ({**state, norm: state[norm] / 0}, r"not numbers: model\.norm\.weight"),
    ]:
        with pytest.raises(EngineError, match=message):
            live.match(wrong)
