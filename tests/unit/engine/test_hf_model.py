"""Sharing a model with its owner, and which weights fit it."""

from typing import Any

import pytest

from rollstream.demo import MODEL_PATH
from rollstream.engine.hf_batch import CacheSize, cache_size
from rollstream.engine.hf_model import LiveModel, copy_weights, load_module
from rollstream.errors import EngineError
from rollstream.trajectory import SamplingParams

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
    live.module.eval()
    live.module.set_attn_implementation("paged|sdpa")
    assert module.training
    assert module.config._attn_implementation == "sdpa"
    assert live.module.lm_head.weight is live.module.model.embed_tokens.weight  # still tied


def test_what_it_says_of_itself(module: Any) -> None:
    live = LiveModel(module)
    assert (live.vocab_size, live.max_model_len, live.version) == (512, 4096, 0)
    assert live.end_ids(SamplingParams(1, stop_token_ids=(7,))) == {2, 7}
    assert live.end_ids(SamplingParams(1, stop_token_ids=(7,), ignore_eos=True)) == {7}


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
    ]:
        with pytest.raises(EngineError, match=message):
            live.match(wrong)


def test_the_cache_takes_the_memory_it_may(module: Any) -> None:
    def size(gb: float, longest: int | None = None, blocks: int = 0) -> CacheSize:
        return cache_size(
            module,
            bytes_at_most=gb * 1e9,
            block_size=32,
            max_num_seqs=4,
            longest=longest,
            num_blocks=blocks,
        )

    # A token: 2 layers x 2 (key, value) x 2 heads x 32 x 4 bytes.
    assert size(1.0) == CacheSize(int(1e9 / (32 * 1024)), 32, 1)
    assert size(1.0, longest=100).blocks == 4 * 4
    assert size(1.0, longest=100, blocks=77).blocks == 77
    with pytest.raises(EngineError, match="does not hold one block"):
        size(1e-5)


def test_the_longest_sequence_just_fits() -> None:
    for blocks in range(1, 9):
        for groups in (1, 2):
            cache = CacheSize(blocks * groups, 32, groups)
            assert cache.blocks_for(cache.longest) == cache.blocks
            assert cache.blocks_for(cache.longest + 1) > cache.blocks
