"""Runs to look at: of agents, hostile ones, one that is being written, large ones.

python -m tests.support.view_runs FOLDER [--live SECONDS] [--large ROWS]
"""

import argparse
import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from rollstream.demo import MODEL_PATH
from rollstream.store.batch import (
    METRIC_NAMES,
    SCHEMA,
    batch_metadata,
    write_tables_durably,
)
from rollstream.store.manifest import Manifest, new_manifest
from rollstream.store.run_dir import RunDirectory, lock_run, open_run
from rollstream.store.writer import StoreWriter
from rollstream.trajectory import CALL_TIMES, Failure, Metrics, Rollout, Trajectory

PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAABAAAAAQCAIAAACQkWg2AAAAFklEQVR42mP4z8BAEmIY1TCqYfhqAABQAf8BkWxPWgAA"
    "AABJRU5ErkJggg=="
)

SCRIPT = "<script>document.title='hacked';window.hacked=1</script><img src=x onerror=\"window.hacked=1\">"
HOSTILE = (
    SCRIPT,
    "\x1b[31mred\x1b[0m \x07\x08 bell",
    "nul \x00 byte, \u202egnp.elif\u202c bidi, zero\u200bwidth, \ufeffmark",
    "javascript:alert(1) [x](javascript:alert(1)) ![i](http://192.0.2.1/i.png)",
    "]]>--></textarea></style></title>" + SCRIPT,
    "\U0001f600 emoji \U0001f1e9\U0001f1ea, e\u0301\u0301\u0301\u0301",
)


def manifest(n: int = 4, prompts: int = 0, **identity: Any) -> Manifest:
    """A manifest of the demo model's tokenizer."""
    return new_manifest(
        n=n,
        identity={"data.rows.count": prompts, **identity},
        dataset={},
        versions={},
        config={"actor_rollout_ref": {"model": {"path": str(MODEL_PATH)}}},
    )


@contextlib.contextmanager
def opened(root: Path, n: int = 4, prompts: int = 0, **identity: Any) -> Iterator[RunDirectory]:
    """A run directory that is there or is made, with its lock."""
    with open_run(
        *(lock_run(root), root, manifest(n, prompts, **identity)),
        config_yaml="{}\n",
        tokenizer=(MODEL_PATH / "tokenizer.json").read_bytes(),
    ) as run:
        yield run


@contextlib.asynccontextmanager
async def writing(
    root: Path, *, n: int = 4, prompts: int = 0, rows: int = 64, seal: bool = True, **identity: Any
) -> AsyncIterator[StoreWriter]:
    """A writer of a run; `seal`: at the end everything is in batches."""
    with opened(root, n, prompts, **identity) as run:
        (root / "checkpoint.json").write_bytes(orjson.dumps({"total": n * prompts}))
        writer = StoreWriter(run, save_batch_size=rows, pull_timeout=600)
        writer.start()
        try:
            yield writer
        finally:
            await writer.close(seal=seal)


def write_run(root: Path, records: Iterable[Rollout | Failure], **how: Any) -> Path:
    """Writes a run of these."""

    async def write() -> None:
        async with writing(root, **how) as writer:
            for record in records:
                await writer.commit(record)

    asyncio.run(write())
    return root


def rollout(
    index: int,
    repeat: int,
    text: str = "4",
    *,
    reward: float | None = 1.0,
    prompt: str = "What is 2 + 2?",
    source: str = "sums",
    finish: str = "stop",
    length: int = 4,
    **more: Any,
) -> Rollout:
    """A rollout of one turn."""
    rng = random.Random(1000 * index + repeat)
    fields: dict[str, Any] = {
        "prompt_ids": [1, 369, 201, 320, 381, 298, 380, 16, 2, 201],
        "response_ids": [rng.randrange(3, 400) for _ in range(length - 1)] + [2],
        "response_mask": [1] * length,
        "response_logprobs": [-(rng.random() ** 2) for _ in range(length)],
        "messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}],
        "finish_reason": finish,
        "reward": reward,
        "num_turns": 2,
        "metrics": Metrics(
            queue_s=0.01, generate_s=0.1 * length, reward_s=0.002, total_s=0.2, engine_calls=1
        ),
    }
    trajectory = Trajectory(**{**fields, **more})
    return Rollout(index, repeat, f"{index:032x}", [trajectory], source, ground_truth="4")


def failure(index: int, repeat: int, error: str = "ValueError: tool 7 raised") -> Failure:
    """A rollout that failed."""
    where = f'Traceback (most recent call last):\n  File "agent.py", line 7, in run\n{error}'
    return Failure(index, repeat, f"{index:032x}", 3, "agent", error, where, 1_700_000_000.0)


def agent_rollout(index: int, repeat: int, *, snapshots: int = 0) -> Rollout:
    """A rollout of an agent that thinks, calls a tool, is shown an image, and may forget what it read."""
    rng = random.Random(31 * index + repeat)
    question = f"Weather in city {index}? Think first, then look it up, then say which clothes to take."
    good = rng.random() < 0.3 + 0.1 * (index % 6)
    call = {"name": "weather", "arguments": {"city": f"city {index}", "days": 3}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are a helpful assistant with tools."},
        {"role": "user", "content": [{"type": "text", "text": question}, {"type": "image", "image": PIXEL}]},
        {
            "role": "assistant",
            "reasoning_content": "The user wants the weather. I have a tool for it.\nI call it once.",
            "content": "I look it up.",
            "tool_calls": [{"id": "call_0", "type": "function", "function": call}],
        },
        {
            "role": "tool",
            "tool_call_id": "call_0",
            "content": '{"temperature": 21, "sky": "clear", "wind": 3.5}',
        },
        {
            "role": "assistant",
            "content": "Light clothes: 21 degrees, clear sky." if good else "A heavy coat, and boots!",
        },
    ]
    sizes, masks = [rng.randrange(20, 60), rng.randrange(10, 20), rng.randrange(15, 40)], [1, 0, 1]
    mask = list(
        itertools.chain.from_iterable([value] * size for value, size in zip(masks, sizes, strict=True))
    )
    ids = [rng.randrange(3, 400) for _ in mask]
    parts = {"correct": float(good), "format": round(rng.random(), 3), "length_penalty": -0.001 * len(ids)}
    trainer = [-(rng.random() ** 3) for _ in mask]

    def trajectory(number: int) -> Trajectory:
        last = number == snapshots
        kept = (
            [one for at, one in enumerate(messages) if last or at <= 3]
            if number == 0
            else [one for at, one in enumerate(messages) if at != 3 or number % 2]
        )
        return Trajectory(
            prompt_ids=[1, 369, 201, 320, 381, 298, 380, 16, 2, 201],
            response_ids=ids,
            response_mask=mask,
            response_logprobs=[(-(rng.random() ** 3)) * 4 if one else 0.0 for one in mask],
            messages=kept,
            finish_reason="stop" if rng.random() < 0.8 else "length",
            policy_versions=[(0, index // 4), (sizes[0] + sizes[1], index // 4 + 1)],
            is_snapshot=not last,
            num_turns=4,
            reward=float(good) if last else None,
            reward_extra=parts if last else {},
            metrics=Metrics(0.1, 1.5 * rng.random(), 0.4, 0.05, 2.1, 2, 30, 1, wrong := rng.random() < 0.2),
            extra={
                "trainer_logprobs": trainer,
                "entropy": [-4 * one for one in trainer],
                "tool_counts": {"weather": [1, int(wrong)]},
                **(
                    {CALL_TIMES: [["generate", 0.0, 0.9], ["tool", 0.9, 0.4], ["generate", 1.3, 0.6]]}
                    if last
                    else {}
                ),
            },
        )

    numbers = [trajectory(number) for number in range(snapshots + 1)]
    return Rollout(
        index, repeat, f"{index:032x}", numbers, f"agent/{index % 3}", ground_truth={"clothes": "light"}
    )


def session_rollout(index: int, repeat: int) -> Rollout:
    """A rollout of a program that asks for a title beside its question."""
    made = rollout(index, repeat, "131")
    side = rollout(index, repeat, "A sum", prompt="Write a title.").final
    side.is_snapshot, side.reward = True, None
    side.extra = {"gateway": {"side_call": True}, CALL_TIMES: [["generate", 0.0, 0.02]]}
    made.final.extra = {CALL_TIMES: [["generate", 0.0, 0.1], ["generate", 0.15, 0.04]]}
    made.trajectories.insert(0, side)
    return made


def agent_run(root: Path, prompts: int = 24, n: int = 4) -> Path:
    """A run of agents: tools, thinking, images, snapshots, failures, a group without rewards."""
    records: list[Rollout | Failure] = []
    for index in range(prompts):
        for repeat in range(n):
            if (index + repeat) % 17 == 16:
                error = (
                    "TimeoutError: the tool took longer than 30 s"
                    if index % 2
                    else f"ValueError: no city {index}"
                )
                records.append(failure(index, repeat, error))
                continue
            one = agent_rollout(index, repeat, snapshots=2 if index % 5 == 0 else 0)
            if index == 7:
                one.final.reward = None
            records.append(one)
    return write_run(root, records, n=n, prompts=prompts)


def hostile_run(root: Path) -> Path:
    """Model output that a page must only ever show as text."""
    records: list[Rollout | Failure] = []
    for index, text in enumerate(HOSTILE):
        made = rollout(index, 0, text, prompt=text, source=text, finish="stop" if index else SCRIPT[:40])
        made.final.reward_extra = {SCRIPT: 1.0, "said": text}
        made.final.messages += [
            {"role": SCRIPT, "content": text, "name": text},
            {
                "role": "assistant",
                "content": [{"type": "image", "image": "data:text/html;base64,PHNjcmlwdD4="}],
            },
            {
                "role": "assistant",
                "content": [{"type": "image_url", "image_url": {"url": "http://192.0.2.1/i.png"}}],
            },
            {
                "role": "tool",
                "content": None,
                "tool_calls": [{"function": {"name": text, "arguments": text}}],
            },
        ]
        records += [made, failure(index, 1, f"{SCRIPT}: {text}")]
    records.append(rollout(len(HOSTILE), 0, "x" * 10_000_000))
    records.append(rollout(len(HOSTILE) + 1, 0, "line\n" * 200_000))
    return write_run(root, records, n=2, prompts=len(HOSTILE) + 2)


def long_run(root: Path, tokens: int = 32_000) -> Path:
    """One trajectory of very many tokens, and answers that were cut off."""
    records = [rollout(0, 0, "word " * tokens, length=tokens)]
    records += [rollout(1, repeat, "cut off", length=512, finish="length", reward=0.0) for repeat in range(4)]
    return write_run(root, records, prompts=2)


async def live_run(root: Path, seconds: float, rate: float = 20.0) -> None:
    """Writes a run at this many rollouts a second."""
    prompts = max(1, int(seconds * rate / 4))
    began = time.monotonic()
    async with writing(root, prompts=prompts, rows=200) as writer:
        for number in range(prompts * 4):
            await asyncio.sleep(max(0.0, began + number / rate - time.monotonic()))
            await writer.commit(rollout(number // 4, number % 4, reward=float(random.random() < 0.6)))


def large_run(root: Path, rows: int, *, n: int = 8, tokens: int = 48, sealed_rows: int | None = None) -> Path:
    """A run of very many rollouts, made of arrays; `sealed_rows` to a batch, else as one artifact."""
    with opened(root, n=n, prompts=rows // n) as run:
        run_id = run.manifest.run_id_bytes
        if sealed_rows is None:
            tables = (
                _table(start, min(rows, start + (1 << 14)), n, tokens) for start in range(0, rows, 1 << 14)
            )
            write_tables_durably(
                run.paths.artifact, tables, batch_metadata(run_id) | {"rollstream.batches": ""}
            )
        else:
            for number, start in enumerate(range(0, rows, sealed_rows)):
                table = _table(start, min(rows, start + sealed_rows), n, tokens)
                write_tables_durably(run.paths.batch(number), [table], batch_metadata(run_id))
    checkpoint = {
        "total": rows,
        "completed": rows,
        "failed": 0,
        "unscored": 0,
        "mean_reward": 0.5,
        "rows": rows,
    }
    (root / "checkpoint.json").write_bytes(orjson.dumps(checkpoint))
    return root


def _table(start: int, end: int, n: int, tokens: int) -> pa.Table:
    rng = np.random.default_rng(start)
    count, at = end - start, np.arange(start, end)
    lengths = rng.integers(tokens // 2, tokens + 1, count)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    total = int(lengths.sum())
    prompt_offsets = pa.array(np.arange(count + 1, dtype=np.int32) * 16)
    index = at // n
    reward = np.round(rng.random(count) ** 2, 2)

    def text(values: Sequence[str] | np.ndarray[Any, Any]) -> pa.Array:
        return pa.array(values, pa.string())

    def pick(names: list[str]) -> pa.Array:
        return text(np.array(names)[rng.integers(0, len(names), count)])

    messages = text(
        [
            f'[{{"role":"user","content":"Question {row // n}: what is {row // n} times {row % 97}?"}},'
            f'{{"role":"assistant","content":"It is {row // n * (row % 97)}."}}]'
            for row in at.tolist()
        ]
    )
    ids = pa.array(rng.integers(3, 400, total).astype(np.int32))
    versions = pa.StructArray.from_arrays(
        [pa.array(np.zeros(count, np.int32)), pa.array((index // 1000).astype(np.int64))],
        ["start", "version"],
    )
    logprobs = -rng.random(total, np.float32)
    columns = {
        "index": pa.array(index.astype(np.int64)),
        "repeat": pa.array((at % n).astype(np.int32)),
        "trajectory": pa.array(np.zeros(count, np.int32)),
        "prompt_key": text([f"{one:032x}" for one in index.tolist()]),
        "prompt_ids": pa.ListArray.from_arrays(prompt_offsets, pa.array(np.full(count * 16, 20, np.int32))),
        "response_ids": pa.ListArray.from_arrays(offsets, ids),
        "response_mask": pa.ListArray.from_arrays(offsets, pa.array(np.ones(total, np.int8))),
        "response_logprobs": pa.ListArray.from_arrays(offsets, pa.array(logprobs)),
        "policy_versions": pa.ListArray.from_arrays(pa.array(np.arange(count + 1, dtype=np.int32)), versions),
        "messages": messages,
        "is_snapshot": pa.array(np.zeros(count, bool)),
        "num_turns": pa.array(rng.integers(2, 9, count).astype(np.int32)),
        "finish_reason": pick(["stop", "stop", "stop", "length", "max_turns"]),
        "reward": pa.array(reward, mask=rng.random(count) < 0.01),
        "reward_extra": pick(["{}", '{"format":1.0}', '{"format":0.0}']),
        "metrics": pa.StructArray.from_arrays(
            [pa.array(np.abs(rng.normal(1, 0.5, count))) for _ in METRIC_NAMES], list(METRIC_NAMES)
        ),
        "attempts": pa.array(np.ones(count, np.int32)),
        "data_source": pick(["math", "code", "agent"]),
        "ground_truth": text(['"42"'] * count),
        "extra": text(["{}"] * count),
    }
    counted = pa.array(lengths.astype(np.int32))
    columns |= {"prompt_tokens": pa.array(np.full(count, 16, np.int32)), "response_tokens": counted}
    columns |= {"sampled_tokens": counted, "finished_at": pa.array(1.7e9 + at / 1000)}
    sums = np.add.reduceat(logprobs, offsets.to_numpy()[:-1])
    columns["mean_logprob"] = pa.array((sums / lengths).astype(np.float32))
    return pa.Table.from_arrays([columns[name] for name in SCHEMA.names], schema=SCHEMA)


def main() -> None:
    """Makes the runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--live", type=float, metavar="SECONDS")
    parser.add_argument("--large", type=int, metavar="ROWS")
    options = parser.parse_args()
    if options.live:
        return asyncio.run(live_run(options.folder, options.live))
    if options.large:
        large_run(options.folder, options.large)
        return None
    agent_run(options.folder / "agent")
    hostile_run(options.folder / "hostile")
    long_run(options.folder / "long")
    return None


if __name__ == "__main__":
    main()
