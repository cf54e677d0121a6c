"""The buffer over HTTP: durable writes, batches, large items, a read of everything, opening what is there.

    python -m bench.buffer [--quick] [--json FILE]

The server (`rollstream buffer serve`), the load and the bare server are processes of their own; see
`buffer_load` for the latter two. Items are about 2 KB of JSON. Every write is answered when it is on disk. The
bare server is aiohttp.web on the same event loop: it reads the body, keeps nothing, and answers. It runs before
and after, and the mean of both counts. PostgreSQL's tables need its programs (Debian's postgresql). slime's own
server runs beside with ROLLSTREAM_SLIME, the folder of its rollout_buffer, and ROLLSTREAM_SLIME_PYTHON, which has
fastapi and uvicorn; it keeps everything in memory.

Aims: single durable writes >= 8,000/s and >= 0.55 of the bare server; CPU a write at 1 M items stored within 15 %
of that at 1 k; batches >= 25,000 items/s; 100 k items read in 2.5 s; 1 M items opened in 1 s; items of 200 KB at
60 % of a plain sequential write, and faster than sqlite3 alone; memory under 300 MB.
"""

import contextlib
import os
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from bench.buffer_load import big_batch
from bench.report import parse_options, print_table, write_json

CONNECTIONS = 32
BATCH = 500
_TICK = os.sysconf("SC_CLK_TCK")


class Process:
    """A server that says its URL on its first line."""

    def __init__(self, command: list[str], log: Path) -> None:
        began = time.perf_counter()
        with log.open("ab") as errors:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{command}: {log.read_text()}")
        self.seconds = time.perf_counter() - began
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


class SlimeServer:
    """slime's own server, from its folder."""

    def __init__(self, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        python = os.environ.get("ROLLSTREAM_SLIME_PYTHON", sys.executable)
        command = [python, "-m", "uvicorn", "buffer:app", "--port", str(self.port), "--no-access-log"]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command, cwd=os.environ["ROLLSTREAM_SLIME"], stdout=output, stderr=output
            )
        for _ in range(600):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            time.sleep(0.1)
        raise RuntimeError(log.read_text())

    def end(self) -> None:
        """Stops it."""
        self._process.terminate()
        self._process.wait(60)


@contextlib.contextmanager
def buffer_server(folder: Path, *words: str) -> Iterator[Process]:
    """A buffer on a folder."""
    command = [sys.executable, "-m", "rollstream.cli", "buffer", "serve", "--json", "--port", "0"]
    server = Process([*command, "--dir", str(folder), *words], folder.with_suffix(".log"))
    try:
        yield server
    finally:
        server.end()


def load(role: str, port: int, **options: object) -> dict[str, Any]:
    """Runs a role of `buffer_load`."""
    return finish(start_load(role, port, **options))


def start_load(role: str, port: int, **options: object) -> "subprocess.Popen[bytes]":
    """Starts a role."""
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "bench.buffer_load", role, "--port", str(port), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def finish(running: "subprocess.Popen[bytes]") -> dict[str, Any]:
    """What it measured."""
    out, _ = running.communicate(timeout=900)
    measured: dict[str, Any] = orjson.loads(out)
    assert not measured.get("bad"), measured
    return measured


def bare_rate(total: int, folder: Path) -> float:
    """Requests/s of a server that only reads and answers."""
    server = Process([sys.executable, "-m", "bench.buffer_load", "bare"], folder / "bare.log")
    try:
        load("client", server.port, connections=CONNECTIONS, total=total // 4)
        measured = load("client", server.port, connections=CONNECTIONS, total=total)
    finally:
        server.end()
    return float(measured["requests"] / measured["seconds"])


def measure_writes(
    sizes: Sequence[int], singles: int, folder: Path, *words: str
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Single writes with so many items stored, filled up by batches; what the batches took, and opening it."""
    rows = []
    stored, filled, seconds, filling = 0, 0, 0.0, 0.0
    with buffer_server(folder / "writes", *words) as server:
        for size in sizes:
            missing = (size - stored) // BATCH * BATCH
            if missing > 0:
                cpu = server.cpu()
                done = load("client", server.port, connections=4, start=stored, total=missing, batch=BATCH)
                filling += server.cpu() - cpu
                stored, filled, seconds = stored + missing, filled + missing, seconds + done["seconds"]
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
    with buffer_server(folder / "empty", *words[:0]) as server:
        empty = server.seconds
    with buffer_server(folder / "writes", *words) as server:
        opened = server.seconds
    batches = {
        "items/s": filled / seconds,
        "server CPU us/item": filling / filled * 1e6,
        "then open s": opened,
        "an empty one s": empty,
    }
    return rows, batches


def measure_read(items: int, folder: Path, *words: str) -> list[dict[str, Any]]:
    """A read of everything: by itself, and beside writes."""
    rows = []
    for beside in (False, True):
        with buffer_server(folder / f"read{beside:d}", *words) as server:
            load("client", server.port, connections=4, total=items, batch=BATCH, start=beside * 10**8)
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
                    "write p99 ms": None if written is None else written["p99"] * 1e3,
                    "writes/s": None if written is None else written["requests"] / written["seconds"],
                }
            )
    return rows


def measure_beside(singles: int, folder: Path) -> list[dict[str, Any]]:
    """A buffer, slime's server and a buffer again: single writes over one and many connections, and a read of them."""
    rows = []
    for number, name in enumerate(("rollstream", "slime", "rollstream")):
        if name == "slime" and "ROLLSTREAM_SLIME" not in os.environ:
            continue
        with contextlib.ExitStack() as stack:
            if name == "slime":
                server: Any = SlimeServer(folder / "slime.log")
                stack.callback(server.end)
            else:
                server = stack.enter_context(buffer_server(folder / f"beside{number}"))
            few = singles // 10 // 16 * 16
            alone = load("client", server.port, connections=1, total=few)
            many = load("client", server.port, connections=CONNECTIONS, start=few, total=singles)
            read = load("read", server.port)
            rows.append(
                {
                    "server": name,
                    "writes/s, 1 connection": few / alone["seconds"],
                    f"writes/s, {CONNECTIONS} connections": singles / many["seconds"],
                    "p99 ms": many["p99"] * 1e3,
                    "read of": few + singles,
                    "seconds": read["seconds"],
                }
            )
    return rows


def measure_big(items: int, folder: Path, *words: str) -> dict[str, Any]:
    """Items of 200 KB with tokens, beside the same bytes written plainly and by sqlite3, each synced as often.

    These two run before and after, and the mean of both counts.
    """
    body = big_batch(0, 20, 22_000)
    before = _plain_rate(body, items // 20, folder), _sqlite_rate(body, items // 20, folder)
    with buffer_server(folder / "big", *words) as server:
        cpu = server.cpu()
        done = load("big", server.port, total=items, connections=4)
        cpu, peak = server.cpu() - cpu, server.peak_mb()
    plain = (before[0] + _plain_rate(body, items // 20, folder)) / 2
    alone = (before[1] + _sqlite_rate(body, items // 20, folder)) / 2
    rate = done["bytes"] / done["seconds"] / 1e6
    return {
        "items": items,
        "MB": done["bytes"] / 1e6,
        "MB/s": rate,
        "plain MB/s": plain,
        "of it %": 100 * rate / plain,
        "sqlite3 MB/s": alone,
        "times that": rate / alone,
        "server CPU ms/MB": cpu * 1e9 / done["bytes"],
        "server peak MB": peak,
    }


def _plain_rate(body: bytes, times: int, folder: Path) -> float:
    began = time.perf_counter()
    with (folder / "plain").open("wb") as file:
        for _ in range(times):
            file.write(body)
            file.flush()
            os.fdatasync(file.fileno())
    seconds = time.perf_counter() - began
    (folder / "plain").unlink()
    return times * len(body) / seconds / 1e6


def _sqlite_rate(body: bytes, times: int, folder: Path) -> float:
    """By sqlite3 as the buffer sets it up, 20 rows in a transaction."""
    row = body[: len(body) // 20]
    with tempfile.TemporaryDirectory(dir=folder) as name:
        database = sqlite3.connect(Path(name) / "alone.sqlite", isolation_level=None)
        for setting in (
            "page_size = 8192",
            "journal_mode = WAL",
            "synchronous = FULL",
            "wal_autocheckpoint = 2048",
        ):
            database.execute(f"PRAGMA {setting}")
        database.execute("CREATE TABLE bodies (seq INTEGER PRIMARY KEY, body BLOB NOT NULL)")
        began = time.perf_counter()
        for _ in range(times):
            database.execute("BEGIN")
            for _ in range(20):
                database.execute("INSERT INTO bodies (body) VALUES (?)", (row,))
            database.execute("COMMIT")
        seconds = time.perf_counter() - began
        database.close()
    return times * 20 * len(row) / seconds / 1e6


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
            "write p99 ms": written["p99"] * 1e3,
            "server peak MB": server.peak_mb(),
        }


def main() -> None:
    """Runs everything."""
    options = parse_options(__doc__ or "")
    sizes = [1_000, 10_000] if options.quick else [1_000, 100_000, 1_000_000]
    singles = 4_000 if options.quick else 40_000
    items = 10_000 if options.quick else 100_000
    with tempfile.TemporaryDirectory(prefix="bench-buffer-") as name:
        folder = Path(name)
        bare = bare_rate(singles, folder)
        writes, batches = measure_writes(sizes, singles, folder)
        bare = (bare + bare_rate(singles, folder)) / 2
        for row in writes:
            row["of bare %"] = 100 * row["writes/s"] / bare
            row["CPU of the first"] = row["server CPU us/write"] / writes[0]["server CPU us/write"]
        beside = measure_beside(singles, folder)
        reads = measure_read(items, folder)
        big = measure_big(400 if options.quick else 2_000, folder)
        refusal = measure_refusal(400 * 10**6, folder)
        print_table("A bare aiohttp.web server that reads and answers", [{"requests/s": bare}])
        print_table("SQLite: single durable writes, 32 connections", writes)
        print_table(f"SQLite: batches of {BATCH}, 4 connections, and opening what is there", [batches])
        print_table("SQLite beside slime's server: single writes, and a read of them", beside)
        print_table("SQLite: one read of everything", reads)
        print_table("SQLite: items of 200 KB with tokens, batches of 20, 4 connections", [big])
        print_table("A body that is refused, beside writes", [refusal])
        rows = [{"bare/s": bare}, *writes, batches, *beside, *reads, big, refusal]
        rows += _measure_postgres(sizes[:2], singles, items, folder)
    write_json(options.json, "buffer", rows)


@contextlib.contextmanager
def _postgres() -> Iterator[tuple[str, str]]:
    from tests.support.postgres import PostgresServer  # the one of the tests

    database = PostgresServer(durable=True)
    try:
        database.start()
        yield "--store", database.url
    finally:
        database.remove()


def _measure_postgres(sizes: Sequence[int], singles: int, items: int, folder: Path) -> list[dict[str, Any]]:
    place = folder / "postgres"
    place.mkdir()
    with _postgres() as store:
        writes, batches = measure_writes(sizes, singles, place, *store)
    with _postgres() as store:
        read = measure_read(items, place, *store)[:1]
    with _postgres() as store:
        big = measure_big(400, place, *store)
    print_table("PostgreSQL: single durable writes, 32 connections", writes)
    print_table(f"PostgreSQL: batches of {BATCH}, 4 connections", [batches])
    print_table("PostgreSQL: one read of everything", read)
    print_table("PostgreSQL: items of 200 KB with tokens, batches of 20, 4 connections", [big])
    return [{"store": "postgres", **row} for row in (*writes, batches, *read, big)]


if __name__ == "__main__":
    main()
