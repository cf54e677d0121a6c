"""The training demo: GRPO with TRL on the demo model, on a CPU, with batches generated ahead.

    python -m demo_model.grpo                  asynchronous, one batch ahead
    python -m demo_model.grpo --compare        and a synchronous run of as many steps
    python -m demo_model.grpo --seeds 0 1 2    one after the other

The model begins with some six sums of ten right at temperature 1; a tenth of all problems is held out. Some
prompts of each batch ask for the calculator, so that its use is not forgotten.

The optimizer is Muon with AdamW for the embeddings: with AdamW alone it learns more slowly.
"""

import argparse
import json
import logging
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

MODEL = Path(__file__).parents[1] / "src" / "rollstream" / "demo" / "model"

_CURVE_PROBLEMS = 400
"""Of the validation slice, for the curve: their expected accuracy takes a forward pass of half a second."""

_TOOL_PROBLEMS = 400
"""Of the test slice, asked with the calculator: a chat of two turns costs as much as ten without."""

_ANSWER_TOKENS = 8
"""Room for an answer, which takes at most five."""

_TOOL_SHARE = 1 / 32
"""Prompts with the calculator: one of the 32 of a batch, which costs as much as eight without."""


@dataclass(frozen=True)
class Plan:
    """How the demo trains. The defaults are the demo's."""

    steps: int = 500
    prompts: int = 64
    """Of a step; each is answered `repeats` times. Many prompts with few answers each learn more from as many
    rollouts than few with many."""
    repeats: int = 4
    steps_a_batch: int = 2
    """Steps for which one batch is generated, and one set of weights given to the engine: it takes the engine
    as long to load weights as to answer a step's prompts."""
    muon_rate: float = 1.5e-3
    """Of the matrices. With AdamW alone the same takes nearly half again as many steps."""
    rate: float = 5e-4
    """Of AdamW, for the embeddings. At 2e-3 the calculator is forgotten within a hundred steps."""
    warm_up: int = 60
    beta2: float = 0.95
    """Of AdamW: follows a policy gradient's scale, which falls as answers become certain, better than 0.999
    does."""
    every: int = 50
    """Steps between two points of the curve."""
    minutes: float = 8.8
    """After which training ends early; loading and evaluation take most of another one."""
    stop_after: int | None = None
    """Steps after which it ends early: those of the run that it is compared with."""
    engine_threads: int = 1
    trainer_threads: int = 1


@dataclass
class Run:
    """What one training did."""

    name: str
    seed: int
    start: dict[str, float]
    """Held-out accuracy at temperature 1, `sampled` and `expected` (exactly, without the noise of sampling),
    `greedy`, and `with_tool` at temperature 1."""
    end: dict[str, float] = field(default_factory=dict)
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    """Step, seconds, expected accuracy at temperature 1 on a part of the validation slice."""
    steps: int = 0
    seconds: float = 0.0
    """Of training, the curve's evaluations included."""
    cpu_seconds: float = 0.0
    """Of this process and the engine's, over the same time."""
    times: dict[str, Any] = field(default_factory=dict)


def main(arguments: list[str] | None = None) -> int:
    """Trains, prints and draws; 1 when a run did not reach what the demo promises."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--compare", action="store_true", help="a synchronous run of as many steps, too")
    which.add_argument("--sync", action="store_true", help="only the synchronous run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one run each (default: 0)")
    parser.add_argument("--steps", type=int, default=Plan.steps, help="of each run (default: %(default)s)")
    parser.add_argument(
        "--minutes",
        type=float,
        default=Plan.minutes,
        help="after which a run ends early (default: %(default)s); one to compare with takes as many steps",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("outputs/demo-train"),
        help="folder for models, curves.png and runs.json (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    options.out.mkdir(parents=True, exist_ok=True)
    plan = Plan(steps=options.steps, minutes=options.minutes)
    runs: list[Run] = []
    for seed in options.seeds:
        kinds = [0] if options.sync else [1, 0] if options.compare else [1]
        for ahead in kinds:
            compared = options.compare and not ahead
            how = replace(plan, minutes=math.inf, stop_after=runs[-1].steps) if compared else plan
            runs.append(train(how, seed=seed, ahead=ahead, out=options.out))
            show(runs[-1])
            (options.out / "runs.json").write_text(json.dumps([asdict(run) for run in runs], indent=1))
            draw(runs, options.out / "curves.png")
    print(f"curves: {options.out / 'curves.png'}")
    learnt = [run.end["expected"] - run.start["expected"] >= 0.20 for run in runs]  # without luck in sampling
    kept = [run.start["with_tool"] - run.end["with_tool"] <= 0.03 for run in runs]
    return 0 if all(learnt) and all(kept) else 1


def train(plan: Plan, *, seed: int, ahead: int, out: Path, name: str = "", **changed: Any) -> Run:
    """One training, from the shipped model; `ahead` batches are generated ahead, `changed` are settings of TRL's."""
    import psutil  # type: ignore[import-untyped]
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from transformers.utils import logging as transformers_logging

    from demo_model.chats import build_direct_chat
    from demo_model.encode import encode_chat
    from demo_model.evaluate import expect_accuracy
    from demo_model.problems import Split, enumerate_pairs

    transformers_logging.disable_progress_bar()
    logging.getLogger("rollstream").setLevel(logging.ERROR)  # of a learner some calls of tools are malformed
    torch.set_num_threads(plan.trainer_threads)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    name = name or (f"{ahead} ahead" if ahead else "synchronous")
    run = Run(f"{name}, seed {seed}", seed, measure(model, tokenizer))
    print(f"{run.name}: start {_said(run.start)}", flush=True)

    problems = list(enumerate_pairs(2, Split.VALIDATION))
    random.Random(0).shuffle(problems)
    looked_at = [encode_chat(tokenizer, build_direct_chat(problem)) for problem in problems[:_CURVE_PROBLEMS]]
    began, cpu_began = time.monotonic(), _cpu(psutil.Process())

    class Curve(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
        """Measures now and then, and ends the training when its time is over."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seconds = time.monotonic() - began
            run.steps, run.seconds = state.global_step, seconds
            if seconds > 60 * plan.minutes or state.global_step == plan.stop_after:
                control.should_training_stop = True
            if state.global_step % plan.every == 0:
                model.eval()
                accuracy = expect_accuracy(model, looked_at)
                model.train()
                run.curve.append((state.global_step, seconds, accuracy))
                print(f"  step {state.global_step:5d}  {seconds:6.0f} s  accuracy {accuracy:.3f}", flush=True)

    run.curve.append((0, 0.0, expect_accuracy(model, looked_at)))
    trainer = make_trainer(
        plan,
        model,
        tokenizer,
        out / f"trainer-{seed}-{ahead}",
        Curve(),
        lambda: (time.monotonic() - began) / (60 * plan.minutes),
        seed=seed,
        num_steps_async=ahead,
        **changed,
    )
    trainer.train()
    run.cpu_seconds = _cpu(psutil.Process()) - cpu_began
    if trainer.step_times is not None:
        run.times = trainer.step_times.summary()
    model.eval()
    run.end = measure(model, tokenizer)
    model.save_pretrained(out / f"model-{seed}-{ahead}")
    return run


def make_trainer(
    plan: Plan,
    model: Any,
    tokenizer: Any,
    out: Path,
    callback: Any,
    time_share: Callable[[], float],
    *,
    seed: int = 0,
    dataset: Any = None,
    **changed: Any,
) -> Any:
    """The demo's trainer of a model, for `learning_rate` told the share of its time that has passed.

    `dataset`: its prompt rows; None: all problems of the training slice.
    """
    import torch
    from transformers import PrinterCallback

    from demo_model.muon import MuonWithAdamW
    from demo_model.shared_prompts import SharedPromptsTrainer
    from rollstream.integrations.trl import GRPOEnvConfig

    settings: dict[str, Any] = {
        "per_device_train_batch_size": plan.prompts * plan.repeats,
        "steps_per_generation": plan.steps_a_batch,
        "num_generations": plan.repeats,
        "max_completion_length": 96,
        "max_steps": plan.steps,
        "loss_type": "grpo",  # a rollout with a call has ten times the tokens, and no more to say
        "scale_rewards": "none",
        "beta": 0.0,
        "logging_steps": plan.every,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "log_level": "error",
        "weights_dir": "/dev/shm" if Path("/dev/shm").is_dir() else None,
    }
    optimizer = MuonWithAdamW(
        model.named_parameters(), muon_rate=plan.muon_rate, rate=plan.rate, betas=(0.9, plan.beta2)
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate(plan, step, time_share())
    )
    trainer = SharedPromptsTrainer(
        model,
        _environment(plan),
        GRPOEnvConfig(**{**settings, "output_dir": str(out), "seed": seed, **changed}),
        train_dataset=_rows(seed) if dataset is None else dataset,
        processing_class=tokenizer,
        callbacks=[callback],
        optimizers=(optimizer, schedule),
    )
    trainer.pop_callback(PrinterCallback)  # prints all of TRL's numbers
    return trainer


def learning_rate(plan: Plan, step: int, time_share: float) -> float:
    """Share of the full learning rate at a step, counted from 0: up for `warm_up` steps, then down to 0.

    Down to whichever end is nearer, that of the steps or, at the pace so far, that of the time: on a busy
    machine the last steps are small ones, too.

    Args:
        plan: how many steps, and how many of them on the way up.
        step: how many have been taken.
        time_share: of the training's minutes that have passed.
    """
    if step < plan.warm_up:
        return step / plan.warm_up
    end = min(plan.stop_after or plan.steps, step / time_share if time_share > 0 else math.inf)
    return max(0.0, (end - step) / max(1.0, end - plan.warm_up))


def measure(model: Any, tokenizer: Any) -> dict[str, float]:
    """Accuracy on the test slice, of which nothing was trained on."""
    from demo_model.chats import build_direct_chat
    from demo_model.encode import encode_chat
    from demo_model.evaluate import expect_accuracy, reply_to, solve_with_tool
    from demo_model.problems import Split, enumerate_pairs

    problems = list(enumerate_pairs(2, Split.TEST))
    random.Random(0).shuffle(problems)
    chats = [build_direct_chat(problem) for problem in problems]

    def solve(*, sample: bool) -> float:
        replies = reply_to(model, tokenizer, [chat[:1] for chat in chats], None, sample, _ANSWER_TOKENS)
        return _mean(reply == problem.answer for reply, problem in zip(replies, problems, strict=True))

    return {
        "sampled": solve(sample=True),
        "expected": expect_accuracy(model, [encode_chat(tokenizer, chat) for chat in chats]),
        "greedy": solve(sample=False),
        "with_tool": solve_with_tool(model, tokenizer, problems[:_TOOL_PROBLEMS], sample=True),
    }


def show(run: Run) -> None:
    """Prints how a run ended."""
    gain, sampled = (100 * (run.end[name] - run.start[name]) for name in ("expected", "sampled"))
    print(f"{run.name}: end   {_said(run.end)}")
    wall, cpu = run.seconds / max(1, run.steps), run.cpu_seconds / max(1, run.steps)
    print(
        f"{run.name}: {gain:+.1f} points at temperature 1 ({sampled:+.1f} as sampled) in {run.steps} steps, "
        f"{run.seconds:.0f} s ({wall:.2f} s a step, {cpu:.2f} s of CPU)",
        flush=True,
    )


def draw(runs: list[Run], file: Path) -> None:
    """Draws the curves over steps and over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for run in runs:
        steps, seconds, accuracy = zip(*run.curve, strict=True)
        axes[0].plot(steps, accuracy, label=run.name)
        axes[1].plot(seconds, accuracy, label=run.name)
    axes[0].set(xlabel="step", ylabel="accuracy at temperature 1 (validation)")
    axes[1].set(xlabel="seconds")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _environment(plan: Plan) -> Any:
    from rollstream.integrations.trl import RolloutEnvironment

    here = Path(__file__).parent
    rollout = "actor_rollout_ref.rollout"
    return RolloutEnvironment(
        [
            f"{rollout}.name=openvino",
            f"{rollout}.engine_kwargs.num_threads={plan.engine_threads}",
            f"{rollout}.engine_kwargs.max_num_batched_tokens=2048",
            f"{rollout}.multi_turn.function_tool_path={here / 'grpo_tools.py'}",
            f"{rollout}.multi_turn.max_assistant_turns=2",
            f"custom_reward_function.path={here / 'grpo_reward.py'}",
            "data.max_prompt_length=320",
        ]
    )


def _rows(seed: int) -> Any:
    """Prompt rows of the training slice: every problem once, and some with the calculator."""
    from datasets import Dataset

    from demo_model.problems import Split, enumerate_pairs

    problems = list(enumerate_pairs(2, Split.TRAIN))
    with_tool = random.Random(seed).sample(problems, round(len(problems) * _TOOL_SHARE / (1 - _TOOL_SHARE)))
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": problem.question}],
                "answer": problem.answer,
                "agent_name": agent,
            }
            for agent, some in (("single_turn_agent", problems), ("tool_agent", with_tool))
            for problem in some
        ]
    )


def _mean(hits: Iterable[bool]) -> float:
    found = list(hits)
    return sum(found) / len(found)


def _said(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {100 * value:.1f} %" for name, value in values.items())


def _cpu(process: Any) -> float:
    """Seconds of a process, and of the children that it has or had."""
    times = process.cpu_times()
    total = times.user + times.system + times.children_user + times.children_system
    for child in process.children(recursive=True):
        total += sum(child.cpu_times()[:2])
    return float(total)


if __name__ == "__main__":
    sys.exit(main())
