"""The buffer over HTTP: durable writes, batches, a read of everything, and what they do to each other.

    python -m bench.buffer [--quick] [--json FILE]

The server (`rollstream buffer serve`), the load and the bare servers are processes of their own; see
`buffer_load` for the latter two. Items are about 2 KB of JSON. Every write is answered when it is on disk;
the bare servers keep nothing, they only answer: what a Python server costs at least. They run before and
after, and the mean of both counts.

Aims: single durable writes >= 40 % of the bare asyncio server's rate; CPU per write the same from 1 k to 1 M
items; batches >= 25,000 items/s; 100 k items read in under 2 s with under 300 MB; p99 of writes under 50 ms
while that read runs, and while a body of 400 MB is sent and refused.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from bench.report import parse_options, print_table, write_json

CONNECTIONS = 32
BATCH = 500
_TICK = os.sysconf("SC_CLK_TCK")


class Process:
    """A server that says its URL on its first line."""

    def __init__(self, command: list[str], log: Path) -> None:
        with log.open("ab") as errors:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{command}: {log.read_text()}")
        self.port = int(orjson.loads(line)["url"].rpartition(":")[2])

    def cpu(self) -> float:
        """Seconds, all threads."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICK

    def peak_mb(self) -> float:
        """Highest resident memory."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024

    def end(self) -> None:
        """Stops it."""
        self._process.terminate()
        self._process.wait(60)


@contextlib.contextmanager
def buffer_server(folder: Path) -> Iterator[Process]:
    """A buffer with a fresh folder."""
    command = [sys.executable, "-m", "rollstream.cli", "buffer", "serve", "--json", "--port", "0"]
    server = Process([*command, "--dir", str(folder)], folder.with_suffix(".log"))
    try:
        yield server
    finally:
        server.end()


def start_load(role: str, port: int, **options: object) -> "subprocess.Popen[bytes]":
    """A role of `buffer_load`."""
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "bench.buffer_load", role, "--port", str(port), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def finish(load: "subprocess.Popen[bytes]") -> dict[str, Any]:
    """What it measured."""
    out, _ = load.communicate(timeout=900)
    measured: dict[str, Any] = orjson.loads(out)
    assert not measured.get("bad"), measured
    return measured


def load(role: str, port: int, **options: object) -> dict[str, Any]:
    """Runs a role to its end."""
    return finish(start_load(role, port, **options))


def bare_rate(total: int, folder: Path, *words: str) -> float:
    """Requests/s of a server that only answers."""
    server = Process([sys.executable, "-m", "bench.buffer_load", "bare", *words], folder / "bare.log")
    try:
        load("client", server.port, connections=CONNECTIONS, total=total // 4)
        measured = load("client", server.port, connections=CONNECTIONS, total=total)
    finally:
        server.end()
    return float(measured["requests"] / measured["seconds"])


def measure_writes(sizes: list[int], singles: int, folder: Path) -> tuple[list[dict[str, Any]], float]:
    """Single writes with so many items stored, the rest of them filled in by batches; their rate."""
    rows = []
    stored, filled, fill_seconds = 0, 0, 0.0
    with buffer_server(folder / "writes") as server:
        for size in sizes:
            missing = (size - stored) // BATCH * BATCH
            if missing > 0:
                done = load("client", server.port, connections=4, start=stored, total=missing, batch=BATCH)
                stored, filled, fill_seconds = (
                    stored + missing,
                    filled + missing,
                    fill_seconds + done["seconds"],
                )
            before = server.cpu()
            done = load("client", server.port, connections=CONNECTIONS, start=10**9 + stored, total=singles)
            cpu = server.cpu() - before
            rows.append(
                {
                    "items stored": size,
                    "writes/s": done["requests"] / done["seconds"],
                    "p50 ms": done["p50"] * 1e3,
                    "p99 ms": done["p99"] * 1e3,
                    "server CPU us/write": cpu / singles * 1e6,
                    "peak MB": server.peak_mb(),
                }
            )
            stored += singles
    return rows, filled / fill_seconds


def measure_read(items: int, folder: Path) -> list[dict[str, Any]]:
    """A read of everything: by itself, and beside writes."""
    rows = []
    for beside in (False, True):
        with buffer_server(folder / f"read{beside:d}") as server:
            load("client", server.port, connections=4, total=items, batch=BATCH)
            before = server.peak_mb()
            writers = None
            if beside:
                writers = start_load(
                    "client", server.port, connections=CONNECTIONS, start=10**9, total=10**9, seconds=4
                )
                time.sleep(1.5)  # they have begun: imports, connections
            cpu = server.cpu()
            done = load("read", server.port)
            cpu = server.cpu() - cpu
            written = finish(writers) if writers is not None else None
            rows.append(
                {
                    "read of": items,
                    "beside writes": "yes" if beside else "no",
                    "seconds": done["seconds"],
                    "server CPU s": cpu,
                    "MB": done["bytes"] / 1e6,
                    "server peak MB": server.peak_mb(),
                    "of it before": before,
                    "write p99 ms": None if written is None else written["p99"] * 1e3,
                    "writes/s": None if written is None else written["requests"] / written["seconds"],
                }
            )
    return rows


def measure_refusal(size: int, folder: Path) -> dict[str, Any]:
    """Writes while a body that is too large is sent."""
    with buffer_server(folder / "refusal") as server:
        writers = start_load("client", server.port, connections=CONNECTIONS, total=10**9, seconds=4)
        time.sleep(1.5)
        refused = load("huge", server.port, size=size)
        written = finish(writers)
        return {
            "body MB": size / 1e6,
            "status": refused["status"],
            "sent MB": refused["sent"] / 1e6,
            "seconds": refused["seconds"],
            "write p99 ms": written["p99"] * 1e3,
            "server peak MB": server.peak_mb(),
        }


def main() -> None:
    """Runs everything."""
    options = parse_options(__doc__ or "")
    sizes = [1_000, 10_000] if options.quick else [1_000, 10_000, 100_000, 1_000_000]
    singles = 4_000 if options.quick else 40_000
    with tempfile.TemporaryDirectory(prefix="bench-buffer-") as name:
        folder = Path(name)
        bare = [bare_rate(singles, folder), bare_rate(singles, folder, "--uvloop")]
        writes, batches = measure_writes(sizes, singles, folder)
        bare = [
            (bare[0] + bare_rate(singles, folder)) / 2,
            (bare[1] + bare_rate(singles, folder, "--uvloop")) / 2,
        ]
        reads = measure_read(10_000 if options.quick else 100_000, folder)
        refusal = measure_refusal(400 * 10**6, folder)
    for row in writes:
        row["of bare asyncio %"] = 100 * row["writes/s"] / bare[0]
    print_table("Bare servers that only answer", [{"asyncio /s": bare[0], "uvloop /s": bare[1]}])
    print_table("Single durable writes, 32 connections", writes)
    print_table(f"Batches of {BATCH}, 4 connections", [{"items/s": batches}])
    print_table("One read of everything", reads)
    print_table("A body that is refused, beside writes", [refusal])
    rows = [{"bare asyncio/s": bare[0], "bare uvloop/s": bare[1], "batch items/s": batches}, *writes, *reads]
    write_json(options.json, "buffer", [*rows, refusal])


if __name__ == "__main__":
    main()
