"""The journal: an append-only file of checksummed frames.

File   = header (magic, run id, CRC-32 of both), then frames.
Frame  = magic (4 bytes), payload length (u32), CRC-32 of those 8 bytes, CRC-32 of the payload, payload.
Payload = index (i64), repeat (i32), rows (i32), body. All little-endian.

The key stands before the compressed body, so that a file is scanned without decompressing it. CRC-32
detects every burst of up to 32 bits, hence every single flipped byte, in the header as in the payload.

A frame is *whole* when both checksums hold. Scanning gives back exactly the whole frames. What lies
between them is either

- a **torn tail**: an unfinished frame, or zeros, that reach the end of the file: what a crash leaves.
  It was never said to be done; it is cut.
- **damage**: anything else. It is reported with file and offset; scanning goes on at the next whole frame.
"""

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from rollstream.untrusted import open_regular

_FILE_MAGIC = b"RSJ\x01\r\n\x1a\n"
_FILE_HEADER = struct.Struct("<8s16sI")
_FRAME_MAGIC = b"\xd7RSF"
_FRAME_HEADER = struct.Struct("<4sIII")
_FRAME_START = struct.Struct("<4sI")
_KEY = struct.Struct("<qii")
_TORN_ZEROS = 32
"""Zeros at the end of a frame that mark it as unfinished: a crash leaves blocks of them, chance does not."""

_MAX_PAYLOAD = 1 << 30
"""A length above this is damage, not a reason to allocate."""

FILE_HEADER_SIZE = _FILE_HEADER.size


@dataclass(frozen=True, slots=True)
class Frame:
    """One whole frame."""

    index: int
    repeat: int
    rows: int
    """Trajectories in the rollout; 0 for a failure."""
    offset: int
    """Of the frame in its file, bytes."""
    body: bytes


@dataclass(frozen=True, slots=True)
class Damage:
    """A stretch of a file that is not what was written."""

    path: Path
    offset: int
    length: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path.name}: {self.length} bytes at offset {self.offset}: {self.reason}"


@dataclass(slots=True)
class ScanReport:
    """What a scan found besides frames. Complete once the scan is exhausted."""

    end: int = 0
    """Where the next frame belongs: behind the last whole frame."""
    torn: int = 0
    """Bytes of a torn tail behind `end`."""
    damage: list[Damage] = field(default_factory=list)


def encode_file_header(run_id: bytes) -> bytes:
    """The start of every journal file; `run_id` has 16 bytes."""
    return _FILE_HEADER.pack(_FILE_MAGIC, run_id, zlib.crc32(_FILE_MAGIC + run_id))


def encode_frame(index: int, repeat: int, rows: int, body: bytes) -> bytes:
    """One frame, ready to be appended."""
    payload = _KEY.pack(index, repeat, rows) + body
    start = _FRAME_START.pack(_FRAME_MAGIC, len(payload))
    checks = struct.pack("<II", zlib.crc32(start), zlib.crc32(payload))
    return start + checks + payload


def scan(path: Path, run_id: bytes, report: ScanReport, start: int = FILE_HEADER_SIZE) -> Iterator[Frame]:
    """Yields the whole frames of a journal file in order, one in memory at a time, and fills `report`.

    Args:
        path: the journal file.
        run_id: 16 bytes; a file of another run is damage as a whole.
        report: filled on the way.
        start: where the first frame is, by the `end` of an earlier scan; what came before is not read again.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        header = file.read(FILE_HEADER_SIZE)
        expected = encode_file_header(run_id)
        if header != expected:
            if len(header) < len(expected) and (expected.startswith(header) or not header.strip(b"\0")):
                report.torn = size
                return
            magic, _, crc = _FILE_HEADER.unpack(header.ljust(FILE_HEADER_SIZE))
            if magic == _FILE_MAGIC and zlib.crc32(header[:-4]) == crc:
                report.damage.append(Damage(path, 0, size, "journal of another run"))
                return
            report.damage.append(Damage(path, 0, min(size, FILE_HEADER_SIZE), "not a journal header"))
        offset = report.end = start
        while offset < size:
            frame, reason = _read_frame(file, offset, size)
            if frame is not None:
                yield frame
                offset = file.tell()
                report.end = offset
                continue
            following = _find_frame(file, offset + 1, size)
            if following is None and reason is None:
                report.torn = size - offset
                return
            end = size if following is None else following
            report.damage.append(Damage(path, offset, end - offset, reason or "unfinished frame"))
            if following is None:
                return
            offset = following


def _read_frame(file: BinaryIO, offset: int, size: int) -> tuple[Frame | None, str | None]:
    """The frame at `offset`, or None and why: no reason means that it looks like a torn tail."""
    file.seek(offset)
    header = file.read(_FRAME_HEADER.size)
    if len(header) < _FRAME_HEADER.size:
        torn = _FRAME_MAGIC.startswith(header[:4]) or not header.strip(b"\0")
        return None, None if torn else "not a frame header"
    magic, length, header_crc, payload_crc = _FRAME_HEADER.unpack(header)
    if zlib.crc32(header[: _FRAME_START.size]) != header_crc or magic != _FRAME_MAGIC:
        return None, None if _zero_to_end(file, offset, size) else "frame header does not match its checksum"
    if length < _KEY.size or length > _MAX_PAYLOAD:
        return None, f"impossible frame length {length}"
    if offset + _FRAME_HEADER.size + length > size:
        return None, None
    payload = file.read(length)
    if zlib.crc32(payload) != payload_crc:
        rest = file.tell()
        torn = _zero_to_end(file, max(offset, rest - _TORN_ZEROS), size)
        file.seek(rest)
        return None, None if torn else "payload does not match its checksum"
    index, repeat, rows = _KEY.unpack_from(payload)
    return Frame(index, repeat, rows, offset, payload[_KEY.size :]), None


def _zero_to_end(file: BinaryIO, offset: int, size: int) -> bool:
    """Whether the file holds only zeros from `offset` on, as after a crash before data reached the disk."""
    file.seek(offset)
    while chunk := file.read(1 << 20):
        if chunk.strip(b"\0"):
            return False
    return size > offset


def _find_frame(file: BinaryIO, offset: int, size: int) -> int | None:
    """Offset of the next whole frame at or behind `offset`."""
    overlap = len(_FRAME_MAGIC) - 1
    while offset < size:
        file.seek(offset)
        chunk = file.read(1 << 20)
        at = chunk.find(_FRAME_MAGIC)
        while at >= 0:
            if _read_frame(file, offset + at, size)[0] is not None:
                return offset + at
            at = chunk.find(_FRAME_MAGIC, at + 1)
        offset += max(1, len(chunk) - overlap)
    return None


class JournalFile:
    """Appends frames to one journal file. Owned by one thread."""

    def __init__(self, path: Path, run_id: bytes, *, resume_at: int | None = None) -> None:
        """Creates the file, or continues it at `resume_at` (what lies behind is cut)."""
        self.path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(path, flags if resume_at is not None else flags | os.O_EXCL, 0o644)
        try:
            if resume_at is None:
                write_all(self._fd, encode_file_header(run_id))
            else:
                os.ftruncate(self._fd, resume_at)
            os.fdatasync(self._fd)
            sync_folder(path.parent)
        except BaseException:
            os.close(self._fd)
            if resume_at is None:
                path.unlink(missing_ok=True)
            raise
        self.end = FILE_HEADER_SIZE if resume_at is None else resume_at
        """Where the next frame begins."""

    def append(self, data: bytes, *, durably: bool = True) -> None:
        """Writes whole frames at the end. When that fails, they are cut off again, so that a half-written frame never
        stands before later ones. What is not written `durably` is durable with the next that is.
        """
        try:
            write_all(self._fd, data)
            if durably:
                os.fdatasync(self._fd)
        except BaseException:
            os.ftruncate(self._fd, self.end)
            raise
        self.end += len(data)

    def sync(self) -> None:
        """Makes durable what was written."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Closes the file. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def write_all(fd: int, data: bytes) -> None:
    """`os.write` until everything is written."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def sync_folder(path: Path) -> None:
    """Makes creations, renames and deletions in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_file_durably(path: Path, data: bytes) -> None:
    """Replaces `path` by `data`: after a crash it holds the old bytes or the new, never a mixture."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)  # a link of this name would lead elsewhere
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        try:
            write_all(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
