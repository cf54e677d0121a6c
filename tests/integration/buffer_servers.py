"""`rollstream buffer serve` as a process, for tests."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

COMMAND = [sys.executable, "-m", "rollstream.cli", "buffer", "serve", "--json"]
PATIENCE_S = 60.0


class BufferProcess:
    """A server; `url` is known once it listens."""

    def __init__(self, folder: Path, *options: str, port: int = 0) -> None:
        self.log = folder.with_name(folder.name + ".log")
        with self.log.open("ab") as errors:
            self.process = subprocess.Popen(
                [*COMMAND, "--dir", str(folder), "--port", str(port), *options],
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        ready: dict[str, Any] = orjson.loads(line)
        self.url: str = ready["url"]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE_S)

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)


@contextmanager
def serve_buffer(folder: Path, *options: str, port: int = 0) -> Iterator[BufferProcess]:
    """A server that ends with the block."""
    served = BufferProcess(folder, *options, port=port)
    try:
        yield served
    finally:
        if served.process.poll() is None:
            served.process.kill()
            served.process.wait(PATIENCE_S)
