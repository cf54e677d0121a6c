"""Reading a segment from end to end, fast as long as it is whole.

`rollstream.store.journal.scan` knows what to make of torn tails and damage, but takes several system calls
and seeks a frame. Here a mapped file is walked; at the first thing that is not a whole frame, `scan` takes
over.
"""

import mmap
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from rollstream.store.journal import FILE_HEADER_SIZE, ScanReport, encode_file_header, scan

_HEADER = struct.Struct("<4sIII")
_KEY = struct.Struct("<qii")
_MAGIC = b"\xd7RSF"

ScannedFrame = tuple[int, int, int, int, int, bytes]
"""Offset, length, index, repeat, rows, body."""


def scan_segment(path: Path, log_id: bytes, report: ScanReport) -> Iterator[ScannedFrame]:
    """Yields the whole frames in order and fills `report`, as `scan` does."""
    size = path.stat().st_size
    offset = 0
    if size > FILE_HEADER_SIZE:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[:FILE_HEADER_SIZE] == encode_file_header(log_id):
                offset = FILE_HEADER_SIZE
            while offset and offset + _HEADER.size <= size:
                magic, length, header_crc, payload_crc = _HEADER.unpack_from(data, offset)
                start = offset + _HEADER.size
                end = start + length
                if magic != _MAGIC or end > size or length < _KEY.size:
                    break
                if zlib.crc32(data[offset : offset + 8]) != header_crc:
                    break
                payload = data[start:end]
                if zlib.crc32(payload) != payload_crc:
                    break
                index, repeat, rows = _KEY.unpack_from(payload)
                yield offset, end - offset, index, repeat, rows, payload[_KEY.size :]
                offset = end
        if offset == size:
            report.end = size
            return
    for frame in scan(path, log_id, report):
        if frame.offset >= offset:
            length = _HEADER.size + _KEY.size + len(frame.body)
            yield frame.offset, length, frame.index, frame.repeat, frame.rows, frame.body
