"""An artifact of the demo model's kind of conversations, two rollouts a prompt, one of them with a tool."""

from pathlib import Path
from typing import Any

from rollstream.chat.tokenizer import load_tokenizer
from rollstream.demo import MODEL_PATH
from rollstream.trajectory import Metrics, Trajectory
from tests.unit.store.export.artifacts import rollouts, write_artifact

CALL = {
    "id": "c",
    "type": "function",
    "function": {"name": "calculator", "arguments": {"expression": "40 + 2"}},
}


def chat_artifact(path: Path) -> Path:
    """Three prompts, each answered right (reward 1) and wrong (reward 0); the last one right by the tool."""
    tokenizer = load_tokenizer(str(MODEL_PATH))
    found: list[Trajectory] = []
    for question, answers in {"1 + 2 =": "39", "4 + 4 =": "80", "40 + 2 =": "??"}.items():
        for answer, reward in zip(answers, (1.0, 0.0), strict=True):
            prompt = [{"role": "user", "content": question}]
            turns: list[dict[str, Any]] = [{"role": "assistant", "content": answer}]
            if (answer, reward) == ("?", 1.0):
                turns = [
                    {"role": "assistant", "content": "", "tool_calls": [CALL]},
                    {"role": "tool", "content": "42", "name": "calculator", "tool_call_id": "c"},
                    {"role": "assistant", "content": "42"},
                ]
            prompt_ids = tokenizer.render(prompt)
            ids = tokenizer.render([*prompt, *turns], add_generation_prompt=False)[len(prompt_ids) :]
            # Of the tool's turn nothing is sampled; where exactly it begins is nothing that these tests look at.
            mask = [1] * len(ids) if len(turns) == 1 else [1] * 4 + [0] * (len(ids) - 8) + [1] * 4
            found.append(
                Trajectory(
                    prompt_ids=prompt_ids,
                    response_ids=ids,
                    response_mask=mask,
                    response_logprobs=None,
                    messages=[*prompt, *turns],
                    finish_reason="stop",
                    reward=reward,
                    metrics=Metrics(engine_calls=(len(turns) + 1) // 2),
                )
            )
    return write_artifact(path, rollouts(*found))
