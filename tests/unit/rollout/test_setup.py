"""What is refused at start of the agent loops and tools of a run, and what decides their data."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from rollstream.agent.base import AgentLoop
from rollstream.agent.chat_agent import ChatAgent
from rollstream.agent.interactions import Interaction, Interactions
from rollstream.agent.registry import AgentLoops, LoopEntry
from rollstream.agent.tools.toolbox import ToolBox
from rollstream.config.load import to_settings
from rollstream.demo import MODEL_PATH
from rollstream.errors import ConfigError
from rollstream.generation.run import as_config
from rollstream.rollout.setup import Agents, build_setup, load_agents
from rollstream.trajectory import SamplingParams, Trajectory
from tests.unit.agent.rollouts import demo_tokenizer
from tests.unit.agent.tools.tools import Recorder, class_tool
from tests.unit.chat.templates import load

FUNCTIONS = """
from rollstream.agent.tools.functions import function_tool

@function_tool
def add(a: int) -> int:
    '''Adds.

    Args:
        a: What.
    '''
    return a
"""
LOOPS = """
from rollstream.agent.tool_agent import ToolAgent
class Mine(ToolAgent):
    needs_tools = False
"""


def agents(*words: str) -> Agents:
    words = (f"actor_rollout_ref.model.path={MODEL_PATH}", *words)
    return asyncio.run(load_agents(to_settings(as_config(words))))


def rollout(key: str, value: Any) -> str:
    return f"actor_rollout_ref.rollout.{key}={value}"


def test_nothing_configured_is_single_turn_without_tools() -> None:
    made = agents()
    assert made.tools.schemas == []
    assert not made.interactions.by_name
    made.check({"single_turn_agent", "context_agent"}, demo_tokenizer(), show_tools=True, images=False)
    assert list(made.identity({"tool_agent", "single_turn_agent"}, "hermes")) == [
        "agent.loops.single_turn_agent",
        "agent.loops.tool_agent",
        "multi_turn.interactions",
        "multi_turn.parser",
    ]


def test_a_template_that_tells_of_no_tools_is_refused() -> None:
    made = Agents(AgentLoops(), ToolBox([class_tool(Recorder)]), Interactions())
    with pytest.raises(ConfigError, match="show_tools"):
        made.check({"tool_agent"}, load("gemma"), show_tools=True, images=False)
    with pytest.raises(ConfigError, match="context_agent"):
        made.check({"context_agent"}, demo_tokenizer(), show_tools=True, images=True)


def test_a_loop_that_needs_tools_is_refused_without_any() -> None:
    with pytest.raises(ConfigError, match="tool_agent"):
        agents().check({"single_turn_agent", "tool_agent"}, demo_tokenizer(), show_tools=True, images=False)
    with_tools = Agents(AgentLoops(), ToolBox([class_tool(Recorder)]), Interactions())
    with_tools.check({"tool_agent"}, demo_tokenizer(), show_tools=True, images=False)
    partners = Interactions({"x": Interaction({})})
    Agents(AgentLoops(), ToolBox(), partners).check(
        {"tool_agent"}, demo_tokenizer(), show_tools=True, images=False
    )
    with pytest.raises(ConfigError, match="tool_agnt"):
        with_tools.check({"tool_agnt"}, demo_tokenizer(), show_tools=True, images=False)


def test_a_template_by_which_results_cannot_follow_a_call_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One that shows a call's id only when something follows it. A program may do without calls."""
    later = (
        "{%- for t in tools or [] -%}{{ t.function.name }}{%- endfor -%}"
        "{%- for m in messages -%}{{ '<|im_start|>' + m.role + m.content }}"
        "{%- for c in m.tool_calls or [] -%}{{ c.function | tojson }}"
        "{%- if m != messages[-1] -%}{{ c.id }}{%- endif -%}{%- endfor -%}<|im_end|>{%- endfor -%}"
    )
    loops = AgentLoops({"program": LoopEntry(Program)})
    made = Agents(loops, ToolBox([class_tool(Recorder)]), Interactions())
    made.check({"single_turn_agent"}, load("chatml", later), show_tools=True, images=False)
    with pytest.raises(ConfigError, match=r"'tool_agent'.*custom_chat_template"):
        made.check({"tool_agent"}, load("chatml", later), show_tools=True, images=False)
    with caplog.at_level(logging.WARNING):
        made.check({"program"}, load("chatml", later), show_tools=True, images=False)
    assert "'program'" in caplog.text


class Program(AgentLoop):
    """A loop of somebody's own."""

    async def run(self, sampling: SamplingParams, **row: Any) -> Trajectory:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([rollout("multi_turn.format", "herms")], "herms"),
        ([rollout("agent.default_agent_loop", "single_turn")], "single_turn"),
        ([rollout("multi_turn.interaction_config_path", "none.yaml")], "none.yaml"),
        (["actor_rollout_ref.model.path=null"], "model.path"),
        ([rollout("name", "openvin")], "openvin"),
    ],
)
def test_mistakes_are_named_at_start(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        agents(*words)


def test_the_identity_is_of_loops_that_are_used(tmp_path: Path) -> None:
    (tmp_path / "loops.py").write_text(LOOPS)
    (tmp_path / "loops.yaml").write_text("- {name: mine, _target_: 'loops.py:Mine'}")
    key = rollout("agent.agent_loop_config_path", tmp_path / "loops.yaml")
    before = agents(key).identity({"mine", "single_turn_agent"}, "hermes")
    (tmp_path / "loops.py").write_text(LOOPS + "# changed\n")
    after = agents(key).identity({"mine", "single_turn_agent"}, "hermes")
    assert before["agent.loops.single_turn_agent"] == after["agent.loops.single_turn_agent"]
    assert before["agent.loops.mine"] != after["agent.loops.mine"]
    assert agents(key).identity({"single_turn_agent"}, "hermes").keys() == {"agent.loops.single_turn_agent"}


async def test_a_hosted_model_has_a_loop_of_its_own() -> None:
    words = ["actor_rollout_ref.model.path=gpt-x", rollout("server_urls", "[http://127.0.0.1:1]")]
    settings = to_settings(as_config([*words, rollout("name", "openai")]))
    setup = await build_setup(settings, await load_agents(settings), shows_images=True)
    assert (setup.tokenizer, setup.prompts, setup.pad_id, setup.stored_tokenizer()) == (None,) * 4
    for name in ("single_turn_agent", "tool_agent", "chat_agent"):
        setup.agents.check({name}, None, show_tools=True, images=True)
        assert setup.agents.loops.entry(name).loop is ChatAgent
    with pytest.raises(ConfigError, match="'context_agent' works with token ids"):
        setup.agents.check({"context_agent"}, None, show_tools=True, images=False)
    with pytest.raises(ConfigError, match="'chat_agent' works with messages only"):
        Agents(AgentLoops(), ToolBox(), Interactions()).check(
            {"chat_agent"}, load("chatml"), show_tools=True, images=False
        )


async def test_a_reward_that_sees_groups_is_refused_where_nobody_waits_for_them(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(
        "def compute_score(data_sources, solution_strs, ground_truths, extra_infos): ..."
    )
    words = [
        f"actor_rollout_ref.model.path={MODEL_PATH}",
        f"custom_reward_function.path={tmp_path / 'judge.py'}",
    ]
    settings = to_settings(as_config(words))
    with pytest.raises(ConfigError, match="solution_strs"):
        await build_setup(settings, await load_agents(settings))
    setup = await build_setup(settings, await load_agents(settings), groups=True)
    assert setup.group_reward is setup.reward and setup.judge is not None
    await setup.close()
