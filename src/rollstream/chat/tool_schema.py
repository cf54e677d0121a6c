"""OpenAI tool schemas, and the files that hold them."""

import hashlib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import orjson

from rollstream.errors import ConfigError, unknown_name
from rollstream.user_code import read_yaml

ToolSchema = dict[str, Any]
"""An OpenAI tool schema: `{"type": "function", "function": {"name", "description", "parameters"}}`."""


def schema_json(schema: ToolSchema) -> bytes:
    """A schema as JSON, in the order of its keys: a chat template shows them in that order."""
    return orjson.dumps(schema, option=orjson.OPT_NON_STR_KEYS, default=repr)


def schema_digest(schema: ToolSchema) -> str:
    """The same for schemas that a chat template shows alike: 16 hexadecimal digits."""
    return hashlib.blake2b(schema_json(schema), digest_size=8).hexdigest()


def read_tool_entries(path: str | Path, *, key: str) -> list[Any]:
    """The entries of a tool file as verl has it: YAML with `tools:`, a list. What is in them is not checked.

    `key` is the configuration key, for messages. Raises `ConfigError`: no such file, not YAML, or no tools.
    """
    content = read_yaml(path, key=key)
    tools = content.get("tools") if isinstance(content, dict) else None
    if not isinstance(tools, list) or not tools:
        raise ConfigError(f"{key}: {path} needs `tools:` with a list of tools")
    return tools


def check_tool_schema(schema: Any, where: str) -> ToolSchema:
    """A schema as it is, if it is whole. Raises `ConfigError`, which names the tool and what is wrong."""
    if not isinstance(schema, dict):
        raise ConfigError(f"{where}: needs a tool_schema (a mapping with type and function)")
    if schema.get("type") != "function":
        raise ConfigError(f"{where}: tool_schema.type is {schema.get('type')!r}, want 'function'")
    function = schema.get("function")
    if not isinstance(function, dict):
        raise ConfigError(f"{where}: tool_schema.function is missing, want name, description and parameters")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: tool_schema.function.name is {name!r}, want text")
    description = function.get("description", "")
    if not isinstance(description, str):
        raise ConfigError(f"{where} ({name}): description is {description!r}, want text")
    parameters = function.get("parameters")
    if parameters is None:
        return schema
    if not isinstance(parameters, dict) or parameters.get("type") != "object":
        raise ConfigError(f"{where} ({name}): parameters must be a JSON schema with `type: object`")
    properties = parameters.get("properties", {})
    if not isinstance(properties, dict):
        raise ConfigError(f"{where} ({name}): parameters.properties must be a mapping")
    required = parameters.get("required") or []
    if not isinstance(required, list) or any(item not in properties for item in required):
        raise ConfigError(f"{where} ({name}): parameters.required names more than parameters.properties")
    return schema


def check_names_differ(names: Iterable[str], where: str) -> None:
    """Raises `ConfigError` if two tools have the same name; names them."""
    names = list(names)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{where} has more than one tool named {', '.join(twice)}")


def check_keys(keys: Iterable[Any], known: Collection[str], where: str) -> None:
    """Refuses unknown keys of a mapping. Raises `ConfigError`, with the nearest known one."""
    for key in keys:
        if key not in known:
            raise ConfigError(f"{where}: {unknown_name('key', key, known)}")
