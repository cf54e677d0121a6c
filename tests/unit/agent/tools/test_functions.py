import sys
from pathlib import Path

import pytest

from rollstream.errors import ConfigError

from .tools import functions

TWO = '''
from typing import Annotated, Literal
from rollstream.agent.tools.base import ToolResponse

@function_tool
def add(a: int, b: "list[int] | None" = None, *, how: Literal["up", "down"] = "up") -> set[ToolResponse]:
    """
    Adds.

    Args:
        a: The first.
        b: The second.
        how: Which way.
    """
    return a

@function_tool("find")
async def search(query: Annotated[str, "x"], options: dict[str, float | bool], anything: dict):
    """Finds.

    Args:
        query: What.
        options: How.
        anything: Else.
    """
    return query
'''


def test_tools_of_a_file(tmp_path: Path) -> None:
    add, find = functions(tmp_path, TWO)
    assert add.function(3) == 3
    assert add.schema["function"]["parameters"]["required"] == ["a"]
    assert find.name == find.schema["function"]["name"] == "find"
    properties = find.schema["function"]["parameters"]["properties"]
    assert properties["options"]["additionalProperties"] == {"type": ["boolean", "number"]}


def test_a_given_schema(tmp_path: Path) -> None:
    (a, b, c) = functions(
        tmp_path,
        """
        schema = {"type": "function", "function": {"name": "given", "description": "."}}

        @function_tool(schema=schema)
        def one(*args, **kwargs): ...

        @function_tool("mine", schema=schema)
        def two(x): ...

        class Callable:
            def __call__(self, x): return x

        three = function_tool("three", schema=schema)(Callable())
        """,
    )
    assert (a.name, b.name, c.name) == ("given", "mine", "three")
    assert b.schema["function"] == {"name": "mine", "description": "."}
    assert c.function(1) == 1


def test_tools_made_in_a_loop_or_imported_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "shared_tools_of_this_test.py").write_text(
        "from rollstream.agent.tools.functions import function_tool\n"
        '@function_tool\ndef shared():\n    "Shared."\n\n@function_tool\ndef unused():\n    "Unused."\n'
    )
    source = '''
        from shared_tools_of_this_test import shared

        for name in ("a", "b"):
            @function_tool(name)
            def made():
                """Made."""
    '''
    for _ in range(2):  # the imported module runs only once
        assert [tool.name for tool in functions(tmp_path, source)] == ["a", "b", "shared"]
    del sys.modules["shared_tools_of_this_test"]


@pytest.mark.parametrize(
    "source",
    [
        "def f(x):\n    'F.'",
        "def f(x: set[int]):\n    'F.'",
        "def f(x: 'Nothing'):\n    'F.'",
        "def f(*x: int):\n    'F.'",
        "def f(**x: int):\n    'F.'",
        "def f(x: int):\n    pass",
        "def f(x: int):\n    'F.'",
        "def f(x: str):\n    '''F.\n\n    Args:\n        x: It (choices: [oops])\n    '''",
    ],
)
def test_functions_that_cannot_be_tools(tmp_path: Path, source: str) -> None:
    with pytest.raises(ConfigError, match=r"functions\.py, f: "):
        functions(tmp_path, "@function_tool\n" + source)


@pytest.mark.parametrize(
    "source",
    [
        "",
        "raise ValueError('no')",
        "@function_tool('a')\ndef f(): 'F.'\n@function_tool('a')\ndef g(): 'G.'",
        "@function_tool(schema={'type': 'x'})\ndef f(): ...",
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, source: str) -> None:
    with pytest.raises(ConfigError, match=r"function_tool_path: .*functions\.py"):
        functions(tmp_path, source)
