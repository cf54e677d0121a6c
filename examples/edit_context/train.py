"""GRPO with `context_agent`: the demo model learns to delete a note that it does not need, and then to answer.

    python -m examples.edit_context.train        about two minutes

A rollout that deletes has two trajectories: up to the deletion, and the answer in the shorter context. Both are
trained. First the model is shown what a deletion looks like, in a third of some hundred chats.
"""

import argparse
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo_model.encode import EncodedChat, encode_chat, stack_chats
from demo_model.problems import Problem, Split, enumerate_pairs
from rollstream.demo import MODEL_PATH
from rollstream.integrations.trl import GRPOEnvConfig, GRPOEnvTrainer, RolloutEnvironment

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


def show(
    model: Any, tokenizer: Any, problems: list[Problem], steps: int, *, share: float, at_once: int = 12
) -> None:
    """Trains the model on chats of which a share has a deletion."""
    rng = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model.train()
    for _ in range(steps):
        some: list[EncodedChat] = []
        for problem in rng.sample(problems, at_once):
            kept, edited = chats(problem)
            picked = edited if rng.random() < share else kept
            some += [encode_chat(tokenizer, chat, last_only=True) for chat in picked]
        ids, labels = stack_chats(some, tokenizer.pad_token_id)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


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


def main() -> int:
    """Trains, and prints how the reward goes; 1 when it did not rise."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=40, help="of GRPO (default: %(default)s)")
    parser.add_argument(
        "--shown", type=int, default=150, help="steps before, on chats (default: %(default)s)"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    model = AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float32)
    problems = list(enumerate_pairs(2, Split.TRAIN))
    random.Random(0).shuffle(problems)
    show(model, tokenizer, problems, options.shown, share=1 / 3)
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOEnvConfig(
            folder,
            per_device_train_batch_size=64,
            num_generations=8,
            max_completion_length=64,
            max_steps=options.steps,
            learning_rate=1e-3,
            loss_type="grpo",
            scale_rewards="none",
            beta=0.0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=max(1, options.steps // 10),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = GRPOEnvTrainer(
            model,
            environment(Path(folder)),
            args,
            train_dataset=dataset(problems),
            processing_class=tokenizer,
        )
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    for entry in logged:
        print(
            f"step {entry['step']:4d}  reward {entry['reward']:.3f}  "
            f"trajectories a rollout {entry['rollstream/trajectories']:.2f}"
        )
    return 0 if logged[-1]["reward"] > logged[0]["reward"] + 0.1 else 1


if __name__ == "__main__":
    sys.exit(main())
