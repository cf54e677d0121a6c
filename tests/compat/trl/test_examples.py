"""`sft` and `preference` exports in TRL's trainers: their columns, and a step of training on them."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from datasets import load_dataset
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from rollstream.store.export.examples import SftOptions, export_preference, export_sft
from tests.compat.trl.parts import load
from tests.support.chats import chat_artifact


def step(trainer_class: Any, config_class: Any, rows: Any, folder: Path) -> Any:
    """A trainer after one step on three rows; the step has changed the model."""
    model, tokenizer = load()
    before = model.model.embed_tokens.weight.detach().clone()
    args = config_class(
        output_dir=str(folder / "out"),
        **{"max_steps": 1, "per_device_train_batch_size": 3, "learning_rate": 1e-3, "max_length": 512},
        **{"use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no", "disable_tqdm": True},
    )
    trainer = trainer_class(model=model, args=args, train_dataset=rows, processing_class=tokenizer)
    assert trainer.train().training_loss > 0
    assert not (model.model.embed_tokens.weight == before).all()
    return trainer


def read(path: Path) -> Any:
    return load_dataset("json", data_files=str(path), split="train", cache_dir=str(path.parent / "cache"))


@pytest.mark.parametrize("tokens", [False, True])
def test_sft_trainer_takes_messages_and_exact_tokens(tmp_path: Path, tokens: bool) -> None:
    made = export_sft(
        chat_artifact(tmp_path / "a"), tmp_path / "x.jsonl", SftOptions(best=1, min_reward=1.0, tokens=tokens)
    )
    rows = read(tmp_path / "x.jsonl")
    assert len(rows) == made == 3
    trainer = step(SFTTrainer, SFTConfig, rows, tmp_path)
    if tokens:  # TRL's labels are the sampled tokens, those ids and no others
        for given, prepared in zip(rows, trainer.train_dataset, strict=True):
            wanted = zip(given["input_ids"], given["assistant_masks"], strict=True)
            assert prepared["labels"] == [token if mask else -100 for token, mask in wanted]


def test_dpo_trainer_takes_pairs(tmp_path: Path) -> None:
    assert export_preference(chat_artifact(tmp_path / "a"), tmp_path / "x.jsonl") == 3
    rows = read(tmp_path / "x.jsonl")
    trainer = step(DPOTrainer, DPOConfig, rows, tmp_path)
    decode = trainer.processing_class.decode
    shown = [(decode(row["prompt_ids"]), decode(row["chosen_ids"])) for row in trainer.train_dataset]
    assert "1 + 2 =" in shown[0][0] and shown[0][1].startswith("3")
    assert "calculator" in shown[2][1] and "42" in shown[2][1]
