"""`GRPOEnvTrainer` on the real TRL: which prompts, which log-probs, what survives a stop, what is logged."""

import asyncio
import itertools
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

pytest.importorskip("trl")

import torch
from accelerate import Accelerator
from datasets import Dataset
from transformers import IntervalStrategy, TrainerCallback
from trl import GRPOConfig

from rollstream import mismatch
from rollstream.agent.single_turn import SingleTurnAgent
from rollstream.errors import ConfigError, GenerationFailedError, WeightUpdateError
from rollstream.integrations.trl import GRPOEnvTrainer, RolloutEnvironment, groups
from rollstream.integrations.trl.checkpoints import STATE_FILE
from rollstream.integrations.trl.groups import EnvironmentGroups
from rollstream.view.sources import TrainingSource
from tests.compat.trl.parts import (
    MODEL,
    TOOLS,
    Recording,
    environment,
    load,
    numbers_of,
    rows,
    settings,
    trainer,
)
from tests.support.until import wait_until

ROWS = 10


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Six batches over three epochs of two, one ahead, a checkpoint every second step."""
    folder = tmp_path_factory.mktemp("run")
    made = trainer(folder, rows(ROWS), max_steps=6, save_strategy="steps", save_steps=2)
    made.train()
    return made


def test_prompts_are_those_that_trl_itself_would_train(run: Any) -> None:
    assert len(run.sampled_prompts) == 6
    assert run.given_prompts == run.sampled_prompts


def test_batches_are_ahead_and_never_staler_than_allowed(run: Any) -> None:
    histogram = run.step_times.histogram
    assert histogram[1] > 0 and max(histogram) == 1
    assert sum(histogram.values()) == 6 * 4


def test_what_is_logged(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    logged = [entry for entry in run.state.log_history if "rollstream/wait_s" in entry]
    assert len(logged) == 6
    for entry, step in zip(logged, run.step_times.steps, strict=True):  # each row is of one batch, TRL's too
        assert "reward" in entry and entry["step"] == step.step + 1
        assert entry["rollstream/wait_s"] == step.wait_s
        assert entry["rollstream/staleness_1"] == step.staleness.count(1) / 4
        assert entry["rollstream/staleness_mean"] == sum(step.staleness) / 4
        assert 0 < entry["rollstream/step_s"] <= step.total_s
        assert entry["rollstream/unscored"] == entry["rollstream/failed"] == 0
    assert [entry["rollstream/weights_s"] > 0 for entry in logged] == [True] * 5 + [False]
    for name in ("train_s", "generation_s", "queue_s", "weights_s", "staleness_max", "trainer_idle"):
        assert all(math.isfinite(entry[f"rollstream/{name}"]) for entry in logged)
    assert logged[-1]["rollstream/staleness_0"] + logged[-1]["rollstream/staleness_1"] == pytest.approx(1)
    assert "waiting for the batch" in run.step_times.table()


def test_groups_behind_each_step_are_noted(run: Any) -> None:
    source = TrainingSource("run", run.args.output_dir)
    logged = [entry for entry in run.state.log_history if "rollstream/wait_s" in entry]
    for entry, trained in zip(logged, run.trained_rows, strict=True):
        groups = source.groups(entry["step"] - 1, entry["step"])
        assert [group["index"] for group in groups] == trained[::2]
        assert fmean(group["mean"] for group in groups) == pytest.approx(entry["reward"])
        assert max(group["staleness"] for group in groups) == entry["rollstream/staleness_max"]
        for group in groups:
            assert group["prompt"] == run.train_dataset[group["index"]]["prompt"][-1]["content"]
            assert (group["n"], group["scored"], group["failed"]) == (2, 2, 0)


def test_the_first_batch_is_sampled_by_the_trainers_own_weights(run: Any) -> None:
    """Before any step the trainer's log-probs are the sampler's, to rounding."""
    output = run.outputs[0]
    assert torch.equal(output["old_per_token_logps"], output["sampling_per_token_logps"])
    first = next(entry for entry in run.state.log_history if "loss" in entry)
    assert first["clip_ratio/region_mean"] == 0


@pytest.mark.parametrize("checkpoint", [2, 4])
def test_a_resumed_run_trains_the_prompts_that_are_owed(run: Any, checkpoint: int, tmp_path: Path) -> None:
    folder = Path(run.args.output_dir) / f"checkpoint-{checkpoint}"
    resumed = trainer(tmp_path, rows(ROWS), max_steps=6)
    resumed.train(resume_from_checkpoint=str(folder))
    assert run.trained_rows[:checkpoint] + resumed.trained_rows == run.trained_rows


def test_a_resume_that_did_not_start_leaves_nothing_behind(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next training without a checkpoint begins with the first prompts."""
    made = trainer(tmp_path, rows(ROWS), max_steps=3)

    async def away(self: EnvironmentGroups) -> None:
        raise ConnectionError("the server is not up yet")

    with monkeypatch.context() as patched:
        patched.setattr(EnvironmentGroups, "start", away)
        with pytest.raises(ConnectionError, match="not up yet"):
            made.train(resume_from_checkpoint=str(Path(run.args.output_dir) / "checkpoint-2"))
    made.train()
    assert made.trained_rows == run.trained_rows[:3]


def test_a_checkpoint_that_says_nothing_of_prompts_is_refused(run: Any, tmp_path: Path) -> None:
    made = trainer(tmp_path, rows(ROWS), max_steps=6)
    folder = Path(run.args.output_dir) / "checkpoint-6"
    (folder / STATE_FILE).unlink()
    with pytest.raises(ConfigError, match=STATE_FILE):
        made.train(resume_from_checkpoint=str(folder))


def test_another_dataset_is_refused_on_resume(run: Any, tmp_path: Path) -> None:
    made = trainer(tmp_path, rows(ROWS + 3), max_steps=6)
    checkpoint = str(Path(run.args.output_dir) / "checkpoint-2")
    with pytest.raises(ConfigError, match="rows"):
        made.train(resume_from_checkpoint=checkpoint)
    others = rows(ROWS).map(lambda row: {"prompt": [{"role": "user", "content": "2 + 2 ="}]})
    with pytest.raises(ConfigError, match="another dataset"):
        trainer(tmp_path, others, max_steps=6).train(resume_from_checkpoint=checkpoint)


def test_a_finished_training_that_is_resumed_returns_at_once(tmp_path: Path) -> None:
    saved = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2, "group_filter": "no_signal"}
    trainer(tmp_path, rows(ROWS), **saved).train()
    resumed = trainer(tmp_path, rows(ROWS), **saved)
    assert resumed.train(resume_from_checkpoint=True).global_step == 2
    assert resumed.trained_rows == [] and resumed.batches is None


@pytest.mark.parametrize(
    ("correction", "shift", "weight"),
    [
        ("ratio", 0.1, math.exp(-0.1)),
        ("none", 0.1, 1.0),
        ("truncate", -0.5, math.exp(0.5)),
        ("truncate", -1.0, 2.0),  # e, capped at 2
        ("mask", 0.5, math.exp(-0.5)),
        ("mask", -1.0, 0.0),  # e, out of range
    ],
)
def test_what_a_correction_does_to_the_gradient(
    run: Any, monkeypatch: pytest.MonkeyPatch, correction: str, shift: float, weight: float
) -> None:
    """All ratios are 1 but for the shift, so every token's loss is scaled alike."""
    Accelerator()  # settings without a trainer, as tests before this one have made, leave none
    output = {**run.outputs[0]}
    output.pop("old_per_token_logps")
    output["advantages"] = torch.linspace(-1, 1, len(output["advantages"]))
    output["sampling_per_token_logps"] = run._logprobs_of(
        run.model, output
    )  # sampled by the weights as they are now

    def gradient(shifted: float) -> torch.Tensor:
        moved = {**output, "sampling_per_token_logps": output["sampling_per_token_logps"] + shifted}
        run.model.zero_grad()
        run._compute_loss(run.model, run._use_sampler_logprobs(moved)).backward()
        found: torch.Tensor = run.model.lm_head.weight.grad.clone()
        run.model.zero_grad()
        return found

    run.model.train()
    run.current_gradient_accumulation_steps = 1
    monkeypatch.setattr(run.args, "sampler_correction", "none")
    plain = gradient(0.0)
    monkeypatch.setattr(run.args, "sampler_correction", correction)
    assert plain.abs().max() > 0
    assert torch.allclose(gradient(shift), weight * plain, rtol=1e-3, atol=1e-6)


def test_the_sampler_is_compared_with_the_trainer(run: Any) -> None:
    """The engine has the trainer's own weights: apart are those that a step has changed meanwhile."""
    logged = [entry for entry in run.state.log_history if "rollstream/wait_s" in entry]
    assert abs(logged[0]["rollstream/kl_k3"]) < 1e-9
    assert logged[0]["rollstream/kl_mean_difference"] < 1e-4 > logged[0]["rollstream/kl_beyond_bound"]
    assert any(entry["rollstream/kl_k3"] > 1e-9 for entry in logged[1:])


def test_the_comparison_is_that_of_audit_and_costs_no_forward(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Accelerator()
    output, plain, forwards = {**run.outputs[0]}, run._forward, []
    output["sampling_per_token_logps"] = run._logprobs_of(run.model, output) - 0.3
    output["sampling_per_token_logps"][output["completion_mask"] == 0] = 7.0
    monkeypatch.setattr(run, "_forward", lambda *a, **k: forwards.append(1) or plain(*a, **k))
    monkeypatch.setattr(run, "_mismatch", run._mismatch * 0)
    run.current_gradient_accumulation_steps = 1
    run.model.train()
    run._compute_loss(run.model, output)
    found = mismatch.means_of(run._mismatch)
    assert len(forwards) == 1 and run._mismatch[0] == (output["completion_mask"] * output["tool_mask"]).sum()
    assert found["k1"] == pytest.approx(-0.3, abs=1e-4)
    assert found["k3"] == pytest.approx(math.exp(0.3) - 1.3, abs=1e-4)
    assert (found["beyond_bound"], found["ratio_beyond"]) == (1, 0)
    run.model.eval()  # an evaluation is none of it
    run._compute_loss(run.model, output)
    assert mismatch.means_of(run._mismatch) == found


def test_tool_tokens_are_context(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    tools = f"actor_rollout_ref.rollout.multi_turn.function_tool_path={tmp_path / 'tools.py'}"
    made = trainer(
        tmp_path,
        rows(8, agent="tool_agent"),
        env=environment(tmp_path, "hf", tools),
        max_steps=1,
        max_completion_length=128,
    )
    made.train()
    output = made.outputs[0]
    mask = output["completion_mask"] * output["tool_mask"]
    context = (output["completion_mask"] == 1) & (output["tool_mask"] == 0)
    assert context.any() and mask.any()
    with torch.no_grad():
        output = {**output, "advantages": torch.ones_like(output["advantages"])}
        loss = made._compute_loss(made.model, output)
        moved = {**output, "old_per_token_logps": output["old_per_token_logps"] + 3.0 * context}
        assert torch.equal(made._compute_loss(made.model, moved), loss)
        moved = {**output, "old_per_token_logps": output["old_per_token_logps"] + 0.1 * mask}
        assert not torch.equal(made._compute_loss(made.model, moved), loss)


def test_a_failure_of_generation_ends_the_training_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, calls = EnvironmentGroups.generate, itertools.count()

    async def generate(self: EnvironmentGroups, group: Any) -> Any:
        if next(calls) >= 6:
            raise ValueError("the tool shop is closed")
        return await plain(self, group)

    monkeypatch.setattr(EnvironmentGroups, "generate", generate)
    made = trainer(tmp_path, rows(ROWS), max_steps=50)
    with pytest.raises(GenerationFailedError, match="the tool shop is closed") as failure:
        made.train()
    assert isinstance(failure.value.__cause__, ValueError)
    assert not made.batches.alive


@pytest.mark.parametrize("during", ["a step", "an evaluation"])
def test_a_failure_while_nobody_waits_for_a_batch_has_its_cause(
    during: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's loop ends while the trainer computes, or while it waits for something else of the loop."""
    plain, run_rows, begun = EnvironmentGroups.generate, EnvironmentGroups.run_rows, asyncio.Event()

    async def generate(self: EnvironmentGroups, group: Any) -> Any:
        if group.position < 4:
            return await plain(self, group)
        while not begun.is_set():
            await asyncio.sleep(0.01)
        raise ValueError("the tool shop is closed")

    async def evaluate(self: EnvironmentGroups, rows: Any) -> Any:
        begun.set()
        await asyncio.Event().wait()
        return await run_rows(self, rows)

    monkeypatch.setattr(EnvironmentGroups, "generate", generate)
    monkeypatch.setattr(EnvironmentGroups, "run_rows", evaluate)
    changed = {"eval_strategy": "steps", "eval_steps": 1} if during == "an evaluation" else {}
    made = trainer(tmp_path, rows(ROWS), eval_dataset=rows(4), max_steps=3, **changed)
    compute_loss = made.compute_loss

    def slow(*arguments: Any, **keywords: Any) -> Any:
        if during == "a step":
            begun.set()
            wait_until(lambda: not made.batches.alive, "its end")
        return compute_loss(*arguments, **keywords)

    made.compute_loss = slow
    with pytest.raises(GenerationFailedError, match="the tool shop is closed") as failure:
        made.train()
    assert isinstance(failure.value.__cause__, ValueError)


def test_a_rollout_that_hangs_does_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does one that waits for its turn: only rollouts that have begun have a limit, not their groups."""
    plain, hung = SingleTurnAgent.run, []

    async def run(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if not hung:
            hung.append(1)
            await asyncio.Event().wait()
        return await plain(self, *arguments, **keywords)

    monkeypatch.setattr(SingleTurnAgent, "run", run)
    monkeypatch.setattr(groups, "ROLLOUT_SHARE", 5 / 300)
    made = trainer(tmp_path, rows(ROWS))
    made.train()
    assert made.state.global_step == 3 and hung
    assert sum(entry.get("rollstream/failed", 0) for entry in made.state.log_history) >= 1
    assert made._groups._rollout_timeout == 5
    own = trainer(tmp_path, rows(ROWS), env=environment(tmp_path, "hf", "generation.attempt_timeout=50"))
    assert own._make_groups()._rollout_timeout is None


def test_a_reward_that_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = environment(tmp_path)
    calls, begun = tmp_path / "calls", list[Any]()
    calls.touch()
    (tmp_path / "reward.py").write_text(
        "import asyncio\nasync def compute_score(**_):\n"
        f"    with open({str(calls)!r}, 'a') as file:\n        file.write('x')\n"
        "    await asyncio.Event().wait()\n"
    )

    async def within(running: Any, seconds: float, availability: Any) -> Any:
        """Its time ends when all that were begun hang in their rewards, however slow the machine is."""
        begun.append(task := asyncio.ensure_future(running))
        try:
            while len(calls.read_bytes()) < len(begun):
                await asyncio.sleep(0.01)
            raise TimeoutError
        finally:
            task.cancel()
            await asyncio.wait([task])

    monkeypatch.setattr(groups, "within", within)
    monkeypatch.setattr(groups, "ROLLOUT_SHARE", 1 / 300)
    made = trainer(tmp_path, rows(ROWS), env=env, max_failed_groups=0)
    with pytest.raises(
        GenerationFailedError, match="cut off in its reward function: it took longer than 1 s"
    ):
        made.train()


def test_a_rollout_that_failed_is_not_trained_on(tmp_path: Path) -> None:
    """One prompt of eight is too long: it has no part in any mean, also not by TRL's reward functions."""
    examples = rows(8).to_list()
    examples[5]["prompt"] = [{"role": "user", "content": "1 + 1 " * 400}]
    dataset = Dataset.from_list(examples)

    def one(completions: Any, **_: Any) -> list[float]:
        return [1.0] * len(completions)

    made = trainer(
        tmp_path,
        dataset,
        eval_dataset=dataset,
        reward_funcs=one,
        max_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        per_device_eval_batch_size=16,
        beta=0.1,
    )
    made.train()
    logged = [entry["rollstream/failed"] for entry in made.state.log_history if "rollstream/failed" in entry]
    assert sum(logged) == 2
    assert next(e for e in made.state.log_history if "eval_reward" in e)["eval_rollstream/failed"] == 2
    for output in made.outputs:
        masked = (output["completion_mask"] * output["tool_mask"]).sum(1) == 0
        assert not output["advantages"][masked].any()
    rewards = [e["rewards/one/mean"] for e in made.state.log_history if "rewards/one/mean" in e]
    assert rewards == [1.0, 1.0]
    made.args.max_failed_groups, made.args.eval_strategy = 0, IntervalStrategy.NO
    with pytest.raises(GenerationFailedError, match=r"1 groups in a row failed whole .* of row 5: .* tokens"):
        made.train()


def test_columns_of_the_users_own_are_no_matter(tmp_path: Path) -> None:
    """Images of which there are none, and one whose name is also a word of ours."""
    data = rows(ROWS).add_column("images", [None] * ROWS).add_column("row", list(range(ROWS)))
    made = trainer(
        tmp_path, data, eval_dataset=data.select(range(8)), max_steps=1, per_device_eval_batch_size=8
    )
    made.train()
    assert made.state.global_step == 1 and 0 <= made.evaluate()["eval_reward"] <= 1


def test_rows_to_evaluate_are_looked_at_before_training(tmp_path: Path) -> None:
    data = rows(4)
    with pytest.raises(ConfigError, match="have images"):
        trainer(tmp_path, rows(ROWS), eval_dataset={"a": data.add_column("images", [["a.png"]] * 4)})
    made = trainer(tmp_path, rows(ROWS), eval_dataset=rows(4, agent="nobodys"), max_steps=1)
    with pytest.raises(ConfigError, match="nobodys"):
        made.train()


def test_weights_reach_an_engine_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """openvino has its own copy: what it samples for steps and evaluations has the trainer's log-probs."""
    made = trainer(
        tmp_path,
        rows(ROWS),
        env=environment(tmp_path, "openvino"),
        eval_dataset=rows(8),
        max_steps=2,
        learning_rate=3e-3,
        weight_decay=30.0,  # changes weights also where all rewards of a step happen to be equal
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=8,
    )
    sampled = numbers_of(monkeypatch)
    pushed: list[tuple[Path, bool]] = []
    update = EnvironmentGroups.update_weights

    async def note(self: EnvironmentGroups, source: str, version: int) -> None:
        # A server that is started again meanwhile reads what the engine has.
        pushed.append((Path(source), not pushed or pushed[-1][0].exists()))
        await update(self, source, version)

    monkeypatch.setattr(EnvironmentGroups, "update_weights", note)
    seen = []
    plain = made._use_sampler_logprobs

    def compare(output: Any) -> Any:
        mask = output["completion_mask"]
        seen.append(
            ((made._logprobs_of(made.model, output) - output["sampling_per_token_logps"]) * mask).abs().max()
        )
        return plain(output)

    made._use_sampler_logprobs = compare
    made.args.num_steps_async = 0
    made.train()
    assert len(seen) == 2 + 2 * 2 and max(seen) < 1e-3  # two evaluations of two batches
    assert len(pushed) == 3 and all(stands for _, stands in pushed)
    # Both evaluations have the same numbers, and no rollout of the training has one of them.
    times = Counter(Counter(sampled).values())
    assert times == {1: 16, 2: 16}
    assert not torch.allclose(made.model.lm_head.weight, load()[0].lm_head.weight, atol=1e-3)


def test_an_evaluation_outside_of_a_training_has_one_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leaves no weights behind; nor does a training whose engine cannot start."""
    plain, started = EnvironmentGroups.start, []

    async def start(self: EnvironmentGroups) -> None:
        started.append(self)
        await plain(self)

    monkeypatch.setattr(EnvironmentGroups, "start", start)
    changed = {"per_device_eval_batch_size": 8, "weights_dir": str(tmp_path)}
    made = trainer(
        tmp_path, rows(ROWS), env=environment(tmp_path, "openvino"), eval_dataset=rows(8), **changed
    )
    found = made.evaluate()
    assert len(made.outputs) == 2 and len(started) == 1
    # The figures of `rollstream eval`: two rollouts of each row are those of one prompt.
    mean = found["eval_rollstream/reward"]
    assert mean == pytest.approx(found["eval_reward"]) == found["eval_rollstream/pass_at_1"]
    assert found["eval_rollstream/rollouts"] == 16 and found["eval_rollstream/pass_at_2"] >= mean
    assert found.items() >= {"eval_rollstream/failure_rate": 0.0, "eval_rollstream/truncated": 0.0}.items()
    made.args.weight_sync_timeout = 1e-6
    with pytest.raises(WeightUpdateError, match="0 s"):
        made.evaluate()
    cannot = environment(tmp_path, "openvino", "actor_rollout_ref.rollout.engine_kwargs={nosuch: 1}")
    with pytest.raises(ConfigError, match="nosuch"):
        trainer(tmp_path, rows(ROWS), env=cannot, **changed).train()
    assert not list(tmp_path.glob("rollstream-*"))


class Colder(SingleTurnAgent):
    """Samples otherwise than the trainer says."""

    async def run(self, sampling: Any, **row: Any) -> Any:
        return await super().run(replace(sampling, temperature=0.3, top_k=3), **row)


def test_a_loop_that_samples_otherwise_ends_the_training(tmp_path: Path) -> None:
    (tmp_path / "loops.yaml").write_text(f"- name: colder\n  _target_: {__name__}.Colder\n")
    word = f"actor_rollout_ref.rollout.agent.agent_loop_config_path={tmp_path / 'loops.yaml'}"
    made = trainer(tmp_path, rows(ROWS, agent="colder"), env=environment(tmp_path, "hf", word), max_steps=1)
    with pytest.raises(GenerationFailedError, match=r"temperature=0\.3, top_k=3") as failed:
        made.train()
    assert isinstance(failed.value.__cause__, ConfigError) and made.state.global_step == 0


def test_the_shared_engine_computes_in_the_trainers_precision(tmp_path: Path) -> None:
    made = trainer(tmp_path, rows(ROWS), max_steps=1, num_steps_async=0, bf16=True, learning_rate=0.0)
    made.train()
    (output,) = made.outputs
    mask = output["completion_mask"] * output["tool_mask"]
    apart = (made._logprobs_of(made.model, output) - output["sampling_per_token_logps"]) * mask
    assert mask.any() and apart.abs().max() < 1e-3


def test_what_is_trls_own_is_answered_by_what_is_here() -> None:
    with pytest.raises(ConfigError, match="the second argument is the RolloutEnvironment"):
        GRPOEnvTrainer("model", len)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="with tools of its own"):
        GRPOEnvTrainer("model", len, tools=[len])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="GRPOEnvConfig"):
        GRPOEnvTrainer("model", RolloutEnvironment(), GRPOConfig("out", use_cpu=True))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_steps_async": -1}, "num_steps_async"),
        ({"num_steps_async": "x"}, "num_steps_async='x': a whole number"),
        ({"batch_tokens": 1.5}, "batch_tokens=1.5: a whole number"),
        ({"weight_sync_timeout": "5"}, "weight_sync_timeout='5': a number"),
        ({"sampler_correction": "tis"}, "one of ratio, truncate"),
        ({"temperature": 0.0}, "temperature"),
        ({"top_p": 0.9}, "change the sampled distribution"),
        ({"generation_kwargs": {"top_k": 1}}, "the environment's engine generates"),
        ({"async_generation_timeout": -1.0}, "more than 0 seconds"),
        ({"sampler_ratio_min": 3.0}, "below sampler_ratio_max"),
        ({"weights_dir": "/no/such/folder"}, "no such folder"),
        ({"use_vllm": True}, "the environment's engine generates"),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 2}, "multiple of"),
    ],
)
def test_settings_that_cannot_work_are_refused(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        settings(tmp_path, **changed)


@pytest.mark.parametrize("what", ["chat template", "vocabulary"])
def test_another_tokenizer_than_the_environments_is_refused(what: str, tmp_path: Path) -> None:
    def made(*words: str) -> Recording:
        it = trainer(tmp_path, rows(8), max_steps=1, env=environment(tmp_path, "hf", *words))
        if what == "chat template":
            it._tokenizer.chat_template = "{% for m in messages %}Q: {{ m.content }} A:{% endfor %}"
        else:
            it._tokenizer.add_tokens(["<thought>"])
        return it

    with pytest.raises(ConfigError, match=f"another {what} than the trainer's processing_class"):
        made().train()
    named = f"actor_rollout_ref.model.tokenizer_path={MODEL}"
    if what == "chat template":
        made(named).train()  # is said, so it is meant
    else:
        with pytest.raises(ConfigError, match=f"another {what} than"):
            made(named).train()


def test_a_checkpoint_waits_for_the_end_of_its_batch(tmp_path: Path) -> None:
    """Batches of two steps, checkpoints every three: that of step 3 is made after step 4."""
    made = trainer(
        tmp_path,
        rows(40),
        max_steps=6,
        save_strategy="steps",
        save_steps=3,
        per_device_train_batch_size=4,
        steps_per_generation=2,
    )
    made.train()
    saved = sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*"))
    assert saved == ["checkpoint-4", "checkpoint-6"]
    assert len(made.trained_rows) == 3
    resumed = trainer(tmp_path, rows(40), max_steps=6, per_device_train_batch_size=4, steps_per_generation=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
    assert resumed.trained_rows == made.trained_rows[2:]


def test_what_ends_in_the_middle_of_a_batch(tmp_path: Path) -> None:
    """Batches of two steps, three steps: the best one is saved at a batch's end, and training begins anew."""
    made = trainer(
        tmp_path,
        rows(40),
        eval_dataset=rows(4),
        max_steps=3,
        per_device_train_batch_size=4,
        steps_per_generation=2,
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=4,
        save_strategy="best",
        metric_for_best_model="eval_reward",
    )
    made.train()
    evaluated = [entry["step"] for entry in made.state.log_history if "eval_reward" in entry]
    assert evaluated == [2, 3]
    states = {int(file.parent.name[11:]): json.loads(file.read_text()) for file in out_states(tmp_path)}
    assert 2 in states and all(state["trained_batches"] == 1 for state in states.values())
    first = made.trained_rows
    made.trained_rows = []
    made.train()
    assert made.trained_rows == first and len(first) == 2

    class Stops(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = control.should_save = True

    made.add_callback(Stops())
    made.train()
    (state,) = [json.loads(file.read_text()) for file in out_states(tmp_path) if "-1/" in str(file)]
    assert made.state.global_step == 1 and state["trained_batches"] == 0


def out_states(folder: Path) -> list[Path]:
    return list((folder / "out").glob(f"checkpoint-*/{STATE_FILE}"))
