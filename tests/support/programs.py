"""Programs of agents for tests: plain Python, its standard library only."""

from pathlib import Path
from typing import Any

from rollstream.agent.registry import AgentLoops, LoopEntry
from rollstream.gateway.command_agent import CommandAgent
from rollstream.reward.base import RewardFunction
from rollstream.rollout.worker import RolloutWorker
from rollstream.testing.scripted import ScriptedEngine
from tests.unit.agent.rollouts import make_worker, resources

PRELUDE = """
import json, os, signal, subprocess, sys, time, urllib.request
row = json.load(open(os.environ["ROLLSTREAM_ROW"]))

def ask(messages, url=os.environ["OPENAI_BASE_URL"]):
    return ask_message(messages, url)["content"]

def ask_message(messages, url=os.environ["OPENAI_BASE_URL"], **more):
    body = json.dumps({"model": os.environ["ROLLSTREAM_MODEL"], "messages": messages, **more}).encode()
    head = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(url + "/chat/completions", body, head)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

def result(**given):
    with open(os.environ["ROLLSTREAM_RESULT"], "w") as file:
        json.dump(given, file)
"""


def program(folder: Path, script: str, name: str = "agent.py") -> list[str]:
    """A command that runs a script.

    It has `row`, `ask(messages)`, `ask_message(messages, **parameters)` and `result(answer=…)`.
    """
    file = folder / name
    file.write_text(PRELUDE + script)
    return ["python", str(file)]


def command_worker(
    engine: ScriptedEngine, command: list[str], *, reward: RewardFunction | None = None, **options: Any
) -> RolloutWorker:
    """A worker whose rollouts are a program's; `options` are those of `CommandAgent`."""
    attempts = options.pop("max_attempts", 1)
    loops = AgentLoops({"command_agent": LoopEntry(CommandAgent, {"command": command, **options})})
    return make_worker(
        resources(engine), loop="command_agent", loops=loops, reward=reward, max_attempts=attempts
    )
