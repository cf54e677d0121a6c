"""What durability and bookkeeping cost: rollstream against bare HTTP clients that write nothing.

    python -m bench.overhead [--quick] [--json FILE]

A stub server (its own process, zero latency) answers 512-token prompts with 512 tokens and log-probs over
SGLang's /generate; 256 requests are in flight. The floor ("lean client") is asyncio's protocols and orjson, as
little as can send the requests and read the answers; the usual client, aiohttp and orjson, stands beside it.
Both send the same requests with the ids ready made, parse the replies and throw them away. rollstream renders
and tokenises the prompts, decodes the answers, commits every rollout with fdatasync, seals batches and merges
them; in one process and in two.

Each measurement runs in a process of its own; all take turns, and of three rounds the median counts. CPU is of
all threads and worker processes; that of the start (imports, tokenizer, dataset) is measured by itself, as a run
of one rollout, and taken off. Peak memory is of the measured process.
"""

import asyncio
import contextlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from bench.report import cpu_seconds, parse_options, peak_rss_mb, print_table, write_json
from bench.runs import generate
from rollstream.chat.tokenizer import ChatTokenizer, load_tokenizer
from rollstream.demo import MODEL_PATH
from rollstream.store.batch import file_rows

PROMPT_TOKENS = RESPONSE_TOKENS = 512
IN_FLIGHT = 256


def prompt_text(tokenizer: ChatTokenizer, number: int) -> str:
    """A text whose rendered prompt has exactly `PROMPT_TOKENS` tokens: words, filled up with digits."""
    frame = len(tokenizer.render([{"role": "user", "content": ""}]))
    rng = random.Random(number)
    words = ""
    while len(tokenizer.encode(words)) < PROMPT_TOKENS - frame - 30:
        words += " ".join(rng.sample(_WORDS, 8)) + " "
    missing = PROMPT_TOKENS - frame - len(tokenizer.encode(words))
    return words + "".join(str(rng.randrange(10)) for _ in range(missing))


_WORDS = [
    "state",
    "the",
    "final",
    "answer",
    "to",
    "following",
    "arithmetic",
    "problem",
    "and",
    "then",
    "explain",
    "what",
    "was",
    "done",
    "with",
    "it",
]


@contextlib.contextmanager
def stub_server() -> Iterator[str]:
    """A zero-latency stub server in its own process."""
    command = [sys.executable, "-m", "rollstream.testing.stub_server", "--port", "0"]
    command += ["--response-tokens", str(RESPONSE_TOKENS)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield orjson.loads(process.stdout.readline())["url"]
    finally:
        process.terminate()
        process.wait()


BODY = {
    "input_ids": [i % 500 for i in range(PROMPT_TOKENS)],
    "sampling_params": {"max_new_tokens": RESPONSE_TOKENS, "temperature": 1.0, "sampling_seed": 1},
    "return_logprob": True,
}


def check(body: bytes) -> None:
    """Parses an answer and drops it."""
    assert len(orjson.loads(body)["meta_info"]["output_token_logprobs"]) == RESPONSE_TOKENS


class LeanConnection(asyncio.Protocol):
    """One request after the other over one connection; answers have a Content-Length."""

    def __init__(self, host: str, numbers: Iterator[int]) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._head = f"POST /generate HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        self._numbers = numbers
        self._received = bytearray()
        self._body = self._end = 0

    def connection_made(self, transport: Any) -> None:
        """Sends the first request."""
        self._transport = transport
        self._send()

    def data_received(self, data: bytes) -> None:
        """Reads an answer, and sends the next request."""
        received = self._received
        received += data
        if not self._end:
            self._body = received.find(b"\r\n\r\n") + 4
            if self._body < 4:
                return
            at = received.lower().index(b"content-length:", 0, self._body) + 15
            self._end = self._body + int(received[at : received.index(b"\r", at)])
        if len(received) >= self._end:
            check(bytes(received[self._body : self._end]))
            self._received, self._end = bytearray(), 0
            self._send()

    def _send(self) -> None:
        number = next(self._numbers, None)
        if number is None:
            self._transport.close()
            self.done.set_result(None)
            return
        body = orjson.dumps({**BODY, "rid": str(number)})
        self._transport.write(f"{self._head}Content-Length: {len(body)}\r\n\r\n".encode() + body)


async def run_lean(url: str, requests: int) -> dict[str, Any]:
    """The floor: requests with ids ready made, replies parsed and dropped."""
    host = url.removeprefix("http://")
    name, _, port = host.partition(":")
    numbers = iter(range(requests))
    loop = asyncio.get_running_loop()
    cpu, started = cpu_seconds(), time.perf_counter()
    connections = [
        (await loop.create_connection(lambda: LeanConnection(host, numbers), name, int(port)))[1]
        for _ in range(IN_FLIGHT)
    ]
    await asyncio.gather(*(one.done for one in connections))
    return _figures(requests, time.perf_counter() - started, cpu_seconds() - cpu)


async def run_aiohttp(url: str, requests: int) -> dict[str, Any]:
    """The same by the usual client."""
    numbers = iter(range(requests))

    async def slot(session: aiohttp.ClientSession) -> None:
        for number in numbers:
            data = orjson.dumps({**BODY, "rid": str(number)})
            headers = {"Content-Type": "application/json"}
            async with session.post(f"{url}/generate", data=data, headers=headers) as reply:
                # No name holds the answer until the next one: 256 of them would keep the collector busy.
                check(await reply.read())

    cpu, started = cpu_seconds(), time.perf_counter()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(slot(session) for _ in range(IN_FLIGHT)))
    return _figures(requests, time.perf_counter() - started, cpu_seconds() - cpu)


def run_rollstream(
    url: str, prompts: Path, n: int, processes: int, rollouts: int, folder: Path
) -> dict[str, Any]:
    """A whole generation run by the command line's own entry point, durable and merged."""
    settings = {
        "actor_rollout_ref.model.path": MODEL_PATH,
        "actor_rollout_ref.rollout.name": "sglang",
        "actor_rollout_ref.rollout.n": n,
        "actor_rollout_ref.rollout.server_urls": f"[{url}]",
        "actor_rollout_ref.rollout.response_length": RESPONSE_TOKENS,
        "data.train_files": prompts,
        "data.max_prompt_length": PROMPT_TOKENS,
        "data.train_max_samples": max(1, rollouts // n),
        "trainer.default_local_dir": folder,
        "generation.max_in_flight": IN_FLIGHT,
        "generation.processes": processes,
        "generation.seed": 1,
    }
    cpu, started = cpu_seconds(), time.perf_counter()
    generate(settings)
    figures = _figures(rollouts, time.perf_counter() - started, cpu_seconds() - cpu)
    assert file_rows(folder / "trajectories.parquet") == max(n, rollouts)
    return figures


def _figures(rollouts: int, seconds: float, cpu: float) -> dict[str, Any]:
    return {"rollouts": rollouts, "seconds": seconds, "cpu_s": cpu, "peak_mb": peak_rss_mb()}


def measure(*arguments: object) -> dict[str, Any]:
    """One measurement in a fresh process."""
    command = [sys.executable, "-m", "bench.overhead", "--measure", *map(str, arguments)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    result: dict[str, Any] = orjson.loads(done.stdout.splitlines()[-1])
    return result


def _measure_here(what: str, url: str, rollouts: int, *more: str) -> dict[str, Any]:
    if what == "lean":
        return asyncio.run(run_lean(url, rollouts))
    if what == "aiohttp":
        return asyncio.run(run_aiohttp(url, rollouts))
    prompts, n, processes = Path(more[0]), int(more[1]), int(more[2])
    with tempfile.TemporaryDirectory() as folder:
        return run_rollstream(url, prompts, n, processes, rollouts, Path(folder) / "run")


def bench() -> None:
    """Runs the benchmark."""
    if len(sys.argv) > 1 and sys.argv[1] == "--measure":
        what, url, count, *more = sys.argv[2:]
        print(orjson.dumps(_measure_here(what, url, int(count), *more)).decode())
        return
    options = parse_options(__doc__.split("\n")[0])
    rounds, rollouts, many = 3, 16_000, 300_000
    if options.quick:
        rounds, rollouts, many = 1, 4_000, 0
    ways = [(n, processes) for n in (1, 8) for processes in (1, 2)]
    with tempfile.TemporaryDirectory() as folder, stub_server() as url:
        prompts = Path(folder) / "prompts.jsonl"
        tokenizer = load_tokenizer(str(MODEL_PATH))
        texts = [prompt_text(tokenizer, number) for number in range(1000)]
        with prompts.open("wb") as file:
            for number in range(max(rollouts, many // 8)):
                file.write(orjson.dumps({"prompt": texts[number % len(texts)], "number": number}) + b"\n")
        measure("lean", url, 200)  # warms the server
        starts = {count: measure("rollstream", url, 1, prompts, 1, count) for count in (1, 2)}
        seen: dict[Any, list[dict[str, Any]]] = defaultdict(list)
        for _ in range(rounds):
            for client in ("lean", "aiohttp"):
                seen[client].append(measure(client, url, rollouts))
            for n, processes in ways:
                seen[n, processes].append(measure("rollstream", url, rollouts, prompts, n, processes))
        floor = statistics.median(one["cpu_s"] for one in seen["lean"])
        rows = [_row(f"{name} client", None, None, seen[name], None, floor) for name in ("lean", "aiohttp")]
        rows += [
            _row("rollstream", n, processes, seen[n, processes], starts[processes], floor)
            for n, processes in ways
        ]
        print_table(
            f"{rollouts:,} rollouts of {PROMPT_TOKENS}-token prompts and {RESPONSE_TOKENS}-token responses with "
            f"log-probs, {IN_FLIGHT} in flight (n: rollouts of a prompt; CPU with sealing and merge)",
            rows,
        )
        growth = _growth(url, prompts, many) if many else []
    print("\nstart-up, taken off: " + ", ".join(f"{one['cpu_s']:.2f} s CPU" for one in starts.values()))
    write_json(options.json, "overhead", [*rows, *growth])


def _growth(url: str, prompts: Path, many: int) -> list[dict[str, Any]]:
    """Bytes a finished rollout: below some 100,000 the merge's buffers still fill, whatever comes later."""
    few = many // 3
    peaks = [measure("rollstream", url, count, prompts, 8, 1)["peak_mb"] for count in (few, many)]
    rows = [{"n": 8, "bytes per finished rollout": (peaks[1] - peaks[0]) * 2**20 / (many - few)}]
    print_table(f"growth of peak memory from {few:,} to {many:,} rollouts (aim: at most 60)", rows)
    return rows


def _row(
    what: str,
    n: int | None,
    processes: int | None,
    seen: list[dict[str, Any]],
    start: dict[str, Any] | None,
    floor: float,
) -> dict[str, Any]:
    rollouts = seen[0]["rollouts"]
    rates, cpus = [], []
    for one in seen:
        rates.append(rollouts / (one["seconds"] - (start["seconds"] if start else 0.0)))
        cpus.append(one["cpu_s"] - (start["cpu_s"] if start else 0.0))
    cpu = statistics.median(cpus)
    return {
        "what": what,
        "n": n,
        "processes": processes,
        "rollouts/s": statistics.median(rates),
        "from": min(rates),
        "to": max(rates),
        "CPU us/rollout": cpu / rollouts * 1e6,
        "x lean client": cpu / floor,
        "peak MB": max(one["peak_mb"] for one in seen),
    }


if __name__ == "__main__":
    bench()
