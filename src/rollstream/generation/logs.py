"""Logging of a run: to standard error for people, and one file per attempt in the run directory."""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler


@contextmanager
def log_to_file(folder: Path, level: str) -> Iterator[Path]:
    """Writes what `rollstream` logs into a new file of `folder` while the context lasts."""
    path = folder / f"attempt-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    handler = logging.FileHandler(path, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("rollstream")
    before = logger.level
    logger.setLevel(level.upper())
    logger.addHandler(handler)
    try:
        yield path
    finally:
        logger.removeHandler(handler)
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
