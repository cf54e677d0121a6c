"""Synthetic chats: a problem answered at once, and a problem answered with a calculator."""

import random
from typing import Any

from demo_model.problems import Problem

Message = dict[str, Any]
"""One chat message as OpenAI writes it: role, content and, of an assistant, tool_calls."""

CALCULATOR: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {"type": "string", "description": "The expression, such as 12 + 34."}
            },
            "required": ["expression"],
        },
    },
}
"""The tool the model knows, in OpenAI's schema."""

_TOOL_TEXTS = (
    CALCULATOR["function"]["description"],
    "Compute the value of an expression.",
    "A calculator for sums and differences.",
)
_EXPRESSION_TEXTS = (
    CALCULATOR["function"]["parameters"]["properties"]["expression"]["description"],
    "What to compute.",
    "An arithmetic expression.",
    None,
)
_SYSTEM_TEXTS = (
    "You are a helpful assistant.",
    "Use the calculator.",
    "Answer with the number only.",
)
_FEEDBACK_TEXTS = (
    "Your answer is wrong. Try again.",
    "Your response is incorrect! You need to reflect on your answer and try again.",
    "That is not right, please try once more.",
    "Incorrect.",
    "No. What is the correct answer?",
    "The answer was wrong, think again.",
)
"""What an environment may say to a wrong answer."""
_ASIDE_SHARE = 0.3
"""How many tool chats differ in wording from the standard one: enough that the wording does not matter to the
model, few enough that the standard one is learnt as fast as without them."""


def build_direct_chat(problem: Problem) -> list[Message]:
    """A question, and its answer without a tool."""
    return [
        {"role": "user", "content": problem.question},
        {"role": "assistant", "content": problem.answer},
    ]


def build_retry_chat(problem: Problem, rng: random.Random) -> list[Message]:
    """A question, a wrong answer, a complaint, and the right answer."""
    wrong = int(problem.answer) + rng.choice((-20, -10, -2, -1, 1, 2, 10, 20))
    return [
        {"role": "user", "content": problem.question},
        {"role": "assistant", "content": str(wrong)},
        {"role": "user", "content": rng.choice(_FEEDBACK_TEXTS)},
        {"role": "assistant", "content": problem.answer},
    ]


def build_tool_chat(problem: Problem) -> list[Message]:
    """A question, a call of the calculator, its result, and the answer."""
    call = {
        "type": "function",
        "function": {"name": "calculator", "arguments": {"expression": problem.expression}},
    }
    return [
        {"role": "user", "content": problem.question},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": problem.answer},
        {"role": "assistant", "content": problem.answer},
    ]


def vary_tool_chat(chat: list[Message], rng: random.Random) -> tuple[list[Message], dict[str, Any]]:
    """Give a tool chat the schema it is offered with and, now and then, another wording of schema and system.

    Returns:
        The chat, and the tool's schema.
    """
    if rng.random() >= _ASIDE_SHARE:
        return chat, CALCULATOR
    expression: dict[str, str] = {"type": "string"}
    if text := rng.choice(_EXPRESSION_TEXTS):
        expression["description"] = text
    tool = {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": rng.choice(_TOOL_TEXTS),
            "parameters": {
                "type": "object",
                "properties": {"expression": expression},
                "required": ["expression"],
            },
        },
    }
    if rng.random() < 0.5:
        chat = [{"role": "system", "content": rng.choice(_SYSTEM_TEXTS)}, *chat]
    return chat, tool
