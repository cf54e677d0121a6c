from typing import Any

import pytest

from rollstream.chat.parsers.tagged_call import declared_types, parameters_of, read_value


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("5", {"integer"}, 5),
        (" -5\n", {"integer"}, -5),
        ("5.5", {"integer"}, "5.5"),
        ("five", {"integer"}, "five"),
        ("true", {"integer"}, "true"),
        ("9" * 30, {"integer"}, "9" * 30),
        ("9" * 9000, {"integer"}, "9" * 9000),
        ("5", {"number"}, 5),
        ("2.5e3", {"number"}, 2500.0),
        ("NaN", {"number"}, "NaN"),
        ("1e999", {"number"}, "1e999"),
        ("True", {"boolean"}, True),
        ("false", {"boolean"}, False),
        ("yes", {"boolean"}, "yes"),
        ("1", {"boolean"}, "1"),
        ("[1, 2]", {"array"}, [1, 2]),
        ("[1, 2", {"array"}, "[1, 2"),
        ('{"a": 1}', {"object"}, {"a": 1}),
        ("{'a': 1}", {"object"}, "{'a': 1}"),
        ("[1]", {"object"}, "[1]"),
        ("5", {"string"}, "5"),
        ("null", {"string"}, "null"),
        ("None", {"string", "null"}, None),
        ("null", {"integer", "null"}, None),
        ("null", {"integer"}, "null"),
        ("5", {"string", "integer"}, 5),
        (" padded ", {"string"}, " padded "),
        ("5", set(), "5"),
        ("5", {"decimal"}, "5"),
    ],
)
def test_values(text: str, types: set[str], value: Any) -> None:
    read = read_value(text, types)
    assert read == value and type(read) is type(value)


PARAMETERS = {
    "$defs": {"Size": {"enum": ["s"], "type": "string"}, "Loop": {"$ref": "#/$defs/Loop"}},
    "properties": {
        "plain": {"type": "integer"},
        "several": {"type": ["integer", "null", 3]},
        "any": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/Size"}, {"type": "null"}]},
        "reference": {"$ref": "#/$defs/Size"},
        "loop": {"anyOf": [{"$ref": "#/$defs/Loop"}]},
        "missing": {"$ref": "#/$defs/None/of/that"},
        "remote": {"$ref": "https://example.org/schema"},
        "untyped": {"description": "x"},
        "odd": 7,
    },
}


@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("plain", {"integer"}),
        ("several", {"integer", "null"}),
        ("any", {"string", "null"}),
        ("reference", {"string"}),
        *((name, set()) for name in ("loop", "missing", "remote", "untyped", "odd", "unknown")),
    ],
)
def test_declared_types(name: str, types: set[str]) -> None:
    assert declared_types(PARAMETERS, name) == types


def test_schemas_of_any_shape() -> None:
    named = {"name": "f", "parameters": PARAMETERS}
    assert parameters_of([{"type": "function", "function": named}], "f") == PARAMETERS
    assert parameters_of([named], "f") == PARAMETERS
    for odd in (
        {},
        {"function": None},
        {"function": {"name": "f"}},
        {"function": {"name": "f", "parameters": 3}},
        7,
    ):
        assert parameters_of([odd], "f") == {}  # type: ignore[list-item]
    assert declared_types({"properties": []}, "a") == set()
