"""OpenAI tool schemas, and the files that hold them."""

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import orjson

from rollstream.errors import ConfigError
from rollstream.user_code import read_yaml

logger = logging.getLogger(__name__)

ToolSchema = dict[str, Any]
"""An OpenAI tool schema: `{"type": "function", "function": {"name", "description", "parameters"}}`."""


def schema_json(schema: ToolSchema) -> bytes:
    """A schema as JSON, in the order of its keys: a chat template shows them in that order."""
    return orjson.dumps(schema, option=orjson.OPT_NON_STR_KEYS, default=repr)


def schema_digest(schema: ToolSchema) -> str:
    """The same for schemas that a chat template shows alike: 16 hexadecimal digits."""
    return hashlib.blake2b(schema_json(schema), digest_size=8).hexdigest()


def row_tools(column: Any) -> list[ToolSchema]:
    """The schemas in a prompt row's column `tools`, as data sets for TRL, slime and SkyRL have it.

    It is a list of schemas or of bare functions (name, description, parameters), or such a list as JSON text.
    There are none in anything else, such as a list of names.
    """
    if isinstance(column, str):
        try:
            column = orjson.loads(column)
        except orjson.JSONDecodeError:
            return []
    schemas = []
    for entry in column if isinstance(column, list) else ():
        if not isinstance(entry, dict):
            return []
        function = entry.get("function") or {key: value for key, value in entry.items() if key != "type"}
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return []
        schemas.append({"type": "function", "function": function})
    return schemas


def with_row_tools(schemas: Sequence[ToolSchema] | None, column: Any) -> list[ToolSchema] | None:
    """Schemas that a prompt shows: a run's or a loop's own, and those of a row's column with other names.

    None if `schemas` is None and the row has none.
    """
    shown = {schema["function"]["name"]: schema for schema in row_tools(column)}
    for schema in schemas or ():
        shown.pop(schema["function"]["name"], None)
    return None if schemas is None and not shown else [*(schemas or ()), *shown.values()]


def load_tool_schemas(path: str | Path) -> list[ToolSchema]:
    """Reads the schemas of `data.tool_config_path`, which are shown to the model, as they are written.

    The file is YAML as verl has it: `tools:`, a list of `class_name`, `config` and `tool_schema`; only the last
    is used. Raises `ConfigError`: no such file, not YAML, no tools, or a schema that is not whole.
    """
    key = "data.tool_config_path"
    schemas = [
        check_tool_schema(
            tool.get("tool_schema") if isinstance(tool, dict) else None, f"{key}: {path}, tools[{i}]"
        )
        for i, tool in enumerate(read_tool_entries(path, key=key))
    ]
    check_names_differ((schema["function"]["name"] for schema in schemas), f"{key}: {path}")
    return schemas


def read_tool_entries(path: str | Path, *, key: str) -> list[Any]:
    """The entries of a tool file as verl has it: YAML with `tools:`, a list. What is in them is not checked.

    `key` is the configuration key, for messages. Raises `ConfigError`: no such file, not YAML, or no tools.
    """
    content = read_yaml(path, key=key)
    tools = content.get("tools") if isinstance(content, dict) else None
    if not isinstance(tools, list) or not tools:
        raise ConfigError(f"{key}: {path} needs `tools:` with a list of tools")
    return tools


class _Parameters(msgspec.Struct):
    type: Literal["object"]
    properties: dict[str, Any] = {}
    required: list[str] | None = None


class _Function(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(min_length=1)]
    description: str = ""
    parameters: _Parameters | None = None


class _CheckedTool(msgspec.Struct):
    """What is checked of a schema; it may hold more."""

    type: Literal["function"]
    function: _Function


def check_tool_schema(schema: Any, where: str) -> ToolSchema:
    """A schema as it is, if it is whole. Raises `ConfigError`, which names the tool and what is wrong."""
    try:
        function = msgspec.convert(schema, _CheckedTool).function
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: tool_schema: {error}") from error
    parameters = function.parameters
    if parameters is not None and not set(parameters.required or ()) <= parameters.properties.keys():
        raise ConfigError(
            f"{where} ({function.name}): parameters.required names more than parameters.properties"
        )
    checked: ToolSchema = schema
    return checked


class ArgumentCheck:
    """Compares the arguments of calls with the JSON schema of their tool, as the library `jsonschema` does.

    `nullable: true`, as transformers and OpenAPI write it, allows null. A schema that is not valid is warned
    of, and its tool's arguments are not checked; nothing that a schema refers to is downloaded.
    """

    def __init__(self, schema: ToolSchema) -> None:
        from jsonschema import Draft202012Validator, SchemaError, validators  # a tenth of a second
        from jsonschema_specifications import REGISTRY

        function = schema["function"]
        parameters = function.get("parameters") or {}
        kind = validators.validator_for(parameters, default=Draft202012Validator)
        self._validator: Any = None
        try:
            kind.check_schema(parameters)
        except SchemaError as error:
            logger.warning(
                "tool %s: its parameters are no valid JSON schema (%s: %.200s); arguments are not checked",
                *(function["name"], error.json_path, error.message),
            )
            return
        nullable = {name: _allow_null(kind.VALIDATORS[name]) for name in ("type", "enum")}
        self._validator = validators.extend(kind, nullable)(parameters, registry=REGISTRY)

    def misfit(self, arguments: Mapping[str, Any]) -> str | None:
        """Says which arguments do not fit, as in `words: 'a b' is not of type 'array'`; None if all do."""
        from jsonschema.exceptions import best_match
        from referencing.exceptions import Unresolvable

        if self._validator is None:
            return None
        try:
            error = best_match(self._validator.iter_errors(arguments))
        except (Unresolvable, RecursionError):  # the schema refers to the network, or to itself alone
            return None
        if error is None:
            return None
        place = error.json_path.removeprefix("$").removeprefix(".")
        return f"{place}: {error.message}" if place else str(error.message)


def _allow_null(check: Any) -> Any:
    def checked(validator: Any, value: Any, instance: Any, schema: Mapping[str, Any]) -> Iterator[Any]:
        if instance is not None or not schema.get("nullable"):
            yield from check(validator, value, instance, schema)

    return checked


def check_names_differ(names: Iterable[str], where: str) -> None:
    """Raises `ConfigError` if two tools have the same name; names them."""
    if twice := sorted(name for name, times in Counter(names).items() if times > 1):
        raise ConfigError(f"{where} has more than one tool named {', '.join(twice)}")
