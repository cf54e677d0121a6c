"""A training again from its store: the same weights, without an engine."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

import torch
from datasets import Dataset

from rollstream.errors import ConfigError
from rollstream.integrations.trl.groups import EnvironmentGroups
from rollstream.rollout.worker import RolloutWorker, make_failure
from tests.compat.trl.parts import Recording, environment, load, rows, trainer
from tests.compat.trl.test_snapshots import PROBLEMS, edits, example, make

__all__ = ["edits"]  # a fixture


def weights(made: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in made.model.state_dict().items()}


def assert_same(made: Any, again: Any) -> None:
    mine, theirs = weights(made), weights(again)
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
    assert again.trained_rows == made.trained_rows


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first training on."""

    async def start(self: EnvironmentGroups) -> None:
        raise AssertionError("no engine is needed")

    monkeypatch.setattr(EnvironmentGroups, "start", start)


def trained(folder: Path, dataset: Any, **changed: Any) -> Recording:
    folder.mkdir()
    made = trainer(folder, dataset, **changed)
    made.train()
    return made


def again(folder: Path, dataset: Any, store: Path, **changed: Any) -> Recording:
    return trained(folder, dataset, rollout_replay=str(store), **changed)


def with_a_failure() -> Any:
    """One prompt of eight is too long."""
    examples = rows(8).to_list()
    examples[5]["prompt"] = [{"role": "user", "content": "1 + 1 " * 400}]
    return Dataset.from_list(examples)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Six batches, one ahead, with a checkpoint in their middle, a failed group and a group with a failed rollout."""
    folder, plain = tmp_path_factory.mktemp("first") / "made", RolloutWorker.run

    async def run(self: RolloutWorker, row: Any, repeat: int, **more: Any) -> Any:
        if (row.index, repeat) == (2, 1):
            return make_failure(row.index, repeat, row.prompt_key, 1, "agent", ValueError("never"))
        return await plain(self, row, repeat, **more)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RolloutWorker, "run", run)
        return trained(folder, with_a_failure(), max_steps=6, save_strategy="steps", save_steps=4)


def store_of(made: Recording) -> Path:
    return Path(made.args.output_dir) / "rollouts"


@pytest.mark.usefixtures("no_engine")
def test_the_same_weights_bit_for_bit(tmp_path: Path, first: Recording) -> None:
    assert not torch.equal(first.model.lm_head.weight, load()[0].lm_head.weight)
    for ahead in (1, 0):
        made = again(
            tmp_path / str(ahead), with_a_failure(), store_of(first), max_steps=6, num_steps_async=ahead
        )
        assert_same(first, made)
        assert [e.get("loss") for e in made.state.log_history] == [
            e.get("loss") for e in first.state.log_history
        ]
        failed = [e["rollstream/failed"] for e in made.state.log_history if "rollstream/failed" in e]
        assert sum(failed) == 2 * 3 + 1
        assert not (tmp_path / str(ahead) / "out" / "rollouts").exists()


@pytest.mark.usefixtures("no_engine")
def test_from_a_checkpoint_and_no_further_than_the_store(tmp_path: Path, first: Recording) -> None:
    changed = {"max_steps": 9, "lr_scheduler_type": "constant", "rollout_replay": str(store_of(first))}
    made = trainer(tmp_path, with_a_failure(), **changed)
    made.train(resume_from_checkpoint=str(store_of(first).parent / "checkpoint-4"))
    assert made.state.global_step == 6 and made.trained_rows == first.trained_rows[4:]


def test_another_loss_trains_on_the_same_rollouts(tmp_path: Path, first: Recording) -> None:
    made = again(
        tmp_path / "other", with_a_failure(), store_of(first), max_steps=6, loss_type="grpo", beta=0.1
    )
    for mine, theirs in zip(made.outputs, first.outputs, strict=True):
        assert torch.equal(mine["completion_ids"], theirs["completion_ids"])
    assert not torch.equal(made.model.lm_head.weight, first.model.lm_head.weight)
    assert 0 <= made.evaluate(rows(8))["eval_reward"] <= 1  # outside of the training, with an engine


def test_snapshots(tmp_path: Path, edits: Any) -> None:
    changed = {"max_steps": 2, "per_device_train_batch_size": 4, "steps_per_generation": 1}
    made = make(tmp_path / "made", edits, **changed)
    made.train()
    assert any(taken.snapshots for taken in made.taken) and example.dataset(PROBLEMS)
    replayed = make(tmp_path / "again", edits, **changed, rollout_replay=str(store_of(made)))
    replayed.train()
    assert_same(made, replayed)


def test_what_is_refused(tmp_path: Path, first: Recording) -> None:
    store = store_of(first)
    with pytest.raises(ConfigError, match="evaluate when it has ended"):
        again(tmp_path / "eval", rows(8), store, eval_strategy="steps", eval_steps=1)
    with pytest.raises(
        ConfigError, match="have 4 prompts and 2 rollouts of each, those of this training 2 and 4"
    ):
        again(tmp_path / "size", rows(8), store, num_generations=4)
    with pytest.raises(ConfigError, match="prompt row 5 is another one than at step"):
        again(tmp_path / "rows", rows(8), store)
    with pytest.raises(ConfigError, match=r"prompt row . is another one than at step"):
        again(tmp_path / "fewer", with_a_failure().select(range(4)), store)
    (tmp_path / "template").write_text("{{ messages[0].content }}")
    words = [f"actor_rollout_ref.model.custom_chat_template={tmp_path / 'template'}"]
    with pytest.raises(ConfigError, match="another tokenizer or chat template"):
        again(tmp_path / "other", with_a_failure(), store, env=environment(tmp_path, "hf", *words))
