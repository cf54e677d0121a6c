"""Tool schemas of `data.tool_config_path`."""

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from rollstream.errors import ConfigError

ToolSchema = dict[str, Any]
"""An OpenAI tool schema: `{"type": "function", "function": {"name", "description", "parameters"}}`."""


def load_tool_schemas(path: str | Path) -> list[ToolSchema]:
    """Reads the tool schemas that are shown to the model, from a tool file as verl has it.

    The file is YAML: `tools:`, a list of `class_name`, `config` and `tool_schema`; only the last is used.

    Args:
        path: The file.

    Returns:
        The schemas as they are written, in order.

    Raises:
        ConfigError: No such file, not YAML, no tools, or a schema that is not whole; names the tool.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"data.tool_config_path: no such file: {file}")
    try:
        content = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"data.tool_config_path: {file} cannot be read as YAML ({error})") from error
    tools = content.get("tools") if isinstance(content, dict) else None
    if not isinstance(tools, list) or not tools:
        raise ConfigError(f"data.tool_config_path: {file} needs `tools:` with a list of tools")
    schemas = [
        _check_tool(tool, f"data.tool_config_path: {file}, tools[{i}]") for i, tool in enumerate(tools)
    ]
    names = [schema["function"]["name"] for schema in schemas]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"data.tool_config_path: {file} has more than one tool named {', '.join(twice)}")
    return schemas


def _check_tool(tool: Any, where: str) -> ToolSchema:
    schema = tool.get("tool_schema") if isinstance(tool, dict) else None
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
