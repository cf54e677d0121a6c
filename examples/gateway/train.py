"""GRPO on rollouts of an agent that knows nothing of training: the Agents SDK's, in agents_sdk.py.

    pip install '.[openvino,trl,tasks]' openai-agents matplotlib
    python -m examples.gateway.train --curve gateway.png

Sums of numbers of two and three digits; the model was made for two. Each rollout has two or three trajectories,
one for each time that the agent was asked. All are trained, with the advantage of their rollout: what is rewarded
is the answer that counts in the end.
"""

from pathlib import Path

from examples.training import build_parser, load, train
from rollstream.demo import MODEL_PATH
from rollstream.integrations.trl import RolloutEnvironment

AGENT = Path(__file__).parent / "agents_sdk.py"


def environment(folder: Path) -> RolloutEnvironment:
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
        ]
    )


def main() -> None:
    """Trains, and prints how the reward goes."""
    options = build_parser(__doc__, steps=50).parse_args()
    train(options, *load(), environment)


if __name__ == "__main__":
    main()
