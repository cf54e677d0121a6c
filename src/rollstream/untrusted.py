"""Files and texts that somebody else may have made: a run that was downloaded, what a model wrote."""

import errno
import os
import re
import stat
from io import BufferedReader
from pathlib import Path

MOST_BYTES = 1 << 26
"""A file that is read whole may have so many: twice the largest `tokenizer.json` of a known model."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Characters that a terminal acts on instead of showing them; line breaks and tabs are text."""


def open_regular(path: Path) -> BufferedReader:
    """Opens a file for reading, without waiting. Raises `OSError`, also for a FIFO, a device and a folder."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(fd, "rb")


def read_regular(path: Path, most: int = MOST_BYTES) -> bytes:
    """The content of a file of at most `most` bytes. Raises `OSError` as `open_regular`, and for a larger file."""
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it is larger than {most} bytes", str(path))
    return content


def printable(text: str) -> str:
    """A text for a terminal: what the terminal would act on (colours, titles, the clipboard) is escaped."""
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def printable_line(text: str) -> str:
    """A text in one line of a table: whatever does not print is escaped, line breaks and tabs, too."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
