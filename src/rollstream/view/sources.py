"""What the page opens: run directories, shards of one run, Parquet files, buffers, logs of trainings."""

import calendar
import contextlib
import hashlib
import itertools
import json
import os
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import pyarrow as pa

from rollstream.buffer.store.sqlite import FILE as DATABASE
from rollstream.chat.token_text import TokenText, read_token_text
from rollstream.errors import ConfigError, NotFoundError, RollstreamError, RunDirectoryError
from rollstream.evaluate.metrics import SOLVED_AT
from rollstream.store.arrow import to_arrow
from rollstream.store.columns import RunColumns
from rollstream.store.lock import is_locked
from rollstream.store.manifest import Manifest, read_manifest, shard_group
from rollstream.store.run import Run, read_checkpoint
from rollstream.store.scores import SCORED_COLUMNS, sidecar_names
from rollstream.store.streams import Stream
from rollstream.trajectory import REWARD_STREAMS, STREAMS, reward_values
from rollstream.untrusted import open_regular, read_regular
from rollstream.view.overview import Groups, group_figures, mean_interval
from rollstream.view.reader import Row

TRAINING_FILE: Final = "trainer_state.json"
GROUPS_FILE: Final = "rollstream_groups.jsonl"
"""Beside the checkpoints of a `GRPOEnvTrainer`, which writes it."""

_DEEPEST: Final = 3
"""Folders below the one that was named in which runs are looked for."""
_MOST_FOLDERS: Final = 2000
_FRESH_S: Final = 0.5
"""A run that is written is looked at twice a second at most, however many pages follow it."""
_PAUSE: Final = 10
"""Times as long as it took, after which a run is read anew because of other rewards: in a training that scores whole
groups they come all the time. What is new is read meanwhile.
"""
_LOCK_S: Final = 2.0
_MOST_LOG: Final = 1 << 28
"""Bytes of a trainer's log: some hundred thousand steps."""
_MOST_LINE: Final = 1 << 26
"""Bytes of a line about the groups of a batch."""
_MOST_ROWS: Final = 2_000_000
"""Of all runs that are held in memory, but for the one that was opened last: some 250 MB."""
_SMALL: Final = 50_000
"""Rows of a run that is read to describe it in the list; of a larger one `checkpoint.json` is believed."""
_DESCRIBED: Final = (
    *("model", "prompts", "n", "total", "done", "failed", "unscored", "reward_mean", "reward_interval"),
    *("tokens", "started", "state", "error"),
)

S = TypeVar("S", bound="ViewSource")


class ViewSource:
    """One thing that can be opened; `id` is the same for the same path. `error`: why it cannot be."""

    kind = "run"

    def __init__(self, name: str, path: str, error: str | None = None) -> None:
        self.name, self.path, self.error = name, path, error
        digest = hashlib.blake2b(path.encode("utf-8", "replace"), digest_size=4).hexdigest()
        self.id = f"{re.sub(r'[^A-Za-z0-9]+', '-', name).strip('-')[:40] or 'source'}-{digest}"

    def describe(self) -> dict[str, Any]:
        """Its line in the list of sources."""
        name, path = (text.encode("utf-8", "replace").decode() for text in (self.name, self.path))
        line = dict.fromkeys(_DESCRIBED) | {"id": self.id, "kind": self.kind, "name": name, "path": path}
        return line if self.error is None else line | {"state": "damaged", "error": self.error}


class BufferSource(ViewSource):
    """A buffer, by its folder or its URL; the URL may hold its token, which is not shown."""

    kind = "buffer"

    def __init__(self, name: str, path: str, address: str = "") -> None:
        super().__init__(name, path)
        self.address = address or path


class _TrainedBatch(msgspec.Struct):
    """A line about a batch that a training trained on."""

    first: int
    step: int
    groups: list[dict[str, Any]]


class TrainingSource(ViewSource):
    """The folder of a trainer: the log in its newest `trainer_state.json`, and the groups that it trained on."""

    kind = "training"

    def read(self) -> dict[str, Any]:
        """The figures of all steps. Raises `NotFoundError`."""
        path, steps = training_log(Path(self.path)), defaultdict[int, dict[str, float]](dict)
        try:  # Python's own reader: the log may have NaN
            log = [] if path is None else json.loads(read_regular(path, _MOST_LOG))["log_history"]
            for line in log:
                numbers = {name: value for name, value in line.items() if isinstance(value, int | float)}
                steps[int(numbers.pop("step"))] |= numbers
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise NotFoundError(f"{path} cannot be read as a training's log: {error}") from error
        for batch in self._batches():  # also of steps after the last checkpoint
            scored = [group for group in batch.groups if isinstance(group.get("mean"), int | float)]
            if scored:
                equal = sum(group.get("spread") == 0 and group.get("scored") != 1 for group in scored)
                steps[batch.step]["groups/reward"] = fmean(group["mean"] for group in scored)
                steps[batch.step]["groups/teach_nothing"] = equal / len(scored)
        order = sorted(steps)
        names = dict.fromkeys(name for step in order for name in steps[step])
        return {"steps": order, "series": {name: [steps[step].get(name) for step in order] for name in names}}

    def groups(self, after: int, step: int) -> list[dict[str, Any]]:
        """The groups of the batches that were trained after a step, up to another."""
        batches = [batch for batch in self._batches() if batch.first <= step and batch.step > after]
        return [{"step": batch.step, **group} for batch in batches for group in batch.groups]

    def _batches(self) -> list[_TrainedBatch]:
        """The batches by their first step; of one that was trained twice the last line."""
        batches: dict[int, _TrainedBatch] = {}
        with contextlib.suppress(OSError), open_regular(Path(self.path) / GROUPS_FILE) as lines:
            while line := lines.readline(_MOST_LINE):
                with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):  # a torn line
                    batch = msgspec.json.decode(line, type=_TrainedBatch)
                    batches[batch.first] = batch
        return [batches[first] for first in sorted(batches)]


class RunSource(ViewSource):
    """A run, in one directory or several shards, or an exported Parquet file. It is read when it is asked for."""

    def __init__(self, name: str, parts: Sequence[Run | Path], solved_at: float) -> None:
        super().__init__(name, " ".join(str(_root(part)) for part in parts))
        self.kind = "run" if isinstance(parts[0], Run) else "parquet"
        self.used = 0.0
        self._parts, self._solved_at = parts, solved_at
        self._content: list[tuple[str, str]] | None = None
        self._columns: RunColumns | None = None
        self._seen: RunColumns | None = None
        self._groups: tuple[RunColumns, Groups] | None = None
        self._lock = threading.Lock()
        self._looked = self._asked = self._rereads = 0.0
        self._running = False

    @property
    def rows(self) -> int:
        """Rows in memory."""
        return 0 if self._columns is None else self._columns.rows

    @property
    def manifest(self) -> Manifest | None:
        """Of its first part."""
        return self._parts[0].manifest if isinstance(self._parts[0], Run) else None

    @property
    def settings(self) -> dict[str, Any]:
        """All that decides its data, by name: its identity. Empty of a file."""
        return {} if self.manifest is None else dict(self.manifest.identity)

    def close(self) -> None:
        """Forgets what was read; the next one who asks reads it anew."""
        self._columns = self._seen = self._groups = None

    def columns(self) -> RunColumns:
        """The run's scalars as they are now, half a second ago at most."""
        with self._lock:
            parts = [_as_now(part) for part in self._parts]
            runs = [part for part in parts if isinstance(part, Run)]
            content = [(run.manifest.run_id, run.rewards.content) for run in runs]
            self.used = now = time.monotonic()
            is_same = [run_id for run_id, _ in content] == [run_id for run_id, _ in self._content or []]
            if content != self._content and not (is_same and now < self._rereads):
                # Another run was begun there, or other rewards count.
                self._parts, self._seen, self._columns, self._content = parts, None, None, content
            seen = self._seen
            if seen is None or now - self._looked > _FRESH_S:
                # `close` may come meanwhile.
                self._columns = read = self._columns or RunColumns(self._parts)
                if read.refresh() or seen is None:
                    self._rereads = max(self._rereads, now + _PAUSE * (time.monotonic() - now))
                    self._seen = seen = read.snapshot()
                self._looked = time.monotonic()
            return seen

    def groups(self, columns: RunColumns) -> Groups:
        """Figures of its groups."""
        known = self._groups
        if known is None or known[0] is not columns:
            known = self._groups = (columns, group_figures(columns, self._solved_at))
        return known[1]

    @cached_property
    def token_text(self) -> tuple[TokenText | None, str]:
        """The text of its tokens, or why it cannot be had."""
        try:
            return read_token_text(_root(self._parts[0])), ""
        except ConfigError as error:
            return None, str(error)

    def streams_of(self, row: Row) -> dict[str, list[float]]:
        """The values of a trajectory's streams, as columns of `tokens` are called."""
        own = row["extra"].get(STREAMS) if isinstance(row["extra"], dict) else None
        found = {f"{name}_logprob": values for name, values in own.items()} if isinstance(own, dict) else {}
        if isinstance(row["reward_extra"], dict):
            for stream in REWARD_STREAMS:
                if values := reward_values(stream, row["reward_extra"], row["response_mask"].as_py()):
                    found[stream] = values
        table = pa.table({name: to_arrow(np.array([row[name] or 0])) for name in SCORED_COLUMNS})
        for root in (part.root for part in self._parts if isinstance(part, Run)):
            for name in sidecar_names(root, "streams"):
                with contextlib.suppress(
                    RollstreamError, OSError
                ):  # a damaged one takes nothing from the page
                    if (values := Stream(root, name).values_of(table)[0].as_py()) is not None:
                        found[f"{name}_logprob"] = values
        return found

    def state(self) -> dict[str, Any]:
        """What changes while a run goes on."""
        columns = self.columns()
        groups, content = self.groups(columns), self._content or []
        failed, done = len(columns.failures()), int(groups["size"].sum())
        total = self._checkpoint().get("total")
        mean, interval = mean_interval(columns, groups)
        state = self._state(total, done + failed)
        return {
            "done": done,
            "failed": failed,
            "unscored": done - int(groups["scored"].sum()),
            "total": total,
            "reward_mean": mean,
            "reward_interval": interval,
            "tokens": int(columns["sampled"].sum(dtype="int64")),
            "state": "damaged" if columns.damage and state != "running" else state,
            "rows": columns.rows,
            "error": "; ".join(columns.damage[:3]) or None,
            "scores": next((scores.rpartition(":")[0] for _, scores in content if scores), None),
            "cursor": f"{columns.rows}-{failed}-{total}-{state}-{'-'.join(map(''.join, content))}",
        }

    def _state(self, total: int | None, settled: int) -> str:
        if time.monotonic() - self._asked > _LOCK_S:
            locks = [part.root / "run.lock" for part in self._parts if isinstance(part, Run)]
            self._running, self._asked = any(map(is_locked, locks)), time.monotonic()
        over = self.manifest is None if total is None else settled >= total
        return "running" if self._running else "finished" if over else "unfinished"

    def describe(self, *, whole: bool = False) -> dict[str, Any]:
        """What the list says of it; `whole`: also if a large run has to be read for that."""
        line, counts, manifest = super().describe(), self._checkpoint(), self.manifest
        if manifest is not None:
            rows = manifest.identity.get("data.rows.count")  # of the files, of which a run may take some
            line |= {
                "model": manifest.setting("actor_rollout_ref", "model").get("path"),
                "n": manifest.n,
                "logprobs": manifest.logprobs_text or None,
                "prompts": counts["total"] // manifest.n if counts.get("total") else rows or None,
                "started": calendar.timegm(time.strptime(manifest.created, "%Y-%m-%dT%H:%M:%SZ")),
            }
        if whole or self.rows or counts.get("rows", 0) <= _SMALL:
            return line | self.state()
        done, failed = counts.get("completed", 0), counts.get("failed", 0)
        line |= {name: counts.get(name) for name in ("total", "failed", "unscored")}
        return line | {"done": done, "state": self._state(counts.get("total"), done + failed)}

    def _checkpoint(self) -> dict[str, int]:
        """The counts of `checkpoint.json`, of all shards together; nothing where one has none."""
        counts: Counter[str] = Counter()
        for part in self._parts:
            if not (content := read_checkpoint(_root(part))):
                return {}
            counts.update({name: count for name, count in content.items() if type(count) is int})
        return counts


class Sources:
    """All that was named on the command line, and what has come into those folders since.

    Raises:
        ConfigError: there is nothing at one of the places.
    """

    def __init__(
        self, places: Sequence[str], solved_at: float = SOLVED_AT, scores: str | None = None
    ) -> None:
        for place in places:
            if not _is_url(place) and not Path(place).exists():
                raise ConfigError(f"{place}: there is no such file or folder")
        self._places, self._solved_at, self._scores = places, solved_at, scores
        self._known: dict[str, ViewSource] = {}
        self._lock = threading.Lock()

    def all(self) -> list[ViewSource]:
        """Looks again; what is gone from the disk is not there any more."""
        with self._lock:
            sources, known = {source.id: source for source in self._find()}, self._known
            for id, source in sources.items():
                if isinstance(source, RunSource) and isinstance(known.get(id), RunSource):
                    sources[id] = known[id]  # with what was read of it
            self._known = sources
            return list(sources.values())

    def get(self, id: str, kind: type[S]) -> S:
        """The one with this id. Raises `NotFoundError`."""
        source = self._known.get(id)
        if not isinstance(source, RunSource) or not source.rows:
            source = next((other for other in self.all() if other.id == id), None)
        if source is not None and source.error is not None:
            raise RunDirectoryError(source.error)
        if not isinstance(source, kind):
            raise NotFoundError(f"there is no {kind.kind} {id!r}")
        if isinstance(source, RunSource):
            source.used = time.monotonic()
            others = [run for run in self._open_runs() if run is not source]
            held = sum(run.rows for run in others)
            for run in sorted(others, key=lambda run: run.used):
                if held > _MOST_ROWS:
                    held -= run.rows
                    run.close()
        return source

    def _open_runs(self) -> list[RunSource]:
        return [source for source in self._known.values() if isinstance(source, RunSource) and source.rows]

    def read_ahead(self) -> None:
        """Reads the run while the browser starts, where one alone was named."""
        sources = self.all()
        if len(sources) == 1 and isinstance(sources[0], RunSource):
            sources[0].groups(sources[0].columns())

    def link(self, training: TrainingSource, groups: Sequence[dict[str, Any]]) -> None:
        """Adds to groups of a training where their rollouts are, and where a run that is open has some of the same
        prompt: `runs`.
        """
        runs = [source for source in self._known.values() if isinstance(source, RunSource)]
        folder = Path(training.path)  # its store is a run in it
        stores = [
            run for run in runs if (path := Path(run.path)).parent == folder and (path / "training").is_dir()
        ]
        for group in groups:
            if isinstance(position := group.get("position"), int) and stores:
                group["runs"] = [{"id": run.id, "name": run.name, "index": position} for run in stores]
        for run in self._open_runs():
            if run in stores:
                continue
            indices = run.columns().prompts([str(group.get("prompt_key")) for group in groups])
            for group, index in zip(groups, indices, strict=True):
                if index is not None:
                    group.setdefault("runs", []).append({"id": run.id, "name": run.name, "index": index})

    def _find(self) -> Iterator[ViewSource]:
        shards: dict[bytes, list[Run | Path]] = {}
        for place in self._places:
            if _is_url(place):
                shown = re.sub(r"//[^/]*@", "//", place)
                yield BufferSource(shown.split("://")[1].rstrip("/"), shown, place)
                continue
            top = Path(place).resolve()
            if top.is_file():
                yield RunSource(top.name, [top], self._solved_at)
                continue
            for path in _folders(top):
                name = str(path.relative_to(top)) if path != top else top.name
                try:
                    yield from self._at(path, name, shards)
                except (RunDirectoryError, OSError) as error:  # the others are listed
                    if os.access(path / "run.json", os.F_OK):
                        yield ViewSource(name, str(path), str(error))
        for parts in shards.values():
            more = f" and {len(parts) - 1} more shards" if len(parts) > 1 else ""
            yield RunSource(f"{_root(parts[0]).name}{more}", parts, self._solved_at)

    def _at(self, path: Path, name: str, shards: dict[bytes, list[Run | Path]]) -> Iterator[ViewSource]:
        manifest = read_manifest(path)
        if manifest is not None:
            scores = self._scores if self._scores in sidecar_names(path) else None
            part = Run(path, manifest, scores)
            if (group := shard_group(manifest)) is not None:
                shards.setdefault(group, []).append(part)
            else:
                yield RunSource(name, [part], self._solved_at)
        if (path / DATABASE).is_file():
            yield BufferSource(name, str(path))
        if training_log(path) is not None or (path / GROUPS_FILE).is_file():
            yield TrainingSource(name, str(path))


def _root(part: Run | Path) -> Path:
    return part.root if isinstance(part, Run) else part


def _as_now(part: Run | Path) -> Run | Path:
    """The run that is in the folder now; the one before where it is gone or damaged: what was read is there."""
    try:
        return Run.open(part.root, part.scores) if isinstance(part, Run) else part
    except (RunDirectoryError, OSError):
        return part


def _is_url(place: str) -> bool:
    return place.startswith(("http://", "https://"))


def _folders(top: Path) -> Iterator[Path]:
    """A folder and those below it, not into runs, buffers and checkpoints."""
    for path, below, files in itertools.islice(os.walk(top, followlinks=True), _MOST_FOLDERS):
        yield Path(path)
        is_end = len(Path(path).relative_to(top).parts) >= _DEEPEST or {"run.json", DATABASE} & {*files}
        below[:] = [] if is_end else sorted(one for one in below if not (one.startswith(".") or _step(one)))


def _step(folder: str) -> int:
    """The step of a trainer's checkpoint, by its name; 0 for another folder."""
    match = re.fullmatch(r"checkpoint-(\d+)", folder)
    return int(match[1]) if match else 0


def training_log(folder: Path) -> Path | None:
    """The newest `trainer_state.json` of a trainer's folder."""
    if (folder / TRAINING_FILE).is_file():
        return folder / TRAINING_FILE
    found = folder.glob(f"checkpoint-*/{TRAINING_FILE}")
    return max(found, key=lambda path: _step(path.parent.name), default=None)
