"""Exports and merges: time, size, and peak memory against what the output takes.

    python -m bench.export [--quick] [--json FILE]

`merge`: rollouts in four shards (batches of 1000 rows, 32 prompt and 32 response tokens) become one run
directory: validated, copied, sorted into its artifact. Aim: under 1 GB for a million.

`dataproto`: rollouts of up to 64 prompt and 512 response tokens (a long tail: 90 on average) as DataProto, in
one file and in ten. Bound: 1.1 times a file, 256 MB, and what torch and tensordict take by themselves.

Each is measured in a process of its own.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from bench.report import parse_options, peak_rss_mb, print_table, write_json
from rollstream.store.batch import batch_metadata, build_table, write_tables_durably
from rollstream.store.manifest import SHARD_IDENTITY, new_manifest
from rollstream.store.records import RecordCodec, RolloutRecord
from rollstream.store.run_dir import lock_run, open_run
from rollstream.store.summary import write_checkpoint
from rollstream.trajectory import Metrics, Rollout, Trajectory

N = 4
BATCH_ROWS = 1000
SHARDS = 4
FILES = 10
SPARE_MB = 256


def make_run(root: Path, rollouts: int, *, shard: int | None, longest: int) -> None:
    """Writes a sealed run of this many rollouts: the whole of one, or one of `SHARDS` shards."""
    identity: dict[str, Any] = {"bench": "export"}
    if shard is not None:
        identity[SHARD_IDENTITY] = f"{shard}/{SHARDS}"
    manifest = new_manifest(n=N, identity=identity, dataset={}, versions={}, config={})
    with open_run(lock_run(root), root, manifest, config_yaml="{}\n") as run:
        templates = [build_table([_record(i, longest) for i in _numbers(part)]) for part in range(4)]
        for number in range(rollouts // BATCH_ROWS):
            template = templates[number % len(templates)]
            rows = np.arange(number * BATCH_ROWS, (number + 1) * BATCH_ROWS) // N
            index = rows if shard is None else rows * SHARDS + shard
            table = _fresh(template, number + 100_000 * (shard or 0)).set_column(
                0, template.schema.field(0), pa.array(index)
            )
            write_tables_durably(run.paths.batch(number), [table], batch_metadata(run.manifest.run_id_bytes))
    with open_run(lock_run(root), root, manifest, config_yaml="{}\n") as run:
        write_checkpoint(run.paths, run.manifest, run.state, total=rollouts)


def _fresh(template: pa.Table, seed: int) -> pa.Table:
    """The same lengths with tokens and log-probs of its own: repeated ones would be compressed away."""
    rng = np.random.default_rng(seed)
    for name in ("prompt_ids", "response_ids", "response_logprobs"):
        column = template[name].combine_chunks()
        size = len(column.values)
        values = -rng.random(size) if name == "response_logprobs" else rng.integers(0, 32_000, size)
        fresh = pa.ListArray.from_arrays(column.offsets, pa.array(values).cast(column.values.type))
        template = template.set_column(
            template.schema.get_field_index(name), template.schema.field(name), fresh
        )
    return template


def _numbers(part: int) -> range:
    return range(part * BATCH_ROWS, (part + 1) * BATCH_ROWS)


def _record(seed: int, longest: int) -> RolloutRecord:
    rng = np.random.default_rng(seed)
    prompt = int(rng.integers(16, 65)) if longest > 32 else 32
    response = min(longest, 8 + int(80 * rng.pareto(1.5))) if longest > 32 else longest
    codec = RecordCodec()
    trajectory = Trajectory(
        prompt_ids=rng.integers(0, 32_000, prompt).tolist(),
        response_ids=rng.integers(0, 32_000, response).tolist(),
        response_mask=[1] * response,
        response_logprobs=(-rng.random(response)).tolist(),
        messages=[
            {"role": "user", "content": f"question {seed}"},
            {"role": "assistant", "content": "word " * response},
        ],
        finish_reason="stop",
        reward=float(rng.random()),
        metrics=Metrics(engine_calls=1),
    )
    rollout = Rollout(seed, seed % N, f"{seed:032x}", [trajectory], "bench", ground_truth=str(seed))
    return codec.decode_rollout(codec.encode(rollout).body)


def measure_merge(folder: Path) -> dict[str, float]:
    """In this process."""
    from rollstream.store.merge_shards import merge_shards

    before, started = peak_rss_mb(), time.perf_counter()
    roots = [folder / f"shard{number}" for number in range(SHARDS)]
    merged = merge_shards(roots, folder / "merged")
    artifact = folder / "merged" / "trajectories.parquet"
    return {
        "rows": merged.rows,
        "seconds": time.perf_counter() - started,
        "output MB": artifact.stat().st_size / 1e6,
        "peak MB": peak_rss_mb(),
        "imports MB": before,
    }


def measure_dataproto(folder: Path, files: int) -> dict[str, float]:
    """In this process."""
    import tensordict
    import torch

    from rollstream.store.export.dataproto import dataproto_files
    from rollstream.store.export.run import export_run

    tensordict.TensorDict({"a": torch.zeros(1, 1)}, batch_size=[1]).consolidate()
    target = folder / "out.pkl"
    run = folder / "run"
    rows = export_run(run, "parquet").rows
    before, started = peak_rss_mb(), time.perf_counter()
    options = {"pad_token_id": 0, "max_rows_per_file": -(-rows // files)}
    export_run(run, "dataproto", target, force=True, options=options)
    seconds = time.perf_counter() - started
    size = sum(path.stat().st_size for path in dataproto_files(target)) / 1e6
    return {
        "rows": rows,
        "seconds": seconds,
        "output MB": size,
        "peak MB": peak_rss_mb(),
        "imports MB": before,
    }


def main() -> None:
    """Runs the benchmark."""
    if len(sys.argv) > 1 and sys.argv[1] == "--measure":
        folder = Path(sys.argv[3])
        result = (
            measure_merge(folder) if sys.argv[2] == "merge" else measure_dataproto(folder, int(sys.argv[4]))
        )
        print(orjson.dumps(result).decode())
        return
    options = parse_options(__doc__.split("\n")[0])
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = 40_000 if options.quick else 1_000_000
        for shard in range(SHARDS):
            make_run(folder / f"shard{shard}", size // SHARDS, shard=shard, longest=32)
        rows.append({"what": f"merge {SHARDS} shards", **_measured("merge", folder)})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_run(folder / "run", 4_000 if options.quick else 50_000, shard=None, longest=512)
        for files in (1, FILES):
            rows.append({"what": f"dataproto, files: {files}", **_measured("dataproto", folder, str(files))})
    print_table("exports (aims: merge of 1 M under 1000 MB; dataproto within its bound)", rows)
    write_json(options.json, "export", rows)


def _measured(what: str, folder: Path, *words: str) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.export", "--measure", what, str(folder), *words]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    result: dict[str, float] = orjson.loads(done.stdout)
    if what == "merge":
        return {**result, "bound MB": 1000.0}
    # Objects are a small part here: the file's own size covers tensors and text.
    one = result["output MB"] / int(words[0])
    return {**result, "bound MB": 1.1 * one + SPARE_MB + result["imports MB"]}


if __name__ == "__main__":
    main()
