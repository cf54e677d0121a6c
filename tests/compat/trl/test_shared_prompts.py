"""A prompt computed once gives the log-probs and gradients of a prompt computed for each completion."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("trl")

import torch
from trl.trainer import utils

from demo_model.shared_prompts import buckets, completion_logprobs

TEMPERATURE = 0.7


@given(st.lists(st.integers(1, 5000), max_size=60))
def test_buckets_hold_each_index_once_and_lengths_that_are_alike(lengths: list[int]) -> None:
    found = buckets(lengths)
    assert sorted(i for bucket in found for i in bucket) == list(range(len(lengths)))
    for bucket in found:
        assert max(lengths[i] for i in bucket) <= 1.5 * min(lengths[i] for i in bucket)


@pytest.fixture(scope="module")
def model() -> object:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    made = Qwen2ForCausalLM(config).double()
    utils.add_fused_lm_head(made, TEMPERATURE, outputs=("log_probs", "entropy"))
    return made


def batch(seed: int, *, equal: bool) -> tuple[object, object, int]:
    """Prompts of several lengths, three completions each, in a random order."""
    rng = random.Random(seed)
    rows = []
    for length in [6] * 4 if equal else [3, 4, 9, 30]:
        prompt = [rng.randrange(50) for _ in range(length)]
        rows += [(prompt, [rng.randrange(50) for _ in range(rng.randint(1, 7))]) for _ in range(3)]
    rng.shuffle(rows)
    wide, long = max(len(p) for p, _ in rows), max(len(c) for _, c in rows)
    ids, mask = torch.zeros(len(rows), wide + long, dtype=torch.long), []
    for row, (prompt, completion) in enumerate(rows):
        ids[row, wide - len(prompt) : wide + len(completion)] = torch.tensor(prompt + completion)
        mask.append([0] * (wide - len(prompt)) + [1] * len(prompt + completion))
        mask[-1] += [0] * (wide + long - len(mask[-1]))
    return ids, torch.tensor(mask), long


@pytest.mark.parametrize("equal", [True, False])
def test_it_equals_the_plain_forward_pass(model, equal: bool) -> None:
    ids, mask, long = batch(1, equal=equal)
    counted = mask[:, -long:].double()
    weight = torch.randn(counted.shape, dtype=torch.float64) * counted

    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, -long - 1 : -1]
    plain = (logits / TEMPERATURE).log_softmax(-1)
    wanted = plain.gather(-1, ids[:, -long:, None])[..., 0] * counted
    wanted_entropy = -(plain.exp() * plain).sum(-1) * counted
    (wanted * weight).sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()

    logps, entropies = completion_logprobs(model, ids, mask, long, temperature=TEMPERATURE)
    (logps * weight).sum().backward()
    assert torch.allclose(logps.double(), wanted, atol=1e-5)
    assert torch.allclose(entropies.double(), wanted_entropy, atol=1e-5)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.allclose(parameter.grad, gradient, atol=1e-4)
    model.zero_grad()


@contextmanager
def watched(model) -> Iterator[list[tuple[int, bool]]]:
    """Tokens of each pass of the model's body, padding with them, and whether it has a graph."""
    seen: list[tuple[int, bool]] = []
    handle = model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((kwargs["input_ids"].numel(), torch.is_grad_enabled())),
        with_kwargs=True,
    )
    yield seen
    handle.remove()


def test_a_prompt_is_computed_once(model) -> None:
    ids, mask, long = batch(2, equal=True)
    with watched(model) as passes:
        completion_logprobs(model, ids, mask, long, temperature=TEMPERATURE)
    unpadded = 4 * 5 + int(mask[:, -long:].sum())  # a prompt's last token stands before each completion
    assert unpadded <= sum(tokens for tokens, _ in passes) < 1.5 * unpadded < int(mask.sum())


def test_the_logits_of_a_batch_are_never_kept() -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    vocabulary, rows, long = 20_000, 8, 24
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = Qwen2Config(
        vocab_size=vocabulary, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True, **sizes
    )
    model = Qwen2ForCausalLM(config)
    utils.add_fused_lm_head(model, 1.0, outputs=("log_probs", "entropy"))
    ids = torch.randint(0, vocabulary, (1, 8 + long)).repeat(rows, 1)
    kept: dict[int, int] = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        completion_logprobs(model, ids, torch.ones_like(ids), long, temperature=1.0)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    whole = rows * long * vocabulary * 4
    assert sum(size for place, size in kept.items() if place not in own) < whole / 4


@pytest.mark.parametrize("kind", ["some rows", "whole groups", "all"])
def test_groups_without_advantage_take_no_backward_and_change_nothing(model, kind: str) -> None:
    ids, mask, long = batch(3, equal=False)
    rows = {"some rows": range(0, 12, 2), "whole groups": range(12), "all": range(12)}[kind]
    silent = torch.zeros(12, dtype=torch.bool)
    if kind == "whole groups":
        prompts = ids[:, :-long]
        silent = (prompts == prompts[0]).all(1) | (prompts == prompts[-1]).all(1)
    else:
        silent[list(rows)] = True
    weight = torch.randn(12, long, dtype=torch.float64).masked_fill(silent[:, None], 0.0)

    wanted, wanted_entropy = completion_logprobs(model, ids, mask, long, temperature=TEMPERATURE)
    (wanted * weight).sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with watched(model) as passes:
        logps, entropies = completion_logprobs(model, ids, mask, long, temperature=TEMPERATURE, silent=silent)
    (logps * weight).sum().backward()

    assert torch.allclose(logps, wanted, atol=1e-6) and torch.allclose(entropies, wanted_entropy, atol=1e-6)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.allclose(parameter.grad, gradient, atol=1e-6)
    model.zero_grad()
    assert all(learns for _, learns in passes) == (kind == "some rows")
    with torch.no_grad():
        again, _ = completion_logprobs(model, ids, mask, long, temperature=TEMPERATURE, silent=silent)
    assert torch.allclose(again, wanted, atol=1e-6)
