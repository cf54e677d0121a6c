"""What `rollstream select` brings a training: the demo model on what was selected, against as many rows by chance.

    python -m bench.select --out outputs/select

A run of the demo model answers every problem several times; `select` takes those that it solves sometimes, and draws a
control of as many; for each seed two trainings begin with the same model, one on each, for as many steps.
Held-out accuracy over the steps: curves.json and curves.png.
"""

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import orjson

from bench.report import draw_curves
from demo_model import grpo
from demo_model.chats import build_direct_chat
from demo_model.encode import encode_chat
from demo_model.evaluate import expect_accuracy
from demo_model.problems import Split, enumerate_pairs
from rollstream.cli import main as rollstream
from rollstream.generation.run import run_generation

WHERE = "pass_rate between 0.2 and 0.8"


def main() -> None:
    """Runs, selects, trains twice, and draws."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/select"))
    parser.add_argument(
        "--problems", type=int, default=1500, help="of the training slice (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=8, help="answers to each (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=150, help="of each training (default: %(default)s)")
    parser.add_argument("--every", type=int, default=15, help="steps between two points of a curve")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0], help="one pair of trainings each (default: 0)"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    problems = list(enumerate_pairs(2, Split.TRAIN))
    random.Random(0).shuffle(problems)
    rows, run = options.out / "prompts.jsonl", options.out / "run"
    lines = [{"prompt": one.question, "answer": one.answer} for one in problems[: options.problems]]
    rows.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    run_generation(
        [
            f"data.train_files={rows}",
            f"trainer.default_local_dir={run}",
            f"actor_rollout_ref.model.path={grpo.MODEL}",
            f"actor_rollout_ref.rollout.n={options.repeats}",
            "actor_rollout_ref.rollout.response_length=8",
            f"custom_reward_function.path={Path(grpo.__file__).parent / 'grpo_reward.py'}",
            "generation.seed=1",
        ]
    )
    files = {name: options.out / f"{name}.jsonl" for name in ("selected", "control")}
    words = [
        "--prompts",
        rows,
        "--where",
        WHERE,
        "--output",
        files["selected"],
        "--control",
        files["control"],
    ]
    if rollstream(["select", str(run), *map(str, words), "--force"]):
        raise SystemExit("nothing was selected")
    curves = {}
    for seed in options.seeds:
        for name, file in files.items():
            curves[f"{name}, seed {seed}"] = train(file, options, seed, options.out / f"{name}-{seed}")
            (options.out / "curves.json").write_text(json.dumps(curves))
            drawn = {name: [(point[0], point[2]) for point in curve] for name, curve in curves.items()}
            draw_curves(options.out / "curves.png", drawn, "accuracy at temperature 1 (validation)")


def train(file: Path, options: Any, seed: int, out: Path) -> list[tuple[int, float, float]]:
    """One training on the rows of a file: step, seconds, accuracy on problems that it never saw."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(grpo.MODEL, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(grpo.MODEL)
    problems = list(enumerate_pairs(2, Split.VALIDATION))
    random.Random(0).shuffle(problems)
    looked_at = [encode_chat(tokenizer, build_direct_chat(problem)) for problem in problems[:400]]
    curve, began = [(0, 0.0, expect_accuracy(model, looked_at))], time.monotonic()

    class Curve(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % options.every == 0:
                model.eval()
                curve.append((state.global_step, time.monotonic() - began, expect_accuracy(model, looked_at)))
                model.train()
                print(
                    f"{out.name}: step {curve[-1][0]}, {curve[-1][1]:.0f} s, accuracy {curve[-1][2]:.3f}",
                    flush=True,
                )

    plan = grpo.Plan(steps=options.steps, prompts=32, warm_up=options.steps // 8, every=options.every)
    given = [orjson.loads(line) for line in file.read_bytes().splitlines()]
    prompts = [[{"role": "user", "content": row["prompt"]}] for row in given]
    dataset = Dataset.from_dict({"prompt": prompts, "answer": [row["answer"] for row in given]})
    trainer = grpo.make_trainer(
        plan,
        model,
        tokenizer,
        out,
        Curve(),
        lambda: 0.0,
        seed=seed,
        dataset=dataset,
        num_steps_async=1,
    )
    trainer.train()
    return curve


if __name__ == "__main__":
    main()
