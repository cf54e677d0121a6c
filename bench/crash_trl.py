"""The trainings of `bench.crash` by TRL, and the demo's, killed and left alone."""

import hashlib
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from trl import GRPOTrainer

from bench.crash import GROUPS, SAVE_STEPS, Agent, Log, N, Train, agent_seconds, measure, play
from bench.report import draw_curves, print_table
from demo_model import grpo
from demo_model.chats import build_direct_chat
from demo_model.encode import encode_chat
from demo_model.evaluate import expect_accuracy
from demo_model.problems import Split, enumerate_pairs
from rollstream.integrations.trl import GRPOEnvTrainer, RolloutEnvironment
from tests.compat.trl.parts import load, rows, settings

ROLLOUT = "actor_rollout_ref.rollout"


class Steps(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
    """Logs each step, with what `look` returns every so many steps, and ends the process after the last one."""

    def __init__(self, log: Log, end: int, look: Callable[[], float] | None = None, every: int = 1) -> None:
        self.rows: list[int] = []
        self._log, self._end, self._look, self._every = log, end, look, every

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        step, rows = state.global_step, list(dict.fromkeys(self.rows))
        self.rows.clear()
        weights = hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in model.parameters()))
        seen = self._look() if self._look is not None and step % self._every == 0 else None
        self._log.add("step", step=step, rows=rows, weights=weights.hexdigest(), accuracy=seen)
        if step >= self._end:
            os._exit(0)


class Own(GRPOTrainer):  # type: ignore[misc]  # TRL is not followed
    """TRL's own, with a log; its reward function is the agents."""

    steps: Steps
    log: Log
    mean = 0.0

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self.steps.rows += [one["number"] for one in inputs]
        self.keys = [f"{one['number']}.{place % N}" for place, one in enumerate(inputs)]
        for key in self.keys:
            self.log.add("begin", id=key)
        return super()._generate_and_score_completions(inputs)

    def work(self, completion_ids: list[list[int]]) -> list[float]:
        began, lengths = time.monotonic(), dict(zip(self.keys, map(len, completion_ids), strict=True))
        for seconds, key in sorted((agent_seconds(key, self.mean), key) for key in self.keys):
            time.sleep(max(0.0, began + seconds - time.monotonic()))
            self.log.add("end", id=key, tokens=lengths[key])
        return [random.Random(key).random() for key in self.keys]


def trl_door(folder: Path, door: str, ahead: int, mean: float, *, stored: bool) -> Train:
    """`GRPOEnvTrainer` or TRL's own on the demo model."""

    def train(log: Log, end: int) -> None:
        model, tokenizer = load()
        dataset, steps = rows(4000), Steps(log, end)
        dataset = dataset.add_column("number", list(range(len(dataset))))
        common = {"train_dataset": dataset, "processing_class": tokenizer, "callbacks": [steps]}
        config = settings(
            folder,
            per_device_train_batch_size=GROUPS * N,
            num_generations=N,
            learning_rate=1e-5,
            max_steps=len(dataset) // GROUPS,
            save_strategy="steps",
            save_steps=SAVE_STEPS,
            save_total_limit=2,
            logging_strategy="no",
            num_steps_async=ahead,
            rollout_store="rollouts" if stored else None,
        )
        trainer: Any
        if door == "TRL":
            trainer = Own(
                model, lambda completion_ids, **_: trainer.work(completion_ids), args=config, **common
            )
            trainer.steps, trainer.log, trainer.mean = steps, log, mean
        else:
            Agent.log, Agent.mean = log, mean
            words = (f"{ROLLOUT}.name=hf", f"{ROLLOUT}.agent.default_agent_loop=crash")
            trainer = GRPOEnvTrainer(model, RolloutEnvironment(words), config, **common)
            note_rows(trainer, steps)
        go_on(trainer, log, stored=stored and door != "TRL")

    return train


def note_rows(trainer: Any, steps: Steps) -> None:
    """Has the prompts of each batch that a trainer takes noted."""
    plain = trainer._take_batch

    def take() -> Any:
        taken = plain()
        steps.rows += taken[0]
        return taken

    trainer._take_batch = take


def go_on(trainer: Any, log: Log, *, stored: bool) -> None:
    """Trains from the newest checkpoint; without one, from what the store has."""
    out = Path(trainer.args.output_dir)
    log.add("plan", rows=list(dict.fromkeys(trainer._get_train_sampler(trainer.train_dataset))))
    has_state = any(out.glob("checkpoint*")) or (stored and (out / "rollouts" / "training").exists())
    log.add("up")
    trainer.train(resume_from_checkpoint=has_state)


def demo(folder: Path, plan: grpo.Plan) -> Train:
    """The demo's training, one batch ahead, with a checkpoint after every second batch."""

    def train(log: Log, end: int) -> None:
        model, tokenizer = load()
        problems = random.Random(0).sample(list(enumerate_pairs(2, Split.VALIDATION)), 300)
        chats = [encode_chat(tokenizer, build_direct_chat(problem)) for problem in problems]

        def look() -> float:
            model.eval()
            accuracy = expect_accuracy(model, chats)
            model.train()
            return accuracy

        steps = Steps(log, end, look, plan.every)
        saves: dict[str, Any] = {
            "save_strategy": "steps",
            "save_steps": 2 * plan.steps_a_batch,
            "num_steps_async": 1,
        }
        trainer = grpo.make_trainer(plan, model, tokenizer, folder, steps, lambda: 0.0, **saves)
        note_rows(trainer, steps)
        go_on(trainer, log, stored=True)

    return train


def compare_curves(file: Path, steps: int, kills: int) -> None:
    """Trains twice, prints how the two compare, and draws their curves."""
    plan = grpo.Plan(steps=steps, prompts=32, warm_up=steps // 8, every=max(1, steps // 12))
    table, batches, chance = [], [], random.Random(0)
    curves = dict[str, list[tuple[int, float]]]()
    when = sorted((chance.randrange(1, steps - 3), chance.random()) for _ in range(kills))
    for name, instants in (("left alone", []), (f"killed {kills} times", when)):
        with tempfile.TemporaryDirectory() as folder:
            log = Log(Path(folder) / "log.jsonl")
            play(demo(Path(folder) / "out", plan), log, instants, end=steps)
            lines = log.read()
        stood = {line["step"]: line for line in lines if line["what"] == "step"}
        curve = {step: one["accuracy"] for step, one in sorted(stood.items()) if one["accuracy"] is not None}
        batches.append([stood[step]["rows"] for step in sorted(stood)])
        planned = next(line["rows"] for line in lines if line["what"] == "plan")
        measured = measure(lines, planned)  # its rollouts are not logged one by one
        shown = ("kills", "steps again", "the same", "skipped", "doubled", "first step s", "steps")
        table.append({"training": name, **{name: measured[name] for name in shown}})
        curves[name] = [*curve.items()]
        print(f"{name}: {curve}", flush=True)
    print_table(f"{steps} steps of {plan.prompts} prompts with {plan.repeats} answers", table)
    print(f"the same prompts in the same order in each batch: {batches[0] == batches[1]}")
    draw_curves(file, curves, "accuracy at temperature 1")
