"""The other side of `bench.buffer`: a load generator, and a bare server to compare with, each a process.

The client is asyncio protocols on uvloop that hold ready-made bytes: it costs about as little as Python can.
The bare server is aiohttp.web's: it reads a body and answers.
"""

import argparse
import asyncio
import itertools
import socket
import time
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import msgspec
import orjson
import uvloop
from aiohttp import web

GROUP_SIZE = 16
_TEXT = "".join(chr(97 + n * 7 % 26) if n % 6 else " " for n in range(1650))


def item_bodies(start: int) -> Iterator[bytes]:
    """Items of about 2 KB of JSON in groups of 16 whose rewards differ, numbered from `start`."""
    template = orjson.dumps(
        {
            "uid": "UID",
            "instance_id": "ID",
            "messages": [
                {"role": "user", "content": "What is 12 + 30? Think about it, then answer with a number."},
                {"role": "assistant", "content": _TEXT},
            ],
            "reward": -77,
            "extra_info": {
                "timestamp": "1760000000.25",
                "finish_reason": "stop",
                "round_number": 1,
                "tag": "x" * 180,
            },
        }
    )
    before, rest = template.split(b'"UID"')
    middle, rest = rest.split(b'"ID"')
    end, last = rest.split(b"-77")
    for number in itertools.count(start):
        yield b'%b"u%d"%b"i%d"%b%d%b' % (before, number, middle, number // GROUP_SIZE, end, number % 2, last)


def request(path: str, body: bytes) -> bytes:
    """One POST."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class _Load:
    """What all connections of a client share."""

    def __init__(self, bodies: Iterator[bytes], path: str, total: int, seconds: float) -> None:
        self.bodies = bodies
        self.path = path
        self.left = total
        self.ends = time.perf_counter() + seconds
        self.latencies = array("d")
        self.bad = 0
        self.open = 0
        self.done = asyncio.get_running_loop().create_future()


class _Client(asyncio.Protocol):
    """One keep-alive connection: a request, its answer, the next request."""

    def __init__(self, load: _Load) -> None:
        self._load = load
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._load.open += 1
        self._next()

    def _next(self) -> None:
        load = self._load
        if load.left <= 0 or time.perf_counter() > load.ends:
            self._transport.close()
            return
        load.left -= 1
        self._sent_at = time.perf_counter()
        self._transport.write(request(load.path, next(load.bodies)))

    def data_received(self, data: bytes) -> None:
        received = self._received + data if self._received else data
        end = received.find(b"\r\n\r\n")
        if end >= 0:
            at = received.lower().find(b"content-length: ", 0, end)
            length = int(received[at + 16 : received.find(b"\r\n", at)])
            if len(received) >= end + 4 + length:
                self._load.latencies.append(time.perf_counter() - self._sent_at)
                self._load.bad += not received.startswith(b"HTTP/1.1 200")
                self._received = b""
                self._next()
                return
        self._received = received

    def connection_lost(self, exc: Exception | None) -> None:
        self._load.open -= 1
        if self._load.open == 0 and not self._load.done.done():
            self._load.done.set_result(None)


async def _run_client(options: argparse.Namespace) -> None:
    single = item_bodies(options.start)
    if options.batch > 1:
        ready = [
            b'{"items":[' + b",".join(itertools.islice(single, options.batch)) + b"]}"
            for _ in range(options.total // options.batch)
        ]
        bodies, path, total = iter(ready), "/v1/items", len(ready)
    else:
        bodies, path, total = single, "/buffer/write", options.total
    load = _Load(bodies, path, total, options.seconds)
    began = time.perf_counter()
    loop = asyncio.get_running_loop()
    for _ in range(options.connections):
        await loop.create_connection(lambda: _Client(load), "127.0.0.1", options.port)
    await load.done
    seconds = time.perf_counter() - began
    latencies = sorted(load.latencies)
    print(
        orjson.dumps(
            {
                "requests": len(latencies),
                "seconds": seconds,
                "bad": load.bad,
                "p50": latencies[len(latencies) // 2],
                "p99": latencies[len(latencies) * 99 // 100],
                "max": latencies[-1],
            }
        ).decode()
    )


async def _answer(request: web.Request) -> web.Response:
    await request.read()
    return web.Response(body=b'{"success":true}', content_type="application/json")


async def _run_bare() -> None:
    app = web.Application()
    app.router.add_post("/buffer/write", _answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(orjson.dumps({"url": f"http://127.0.0.1:{runner.addresses[0][1]}"}).decode(), flush=True)
    await asyncio.Event().wait()


def big_batch(number: int, items: int, tokens: int) -> bytes:
    """Items of 9 bytes a token and a little more, as msgpack."""
    ids = array("i", range(tokens)).tobytes()
    rows = [
        {
            "uid": f"big-{number}-{n}",
            "instance_id": (number * items + n) // GROUP_SIZE,
            "messages": [{"role": "user", "content": _TEXT}, {"role": "assistant", "content": _TEXT}],
            "reward": n % 2,
            "prompt_ids": b"",
            "response_ids": ids,
            "response_mask": b"\x01" * tokens,
            "response_logprobs": array("f", [-0.25]).tobytes() * tokens,
        }
        for n in range(items)
    ]
    return msgspec.msgpack.encode({"items": rows})


def _write_big(port: int, total: int, connections: int) -> None:
    """Batches of 20 items of about 200 KB."""
    bodies = [big_batch(number, 20, 22_000) for number in range(total // 20)]

    def write(mine: list[bytes]) -> None:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            for body in mine:
                head = "POST /v1/items HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/msgpack\r\n"
                connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
                connection.sendall(body)
                answer = connection.recv(65536)
                assert answer.startswith(b"HTTP/1.1 200"), answer

    began = time.perf_counter()
    with ThreadPoolExecutor(connections) as pool:
        list(pool.map(write, [bodies[n::connections] for n in range(connections)]))
    seconds, size = time.perf_counter() - began, sum(map(len, bodies))
    print(orjson.dumps({"seconds": seconds, "bytes": size, "items": total}).decode())


def _send_huge(port: int, size: int) -> None:
    """Sends a body that is too large, as fast as it is taken, until it is refused."""
    part = b"x" * 2**18
    began, sent = time.perf_counter(), 0
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(
            b"POST /v1/items HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        try:
            while sent < size:
                connection.sendall(b"%x\r\n" % len(part) + part + b"\r\n")
                sent += len(part)
            connection.sendall(b"0\r\n\r\n")
        except OSError:
            pass
        try:
            answer = connection.recv(65536)
        except OSError:
            answer = b""
    status = int(answer.split(b" ", 2)[1]) if answer else 0
    print(orjson.dumps({"status": status, "sent": sent, "seconds": time.perf_counter() - began}).decode())


def _read_all(port: int) -> None:
    """Takes everything there is, counts its bytes and throws them away."""
    began, size, length = time.perf_counter(), 0, 0
    first = 0.0
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(request("/get_rollout_data", b"{}"))
        tail = b""
        buffer = bytearray(2**20)
        while not (size >= length > 0 or tail.endswith(b"0\r\n\r\n")):
            count = connection.recv_into(buffer)
            if count == 0:
                break
            if not first:
                first = time.perf_counter() - began
                head = bytes(buffer[:count]).lower().partition(b"\r\n\r\n")[0]
                if b"content-length: " in head:  # slime's answer
                    length = len(head) + 4 + int(head.partition(b"content-length: ")[2].split()[0])
            size += count
            tail = (tail + bytes(buffer[max(0, count - 400) : count]))[-400:]
    said = tail[tail.rfind(b'"message":') :].decode(errors="replace")
    print(
        orjson.dumps(
            {"seconds": time.perf_counter() - began, "first": first, "bytes": size, "said": said}
        ).decode()
    )


def main() -> None:
    """One role."""
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["client", "bare", "big", "huge", "read"])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--total", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--size", type=int, default=400 * 10**6)
    options = parser.parse_args()
    if options.role == "client":
        uvloop.run(_run_client(options))
    elif options.role == "bare":
        uvloop.run(_run_bare())
    elif options.role == "big":
        _write_big(options.port, options.total, options.connections)
    elif options.role == "huge":
        _send_huge(options.port, options.size)
    else:
        _read_all(options.port)


if __name__ == "__main__":
    main()
