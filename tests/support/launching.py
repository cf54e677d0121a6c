"""Replicas for tests of launching: a small server of the standard library that does what a folder says."""

import sys
from pathlib import Path

from rollstream.engine.base import Capabilities
from rollstream.engine.http_server import CONNECTION_KWARGS, HttpServer
from rollstream.engine.launch.plan import ReplicaPlan
from rollstream.engine.replica import ReplicaRequest, ReplicaUnavailableError
from rollstream.trajectory import Completion
from tests.support.processes import command_line, running
from tests.support.replicas import CAPABILITIES, FakeReplica

KWARGS = {**CONNECTION_KWARGS, "health_timeout": 3.0}

SERVER = """
import http.server, pathlib, sys, time
folder, port = pathlib.Path(sys.argv[1]), int(sys.argv[sys.argv.index("--port") + 1])
print("loading", flush=True)
for line in range(30):
    print("line", line, flush=True)
if (folder / "broken").exists():
    sys.exit("no such model")
while (folder / "loading").exists():
    time.sleep(0.02)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        while (folder / "deaf").exists():
            time.sleep(0.02)
        self.send_response(503 if (folder / "ill").exists() else 200)
        self.end_headers()

    def log_message(self, *_):
        pass

http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def small_server(folder: Path, index: int = 0) -> ReplicaPlan:
    """A replica that exits where `broken` is in the folder, and so on: see `SERVER`."""
    return ReplicaPlan(index, (), {}, (sys.executable, "-c", SERVER, str(folder)))


def servers_of(word: str) -> list[int]:
    """Those of `running` that are not reapers."""
    return [pid for pid in running(word) if "reaper" not in command_line(pid)]


class SmallReplica(FakeReplica):
    """Speaks to such a server: it serves while its health is good."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._server = HttpServer(url, KWARGS)

    async def health(self) -> bool:
        return await self._server.answers("/health") == 200

    async def describe(self) -> Capabilities:
        if not await self.health():
            raise ReplicaUnavailableError(f"{self.name} is away")
        return CAPABILITIES

    async def generate(self, request: ReplicaRequest) -> Completion:
        await self.describe()
        return Completion([1] * 8, [-1.0] * 8, "length")

    async def close(self) -> None:
        await self._server.close()
