"""The same with Anthropic's client (`pip install anthropic`), as in `openai_program.py`. It streams.

By hand: ANTHROPIC_BASE_URL=… ANTHROPIC_API_KEY=… python anthropic_program.py '37 + 41'
"""

import json
import os
import re
import sys
from pathlib import Path

from anthropic import Anthropic

CALCULATOR = {
    "name": "calculator",
    "description": "Evaluate an arithmetic expression.",
    "input_schema": {
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "The expression, such as 12 + 34."}},
        "required": ["expression"],
    },
}


def calculate(expression):
    """Adds up; what is wrong is said to the model."""
    if not re.fullmatch(r"-?\d+( [+-] \d+)*", str(expression)):
        return "error: not a sum of whole numbers"
    return str(sum(map(int, re.findall(r"-?\d+", expression.replace("- ", "-")))))


def solve(messages):
    """Asks, runs tools, asks again: four times at most."""
    client = Anthropic()  # ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY are set
    for _ in range(4):
        asked = {"model": "demo", "max_tokens": 64, "messages": messages, "tools": [CALCULATOR]}
        with client.messages.stream(**asked) as stream:
            answer = stream.get_final_message()
        messages.append({"role": "assistant", "content": answer.content})
        calls = [block for block in answer.content if block.type == "tool_use"]
        if not calls:
            return "".join(block.text for block in answer.content if block.type == "text")
        results = [
            {
                "type": "tool_result",
                "tool_use_id": call.id,
                "content": calculate(call.input.get("expression")),
            }
            for call in calls
        ]
        messages.append({"role": "user", "content": results})
    return ""


if __name__ == "__main__":
    if row := os.environ.get("ROLLSTREAM_ROW"):
        answer = solve(json.loads(Path(row).read_text())["prompt"])
        Path(os.environ["ROLLSTREAM_RESULT"]).write_text(json.dumps({"answer": answer}))
    else:
        question = f"State the final answer to the following arithmetic problem: {sys.argv[1]} ="
        print(solve([{"role": "user", "content": question}]))
