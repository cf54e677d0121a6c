"""A whole generation of text beside a peer: rollstream's engine `openai` and datatrove's InferenceRunner.

    python -m bench.peer --datatrove PYTHON [--quick] [--json FILE]

A stub of a chat endpoint (its own process, zero latency, one fixed answer) is asked 10,000 one-line questions, 256
in flight, by each in turn; of three rounds the median counts. Whole programs are measured, from their start to
their end: rollstream in one process and in two, every rollout durable when it is counted; datatrove with its
checkpoints, and without.

PYTHON is the interpreter of an environment with datatrove 0.10 (aiofiles, httpx, aiosqlite, orjson, xxhash and
zstandard beside it: what its extra `inference` has but the engines). The benchmark ends there in an error when it
is left out: rollstream alone says nothing of a peer.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from bench.report import print_table, write_json
from rollstream.store.batch import file_rows

IN_FLIGHT = 256
_ANSWER = orjson.dumps(
    {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 0,
        "model": "model",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "It is forty-two, as far as anybody knows."},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 20, "completion_tokens": 10, "total_tokens": 30},
    }
)
_MODELS = orjson.dumps({"object": "list", "data": [{"id": "model", "object": "model"}]})


class _StubConnection(asyncio.Protocol):
    """Answers each request at once, whatever it asks; ends the connection where the client wants that."""

    def connection_made(self, transport: Any) -> None:
        self._transport, self._received = transport, b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n") + 4) >= 4:
            head = self._received[:end].lower()
            length = 0
            if b"content-length:" in head:
                length = int(head.partition(b"content-length:")[2].split(b"\r", 1)[0])
            if len(self._received) < end + length:
                return
            self._received = self._received[end + length :]
            body = _ANSWER if head.startswith(b"post ") else _MODELS
            self._transport.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
                % (len(body), body)
            )
            if b"connection: close" in head:
                self._transport.close()
                return


async def _serve() -> None:
    server = await asyncio.get_running_loop().create_server(_StubConnection, "127.0.0.1", 0, backlog=1024)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


@contextlib.contextmanager
def _stub() -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.peer", "--stub"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()


def _measured(command: Sequence[object]) -> dict[str, float]:
    """Seconds and CPU of a whole program with its children."""
    started = time.perf_counter()
    process = subprocess.Popen(
        [str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    said = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command[0]} ended with {process.returncode}:\n{said.decode()[-4000:]}")
    return {"seconds": time.perf_counter() - started, "cpu_s": usage.ru_utime + usage.ru_stime}


def _rollstream(url: str, prompts: Path, count: int, processes: int, folder: Path) -> dict[str, float]:
    settings = {
        "actor_rollout_ref.model.path": "model",
        "actor_rollout_ref.model.tokenizer_path": "null",
        "actor_rollout_ref.rollout.name": "openai",
        "actor_rollout_ref.rollout.server_urls": f"[{url}/v1]",
        "actor_rollout_ref.rollout.calculate_log_probs": "false",
        "actor_rollout_ref.rollout.response_length": 64,
        "data.train_files": prompts,
        "trainer.default_local_dir": folder,
        "generation.max_in_flight": IN_FLIGHT,
        "generation.processes": processes,
        "generation.log_level": "error",
    }
    words = [f"{key}={value}" for key, value in settings.items()]
    figures = _measured([sys.executable, "-m", "rollstream.generation.main", *words])
    assert file_rows(folder / "trajectories.parquet") == count
    return figures


def _datatrove(
    python: Path, url: str, prompts: Path, count: int, folder: Path, *, checkpoints: bool
) -> dict[str, float]:
    script = Path(__file__).with_name("peer_datatrove.py")
    figures = _measured([python, script, url, prompts, folder, IN_FLIGHT, int(checkpoints)])
    written = sum(file.read_bytes().count(b"\n") for file in (folder / "out").glob("*.jsonl"))
    assert written == count, f"{written} of {count} documents"
    return figures


def bench() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--datatrove", type=Path, metavar="PYTHON", help="interpreter of its environment")
    parser.add_argument("--quick", action="store_true", help="2,000 questions, one round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
    parser.add_argument("--stub", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stub:
        asyncio.run(_serve())
        return
    if options.datatrove is None:
        parser.error("--datatrove PYTHON is missing")
    count, rounds = (2_000, 1) if options.quick else (10_000, 3)
    seen: dict[str, list[dict[str, float]]] = defaultdict(list)
    with _stub() as url:
        for number in range(rounds):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                prompts = folder / "prompts.jsonl"
                prompts.write_bytes(
                    b"".join(
                        orjson.dumps({"prompt": f"Question {i}: what is {i} plus {number}?", "id": str(i)})
                        + b"\n"
                        for i in range(count)
                    )
                )
                for processes in (1, 2):
                    what = f"rollstream, {processes} process{'es'[: 2 * (processes - 1)]}"
                    seen[what].append(_rollstream(url, prompts, count, processes, folder / f"run{processes}"))
                for checkpoints in (True, False):
                    what = f"datatrove, with{'' if checkpoints else 'out'} checkpoints"
                    there = folder / f"datatrove{checkpoints}"
                    seen[what].append(
                        _datatrove(options.datatrove, url, prompts, count, there, checkpoints=checkpoints)
                    )
    rows = [
        {
            "what": what,
            "seconds": statistics.median(one["seconds"] for one in found),
            "from": min(one["seconds"] for one in found),
            "to": max(one["seconds"] for one in found),
            "rollouts/s": count / statistics.median(one["seconds"] for one in found),
            "CPU us/rollout": statistics.median(one["cpu_s"] for one in found) / count * 1e6,
        }
        for what, found in seen.items()
    ]
    print_table(
        f"{count:,} one-line questions to a chat endpoint, {IN_FLIGHT} in flight, whole programs", rows
    )
    write_json(options.json, "peer", rows)


if __name__ == "__main__":
    bench()
