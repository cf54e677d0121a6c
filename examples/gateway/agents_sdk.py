"""An agent of OpenAI's Agents SDK (`pip install openai-agents`) as a rollout: `run` is called once for each.

The agent is the SDK's own, with a calculator as its tool. It is asked twice, at the same time, and a third time
where its answers differ; the answer given most often counts. So a rollout has two conversations or three, and
each is a trajectory.
"""

import asyncio
import re
from collections import Counter

from agents import (
    Agent,
    AgentsException,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)

set_tracing_disabled(True)  # it would send what it sees to OpenAI


@function_tool(strict_mode=False)
def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    if not re.fullmatch(r"-?\d+( [+-] \d+)*", expression):
        return "error: not a sum of whole numbers"
    return str(sum(map(int, re.findall(r"-?\d+", expression.replace("- ", "-")))))


async def run(client, row):
    """A rollout.

    Args:
        client: an `openai.AsyncOpenAI` whose calls are answered by the run's engine, and recorded.
        row: the prompt row.
    """
    model = OpenAIChatCompletionsModel("demo", client)
    agent = Agent("calculating", tools=[calculator], model=model)
    answers = list(await asyncio.gather(ask(agent, row), ask(agent, row)))
    if answers[0] != answers[1]:
        answers.append(await ask(agent, row))
    return {"answer": Counter(answers).most_common(1)[0][0], "extra": {"answers": answers}}


async def ask(agent, row):
    """What the agent says in the end; nothing where it comes to no end."""
    try:
        result = await Runner.run(agent, list(row["prompt"]), max_turns=4)
    except AgentsException:  # too many turns, or a call of a tool that is none
        return ""
    return result.final_output.strip()
