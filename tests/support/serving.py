"""`rollstream serve` as a process, with the demo model unless it is told otherwise."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from tests.support.until import PATIENCE_S

COMMAND = [sys.executable, "-m", "rollstream.cli", "serve", "--port", "0"]


def question(a: int, b: int) -> list[dict[str, Any]]:
    text = f"State the final answer to the following arithmetic problem: {a} + {b} ="
    return [{"role": "user", "content": text}]


class Served:
    """A server in a process."""

    def __init__(self, *options: str, log: Path, env: dict[str, str] | None = None) -> None:
        self.log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [*COMMAND, "--json", *options],
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **(env or {})},
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, log.read_text()
        self.ready: dict[str, Any] = orjson.loads(line)
        self.url: str = self.ready["url"]

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, bytes]:
        """Exit code, and what else it printed."""
        self.process.send_signal(number)
        assert self.process.stdout is not None
        printed = self.process.stdout.read()
        return self.process.wait(PATIENCE_S), printed


@contextmanager
def serve(*options: str, log: Path, env: dict[str, str] | None = None) -> Iterator[Served]:
    served = Served(*options, log=log, env=env)
    try:
        yield served
    finally:
        if served.process.poll() is None:
            served.stop()
