"""A smolagents agent with a shell, asked the first argument."""

import os
import subprocess
import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def shell(command: str) -> str:
    """Runs a command.

    Args:
        command: For sh.
    """
    return subprocess.run(command, shell=True, capture_output=True, text=True, check=False).stdout


ToolCallingAgent([shell], OpenAIModel(os.environ["ROLLSTREAM_MODEL"])).run(sys.argv[1])
