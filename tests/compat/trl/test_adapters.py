"""TRL trains a LoRA adapter of the demo model: only the adapter travels, and the reference is the model without it."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")
pytest.importorskip("peft")

from peft import LoraConfig

from rollstream.errors import ConfigError
from tests.compat.trl.adapters import check_training
from tests.compat.trl.parts import environment, rows, trainer
from tests.support.adapters import adapter_logprobs, peft_model

ROWS = 12
LORA: dict[str, Any] = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def check_logprobs(output: dict[str, Any], name: str, adapter: Path | None) -> None:
    """The log-probs of that name in a batch are those of peft's own forward."""
    for row, mask in enumerate(output["completion_mask"].bool()):
        prompt = output["prompt_ids"][row][output["prompt_mask"][row].bool()].tolist()
        expected = adapter_logprobs(adapter, prompt, output["completion_ids"][row][mask].tolist())
        assert output[name][row][mask].tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("given", ["model", "config"])
def test_the_reference_is_trls_own(given: str, steps: int, tmp_path: Path) -> None:
    """It is the model without the adapter, or with the one that a model came with.

    With two steps a batch the old policy's log-probs are asked for before.
    """
    which = {
        "model": {"model": peft_model(seed=1)},
        "config": {"peft_config": LoraConfig(**LORA, init_lora_weights=False)},
    }
    made = trainer(
        tmp_path,
        rows(ROWS),
        **which[given],
        max_steps=1,
        beta=0.1,
        steps_per_generation=steps,
        per_device_train_batch_size=8 // steps,
    )
    made.model.save_pretrained(tmp_path / "adapter")
    made.train()
    (output,) = made.outputs
    check_logprobs(output, "sampling_per_token_logps", tmp_path / "adapter")
    check_logprobs(output, "ref_per_token_logps", None if given == "config" else tmp_path / "adapter")


@pytest.mark.parametrize("how", ["drain", "pinned"])
def test_tokens_are_of_the_adapter_that_their_version_names(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engine hf shares the trainer's weights; pinned, it is given each step's adapter."""
    made = trainer(
        tmp_path, rows(ROWS), peft_config=LoraConfig(**LORA), max_steps=4, learning_rate=0.02, weight_sync=how
    )
    written = check_training(made, tmp_path / "kept", monkeypatch)
    assert [path.name for path in written] == ([] if how == "drain" else ["0", "1", "2", "3"])


def test_a_resumed_training_goes_on_with_the_adapter_of_its_checkpoint(tmp_path: Path) -> None:
    given: dict[str, Any] = {"learning_rate": 0.02, "save_strategy": "steps", "save_steps": 2, "max_steps": 3}
    trainer(tmp_path, rows(ROWS), peft_config=LoraConfig(**LORA), **given).train()
    again = trainer(tmp_path, rows(ROWS), peft_config=LoraConfig(**LORA), **given)
    checkpoint = tmp_path / "out" / "checkpoint-2"
    again.train(resume_from_checkpoint=str(checkpoint))
    (output,) = again.outputs
    check_logprobs(output, "sampling_per_token_logps", checkpoint)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="takes a PEFT model"):
        trainer(tmp_path, rows(ROWS), weight_sync="pinned")
    made = trainer(
        tmp_path, rows(ROWS), env=environment(tmp_path, "openvino"), peft_config=LoraConfig(**LORA)
    )
    with pytest.raises(ConfigError, match="'openvino' takes no LoRA adapters"):
        made.train()
