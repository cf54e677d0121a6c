"""Several trajectories a rollout: the loop edits its context, and each trajectory is a row."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

import torch

from examples.edit_context import train as example
from examples.training import show
from rollstream.integrations.trl.rows import BatchRows
from rollstream.store.run import Run
from rollstream.trajectory import sampled_stretches
from tests.compat.trl.parts import Recording, load, settings
from tests.compat.trl.ranks_main import PROBLEMS


@pytest.fixture(scope="module")
def edits() -> Any:
    """A model that deletes in about half of its rollouts, and its tokenizer."""
    model, tokenizer = load()
    torch.manual_seed(0)
    show(model, tokenizer, PROBLEMS, example.chats, 75, share=0.5, at_once=6)
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


STEPS = """
def compute_score(data_source, solution_str, ground_truth, extra_info, trajectory):
    turns = [ids for _, ids in trajectory.generations()]
    tokens = [float(token) for token in trajectory.response_ids]
    return {"score": 0.0, "steps": [float(len(ids)) for ids in turns], "tokens": tokens}
"""


def test_step_and_token_rewards_are_advantages_of_tokens(edits: Any, tmp_path: Path) -> None:
    """All scores are equal, so what is left is what turns and tokens add."""
    (tmp_path / "steps.py").write_text(STEPS)
    words = (
        f"custom_reward_function.path={tmp_path / 'steps.py'}",
        "custom_reward_function.name=compute_score",
    )
    trainer = make(
        tmp_path / "run",
        edits,
        *words,
        max_steps=1,
        step_reward_weight=2.0,
        step_reward_gamma=0.0,
        token_reward_weight=0.001,
        scale_rewards="none",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=3,
        sampler_correction="truncate",
    )
    trainer.train()
    (output,), (rows,) = trainer.outputs, trainer.taken
    assert rows.snapshots and output["advantages"].shape == output["completion_ids"].shape
    ids, mask = rows.fields["completion_ids"], rows.fields["env_mask"]
    lengths = [[end - start for start, end in sampled_stretches(one)] for one in mask]
    compared = 0
    for place, own in enumerate(lengths):
        group = lengths[place - place % 4 :][:4]
        begins = [start for start, _ in sampled_stretches(mask[place])]
        for number, (start, length) in enumerate(zip(begins, own, strict=True)):
            same = [one[number] for one in group if len(one) > number]
            wanted = 2.0 * (length - sum(same) / len(same)) + 0.001 * ids[place][start]
            assert float(output["advantages"][place][start]) == pytest.approx(wanted, rel=0.05, abs=1e-3)
            compared += length != sum(same) / len(same)
    assert compared
    store = Run.open(tmp_path / "run" / "out" / "rollouts")
    kept = [row for table in store.rows(["is_snapshot"], ["step_rewards"]) for row in table.to_pylist()]
    assert kept and all((row["stream.step_rewards"] is None) == row["is_snapshot"] for row in kept)
    # Snapshots have the outcome's reward, without steps of their own.
    assert not output["advantages"][12 : 12 + len(rows.snapshots)].any()
