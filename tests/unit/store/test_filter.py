"""The language of filters, and sorting: against what Python says of the same rows."""

import math
import operator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.store.columns import RunColumns
from rollstream.store.filter import Filter, FilterError, sort_rows
from rollstream.store.run import Run
from tests.support.view_runs import agent_run, rollout, write_run

_COMPARE = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_NUMBERS = ["reward", "num_turns", "tokens", "logprob", "reward.correct", "version", "index", "generate_s"]
_TEXTS = ["finish_reason", "data_source", "prompt_key"]


@pytest.fixture(scope="module")
def columns(tmp_path_factory: pytest.TempPathFactory) -> RunColumns:
    root = agent_run(tmp_path_factory.mktemp("filter") / "run", prompts=12)
    found = RunColumns([Run.open(root)])
    found.refresh()
    return found


def cells(columns: RunColumns, name: str) -> list[Any]:
    return columns.values(name, np.arange(columns.rows))


def passing(columns: RunColumns, text: str) -> list[int]:
    found: list[int] = np.flatnonzero(Filter(text, columns).rows(columns)).tolist()
    return found


def numbers() -> st.SearchStrategy[tuple[str, Any]]:
    """A comparison as text, and what it says of a row's cells."""

    def make(name: str, sign: str, value: float | None) -> tuple[str, Any]:
        if value is None:
            return f"{name} != null", lambda row: row[name] is not None

        def holds(row: dict[str, Any]) -> bool:
            if row[name] is None:
                return sign == "!="
            # A cell of 32 bits is compared with what a person writes for it.
            with np.errstate(over="ignore"):
                cell, other = np.array([row[name], value], np.float32)
            return bool(_COMPARE[sign](cell, other))

        return f"{name} {sign} {value}", holds

    def between(name: str, low: float, high: float, no: str) -> tuple[str, Any]:
        def holds(row: dict[str, Any]) -> bool:
            ends = [make(name, sign, value)[1](row) for sign, value in ((">=", low), ("<=", high))]
            return all(ends) != bool(no)

        return f"{name} {no}between {low} and {high}", holds

    value = st.one_of(st.none(), st.sampled_from([0, 1, 0.5, -1, 4, 70, 1e300, -0.01]))
    ends = st.sampled_from([0, 0.5, 1, 4])
    return st.one_of(
        st.builds(make, st.sampled_from(_NUMBERS), st.sampled_from(sorted(_COMPARE)), value),
        st.builds(between, st.sampled_from(_NUMBERS), ends, ends, st.sampled_from(["", "not "])),
    )


def texts() -> st.SearchStrategy[tuple[str, Any]]:
    word = st.sampled_from(["stop", "length", "agent/1", "agent/2", "nothing", "STOP"])

    def equal(name: str, one: str, quote: str) -> tuple[str, Any]:
        return f"{name} = {quote}{one}{quote}", lambda row: row[name] == one

    def within(name: str, some: list[str], no: str) -> tuple[str, Any]:
        said = f"{name} {no}in ({', '.join(some)})"
        return said, lambda row: (row[name] in some) != bool(no)

    def contains(name: str, one: str) -> tuple[str, Any]:
        return f"{name} ~ {one[:3]}", lambda row: one[:3].lower() in row[name].lower()

    name = st.sampled_from(_TEXTS)
    return st.one_of(
        st.builds(equal, name, word, st.sampled_from(["", '"', "'"])),
        st.builds(within, name, st.lists(word, min_size=1, max_size=3), st.sampled_from(["", "not "])),
        st.builds(contains, name, word),
        st.just(("is_snapshot = true", lambda row: row["is_snapshot"])),
    )


def joined(parts: st.SearchStrategy[tuple[str, Any]]) -> st.SearchStrategy[tuple[str, Any]]:
    def both(word: str, a: tuple[str, Any], b: tuple[str, Any]) -> tuple[str, Any]:
        join = all if word == "and" else any
        return f"({a[0]}) {word} ({b[0]})", lambda row: join([a[1](row), b[1](row)])

    def negated(a: tuple[str, Any]) -> tuple[str, Any]:
        return f"not ({a[0]})", lambda row: not a[1](row)

    return st.one_of(st.builds(both, st.sampled_from(["and", "or"]), parts, parts), st.builds(negated, parts))


@settings(max_examples=200, deadline=None)
@given(st.recursive(st.one_of(numbers(), texts()), joined, max_leaves=6))
def test_a_filter_lets_through_what_python_says(columns: RunColumns, made: tuple[str, Any]) -> None:
    text, holds = made
    table = {name: cells(columns, name) for name in (*_NUMBERS, *_TEXTS, "is_snapshot")}
    rows = [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
    assert passing(columns, text) == [at for at, row in enumerate(rows) if holds(row)]


def test_and_binds_closer_than_or(columns: RunColumns) -> None:
    text = "reward = 1 or reward = 0 and num_turns > 100"
    assert passing(columns, text) == passing(columns, "reward = 1")
    assert passing(columns, "(reward = 1 or reward = 0) and num_turns > 100") == []


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("reward <", 8),
        ("reward < x", 9),
        ("rewards < 1", 0),
        ("reward 1", 7),
        ("(reward < 1", 11),
        ("reward < 1)", 10),
        ("reward < 1 finish_reason = a", 11),
        ("reward in 1", 10),
        ("finish_reason = 'open", 16),
        ("reward ~ 1", 7),
        ("reward < null", 7),
        ("reward between 1 or 2", 17),
        ("is_snapshot between 0 and 1", 27),
        ("is_snapshot = maybe", 14),
        ("reward < 1 and", 14),
        ("(" * 60 + "reward = 1" + ")" * 60, 51),
        ("not " * 10_000, 10_000),
        (" or ".join(["reward = 1"] * 101), 1400),
    ],
)
def test_a_wrong_filter_says_where(columns: RunColumns, text: str, position: int) -> None:
    with pytest.raises(FilterError) as caught:
        Filter(text, columns)
    assert caught.value.position == position


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60) | st.text("()=<>~,!\"' \\ainotr01.", max_size=60))
def test_any_text_is_a_filter_or_refused(columns: RunColumns, text: str) -> None:
    try:
        test = Filter(text, columns)
    except FilterError as error:
        assert 0 <= error.position <= len(text)
    else:
        assert test.rows(columns).shape == (columns.rows,)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([*_NUMBERS, *_TEXTS, "is_snapshot"]), st.booleans()), min_size=1, max_size=3
    )
)
def test_rows_are_sorted_as_python_does(columns: RunColumns, keys: list[tuple[str, bool]]) -> None:
    expected = list(range(columns.rows))
    for name, down in reversed(keys):
        values = cells(columns, name)
        known = [row for row in expected if values[row] is not None]
        known.sort(key=values.__getitem__, reverse=down)
        expected = known + [row for row in expected if values[row] is None]
    sort = [f"{'-' if down else ''}{name}" for name, down in keys]
    assert sort_rows(columns, np.arange(columns.rows), sort).tolist() == expected


def test_sorting_by_nothing_that_there_is(columns: RunColumns) -> None:
    with pytest.raises(FilterError, match="no column 'nothing'"):
        sort_rows(columns, np.arange(3), ["-nothing"])


def test_null_is_shown_as_none(columns: RunColumns) -> None:
    rewards = cells(columns, "reward")
    assert None in rewards
    assert not any(isinstance(one, float) and math.isnan(one) for one in rewards)


def test_names_may_stand_in_quotes(tmp_path: Path) -> None:
    one = rollout(0, 0)
    one.final.reward_extra = {'my "score"': 0.25}
    root = write_run(tmp_path / "run", [one, rollout(0, 1)])
    found = RunColumns([Run.open(root)])
    found.refresh()
    assert Filter(r'"reward.my \"score\"" < 0.5', found).rows(found).tolist() == [True, False]


def test_a_filter_is_given_up_between_two_comparisons(columns: RunColumns) -> None:
    asked = []

    def check() -> None:
        asked.append(True)
        if len(asked) == 3:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        Filter(" or ".join(["finish_reason ~ s"] * 50), columns).rows(columns, check)
    assert len(asked) == 3
