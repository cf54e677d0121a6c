"""The page's server on a run of a million trajectories, and beside a run that writes a thousand rollouts a second.

    python -m bench.view [--quick] [--json FILE]

Requests are those of the page, one at a time, over HTTP, each three times: the median. First paint is from the start of
`rollstream view` until the answers for the list of runs and for the run at a glance are there. The writer commits
rollouts at a fixed pace, and as quickly as it can; while a page follows the run, and while none does, in turns of
some seconds.
"""

import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from bench.report import parse_options, print_table, write_json

_REQUESTS = {
    "rows": "rows?limit=100",
    "filter": "rows?filter=reward<{}+and+finish_reason=length+and+num_turns>3&limit=100",
    "filter by text": "rows?filter=prompt_key~{}&limit=100",
    "sort": "rows?sort={}&limit=100",
    "groups": "groups?sort=-spread&limit=50",
    "a group": "groups/{}",
    "a trajectory": "trajectories/{}",
    "its tokens": "trajectories/{}/tokens",
    "search, nothing found": "search?text=nothing+like+this",
}
_VALUES: dict[str, list[Any]] = {
    "filter": [0.5, 0.4, 0.3],  # what was asked before is remembered
    "filter by text": ["beef", "cafe", "bad"],
    "sort": ["-reward,index", "total_s", "-tokens"],
    "a group": [7, 500, 1200],
    "a trajectory": [70, 7000, 9999],
    "its tokens": [70, 7000, 9999],
}


class _Viewer:
    def __init__(self, root: Path) -> None:
        began = time.perf_counter()
        command = [sys.executable, "-m", "rollstream.cli", "view", str(root), "--port", "0", "--json"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.url = orjson.loads(self.process.stdout.readline())["url"]
        self.listening_s = time.perf_counter() - began
        self.run = f"api/runs/{self.get('api/sources')[1]['sources'][0]['id']}"

    def get(self, path: str) -> tuple[float, Any]:
        began = time.perf_counter()
        with urllib.request.urlopen(self.url + path.replace("<", "%3C").replace(">", "%3E")) as answer:
            body = answer.read()
        return time.perf_counter() - began, orjson.loads(body) if body.startswith(b"{") else body

    def follow(self, stop: threading.Event) -> None:
        """Reads the run's stream as a page does."""
        with urllib.request.urlopen(f"{self.url}{self.run}/follow") as answer:
            while not stop.is_set():
                answer.readline()

    def peak_mb(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def _viewing(root: Path) -> Iterator[_Viewer]:
    viewer = _Viewer(root)
    try:
        yield viewer
    finally:
        viewer.process.terminate()
        viewer.process.wait()


def measure_large(root: Path) -> list[dict[str, Any]]:
    """Start, first paint and requests."""
    began = time.perf_counter()
    with _viewing(root) as viewer:
        rows: list[dict[str, Any]] = [{"what": "listening", "ms": 1000 * viewer.listening_s, "MB": None}]
        viewer.get(viewer.run)
        rows.append({"what": "first paint", "ms": 1000 * (time.perf_counter() - began)})
        rows.append({"what": "first paint, CPU", "ms": 1000 * viewer.cpu_s()})
        for what, path in _REQUESTS.items():
            values = _VALUES.get(what, [0, 0, 0])
            seconds = [viewer.get(f"{viewer.run}/{path.format(value)}")[0] for value in values]
            rows.append({"what": what, "ms": 1000 * statistics.median(seconds)})
        rows.append({"what": "peak memory", "MB": viewer.peak_mb()})
    return rows


async def measure_live(root: Path, rate: int | None, turns: int, seconds: float) -> list[dict[str, Any]]:
    """What a run finishes in a second, with a page that follows it and without. `rate`: None is as quick as it goes."""
    from tests.support.view_runs import rollout, writing

    finished: dict[bool, list[float]] = {False: [], True: []}
    cpu: dict[bool, list[float]] = {False: [], True: []}
    latency: dict[bool, list[float]] = {False: [], True: []}
    async with writing(root, prompts=10**6, rows=1000) as writer:
        await writer.commit(rollout(10**6 - 1, 0))
        with _viewing(root) as viewer:
            number = 0
            for turn in range(2 * turns):
                followed = turn % 2 == 1
                stop = threading.Event()
                page = threading.Thread(target=viewer.follow, args=(stop,))
                if followed:
                    page.start()
                began, before, first = time.perf_counter(), time.process_time(), number
                while (passed := time.perf_counter() - began) < seconds:
                    due = 64 if rate is None else min(int(passed * rate) - (number - first), 64)
                    asked = time.perf_counter()
                    await asyncio.gather(
                        *(writer.commit(rollout(one // 4, one % 4)) for one in range(number, number + due))
                    )
                    if due:
                        latency[followed].append(time.perf_counter() - asked)
                    number += due
                    await asyncio.sleep(0 if rate is None else 0.005)
                finished[followed].append((number - first) / (time.perf_counter() - began))
                cpu[followed].append(1e6 * (time.process_time() - before) / max(1, number - first))
                stop.set()
                if followed:
                    page.join()
    rows = [
        {
            "writer": "unpaced" if rate is None else f"{rate}/s",
            "page": "follows" if followed else "none",
            "rollouts/s": statistics.median(finished[followed]),
            "CPU us/rollout": statistics.median(cpu[followed]),
            "commit ms": 1000 * statistics.median(latency[followed]),
        }
        for followed in (False, True)
    ]
    return [row | {"ratio": float(row["rollouts/s"]) / float(rows[0]["rollouts/s"])} for row in rows]


def main() -> None:
    """Measures and prints."""
    from tests.support.view_runs import large_run

    options = parse_options(__doc__ or "")
    count = 100_000 if options.quick else 1_000_000
    with tempfile.TemporaryDirectory() as folder:
        large = measure_large(large_run(Path(folder) / "large", count))
        print_table(f"{count:,} trajectories", large)
        turns = 1 if options.quick else 4
        live = asyncio.run(measure_live(Path(folder) / "live", 1000, turns, 4.0))
        live += asyncio.run(measure_live(Path(folder) / "unpaced", None, turns, 4.0))
        print_table("beside a run that is written", live)
    write_json(options.json, "view", [*large, *live])


if __name__ == "__main__":
    main()
