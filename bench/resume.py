"""Opening a run with many finished rollouts: time and memory, against reading the same key columns bare.

    python -m bench.resume [--quick] [--json FILE]

The run directory is made first: batches of `generation.save_batch_size`'s default (1000 rows), rows of 32
prompt and 32 response tokens. Opening is measured in a fresh process, since memory is part of the question:
lock, manifest, keys of every batch, owed rollouts. The floor reads the two key columns of the same files
with pyarrow alone, one after the other.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from bench.report import parse_options, peak_rss_mb, print_table, write_json
from rollstream.store.batch import batch_metadata, build_table, write_tables_durably
from rollstream.store.manifest import Manifest, new_manifest
from rollstream.store.records import RecordCodec
from rollstream.store.run_dir import lock_run, open_run
from rollstream.trajectory import Rollout, Trajectory

N = 4
BATCH_ROWS = 1000


def make_run(root: Path, rollouts: int) -> None:
    """Writes a sealed run of this many rollouts."""
    manifest = _manifest()
    with open_run(lock_run(root), root, manifest, config_yaml="{}\n") as run:
        run_id = run.manifest.run_id_bytes
        codec = RecordCodec()
        records = [
            codec.decode_rollout(
                codec.encode(
                    Rollout(i // N, i % N, f"{i // N:032x}", [_trajectory(i)], "bench", ground_truth=str(i))
                ).body
            )
            for i in range(BATCH_ROWS)
        ]
        template = build_table(records)
        for number in range(rollouts // BATCH_ROWS):
            rows = np.arange(number * BATCH_ROWS, (number + 1) * BATCH_ROWS)
            table = template.set_column(0, template.schema.field(0), pa.array(rows // N))
            write_tables_durably(run.paths.batch(number), [table], batch_metadata(run_id))


def _trajectory(seed: int) -> Trajectory:
    rng = np.random.default_rng(seed)
    return Trajectory(
        prompt_ids=rng.integers(0, 32_000, 32).tolist(),
        response_ids=rng.integers(0, 32_000, 32).tolist(),
        response_mask=[1] * 32,
        response_logprobs=(-rng.random(32)).tolist(),
        messages=[{"role": "user", "content": f"question {seed}"}],
        finish_reason="stop",
        reward=float(rng.random()),
    )


def _manifest() -> Manifest:
    return new_manifest(n=N, identity={"bench": "resume"}, dataset={}, versions={}, config={})


def measure_open(root: Path, rollouts: int) -> dict[str, float]:
    """In this process: opens the run and asks for what is owed."""
    before = peak_rss_mb()
    started = time.perf_counter()
    with open_run(lock_run(root), root, _manifest(), config_yaml="{}\n") as run:
        order = np.arange(rollouts // N)
        done, _ = run.state.keys.count(order)
        owed = next(run.state.keys.owed(order, retry_failed=False), None)
        elapsed = time.perf_counter() - started
    assert done == rollouts
    assert owed is None
    return {"seconds": elapsed, "peak_mb": peak_rss_mb(), "imports_mb": before}


def measure_floor(root: Path) -> dict[str, float]:
    """In this process: reads the key columns with pyarrow, nothing else."""
    before = peak_rss_mb()
    started = time.perf_counter()
    rows = 0
    for path in sorted((root / "batches").glob("*.parquet")):
        rows += len(pq.ParquetFile(path).read(["index", "repeat"], use_threads=False))
    return {"seconds": time.perf_counter() - started, "peak_mb": peak_rss_mb(), "imports_mb": before}


def main() -> None:
    """Runs the benchmark."""
    if len(sys.argv) > 1 and sys.argv[1] == "--measure":
        measured = Path(sys.argv[3])
        result = (
            measure_open(measured, int(sys.argv[4])) if sys.argv[2] == "open" else measure_floor(measured)
        )
        print(orjson.dumps(result).decode())
        return
    options = parse_options(__doc__.split("\n")[0])
    rows = []
    for rollouts in (20_000, 100_000) if options.quick else (100_000, 1_000_000):
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder) / "run"
            make_run(root, rollouts)
            for what in ("floor", "open"):
                command = [sys.executable, "-m", "bench.resume", "--measure", what, str(root), str(rollouts)]
                result = orjson.loads(subprocess.run(command, check=True, capture_output=True).stdout)
                rows.append({"finished rollouts": rollouts, "what": what, **result})
    print_table("opening a run (aim at 1 M: under 3 s and 300 MB)", rows)
    write_json(options.json, "resume", rows)


if __name__ == "__main__":
    main()
