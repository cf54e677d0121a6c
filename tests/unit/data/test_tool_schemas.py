from pathlib import Path

import pytest

from rollstream.data.tool_schemas import load_tool_schemas
from rollstream.errors import ConfigError

CALCULATOR = {"name": "calculator", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}
GOOD = f"""
tools:
  - class_name: rollstream.agent.tools.calculator.Calculator
    config: {{type: native}}
    tool_schema: {{type: function, function: {CALCULATOR}}}
  - tool_schema: {{type: function, function: {{name: now}}}}
"""


def test_schemas_are_given_as_written(tmp_path: Path) -> None:
    path = tmp_path / "tools.yaml"
    path.write_text(GOOD)
    calculator, now = load_tool_schemas(path)
    assert calculator == {"type": "function", "function": CALCULATOR}
    assert now["function"] == {"name": "now"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", "needs `tools:`"),
        ("tools: [{class_name: a.B}]", r"tools\[0\]: needs a tool_schema"),
        ("tools: [{tool_schema: {type: function, function: {name: 3}}}]", "name is 3, want text"),
        (GOOD.replace("name: now", "name: calculator"), "more than one tool named calculator"),
        ("tools: [", "cannot be read as YAML"),
        (None, r"data\.tool_config_path: no such file"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "tools.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_tool_schemas(path)
