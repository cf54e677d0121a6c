"""GRPO with `context_agent`: the demo model learns to delete a note that it does not need, and then to answer.

    python -m examples.edit_context.train --curve edit_context.png

A rollout that deletes has two trajectories: up to the deletion, and the answer in the shorter context. Both are
trained. First the model is shown what a deletion looks like, in a third of some hundred chats.
"""

import random
from pathlib import Path
from typing import Any

from datasets import Dataset

from demo_model.problems import Problem, Split, enumerate_pairs
from examples.training import build_parser, load, show, train
from rollstream.demo import MODEL_PATH
from rollstream.integrations.trl import RolloutEnvironment

HERE = Path(__file__).parent
NOTE = "Note: bring tea."
CALL = {"type": "function", "function": {"name": "deleteContext", "arguments": {"msg_id": 0}}}


def chats(problem: Problem) -> tuple[list[list[dict[str, Any]]], list[list[dict[str, Any]]]]:
    """What a rollout looks like to the model, without and with a deletion: its trajectories."""
    note, gone = (
        {"role": "user", "content": text} for text in (f"[msg_id: 0]\n{NOTE}", "[msg_id: 0] [deleted]")
    )
    question = {"role": "user", "content": f"[msg_id: 1]\n{problem.question}"}
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    told = {"role": "tool", "content": "[msg_id: 3]\nMessage 0 is deleted."}
    answer = {"role": "assistant", "content": problem.answer}
    return [[note, question, answer]], [[note, question, call], [gone, question, call, told, answer]]


def environment(folder: Path, *words: str) -> RolloutEnvironment:
    """The context agent, with a chat template that does not list its tools: the model knows them."""
    template = folder / "template.jinja"
    template.write_text((MODEL_PATH / "chat_template.jinja").read_text().replace("if tools", "if false"))
    rollout = "actor_rollout_ref.rollout"
    return RolloutEnvironment(
        [
            f"{rollout}.name=openvino",
            f"{rollout}.agent.default_agent_loop=context_agent",
            f"{rollout}.multi_turn.max_assistant_turns=2",
            f"actor_rollout_ref.model.path={MODEL_PATH}",
            f"actor_rollout_ref.model.custom_chat_template={template}",
            f"custom_reward_function.path={HERE / 'reward.py'}",
            "data.max_prompt_length=320",
            *words,
        ]
    )


def dataset(problems: list[Problem]) -> Dataset:
    """A note and a question each."""
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": text} for text in (NOTE, problem.question)],
                "answer": problem.answer,
            }
            for problem in problems
        ]
    )


def main() -> None:
    """Trains, and prints how the reward goes."""
    options = build_parser(__doc__, steps=40, shown=150).parse_args()
    model, tokenizer = load()
    problems = list(enumerate_pairs(2, Split.TRAIN))
    random.Random(0).shuffle(problems)
    show(model, tokenizer, problems[:2000], chats, options.shown)
    train(
        options,
        model,
        tokenizer,
        environment,
        dataset=dataset(problems[2000:]),
        num_generations=8,
        max_completion_length=64,
        learning_rate=1e-3,
        warmup_steps=0,
    )


if __name__ == "__main__":
    main()
