"""Several trajectories a rollout: the loop edits its context, and each trajectory is a row."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

import torch

from examples.edit_context import train as example
from rollstream.integrations.trl.rows import BatchRows
from tests.compat.trl.parts import Recording, load, settings
from tests.compat.trl.ranks_main import PROBLEMS


@pytest.fixture(scope="module")
def edits() -> Any:
    """A model that deletes in about half of its rollouts, and its tokenizer."""
    model, tokenizer = load()
    torch.manual_seed(0)
    example.show(model, tokenizer, PROBLEMS, 75, share=0.5, at_once=6)
    return model.state_dict()


class Snapshots(Recording):
    """Notes the rollouts of each batch."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.taken: list[BatchRows] = []

    def _take_batch(self) -> Any:
        indices, rows = super()._take_batch()
        self.taken.append(rows)
        return indices, rows


def make(folder: Path, weights: Any, *words: str, **changed: Any) -> Snapshots:
    folder.mkdir(exist_ok=True)
    model, tokenizer = load()
    model.load_state_dict(weights)
    words = ("actor_rollout_ref.rollout.name=hf", *words)
    return Snapshots(
        model,
        example.environment(folder, *words),
        settings(folder, **{"max_completion_length": 64, "num_generations": 4, **changed}),
        train_dataset=example.dataset(PROBLEMS),
        processing_class=tokenizer,
    )


@pytest.fixture(scope="module")
def made(edits: Any, tmp_path_factory: Any) -> Snapshots:
    """One batch in three steps, which change nothing."""
    trainer = make(
        tmp_path_factory.mktemp("run"),
        edits,
        max_steps=3,
        steps_per_generation=3,
        per_device_train_batch_size=4,
        loss_type="dapo",
        beta=0.1,
        learning_rate=0.0,
    )
    trainer.train()
    return trainer


def test_each_trajectory_is_a_row(made: Snapshots) -> None:
    (output,), (rows,) = made.outputs, made.taken
    count, snapshots = len(output["advantages"]), rows.snapshots
    assert snapshots and count >= 12 + len(snapshots) and count % 3 == 0
    assert {len(value) for value in output.values() if value.ndim} == {count}
    for place, one in enumerate(snapshots, start=12):
        ids = output["completion_ids"][place][output["completion_mask"][place] == 1].tolist()
        assert ids == one.row.completion_ids
        # Scored by the outcome: TRL's own advantage of the rollout.
        assert output["advantages"][place] == pytest.approx(
            float(output["advantages"][one.rollout]), abs=1e-4
        )
    mask = output["completion_mask"] * output["tool_mask"]
    assert not mask[12 + len(snapshots) :].any()  # rows that fill up
    assert int(output["num_items_in_batch"]) == int(mask.sum())
    # All are where the sampler and the reference had them.
    for model, then in ((made.model, "sampling_per_token_logps"), (made.ref_model, "ref_per_token_logps")):
        assert ((made._logprobs_of(model, output) - output[then]) * mask).abs().max() < 1e-3
    logged = next(entry for entry in made.state.log_history if "rollstream/trajectories" in entry)
    assert logged["rollstream/trajectories"] == pytest.approx((12 + len(snapshots)) / 12)
    assert logged["rollstream/tool_calls"] > 0


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "sapo", "luspo", "dapo", "cispo"])
def test_rows_that_fill_up_have_no_weight_in_any_loss(
    loss_type: str, made: Snapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient over all micro-steps of a batch is that of its trajectories alone, in one step."""
    (output,) = made.outputs
    made.model.train()
    monkeypatch.setattr(made, "loss_type", loss_type)
    monkeypatch.setattr(made.args, "steps_per_generation", 3)
    count, trained = len(output["advantages"]), made.taken[0].trained
    torch.manual_seed(0)
    output = {**output, "advantages": torch.randn(count)}

    def gradient(parts: list[dict[str, Any]], accumulated: int) -> torch.Tensor:
        made.current_gradient_accumulation_steps = made.args.steps_per_generation = accumulated
        made.model.zero_grad()
        for part in parts:
            made._compute_loss(made.model, part).backward()
        found: torch.Tensor = made.model.lm_head.weight.grad.clone()
        made.model.zero_grad()
        return found

    def rows(part: slice) -> dict[str, Any]:
        return {name: value[part] if value.ndim else value for name, value in output.items()}

    size = count // 3
    split = gradient([rows(slice(begin, begin + size)) for begin in range(0, count, size)], 3)
    real = rows(slice(0, trained))
    real.pop("row_scale", None)
    assert torch.allclose(split, gradient([real], 1), rtol=1e-3, atol=1e-6)
