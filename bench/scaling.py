"""What a run of 100 M rollouts asks of its drivers: measured on one machine, and the arithmetic from there.

    python -m bench.scaling [--quick] [--json FILE]

Measured, with rollouts of 512 prompt and 1,500 response tokens (random ids of a vocabulary of 150,000,
log-probs, text), all of them different, each in a process of its own:

- `encode`: a rollout to the bytes of its journal frame, done by a Ray worker or by the driver of a local run.
- `commit`: encoded rollouts through the store's writer, 1,024 in flight, all durable: a driver's part on Ray.
- `seal`: from the journal into Parquet batches. It runs in a thread of the driver.
- `merge`: the batches into the artifact, at the end, by whoever has the time.
- `merge shards`: `rollstream merge` of the rollouts in four shards, with batches as large as a run's are.

The second table is arithmetic: how long so many rollouts take on so many GPUs, what that is a second, and
what it makes of the measured figures for one driver and for several (`generation.shard`). A journal becomes a
file when it has `save_batch_size` rows or the writer's limit of bytes, whichever comes first.
"""

import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from bench.report import cpu_seconds, parse_options, peak_rss_mb, print_table, write_json
from rollstream.store.manifest import SHARD_IDENTITY, new_manifest
from rollstream.store.merge import merge_batches
from rollstream.store.merge_shards import merge_shards
from rollstream.store.records import EncodedRollout, RecordCodec
from rollstream.store.run_dir import lock_run, open_run
from rollstream.store.summary import write_checkpoint
from rollstream.store.writer import _SEGMENT_BYTES, StoreWriter
from rollstream.trajectory import Rollout, Trajectory

PROMPT, RESPONSE = 512, 1_500
VOCABULARY = 150_000
IN_FLIGHT = 1_024
BATCH_ROWS = 10_000
"""`generation.save_batch_size` of the arithmetic."""
SHARDS = 4
MERGE_BYTES_A_ROW = 82
"""Memory of a merge at its peak: 25 for a row's keys, 57 to sort them (`tracemalloc`, `merge._order`)."""
ROLLOUTS, GPUS, TOKENS_PER_GPU = 100_000_000, 1_000, 2_500
"""The run of the arithmetic, and what a GPU samples a second with a model of some 8 B parameters."""


def make_rollout(number: int) -> Rollout:
    """One of realistic entropy: ids hardly compress, text does."""
    rng = np.random.default_rng(number)
    text = " ".join(f"word{value}" for value in rng.integers(0, 20_000, RESPONSE // 2))
    trajectory = Trajectory(
        prompt_ids=rng.integers(0, VOCABULARY, PROMPT).tolist(),
        response_ids=rng.integers(0, VOCABULARY, RESPONSE).tolist(),
        response_mask=[1] * RESPONSE,
        response_logprobs=(-rng.exponential(0.5, RESPONSE)).tolist(),
        messages=[{"role": "user", "content": text[: PROMPT * 4]}, {"role": "assistant", "content": text}],
        finish_reason="stop",
        reward=float(rng.random()),
    )
    return Rollout(number, 0, f"{number:032x}", [trajectory], "bench", ground_truth=str(number))


def measure_encode(rollouts: int) -> dict[str, float]:
    """In this process."""
    codec = RecordCodec()
    made = [make_rollout(number) for number in range(rollouts)]
    cpu, started, size, raw = cpu_seconds(), time.perf_counter(), 0, 0
    for rollout in made:
        encoded = codec.encode(rollout)
        size += len(encoded.body)
        raw += encoded.raw_bytes
    return {**_figures(rollouts, started, cpu, size), "raw_bytes": raw}


async def measure_store(rollouts: int) -> dict[str, dict[str, float]]:
    """In this process: commit, seal and merge the same rollouts."""
    codec = RecordCodec()
    made = [codec.encode(make_rollout(number)) for number in range(rollouts)]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "run"
        manifest = new_manifest(n=1, identity={}, dataset={}, versions={}, config={})
        run = open_run(lock_run(root), root, manifest, config_yaml="")
        # Nothing is sealed while it commits, so that the two can be told apart.
        writer = StoreWriter(run, save_batch_size=10**9, pull_timeout=1e6, segment_bytes=1 << 40)
        writer.start()
        cpu, started = cpu_seconds(), time.perf_counter()
        await _commit(writer, made)
        commit = _figures(rollouts, started, cpu, sum(map(_size, root.glob("journal/*"))))
        await writer.close(seal=False)
        run.close()

        run = open_run(lock_run(root), root, manifest, config_yaml="")
        writer = StoreWriter(run, save_batch_size=BATCH_ROWS, pull_timeout=1e6)
        writer.start()
        cpu, started = cpu_seconds(), time.perf_counter()
        await writer.close(seal=True)
        seal = _figures(rollouts, started, cpu, sum(map(_size, root.glob("batches/*"))))
        cpu, started = cpu_seconds(), time.perf_counter()
        await asyncio.to_thread(merge_batches, run.paths, run.manifest.run_id_bytes)
        merge = _figures(rollouts, started, cpu, run.paths.artifact.stat().st_size)
        run.close()
    return {"commit": commit, "seal": seal, "merge": merge}


async def measure_shards(rollouts: int) -> dict[str, dict[str, float]]:
    """In this process: the same rollouts in shards, merged into one run directory."""
    codec = RecordCodec()
    with tempfile.TemporaryDirectory() as folder:
        roots = [Path(folder) / f"shard{number}" for number in range(SHARDS)]
        for number, root in enumerate(roots):
            identity = {SHARD_IDENTITY: f"{number}/{SHARDS}"}
            manifest = new_manifest(n=1, identity=identity, dataset={}, versions={}, config={})
            with open_run(lock_run(root), root, manifest, config_yaml="{}\n") as run:
                made = [codec.encode(make_rollout(index)) for index in range(number, rollouts, SHARDS)]
                writer = StoreWriter(run, save_batch_size=BATCH_ROWS, pull_timeout=1e6)
                writer.start()
                await _commit(writer, made)
                await writer.close(seal=True)
                write_checkpoint(run.paths, run.manifest, run.state, total=len(made))
        cpu, started = cpu_seconds(), time.perf_counter()
        merged = await asyncio.to_thread(merge_shards, roots, Path(folder) / "merged")
        size = sum(map(_size, merged.output.rglob("*.parquet")))
        return {"merge shards": _figures(rollouts, started, cpu, size)}


async def _commit(writer: StoreWriter, made: list[EncodedRollout]) -> None:
    left = iter(made)

    async def one() -> None:
        for rollout in left:
            await writer.commit(rollout)

    await asyncio.gather(*(one() for _ in range(IN_FLIGHT)))


def _size(path: Path) -> int:
    return path.stat().st_size


def _figures(rollouts: int, started: float, cpu: float, size: int) -> dict[str, float]:
    return {
        "seconds": time.perf_counter() - started,
        "cpu_s": cpu_seconds() - cpu,
        "bytes": size,
        "rollouts": rollouts,
        "peak_mb": peak_rss_mb(),
    }


def projection(measured: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """The arithmetic: what the run of `ROLLOUTS` asks of one driver, and of several."""
    rate = GPUS * TOKENS_PER_GPU / RESPONSE
    each = {name: figures["cpu_s"] / figures["rollouts"] for name, figures in measured.items()}
    size = {name: figures["bytes"] / figures["rollouts"] for name, figures in measured.items()}
    raw_bytes = measured["encode"]["raw_bytes"] / measured["encode"]["rollouts"]
    rows_a_file = min(BATCH_ROWS, _SEGMENT_BYTES / raw_bytes)
    rows = []
    for drivers in (1, 4, 16):
        share, part = rate / drivers, ROLLOUTS / drivers
        rows.append(
            {
                "drivers": drivers,
                "hours": ROLLOUTS / rate / 3600,
                "rollouts/s each": share,
                "cores, store": share * (each["commit"] + each["seal"]),
                "cores, encoding": share * each["encode"],
                "journal MB/s": share * size["commit"] / 1e6,
                "batches GB": part * size["seal"] / 1e9,
                "files": part / rows_a_file,
                "key states MB": part / 1e6,
                "merge hours": part * each["merge"] / 3600,
                "merge GB": part * MERGE_BYTES_A_ROW / 1e9,
                "merge shards hours": ROLLOUTS * each["merge shards"] / 3600 if drivers > 1 else 0,
            }
        )
    return rows


def _apart(what: str, rollouts: int) -> Any:
    command = [sys.executable, "-m", "bench.scaling", "--measure", what, str(rollouts)]
    return orjson.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1])


def main() -> None:
    """Runs the benchmark."""
    if len(sys.argv) > 1 and sys.argv[1] == "--measure":
        what, rollouts = sys.argv[2], int(sys.argv[3])
        figures: Any
        if what == "encode":
            figures = measure_encode(rollouts)
        else:
            figures = asyncio.run((measure_store if what == "store" else measure_shards)(rollouts))
        print(orjson.dumps(figures).decode())
        return
    options = parse_options(__doc__.split("\n")[0])
    rollouts = 2_000 if options.quick else 10_000
    measured = {
        "encode": _apart("encode", rollouts // 5),
        **_apart("store", rollouts),
        **_apart("shards", rollouts),
    }
    rows = [
        {
            "what": name,
            "rollouts": int(figures["rollouts"]),
            "rollouts/s": figures["rollouts"] / figures["seconds"],
            "CPU us each": figures["cpu_s"] / figures["rollouts"] * 1e6,
            "kB each": figures["bytes"] / figures["rollouts"] / 1e3,
            "MB/s": figures["bytes"] / figures["seconds"] / 1e6,
            "peak MB": figures["peak_mb"],
        }
        for name, figures in measured.items()
    ]
    print_table(f"measured: {PROMPT} prompt and {RESPONSE} response tokens, log-probs", rows)
    projected = projection(measured)
    print_table(
        f"arithmetic: {ROLLOUTS / 1e6:.0f} M rollouts on {GPUS} GPUs at {TOKENS_PER_GPU} tokens/s each",
        projected,
    )
    write_json(options.json, "scaling", [*rows, *projected])


if __name__ == "__main__":
    main()
