"""What workers on Ray cost and give: the same run on the local executor, and on 1, 2 and 4 Ray workers.

    python -m bench.ray [--quick] [--json FILE]

Each worker has an engine of its own that answers at once (a scripted one), so what is measured is ours:
messages to ids, trajectories to bytes, dispatch, transport, and the journal. Rollouts are of prompt 1024 /
response 4096 tokens, and of 64 / 32. 256 are in flight, all are durable, nothing is merged.

CPU is of the whole program: this process, the cluster's, and the workers', while rollouts run; so it includes
what Ray's own processes spend. On N cores more than N busy processes cannot help: see how many there are.

The loops of verl are in the same table (`bench.verl_loop`) where an environment has verl: this one, or that
of the interpreter that ROLLSTREAM_VERL_PYTHON names. Another system's loop comes in by `ROWS`: a name, and
what measures it.
"""

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import psutil  # type: ignore[import-untyped]

from bench.report import parse_options, print_table, write_json
from rollstream.agent.base import AgentResources
from rollstream.agent.prompt import PromptRenderer
from rollstream.chat.tokenizer import load_tokenizer
from rollstream.demo import MODEL_PATH
from rollstream.engine.continuation import ContinuingEngine
from rollstream.rollout.availability import EngineAvailability
from rollstream.rollout.executor import Executor, WorkerBackend
from rollstream.rollout.retry import RetryPolicy
from rollstream.rollout.worker import RolloutWorker
from rollstream.rollout.worker_host import BuiltWorker, LocalBackend
from rollstream.store.manifest import new_manifest
from rollstream.store.run_dir import lock_run, open_run
from rollstream.store.writer import StoreWriter
from rollstream.testing.scripted import ScriptedEngine, ScriptedRequest
from rollstream.trajectory import Completion, PromptRow, SamplingParams

IN_FLIGHT = 256


@dataclass(frozen=True)
class Sizes:
    """Tokens of every rollout."""

    prompt: int
    response: int


@dataclass(frozen=True)
class ScriptedRecipe:
    """A worker whose engine answers at once with the same ids."""

    sizes: Sizes

    async def build(self, number: int) -> BuiltWorker:
        """See `WorkerRecipe`."""
        ids = [300 + i % 100 for i in range(self.sizes.response)]
        logprobs = [-0.01 * (i % 97) for i in range(self.sizes.response)]

        def answer(request: ScriptedRequest) -> Completion:
            return Completion(list(ids), list(logprobs), "length")

        engine = ScriptedEngine(answer, record=False)
        await engine.start()
        metered, tokenizer = ContinuingEngine(engine), load_tokenizer(str(MODEL_PATH))
        availability = EngineAvailability(engine, timeout=30)
        prompts = PromptRenderer(tokenizer, prompt_length=self.sizes.prompt, truncation="left")
        worker = RolloutWorker(
            AgentResources(metered, tokenizer, prompts, self.sizes.response),
            sampling=SamplingParams(self.sizes.response),
            seed=3,
            default_agent_loop="single_turn_agent",
            retry=RetryPolicy(1, 0.1, 0.1),
            attempt_timeout=60,
            availability=availability,
        )
        return BuiltWorker(worker, metered.meter, availability, close=engine.close, engine=engine)


def load_row(index: int, sizes: Sizes) -> PromptRow:
    """A prompt that fills its limit: digits are a token each."""
    text = f"{index:09d}" * (sizes.prompt // 9 + 1)
    return PromptRow(
        index, f"{index:032x}", [{"role": "user", "content": text[: sizes.prompt - 20]}], "bench"
    )


def cpu_of_family() -> float:
    """CPU seconds of this process and all below it, those that live."""
    total = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


async def measure(workers: int, sizes: Sizes, rollouts: int) -> dict[str, Any]:
    """Rollouts a second and CPU for each, on `workers` Ray workers; 0: the local executor."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "run"
        manifest = new_manifest(n=1, identity={}, dataset={}, versions={}, config={})
        run = open_run(lock_run(root), root, manifest, config_yaml="")
        writer = StoreWriter(run, save_batch_size=10**9, pull_timeout=1e6)
        writer.start()
        keys = run.state.keys
        recipe = ScriptedRecipe(sizes)
        warm = max(64, rollouts // 20)
        async with AsyncExitStack() as stack:
            backend: WorkerBackend
            if workers:
                from rollstream.rollout.ray import RayBackend
                from rollstream.rollout.ray_cluster import RayCluster

                cluster = RayCluster({"num_cpus": max(workers, os.cpu_count() or 1)})
                await cluster.start()
                stack.push_async_callback(cluster.close)
                backend = RayBackend(lambda: recipe)
            else:
                backend = LocalBackend(await recipe.build(0))
            executor = Executor(
                writer,
                backend,
                load_row=lambda key: load_row(key.index, sizes),
                max_in_flight=IN_FLIGHT,
                workers=workers or 1,
                attempt_timeout=60,
            )
            stack.push_async_callback(executor.close)
            await executor.start()
            while len(executor.pids) < workers:  # noqa: ASYNC110 (a count)
                await asyncio.sleep(0.05)
            await executor.run(keys.owed(range(warm), retry_failed=False))
            cpu, own, started = cpu_of_family(), time.process_time(), time.perf_counter()
            await executor.run(keys.owed(range(warm, warm + rollouts), retry_failed=False))
            seconds = time.perf_counter() - started
            cpu, own = cpu_of_family() - cpu, time.process_time() - own
        await writer.close(seal=False)
        run.close()
        assert keys.done == warm + rollouts
    return {"rollouts": rollouts, "seconds": seconds, "cpu_s": cpu, "driver_cpu_s": own}


def measure_apart(workers: int, sizes: Sizes, rollouts: int) -> dict[str, Any]:
    """The same in a fresh process."""
    import subprocess

    words = [str(number) for number in (workers, sizes.prompt, sizes.response, rollouts)]
    command = [sys.executable, "-m", "bench.ray", "--measure", *words]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    result: dict[str, Any] = orjson.loads(done.stdout.splitlines()[-1])
    return result


def measure_verl(workers: int, sizes: Sizes, rollouts: int) -> dict[str, Any] | None:
    """The loops of verl; None where there is no verl."""
    import importlib.util
    import subprocess

    python = os.environ.get("ROLLSTREAM_VERL_PYTHON")
    if python is None and importlib.util.find_spec("verl") is None:
        return None
    here = Path(__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here / "src")])}
    words = [str(number) for number in (workers, sizes.prompt, sizes.response, rollouts)]
    command = [python or sys.executable, "-m", "bench.verl_loop", *words]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=env)
    result: dict[str, Any] = orjson.loads(done.stdout.splitlines()[-1])
    return result


ROWS: list[tuple[str, Callable[[Sizes, int], dict[str, Any] | None]]] = [
    ("local", lambda sizes, rollouts: measure_apart(0, sizes, rollouts)),
    ("ray, 1 worker", lambda sizes, rollouts: measure_apart(1, sizes, rollouts)),
    ("ray, 2 workers", lambda sizes, rollouts: measure_apart(2, sizes, rollouts)),
    ("ray, 4 workers", lambda sizes, rollouts: measure_apart(4, sizes, rollouts)),
    ("verl, 1 worker", lambda sizes, rollouts: measure_verl(1, sizes, rollouts)),
    ("verl, 2 workers", lambda sizes, rollouts: measure_verl(2, sizes, rollouts)),
]
"""What is compared: a name, and what measures so many rollouts of these sizes; None: it is not installed."""


def bench() -> None:
    """Runs the benchmark."""
    if len(sys.argv) > 1 and sys.argv[1] == "--measure":
        workers, prompt, response, rollouts = map(int, sys.argv[2:6])
        print(orjson.dumps(asyncio.run(measure(workers, Sizes(prompt, response), rollouts))).decode())
        return
    options = parse_options(__doc__.split("\n")[0])
    plan = [(Sizes(1024, 4096), 1_500), (Sizes(64, 32), 10_000)]
    if options.quick:
        plan = [(Sizes(1024, 4096), 100), (Sizes(64, 32), 500)]
    rows: list[dict[str, Any]] = []
    for sizes, rollouts in plan:
        for what, measured_by in ROWS[:2] if options.quick else ROWS:
            row = {"what": what, "prompt": sizes.prompt, "response": sizes.response}
            figures = measured_by(sizes, rollouts)
            if figures is None:
                rows.append({**row, "what": f"{what}: not installed"})
                continue
            count = figures["rollouts"]
            rows.append(
                {
                    **row,
                    "rollouts": count,
                    "rollouts/s": count / figures["seconds"],
                    "CPU us/rollout": figures["cpu_s"] / count * 1e6,
                    "of it driver": figures["driver_cpu_s"] / count * 1e6,
                }
            )
    print_table(f"zero-latency engine in each worker, {IN_FLIGHT} in flight, {os.cpu_count()} cores", rows)
    write_json(options.json, "ray", rows)


if __name__ == "__main__":
    bench()
