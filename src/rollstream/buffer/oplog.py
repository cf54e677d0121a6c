"""The buffer's log on disk: segments of frames, one thread that appends, reading by place, deleting.

    segments/000000.rsj, 000001.rsj, …   frames of `rollstream.store.journal`; only the newest grows
    log.json                             format and id of the log
    reserve                              room that is given up when the disk is full, for what must still
                                         be written then: leases, acks, cleaning
    damaged/                             stretches of segments that are not what was written

One batch of frames is on its way at a time: it is appended and synced in the writer thread, or nothing of it
is: after an error the segment is cut back to what was durable.
"""

import errno
import logging
import os
import queue
import threading
import uuid
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import orjson

from rollstream.buffer.drop_file import DropFile
from rollstream.buffer.group_state import offset_of, segment_of
from rollstream.buffer.log_records import FRAME_HEADER, KEY_SIZE
from rollstream.buffer.segment_scan import scan_segment
from rollstream.errors import DamageError, RunDirectoryError, StorageError, StorageFullError
from rollstream.store.journal import (
    FILE_HEADER_SIZE,
    Damage,
    JournalFile,
    ScanReport,
    sync_folder,
    write_file_durably,
)

logger = logging.getLogger(__name__)

_FORMAT = 2
"""2: a group belongs to a rollout."""

_OPEN_SEGMENTS = 64
"""Segments kept open for reading: far below the usual limit of 1,024 files."""

_RESERVE_STEP = 1 << 20
"""The reserve is so much, or several times that. A cleaning that frees a segment needs less than one."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_GAP = 65536
"""Frames this close to each other (bytes, for a whole group) are read in one go."""


@dataclass(slots=True)
class Batch:
    """Frames to be written together."""

    frames: Sequence[bytes]
    new_segment: bool
    """Begin a segment with them."""
    needs_room: bool
    """Whether it must not be written on the last of the disk: the reserve has to be there."""
    reserve: int = 0
    """Bytes that must be left for what has to be written on a full disk: if it needs room, it makes sure."""
    notes: bytes = b""
    """Lines for the list of what was dropped, written once the frames are durable."""


class LogFrame(NamedTuple):
    """A frame that was read."""

    where: int
    length: int
    ticket: int
    kind: int
    rows: int
    body: bytes


class _SegmentFile:
    """A segment open for reading; closed when nobody holds it any more, so never under a reader."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


@dataclass(slots=True)
class LogReport:
    """What opening a log found wrong."""

    torn: int = 0
    """Bytes of an unfinished batch, cut off: it was never acknowledged."""
    damage: list[Damage] = field(default_factory=list)


class Oplog:
    """See the module. `append` from one thread at a time; `read` from any."""

    def __init__(self, root: Path) -> None:
        """Opens the log, or begins one. Raises `RunDirectoryError`, `OSError`."""
        self._root = root
        self._folder = root / "segments"
        self._damaged = root / "damaged"
        self._id = _open_log_id(root)
        self.drops = DropFile(root / "dropped.jsonl")
        self._folder.mkdir(exist_ok=True)
        sync_folder(root)
        self.report = LogReport()
        self.sizes: dict[int, int] = dict.fromkeys(self._numbers(), 0)
        """Segment -> bytes, the oldest first. The newest is the head."""
        self._head: JournalFile | None = None
        self._readers: OrderedDict[int, _SegmentFile] = OrderedDict()
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[tuple[Batch, Callable[[StorageError | None], None]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None
        self._reserve = 0
        """Bytes of the reserve; 0: it was given up."""
        self._uncut = False
        """Behind what is durable in the head stands something that was refused."""
        self.begin_anew = False
        """The head takes no more: the next batch must begin a segment."""

    @property
    def head(self) -> int:
        """Number of the newest segment, -1 before the first."""
        return next(reversed(self.sizes), -1)

    @property
    def bytes_on_disk(self) -> int:
        """Of all segments."""
        return sum(self.sizes.values())

    def path(self, number: int) -> Path:
        """Of a segment."""
        return self._folder / f"{number:06d}.rsj"

    # -- opening

    def replay(self) -> Iterator[LogFrame]:
        """Every whole frame, in order; then the log is ready for `append`.

        The torn tail of the newest segment is cut. Damage is noted in `report` and kept aside.
        """
        numbers = list(self.sizes)
        for number in numbers:
            path = self.path(number)
            report = ScanReport()
            for offset, length, ticket, kind, rows, body in scan_segment(path, self._id, report):
                yield LogFrame(number << 40 | offset, length, ticket, kind, rows, body)
            newest = number == numbers[-1]
            if report.torn and not newest:
                report.damage.append(
                    Damage(path, report.end, report.torn, "unfinished frame in a closed file")
                )
            for damage in report.damage:
                self._keep_aside(damage)
            self.report.damage += report.damage
            self.sizes[number] = path.stat().st_size
            if not newest:
                continue
            self.report.torn = report.torn
            if report.end <= FILE_HEADER_SIZE and not report.damage:  # nothing was ever finished in it
                path.unlink()
                sync_folder(self._folder)
                del self.sizes[number]
            elif report.damage:
                if report.torn:
                    os.truncate(path, report.end)
                self.sizes[number] = path.stat().st_size
            else:
                self._head = JournalFile(path, self._id, resume_at=report.end)
                self.sizes[number] = report.end
        self.begin_anew = self._head is None

    def _keep_aside(self, damage: Damage) -> None:
        target = self._damaged / f"{damage.path.stem}-{damage.offset}.bin"
        if target.exists():
            return
        self._damaged.mkdir(exist_ok=True)
        with damage.path.open("rb") as file:
            file.seek(damage.offset)
            try:
                target.write_bytes(file.read(damage.length))
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                target.unlink(missing_ok=True)  # the segment itself is still there

    def _numbers(self) -> list[int]:
        return sorted(int(path.stem) for path in self._folder.glob("*.rsj") if path.stem.isdigit())

    # -- writing

    def start(self) -> None:
        """Starts the writer thread."""
        self._make_reserve()
        self._thread = threading.Thread(target=self._write_forever, name="buffer-log", daemon=True)
        self._thread.start()

    def append(self, batch: Batch, done: Callable[[StorageError | None], None]) -> None:
        """Writes a batch in the writer thread, then calls `done` there: None, or why nothing was written."""
        self._jobs.put((batch, done))

    def close(self) -> None:
        """Ends the thread when it has written what it was given. Idempotent."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
        if self._head is not None:
            if self._uncut:
                try:
                    self._cut(self._head)
                except OSError:
                    logger.exception("%s keeps what was refused: it can't be cut", self._head.path)
            self._head.close()
            self._head = None
        with self._lock:
            self._readers.clear()

    def _write_forever(self) -> None:
        while (job := self._jobs.get()) is not None:
            batch, done = job
            error: StorageError | None = None
            try:
                self._write(batch)
            except OSError as cause:
                error = self._fail(cause)
            except BaseException as cause:
                error = StorageError(f"cannot write to {self._folder}: {cause!r}")
                error.__cause__ = cause
            done(error)

    def _write(self, batch: Batch) -> None:
        if self._uncut:
            assert self._head is not None
            self._cut(self._head)
        if batch.needs_room and self._reserve < max(batch.reserve, 1):
            self._make_reserve(batch.reserve, must=True)
        if batch.new_segment:
            self._begin_segment()
        head = self._head
        assert head is not None
        try:
            head.append(b"".join(batch.frames))
            head.sync()
        except BaseException:
            self._uncut = True
            try:
                self._cut(head)
            except OSError:
                logger.exception("cannot cut %s back; nothing is written before that works", head.path)
            raise
        self.sizes[self.head] = head.size
        if batch.notes:
            self.drops.append(batch.notes)

    def _cut(self, head: JournalFile) -> None:
        """Cuts off what was refused.

        Until that is durable nothing follows, in this segment or the next one: the log would tell what was
        refused as well as what came instead of it.
        """
        head.rollback()
        head.sync()
        self._uncut = False

    def _begin_segment(self) -> None:
        number = self.head + 1
        head = JournalFile(self.path(number), self._id)
        if self._head is not None:
            self._head.close()
        self._head = head
        self.sizes[number] = head.size
        self.begin_anew = False

    def _fail(self, cause: OSError) -> StorageError:
        reason = cause.strerror or repr(cause)
        if cause.errno not in _FULL:
            error = StorageError(f"cannot write to {self._folder}: {reason}. What was acknowledged is safe.")
        else:
            error = StorageFullError(
                f"cannot write to {self._folder}: {reason}. What was acknowledged is safe and can be read; "
                "free space, or read and ack what is stored, and write again."
            )
            self._give_reserve()
            if cause.errno == errno.EFBIG:
                self.begin_anew = True
        error.__cause__ = cause
        return error

    def _make_reserve(self, least: int = 0, *, must: bool = False) -> None:
        path = self._root / "reserve"
        size = (least // _RESERVE_STEP + 1) * _RESERVE_STEP
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.posix_fallocate(fd, 0, size)
            finally:
                os.close(fd)
        except OSError as error:
            path.unlink(missing_ok=True)
            if must and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return
        # Where a file can't be that big, or not be allocated ahead, the log does without.
        self._reserve = size

    def _give_reserve(self) -> None:
        (self._root / "reserve").unlink(missing_ok=True)
        self._reserve = 0

    # -- reading

    def read(self, places: Sequence[tuple[int, int]]) -> list[memoryview]:
        """The bodies of frames at `(where, length)`, in the order asked for. They may share their memory.

        Raises:
            FileNotFoundError: the segment was deleted: its live frames are elsewhere now.
            DamageError: a frame is not what was written.
        """
        if not places:
            return []
        first, last = min(places), max(places)
        span = last[0] + last[1] - first[0]
        if segment_of(first[0]) == segment_of(last[0]) and span <= sum(at[1] for at in places) + _GAP:
            base = offset_of(first[0])
            stretch = memoryview(self._pread(segment_of(first[0]), base, span))
            return [
                self._check(where, stretch[(start := where - first[0]) : start + length])
                for where, length in places
            ]
        return [
            self._check(where, memoryview(self._pread(segment_of(where), offset_of(where), length)))
            for where, length in places
        ]

    def _check(self, where: int, frame: memoryview) -> memoryview:
        payload = frame[FRAME_HEADER:]
        if len(payload) < KEY_SIZE or zlib.crc32(payload) != int.from_bytes(frame[12:16], "little"):
            path = self.path(segment_of(where))
            raise DamageError(
                f"{path}, offset {offset_of(where)}: the item stored there is not what was written"
            )
        return payload[KEY_SIZE:]

    def _pread(self, segment: int, offset: int, length: int) -> bytes:
        with self._lock:
            reader = self._readers.get(segment)
            if reader is None:
                reader = self._readers[segment] = _SegmentFile(self.path(segment))
                if len(self._readers) > _OPEN_SEGMENTS:
                    self._readers.popitem(last=False)
            else:
                self._readers.move_to_end(segment)
        return os.pread(reader.fd, length, offset)

    def frames_of(self, segment: int) -> Iterator[LogFrame]:
        """The whole frames of a segment that is not the head."""
        for offset, length, ticket, kind, rows, body in scan_segment(
            self.path(segment), self._id, ScanReport()
        ):
            yield LogFrame(segment << 40 | offset, length, ticket, kind, rows, body)

    def set_aside(self, segment: int) -> None:
        """Moves a damaged segment to `damaged/`."""
        self._damaged.mkdir(exist_ok=True)
        self.path(segment).rename(self._damaged / self.path(segment).name)
        sync_folder(self._damaged)
        sync_folder(self._folder)

    def delete(self, segment: int) -> None:
        """Deletes the oldest segment, durably: a later one never goes before it. It stays in `sizes`."""
        assert segment == next(iter(self.sizes)) != self.head
        self.path(segment).unlink()
        sync_folder(self._folder)
        with self._lock:
            self._readers.pop(segment, None)


def _open_log_id(root: Path) -> bytes:
    path = root / "log.json"
    try:
        stored = orjson.loads(path.read_bytes())
        if stored["format"] != _FORMAT:
            raise RunDirectoryError(f"{path}: format {stored['format']}, this rollstream reads {_FORMAT}")
        return bytes.fromhex(stored["id"])
    except FileNotFoundError:
        pass
    except (ValueError, KeyError, TypeError) as error:
        raise RunDirectoryError(f"{path} is damaged ({error}); restore it from a copy") from error
    if any((root / "segments").glob("*.rsj")):
        raise RunDirectoryError(
            f"{root} has segments but no log.json; restore it from a copy, or choose another"
        )
    log_id = uuid.uuid4()
    write_file_durably(path, orjson.dumps({"format": _FORMAT, "id": log_id.hex}))
    return log_id.bytes
