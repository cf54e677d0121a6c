"""Buffers for tests: as a process, or in the event loop of a test; and items for them."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import orjson

from rollstream.buffer.app import BufferServer
from rollstream.buffer.groups import GroupSettings
from rollstream.buffer.service import BufferOptions, Service
from rollstream.web import Access, ServerLimits
from tests.support.until import PATIENCE_S, until

COMMAND = [sys.executable, "-m", "rollstream.cli", "buffer", "serve", "--json"]

SIZE = 4
"""Of a group, where a test says nothing else."""


def item(instance_id: Any = 7, reward: Any = 1.0, uid: str | None = None, **more: Any) -> dict[str, Any]:
    """An item as slime's generators send it."""
    made = {
        "instance_id": instance_id,
        "messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}],
        "reward": reward,
        "extra_info": {"timestamp": "1.5", "finish_reason": "stop"},
        **more,
    }
    return made if uid is None else {"uid": uid, **made}


def group(instance_id: Any, rewards: Sequence[Any] = (0, 1, 0, 1), **more: Any) -> list[dict[str, Any]]:
    """The items of a group; uids are made of the instance id."""
    return [item(instance_id, reward, f"{instance_id!r}-{n}", **more) for n, reward in enumerate(rewards)]


def named_group(rewards: Sequence[Any], **extra: Any) -> tuple[str, list[dict[str, Any]]]:
    """The group "q" as hooks get it."""
    return "q", [
        {
            "uid": f"u{index}",
            "instance_id": "q",
            "messages": [{"role": "user", "content": 'say "reward":5'}],
            "reward": reward,
            "extra_info": {"round_number": index, **extra},
        }
        for index, reward in enumerate(rewards)
    ]


GENERATOR = """
import time

TASK_TYPE = "{task}"


def run_rollout(data):
    {run}

"""


def generator(folder: Path, task: str = "math", hooks: str = "", run: str = "time.sleep(600)") -> str:
    """A folder with a generator file of this task."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{task}_generator.py").write_text(GENERATOR.format(task=task, run=run) + hooks)
    return str(folder)


class Served:
    """A server in this event loop, and a session with it."""

    def __init__(self, server: BufferServer, session: aiohttp.ClientSession) -> None:
        self.service: Service = server.service
        self.server = server
        self.session = session
        self.url = server.url

    async def post(self, path: str, value: Any = None, **kwargs: Any) -> tuple[int, Any]:
        """Status and JSON of a POST."""
        if value is not None:
            kwargs["json"] = value
        async with self.session.post(self.url + path, **kwargs) as response:
            return response.status, await response.json()

    async def get(self, path: str, **kwargs: Any) -> tuple[int, Any]:
        """Status and JSON of a GET."""
        async with self.session.get(self.url + path, **kwargs) as response:
            return response.status, await response.json()

    async def write(self, *items: dict[str, Any]) -> None:
        """New items, in one batch."""
        status, answer = await self.post("/v1/items", {"items": items})
        assert (status, answer.get("stored")) == (200, len(items)), answer

    async def read(self, **asked: Any) -> dict[str, Any]:
        """The answer to a native read."""
        status, answer = await self.post("/v1/read", asked)
        assert status == 200, answer
        return answer  # type: ignore[no-any-return]

    async def read_ids(self, **asked: Any) -> list[Any]:
        """The instances of a native read's groups."""
        return [one["instance_id"] for one in (await self.read(**asked))["groups"]]

    async def counted(self, **states: int) -> bool:
        """Whether so many groups are in these states."""
        groups = (await self.stats())["groups"]
        return all(groups[state] == count for state, count in states.items())

    async def stats(self) -> dict[str, Any]:
        """Counts of the store."""
        return (await self.get("/v1/stats"))[1]["store"]  # type: ignore[no-any-return]

    async def start(self, **payload: Any) -> dict[str, Any]:
        """The record of a new job of the task math."""
        status, answer = await self.post("/v1/jobs", {"task_type": "math", **payload})
        assert status == 200, answer
        return answer  # type: ignore[no-any-return]

    async def until(self, check: Callable[[], Any], seconds: float = PATIENCE_S) -> Any:
        """What `check`, a coroutine function or not, gives, as soon as it is true."""
        return await until(check, seconds)


@contextlib.asynccontextmanager
async def served(
    directory: Path,
    *,
    token: str | None = None,
    http_limits: ServerLimits | None = None,
    grace_s: float = 1.0,
    **options: Any,
) -> AsyncIterator[Served]:
    """Serves `directory` on a free port; `options` are those of `BufferOptions`, or of its settings."""
    names = set(GroupSettings.__struct_fields__) & options.keys()
    settings = GroupSettings(**{"group_size": SIZE, **{name: options.pop(name) for name in names}})
    server = BufferServer(
        BufferOptions(directory=directory, settings=settings, **options), Access(token=token), http_limits
    )
    await server.start("127.0.0.1", 0)
    try:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        async with aiohttp.ClientSession(headers=headers) as session:
            yield Served(server, session)
    finally:
        await server.stop(grace_s)


@contextlib.asynccontextmanager
async def served_job(
    folder: Path, hooks: str = "", *, repeats: int = 2, **options: Any
) -> AsyncIterator[Served]:
    """A server with a generator file of the task math, of which a job has been started."""
    files = generator(folder / "files", hooks=hooks)
    async with served(folder / "buffer", generators=(files,), **options) as buffer:
        await buffer.start(num_repeat_per_sample=repeats)
        yield buffer


SPOILS_2 = """
def filter_item(item, task_type):
    if item["instance_id"] == 2:
        raise ValueError("no 2")
    return True
"""


class BufferProcess:
    """`rollstream buffer serve` as a process; `url` is known once it listens."""

    def __init__(
        self, folder: Path, *options: str, port: int = 0, below: Sequence[str] = (), **more: Any
    ) -> None:
        self.folder = folder
        command = [*below, *COMMAND, "--dir", str(folder), "--port", str(port), *options]
        self.start(command, folder.with_name(folder.name + ".log"), **more)

    def start(self, command: Sequence[str], log: Path, **more: Any) -> None:
        """Starts it, and waits until it listens."""
        self.log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, **more)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        self.url: str = orjson.loads(line)["url"]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Status and body (JSON where it is) of a request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            data = body if isinstance(body, bytes | None) else orjson.dumps(body)
            connection.request(method, path, data, {"content-type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            text = answer.read()
            is_json = answer.headers.get_content_type() == "application/json"
            return answer.status, orjson.loads(text) if is_json else text
        finally:
            connection.close()

    def post(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        return self.request("POST", path, {} if body is None else body, headers)

    def get(self, path: str, **headers: str) -> Any:
        status, answer = self.request("GET", path, None, headers)
        assert status == 200, answer
        return answer

    def stats(self) -> dict[str, Any]:
        """Counts of the store."""
        return self.get("/v1/stats")["store"]  # type: ignore[no-any-return]

    def cpu_s(self) -> float:
        """CPU time of the process itself so far, without its children."""
        total = 0
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
                total += int((task / "schedstat").read_text().split()[0])
        return total / 1e9

    def peak_mb(self) -> float:
        """The most memory that the process had resident at once."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE_S)

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)


_Server = TypeVar("_Server", bound=BufferProcess)


@contextlib.contextmanager
def ending(server: _Server) -> Iterator[_Server]:
    """Ends the server with the block."""
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.kill()
        if server.process.stdout is not None:
            server.process.stdout.close()


def serve_buffer(
    folder: Path, *options: str, **more: Any
) -> contextlib.AbstractContextManager[BufferProcess]:
    """A server that ends with the block."""
    return ending(BufferProcess(folder, *options, **more))


class LoopWatch:
    """How long a server's event loop was held at most: asks /health all the time, beside what a test does.

    A machine that is busy otherwise delays answers, too. So of the time that an answer took, only what the
    server computed meanwhile counts, and a test does what it does several times: a loop that is really held
    is held each time.
    """

    def __init__(self, server: BufferProcess) -> None:
        self._server = server
        self._over = threading.Event()
        self._longest = 0.0

    def shortest_stop(self, does: Callable[[], Any], enough_s: float, times: int = 5) -> float:
        """Of `times` tries (fewer, if one was good enough), the one with the shortest longest stop."""
        stops = []
        for _ in range(times):
            with self._watched():
                does()
            stops.append(self._longest)
            if self._longest < enough_s:
                break
        return min(stops)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        self._longest = 0.0
        self._over.clear()
        thread = threading.Thread(target=self._ask)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _ask(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=PATIENCE_S)
        while not self._over.is_set():
            began, computed = time.perf_counter(), self._server.cpu_s()
            connection.request("GET", "/health")
            connection.getresponse().read()
            took = time.perf_counter() - began
            self._longest = max(self._longest, min(took, self._server.cpu_s() - computed))
            time.sleep(0.002)
        connection.close()


def large_item(size: int, uid: str = "large", **more: Any) -> bytes:
    """A valid item of about so many bytes, in JSON."""
    content = json.dumps("x" * 1000)
    count = max(1, size // 1040)
    messages = ",".join(f'{{"role":"user","content":{content}}}' for _ in range(count))
    rest = json.dumps({"uid": uid, "instance_id": uid, "reward": 1, **more})
    return f'{rest[:-1]},"messages":[{messages}]}}'.encode()
