"""Seconds of a GRPO step of the demo model: TRL alone, and with batches of this library's engine.

    python -m bench.trl [--quick] [--json FILE]

"TRL" is `GRPOTrainer` with transformers' `generate`, on two threads. The others are `GRPOEnvTrainer` with engine
openvino, which generates one batch ahead of the step on a thread of its own, or while the trainer waits. All
train the same sums in the same order: 64 prompts a step (16 with --quick) with 4 completions each, all of 32
tokens, also where the model would end earlier. Each measurement is a process of its own; the three take turns,
round by round. A round's figure is the mean of its steps after the first ones.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.report import parse_options, print_table, write_json
from rollstream.demo import MODEL_PATH

KINDS = {
    "TRL": "TRL, generate, 2 threads",
    "synchronous": "openvino, synchronous",
    "ahead": "openvino, one batch ahead",
}
COMPLETIONS, TOKENS = 4, 32
WARM_UP = 3
"""Steps that do not count: caches fill, and the first batches are generated with nothing to train meanwhile."""

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str.startswith(ground_truth))
"""


def train(kind: str, prompts: int, steps: int, folder: Path) -> list[float]:
    """Trains; the time at which each step ended."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from rollstream.integrations.trl import GRPOEnvConfig, GRPOEnvTrainer, RolloutEnvironment

    ends: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

    given: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": prompts * COMPLETIONS,
        "num_generations": COMPLETIONS,
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
    sums = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    rows = [
        {"prompt": [{"role": "user", "content": f"{a} + {b}"}], "answer": str(a + b)} for a, b in sums[::7]
    ]
    shared: dict[str, Any] = {
        "train_dataset": Dataset.from_list(rows),
        "processing_class": AutoTokenizer.from_pretrained(MODEL_PATH),
        "callbacks": [Clock()],
    }
    torch.set_num_threads(2 if kind == "TRL" else 1)
    model = AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float32)
    if kind == "TRL":

        def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
            texts = (completion[0]["content"] for completion in completions)
            return [float(text.startswith(right)) for text, right in zip(texts, answer, strict=True)]

        config = GRPOConfig(**given, generation_kwargs={"min_new_tokens": TOKENS})
        trainer = GRPOTrainer(model, reward, config, **shared)
    else:
        (folder / "reward.py").write_text(REWARD)
        rollout = "actor_rollout_ref.rollout"
        environment = RolloutEnvironment(
            [
                f"{rollout}.name=openvino",
                f"{rollout}.ignore_eos=true",
                f"{rollout}.engine_kwargs.num_threads=1",
                f"{rollout}.engine_kwargs.max_num_batched_tokens=2048",
                f"custom_reward_function.path={folder / 'reward.py'}",
                "data.max_prompt_length=128",
            ]
        )
        memory = Path("/dev/shm")
        config = GRPOEnvConfig(
            **given,
            num_steps_async=int(kind == "ahead"),
            weights_dir=str(memory) if memory.is_dir() else None,
        )
        trainer = GRPOEnvTrainer(model, environment, config, **shared)
    trainer.train()
    return ends


def measure(kind: str, prompts: int, steps: int) -> float:
    """Seconds a step, in a fresh process."""
    command = [sys.executable, "-m", "bench.trl", "--measure", kind, str(prompts), str(steps + WARM_UP)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ends = json.loads(done.stdout.splitlines()[-1])[WARM_UP - 1 :]
    return float((ends[-1] - ends[0]) / (len(ends) - 1))


def bench() -> None:
    """Runs the benchmark."""
    if len(sys.argv) > 1 and sys.argv[1] == "--measure":
        with tempfile.TemporaryDirectory() as folder:
            kind, prompts, steps = sys.argv[2:]
            print(json.dumps(train(kind, int(prompts), int(steps), Path(folder))))
        return
    options = parse_options(__doc__.split("\n")[0])
    rounds, batch, counted = (1, 16, 3) if options.quick else (5, 64, 20)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind, found in seconds.items():
            found.append(measure(kind, batch, counted))
    plain = statistics.median(seconds["TRL"])
    rows = [
        {
            "what": KINDS[kind],
            "s a step": statistics.median(found),
            "from": min(found),
            "to": max(found),
            "times as fast": plain / statistics.median(found),
        }
        for kind, found in seconds.items()
    ]
    print_table(
        f"{batch} prompts x {COMPLETIONS} completions of {TOKENS} tokens; {counted} steps, {rounds} round(s) "
        "(aim: 2.1 times as fast one batch ahead)",
        rows,
    )
    write_json(options.json, "trl", rows)


if __name__ == "__main__":
    bench()
