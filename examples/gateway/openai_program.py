"""An agent program that knows OpenAI's API and nothing of rollstream: a model, a calculator, and a loop.

In a run it is started once for each rollout (run.yaml). By hand it asks any server, `rollstream serve` for one:

    OPENAI_BASE_URL=http://127.0.0.1:30000/v1 OPENAI_API_KEY=none python openai_program.py '37 + 41'
"""

import json
import os
import re
import sys
from pathlib import Path

from openai import OpenAI

CALCULATOR = {
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


def calculate(expression):
    """Adds up; what is wrong is said to the model."""
    if not re.fullmatch(r"-?\d+( [+-] \d+)*", str(expression)):
        return "error: not a sum of whole numbers"
    return str(sum(map(int, re.findall(r"-?\d+", expression.replace("- ", "-")))))


def solve(messages):
    """Asks, runs tools, asks again: four times at most."""
    client = OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY are set
    for _ in range(4):
        answer = client.chat.completions.create(model="demo", messages=messages, tools=[CALCULATOR])
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            result = calculate(json.loads(call.function.arguments).get("expression"))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


if __name__ == "__main__":
    if row := os.environ.get("ROLLSTREAM_ROW"):
        answer = solve(json.loads(Path(row).read_text())["prompt"])
        Path(os.environ["ROLLSTREAM_RESULT"]).write_text(json.dumps({"answer": answer}))
    else:
        question = f"State the final answer to the following arithmetic problem: {sys.argv[1]} ="
        print(solve([{"role": "user", "content": question}]))
