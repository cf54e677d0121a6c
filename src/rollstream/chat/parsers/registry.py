"""Parsers by name."""

import rollstream.chat.parsers.gpt_oss
import rollstream.chat.parsers.llama3_json
import rollstream.chat.parsers.mistral
import rollstream.chat.parsers.sections
import rollstream.chat.parsers.tool_call_tags  # noqa: F401
from rollstream.chat.parsers.base import PARSERS, ToolCallParser
from rollstream.errors import unknown_name


def get_parser(name: str) -> ToolCallParser:
    """The parser registered under a name.

    Raises:
        ConfigError: there is none; it names the nearest one and lists all.
    """
    if name not in PARSERS:
        raise unknown_name("tool parser", name, PARSERS)
    return PARSERS[name]()
