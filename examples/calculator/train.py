"""GRPO with a tool: the demo model learns to ask its calculator for sums that it cannot do by itself.

    python -m examples.calculator.train --curve calculator.png

The prompts do not say that there is a calculator (`show_tools=false`). First the model is shown that, in a third of
some hundred chats; then the right answer is rewarded, and it finds out when to ask.
"""

import random
from pathlib import Path

from demo_model.chats import build_direct_chat, build_tool_chat
from demo_model.problems import Problem, Split, draw_problem
from examples.training import Chats, build_parser, load, show, train
from rollstream.demo import MODEL_PATH
from rollstream.integrations.trl import RolloutEnvironment

HERE = Path(__file__).parent


def chats(problem: Problem) -> tuple[Chats, Chats]:
    """A rollout without a call, and with one."""
    called = build_tool_chat(problem)
    return [build_direct_chat(problem)], [called[:2], called]


def environment(folder: Path) -> RolloutEnvironment:
    """The tool agent, and its prompts; their reward is 1 for the right answer."""
    rollout = "actor_rollout_ref.rollout"
    digits = "config: {min_terms: 2, max_terms: 2, min_digits: 2, max_digits: 3}"
    return RolloutEnvironment(
        [
            f"{rollout}.name=openvino",
            f"{rollout}.engine_kwargs.num_threads=1",
            f"{rollout}.agent.default_agent_loop=tool_agent",
            f"{rollout}.multi_turn.max_assistant_turns=2",
            f"{rollout}.multi_turn.tool_config_path={HERE / 'tools.yaml'}",
            f"{rollout}.multi_turn.show_tools=false",
            f"actor_rollout_ref.model.path={MODEL_PATH}",
            f"train_tasks=[{{name: reasoning_gym, dataset: chain_sum, size: 4000, seed: 3, {digits}}}]",
            "data.max_prompt_length=256",
        ]
    )


def main() -> None:
    """Trains, and prints how the reward goes."""
    options = build_parser(__doc__, steps=60, shown=150).parse_args()
    model, tokenizer = load()
    rng = random.Random(0)
    problems = [draw_problem(rng, 2, rng.choice((2, 3)), Split.TRAIN) for _ in range(2000)]
    show(model, tokenizer, problems, chats, options.shown)
    train(options, model, tokenizer, environment)


if __name__ == "__main__":
    main()
