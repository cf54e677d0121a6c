"""Rollouts and runs for the store's tests."""

import asyncio
import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from rollstream.store.manifest import Manifest, new_manifest
from rollstream.store.merge import merge_batches
from rollstream.store.run_dir import RunDirectory, lock_run, open_run
from rollstream.store.summary import write_checkpoint
from rollstream.store.writer import StoreWriter
from rollstream.trajectory import Failure, Rollout, Trajectory

N = 2


def manifest(**identity: object) -> Manifest:
    return new_manifest(n=N, identity={"rollout.n": N, **identity}, dataset={}, versions={}, config={"a": 1})


def open_dir(root: Path, **identity: object) -> RunDirectory:
    return open_run(lock_run(root), root, manifest(**identity), config_yaml="a: 1\n")


@contextlib.contextmanager
def writing(
    root: Path, *, identity: Mapping[str, object] | None = None, pull_timeout: float = 60, **settings: Any
) -> Iterator[tuple[RunDirectory, StoreWriter]]:
    """A run directory, and a writer that has been started; the test closes it."""
    with open_dir(root, **(identity or {})) as run:
        writer = StoreWriter(run, pull_timeout=pull_timeout, **settings)
        writer.start()
        yield run, writer


def merge(root: Path, **identity: object) -> None:
    with open_dir(root, **identity) as run:
        merge_batches(run.paths, run.manifest.run_id_bytes)


def rollout(
    index: int, repeat: int = 0, *, trajectories: int = 1, reward: float | None = 0.5, key: str | None = None
) -> Rollout:
    rng = random.Random(index * 7 + repeat)
    rows = []
    for number in range(trajectories):
        length = rng.randint(0, 9)
        rows.append(
            Trajectory(
                prompt_ids=[rng.randrange(500) for _ in range(5)],
                response_ids=[rng.randrange(500) for _ in range(length)],
                response_mask=[rng.randint(0, 1) for _ in range(length)],
                response_logprobs=[-rng.random() for _ in range(length)],
                messages=[{"role": "user", "content": f"q{index}"}],
                finish_reason="stop",
                is_snapshot=number < trajectories - 1,
                reward=reward,
            )
        )
    prompt_key = f"{index:032x}" if key is None else key
    return Rollout(index, repeat, prompt_key, rows, "test", ground_truth={"answer": index})


def failure(index: int, key: str | None = None) -> Failure:
    prompt_key = f"{index:032x}" if key is None else key
    return Failure(index, 0, prompt_key, 3, "agent", "ValueError: no", "Traceback", 1.0)


def keys_on_disk(root: Path) -> list[tuple[int, int, int]]:
    rows: list[tuple[int, int, int]] = []
    for path in sorted((root / "batches").glob("*.parquet")):
        rows += keys_in(path)
    return sorted(rows)


def keys_in(path: Path) -> list[tuple[int, int, int]]:
    table = pq.read_table(path, columns=["index", "repeat", "trajectory"])
    return list(zip(*(table[name].to_pylist() for name in table.column_names), strict=True))


def flip(path: Path, share: float = 0.5, mask: int = 0xFF) -> bytes:
    """Damages one byte of a file; what is in it now."""
    data = bytearray(path.read_bytes())
    data[int(len(data) * share)] ^= mask
    path.write_bytes(data)
    return bytes(data)


async def commit_all(
    root: Path,
    records: Sequence[Rollout | Failure],
    *,
    size: int = 1000,
    seal: bool = True,
    **identity: object,
) -> None:
    with writing(root, identity=identity, save_batch_size=size) as (_, writer):
        await asyncio.gather(*(writer.commit(one) for one in records))
        await writer.close(seal=seal)


async def merged_run(root: Path, records: Sequence[Rollout | Failure], *, size: int = 1000) -> None:
    """A finished run with its artifact."""
    await commit_all(root, records, size=size)
    with open_dir(root) as run:
        merge_batches(run.paths, run.manifest.run_id_bytes)
        write_checkpoint(run.paths, run.manifest, run.state, total=len(records))
