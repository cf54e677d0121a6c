"""Keys and values of a batch, and drawing tokens: against transformers' own, and at the edges."""

import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.demo import MODEL_PATH
from rollstream.engine.hf_model import load_module
from rollstream.errors import EngineError
from rollstream.trajectory import SamplingParams
from tests.support.forward import processed

torch = pytest.importorskip("torch")

from rollstream.engine.hf_forward import (  # noqa: E402  needs torch
    DRAW_BITS,
    KeyValues,
    check_model,
    draw_tokens,
    next_logits,
    token_bytes,
)

LAST_DRAW = (2**DRAW_BITS - 1) / 2**DRAW_BITS


@pytest.fixture(scope="module")
def module() -> Any:
    torch.set_num_threads(1)
    return load_module(str(MODEL_PATH), dtype="auto", device="cpu", attn_implementation="")


@settings(deadline=None, max_examples=15)
@given(st.randoms(use_true_random=False))
def test_rows_that_come_and_go_have_the_logits_of_a_forward_pass(module: Any, rng: random.Random) -> None:
    cache = KeyValues(256)
    rows: list[list[int]] = []
    with torch.inference_mode():
        check_model(module, cache)
        for _ in range(12):
            room = 256 // cache.columns if rows else 256 // 50
            if rows and rng.random() < 0.4:
                row = rng.randrange(len(rows))
                cache.remove(row, broken=rng.random() < 0.5)
                rows[row] = rows[-1]
                rows.pop()
            elif len(rows) < room:
                longest = max(map(len, rows), default=0)
                cache.reshape(max(longest + 2, rng.randrange(40, 256 // (len(rows) + 1))))
                new = [
                    [rng.randrange(3, 500) for _ in range(rng.randrange(1, 20))]
                    for _ in range(rng.randint(1, 256 // cache.columns - len(rows)))
                ]
                cache.lengths += [0] * len(new)
                rows += new
                compare(module, next_logits(module, cache, len(rows) - len(new), new), new)
            elif max(map(len, rows)) + 2 < cache.columns:
                for row in rows:
                    row.append(rng.randrange(3, 500))
                compare(module, next_logits(module, cache, 0, [row[-1:] for row in rows]), rows)


def compare(module: Any, logits: Any, rows: list[list[int]]) -> None:
    for found, row in zip(logits, rows, strict=True):
        assert torch.allclose(found, module(torch.tensor([row])).logits[0, -1], atol=1e-4)


def test_a_cache_takes_the_memory_of_its_tokens(module: Any) -> None:
    # A token: 2 layers x 2 (key, value) x 2 heads x 32 x 4 bytes.
    assert token_bytes(module) == 1024
    cache = KeyValues(100)
    check_model(module, cache)
    assert cache.nbytes == 100 * 1024
    cache.free()
    assert cache.nbytes == 0
    with pytest.raises(EngineError, match=r"cannot run Qwen2ForCausalLM: .* memory"):
        check_model(module, KeyValues(10**12))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.builds(
            SamplingParams,
            max_tokens=st.just(1),
            temperature=st.sampled_from([0.3, 0.7, 1.0, 1.9]),
            top_k=st.sampled_from([-1, 1, 2, 7, 50, 1000]),
            top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
        ),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 2**32 - 1),
)
def test_rows_are_drawn_from_what_transformers_makes_of_them(how: list[SamplingParams], seed: int) -> None:
    logits = torch.randn(len(how), 60, generator=torch.Generator().manual_seed(seed)) * 3
    rng = random.Random(seed)
    draws = [rng.choice([0.0, LAST_DRAW, rng.random()]) for _ in how]
    ids, logprobs = draw_tokens(logits, how, draws)
    for row, params, token, logprob, draw in zip(logits, how, ids, logprobs, draws, strict=True):
        expected = processed(row[None], params)[0]
        assert logprob == pytest.approx(float(expected[token]), abs=1e-5)
        # The draw says which: it lies in the token's share of the running sum.
        reached = expected.double().exp().cumsum(-1)
        assert float(reached[token] - expected[token].double().exp()) <= draw + 1e-6
        assert draw < float(reached[token]) + 1e-6


def test_no_temperature_is_greedy_and_says_what_the_model_thought() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]]).repeat(3, 1)
    how = [
        SamplingParams(1, temperature=0.0),
        SamplingParams(1, temperature=1e-9, top_k=1, top_p=0.1),
        SamplingParams(1),
    ]
    ids, logprobs = draw_tokens(logits, how, [LAST_DRAW, LAST_DRAW, LAST_DRAW])
    assert ids == [1, 1, 2]
    assert logprobs == pytest.approx(logits[0].log_softmax(-1)[[1, 1, 2]].tolist())


def test_a_token_without_a_chance_is_never_drawn() -> None:
    lost = -math.inf
    logits = torch.tensor([[lost, 0.0, lost, 0.0, lost]]).repeat(4, 1)
    draws = [0.0, 0.49, 0.51, LAST_DRAW]
    assert draw_tokens(logits, [SamplingParams(1)] * 4, draws)[0] == [1, 1, 3, 3]
    # Its probability is so small that the running sum does not move.
    logits = torch.full((1, 100), -60.0)
    logits[0, 40] = 0.0
    assert draw_tokens(logits, [SamplingParams(1)], [LAST_DRAW])[0] == [40]


def test_what_is_not_a_number_shows() -> None:
    logits = torch.tensor([[0.0, math.nan, 1.0], [0.0, 1.0, 2.0]])
    how = [SamplingParams(1), SamplingParams(1, temperature=0.0)]
    ids, logprobs = draw_tokens(logits, how, [0.5, 0.5])
    assert math.isnan(logprobs[0])
    assert 0 <= ids[0] < 3
    assert (ids[1], math.isnan(logprobs[1])) == (2, False)
