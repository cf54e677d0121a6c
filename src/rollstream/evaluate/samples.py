"""Rollouts as they are judged: an entry each, of a run on the disk or of a loop of one's own."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from rollstream.data.mixed import SOURCE
from rollstream.errors import ConfigError
from rollstream.store.columns import RunColumns
from rollstream.store.manifest import no_run, read_manifest, shard_group
from rollstream.store.run import Run
from rollstream.store.summary import read_total
from rollstream.trajectory import Failure, Rollout
from rollstream.untrusted import open_regular

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Samples:
    """Rollouts, one entry each. A snapshot is no entry: its tool calls are counted to its rollout."""

    keys: Array
    """Keys of all prompts, sorted. Shape (P,)."""
    prompt: Array
    """Which of them. Shape (N,), as all that follow."""
    reward: Array
    """NaN: not scored, or failed."""
    failed: Array
    """Whether it failed for good: it has no reward, no length, and no turns."""
    truncated: Array
    """Whether it ended for its length."""
    tokens: Array
    """Of the final trajectory's response."""
    turns: Array
    tool_calls: Array
    tool_errors: Array

    def __len__(self) -> int:
        return len(self.prompt)

    def take(self, which: Array) -> "Samples":
        """Some of them, by place or by a mask."""
        entries = {
            field.name: getattr(self, field.name)[which] for field in fields(self) if field.name != "keys"
        }
        return replace(self, **entries)

    def with_missing(self, reward: float) -> "Samples":
        """The same with this reward for rollouts that failed or were not scored."""
        return replace(self, reward=np.where(np.isnan(self.reward), reward, self.reward))

    def prompt_means(self) -> Array:
        """The mean reward of each prompt; NaN where nothing is scored. Shape (P,)."""
        scored = ~np.isnan(self.reward)
        counts = np.bincount(self.prompt[scored], minlength=len(self.keys))
        sums = np.bincount(self.prompt[scored], self.reward[scored], len(self.keys))
        with np.errstate(invalid="ignore"):
            return np.asarray(sums / counts)


def samples_of(records: Iterable[Rollout | Failure]) -> Samples:
    """Rollouts of a loop of one's own, those that failed included."""
    keys, rows = list[bytes](), list[tuple[float, ...]]()
    for record in records:
        keys.append(record.prompt_key.encode())
        if isinstance(record, Failure):
            rows.append((np.nan, True, False, 0, 0, 0, 0))
            continue
        final, metrics = record.final, [trajectory.metrics for trajectory in record.trajectories]
        reward = np.nan if final.reward is None else final.reward
        calls, errors = (sum(getattr(one, name) for one in metrics) for name in ("tool_calls", "tool_errors"))
        is_cut = final.finish_reason == "length"
        rows.append((reward, False, is_cut, final.response_length, final.num_turns, calls, errors))
    distinct, prompt = np.unique(np.array(keys, "S32"), return_inverse=True)
    rewards, failed, truncated, *numbers = np.array(rows, np.float64).reshape(-1, 7).T
    return Samples(distinct, prompt, _finite(rewards), failed == 1, truncated == 1, *numbers)


def joined(parts: Sequence[Samples]) -> Samples:
    """The rollouts of several, as one."""
    parts = parts or [samples_of([])]
    keys, prompt = np.unique(np.concatenate([one.keys[one.prompt] for one in parts]), return_inverse=True)
    names = [one.name for one in fields(Samples)][2:]
    return Samples(keys, prompt, *(np.concatenate([getattr(one, name) for one in parts]) for name in names))


def samples_of_run(rows: RunColumns) -> Samples:
    """The rollouts of a run, completed ones by index and repeat, then those that failed."""
    order, starts = rows.groups()
    failures = rows.failures()
    failed_keys = np.array([one.prompt_key.encode() for one in failures], "S32")
    # A key for each prompt row, not for each rollout: they are compared byte by byte.
    keys, prompt = np.unique(
        np.concatenate([rows.prompt_keys(order[starts]), failed_keys]), return_inverse=True
    )
    each = np.repeat(prompt[: len(starts)], np.diff(np.append(starts, len(order))))
    final = ~rows["is_snapshot"][order]
    rollout = np.cumsum(final) - final  # snapshots come before their final trajectory
    chosen = order[final]

    def of_final(values: Array, failed: float) -> Array:
        return np.concatenate([values[chosen], np.full(len(failures), failed, values.dtype)])

    def total(name: str) -> Array:
        values = np.nan_to_num(rows[name][order].astype(np.float64))
        sums = np.bincount(rollout, values, len(chosen) + 1)[: len(chosen)]
        return np.concatenate([sums, np.zeros(len(failures))])

    return Samples(
        keys=keys,
        prompt=np.concatenate([each[final], prompt[len(starts) :]]),
        reward=of_final(_finite(rows["reward"]), np.nan),
        failed=np.arange(len(chosen) + len(failures)) >= len(chosen),
        truncated=of_final(rows.equals("finish_reason", "length"), False),
        tokens=of_final(rows["tokens"], 0),
        turns=of_final(rows["num_turns"], 0),
        tool_calls=total("tool_calls"),
        tool_errors=total("tool_errors"),
    )


@dataclass(frozen=True, slots=True)
class JudgedRun:
    """A run that was read to be judged."""

    name: str
    rows: RunColumns
    samples: Samples
    n: int | None
    """Rollouts of a prompt row; None of an exported file, which does not say."""
    total: int | None
    """Rollouts that it is to have; None where that is not known."""

    @property
    def unfinished(self) -> bool:
        """Whether there are rollouts to come."""
        return self.total is not None and len(self.samples) < self.total


def read_runs(
    places: Iterable[Path], names: Mapping[str, str] = MappingProxyType({}), scores: str | None = None
) -> Iterator[JudgedRun]:
    """The runs at some places, finished or being written; each is read when its turn comes.

    Args:
        places: run directories, folders of them (in the order of the numbers in their names), exported Parquet
            files. Shards of a run are one run.
        names: what to call runs, by their folders; others are called as their folders.
        scores: whose rewards; None: each run's own.

    Raises:
        ConfigError: there is no run at one of them.
        RunDirectoryError: a `run.json` cannot be read.
    """
    for name, parts in find_runs(places, scores):
        yield _read_run(names.get(name, name), parts)


def find_runs(places: Iterable[Path], scores: str | None = None) -> list[tuple[str, list[Run | Path]]]:
    """Names and folders of the runs at some places, each once. Arguments and errors as of `read_runs`."""
    runs = dict[object, tuple[str, dict[Path, Run | Path]]]()
    for part in [part for place in places for part in _parts(place, scores)]:
        root, group = (part.root, shard_group(part.manifest)) if isinstance(part, Run) else (part, None)
        _, parts = runs.setdefault(group or root.resolve(), (str(root), {}))
        parts.setdefault(root.resolve(), part)  # it may be named twice
    return [(name, [*parts.values()]) for name, parts in runs.values()]


def _parts(place: Path, scores: str | None) -> Sequence[Run | Path]:
    if place.is_file() and _may_be_parquet(place):
        return [place]
    if (manifest := read_manifest(place)) is not None:
        return [Run(place, manifest, scores)]
    inside = [path.parent for path in place.glob("*/run.json")]
    if not inside:
        raise ConfigError(f"{no_run(place)}, or a Parquet file that `rollstream export` made")
    inside.sort(key=lambda path: (path.is_symlink(), _in_order(path.name)))  # `latest` is one of the others
    return [Run.open(path, scores) for path in inside]


def _may_be_parquet(file: Path) -> bool:
    try:
        with open_regular(file) as content:
            return file.suffix == ".parquet" or content.read(4) == b"PAR1"
    except OSError:  # whoever reads it says why
        return True


def _in_order(name: str) -> list[tuple[int, str]]:
    """step-9 before step-10."""
    return [(int(word), "") if word.isdigit() else (-1, word) for word in re.split(r"(\d+)", name)]


def _read_run(name: str, parts: list[Run | Path]) -> JudgedRun:
    rows = RunColumns(parts)
    rows.refresh()
    runs = [part for part in parts if isinstance(part, Run)]
    totals = [read_total(run.root) for run in runs]
    total = None if not runs or None in totals else sum(one for one in totals if one is not None)
    if len(parts) > 1:
        name = f"{name} and {len(parts) - 1} more shards"
    return JudgedRun(name, rows, samples_of_run(rows), runs[0].manifest.n if runs else None, total)


def labels_of_run(rows: RunColumns, name: str) -> list[str | None]:
    """What a column says of each of `samples_of_run`, as text; None: nothing.

    A rollout that failed has what all others of its prompt row have, if that is the same.

    Args:
        rows: of the run.
        name: a column; or what prompt rows have in a column of their own, with dots into it: `extra_info.level`.

    Raises:
        ConfigError: there is no such column.
    """
    order, _ = rows.groups()
    chosen = order[~rows["is_snapshot"][order]]
    known = [one["name"] for one in rows.columns()]
    found = rows.values(name, chosen) if name in known else _from_extra(rows, chosen, name)
    labels = [None if one is None else _text(one) for one in found]
    if len(chosen) and not any(label is not None for label in labels):
        raise ConfigError(
            f"no rollout has a column {name!r}; besides those of the prompt rows: {', '.join(known)}"
        )
    failures = rows.failures()
    wanted, by_row = {one.index for one in failures}, dict[int, set[str | None]]()
    if wanted:
        for index, label in zip(rows["index"][chosen].tolist(), labels, strict=True):
            if index in wanted:
                by_row.setdefault(index, set()).add(label)
    of_failures = [by_row.get(one.index, set()) for one in failures]
    return labels + [next(iter(some)) if len(some) == 1 else None for some in of_failures]


def figures_of_sources(rows: RunColumns) -> dict[str, dict[str, float | None]]:
    """What is done and failed of each of a run's `data.sources`, and its mean reward.

    A rollout that failed counts where others of its prompt row say the source, else under "".
    """
    samples = samples_of_run(rows)
    labels = np.array([label or "" for label in labels_of_run(rows, SOURCE)], object)
    figures = dict[str, dict[str, float | None]]()
    for name in sorted({*labels.tolist()}):
        some = samples.take(labels == name)
        scored = some.reward[~np.isnan(some.reward)]
        failed = int(some.failed.sum())
        mean = float(scored.mean()) if len(scored) else None
        figures[name] = {"completed": len(some) - failed, "failed": failed, "mean_reward": mean}
    return figures


def _from_extra(rows: RunColumns, chosen: Array, name: str) -> list[Any]:
    found: dict[int, Any] = {}
    for numbers, table in rows.read(chosen, ["extra"]):
        for number, text in zip(numbers.tolist(), table["extra"].to_pylist(), strict=True):
            value = orjson.loads(text) if number >= 0 and text else None
            for word in name.split("."):
                value = value.get(word) if isinstance(value, dict) else None
            found[number] = value
    return [found.get(row) for row in chosen.tolist()]


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def _finite(rewards: Array) -> Array:
    """Infinite rewards are no numbers to take a mean of: not scored."""
    return np.where(np.isfinite(rewards), rewards, np.nan)
