"""A coding agent: the model writes files and runs commands in this folder, until it says something without a call.

It knows OpenAI's API and nothing of rollstream but where its task stands. What it leaves in the folder is judged.
"""

import json
import os
import subprocess
from pathlib import Path

from openai import OpenAI


def write_file(path, content):
    """Writes a file."""
    Path(path).write_text(content)
    return f"{path} is written"


def run(command):
    """Runs a command of the shell."""
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=20)
    return f"{done.stdout}{done.stderr}"[-2000:] or f"exit status {done.returncode}"


def schema(function, *parameters):
    """What the model is told of a tool."""
    properties = {name: {"type": "string"} for name in parameters}
    told = {"name": function.__name__, "description": function.__doc__}
    parameters = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {**told, "parameters": parameters}}


TOOLS = {"write_file": write_file, "run": run}
SCHEMAS = [schema(write_file, "path", "content"), schema(run, "command")]


def main():
    """Asks, executes, asks again: sixteen times at most."""
    client = OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY are set
    messages = json.loads(Path(os.environ["ROLLSTREAM_ROW"]).read_text())["prompt"]
    for _ in range(16):
        message = (
            client.chat.completions.create(model="any", messages=messages, tools=SCHEMAS).choices[0].message
        )
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            try:
                result = TOOLS[call.function.name](**json.loads(call.function.arguments))
            except Exception as error:  # the model is told, whatever it was
                result = f"error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


if __name__ == "__main__":
    main()
