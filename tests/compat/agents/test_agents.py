"""Coding agents of others run behind the gateway as they are, and each conversation is one exact trajectory.

Each runs in a sandbox that reaches nothing but the gateway; a scripted model uses its shell once, then ends.
`make test-agents` installs them. One that is not installed is skipped.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rollstream.agent.registry import AgentLoops, LoopEntry
from rollstream.gateway.command_agent import CommandAgent
from rollstream.rollout.worker import RolloutWorker
from rollstream.testing.scripted import ScriptedEngine
from rollstream.testing.text_rules import answer_by_text
from rollstream.trajectory import Trajectory, sampled_stretches
from tests.compat.agents.agents import AGENTS, ANSWER, PROOF, CodingAgent
from tests.compat.agents.install import FOLDER, is_installed
from tests.support.engines import started
from tests.unit.agent.rollouts import (
    call_text,
    completed,
    demo_tokenizer,
    make_row,
    make_worker,
    resources,
)

ROOM = 500_000
"""Tokens of the demo model's small vocabulary, of which Codex' first prompt takes some 100,000."""

SECONDS = 100.0
"""For an agent that takes 15 on an idle machine."""

READ_TASK = """task=$(python -c 'import json, os
print(json.load(open(os.environ["ROLLSTREAM_ROW"]))["prompt"][-1]["content"])')
"""
TITLE = "A written file"


def script(agent: CodingAgent) -> Callable[[str], str]:
    """The model: it uses the agent's shell, reads what that printed, and ends."""

    def answer(prompt: str) -> str:
        if f'"{agent.tool}"' not in prompt:
            return TITLE
        if PROOF not in prompt:
            return call_text(agent.tool, **agent.arguments)
        return ANSWER if agent.end is None else call_text(agent.end[0], **agent.end[1])

    return answer


def worker(engine: ScriptedEngine, name: str, workdirs: Path) -> RolloutWorker:
    """Its rollouts are the agent's, in a sandbox without a network."""
    agent, folder = AGENTS[name], FOLDER / name
    path = [folder / "bin", folder / "node_modules" / ".bin", Path(sys.executable).parent]
    options = {
        "command": ["sh", "-c", READ_TASK + agent.command],
        "env": {"PATH": os.pathsep.join([*map(str, path), os.environ["PATH"]])},
        "sandbox": "bubblewrap",
        "mounts": [str(folder), str(Path(__file__).parent)],
        "timeout": SECONDS,
        "keep_workdir": "always",
        "workdirs": str(workdirs),
    }
    loops = AgentLoops({"command_agent": LoopEntry(CommandAgent, options)})
    room = resources(engine, prompt_length=ROOM, response_length=ROOM)
    return make_worker(room, loop="command_agent", loops=loops, max_attempts=1, attempt_timeout=2 * SECONDS)


def stored(trajectories: Iterable[Trajectory]) -> Iterator[tuple[list[int], list[int], list[float]]]:
    """Each answer: the ids before it, its own ids, and their log-probs."""
    for each in trajectories:
        assert each.response_logprobs is not None
        for start, end in sampled_stretches(each.response_mask):
            before = each.prompt_ids + each.response_ids[:start]
            yield before, each.response_ids[start:end], each.response_logprobs[start:end]


def answered(engine: ScriptedEngine) -> Iterator[tuple[list[int], list[int], list[float] | None]]:
    """The same as the engine saw it, which answers at once, so that its two records have one order."""
    for request, (_, completion) in zip(engine.requests, engine.completions, strict=True):
        yield request.prompt_ids, completion.token_ids, completion.logprobs


@pytest.mark.slow
@pytest.mark.parametrize("name", AGENTS)
async def test_an_agents_conversation_is_one_exact_trajectory(name: str, tmp_path: Path) -> None:
    if not is_installed(name):
        pytest.skip("make test-agents installs it")
    agent = AGENTS[name]
    engine = ScriptedEngine(answer_by_text(demo_tokenizer(), script(agent)))
    engine.capabilities = replace(engine.capabilities, stop_strings=True)
    async with started(engine):
        rollout = completed(await worker(engine, name, tmp_path).run(make_row(text="Write proof.txt."), 0))

    (proof,) = tmp_path.rglob("proof.txt")
    assert proof.read_text() == f"{PROOF}\n"
    assert sorted(stored(rollout.trajectories)) == sorted(answered(engine))
    final = rollout.final
    conversation = [each for each in rollout.trajectories if each.messages[-1]["content"] != TITLE]
    assert len(conversation) == (2 if agent.own_history else 1) and conversation[-1] is final
    *earlier, last = final.messages
    assert ANSWER in str(last) if agent.end is None else agent.end[0] in str(last)
    assert agent.tool in str(earlier) and PROOF in str(earlier)
    if not agent.own_history:
        assert [message["role"] for message in earlier[-2:]] == ["assistant", "tool"]
    assert all("rendered_again_tokens" not in each.extra.get("gateway", {}) for each in rollout.trajectories)


@pytest.mark.parametrize("name", AGENTS)
def test_the_page_says_how_an_agent_is_run(name: str) -> None:
    page, agent = (FOLDER.parent / "docs" / "gateway.md").read_text("utf-8"), AGENTS[name]
    assert f"\n# {agent.package}: " in page
    assert agent.command in page or "_program.py" in agent.command
