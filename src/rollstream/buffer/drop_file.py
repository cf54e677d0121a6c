"""`dropped.jsonl`: what left the buffer without being delivered, one line a group, for people and scripts.

Derived from the log, not the truth: a line is written after its record is durable, without a sync of its own;
what a crash or a full disk kept out of it is added when the buffer is opened, as long as the log has it.
"""

import logging
from collections.abc import Iterable
from pathlib import Path

import msgspec

from rollstream.buffer.log_records import Dropped

logger = logging.getLogger(__name__)

_ROTATE_BYTES = 16 << 20
"""About 50,000 groups; one older file of the same size is kept beside it."""

_TAIL_BYTES = 4 << 20
"""Read when the buffer is opened: enough for the drops that it lists."""


class DropLine(Dropped, frozen=True):
    """A line of the file."""

    ticket: int = 0
    """Of the record in the log; grows."""


class DropFile:
    """See the module."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, lines: bytes) -> None:
        """Adds whole lines; a failure is logged, nothing else."""
        try:
            if self._path.exists() and self._path.stat().st_size > _ROTATE_BYTES:
                self._path.replace(self._path.with_name(self._path.name + ".1"))
            with self._path.open("ab") as file:
                file.write(lines)
        except OSError as error:
            logger.warning("cannot write %s: %s", self._path, error.strerror)

    def tail(self) -> tuple[list[tuple[int, Dropped]], int]:
        """The newest drops in the file and the older one beside it, each with its ticket.

        A broken line is passed over, and ended. Also says since which ticket all that the files have is here.
        """
        older, _ = _read_end(self._path.with_name(self._path.name + ".1"))
        newer, cut = _read_end(self._path)
        drops = list(_decode(newer.splitlines())) if cut else list(_decode((older + newer).splitlines()))
        since = drops[0][0] + 1 if drops and (cut or older) else 0
        return drops, since


def encode_drops(ticket: int, drops: Iterable[Dropped]) -> bytes:
    """Lines for the file."""
    lines = (DropLine(**msgspec.structs.asdict(drop), ticket=ticket) for drop in drops)
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


def _read_end(path: Path) -> tuple[bytes, bool]:
    """The end of a file, and whether there is more of it."""
    try:
        with path.open("r+b") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            data = file.read()
            if data and not data.endswith(b"\n"):
                file.write(b"\n")
                data += b"\n"
            return data, size > _TAIL_BYTES
    except FileNotFoundError:
        return b"", False
    except OSError as error:
        logger.warning("cannot read %s: %s", path, error.strerror)
        return b"", False


def _decode(lines: Iterable[bytes]) -> Iterable[tuple[int, Dropped]]:
    for line in lines:
        try:
            read = msgspec.json.decode(line, type=DropLine)
        except ValueError:
            continue
        fields = msgspec.structs.asdict(read)
        yield fields.pop("ticket"), Dropped(**fields)
