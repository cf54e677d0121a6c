"""On-policy distillation beside GRPO: a model that GRPO has trained teaches the model that it began as.

    make demo-train                                        GRPO of the demo model, into outputs/demo-train
    python -m bench.distill --trained outputs/demo-train   its model is the teacher: outputs/distill/curves.png

Without `--trained` it trains by GRPO first. Both train on the same sums, with as many rollouts a step; the distillation
knows no reward. The curves are of sums that neither has seen.
"""

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path

from bench.report import draw_curves, print_table
from demo_model import grpo


def bench() -> None:
    """Trains, distils, prints and draws."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="of each training (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="of each at most (default: %(default)s)")
    parser.add_argument("--trained", type=Path, metavar="DIR", help="of demo_model.grpo; default: trains one")
    parser.add_argument("--out", type=Path, default=Path("outputs/distill"), help="default: %(default)s")
    options = parser.parse_args()
    from transformers import AutoTokenizer

    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    options.out.mkdir(parents=True, exist_ok=True)
    plan = grpo.Plan(steps=options.steps, minutes=options.minutes, every=max(1, options.steps // 16))
    if options.trained is None:
        runs = [grpo.train(plan, seed=0, ahead=1, out=options.out / "grpo", name="GRPO")]
    else:
        runs = [grpo.Run(**json.loads((options.trained / "runs.json").read_text())[0])]
    runs[0].name = "GRPO"
    teacher = (options.trained or options.out / "grpo") / "model-0-1"
    if not (teacher / "tokenizer.json").exists():
        AutoTokenizer.from_pretrained(grpo.MODEL).save_pretrained(teacher)
    distilled = {"teacher": str(teacher), "distill_coef": 1.0, "reward_weights": [0.0]}
    runs.append(grpo.train(plan, seed=0, ahead=1, out=options.out, name="distillation", **distilled))
    runs[1].name = "distillation"
    (options.out / "runs.json").write_text(json.dumps([asdict(run) for run in runs], indent=1))
    names = ("sampled", "expected", "greedy", "with_tool")
    rows = [
        {"training": run.name, "steps": run.steps, "seconds": run.seconds, "CPU s": run.cpu_seconds}
        | {name: f"{100 * run.start[name]:.1f} -> {100 * run.end[name]:.1f}" for name in names}
        for run in runs
    ]
    print_table("accuracy in percent, on sums that were held out", rows)
    curves = {run.name: [(point[0], point[2]) for point in run.curve] for run in runs}
    level = ("the teacher", runs[0].curve[-1][2])
    draw_curves(options.out / "curves.png", curves, "accuracy at temperature 1", level=level)


if __name__ == "__main__":
    bench()
