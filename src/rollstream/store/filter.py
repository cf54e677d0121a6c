"""The language of filters: `reward < 0.5 and finish_reason = length and not (num_turns > 3 or reward = null)`.

    filter     = and ("or" and)*
    and        = one ("and" one)*
    one        = "not" one | "(" filter ")" | COLUMN OPERATOR VALUE | COLUMN ["not"] "in" "(" VALUE ("," VALUE)* ")"
               | COLUMN ["not"] "between" VALUE "and" VALUE
    OPERATOR   = "=" | "!=" | "<" | "<=" | ">" | ">=" | "~"
    COLUMN     = a name, in quotes where it has signs or spaces
    VALUE      = a number, a word, a text in quotes, "null", "true", "false"

`~` is "contains", for texts, whatever the case. A cell that is null is neither less nor more than anything;
`!=` is true of it.
"""

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rollstream.errors import RollstreamError
from rollstream.store.arrow import column_values, to_arrow, to_arrow_texts
from rollstream.store.columns import Array

_TOKEN: Final = re.compile(
    r"""\s*(?:(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<sign><=|>=|!=|==|[=<>~(),])"""
    r"""|(?P<word>[^\s()=<>~,!"']+)|(?P<end>$))""",
    re.DOTALL,
)
_EQUALITY: Final = ("=", "==", "!=")
_ORDER: Final[dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]]] = {
    "<": (operator.lt, pc.less),
    "<=": (operator.le, pc.less_equal),
    ">": (operator.gt, pc.greater),
    ">=": (operator.ge, pc.greater_equal),
}
"""Of numbers, and of Arrow's texts."""
_TRUTHS: Final = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_MOST_CHARACTERS: Final = 10_000
_MOST_TESTS: Final = 100
"""Comparisons of a filter: each is a look at a column. A list (`in`) is one."""
_DEEPEST: Final = 50
"""Brackets and nots within each other."""


class Filterable(Protocol):
    """Filterable that can be filtered: see `RunColumns`, which is one."""

    rows: int

    def columns(self) -> list[dict[str, str]]:
        """`name` and `type` (number, text, bool) of each."""
        ...

    def __getitem__(self, name: str) -> Array:
        """The values of a column, of a text their codes. Shape (rows,)."""
        ...

    def texts(self, name: str) -> pa.StringArray:
        """The texts of a column, by code."""
        ...


_Check = Callable[[], None]
_Test = Callable[[Filterable, _Check], Array]


class FilterError(RollstreamError):
    """A filter that means nothing; `position` is that of the character from which on."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position


class _Token(NamedTuple):
    kind: str
    text: str
    at: int

    @property
    def value(self) -> str:
        """Without quotes."""
        if self.kind != "text":
            return self.text
        return re.sub(r"\\(.)", r"\1", self.text[1:-1], flags=re.DOTALL)

    def is_word(self, word: str) -> bool:
        return self.kind == "word" and self.text.lower() == word


class Filter:
    """A filter of rows. Raises `FilterError`."""

    def __init__(self, text: str, columns: Filterable) -> None:
        if len(text) > _MOST_CHARACTERS:
            raise FilterError(f"a filter has {_MOST_CHARACTERS} characters at most", _MOST_CHARACTERS)
        self._columns = {column["name"]: column["type"] for column in columns.columns()}
        self._tests = 0
        self._tokens = _tokens(text)[::-1]  # the next one is the last
        self._passes: _Test | None = None
        if text.strip():
            self._passes = self._either(0)
            self._take("end", "and, or, or the end")

    def rows(self, columns: Filterable, check: _Check = lambda: None) -> Array:
        """Which rows pass. Shape (rows,). `check` is called between comparisons, and may raise."""
        return np.ones(columns.rows, bool) if self._passes is None else self._passes(columns, check)

    def _either(self, depth: int) -> _Test:
        return self._joined(
            "or", operator.or_, lambda: self._joined("and", operator.and_, lambda: self._one(depth))
        )

    def _joined(self, word: str, join: Callable[[Any, Any], Any], part: Callable[[], _Test]) -> _Test:
        tests = [part()]
        while self._skip(word):
            tests.append(part())

        def passes(rows: Filterable, check: _Check) -> Array:
            found = tests[0](rows, check)
            for test in tests[1:]:
                found = join(found, test(rows, check))
            return found

        return passes

    def _one(self, depth: int) -> _Test:
        token = self._tokens.pop()
        if depth > _DEEPEST:
            raise FilterError("too many brackets within each other", token.at)
        if token.is_word("not"):
            inner = self._one(depth + 1)
            return lambda rows, check: ~inner(rows, check)
        if token.text == "(":
            inner = self._either(depth + 1)
            self._take(")", ")")
            return inner
        if token.kind in ("sign", "end") or token.value not in self._columns:
            known = ", ".join(self._columns)
            raise FilterError(f"{token.text!r}: expected a column, not, or (; there are {known}", token.at)
        self._tests += 1
        if self._tests > _MOST_TESTS:
            hint = f"a filter has {_MOST_TESTS} comparisons at most; a list is one: {token.text} in (a, b)"
            raise FilterError(hint, token.at)
        test = self._comparison(token.value)

        def passes(rows: Filterable, check: _Check) -> Array:
            check()
            return test(rows)

        return passes

    def _take(self, wanted: str, expected: str) -> None:
        token = self._tokens.pop()
        if wanted not in (token.kind, token.text.lower()):
            raise FilterError(f"{token.text!r}: expected {expected}", token.at)

    def _skip(self, word: str) -> bool:
        found = self._tokens[-1].text.lower() == word and self._tokens[-1].kind != "text"
        if found:
            self._tokens.pop()
        return found

    def _comparison(self, name: str) -> Callable[[Filterable], Array]:
        """A column against the value, or the values, that come next."""
        kind, negated = self._columns[name], self._skip("not")
        if self._skip("between"):
            ends = [self._value(name, kind)]
            self._take("and", "and, and the upper end")
            ends.append(self._value(name, kind))
            if None in ends or kind == "bool":
                raise FilterError("between takes two numbers or texts", self._tokens[-1].at)
            one = _text_test if kind == "text" else _number_test
            return lambda rows: (one(rows, name, ">=", ends[0]) & one(rows, name, "<=", ends[1])) != negated
        if negated or self._tokens[-1].is_word("in"):
            self._take("in", "in")
            self._take("(", "(")
            values = [self._value(name, kind)]
            while self._skip(","):
                values.append(self._value(name, kind))
            self._take(")", ", or )")
            return lambda rows: _within(rows, name, kind, values) != negated
        sign = self._tokens.pop()
        if sign.text not in (*_EQUALITY, *_ORDER, "~"):
            raise FilterError(f"{sign.text!r}: expected one of = != < <= > >= ~ in", sign.at)
        null = self._tokens[-1].is_word("null")
        value = self._value(name, kind)
        if sign.text in _EQUALITY:
            return lambda rows: _within(rows, name, kind, [value]) != (sign.text == "!=")
        if null or kind == "bool" or (kind == "number" and sign.text == "~"):
            raise FilterError(f"{sign.text} does not go with {'null' if null else f'a {kind}'}", sign.at)
        if kind == "text":
            return lambda rows: _text_test(rows, name, sign.text, value)
        return lambda rows: _number_test(rows, name, sign.text, value)

    def _value(self, name: str, kind: str) -> Any:
        """The value that comes next, of the column's type; None is null."""
        token = self._tokens.pop()
        word = token.value
        if token.kind in ("sign", "end"):
            raise FilterError(f"{token.text!r}: expected a value", token.at)
        if token.is_word("null"):
            return None
        if kind == "text":
            return word
        if kind == "bool":
            if word.lower() not in _TRUTHS:
                raise FilterError(f"{name} is true or false", token.at)
            return _TRUTHS[word.lower()]
        try:
            return float(word)
        except ValueError:
            raise FilterError(f"{token.text!r} is not a number, as {name} is", token.at) from None


def _tokens(text: str) -> list[_Token]:
    tokens, at = list[_Token](), 0
    while not tokens or tokens[-1].kind != "end":
        match = _TOKEN.match(text, at)
        if match is None:
            at += len(text[at:]) - len(text[at:].lstrip())
            raise FilterError(f"{text[at : at + 10]!r} is not understood", at)
        kind = str(match.lastgroup)
        tokens.append(_Token(kind, match[kind], match.start(kind)))
        at = match.end()
    return tokens


def _within(rows: Filterable, name: str, kind: str, values: Sequence[Any]) -> Array:
    """Which cells are one of some values."""
    cells, known = rows[name], [value for value in values if value is not None]
    if kind == "text":
        return _of_texts(pc.is_in(rows.texts(name), value_set=to_arrow_texts(known)), cells)
    with np.errstate(over="ignore"):
        wanted = np.array(known, cells.dtype if cells.dtype.kind == "f" else None)
    found: Array = cells == wanted[0] if len(wanted) == 1 else np.isin(cells, wanted)
    return found | ~np.isfinite(cells) if None in values and cells.dtype.kind == "f" else found


def _number_test(rows: Filterable, name: str, sign: str, value: float) -> Array:
    with np.errstate(over="ignore"):  # more than a column's type can hold is infinite
        found: Array = _ORDER[sign][0](rows[name], value)
    return found


def _text_test(rows: Filterable, name: str, sign: str, word: str) -> Array:
    """Which texts pass a test, each tried once."""
    texts = rows.texts(name)
    if sign == "~":
        return _of_texts(pc.match_substring(texts, word, ignore_case=True), rows[name])
    return _of_texts(_ORDER[sign][1](texts, to_arrow_texts([word])[0]), rows[name])


def _of_texts(truths: pa.Array, codes: Array) -> Array:
    found: Array = column_values(truths)[codes] if len(truths) else np.zeros(len(codes), bool)
    return found


def sort_rows(rows: Filterable, selected: Array, sort: Sequence[str]) -> Array:
    """Rows in the order of `-reward`, `index`: descending with a minus, nulls last, equal ones as they came.

    Raises `FilterError` for a column that is not there.
    """
    kinds = {column["name"]: column["type"] for column in rows.columns()}
    columns, keys = dict[str, pa.Array](), list[tuple[str, str]]()
    for key in sort:
        name = key.removeprefix("-")
        if name not in kinds:
            raise FilterError(f"there is no column {name!r} to sort by", 0)
        if name in columns:
            continue
        cells = rows[name][selected]
        if kinds[name] == "text":  # the place of each text among all
            ranks = np.zeros(len(rows.texts(name)) + 1, np.int32)
            ranks[column_values(pc.sort_indices(rows.texts(name)))] = np.arange(len(ranks) - 1)
            cells = ranks[cells]
        elif cells.dtype.kind == "f":
            cells = np.where(np.isfinite(cells), cells + 0.0, np.nan)  # -0.0 becomes 0.0
        columns[name] = to_arrow(cells.astype(np.uint8) if cells.dtype == bool else cells)
        keys.append((name, "descending" if key.startswith("-") else "ascending"))
    if not keys:
        return selected
    found: Array = selected[column_values(pc.sort_indices(pa.table(columns), sort_keys=keys))]
    return found
