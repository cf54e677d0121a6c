"""Tool schemas of `data.tool_config_path`."""

from pathlib import Path

from rollstream.chat.tool_schema import ToolSchema, check_names_differ, check_tool_schema, read_tool_entries

_KEY = "data.tool_config_path"


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
    schemas = [
        check_tool_schema(
            tool.get("tool_schema") if isinstance(tool, dict) else None, f"{_KEY}: {path}, tools[{i}]"
        )
        for i, tool in enumerate(read_tool_entries(path, key=_KEY))
    ]
    check_names_differ((schema["function"]["name"] for schema in schemas), f"{_KEY}: {path}")
    return schemas
