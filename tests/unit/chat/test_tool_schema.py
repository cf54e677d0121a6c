import json
from pathlib import Path
from typing import Any

import pytest

from rollstream.chat.tool_schema import (
    ArgumentCheck,
    check_tool_schema,
    load_tool_schemas,
    read_tool_entries,
    row_tools,
    with_row_tools,
)
from rollstream.errors import ConfigError

TOOLS = """
tools:
  - class_name: rollstream.agent.tools.calculator.Calculator
    config: {type: native}
    tool_schema: {type: function, function: {name: "${oc.env:TOOL_OF_THIS_TEST}", parameters: {type: object}}}
  - tool_schema: {type: function, function: {name: now}}
"""


def test_schemas_of_a_file_are_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOL_OF_THIS_TEST", "calculator")
    (file := tmp_path / "tools.yaml").write_text(TOOLS)
    assert len(read_tool_entries(file, key="k")) == 2
    calculator, now = load_tool_schemas(file)
    assert calculator["function"] == {"name": "calculator", "parameters": {"type": "object"}}
    assert now == {"type": "function", "function": {"name": "now"}}


@pytest.mark.parametrize(
    "text",
    ["- a", "tools: [", "tools: [3]", "tools: [{class_name: a.B}]", TOOLS.replace("now", "calculator"), None],
)
def test_wrong_tool_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    monkeypatch.setenv("TOOL_OF_THIS_TEST", "calculator")
    if text is not None:
        (tmp_path / "tools.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"^data\.tool_config_path: .*tools\.yaml"):
        load_tool_schemas(tmp_path / "tools.yaml")


@pytest.mark.parametrize(
    "function",
    [
        {"name": 3},
        {"name": "a", "description": 3},
        {"name": "a", "parameters": {"type": "object", "properties": 1}},
        {"name": "a", "parameters": {"type": "object", "required": [["a"]]}},
    ],
)
def test_schema_that_is_not_whole(function: Any) -> None:
    with pytest.raises(ConfigError, match="here"):
        check_tool_schema({"type": "function", "function": function}, "here")


def check_of(**parameters: Any) -> ArgumentCheck:
    return ArgumentCheck({"type": "function", "function": {"name": "f", "parameters": parameters}})


def test_arguments_that_do_not_fit_are_named_with_their_place() -> None:
    check = check_of(
        type="object",
        properties={
            "words": {"type": "array", "items": {"type": "string"}},
            "size": {"$ref": "#/$defs/Size"},
            "limit": {"type": "integer", "nullable": True, "enum": [1, 2]},
        },
        required=["words"],
        additionalProperties=False,
        **{"$defs": {"Size": {"enum": ["s", "m"]}}},
    )
    for good in ({"words": []}, {"words": ["a"], "size": "m", "limit": None}):
        assert check.misfit(good) is None
    for bad, place in [
        ({}, "'words'"),
        ({"words": "a b"}, "words: 'a b'"),
        ({"words": ["a", 3]}, "words[1]: 3"),
        ({"words": [], "size": "xl"}, "size: 'xl'"),
        ({"words": [], "limit": 3}, "limit: 3"),
        ({"words": [], "size": None}, "size: None"),
        ({"words": [], "wrods": 1}, "Additional"),
    ]:
        assert (check.misfit(bad) or "").startswith(place), bad


def test_arguments_are_not_checked_where_the_schema_cannot_be_used(caplog: pytest.LogCaptureFixture) -> None:
    check = check_of(type="object", properties={"a": {"type": "List[int]"}})
    assert check.misfit({"a": 3}) is None
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == ["f"]
    for reference in ("https://example.org/schema.json", "#/$defs/no", "#/properties/a"):
        assert check_of(type="object", properties={"a": {"$ref": reference}}).misfit({"a": 3}) is None
    assert ArgumentCheck({"type": "function", "function": {"name": "f"}}).misfit({"a": 3}) is None


RAIN = {"name": "rain_in", "description": "Tells.", "parameters": {"type": "dict", "properties": {}}}


@pytest.mark.parametrize(
    "column",
    [
        [{"type": "function", "function": RAIN}],
        [{"function": RAIN}],
        [RAIN],
        [{"type": "function", **RAIN}],
        json.dumps([RAIN]),
    ],
)
def test_schemas_of_a_row_come_in_several_forms(column: Any) -> None:
    assert row_tools(column) == [{"type": "function", "function": RAIN}]


@pytest.mark.parametrize(
    "column", [None, "", [], "rain_in", ["rain_in"], '["rain_in"]', [RAIN, "x"], {"a": 1}, [{}]]
)
def test_what_is_no_list_of_schemas_has_none(column: Any) -> None:
    assert row_tools(column) == []
    assert with_row_tools(None, column) is None
    assert with_row_tools([], column) == []


def test_a_run_s_tool_goes_before_a_row_s_of_its_name() -> None:
    own = [{"type": "function", "function": {"name": "rain_in"}}]
    other = {"type": "function", "function": {"name": "snow_in"}}
    assert with_row_tools(own, [RAIN, other]) == [*own, other]
