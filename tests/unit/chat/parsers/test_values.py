"""Values: JSON, and bare text by the types of a schema."""

from typing import Any

import orjson
import pytest

from rollstream.chat.parsers.json_call import decode_value
from rollstream.chat.parsers.tool_call_tags import declared_types, read_value


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
        ("{'a': True, 'b': [None, 1.5]}", {"object"}, {"a": True, "b": [None, 1.5]}),
        (" ['a', \"b's\"]\n", {"array"}, ["a", "b's"]),
        ("('a', 1)", {"array", "string"}, ["a", 1]),
        ("['a']", {"string"}, "['a']"),
        ("['a']", {"object"}, "['a']"),
        ("{'a'}", {"object", "array"}, "{'a'}"),
        ("{1: 2}", {"object"}, "{1: 2}"),
        ("[b'x']", {"array"}, "[b'x']"),
        (f"[{10**30}]", {"array"}, f"[{10**30}]"),
        ("[1e999]", {"array"}, "[1e999]"),
        ("[open('x')]", {"array"}, "[open('x')]"),
        ("['a'" * 90_000, {"array"}, "['a'" * 90_000),
        ("[" * 90_000, {"array"}, "[" * 90_000),
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
        "fields": {"properties": {"x": {"type": "integer"}}},
        "items": {"items": {"type": "string"}},
        "values": {"enum": ["all", 1]},
        "nullable": {"type": "integer", "nullable": True},
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
        ("fields", {"object"}),
        ("items", {"array"}),
        ("values", {"integer", "number"}),
        ("nullable", {"integer", "null"}),
        *((name, set()) for name in ("loop", "missing", "remote", "untyped", "odd", "unknown")),
    ],
)
def test_declared_types(name: str, types: set[str]) -> None:
    assert declared_types(PARAMETERS, name) == types


@pytest.mark.parametrize("number", [2**64 - 1, -(2**63), 0])
def test_integers_of_64_bits(number: int) -> None:
    value, _ = decode_value(str(number), 0)
    assert orjson.loads(orjson.dumps(value)) == number
