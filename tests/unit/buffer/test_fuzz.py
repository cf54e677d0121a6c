"""10,000 bodies that no client would send, over all routes: an answer to each, no 500, memory bounded."""

import asyncio
import random
import struct
from pathlib import Path
from typing import Any

import msgspec
import orjson

from rollstream.buffer.openapi import document

from .served import item, served

BODIES = 10_000
CONNECTIONS = 8
MEMORY = 150 * 2**20
"""Bytes that the process may grow by: 10,000 bodies are some 30 MB, what they build is let go."""

SLOW = {"/start_rollout"}
"""Pauses before it refuses: one in fifty is enough."""


def odd_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(14 if depth < 4 else 10)
    if kind == 0:
        return rng.choice([None, True, False, "", "\u0000", "é" * rng.randrange(50), "7", " "])
    if kind == 1:
        return rng.choice([0, -1, 7, 2**31, 2**53, 2**63, 2**64 - 1, -(2**63), 10**18])
    if kind == 2:
        return rng.choice([0.5, -0.0, 1e308, 5e-324, 1.5])
    if kind == 3:
        return "x" * rng.choice([1, 100, 1025, 20_000])
    if kind < 10:
        return rng.choice([0, 1, 1.0, "a", "user", [], {}, None])
    if kind < 12:
        return [odd_value(rng, depth + 1) for _ in range(rng.randrange(5))]
    keys = ["role", "uid", "items", "reward", "messages", "content", "\u2028", ""]
    return {rng.choice(keys): odd_value(rng, depth + 1) for _ in range(rng.randrange(5))}


def odd_object(rng: random.Random) -> Any:
    """Something of the right shape with a field or some that are not."""
    shape: Any = rng.choice(
        [
            item(rng.choice([1, "1", "a"]), rng.choice([0, 1, 0.5, None]), f"u{rng.randrange(500)}"),
            {"items": [item(n, n % 2, f"i{rng.randrange(500)}-{n}") for n in range(rng.randrange(6))]},
            {"max_groups": 2, "timeout": 0, "consumer": "c", "lease_seconds": 1},
            {"batch_size": 4, "timeout": 0},
            {"seconds": 1},
            {"uids": ["a", "b"]},
            {"groups": [1, 2]},
            {"task_type": "none", "num_repeat_per_sample": "4"},
            {},
        ]
    )
    for _ in range(rng.randrange(3)):
        target = shape
        while isinstance(target, dict) and target and rng.random() < 0.5:
            child = rng.choice(list(target.values()))
            if not isinstance(child, dict):
                break
            target = child
        name = rng.choice(
            [*target, "prompt_ids", "response_ids", "response_mask", "policy_version", "timeout"]
        )
        target[name] = 0 if name == "timeout" else odd_value(rng)
    return shape


def odd_body(rng: random.Random) -> tuple[bytes, str]:
    kind = rng.randrange(10)
    if kind == 0:
        return rng.randbytes(rng.randrange(200)), "application/json"
    if kind == 1:
        depth = rng.choice([10, 300, 100_000])
        return rng.choice([b"[", b'{"a":', b'{"messages":[']) * depth, "application/json"
    value = odd_object(rng)
    if kind < 4:
        body = msgspec.msgpack.encode(value)
        media = "application/msgpack"
    else:
        body, media = orjson.dumps(value), "application/json"
    if kind in (3, 5) and body:  # damaged
        at = rng.randrange(len(body))
        body = rng.choice([body[:at], body[:at] + rng.randbytes(3) + body[at + 1 :], body + b"\xc1"])
    if kind == 6:
        body = body.replace(b"1", rng.choice([b"NaN", b"1e999", b"-", b'"\\ud800"', b"1" * 400]))
    return body, rng.choice([media, media, media, "text/plain", ""])


async def test_odd_bodies(tmp_path: Path) -> None:
    routes = [(method.upper(), path) for path, methods in document()["paths"].items() for method in methods]
    statuses: dict[int, int] = {}
    rng = random.Random(20)
    work = iter(range(BODIES))
    async with served(tmp_path, max_body=2**20) as buffer:
        port = int(buffer.url.rpartition(":")[2])
        before = memory()

        async def send() -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for _ in work:
                method, path = rng.choice(routes)
                if path in SLOW and rng.random() > 0.02:
                    continue
                for name in ("{lease}", "{consumer}", "{rollout}"):
                    path = path.replace(name, rng.choice(["a", "%00", "%C3%A9", "x" * 300, "a%2Fb"]))
                if rng.random() < 0.1:
                    path += rng.choice(
                        ["?limit=9", "?limit=x", "?after=-1", "?%FF=%FF", "?consumer=", "/", "//"]
                    )
                body, media = odd_body(rng)
                writer.write(
                    f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {media}\r\n"
                    f"Content-Length: {len(body)}\r\n\r\n".encode()
                    + body
                )
                status = await asyncio.wait_for(answer(reader), 30)
                statuses[status] = statuses.get(status, 0) + 1
                if status == 413:
                    writer.close()
                    reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()

        await asyncio.gather(*(send() for _ in range(CONNECTIONS)))
        assert set(statuses) <= {200, 400, 404, 405, 409, 413, 415}, statuses
        assert min(statuses[200], statuses[400]) > 300, statuses
        assert memory() - before < MEMORY
        assert (await buffer.get("/ready"))[0] == 200


async def answer(reader: asyncio.StreamReader) -> int:
    """Reads a whole answer."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b"transfer-encoding: chunked" in head:
        while size := int(await reader.readline(), 16):
            await reader.readexactly(size + 2)
        await reader.readline()
    else:
        await reader.readexactly(int(head.partition(b"content-length: ")[2].split(b"\r\n")[0]))
    return int(head.split()[1])


def memory() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def test_odd_http(tmp_path: Path) -> None:
    odd = [
        b"\x16\x03\x01\x00\xa5\x01\x00",
        b"GET\r\n\r\n",
        b"POST /buffer/write HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /buffer/write HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"POST /buffer/write HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"POST /\xff\xfe HTTP/1.1\r\n\r\n",
        b"GET /%zz?%zz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"POST /buffer/write HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /buffer/write HTTP/1.1\r\nUpgrade: h2c\r\nConnection: Upgrade\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /buffer/write HTTP/1.1\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        struct.pack("<q", 5) * 100,
    ]
    async with served(tmp_path) as buffer:
        for raw in odd:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(buffer.url.rpartition(":")[2]))
            writer.write(raw)
            if writer.can_write_eof():
                writer.write_eof()
            first = await asyncio.wait_for(reader.readline(), 10)
            assert first == b"" or int(first.split()[1]) in (400, 404, 413), (raw[:60], first)
            writer.close()
        assert (await buffer.post("/buffer/write", item(1, 1, "fine")))[0] == 200
