"""How long a pool takes for work with a long tail, against what is possible.

    python -m bench.pool [--quick] [--json FILE]

Eight stub replicas (in one process of their own, without a model) run four requests each and let the others
wait; one of them is slow. The lengths of answers have a Pareto tail (alpha 2), are drawn for the prompt, and
nobody knows them before. An answer takes its time token by token, an aborted one gives what there is, and one
that goes on takes only the rest of the time. 48 rollouts are in flight.

    lower bound    all the work at the speed of all replicas; if that is more, the longest rollout
    static split   rollouts are dealt out to the replicas before the run
    pool           the engine as it is

Routing is partly chance: the time is the median of three runs, and the worst is beside it. It is the stubs'
time, not the CPU's: the share of a core that client and stubs use is in the table, and beside it how late a
sleep of 20 ms ends, on average. Where that is more than a few ms, others keep the machine busy, and every
rollout takes longer than the bound assumes.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import orjson

from bench.report import cpu_seconds, parse_options, print_table, write_json
from rollstream.engine.sglang import SGLangEngine
from rollstream.testing.answers import AnswerBook
from rollstream.testing.stub_answers import book_rule
from rollstream.testing.stub_faults import Latency
from rollstream.testing.stub_server import StubServer
from rollstream.trajectory import SamplingParams

REPLICAS, SLOTS, IN_FLIGHT = 8, 4, 48
PROMPT_TOKENS = 32
LONGEST = 2_000
TOKEN_S = 0.005
"""200 tokens/s: lengths of 20 to 2,000 tokens (40 on average) take 0.1 to 10 s, so that there is a rollout
every 7 ms: little work for client and stubs."""
LENGTHS = Latency("pareto", 20, 2.0, LONGEST)


def prompt_of(number: int) -> list[int]:
    """The prompt of a rollout: `PROMPT_TOKENS` ids."""
    return [number // 500, number % 500, *range(PROMPT_TOKENS - 2)]


def lower_bound(rollouts: int, slowness: float) -> float:
    """Seconds that no way of dealing out the work can beat."""
    book = AnswerBook()
    lengths = [int(LENGTHS.draw(book.digest(prompt_of(number), None))) for number in range(rollouts)]
    capacity = SLOTS * (REPLICAS - 1 + 1 / slowness)
    return TOKEN_S * max(sum(lengths) / capacity, max(lengths))


async def serve(slowness: float) -> None:
    """Runs the stub replicas until stdin is closed."""
    speeds = [1 / slowness, *[1.0] * (REPLICAS - 1)]
    servers = [
        StubServer(
            book_rule(LENGTHS, prompt_tokens=PROMPT_TOKENS),
            latency=Latency(token_s=TOKEN_S / speed),
            max_running=SLOTS,
        )
        for speed in speeds
    ]
    print(orjson.dumps([await server.start() for server in servers]).decode(), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    for server in servers:
        await server.stop()


async def drive(engine: SGLangEngine, numbers: Iterator[int], window: int) -> None:
    """Has an engine answer the rollouts, `window` at a time."""
    sampling = SamplingParams(max_tokens=LONGEST)

    async def slot() -> None:
        for number in numbers:
            completion = await engine.generate(prompt_of(number), sampling, request_id=f"{number}-0-0")
            assert completion.finish_reason == "stop", completion.finish_reason

    await asyncio.gather(*(slot() for _ in range(window)))


async def run_static(urls: list[str], rollouts: int) -> None:
    """A share for each replica, each with its share of the window."""
    engines = [SGLangEngine([url]) for url in urls]
    await asyncio.gather(*(engine.start() for engine in engines))
    shares = [iter(range(at, rollouts, REPLICAS)) for at in range(REPLICAS)]
    await asyncio.gather(
        *(drive(engine, share, IN_FLIGHT // REPLICAS) for engine, share in zip(engines, shares, strict=True))
    )
    await asyncio.gather(*(engine.close() for engine in engines))


async def run_pool(urls: list[str], rollouts: int) -> None:
    """One pool."""
    engine = SGLangEngine(urls)
    await engine.start()
    await drive(engine, iter(range(rollouts)), IN_FLIGHT)
    await engine.close()


async def with_lag(work: Awaitable[None]) -> float:
    """Does `work`. By how many milliseconds a sleep of 20 ms was late meanwhile, on average."""
    late: list[float] = []

    async def sleep() -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.02)
            late.append(time.perf_counter() - began - 0.02)

    sleeper = asyncio.create_task(sleep())
    try:
        await work
        return 1000 * sum(late) / max(1, len(late))
    finally:
        sleeper.cancel()


def run(what: str, rollouts: int, slowness: float) -> dict[str, Any]:
    """One run against stubs of its own."""
    command = [sys.executable, "-m", "bench.pool", "--serve", str(slowness)]
    stubs = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert stubs.stdin is not None and stubs.stdout is not None
    try:
        urls = orjson.loads(stubs.stdout.readline())
        stub_cpu, cpu, began = _cpu_of(stubs.pid), cpu_seconds(), time.perf_counter()
        is_static = what == "static split"
        work = run_static(urls, rollouts) if is_static else run_pool(urls, rollouts)
        lag = asyncio.run(with_lag(work))
        seconds = time.perf_counter() - began
        client_share = (cpu_seconds() - cpu) / seconds
        stub_share = (_cpu_of(stubs.pid) - stub_cpu) / seconds
    finally:
        stubs.stdin.close()
        stubs.wait()
    bound = lower_bound(rollouts, slowness)
    return {
        "slow one": f"{slowness:g}x",
        "what": what,
        "rollouts": rollouts,
        "seconds": seconds,
        "bound": bound,
        "x bound": seconds / bound,
        "client CPU %": 100 * client_share,
        "stubs CPU %": 100 * stub_share,
        "late ms": lag,
    }


def bench() -> None:
    """Runs the benchmark."""
    if len(sys.argv) > 1 and sys.argv[1] == "--serve":
        asyncio.run(serve(float(sys.argv[2])))
        return
    options: argparse.Namespace = parse_options(__doc__.split("\n")[0])
    rollouts, repeats = (400, 1) if options.quick else (4_000, 3)
    kinds = [("static split", 3.0)]
    kinds += [("pool", slowness) for slowness in (3.0, 20.0)]
    rows = []
    for what, slowness in kinds:
        times = 1 if what == "static split" else repeats
        found = sorted((run(what, rollouts, slowness) for _ in range(times)), key=lambda row: row["seconds"])
        rows.append({**found[len(found) // 2], "worst x": found[-1]["x bound"]})
    print_table(
        f"{REPLICAS} replicas of {SLOTS} slots, one slow, {IN_FLIGHT} rollouts in flight, Pareto lengths"
        + (" (too few for the aim)" if options.quick else " (aim: at most 1.1x the lower bound)"),
        rows,
    )
    write_json(options.json, "pool", rows)


def _cpu_of(pid: int) -> float:
    """CPU seconds of a process so far. Source: proc(5), fields 14 and 15 of `/proc/PID/stat`."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    bench()
