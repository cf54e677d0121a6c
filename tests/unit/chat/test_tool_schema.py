import json
from pathlib import Path
from typing import Any

import pytest

from rollstream.chat.tool_schema import (
    ArgumentCheck,
    check_names_differ,
    check_tool_schema,
    read_tool_entries,
    row_tools,
    with_row_tools,
)
from rollstream.errors import ConfigError


def test_entries_are_resolved_but_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN_OF_THIS_TEST", "t")
    file = tmp_path / "tools.yaml"
    file.write_text("tools: [{a: '${oc.env:TOKEN_OF_THIS_TEST}'}, 3]")
    assert read_tool_entries(file, key="k") == [{"a": "t"}, 3]
    with pytest.raises(ConfigError, match=r"^k: no such file"):
        read_tool_entries(tmp_path / "no.yaml", key="k")


def test_a_whole_schema_is_given_back() -> None:
    parameters: dict[str, object] = {"type": "object"}
    schema = {"type": "function", "function": {"name": "a", "parameters": parameters}}
    assert check_tool_schema(schema, "here") is schema
    parameters["properties"] = 1
    with pytest.raises(ConfigError, match=r"^here \(a\): parameters\.properties must be a mapping"):
        check_tool_schema(schema, "here")
    parameters |= {"properties": {}, "required": [["a"]]}
    with pytest.raises(ConfigError, match=r"^here \(a\): parameters\.required"):
        check_tool_schema(schema, "here")


def test_names() -> None:
    check_names_differ(["a", "b"], "here")
    with pytest.raises(ConfigError, match="here has more than one tool named a, b"):
        check_names_differ(iter(["b", "a", "b", "a", "c"]), "here")
    check_names_differ(map(str, range(200_000)), "here")  # by each name's count it would take minutes


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
