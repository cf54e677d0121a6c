from pathlib import Path

import pytest

from rollstream.data.tool_schemas import load_tool_schemas
from rollstream.errors import ConfigError

GOOD = """
tools:
  - class_name: rollstream.agent.tools.calculator.Calculator
    config: {type: native}
    tool_schema:
      type: function
      function:
        name: calculator
        description: Calculates.
        parameters:
          type: object
          properties:
            expression: {type: string, description: As in Python.}
          required: [expression]
  - tool_schema: {type: function, function: {name: now}}
"""


def test_schemas_are_given_as_written(tmp_path: Path) -> None:
    path = tmp_path / "tools.yaml"
    path.write_text(GOOD)
    calculator, now = load_tool_schemas(path)
    assert calculator == {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Calculates.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string", "description": "As in Python."}},
                "required": ["expression"],
            },
        },
    }
    assert now["function"] == {"name": "now"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tools: []", "needs `tools:`"),
        ("- a", "needs `tools:`"),
        ("tools: [{class_name: a.B}]", r"tools\[0\]: needs a tool_schema"),
        ("tools: [{tool_schema: {type: tool}}]", "tool_schema.type is 'tool'"),
        ("tools: [{tool_schema: {type: function}}]", "tool_schema.function is missing"),
        ("tools: [{tool_schema: {type: function, function: {name: 3}}}]", "name is 3, want text"),
        (
            GOOD.replace("[expression]", "[expr]"),
            r"tools\[0\] \(calculator\): parameters.required names more",
        ),
        (GOOD.replace("type: object", "type: string"), "JSON schema with `type: object`"),
        (GOOD.replace("name: now", "name: calculator"), "more than one tool named calculator"),
        ("tools: [", "cannot be read as YAML"),
        ("tools: ${nowhere}", "cannot be read as YAML"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "tools.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_tool_schemas(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.tool_config_path: no such file"):
        load_tool_schemas(tmp_path / "no.yaml")
