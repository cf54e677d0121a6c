"""Real vLLM servers on a CPU, with the demo model."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

from rollstream.demo import MODEL_PATH
from rollstream.engine.base import Completion

PYTHON = os.environ.get("ROLLSTREAM_VLLM_PYTHON")
"""Of vLLM's environment; None where there is none."""

ENTRY = "vllm.entrypoints.openai.api_server"  # `vllm serve` of the CPU package does not find itself
OPTIONS = {
    # Two kinds of log-probs on the two routes: four servers would show no more.
    "generate": ["--enable-scale-out", "--enable-prompt-tokens-details"],
    "completions": ["--logprobs-mode", "processed_logprobs", "--served-model-name", "other-name"],
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

    async def until_running(self, count: int, *tasks: asyncio.Task[Completion]) -> None:
        """Fails, with the numbers that the server told, once one of the tasks of its requests has ended."""
        told = [await asyncio.to_thread(self.running)]
        async with asyncio.timeout(60):
            while told[-1] != count:
                ended = [task.exception() or task.result().finish_reason for task in tasks if task.done()]
                assert not ended, f"{ended} after {told}"
                await asyncio.sleep(0.02)
                told.append(await asyncio.to_thread(self.running))

    def kill(self, how: signal.Signals) -> None:
        """The server and the processes of its engine, which outlive it when it is killed."""
        os.killpg(self.process.pid, how)


@contextmanager
def vllm_server(route: str, log: Path, model: Path = MODEL_PATH) -> Iterator[Server]:
    """A server that is up.

    Args:
        route: one of `OPTIONS`.
        log: what it writes.
        model: folder of what it serves.
    """
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [str(PYTHON), "-m", ENTRY, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--model", str(model), "--dtype", "float32", "--enforce-eager"]
    # A seeded request whose prompt is split ends the engine of vLLM 0.32 on a CPU.
    command += ["--max-num-batched-tokens", "16384", *OPTIONS[route]]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(min(os.sched_getaffinity(0))),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_SERVER_DEV_MODE": "1" if route == "generate" else "0",
    }
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
