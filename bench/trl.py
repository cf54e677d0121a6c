"""Seconds of a GRPO step of the demo model: TRL alone, and with batches of this library's engine.

    python -m bench.trl [--quick] [--json FILE]

"TRL" is `GRPOTrainer` with transformers' `generate`, as it comes. The others are `GRPOEnvTrainer` with engine
openvino, which generates while the trainer waits, or one batch ahead of the step. "shared" is the demo's trainer:
it computes each prompt once for its completions, and no gradient for groups without an advantage, where it would
be 0. All have two threads, and two more in the engine; torch's spin while they wait for work, but where the engine
wants the cores, too, they sleep (OMP_WAIT_POLICY).

All train the same sums in the same order, in the demo's own wording: 64 prompts a step (16 with --quick) with 4
completions each. First as the demo does: a batch lasts two steps, and completions end where the model ends them
(3.5 tokens). Then a batch for each step, and completions of 32 tokens, also where the model would end earlier.

Each measurement is a process of its own; the kinds take turns, round by round. A round's figures are means of its
steps after the first ones. CPU seconds are those of all processes and threads: spinning is in them.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.report import parse_options, print_table, write_json
from rollstream.demo import MODEL_PATH

KINDS = {
    "TRL": "TRL, generate, 2 threads",
    "synchronous": "openvino, synchronous",
    "ahead": "openvino, one batch ahead",
    "synchronous shared": "synchronous, shared prompts",
    "ahead shared": "one batch ahead, shared prompts",
}
COMPLETIONS, TOKENS = 4, 32
BATCH_STEPS = 2
"""For which a batch is generated, as in the demo's plan. TRL computes the old policy's log-probs for it, while
GRPOEnvTrainer has them from the engine."""

WARM_UP = 4
"""Steps that do not count: caches fill, and the first batches are generated with nothing to train meanwhile."""

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str{})
"""


@dataclass(frozen=True)
class Step:
    """How a step ended."""

    at: float
    """Seconds, of the wall's clock."""
    cpu: float
    """Seconds of this process and its children until then."""
    tokens: int
    """Of prompts and completions, trained on until then."""


def train(kind: str, prompts: int, steps: int, folder: Path, *, fixed: bool) -> list[Step]:
    """Trains; `fixed`: completions of 32 tokens, whatever the model would have, and a batch for each step."""
    import psutil  # type: ignore[import-untyped]
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from demo_model.problems import Split, enumerate_pairs
    from demo_model.shared_prompts import SharedPromptsTrainer
    from rollstream.integrations.trl import GRPOEnvConfig, GRPOEnvTrainer, RolloutEnvironment

    ends: list[Step] = []
    process = psutil.Process()

    class Clock(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            everyone = [process, *process.children(recursive=True)]
            cpu = sum(sum(one.cpu_times()[:2]) for one in everyone)
            ends.append(Step(time.perf_counter(), cpu, int(args[1].num_input_tokens_seen)))

    given: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": prompts * COMPLETIONS,
        "num_generations": COMPLETIONS,
        "steps_per_generation": 1 if fixed else BATCH_STEPS,
        "max_completion_length": TOKENS,
        "max_steps": steps,
        "learning_rate": 1e-5,
        "seed": 0,
        "beta": 0.0,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "log_level": "error",
    }
    rows = [
        {"prompt": [{"role": "user", "content": problem.question}], "answer": problem.answer}
        for problem in enumerate_pairs(2, Split.TRAIN)
    ]
    shared: dict[str, Any] = {
        "train_dataset": Dataset.from_list(rows),
        "processing_class": AutoTokenizer.from_pretrained(MODEL_PATH),
        "callbacks": [Clock()],
    }
    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float32)
    if kind == "TRL":

        def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
            texts = [completion[0]["content"] for completion in completions]
            right = zip(texts, answer, strict=True)
            return [float(text.startswith(sum) if fixed else text == sum) for text, sum in right]

        config = GRPOConfig(**given, generation_kwargs={"min_new_tokens": TOKENS} if fixed else None)
        trainer = GRPOTrainer(model, reward, config, **shared)
    else:
        compared = ".startswith(ground_truth)" if fixed else " == ground_truth"
        (folder / "reward.py").write_text(REWARD.format(compared))
        rollout = "actor_rollout_ref.rollout"
        environment = RolloutEnvironment(
            [
                f"{rollout}.name=openvino",
                f"{rollout}.ignore_eos={str(fixed).lower()}",
                f"{rollout}.engine_kwargs.num_threads=2",
                f"{rollout}.engine_kwargs.max_num_batched_tokens=1024",
                f"custom_reward_function.path={folder / 'reward.py'}",
                "data.max_prompt_length=128",
            ]
        )
        memory = Path("/dev/shm")
        config = GRPOEnvConfig(
            **given,
            num_steps_async=int(kind.startswith("ahead")),
            weights_dir=str(memory) if memory.is_dir() else None,
        )
        made = SharedPromptsTrainer if kind.endswith("shared") else GRPOEnvTrainer
        trainer = made(model, environment, config, **shared)
    trainer.train()
    return ends


def measure(kind: str, prompts: int, steps: int, *, fixed: bool) -> Step:
    """The mean of a step, in a fresh process."""
    told = [kind, str(prompts), str(steps + WARM_UP), "fixed" if fixed else "free"]
    command = [sys.executable, "-m", "bench.trl", "--measure", *told]
    waits = {} if kind == "TRL" else {"OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=os.environ | waits)
    assert done.returncode == 0, done.stderr
    ends = [Step(**one) for one in json.loads(done.stdout.splitlines()[-1])][WARM_UP - 1 :]
    first, last, count = ends[0], ends[-1], len(ends) - 1
    return Step(
        (last.at - first.at) / count, (last.cpu - first.cpu) / count, (last.tokens - first.tokens) // count
    )


def compare(rounds: int, prompts: int, steps: int, *, fixed: bool) -> list[dict[str, Any]]:
    """A row for each kind."""
    found: dict[str, list[Step]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind, means in found.items():
            means.append(measure(kind, prompts, steps, fixed=fixed))

    def median(kind: str, name: str) -> float:
        return float(statistics.median(getattr(one, name) for one in found[kind]))

    rows = [
        {
            "what": KINDS[kind],
            "s a step": median(kind, "at"),
            "from": min(one.at for one in means),
            "to": max(one.at for one in means),
            "CPU s": median(kind, "cpu"),
            "tokens": median(kind, "tokens"),
            "times as fast": median("TRL", "at") / median(kind, "at"),
            "of the CPU": median(kind, "cpu") / median("TRL", "cpu"),
        }
        for kind, means in found.items()
    ]
    what = f"of {TOKENS} tokens, a batch a step" if fixed else f"as they end, {BATCH_STEPS} steps a batch"
    print_table(
        f"{prompts} prompts x {COMPLETIONS} completions, {what}; {steps} steps, {rounds} round(s) "
        "(aim: 2.1 times as fast one batch ahead)",
        rows,
    )
    return rows


def bench() -> None:
    """Runs the benchmark."""
    if len(sys.argv) > 1 and sys.argv[1] == "--measure":
        with tempfile.TemporaryDirectory() as folder:
            kind, prompts, steps, length = sys.argv[2:]
            ends = train(kind, int(prompts), int(steps), Path(folder), fixed=length == "fixed")
            print(json.dumps([asdict(one) for one in ends]))
        return
    options = parse_options(__doc__.split("\n")[0])
    rounds, batch, counted = (1, 16, 4) if options.quick else (5, 64, 20)
    free = compare(rounds, batch, counted, fixed=False)
    fixed = compare(rounds, batch, counted, fixed=True)
    write_json(options.json, "trl", [*free, *fixed])


if __name__ == "__main__":
    bench()
