"""Summaries of a run for people and scripts: `checkpoint.json` and what `rollstream status` says.

Both are derived from journal and batches, never read back as truth. Taken from `checkpoint.json` are only `total`,
which the run directory cannot know by itself, and `completed`, as the least that must be there.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from rollstream.store.export.files import stale_exports
from rollstream.store.journal import write_file_durably
from rollstream.store.lock import is_locked, lock_holder
from rollstream.store.manifest import Manifest
from rollstream.store.merge import is_current
from rollstream.store.paths import RunPaths
from rollstream.store.recovery import RunState, read_checkpoint
from rollstream.store.run import Run
from rollstream.store.scores import score_names
from rollstream.trajectory import failure_cause

_MOST_RANGES = 1000
"""Ranges in `checkpoint.json`: in shuffled order a run has as many as rows, and nobody reads them."""

_MOST_CAUSES = 100
"""Causes of failures that are told apart."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """What a run directory holds, in numbers. Counts of rollouts unless said otherwise."""

    run_dir: str
    created: str
    total: int | None
    """None before the run has counted its dataset."""
    completed: int
    failed: int
    owed: int | None
    unscored: int
    """Completed without a reward."""
    reward_failed: int
    """Of the unscored ones: the reward function failed on them."""
    mean_reward: float | None
    rows: int
    """Trajectories, in batches and journals."""
    saved_batches: int
    pending_rows: int
    """Durable rows that are in no batch yet."""
    artifact: bool
    """Whether there is a merged artifact."""
    artifact_rows: int
    """Trajectories that stand in the artifact alone: their batches are gone or damaged."""
    stale: list[str]
    """Files of what the run held earlier: the artifact, where more was sealed since; exports of another one."""
    writer: str | None
    """Who writes right now."""
    damage: list[str]
    quarantined: list[str]
    """Damaged files in `damaged/`."""
    failure_causes: list["FailureCause"]
    """Why rollouts failed, the most frequent cause first."""
    unscored_causes: list["FailureCause"]
    """Why rollouts that completed have no reward, likewise."""
    scores: str | None
    """Whose rewards these are; None: the run's own."""
    all_scores: list[str]
    """The names there are (`rollstream score`)."""

    @property
    def finished(self) -> bool:
        """Whether every rollout is settled and sealed: then the artifact is the run's last word."""
        return self.owed == 0 and self.pending_rows == 0


def read_status(root: Path, scores: str | None = None) -> RunStatus:
    """The status of a run directory, also while it is written; with the rewards of some scores, or the run's own.

    Raises `RunDirectoryError`.
    """
    run = Run.open(root, scores)
    manifest, paths, state = run.manifest, run.paths, run.state()
    total = read_total(root)
    if total is not None:  # rows that come while it runs may be newer than checkpoint.json
        total = max(total, state.keys.done + state.keys.failed)
    return RunStatus(
        run_dir=str(root),
        created=manifest.created,
        total=total,
        completed=state.keys.done,
        failed=state.keys.failed,
        owed=None if total is None else total - state.keys.done - state.keys.failed,
        unscored=state.keys.done - state.rewards.scored,
        reward_failed=state.rewards.unscored,
        mean_reward=state.rewards.mean,
        rows=state.rows,
        saved_batches=len(state.batches),
        pending_rows=state.journal_rows,
        artifact=paths.artifact.exists(),
        artifact_rows=state.artifact_rows,
        stale=_stale(paths, manifest),
        writer=lock_holder(root / "run.lock") if is_locked(root / "run.lock") else None,
        damage=state.damage,
        quarantined=[path.name for path in paths.damaged_files()],
        failure_causes=_causes((1, one.error, one.index, one.repeat) for one in run.failures(state)),
        unscored_causes=_causes(_unscored(run) if state.keys.done > state.rewards.scored else ()),
        scores=scores,
        all_scores=score_names(root),
    )


def _stale(paths: RunPaths, manifest: Manifest) -> list[str]:
    artifact = paths.artifact.exists() and not is_current(paths, manifest.run_id)
    return [paths.artifact.name] * artifact + stale_exports(paths.root)


def read_unscored(root: Path, scores: str | None = None) -> Iterator[dict[str, Any]]:
    """The rollouts that completed and have no reward: `index`, `repeat`, `data_source` and `cause`.

    Raises `RunDirectoryError`.
    """
    for table in _unscored_tables(Run.open(root, scores)):
        for row in table.to_pylist():
            cause = _unscored_cause(row["reward_extra"], row["data_source"], scores)
            yield {name: row[name] for name in ("index", "repeat", "data_source")} | {"cause": cause}


def _unscored_tables(run: Run) -> Iterator[pa.Table]:
    """The final trajectories without a reward."""
    for table in run.rows(["index", "repeat", "is_snapshot", "reward", "reward_extra", "data_source"]):
        yield table.filter(pc.and_(pc.is_null(table["reward"]), pc.invert(table["is_snapshot"])))


def _unscored_cause(extra: str, source: str, name: str | None) -> str:
    error = orjson.loads(extra).get("error")
    if error is not None:
        return str(error)
    missing = f"no reward for data source {source!r}"
    return missing if name is None else f"not scored by {name!r} yet, or {missing}"


def _unscored(run: Run) -> Iterator["_Cause"]:
    """Why rollouts have no reward: those of which all is said in the same words together."""
    for table in _unscored_tables(run):
        # Not `Table.group_by`, which imports pandas: half a second.
        columns = (table[one].to_pylist() for one in ("reward_extra", "data_source", "index", "repeat"))
        counts, first = Counter[tuple[str, str]](), dict[tuple[str, str], tuple[int, int]]()
        for extra, source, index, repeat in zip(*columns, strict=True):
            counts[extra, source] += 1
            first.setdefault((extra, source), (index, repeat))
        for (extra, source), count in counts.items():
            yield count, _unscored_cause(extra, source, run.scores), *first[extra, source]


@dataclass(frozen=True, slots=True)
class FailureCause:
    """Failures that have a cause in common."""

    count: int
    example: str
    """What is said of the first one."""
    index: int | None = None
    """Of the first one, as the next."""
    repeat: int | None = None


_Cause = tuple[int, str, int, int]
"""How many, what is said of the first one, its index and repeat."""


def _causes(failures: Iterable[_Cause]) -> list[FailureCause]:
    """What went wrong, by its cause, the most frequent first."""
    counts: Counter[str] = Counter()
    examples: dict[str, tuple[str, int, int]] = {}
    for count, said, index, repeat in failures:
        cause = failure_cause(said)
        if cause not in examples and len(examples) >= _MOST_CAUSES:
            cause = "other"
        counts[cause] += count
        examples.setdefault(cause, (said, index, repeat))
    return [FailureCause(count, *examples[cause]) for cause, count in counts.most_common()]


def write_checkpoint(paths: RunPaths, manifest: Manifest, state: RunState, *, total: int) -> None:
    """Writes `checkpoint.json`."""
    ranges = state.keys.done_ranges()
    rewards = state.rewards
    content: dict[str, Any] = {
        "run_id": manifest.run_id,
        "updated": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "n": manifest.n,
        "total": total,
        "completed": state.keys.done,
        "completed_rows": ranges[:_MOST_RANGES],
        "completed_rows_cut": len(ranges) > _MOST_RANGES,
        "failed": state.keys.failed,
        "unscored": max(state.keys.done - rewards.scored, 0),
        "reward_failed": rewards.unscored,
        "mean_reward": rewards.mean,
        "rows": state.rows,
        "saved_batches": [paths.batch(number).name for number in sorted(state.batches)],
        "damaged": [path.name for path in paths.damaged_files()],
    }
    write_file_durably(
        paths.root / "checkpoint.json", orjson.dumps(content, option=orjson.OPT_INDENT_2) + b"\n"
    )


def refresh_checkpoint(root: Path) -> None:
    """Writes `checkpoint.json` anew after a repair; the lock must be held. Without one there is no total yet."""
    if (total := read_total(root)) is not None:
        run = Run.open(root)
        write_checkpoint(run.paths, run.manifest, run.state(), total=total)


def status_json(status: RunStatus) -> bytes:
    """The status as JSON."""
    return orjson.dumps(asdict(status), option=orjson.OPT_INDENT_2)


def read_total(root: Path) -> int | None:
    value = read_checkpoint(root).get("total")
    return value if isinstance(value, int) else None
