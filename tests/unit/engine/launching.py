"""Replicas for tests of launching: a small server of the standard library that does what a folder says."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rollstream.engine.http_server import CONNECTION_KWARGS
from rollstream.engine.launch_plan import ReplicaPlan

KWARGS = {**CONNECTION_KWARGS, "health_timeout": 0.3}

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


def command_line(pid: int) -> str:
    """Empty for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def running(word: str) -> list[int]:
    """Processes, other than this one, with a word in their command lines."""
    pids = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if pid != os.getpid() and word in command_line(pid)]


def servers_of(word: str, guards: Sequence[str] = ("launch_guard",)) -> list[int]:
    """Those of `running` that are not guards."""
    return [pid for pid in running(word) if not any(guard in command_line(pid) for guard in guards)]
