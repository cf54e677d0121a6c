"""What the trainings of the examples share: GRPO of the demo model on two cores, and the curve of its reward."""

import argparse
import logging
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback

from bench.report import draw_curves
from demo_model.encode import EncodedChat, encode_chat, stack_chats
from demo_model.problems import Problem
from rollstream.demo import MODEL_PATH
from rollstream.integrations.trl import GRPOEnvConfig, GRPOEnvTrainer, RolloutEnvironment

Chats = list[list[dict[str, Any]]]
"""A rollout's trajectories as chats, of each of which the last message is learnt."""

_SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 64,
    "num_generations": 4,
    "max_completion_length": 128,
    "learning_rate": 2e-4,
    "warmup_steps": 5,
    "loss_type": "grpo",
    "scale_rewards": "none",
    "beta": 0.0,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}


def build_parser(description: str | None, *, steps: int, shown: int = 0) -> argparse.ArgumentParser:
    """Options that every training has; `--shown` where something is shown before."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=steps, help="of GRPO (default: %(default)s)")
    if shown:
        parser.add_argument(
            "--shown", type=int, default=shown, help="steps on chats before (default: %(default)s)"
        )
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--curve", type=Path, metavar="FILE.png", help="draws the reward (needs matplotlib)")
    return parser


def load() -> tuple[Any, Any]:
    """The demo model and its tokenizer. torch has one thread: the engine has the other core."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(MODEL_PATH)


def show(
    model: Any,
    tokenizer: Any,
    problems: Sequence[Problem],
    chats: Callable[[Problem], tuple[Chats, Chats]],
    steps: int,
    *,
    share: float = 1 / 3,
    at_once: int = 12,
) -> None:
    """Trains the model on chats, a share of them of the second kind of each problem's: what is to be learnt."""
    rng = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model.train()
    for _ in range(steps):
        some: list[EncodedChat] = []
        for problem in rng.sample(problems, at_once):
            picked = chats(problem)[rng.random() < share]
            some += [encode_chat(tokenizer, chat, last_only=True) for chat in picked]
        ids, labels = stack_chats(some, tokenizer.pad_token_id)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def train(
    options: argparse.Namespace,
    model: Any,
    tokenizer: Any,
    environment: Callable[[Path], RolloutEnvironment],
    *,
    dataset: Any = None,
    **changed: Any,
) -> list[dict[str, Any]]:
    """Trains, prints the mean reward of each tenth of the steps, and draws it.

    No prompt comes twice, so that each reward is one on prompts that were not trained on.

    Args:
        options: those of `build_parser`.
        model: changed in place.
        tokenizer: the model's.
        environment: made with a folder for temporary files.
        dataset: prompt rows; None: the environment's.
        changed: settings of `GRPOEnvConfig`.

    Returns:
        what was logged of each step.
    """
    logging.getLogger("rollstream").setLevel(logging.ERROR)  # of a learner some calls of tools are malformed
    tenths = Tenths(max(1, options.steps // 10))
    with tempfile.TemporaryDirectory() as folder:
        settings = {"max_steps": options.steps, "seed": options.seed, **_SETTINGS, **changed}
        trainer = GRPOEnvTrainer(
            model,
            environment(Path(folder)),
            GRPOEnvConfig(folder, **settings),
            train_dataset=dataset,
            processing_class=tokenizer,
            callbacks=[tenths],
        )
        trainer.pop_callback(PrinterCallback)  # prints all of TRL's numbers
        trainer.train()
    if options.curve:
        draw_curves(options.curve, {"GRPO": tenths.curve}, "reward, on new prompts")
    return [entry for entry in trainer.state.log_history if "reward" in entry]


class Tenths(TrainerCallback):
    """Prints means over every so many steps, and keeps those of the reward."""

    def __init__(self, every: int) -> None:
        self.curve: list[tuple[float, float]] = []
        self._every = every

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        part = [entry for entry in state.log_history if "reward" in entry][-self._every :]
        if not part or "reward" not in state.log_history[-1] or part[-1]["step"] % self._every:
            return
        names = ("reward", "rollstream/trajectories", "rollstream/tool_calls")
        reward, rows, calls = (fmean(entry[name] for entry in part) for name in names)
        first, last = part[0]["step"], part[-1]["step"]
        self.curve.append(((first + last) / 2, reward))
        print(
            f"steps {first:3d} to {last:3d}  reward {reward:.3f}  "
            f"a rollout: trajectories {rows:.2f}, tool calls {calls:.2f}",
            flush=True,
        )
