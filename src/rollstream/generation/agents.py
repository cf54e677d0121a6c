"""The agent loops of a run and what they work with, from a configuration."""

import logging
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from rollstream.agent.interactions import Interactions, load_interactions
from rollstream.agent.registry import AgentLoops, load_agent_loops
from rollstream.agent.single_turn import SingleTurnAgent
from rollstream.agent.tools.limits import ToolLimits
from rollstream.agent.tools.toolbox import ToolBox, load_toolbox
from rollstream.chat.parsers.base import get_parser
from rollstream.chat.template import TurnTemplate
from rollstream.chat.tokenizer import ChatTokenizer
from rollstream.config.load import to_settings
from rollstream.engine.registry import check_engine_config
from rollstream.errors import ConfigError
from rollstream.generation.replicas import launch_request
from rollstream.user_code import source_digest

logger = logging.getLogger(__name__)

_MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"


@dataclass(slots=True)
class Agents:
    """The agent loops of a run, and what they work with."""

    loops: AgentLoops
    tools: ToolBox
    interactions: Interactions

    def check(self, names: set[str], tokenizer: ChatTokenizer, *, show_tools: bool, images: bool) -> None:
        """Refuses loops that cannot work.

        Args:
            names: of the loops that rows use.
            tokenizer: its template has to show the tools.
            show_tools: whether it is asked to.
            images: whether rows have images.

        Raises:
            ConfigError: naming what to change.
        """
        template = TurnTemplate(tokenizer)
        unseen = [schema for schema in self.tools.schemas if not template.shows_tool(schema)]
        if show_tools and unseen:
            raise ConfigError(
                f"the chat template does not tell the model of tool {unseen[0]['function']['name']!r}: give "
                "one that does (actor_rollout_ref.model.custom_chat_template), or describe the tools in the "
                f"prompts and set {_MULTI_TURN}.show_tools=false"
            )
        for name in sorted(names):
            self.loops.check_options(name)
            loop = self.loops.entry(name).loop
            if images and not loop.sees_images:
                raise ConfigError(f"agent loop {name!r} shows no images, and rows have some")
            if loop.needs_tools and not self.tools.schemas and not self.interactions.by_name:
                raise ConfigError(
                    f"agent loop {name!r} has neither tools nor interactions: set tool_config_path, "
                    f"function_tool_path or interaction_config_path of {_MULTI_TURN} "
                    "(data.tool_config_path only shows schemas)"
                )
        if self.tools.schemas and not template.has_tool_role:
            logger.warning(
                "the chat template has no role for tool results: the model gets them as a user's message"
            )

    def prompt_tools(self, name: str, *, show_tools: bool) -> list[dict[str, Any]] | None:
        """Schemas that a loop's prompts show; None: those of `data.tool_config_path`."""
        return self.loops.entry(name).loop.prompt_tools(self.tools.schemas if show_tools else [])

    def identity(self, names: set[str], parser_name: str) -> dict[str, str]:
        """What the loops' code and partners decide, as part of a run's identity."""
        identity = {f"agent.loops.{name}": self.loops.entry(name).digest for name in sorted(names)}
        if any(self.loops.entry(name).loop is not SingleTurnAgent for name in names):
            identity["multi_turn.interactions"] = self.interactions.digest
            identity["multi_turn.parser"] = source_digest(type(get_parser(parser_name)))
        return identity


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
        launch=launch_request(given),
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
