"""Requests that nobody would send: none is a 500, none makes the server grow."""

import asyncio
import copy
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import orjson
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from tests.support.buffer import BufferProcess, generator, item, serve_buffer

FINE = {*range(200, 300), *range(400, 500), 503, 507}
"""Of a 5xx, only "busy" and "the disk is full" are answers."""

SLOW = ("/start_rollout",)
"""An error there comes after a second."""

ODD: list[Any] = [
    *(None, True, -1, 0, 2**31, 2**63, 2**64, 1e308, "", "x" * 2000, "\x00", "ä", "9" * 99),
    *([], {}, [[]], {"a": 1}),
]


ODD_NAMES = ["a", "1", "%00", "%C3%A9", "x" * 300, "a%2Fb", "9" * 30]
ODD_TAILS = ["?limit=9", "?limit=x", "?after=-1", "?%FF=%FF", "?consumer=", "/", "//", "?state=%00"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BufferProcess]:
    folder = tmp_path_factory.mktemp("fuzz")
    files = generator(folder / "files", hooks="\ndef filter_item(item, task_type):\n    return True\n")
    with serve_buffer(
        folder / "buffer", "--group-size", "2", "--generators", files, "--lease-seconds", "2"
    ) as server:
        yield server


def odd_body(rng: random.Random) -> tuple[bytes, str]:
    kind = rng.randrange(10)
    if kind == 0:
        return rng.randbytes(rng.randrange(200)), "application/json"
    if kind == 1:
        opening = rng.choice([b"[", b'{"a":', b'{"items":['])
        return opening * rng.choice([10, 300, 100_000]), "application/json"
    value: dict[str, Any] = item(rng.choice([1, 2, "a"]), rng.choice([0, 1, -1, None, 0.5]))
    if rng.random() < 0.5:
        batch = {"items": [value] * rng.randrange(3)}
        value = rng.choice([batch, {"max_groups": 1}, {"batch_size": 2}, {"groups": [1]}])
    for _ in range(rng.randrange(3)):
        target: Any = value
        while isinstance(target, dict) and target and rng.random() < 0.5:
            child = rng.choice(list(target.values()))
            target = child if isinstance(child, dict) else target
        names = [*target, "prompt_ids", "response_ids", "response_mask", "policy_version", "task_type", "job"]
        target[rng.choice(names)] = copy.deepcopy(rng.choice(ODD))
    try:
        packed = rng.random() < 0.4
        body = msgspec.msgpack.encode(value) if packed else orjson.dumps(value)
    except (OverflowError, TypeError):
        body, packed = b"{}", False
    if kind in (3, 5) and body:  # damaged
        at = rng.randrange(len(body))
        body = rng.choice([body[:at], body[:at] + rng.randbytes(3) + body[at + 1 :], body + b"\xc1"])
    if kind == 6:
        body = body.replace(b"1", rng.choice([b"NaN", b"1e999", b"-", b'"\\ud800"', b"1" * 400]))
    media = "application/msgpack" if packed else "application/json"
    return body, rng.choice([media, media, media, "text/plain", "", "a/b;c=d"])


async def send_odd(server: BufferProcess, count: int, seed: int) -> Counter[int]:
    paths = server.get("/openapi.json")["paths"]
    routes = [(method.upper(), path) for path, methods in paths.items() for method in methods]
    statuses: Counter[int] = Counter()
    rng = random.Random(seed)
    work = iter(range(count))

    async def send() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for _ in work:
            method, path = rng.choice(routes)
            if path in SLOW and rng.random() > 0.01:
                continue
            for name in ("{lease}", "{consumer}", "{job}", "{group}"):
                path = path.replace(name, rng.choice(ODD_NAMES))
            if rng.random() < 0.1:
                path += rng.choice(ODD_TAILS)
            body, media = odd_body(rng)
            head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {media}\r\n"
            if rng.random() < 0.2:
                parts = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"
                writer.write(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + parts)
            else:
                writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            status, closes = await asyncio.wait_for(answer(reader), 60)
            statuses[status] += 1
            assert status in FINE, (method, path, body[:300])
            if closes:
                writer.close()
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.close()

    await asyncio.gather(*(send() for _ in range(16)))
    return statuses


async def answer(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """Reads a whole answer: its status, and whether it was the connection's last."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b"transfer-encoding: chunked" in head:
        while size := int(await reader.readline(), 16):
            await reader.readexactly(size + 2)
        await reader.readline()
    else:
        await reader.readexactly(int(head.partition(b"content-length: ")[2].split(b"\r\n")[0]))
    return int(head.split()[1]), b"connection: close" in head


SOAK = [pytest.mark.soak, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("examples", [4, pytest.param(1_000, marks=SOAK)])
def test_requests_by_the_schema(server: BufferProcess, examples: int) -> None:
    schema = schemathesis.openapi.from_dict(server.get("/openapi.json"))
    schema.config.update(base_url=server.url)
    for result in schema.get_all_operations():
        operation: Any = result.ok()  # type: ignore[union-attr]
        if operation.path in SLOW:
            continue

        @given(case=operation.as_strategy())
        @settings(
            max_examples=examples, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck), derandomize=True,
        )  # fmt: skip
        def send(case: schemathesis.Case[Any]) -> None:
            if isinstance(case.body, dict):
                case.body.pop("timeout", None)
            response = case.call()
            assert response.status_code in FINE, (case.as_curl_command(), response.text)

        send()


@pytest.mark.parametrize("count", [2_000, pytest.param(80_000, marks=SOAK)])
def test_odd_requests(server: BufferProcess, count: int) -> None:
    asyncio.run(send_odd(server, 500, seed=1))
    before = server.peak_mb()
    asyncio.run(send_odd(server, count, seed=2))
    assert server.peak_mb() - before < 60
    assert server.request("GET", "/ready")[0] == 200
