"""What once went wrong with the buffer, one test for each: faults that scripts showed, and what users met."""

import contextlib
import random
import re
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest

from rollstream.cli import main
from tests.support.buffer import (
    BufferProcess,
    LoopWatch,
    generator,
    group,
    item,
    large_item,
    serve_buffer,
)
from tests.support.until import wait_until

STOP_S = 0.1
"""The event loop of a server never stands still for longer."""

MEMORY_MB = 300
MIB = 2**20

MATH = {"task_type": "math", "num_repeat_per_sample": 2}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[BufferProcess]:
    with serve_buffer(tmp_path / "buffer", "--group-size", "2") as server:
        yield server


def write(server: BufferProcess, *items: dict[str, Any]) -> None:
    status, answer = server.post("/v1/items", {"items": items})
    assert (status, answer.get("stored")) == (200, len(items)), answer


def request_text(path: str, body: bytes = b"{}", length: int | None = None, method: str = "POST") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body


@contextlib.contextmanager
def connections(server: BufferProcess, count: int, sent: bytes = b"") -> Iterator[list[socket.socket]]:
    """Connections on which something was sent, and nothing is read."""
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(count):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
            one.sendall(sent)
            opened.append(one)
        yield opened


def pipelined(server: BufferProcess, requests: Sequence[bytes], pattern: bytes) -> list[bytes]:
    """Sends requests on one connection, without waiting for answers; what the pattern finds in each answer."""
    with connections(server, 1) as (one,):
        sender = threading.Thread(target=one.sendall, args=(b"".join(requests),))
        sender.start()
        found: list[bytes] = []
        received = b""
        while len(found) < len(requests):
            part = one.recv(1 << 20)
            assert part, f"closed after {len(found)} answers: {received[-300:]!r}"
            received += part
            hits = list(re.finditer(pattern, received))
            if hits:
                found += [hit[1] for hit in hits]
                received = received[hits[-1].end() :]
        sender.join()
        return found


# -- any client runs commands on the server


def test_no_payload_runs_a_command_or_names_a_path(tmp_path: Path) -> None:
    home, mark = tmp_path / "home", tmp_path / "it-ran"
    home.mkdir()
    (home / "prompts.jsonl").write_text('{"prompt": "1+1"}\n')
    (home / "outside").symlink_to(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1"}\n')
    tool = {"config": {"type": "mcp", "server": {"command": "touch", "args": [str(mark)]}}}
    files = generator(tmp_path / "files")
    with serve_buffer(home / "buffer", "--generators", files, cwd=home) as server:
        stored = home / "buffer" / "buffer.sqlite"
        for bad in (
            {"tools": [tool]},
            {"tools": [str(mark)]},
            {"tool_config_path": str(stored)},
            {"function_tool_path": "outside/x.py"},
            {"agent_loop_config_path": "prompts.jsonl"},
            {"input_file": str(stored)},
            {"input_file": "buffer/buffer.sqlite"},
            {"input_file": "../prompts.jsonl"},
            {"input_file": "outside/prompts.jsonl"},
            {"input_file": str(tmp_path / "prompts.jsonl")},
            {"input_file": "/etc/passwd"},
            {"remote_engine_url": "http://169.254.169.254/latest"},
            {"remote_engine_url": ["http://127.0.0.1:9", "http://example.com"]},
            {"remote_engine_url": "http://127.0.0.1:9@example.com"},
            {"remote_engine_url": "file:///etc/passwd"},
        ):
            for path in ("/start_rollout", "/v1/jobs") if "tools" in bad else ("/v1/jobs",):
                status, answer = server.post(path, {**MATH, **bad})
                assert status == 400, (bad, answer)
                assert next(iter(bad)) in answer["error"]["message"]
        assert server.get("/v1/jobs")["jobs"] == []
        status, answer = server.post(
            "/v1/jobs", {**MATH, "tokenizer_path": "/etc", "input_file": "prompts.jsonl"}
        )
        assert status == 200 and "tokenizer_path" not in answer["payload"]
        assert any("tokenizer_path" in one for one in answer["warnings"])
        assert server.stop() == 0
    assert not mark.exists()


# -- a web page drains the buffer


def test_a_web_page_gets_nothing(server: BufferProcess) -> None:
    write(server, *group("a", (0, 1)))
    own = f"127.0.0.1:{server.port}"
    for headers in (
        {"origin": "http://evil.example", "content-type": "text/plain"},
        {"origin": "null", "content-type": "text/plain"},
        {"origin": f"http://127.0.0.1:{server.port + 1}"},
        {"host": f"evil.example:{server.port}"},
        {"host": f"evil.example:{server.port}", "origin": f"http://evil.example:{server.port}"},
        {"sec-fetch-site": "cross-site"},
    ):
        for path in ("/get_rollout_data", "/v1/read", "/buffer/read", "/buffer/write", "/start_rollout"):
            assert server.post(path, **headers)[0] == 403, (path, headers)
        assert server.request("GET", "/v1/groups/1", None, headers)[0] == 403
    assert server.stats()["groups"]["ready"] == 1
    assert server.post("/get_rollout_data", {}, origin=f"http://{own}", host=own)[1]["success"] is True


# -- SIGTERM does not end a server whose hook hangs


HANGING = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)

def filter_item(item, task_type):
    while True:
        pass

def is_valid_group(group, min_valid_group_size, task_type):
    if group[0] == "judge":
        while True:
            time.sleep(1)
    return True
"""


@pytest.mark.parametrize("stuck", ["judge", "finish"])
def test_sigterm_ends_a_server_whose_hook_hangs(tmp_path: Path, stuck: str) -> None:
    files = generator(tmp_path / "files", hooks=HANGING, run="import signal; signal.pause()")
    with serve_buffer(tmp_path / "buffer", "--generators", files, "--hook-seconds", "3600") as server:
        assert server.post("/v1/jobs", MATH)[0] == 200
        write(server, *group(stuck, (0, 1)))
        read = request_text("/v1/read", b'{"timeout": 3000}')
        with connections(server, 2, read), connections(server, 1, request_text("/get_rollout_data")):
            if stuck == "finish":
                wait_until(lambda: server.stats()["groups"]["leased"] == 1)
            write(server, *group("also", (0, 1)))  # a hook that hangs stops no writes
            assert server.stop() == 0  # its hooks may take an hour


# -- "all or none" is false above 256 items


def kill_in_batches(folder: Path, kills: int) -> None:
    rng = random.Random(5)
    size, expected = 10_000, 0
    minimal = {"messages": [{"role": "user"}], "reward": 1}
    took = 0.0
    for turn in range(kills + 1):
        with serve_buffer(folder) as server:
            stored = server.stats()["items_written"]
            assert stored in (expected, expected + size), "a part of a batch"
            expected = stored
            if turn == kills:
                return
            named = [{"uid": f"{turn}-{n}"} if turn % 2 else {} for n in range(size)]
            items = [{"instance_id": n, **minimal, **name} for n, name in enumerate(named)]
            body = orjson.dumps({"items": items})
            if turn == 0:
                began = time.monotonic()
                assert server.post("/v1/items", body)[0] == 200
                took, expected = time.monotonic() - began, expected + size
            else:
                with connections(server, 1, request_text("/v1/items", body)):
                    time.sleep(rng.uniform(0, took))  # the instant is random; nothing is waited for
                    server.kill()


@pytest.mark.parametrize("kills", [4, pytest.param(60, marks=pytest.mark.soak)])
def test_a_batch_of_10_000_is_stored_whole_or_not_at_all(tmp_path: Path, kills: int) -> None:
    kill_in_batches(tmp_path / "buffer", kills)


# -- the event loop stops


def packed_item() -> bytes:
    ids = {"prompt_ids": b"\0" * 4, "response_ids": b"\0" * 40_000_000}
    return msgspec.msgpack.encode({**item(1, 1, "packed"), **ids})


def tokens_in_json() -> dict[str, Any]:
    ids = {"prompt_ids": [1], "response_ids": [123_456] * 20_000, "response_logprobs": [-0.25] * 20_000}
    return {"items": [item(1, 1, f"tokens-{n}", **ids) for n in range(20)]}


BODIES: dict[str, tuple[str, Callable[[], Any], int]] = {
    "malformed": ("/v1/items", lambda: b'{"items":[' + b'{"a":[{},{"b":1}]},' * 220_000, 400),
    "malformed, one item": ("/buffer/write", lambda: b'{"messages":[' + b'{"role":"u"},' * 320_000, 400),
    "nested": ("/v1/items", lambda: b'{"items":' + b"[" * 4_000_000, 400),
    "the last is wrong": ("/v1/items", lambda: {"items": [item(1, 1, "x" * 80)] * 9_000 + [{}]}, 400),
    "10,000 items": ("/v1/items", lambda: {"items": [item(1, 1)] * 10_000}, 200),
    "just below 1 MiB": ("/v1/items", lambda: {"items": [item(1, 1)] * 4_500}, 200),
    "an item with 200,000 keys": (
        "/buffer/write",
        lambda: {**item(1, 1, "many"), **{f"k{n}": 1 for n in range(200_000)}},
        200,
    ),
    "an item of 56 MB": ("/buffer/write", lambda: large_item(56_000_000), 200),
    "a msgpack item of 40 MB": ("/v1/items", packed_item, 200),
    "tokens in JSON": ("/v1/items", tokens_in_json, 200),
    "a start with 200,000 keys": ("/start_rollout", lambda: {f"{n}": n for n in range(200_000)}, 400),
    "a job with 200,000 keys": ("/v1/jobs", lambda: {f"input_fil{n}": n for n in range(200_000)}, 400),
    "a job with many near misses": (
        "/v1/jobs",
        lambda: {"task_type": "math", **{f"group_timeout_second{n}": n for n in range(250)}},
        200,
    ),
    "10,000 uids": ("/v1/uids/known", lambda: {"uids": [f"{n:0>100}" for n in range(10_000)]}, 200),
    "2,000,000 uids": ("/v1/uids/known", lambda: {"uids": [f"{n}" for n in range(2_000_000)]}, 413),
    "100,000 groups": ("/v1/quarantine/drop", lambda: {"groups": list(range(100_000))}, 200),
    "a read with 200,000 keys": ("/v1/read", lambda: {f"{n}": [n] for n in range(200_000)}, 413),
}
"""Path, body, expected status."""


@pytest.mark.parametrize("kind", list(BODIES))
def test_no_body_stops_the_event_loop(tmp_path: Path, kind: str) -> None:
    path, make, expected = BODIES[kind]
    body = made if isinstance(made := make(), bytes) else orjson.dumps(made)
    media = "application/msgpack" if "msgpack" in kind else "application/json"
    with serve_buffer(tmp_path / "buffer", "--generators", generator(tmp_path / "files")) as server:

        def send() -> None:
            status, answer = server.request("POST", path, body, {"content-type": media})
            assert status == expected, answer

        assert LoopWatch(server).shortest_stop(send, enough_s=STOP_S) < STOP_S
        assert server.peak_mb() < MEMORY_MB


# -- memory without bound


def test_unfinished_bodies_have_one_budget(server: BufferProcess) -> None:
    size = 63 * MIB
    sent = request_text("/v1/items", b"", size) + b"[" * (size - 1)
    with connections(server, 16) as opened:
        senders = [threading.Thread(target=_send_all, args=(one, sent), daemon=True) for one in opened]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join(60)
        assert server.peak_mb() < MEMORY_MB
    assert server.post("/v1/items", item(1, 1))[0] == 200


def _send_all(one: socket.socket, sent: bytes) -> None:
    with contextlib.suppress(OSError):  # it was refused in the middle
        one.sendall(sent)


def test_headers_are_bounded_before_the_token_is_checked(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    with serve_buffer(tmp_path / "buffer", "--token-file", str(token)) as server:
        before = server.peak_mb()
        line = b"POST /buffer/write HTTP/1.1\r\nHost: localhost\r\n"
        for head in (
            line + b"X: " + b"y" * 10_000_000,
            line + b"X-Y: z\r\n" * 1_000_000,
            b"GET /" + b"x" * 10_000_000,
        ):
            with connections(server, 20) as opened:
                senders = [
                    threading.Thread(target=_send_all, args=(one, head), daemon=True) for one in opened
                ]
                for sender in senders:
                    sender.start()
                for sender in senders:
                    sender.join(60)
        assert server.peak_mb() - before < 60
        assert server.post("/buffer/write", item(1, 1))[0] == 401


def test_unread_answers_are_bounded(server: BufferProcess) -> None:
    for number in range(100):
        write(server, *group(number, (0, 1), pad="z" * 250_000))
    before = server.peak_mb()
    read = request_text("/v1/read") + request_text("/v1/groups/1", method="GET") * 60
    with connections(server, 32, read), connections(server, 32, request_text("/get_rollout_data")):
        wait_until(lambda: server.get("/v1/leases")["leases"], "the reads")
        listing = request_text("/v1/groups?limit=10000", method="GET") * 200
        with connections(
            server, 32, listing + request_text("/buffer/peek?batch_size=999", method="GET") * 20
        ):
            time.sleep(3)  # for answers to pile up, if they do
            assert server.peak_mb() < MEMORY_MB, before


# -- the token in a generator log of mode 0644


def test_no_token_in_a_generators_log(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret-of-the-operator\n")
    run = "print(data, flush=True); import requests, os; " + (
        "open(data['out'], 'w').write(os.environ['ROLLSTREAM_BUFFER_TOKEN']); "
        "print(requests.post(data['remote_buffer_url'] + '/buffer/write', json={'instance_id': 1, 'reward': 1, "
        "'messages': [{'role': 'user'}]}).text, flush=True); "
        "print(requests.post(data['remote_buffer_url'] + '/v1/read', json={}).status_code, flush=True)"
    )
    files = generator(tmp_path / "files", run=run)
    options = ("--token-file", str(token), "--generators", files)
    with serve_buffer(tmp_path / "buffer", *options, umask=0) as server:
        url = {"remote_buffer_url": f"http://x:secret-of-the-operator@127.0.0.1:{server.port}"}
        shown = {"authorization": "Bearer secret-of-the-operator"}
        status, answer = server.post("/start_rollout", {**MATH, **url, "out": str(tmp_path / "its")}, **shown)
        assert status == 200
        job = answer["rollout_id"]

        def state() -> Any:
            return server.get(f"/v1/jobs/{job}", **shown)["state"] == "finished"

        wait_until(state, "the job")
        logs = list((tmp_path / "buffer" / "logs").iterdir())
        text = "".join(one.read_text() for one in logs)
        assert "success" in text and "\n403\n" in text, "a generator may write and not read"
        its = (tmp_path / "its").read_text()
        for secret in ("secret-of-the-operator", its):
            assert len(secret) > 10 and secret not in text + server.log.read_text()
        assert server.request("GET", "/v1/stats", None, {"authorization": f"Bearer {its}"})[0] == 403
        assert {stat.S_IMODE(one.stat().st_mode) for one in logs} == {0o600}
        assert stat.S_IMODE((tmp_path / "buffer" / "logs").stat().st_mode) == 0o700
        assert stat.S_IMODE((tmp_path / "buffer" / "generator.netrc").stat().st_mode) == 0o600


# -- waiting readers cost every write


def cpu_of_writes(server: BufferProcess, count: int, tag: str) -> float:
    """CPU seconds of the server for single writes, one after the other, to groups that stay open."""
    texts = [
        request_text("/buffer/write", orjson.dumps(item(f"{tag}-{n}", 1, f"{tag}-{n}", task_type="math")))
        for n in range(count)
    ]
    began = server.cpu_s()
    assert set(pipelined(server, texts, rb"HTTP/1.1 (\d+)")) == {b"200"}
    return server.cpu_s() - began


def until_waiting(server: BufferProcess, count: int) -> None:
    wait_until(lambda: server.get("/v1/stats")["waiting_reads"] == count)


def cost_of_waiting(folder: Path, readers: Sequence[int], writes: int) -> None:
    with serve_buffer(folder) as server:
        cpu_of_writes(server, writes // 2, "warm")
        ratios: dict[int, list[float]] = {count: [] for count in readers}
        for turn in range(12):  # a busy machine makes any of them dearer, not all
            alone = cpu_of_writes(server, writes, f"alone{turn}")
            for count in readers:
                text = request_text("/v1/read", b'{"timeout": 600, "task_type": "math"}')
                with connections(server, count, text):
                    until_waiting(server, count)
                    ratios[count].append(cpu_of_writes(server, writes, f"{count}-{turn}") / alone)
                until_waiting(server, 0)
            if all(min(found) < 1.25 for found in ratios.values()):
                return
        raise AssertionError(f"waiting readers make writes dearer: {ratios}")


def test_waiting_readers_do_not_make_writes_dearer(tmp_path: Path) -> None:
    cost_of_waiting(tmp_path / "buffer", [64, 256], 1500)


# -- 20,000 leases out; 100,000 open groups time out in one tick


def cost_of_acks(folder: Path, leases: int) -> None:
    with serve_buffer(folder, "--group-size", "1") as server:
        for start in range(0, leases + 200, 10_000):
            count = min(10_000, leases + 200 - start)
            write(
                server, *[item(n, 1, f"u{n}", messages=[{"role": "u"}]) for n in range(start, start + count)]
            )
        lease = rb'"lease":"([0-9a-f]{32})".*?\r\n0\r\n\r\n'
        read = request_text("/v1/read", b'{"max_groups": 1}')

        def ack(which: list[bytes]) -> float:
            began = server.cpu_s()
            texts = [request_text(f"/v1/leases/{one.decode()}/ack") for one in which]
            assert set(pipelined(server, texts, rb"HTTP/1.1 (\d+)")) == {b"200"}
            return server.cpu_s() - began

        few = min(ack(pipelined(server, [read] * 100, b"(?s)" + lease)) for _ in range(2))
        out = pipelined(server, [read] * leases, b"(?s)" + lease)
        assert server.stats()["leases"] == leases
        # A busy machine makes any of them dearer, not all.
        many = (ack(out[start : start + 100]) for start in range(0, leases // 2, 100))
        assert any(one < 1.5 * few + 0.02 for one in many)


@pytest.mark.parametrize("leases", [3_000, pytest.param(20_000, marks=pytest.mark.soak)])
def test_an_ack_costs_the_same_with_many_leases_out(tmp_path: Path, leases: int) -> None:
    cost_of_acks(tmp_path / "buffer", leases)


def time_out(folder: Path, groups: int, seconds: float) -> None:
    options = ("--group-timeout-seconds", str(seconds))
    with serve_buffer(folder, *options) as server:
        for start in range(0, groups, 10_000):
            items = [item(n, 1, f"u{n}", messages=[{"role": "u"}]) for n in range(start, start + 10_000)]
            write(server, *items)
        server.kill()
    with serve_buffer(folder, *options) as server:
        wait_until(lambda: server.stats()["groups"]["open"] < groups, "the first slice")

        def wait() -> None:
            left = server.stats()["groups"]["open"]
            write(server, item("new", 1))  # writes go on meanwhile
            wait_until(lambda: server.stats()["groups"]["open"] <= max(left - 4_000, 1))

        assert LoopWatch(server).shortest_stop(wait, enough_s=STOP_S) < STOP_S
        wait_until(lambda: server.stats()["groups_dropped"].get("timed_out", 0) >= groups)


@pytest.mark.parametrize(
    ("groups", "seconds"), [(20_000, 4), pytest.param(100_000, 40, marks=pytest.mark.soak)]
)
def test_many_open_groups_time_out_in_slices(tmp_path: Path, groups: int, seconds: float) -> None:
    time_out(tmp_path / "buffer", groups, seconds)


# -- what a user met


def test_what_is_dropped_is_told_with_its_reason_and_stays_readable(
    server: BufferProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = {"extra_info": {"failure": {"error": "engine away", "stage": "generate", "attempts": 3}}}
    for name, rewards, more in (
        ("equal_rewards", (1, 1), {}),
        ("out_of_range", (-1, 5), {}),
        ("unscored", (None, None), {}),
        ("failed", (-1, -1), failure),
        ("too_few_valid", (0.5, 7), {}),
    ):
        write(server, *group(name, rewards, **more))
        _, answer = server.post("/v1/read", {})
        assert any(f"1 {name}" in one for one in answer["head"]["notices"]), (name, answer["head"])
        assert f"1 {name}" in server.post("/get_rollout_data", {})[1]["message"]
        last = server.get("/v1/dropped")["dropped"][-1]
        assert (last["instance_id"], last["reason"]) == (name, name)
        whole = server.get(f"/v1/groups/{last['id']}")
        assert [one["messages"][1]["content"] for one in whole["items"]] == ["4", "4"]
        for where in (server.url, str(server.folder)):
            assert main(["buffer", "show", where, str(last["id"])]) == 0
            shown = capsys.readouterr().out
            assert name in shown and "[assistant] 4" in shown
    write(server, *group("good", (0, 1)))
    meta = server.post("/get_rollout_data", {})[1]["data"]["meta_info"]
    assert meta["dropped_groups"]["equal_rewards"] == 1 and len(meta["finished_groups"]) == 6
    assert server.stats()["groups_dropped"] == dict.fromkeys(meta["dropped_groups"], 1)


FINITE = """for n in range(5):
        for r in range(2):
            write(n, r)
"""

WRITE = """
import requests

def write(n, r):
    item = {"instance_id": n, "reward": r, "messages": [{"role": "user", "content": "?"}], "extra_info": {}}
    requests.post(URL + "/buffer/write", json=item).raise_for_status()
"""


def test_a_remainder_is_told_and_can_be_taken(tmp_path: Path) -> None:
    run = "global URL; URL = data['remote_buffer_url']\n    " + FINITE
    files = generator(tmp_path / "files", hooks=WRITE, run=run)
    options = ("--generators", files, "--max-groups-per-read", "3")
    with serve_buffer(tmp_path / "buffer", *options) as server:
        job = server.post("/v1/jobs", MATH)[1]["id"]
        wait_until(lambda: server.get(f"/v1/jobs/{job}")["state"] == "finished")

        def read(**asked: Any) -> dict[str, Any]:
            answer: dict[str, Any] = server.post("/get_rollout_data", asked)[1]
            return answer

        assert len(read()["data"]["data"]) == 6
        answer = read()
        assert answer["success"] is False
        assert "the last 2 groups are less than this read wants" in answer["message"]
        assert len(read(batch_size=4)["data"]["data"]) == 4
        assert "all of it has left the buffer" in read()["message"]
