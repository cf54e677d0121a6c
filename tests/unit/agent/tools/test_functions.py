import sys
from pathlib import Path
from textwrap import dedent
from typing import Any, Literal

import pytest

from rollstream.agent.tools.base import ToolResponse
from rollstream.agent.tools.functions import function_tool, load_function_tools
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


def test_runs_do_not_clash(tmp_path: Path) -> None:
    first = functions(tmp_path, TWO)
    second = functions(tmp_path, TWO)
    assert [tool.name for tool in first] == [tool.name for tool in second] == ["add", "find"]
    assert first[0].function is not second[0].function
    other = functions(tmp_path, TWO.replace("return a", "return -a"))
    assert (first[0].function(1), other[0].function(1)) == (1, -1)


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


def plain() -> int:
    """Does it. On
    two lines: yes.
    """
    return 1


def several(
    a: int,
    b: float | None = None,
    c: Literal["x", 1, None] = "x",
    d: str | int = 1,
    e: list[dict[str, float]] = [],  # noqa: B006
) -> str:
    """Does several things

    Args:
        a: The first: it is
            long.

        b: The second. (it)
        c: third
        d: fourth (choices: ["p", " q "])
        e: Fifth.

    Returns:
        Something: a text.
    """
    return ""


def others(f: dict, g: tuple[int, str], h: Any, i: list[int] | str | None, j: Literal[True, False]) -> None:  # type: ignore[type-arg]
    """Others.
    Args:
      f: F.
      g: G.
      h: H.
      i: I.
      j: J.
    Raises:
      ValueError: never.
    """


@pytest.mark.parametrize("function", [plain, several, others])
def test_schemas_are_those_of_transformers(function: Any, tmp_path: Path) -> None:
    from transformers.utils import get_json_schema

    function_tool(function)
    (tool,) = functions(tmp_path, f"from {__name__} import {function.__name__}")
    expected = get_json_schema(function)
    expected["function"].pop("return", None)
    assert tool.schema == expected


def test_outside_of_a_file_the_decorator_changes_nothing() -> None:
    @function_tool
    def mine(x: Any) -> ToolResponse:
        return ToolResponse(x)

    assert mine("a").text == "a"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def f(x):\n    'F.'", "f: parameter x has no type; write x: str"),
        ("def f(x: set[int]):\n    'F.'", r"f: parameter x: set\[int\] is nothing that JSON can express"),
        ("def f(x: dict[str, bytes]):\n    'F.'", "parameter x: bytes is nothing that JSON can express"),
        ("def f(x: list):\n    'F.'", r"x: list does not say of what; use .*list\[\.\.\.\]"),
        ("def f(x: tuple[int, ...]):\n    'F.'", "no fixed length; use a list"),
        ("def f(x: 'Nothing'):\n    'F.'", "type hints cannot be read .*Nothing"),
        ("def f(*x: int):\n    'F.'", r"the model cannot give \*x: int; name each parameter"),
        ("def f(**x: int):\n    'F.'", r"the model cannot give \*\*x"),
        ("def f(x: int):\n    pass", "it has no docstring. Write a Google docstring"),
        ("def f(x: int):\n    'F.'", "no description for the argument 'x'. Write a Google docstring"),
        (
            "def f(x: str):\n    '''F.\n\n    Args:\n        x: It (choices: [oops])\n    '''",
            r"its choices are no JSON list of texts; write \(choices",
        ),
    ],
)
def test_functions_that_cannot_be_tools(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"function_tool_path: .*functions\.py, {message}|{message}"):
        functions(tmp_path, "@function_tool\n" + dedent(source))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "declares no tool; write @function_tool above a function"),
        ("raise ValueError('no')", r"raised ValueError: no \(line 2"),
        (
            "@function_tool('a')\ndef f(): 'F.'\n@function_tool('a')\ndef g(): 'G.'",
            "more than one tool named a",
        ),
        ("@function_tool(schema={'type': 'x'})\ndef f(): ...", "tool_schema.type is 'x'"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        functions(tmp_path, source)


def test_no_such_file() -> None:
    with pytest.raises(ConfigError, match="function_tool_path: no such file"):
        load_function_tools("no.py")
