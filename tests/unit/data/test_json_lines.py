import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.data import json_lines
from rollstream.data.json_lines import JsonLines, decode_line, index_lines
from rollstream.data.values import BadRow
from rollstream.errors import DataError

from .files import write_jsonl


def open_lines(path: Path) -> JsonLines:
    return JsonLines(path.open("rb"), str(path))


def naive_starts(data: bytes) -> list[int]:
    starts, offset = [], 0
    for line in data.split(b"\n"):
        begin = offset + (3 if offset == 0 and data.startswith(b"\xef\xbb\xbf") else 0)
        if data[begin : offset + len(line)].strip():
            starts.append(begin)
        offset += len(line) + 1
    return starts


@given(
    st.lists(st.sampled_from([b"{}", b'{"a":1}', b"", b" ", b"\r", b"\t{}", b"  {} \r", b"x" * 40])),
    st.booleans(),
    st.booleans(),
    st.integers(1, 50),
)
def test_the_index_finds_the_lines_that_are_not_blank(
    lines: list[bytes], newline_at_end: bool, bom: bool, chunk: int
) -> None:
    data = (b"\xef\xbb\xbf" if bom else b"") + b"\n".join(lines) + (b"\n" if newline_at_end else b"")
    fd = os.memfd_create("lines")
    try:
        os.write(fd, data)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(json_lines, "_INDEX_CHUNK", max(chunk, 4))
            starts, blanks = index_lines(fd)
    finally:
        os.close(fd)
    assert starts.dtype == np.int64
    assert starts.tolist() == [*naive_starts(data), len(data)]
    line_starts = [3 * bom] + [i + 1 for i, byte in enumerate(data) if byte == 0x0A]
    assert blanks.tolist() == sorted({i for i in line_starts if i < len(data)} - {*starts.tolist()})


def test_random_access_equals_a_scan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"i": i, "text": "x" * (i * 7 % 90)} for i in range(300)]
    source = open_lines(write_jsonl(tmp_path / "a.jsonl", rows))
    monkeypatch.setattr(json_lines, "_SCAN_CHUNK", 200)
    assert list(source.scan()) == rows
    assert [source.row(i) for i in reversed(range(len(source)))] == rows[::-1]


def test_blank_lines_and_windows_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf\r\n{"a":1}\r\n\r\n   \n {"a":2}')
    source = open_lines(path)
    assert list(source.scan()) == [{"a": 1}, {"a": 2}]
    assert source.location(1) == f"{path}, row 1 (line 5)"
    path.write_bytes(b"x" * 30)  # in place: the lines are those that were read
    assert source.location(1) == f"{path}, row 1 (line 5)"


def test_a_bad_line_is_found_and_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a":1}\n{"a":\n[1]\n"x"\n{"a":"\xff"}\n{"a":2}\n')
    source = open_lines(path)
    rows = list(source.scan())
    assert rows[0] == {"a": 1} and rows[5] == {"a": 2}
    assert [re.sub(r" \(.*?\)(?=,|$)| \(.*;.*", "", str(row)) for row in rows[1:5]] == [
        "not JSON",
        "the line holds a list, not a JSON object",
        "the line holds text, not a JSON object",
        "not UTF-8",
    ]
    with pytest.raises(BadRow, match="not JSON"):
        source.row(1)


def test_a_json_array_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[\n{"a": 1}\n]')
    with pytest.raises(DataError, match=r"a\.json: holds a JSON array.*jq -c"):
        open_lines(path)


def test_a_file_that_shrinks_is_an_error(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"a": 1}] * 100)
    source = open_lines(path)
    os.truncate(path, 20)
    with pytest.raises(BadRow, match="shorter"):
        source.row(50)
    assert all(isinstance(row, BadRow) for row in source.scan())


def test_numbers_are_kept_exactly_or_refused() -> None:
    assert decode_line(b'{"a":NaN,"b":"12345678901234567890123"}') == {
        "a": None,
        "b": "12345678901234567890123",
    }
    for number in (-(2**63), 2**63 - 1, 2**64 - 1):
        assert decode_line(b'{"a":%d}' % number) == {"a": number}
    for text in (b"18446744073709551616", b"-9223372036854775809", b"1e400", b"Infinity", b"-Infinity"):
        with pytest.raises(BadRow, match="write it as text"):
            decode_line(b'{"a":' + text + b"}")


@given(st.dictionaries(st.text(st.characters(codec="utf-8")), st.integers(-(2**70), 2**70)))
def test_integers_never_change_silently(row: dict[str, Any]) -> None:
    import json

    line = json.dumps(row).encode()
    if all(-(2**63) <= value < 2**64 for value in row.values()):
        assert decode_line(line) == row
        assert orjson.dumps(decode_line(line))
    else:
        with pytest.raises(BadRow):
            decode_line(line)
