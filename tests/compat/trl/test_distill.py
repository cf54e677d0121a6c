"""On-policy distillation: a teacher's log-probs of each rollout go into the advantages of its tokens."""

import json
import shutil
from pathlib import Path
from statistics import median
from typing import Any

import pytest

pytest.importorskip("trl")

import torch

from rollstream.errors import ConfigError, GenerationFailedError, TrainingError
from rollstream.rollout.teachers import NAME, Teachers
from rollstream.store.run import Run
from rollstream.testing.stub_server import StubModel
from tests.compat.trl.parts import MODEL, Recording, load, rows, trainer
from tests.compat.trl.test_replay import assert_same, trained
from tests.compat.trl.test_store import crash
from tests.faults.runs import stub_in_thread

WARMTH = 0.6
"""By which the teacher's logits are the student's."""


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, less sure of itself."""
    folder = tmp_path_factory.mktemp("models") / "teacher"
    model, tokenizer = load()
    with torch.no_grad():
        model.lm_head.weight *= WARMTH
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    shutil.copy(MODEL / "tokenizer.json", folder)
    return folder


@pytest.fixture(scope="module")
def run(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Distillation without rewards, on 16 prompts."""
    made = trainer(
        tmp_path_factory.mktemp("run"),
        rows(16),
        eval_dataset=rows(4),
        max_steps=25,
        per_device_train_batch_size=32,
        num_generations=4,
        num_steps_async=0,
        learning_rate=5e-5,
        lr_scheduler_type="constant",
        teacher=str(teacher),
        distill_coef=0.5,
        reward_weights=[0.0],
    )
    made.train()
    return made


def logprobs_of(teacher: Path, output: dict[str, Any]) -> torch.Tensor:
    """By transformers alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32).eval()
    ids, mask = (
        torch.cat([output[f"prompt_{kind}"], output[f"completion_{kind}"]], dim=1) for kind in ("ids", "mask")
    )
    places = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask, position_ids=places).logits
    found = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return found[:, -output["completion_ids"].size(1) :]


def test_advantages_of_tokens_are_the_reverse_kl(run: Recording, teacher: Path) -> None:
    for output in (run.outputs[0], run.outputs[7]):
        mask = output["completion_mask"] * output["tool_mask"]
        wanted = 0.5 * (logprobs_of(teacher, output) - output["sampling_per_token_logps"]) * mask
        assert wanted.abs().max() > 0.01
        assert torch.allclose(output["advantages"], wanted, atol=1e-4)


def test_the_student_comes_to_its_teacher(run: Recording) -> None:
    logged = [entry for entry in run.state.log_history if "rollstream/teacher_k3" in entry]
    assert len(logged) == 25 and {entry["rollstream/untaught"] for entry in logged} == {0.0}
    k3 = [entry["rollstream/teacher_k3"] for entry in logged]
    assert median(k3[-8:]) < 0.6 * median(k3[:4])


def test_an_evaluation_asks_no_teacher(run: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    async def teach(self: Teachers, rollout: Any) -> None:
        raise AssertionError("nobody wants to know")

    monkeypatch.setattr(Teachers, "teach", teach)
    assert run.evaluate()["eval_rollstream/failed"] == 0


def test_it_is_added_to_the_advantages_of_rewards(teacher: Path, tmp_path: Path) -> None:
    """A ratio of 1 leaves the weights of a correction at 1: the first batch is sampled by the trainer's weights."""
    changed = {"max_steps": 1, "sampler_correction": "truncate", "teacher": str(teacher)}
    plain, taught = (
        trained(tmp_path / str(coef), rows(10), distill_coef=coef, **changed).outputs[0]
        for coef in (0.0, 0.5)
    )
    assert torch.equal(plain["completion_ids"], taught["completion_ids"])
    mask = plain["completion_mask"] * plain["tool_mask"]
    apart = logprobs_of(teacher, plain) - plain["sampling_per_token_logps"]
    assert plain["advantages"].abs().max() > 0
    assert torch.allclose(taught["advantages"], plain["advantages"] + 0.5 * apart * mask, atol=1e-3)


def test_a_restart_and_a_replay_ask_nobody_again(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, plain = list[tuple[int, int]](), Teachers._ask

    async def ask(self: Teachers, name: str, row: Any, repeat: int) -> Any:
        asked.append((row.index, repeat))
        return await plain(self, name, row, repeat)

    monkeypatch.setattr(Teachers, "_ask", ask)
    changed = {"max_steps": 4, "teacher": str(teacher), "distill_coef": 1.0, "num_steps_async": 0}
    broken = trainer(tmp_path, rows(30), **changed)
    crash(broken, 2)
    made = trainer(tmp_path, rows(30), **changed)
    made.train(resume_from_checkpoint=True)
    assert torch.equal(made.outputs[0]["advantages"], broken.outputs[0]["advantages"])
    assert sorted(asked) == sorted({*asked}) and len(asked) == 4 * 8
    store = tmp_path / "out" / "rollouts"
    assert None not in [one for table in Run.open(store).rows([], [NAME]) for one in table[0].to_pylist()]
    changed = {"max_steps": 4, "distill_coef": 1.0, "rollout_replay": str(store)}
    again = trained(tmp_path / "again", rows(30), **changed)
    assert len(asked) == 4 * 8
    assert_same(made, again)
    for mine, theirs in zip(made.outputs, again.outputs, strict=True):
        assert torch.equal(mine["advantages"], theirs["advantages"])


def test_a_batch_that_nobody_could_teach_ends_the_training(tmp_path: Path) -> None:
    with stub_in_thread(model=StubModel(str(MODEL), context_length=12)) as server:
        made = trainer(tmp_path, rows(10), teacher=server.url, distill_coef=1.0)
        with pytest.raises(TrainingError, match=r"none of the batch's 8 rollouts .* max_model_len 12"):
            made.train()
    trained(tmp_path / "plain", rows(10), max_steps=1)
    store = str(tmp_path / "plain" / "out" / "rollouts")
    with pytest.raises(TrainingError, match="made without one"):
        trained(tmp_path / "again", rows(10), distill_coef=1.0, rollout_replay=store)


def test_what_does_not_go_together_is_refused(teacher: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a teacher"):
        trainer(tmp_path, rows(10), distill_coef=1.0)
    several = trainer(tmp_path, rows(10), teacher='{"a": "x", "b": "y"}')
    assert several.args.teacher == {"a": "x", "b": "y"}
    other = tmp_path / "other"
    shutil.copytree(teacher, other)
    content = json.loads((other / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    first, second, *_ = (token for token, number in vocabulary.items() if number > 300)
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises((ConfigError, GenerationFailedError), match="another vocabulary"):
        trainer(tmp_path, rows(10), teacher=str(other), distill_coef=1.0).train()
