"""Rows of JSON Lines files: one JSON object a line, found by an index of line offsets.

A file is read by `pread`, never mapped: a file that someone truncates meanwhile is then an error with a name,
not a SIGBUS that takes the process along.
"""

import itertools
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import orjson

from rollstream.data.values import BadRow, Row, described
from rollstream.errors import DataError

_INDEX_CHUNK = 16 << 20
"""Bytes searched for line ends at once: large enough for numpy to be busy, small next to any machine."""
_SCAN_CHUNK = 4 << 20
"""Bytes of lines read at once by a scan; a longer line is read whole."""
_BOM = b"\xef\xbb\xbf"
_DIGITS_TO_ZERO = bytes.maketrans(b"0123456789", b"0000000000")
_TOO_MANY_DIGITS = b"0" * 19
"""From this many digits on an integer may pass 64 bits, which orjson would silently turn into a float."""


class JsonLines:
    """The rows of one JSON Lines file, by position.

    Blank lines are no rows. The index costs 8 bytes a line.

    Args:
        file: Open for reading, with a file descriptor; kept open as long as this object lives.
        label: What messages call the file.
        folder: Where it lies; relative paths in rows are taken from there.

    Raises:
        DataError: The file holds one JSON array.
    """

    def __init__(self, file: BinaryIO, label: str, folder: Path | None = None) -> None:
        self._file = file
        self._fd = file.fileno()
        self._label = label
        self._folder = None if folder is None else folder.absolute()
        self._starts, self._blanks = index_lines(self._fd)
        if len(self) and os.pread(self._fd, 1, int(self._starts[0])) == b"[":
            raise DataError(
                f"{label}: holds a JSON array, not JSON Lines (one object a line); "
                f"`jq -c '.[]' {label} > rows.jsonl` turns it into such a file"
            )

    def __len__(self) -> int:
        return len(self._starts) - 1

    def row(self, position: int) -> Row:
        start, end = int(self._starts[position]), int(self._starts[position + 1])
        return decode_line(self._read(start, end))

    def scan(self) -> Iterator[Row | BadRow]:
        first = 0
        while first < len(self):
            # As many whole lines as fit the chunk, at least one.
            beyond = int(np.searchsorted(self._starts, self._starts[first] + _SCAN_CHUNK, side="right")) - 1
            last = max(beyond, first + 1)
            offsets = (self._starts[first : last + 1] - self._starts[first]).tolist()
            try:
                block = self._read(int(self._starts[first]), int(self._starts[last]))
            except BadRow as error:
                yield from (error for _ in range(first, last))
            else:
                for start, end in itertools.pairwise(offsets):
                    try:
                        yield decode_line(block[start:end])
                    except BadRow as error:
                        yield error
            first = last

    def location(self, position: int) -> str:
        # From the index and not from the file, whose lines may have changed since.
        line = 1 + position + int(np.searchsorted(self._blanks, self._starts[position]))
        return f"{self._label}, row {position} (line {line})"

    def folder(self, position: int) -> Path | None:
        return self._folder

    def _read(self, start: int, end: int) -> bytes:
        data = b""
        while len(data) < end - start:  # one pread gives at most 2 GiB
            try:
                more = os.pread(self._fd, end - start - len(data), start + len(data))
            except OSError as error:
                raise BadRow(f"the file cannot be read ({error})") from error
            if not more:
                raise BadRow("the file has become shorter since it was opened")
            data = data + more if data else more
        return data


def index_lines(fd: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Finds where the lines of a file begin, with numpy, in chunks.

    Args:
        fd: The file, readable by `pread`.

    Returns:
        int64 `[rows + 1]`: the offset of each line that is not blank, then the size of the file. A byte
        order mark at the start is skipped. And int64 `[blank lines]`: the offset of each that is blank.
    """
    found: list[npt.NDArray[np.int64]] = []
    empty: list[npt.NDArray[np.int64]] = []
    doubtful: list[npt.NDArray[np.int64]] = []  # begin with a space, tab or carriage return
    offset = 0
    at_line_start = True
    while chunk := os.pread(fd, _INDEX_CHUNK, offset):
        data = np.frombuffer(chunk, dtype=np.uint8)
        starts = np.flatnonzero(data == 0x0A).astype(np.int64) + 1
        if at_line_start:
            skipped = len(_BOM) if offset == 0 and chunk.startswith(_BOM) else 0
            starts = np.concatenate([np.array([skipped], dtype=np.int64), starts])
        at_line_start = chunk.endswith(b"\n")
        starts = starts[starts < len(data)]
        first = data[starts]
        found.append(starts[first > 0x20] + offset)
        empty.append(starts[first == 0x0A] + offset)
        doubtful.append(starts[(first <= 0x20) & (first != 0x0A)] + offset)
        offset += len(chunk)
    end = np.array([offset], dtype=np.int64)
    unclear = np.concatenate([end[:0], *doubtful])
    is_blank = np.fromiter((_is_blank(fd, start) for start in unclear), dtype=bool, count=len(unclear))
    rows = _merged(found, unclear[~is_blank])
    return np.concatenate([rows, end]), _merged(empty, unclear[is_blank])


def _merged(parts: list[npt.NDArray[np.int64]], others: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Sorted; `parts` are so already, one after the other."""
    merged = np.concatenate([*parts, others])
    if len(others):
        merged.sort()
    return merged


def _is_blank(fd: int, start: int) -> bool:
    while piece := os.pread(fd, 256, start):
        line, newline, _ = piece.partition(b"\n")
        if line.strip():
            return False
        if newline:
            return True
        start += len(piece)
    return True


def decode_line(line: bytes) -> Row:
    """Decodes one line. NaN reads as None; it must hold an object.

    Raises:
        BadRow: Not JSON, not an object, or a number that would not be kept exactly.
    """
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        value = _decode_carefully(line)
    else:
        # A number of 19 digits passes 64 bits or not; text with that many digits costs a second look only.
        if _TOO_MANY_DIGITS in line.translate(_DIGITS_TO_ZERO):
            value = _decode_carefully(line)
    if type(value) is not dict:
        raise BadRow(f"the line holds {described(value)}, not a JSON object")
    return value


def _decode_carefully(line: bytes) -> Any:
    try:
        return json.loads(line, parse_constant=_constant, parse_int=_integer, parse_float=_float)
    except UnicodeDecodeError as error:
        raise BadRow(f"not UTF-8 ({error})") from error
    except RecursionError as error:
        raise BadRow("JSON nested too deeply") from error
    except ValueError as error:
        raise BadRow(f"not JSON ({error}); the line begins {line[:60]!r}") from error


def _constant(text: str) -> None:
    if text != "NaN":
        raise BadRow(f"{text} has no JSON form; write it as text")


def _integer(text: str) -> int:
    if len(text) > 20 or not -(2**63) <= (value := int(text)) < 2**64:
        raise BadRow(f"the integer {text[:40]} does not fit 64 bits; write it as text")
    return value


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise BadRow(f"the number {text[:40]} is too large; write it as text")
    return value
