"""What the tests of TRL train: the demo model, sums, and a reward in a file."""

import random
from pathlib import Path
from typing import Any

from demo_model.chats import CALCULATOR
from demo_model.problems import Split, enumerate_pairs
from rollstream.integrations.trl import GRPOEnvConfig, GRPOEnvTrainer, RolloutEnvironment

MODEL = Path(__file__).parents[3] / "src" / "rollstream" / "demo" / "model"

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str.strip() == ground_truth)
"""

TOOLS = f"""
from rollstream.agent.tools.functions import function_tool

@function_tool(schema={CALCULATOR!r})
def calculator(expression):
    left, sign, right = expression.split()
    return str(int(left) + int(right) if sign == "+" else int(left) - int(right))
"""


def rows(count: int, *, agent: str | None = None) -> Any:
    from datasets import Dataset

    problems = list(enumerate_pairs(2, Split.TRAIN))
    random.Random(0).shuffle(problems)
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": problem.question}],
                "answer": problem.answer,
                **({"agent_name": agent} if agent else {}),
            }
            for problem in problems[:count]
        ]
    )


def environment(folder: Path, engine: str = "hf", *words: str) -> RolloutEnvironment:
    (folder / "reward.py").write_text(REWARD)
    return RolloutEnvironment(
        [
            f"actor_rollout_ref.rollout.name={engine}",
            f"custom_reward_function.path={folder / 'reward.py'}",
            "data.max_prompt_length=300",
            *words,
        ]
    )


def load() -> tuple[Any, Any]:
    """The demo model and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32), AutoTokenizer.from_pretrained(
        MODEL
    )


def settings(folder: Path, **changed: Any) -> GRPOEnvConfig:
    """Batches of 4 prompts, 2 completions each."""
    values: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 8,
        "num_generations": 2,
        "max_completion_length": 8,
        "learning_rate": 1e-4,
        "max_steps": 3,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "loss_type": "dr_grpo",
        "seed": 11,
        **changed,
    }
    return GRPOEnvConfig(**values)


def numbers_of(monkeypatch: Any) -> list[tuple[int, int]]:
    """Fills with the numbers of every rollout that is begun."""
    from rollstream.rollout.worker import RolloutWorker

    plain, seen = RolloutWorker.run, []

    async def run(self: RolloutWorker, row: Any, repeat: int, **more: Any) -> Any:
        seen.append((row.index, repeat))
        return await plain(self, row, repeat, **more)

    monkeypatch.setattr(RolloutWorker, "run", run)
    return seen


class Recording(GRPOEnvTrainer):
    """Notes which rows each batch had, what TRL's own sampler said, and what the loss was made of."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.trained_rows: list[list[int]] = []
        self.sampled_prompts: list[list[Any]] = []
        self.given_prompts: list[list[Any]] = []
        self.outputs: list[dict[str, Any]] = []

    def _take_batch(self) -> Any:
        taken = super()._take_batch()
        self.trained_rows.append(taken[0])
        return taken

    def _next_batch(self, local: int) -> Any:
        inputs, fields = super()._next_batch(local)
        self.given_prompts.append([example["prompt"] for example in inputs])
        return inputs, fields

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        if self.model.training:
            self.sampled_prompts.append([example["prompt"] for example in inputs])
        output = super()._generate_and_score_completions(inputs)
        self.outputs.append(output)
        return output


def trainer(
    folder: Path,
    dataset: Any,
    *,
    env: Any = None,
    reward_funcs: Any = None,
    eval_dataset: Any = None,
    model: Any = None,
    peft_config: Any = None,
    **changed: Any,
) -> Recording:
    demo, tokenizer = load()
    return Recording(
        demo if model is None else model,
        env or environment(folder),
        settings(folder, **changed),
        train_dataset=dataset,
        eval_dataset=eval_dataset,
        reward_funcs=reward_funcs,
        processing_class=tokenizer,
        peft_config=peft_config,
    )
