"""A prompt computed once gives the log-probs and gradients of a prompt computed for each completion."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.integrations.trl.shared_prompt import PromptsNotShared, buckets, completion_logprobs

torch = pytest.importorskip("torch")
utils = pytest.importorskip("trl.trainer.utils")

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


def test_a_prompt_is_computed_once(model) -> None:
    ids, mask, long = batch(2, equal=True)
    seen = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    completion_logprobs(model, ids, mask, long, temperature=TEMPERATURE)
    handle.remove()
    assert seen[0] == (4, 6)
    assert len(seen) == 2 and seen[1][0] == 12


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


def test_a_model_with_other_states_than_keys_and_values_is_not_for_this() -> None:
    from transformers import Lfm2Config, Lfm2ForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    config = Lfm2Config(
        vocab_size=50,
        num_attention_heads=2,
        num_key_value_heads=1,
        layer_types=["conv", "full_attention"],
        **sizes,
    )
    model = Lfm2ForCausalLM(config)
    ids = torch.randint(0, 50, (2, 9))
    with pytest.raises(PromptsNotShared, match="Lfm2ForCausalLM keeps"):
        completion_logprobs(model, ids, torch.ones_like(ids), 4, temperature=1.0)


@pytest.mark.parametrize("kind", ["falcon_h1", "minimax"])
def test_states_in_or_beside_layers_of_keys_and_values_are_found(kind: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    own = {
        "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
        "minimax": {"num_local_experts": 2, "num_experts_per_tok": 1},
    }
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, vocab_size=50, pad_token_id=0, **sizes, **heads, **own[kind])
    ).eval()
    ids = torch.randint(3, 50, (2, 9))
    with torch.no_grad(), pytest.raises(PromptsNotShared, match="keeps a"):
        completion_logprobs(model, ids, torch.ones_like(ids), 4, temperature=1.0)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_positions_that_depend_on_the_length_of_the_row(kind: str) -> None:
    """Up to the original length, 16, prompts are shared; beyond it a prompt's keys are not its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    scaling = {
        "longrope": {
            "short_factor": [1.0] * 4,
            "long_factor": [1.5, 3.0, 6.0, 8.0],
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        "dynamic": {"factor": 4.0},
    }
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings={"longrope": 64, "dynamic": 16}[kind],
        rope_parameters={"rope_type": kind, "rope_theta": 10_000.0, **scaling[kind]},
    )
    model = LlamaForCausalLM(config)
    utils.add_fused_lm_head(model, 1.0, outputs=("log_probs", "entropy"))
    ids = torch.randint(0, 50, (1, 17))
    with torch.no_grad():
        short = ids[:, :16]
        plain = model(input_ids=short).logits[:, 8:-1].log_softmax(-1).gather(-1, short[:, 9:, None])[..., 0]
        logps, _ = completion_logprobs(model, short, torch.ones_like(short), 7, temperature=1.0)
        assert torch.allclose(logps, plain, atol=1e-5)
        with pytest.raises(PromptsNotShared, match=f"17 tokens, and beyond 16 the {kind} positions"):
            completion_logprobs(model, ids, torch.ones_like(ids), 8, temperature=1.0)


@pytest.mark.parametrize("kind", ["some rows", "whole groups", "all"])
def test_rows_without_advantage_take_no_backward_and_change_nothing(model, kind: str) -> None:
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
    with_graph = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: with_graph.append((torch.is_grad_enabled(), len(kwargs["input_ids"]))),
        with_kwargs=True,
    )
    logps, entropies = completion_logprobs(model, ids, mask, long, temperature=TEMPERATURE, silent=silent)
    handle.remove()
    (logps * weight).sum().backward()

    assert torch.allclose(logps, wanted, atol=1e-6) and torch.allclose(entropies, wanted_entropy, atol=1e-6)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.allclose(parameter.grad, gradient, atol=1e-6)
    model.zero_grad()
    computed = sum(count for learns, count in with_graph if learns)
    assert computed < sum(count for _, count in with_graph)
    with torch.no_grad():
        again, _ = completion_logprobs(model, ids, mask, long, temperature=TEMPERATURE, silent=silent)
    assert torch.allclose(again, wanted, atol=1e-6)
