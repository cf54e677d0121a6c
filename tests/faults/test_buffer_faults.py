"""What once went wrong with the buffer, one test for each: faults that scripts showed, and what users met."""

import contextlib
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest

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


# -- the event loop stops


def packed_item() -> bytes:
    ids = {"prompt_ids": b"\0" * 4, "response_ids": b"\0" * 40_000_000}
    return msgspec.msgpack.encode({**item(1, 1, "packed"), **ids})


def tokens_in_json() -> dict[str, Any]:
    ids = {"prompt_ids": [1], "response_ids": [123_456] * 20_000, "response_logprobs": [-0.25] * 20_000}
    return {"items": [item(1, 1, f"tokens-{n}", **ids) for n in range(20)]}


BODIES: dict[str, tuple[str, Callable[[], Any], int]] = {
    "malformed": ("/v1/items", lambda: b'{"items":[' + b'{"a":[{},{"b":1}]},' * 220_000, 400),
    "nested": ("/v1/items", lambda: b'{"items":' + b"[" * 4_000_000, 400),
    "10,000 items": ("/v1/items", lambda: {"items": [item(1, 1)] * 10_000}, 200),
    "an item of 56 MB": ("/buffer/write", lambda: large_item(56_000_000), 200),
    "a msgpack item of 40 MB": ("/v1/items", packed_item, 200),
    "tokens in JSON": ("/v1/items", tokens_in_json, 200),
    "a job with many near misses": (
        "/v1/jobs",
        lambda: {"task_type": "math", **{f"group_timeout_second{n}": n for n in range(250)}},
        200,
    ),
    "10,000 uids": ("/v1/uids/known", lambda: {"uids": [f"{n:0>100}" for n in range(10_000)]}, 200),
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


# -- 100,000 open groups time out in one tick


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
