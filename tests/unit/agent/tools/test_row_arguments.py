from typing import Any

import numpy as np
import pytest

from rollstream.agent.tools.session import RowArguments, read_row_arguments, select_tools
from rollstream.errors import DataError


def test_arguments() -> None:
    row = {
        "a": {"create_kwargs": {"x": 1}, "execute_kwargs": None},
        "b": None,
        "c": {"release_kwargs": {"y": None}},
    }
    assert read_row_arguments(row) == {
        "a": RowArguments(create_kwargs={"x": 1}),
        "c": RowArguments(release_kwargs={"y": None}),
    }


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"a": 1}, r"tools_kwargs\.a is 1, want a mapping"),
        (
            {"a": {"create_kwarg": {}}},
            r"tools_kwargs\.a: unknown key 'create_kwarg'; did you mean create_kwargs",
        ),
        ({"a": {"create_kwargs": [1]}}, r"tools_kwargs\.a\.create_kwargs is \[1\], want a mapping"),
    ],
)
def test_arguments_of_another_shape(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_row_arguments(row)


@pytest.mark.parametrize(
    ("selection", "expected"),
    [(None, ["a", "b"]), ([], ["a", "b"]), (["b", "a", "b"], ["b", "a"]), (np.array(["b"]), ["b"])],
)
def test_selection(selection: Any, expected: list[str]) -> None:
    assert select_tools(selection, ["a", "b"]) == expected


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        (["serch"], "unknown tool 'serch'; did you mean search. Known: search, b"),
        ([3], "unknown tool 3 Known"),
        ("search", "want a list"),
        ({"search": 1}, "want a list"),
    ],
)
def test_a_selection_of_nothing_there_is(selection: Any, message: str) -> None:
    with pytest.raises(DataError, match=f"tool_selection.*{message}"):
        select_tools(selection, ["search", "b"])
