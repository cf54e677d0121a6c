"""The language of filters: `reward < 0.5 and finish_reason = length and not (num_turns > 3 or reward = null)`.

    filter     = and ("or" and)*
    and        = one ("and" one)*
    one        = "not" one | "(" filter ")" | COLUMN OPERATOR VALUE | COLUMN ["not"] "in" "(" VALUE ("," VALUE)* ")"
    OPERATOR   = "=" | "!=" | "<" | "<=" | ">" | ">=" | "~"
    COLUMN     = a name, in quotes where it has signs or spaces
    VALUE      = a number, a word, a text in quotes, "null", "true", "false"

`~` is "contains", for texts, whatever the case. A cell that is null is neither less nor more than anything;
`!=` is true of it.
"""

import operator
import re
from collections.abc import Callable
from functools import reduce
from typing import Any, Final, NamedTuple

import numpy as np

from rollstream.errors import RollstreamError
from rollstream.store.columns import NULLABLE, Array, RunColumns

_TOKEN: Final = re.compile(
    r"""\s*(?:(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<sign><=|>=|!=|==|[=<>~(),])"""
    r"""|(?P<word>[^\s()=<>~,!"']+)|(?P<end>$))""",
    re.DOTALL,
)
_COMPARE: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_EQUALITY: Final = ("=", "==", "!=")
_TRUTHS: Final = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_MOST_CHARACTERS: Final = 10_000
_DEEPEST: Final = 50
"""Brackets and nots within each other."""

Test = Callable[[RunColumns], Array]
"""Which rows pass. Shape (rows,)."""


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


def parse_filter(text: str, columns: RunColumns) -> Test:
    """What a filter tests; of an empty one all rows pass. Raises `FilterError`."""
    if len(text) > _MOST_CHARACTERS:
        raise FilterError(f"a filter has {_MOST_CHARACTERS} characters at most", _MOST_CHARACTERS)
    if not text.strip():
        return lambda rows: np.ones(rows.rows, bool)
    parser = _Parser(text, {column["name"]: column["type"] for column in columns.columns()})
    test = parser.either(0)
    parser.take("end", "and, or, or the end")
    return test


class _Parser:
    def __init__(self, text: str, columns: dict[str, str]) -> None:
        self._columns = columns
        self._tokens: list[_Token] = []
        at = 0
        while not self._tokens or self._tokens[-1].kind != "end":
            match = _TOKEN.match(text, at)
            if match is None:
                at += len(text[at:]) - len(text[at:].lstrip())
                raise FilterError(f"{text[at : at + 10]!r} is not understood", at)
            kind = str(match.lastgroup)
            self._tokens.append(_Token(kind, match[kind], match.start(kind)))
            at = match.end()
        self._tokens.reverse()  # the next one is the last

    def either(self, depth: int) -> Test:
        tests = [self._all(depth)]
        while self._skip("or"):
            tests.append(self._all(depth))
        return lambda rows: reduce(operator.or_, (test(rows) for test in tests))

    def _all(self, depth: int) -> Test:
        tests = [self._one(depth)]
        while self._skip("and"):
            tests.append(self._one(depth))
        return lambda rows: reduce(operator.and_, (test(rows) for test in tests))

    def _one(self, depth: int) -> Test:
        token = self._tokens.pop()
        if depth > _DEEPEST:
            raise FilterError("too many brackets within each other", token.at)
        if token.is_word("not"):
            inner = self._one(depth + 1)
            return lambda rows: ~inner(rows)
        if token.text == "(":
            test = self.either(depth + 1)
            self.take(")", ")")
            return test
        if token.kind in ("sign", "end") or token.value not in self._columns:
            known = ", ".join(self._columns)
            raise FilterError(f"{token.text!r}: expected a column, not, or (; there are {known}", token.at)
        negated = self._skip("not")
        if negated or self._tokens[-1].is_word("in"):
            self.take("in", "in")
            self.take("(", "(")
            equal = _Token("sign", "=", token.at)
            tests = [self._comparison(token.value, equal)]
            while self._tokens[-1].text == ",":
                self._tokens.pop()
                tests.append(self._comparison(token.value, equal))
            self.take(")", ", or )")
            return lambda rows: reduce(operator.or_, (test(rows) for test in tests)) != negated
        sign = self._tokens.pop()
        if sign.text not in _COMPARE and sign.text != "~":
            raise FilterError(f"{sign.text!r}: expected one of = != < <= > >= ~ in", sign.at)
        return self._comparison(token.value, sign)

    def take(self, wanted: str, expected: str) -> None:
        token = self._tokens.pop()
        if wanted not in (token.kind, token.text.lower()):
            raise FilterError(f"{token.text!r}: expected {expected}", token.at)

    def _skip(self, word: str) -> bool:
        found = self._tokens[-1].is_word(word)
        if found:
            self._tokens.pop()
        return found

    def _comparison(self, name: str, sign: _Token) -> Test:
        """One column against the value that comes next."""
        value, kind, compare = self._tokens.pop(), self._columns[name], _COMPARE.get(sign.text)
        if value.kind in ("sign", "end"):
            raise FilterError(f"{value.text!r}: expected a value", value.at)
        word = value.value
        wanted = sign.text != "!="
        is_null = value.is_word("null")
        if sign.text not in _EQUALITY and (
            is_null or kind == "bool" or (kind == "number" and compare is None)
        ):
            raise FilterError(f"{sign.text} does not go with {'null' if is_null else f'a {kind}'}", sign.at)
        if is_null:
            return lambda rows: rows.is_null(name) == wanted
        if kind == "text":
            if sign.text in _EQUALITY:
                return lambda rows: rows.equals(name, word) == wanted
            if compare is None:
                return lambda rows: _texts(rows, name, lambda text: word.lower() in text.lower())
            return lambda rows: _texts(rows, name, lambda text: bool(compare(text, word)))
        if kind == "bool":
            if word.lower() not in _TRUTHS:
                raise FilterError(f"{name} is true or false", value.at)
            return lambda rows: (rows[name] == _TRUTHS[word.lower()]) == wanted
        try:
            number = float(word)
        except ValueError:
            raise FilterError(f"{value.text!r} is not a number, as {name} is", value.at) from None
        assert compare is not None
        numeric = compare

        def test(rows: RunColumns) -> Array:
            with np.errstate(over="ignore"):  # more than a column's type can hold is infinite
                found: Array = numeric(rows[name], number)
            return np.where(rows.is_null(name), not wanted, found) if name in NULLABLE else found

        return test


def _texts(rows: RunColumns, name: str, holds: Callable[[str], bool]) -> Array:
    """Which cells of a column of texts pass a test, each text tried once."""
    values = rows[name]
    if name in rows.texts:
        truths: Array = np.array([holds(text) for text in rows.texts[name].texts] or [False])
        return truths[values]
    begins = np.flatnonzero(np.append(True, values[1:] != values[:-1])) if len(values) else np.zeros(0, int)
    found = np.array([holds(text.decode("utf-8", "replace")) for text in values[begins].tolist()], bool)
    return np.repeat(found, np.diff(begins, append=len(values)))


_LAST: Final = 0xFFFFFFFF


def sort_rows(rows: RunColumns, selected: Array, sort: str) -> Array:
    """Rows in the order of `-reward,index`: descending with a minus, nulls last, equal ones as they came.

    Raises `FilterError` for a column that is not there.
    """
    names = {column["name"] for column in rows.columns()}
    for key in reversed([part.strip() for part in sort.split(",") if part.strip()]):
        name = key.removeprefix("-")
        if name not in names:
            raise FilterError(f"there is no column {name!r} to sort by", 0)
        keys = _sort_keys(rows, name)[selected]
        keys = ~keys if key.startswith("-") else keys
        keys[rows.is_null(name, selected)] = _LAST
        # Unique numbers that sort as the keys do, equal ones by place: no order of arguments is as quick.
        places = (keys.astype(np.uint64) << np.uint64(32)) | np.arange(len(keys), dtype=np.uint64)
        places.sort()
        selected = selected[(places & np.uint64(_LAST)).astype(np.int64)]
    return selected


def _sort_keys(rows: RunColumns, name: str) -> Array:
    """A column as whole numbers of 32 bits in the same order, of floats by their first seven digits."""
    values = rows[name]
    if name in rows.texts:
        texts = rows.texts[name].texts
        ranks = np.zeros(max(1, len(texts)), np.uint32)
        ranks[sorted(range(len(texts)), key=texts.__getitem__)] = np.arange(len(texts))
        return ranks[values]
    if values.dtype.kind == "S":  # hashes: their first bytes tell them apart
        return values.view(">u4").reshape(-1, 8)[:, 0].astype(np.uint32)
    if name == "finished_at" and len(values):  # of this century: seven digits would be minutes
        values = values - (np.nanmin(values) if np.isfinite(values).any() else 0.0)
    if values.dtype.kind == "f":
        with np.errstate(over="ignore"):
            bits = (values.astype(np.float32) + 0.0).view(np.uint32)  # -0.0 becomes 0.0
        return np.where(bits >> 31, ~bits, bits | np.uint32(0x80000000))
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    if high - low >= _LAST:
        return np.unique(values, return_inverse=True)[1].astype(np.uint32)
    return (values.astype(np.int64) - low).astype(np.uint32)
