"""Real vLLM servers on a CPU, with the demo model."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import time
import tomllib
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from rollstream.demo import MODEL_PATH
from rollstream.engine.base import Completion

PYTHON = os.environ.get("ROLLSTREAM_VLLM_PYTHON")
"""Of vLLM's environment; None where there is none."""

SOURCE = Path(__file__).parents[2]

Work = asyncio.Task[Completion]

ENTRY = "vllm.entrypoints.openai.api_server"  # `vllm serve` of the CPU package does not find itself
OPTIONS = {
    # Two kinds of log-probs on the two routes: four servers would show no more.
    "generate": ["--enable-scale-out", "--enable-prompt-tokens-details"],
    "completions": ["--logprobs-mode", "processed_logprobs", "--served-model-name", "other-name"],
}

VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": str(min(os.sched_getaffinity(0))),
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass
class Server:
    route: str
    url: str
    model: str
    """What it calls its model."""
    process: subprocess.Popen[bytes]

    def running(self) -> int:
        """Requests that the server works at."""
        metrics = urlopen(f"{self.url}/metrics", timeout=20).read().decode()
        return int(float(re.findall(r"^vllm:num_requests_running\{.*\} (\S+)$", metrics, re.MULTILINE)[0]))

    async def until_idle(self) -> None:
        async with asyncio.timeout(60):
            while await asyncio.to_thread(self.running):
                await asyncio.sleep(0.02)

    async def at_work(self, *requests: Callable[[], Coroutine[Any, Any, Completion]]) -> list[Work]:
        """The requests' tasks, while the server works at all of them.

        All begin anew where one has ended before the server told of it, as on a quiet machine.
        """
        async with asyncio.timeout(120):
            while True:
                tasks = [asyncio.create_task(request()) for request in requests]
                while not any(task.done() for task in tasks):
                    if await asyncio.to_thread(self.running) == len(tasks):
                        return tasks
                    await asyncio.sleep(0.02)
                await asyncio.gather(*tasks)

    def kill(self, how: signal.Signals) -> None:
        """The server and the processes of its engine, which outlive it when it is killed."""
        os.killpg(self.process.pid, how)


def plugin_path(folder: Path) -> str:
    """A PYTHONPATH by which another environment has this rollstream, with its entry points."""
    info = folder / "rollstream-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rollstream\nVersion: 0\n")
    project = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]
    plugins = project["entry-points"]["vllm.general_plugins"]
    lines = ["[vllm.general_plugins]", *(f"{name} = {target}" for name, target in plugins.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return f"{SOURCE / 'src'}{os.pathsep}{folder}"


@contextmanager
def vllm_server(
    route: str, log: Path, model: Path = MODEL_PATH, *, receives: bool = False
) -> Iterator[Server]:
    """A server that is up.

    Args:
        route: one of `OPTIONS`.
        log: what it writes.
        model: folder of what it serves.
        receives: whether it can be sent weights.
    """
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [str(PYTHON), "-m", ENTRY, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--model", str(model), "--dtype", "float32", "--enforce-eager"]
    # A seeded request whose prompt is split ends the engine of vLLM 0.32 on a CPU.
    command += ["--max-num-batched-tokens", "16384", *OPTIONS[route]]
    env = {**os.environ, **VARIABLES, "VLLM_SERVER_DEV_MODE": "1" if route == "generate" else "0"}
    if receives:
        command += ["--weight-transfer-config", '{"backend": "rollstream"}']
        env["PYTHONPATH"] = plugin_path(log.parent / "plugin")
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True)
    name = "other-name" if route == "completions" else str(model)
    found = Server(route, f"http://127.0.0.1:{port}", name, process)
    try:
        deadline = time.monotonic() + 600
        while not is_up(found.url):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.5)
        yield found
    finally:
        for how in (signal.SIGTERM, signal.SIGKILL):
            try:
                found.kill(how)
                process.wait(20)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                pass


def is_up(url: str) -> bool:
    try:
        with urlopen(f"{url}/health", timeout=20) as response:
            return bool(response.status == 200)
    except OSError:
        return False
