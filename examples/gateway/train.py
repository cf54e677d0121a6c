"""GRPO on rollouts of an agent that knows nothing of training: the Agents SDK's, in agents_sdk.py.

    pip install '.[openvino,trl,tasks]' openai-agents
    python -m examples.gateway.train        five to ten minutes

Sums of numbers of two and three digits; the model was made for two. Each rollout has two or three trajectories,
one for each time that the agent was asked. All are trained, with the advantage of their rollout: what is rewarded
is the answer that counts in the end.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollstream.demo import MODEL_PATH
from rollstream.integrations.trl import GRPOEnvConfig, GRPOEnvTrainer, RolloutEnvironment

AGENT = Path(__file__).parent / "agents_sdk.py"


def environment(*words: str) -> RolloutEnvironment:
    """The agent, and its prompts; their reward is 1 for the right answer."""
    rollout = "actor_rollout_ref.rollout"
    digits = "config: {min_terms: 2, max_terms: 2, min_digits: 2, max_digits: 3}"
    return RolloutEnvironment(
        [
            f"{rollout}.name=openvino",
            f"{rollout}.engine_kwargs.num_threads=1",
            f"{rollout}.agent.default_agent_loop=function_agent",
            f"gateway.function={AGENT}:run",
            f"actor_rollout_ref.model.path={MODEL_PATH}",
            f"train_tasks=[{{name: reasoning_gym, dataset: chain_sum, size: 4000, seed: 3, {digits}}}]",
            "data.max_prompt_length=256",
            *words,
        ]
    )


def train(folder: Path, env: RolloutEnvironment, **changed: Any) -> list[dict[str, Any]]:
    """Trains.

    Returns:
        What TRL logged, step by step.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    settings: dict[str, Any] = {
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
        **changed,
    }
    trainer = GRPOEnvTrainer(
        AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float32),
        env,
        GRPOEnvConfig(str(folder), **settings),
        processing_class=AutoTokenizer.from_pretrained(MODEL_PATH),
    )
    trainer.train()
    return [entry for entry in trainer.state.log_history if "reward" in entry]


def main() -> int:
    """Trains, and prints how the reward goes; 1 when it did not rise."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=50, help="of GRPO (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        logged = train(Path(folder), environment(), max_steps=options.steps, seed=options.seed)
    means = []
    for start in range(0, len(logged), 5):
        five = logged[start : start + 5]
        means.append(sum(entry["reward"] for entry in five) / len(five))
        each = sum(entry["rollstream/trajectories"] for entry in five) / len(five)
        steps = f"steps {five[0]['step']:2d} to {five[-1]['step']:2d}"
        print(f"{steps}  reward {means[-1]:.3f}  trajectories a rollout {each:.2f}")
    return 0 if means[-1] > means[0] else 1


if __name__ == "__main__":
    sys.exit(main())
