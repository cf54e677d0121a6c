"""An environment of verifiers 0.2: sums with a calculator, or with a checker that has the model try again."""

import random
from typing import Any

import verifiers as vf
from datasets import Dataset

from demo_model.chats import CALCULATOR
from demo_model.problems import Split, enumerate_pairs

SEEN: dict[str, dict[str, Any]] = {}
"""What the environment had of each answer, by the answer's name."""


def problems(size: int) -> list[dict[str, Any]]:
    pairs = list(enumerate_pairs(2, Split.TRAIN))
    random.Random(0).shuffle(pairs)
    return [
        {"question": pair.question, "answer": pair.answer, "info": {"kind": "sum"}} for pair in pairs[:size]
    ]


def calculator(expression: str) -> str:
    """Calculates."""
    left, sign, right = expression.split()
    return str(int(left) + int(right) if sign == "+" else int(left) - int(right))


def right(completion: Any, answer: str) -> float:
    return float((completion[-1].content or "").strip() == answer)


def saw(state: vf.State) -> float:
    """Keeps what the environment had of each answer, for the tests."""
    for step in state["trajectory"]:
        message = step["completion"][-1]
        SEEN[step["response"].id] = {
            "content": message.content or "",
            "calls": [call.arguments for call in message.tool_calls or []],
            "prompt_ids": step["tokens"]["prompt_ids"],
            "ids": step["tokens"]["completion_ids"],
            "logprobs": step["tokens"]["completion_logprobs"],
        }
    return 1.0


class Checker(vf.MultiTurnEnv):
    """Says whether an answer was right, and has state of its own."""

    def __init__(self, breaks_at: int | None = None, rewrites: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.breaks_at = breaks_at
        self.rewrites = rewrites

    async def setup_state(self, state: vf.State) -> vf.State:
        state["tries"] = 0
        if state["example_id"] == self.breaks_at:
            raise vf.SandboxError("the sandbox is gone")
        return state

    @vf.stop
    async def was_right(self, state: vf.State) -> bool:
        steps = state["trajectory"]
        return bool(steps) and (steps[-1]["completion"][-1].content or "").strip() == state["answer"]

    async def env_response(self, messages: Any, state: vf.State, **kwargs: Any) -> Any:
        state["tries"] += 1
        return [
            {
                "role": "user",
                "content": f"Incorrect <|im_end|> ({state['tries']}). {state['input']['question']}",
            }
        ]

    async def get_prompt_messages(self, state: vf.State) -> Any:
        messages = await super().get_prompt_messages(state)
        # A history that begins anew each time: only the last words stay.
        return messages[-1:] if self.rewrites else messages


def load_environment(kind: str = "tools", size: int = 8, **kwargs: Any) -> vf.Environment:
    dataset = Dataset.from_list(problems(size))
    rubric = vf.Rubric(funcs=[right, saw], weights=[1.0, 0.0])
    if kind == "tools":
        env: vf.Environment = vf.ToolEnv(
            tools=[calculator], max_turns=3, dataset=dataset, rubric=rubric, **kwargs
        )
        # The one description that the demo model knows.
        env.tool_defs = [vf.Tool(**CALCULATOR["function"])]
        return env
    if kind == "group":

        async def best(completions: Any) -> list[float]:
            return [1.0 for _ in completions]

        return vf.SingleTurnEnv(dataset=dataset, rubric=vf.Rubric(funcs=[best]))
    return Checker(dataset=dataset, rubric=rubric, max_turns=3, rewrites=kind == "rewrites", **kwargs)
