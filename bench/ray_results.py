"""How results get from a Ray worker to the driver: a streaming generator's reports, and Ray's queue.

    python -m bench.ray_results [--quick] [--json FILE]

10,000 results of 10 KB, one worker, an asyncio driver that takes them as they come; against it
`ray.util.queue.Queue`. The first row is how `rollstream.rollout.ray` does it, with as many results in one
report as a worker puts there at most. CPU is of the driver and all of the cluster's processes.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from bench.ray import cpu_of_family
from bench.report import parse_options, print_table, write_json
from rollstream.rollout.ray_cluster import RayCluster

RESULT_BYTES = 10_000
IN_REPORT = 32
"""As in `ray_worker`."""


class Source:
    """An actor with results to give."""

    async def ready(self) -> None:
        """Returns when it runs."""

    async def stream(self, count: int, together: int) -> AsyncIterator[list[bytes]]:
        """All of them, so many in one item."""
        for start in range(0, count, together):
            yield [bytes(RESULT_BYTES) for _ in range(min(together, count - start))]

    async def put(self, queue: Any, count: int, together: int) -> None:
        """Puts all of them into a queue, so many in one item."""
        for start in range(0, count, together):
            await queue.put_async([bytes(RESULT_BYTES) for _ in range(min(together, count - start))])


async def take_stream(source: Any, queue: Any, count: int, together: int) -> int:
    """Takes all results as a worker's reports are taken; returns how many came."""
    taken = 0
    async for reference in source.stream.options(num_returns="streaming").remote(count, together):
        taken += len(await reference)
    return taken


async def take_queue(source: Any, queue: Any, count: int, together: int) -> int:
    """Takes all results from a queue."""
    putting = source.put.remote(queue, count, together)
    taken = 0
    while taken < count:
        taken += len(await queue.get_async())
    await putting
    return taken


Way = Callable[[Any, Any, int, int], Awaitable[int]]

ROWS: list[tuple[str, Way, int]] = [
    ("streaming generator, 32 in a report", take_stream, IN_REPORT),
    ("streaming generator, one by one", take_stream, 1),
    ("queue, 32 in an item", take_queue, IN_REPORT),
    ("queue, one by one", take_queue, 1),
]


async def measure(results: int) -> list[dict[str, Any]]:
    """All rows."""
    cluster = RayCluster({"num_cpus": 4})
    await cluster.start()
    try:
        import ray
        from ray.util.queue import Queue

        queue = Queue()
        source: Any = ray.remote(Source).remote()
        await source.ready.remote()
        rows: list[dict[str, Any]] = []
        for what, take, together in ROWS:
            count = results if together > 1 else max(results // 5, 1)  # the slow ways show it with fewer, too
            await take(source, queue, min(count, 320), together)  # its process runs, its code is warm
            cpu, started = cpu_of_family(), time.perf_counter()
            taken = await take(source, queue, count, together)
            seconds, cpu = time.perf_counter() - started, cpu_of_family() - cpu
            assert taken == count
            rows.append(
                {
                    "what": what,
                    "results": count,
                    "results/s": count / seconds,
                    "CPU us/result": cpu / count * 1e6,
                }
            )
        return rows
    finally:
        await cluster.close()


def bench() -> None:
    """Runs the benchmark."""
    options = parse_options(__doc__.split("\n")[0])
    rows = asyncio.run(measure(640 if options.quick else 10_000))
    print_table(f"results of {RESULT_BYTES // 1000} KB from a Ray worker to an asyncio driver", rows)
    write_json(options.json, "ray_results", rows)


if __name__ == "__main__":
    bench()
