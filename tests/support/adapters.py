"""LoRA adapters of the demo model, as peft writes them, and log-probs as peft computes them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rollstream.demo import MODEL_PATH
from rollstream.trajectory import Completion


def demo_model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype="float32")


def peft_model(*, seed: int, rank: int = 6) -> Any:
    """The demo model with an adapter of random weights on all its projections."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(
        r=rank, lora_alpha=12, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return get_peft_model(demo_model(), config)


def make_adapter(folder: Path, *, seed: int, rank: int = 6) -> Path:
    """Writes the adapter of `peft_model` into a folder."""
    peft_model(seed=seed, rank=rank).save_pretrained(folder)
    return folder


def check_logprobs(answer: Completion, prompt: list[int], sources: Mapping[int, Path | None]) -> None:
    """Each token's log-prob is peft's own, under the version that it is stamped with."""
    ends = [start for start, _ in answer.policy_versions[1:]] + [len(answer.token_ids)]
    for (start, version), end in zip(answer.policy_versions, ends, strict=True):
        expected = adapter_logprobs(sources[version], prompt, answer.token_ids)
        assert (answer.logprobs or [])[start:end] == pytest.approx(expected[start:end], abs=1e-4)


def adapter_logprobs(folder: Path | None, prompt: list[int], ids: list[int]) -> list[float]:
    """Log-probs of `ids` after a prompt, by the demo model under an adapter, if any."""
    from peft import PeftModel

    from rollstream.engine.hf_forward import score_ids

    model = demo_model() if folder is None else PeftModel.from_pretrained(demo_model(), folder)
    return score_ids(model.eval(), prompt + ids, len(prompt)).logprobs
