"""Logging of a run: to standard error for people, and one file per attempt in the run directory."""

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler

logger = logging.getLogger(__name__)


@contextmanager
def log_to_file(folder: Path, level: str) -> Iterator[Path]:
    """Writes what `rollstream` and Ray log into a new file of `folder` while the context lasts."""
    path = folder / f"attempt-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    with suppress(OSError):
        path.touch(mode=0o600)  # why a rollout failed may be any program's output
    handler = _PatientFileHandler(path, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("rollstream")
    before = logger.level
    logger.setLevel(level.upper())
    logger.addHandler(handler)
    logging.getLogger("ray").addHandler(handler)
    try:
        yield path
    finally:
        logger.removeHandler(handler)
        logging.getLogger("ray").removeHandler(handler)
        logger.setLevel(before)
        handler.close()


def log_to_console(console: Console, level: str) -> None:
    """Shows what `rollstream` logs to a person, above the progress line on a terminal."""
    logger = logging.getLogger("rollstream")
    handler: logging.Handler
    if console.is_terminal:
        handler = RichHandler(console=console, show_path=False, markup=False)
    else:
        handler = logging.StreamHandler(console.file)
        handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


class _PatientFileHandler(logging.FileHandler):
    """A log file that may be full or gone: the run goes on without it and says so once."""

    _told = False

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record, or leaves it out where the file takes nothing."""
        try:
            super().emit(record)
        except OSError:  # the file cannot even be created
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Warns the first time."""
        if not self._told:
            self._told = True
            reason = getattr(sys.exc_info()[1], "strerror", None) or sys.exc_info()[1]
            logger.warning("cannot write the log file %s: %s; going on without", self.baseFilename, reason)

    def close(self) -> None:
        """Closes the file; what it cannot take any more is lost."""
        with suppress(OSError):
            super().close()
