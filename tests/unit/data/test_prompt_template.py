from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.data.prompt_template import PromptTemplate
from rollstream.data.values import BadRow
from rollstream.errors import ConfigError


@pytest.mark.parametrize(
    ("template", "columns", "expected"),
    [
        ("{a} and {b}", {"a": "x", "b": 2}, "x and 2"),
        (r"{a} in \boxed{{}}", {"a": "x"}, r"x in \boxed{}"),
        ("{a:.2f} {b!r:>5}", {"a": 1.0, "b": "q"}, "1.00   'q'"),
        ("{a[text][1]}", {"a": {"text": ["x", "y"]}}, "y"),
        ("{Question Text}", {"Question Text": "x"}, "x"),
        ("{meta.level}", {"meta.level": "x"}, "x"),
        ("no fields", {}, "no fields"),
    ],
)
def test_render(template: str, columns: dict[str, Any], expected: str) -> None:
    assert PromptTemplate(template, "t").render(columns) == expected


@given(st.text())
def test_data_is_never_a_template(text: str) -> None:
    assert PromptTemplate("<{a}>", "t").render({"a": text}) == f"<{text}>"


@pytest.mark.parametrize("template", [r"\boxed{}", "{0}", "{", "}", "{a:{b}}"])
def test_braces_that_are_no_field(template: str) -> None:
    with pytest.raises(ConfigError, match=r"^t: .*brace"):
        PromptTemplate(template, "t")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{c}", "column 'c' is missing; there are: a, n"),
        ("{a.__class__}", "column 'a.__class__' is missing"),
        ("{n}", "is null in this row"),
        ("{a[0]}", r"finds nothing at \[0\]"),
        ("{a:.2f}", "cannot be formatted"),
    ],
)
def test_a_row_that_does_not_fit(template: str, message: str) -> None:
    with pytest.raises(BadRow, match=message):
        PromptTemplate(template, "t").render({"a": {"x": "y"}, "n": None})
