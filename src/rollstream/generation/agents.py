"""The agent loops of a run and what they work with, from a configuration."""

import logging
from dataclasses import dataclass

from omegaconf import DictConfig

from rollstream.agent.interactions import Interactions, load_interactions
from rollstream.agent.registry import AgentLoops, load_agent_loops
from rollstream.agent.tools.limits import ToolLimits
from rollstream.agent.tools.toolbox import ToolBox, load_toolbox
from rollstream.chat.parsers.base import get_parser
from rollstream.chat.template import TurnTemplate
from rollstream.chat.tokenizer import ChatTokenizer
from rollstream.config.load import to_settings
from rollstream.engine.registry import check_engine_config
from rollstream.errors import ConfigError

logger = logging.getLogger(__name__)

_MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"


@dataclass(slots=True)
class Agents:
    """The agent loops of a run, and what they work with."""

    loops: AgentLoops
    tools: ToolBox
    interactions: Interactions

    def check(self, names: set[str], tokenizer: ChatTokenizer) -> None:
        """Refuses loops that cannot work. Raises `ConfigError`."""
        for name in sorted(names):
            loop = self.loops.entry(name).loop
            if loop.needs_tools and not self.tools.schemas and not self.interactions.by_name:
                raise ConfigError(
                    f"agent loop {name!r} has neither tools nor interactions: set tool_config_path, "
                    f"function_tool_path or interaction_config_path of {_MULTI_TURN} "
                    "(data.tool_config_path only shows schemas)"
                )
        if self.tools.schemas and not TurnTemplate(tokenizer).has_tool_role:
            logger.warning(
                "the chat template has no role for tool results: the model gets them as a user's message"
            )

    def identity(self, names: set[str]) -> dict[str, str]:
        """Of each loop, what decides what it does."""
        return {name: self.loops.entry(name).digest for name in sorted(names)}


def load_agents(config: DictConfig) -> Agents:
    """The agent loops and tools of a run; connects to nothing.

    Raises:
        ConfigError: what is quick to check and cannot work, engine and model path included.
    """
    given = to_settings(config)
    if given.actor_rollout_ref.model.path is None:
        raise ConfigError("actor_rollout_ref.model.path is not set: name the model's folder")
    rollout = given.actor_rollout_ref.rollout
    check_engine_config(
        rollout.name,
        model_path=given.actor_rollout_ref.model.path,
        server_urls=rollout.server_urls,
        engine_kwargs=rollout.engine_kwargs,
    )
    multi_turn = rollout.multi_turn
    loops = AgentLoops(load_agent_loops(rollout.agent.agent_loop_config_path))
    loops.entry(rollout.agent.default_agent_loop)
    get_parser(multi_turn.format)
    return Agents(
        loops,
        load_toolbox(
            tool_config_path=multi_turn.tool_config_path,
            function_tool_path=multi_turn.function_tool_path,
            limits=ToolLimits(
                max_parallel_calls=multi_turn.max_parallel_calls,
                max_response_length=multi_turn.max_tool_response_length,
                truncate_side=multi_turn.tool_response_truncate_side,
                timeout=multi_turn.tool_timeout,
            ),
        ),
        load_interactions(multi_turn.interaction_config_path, timeout=multi_turn.interaction_timeout),
    )
