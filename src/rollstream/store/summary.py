"""Summaries of a run for people and scripts: `checkpoint.json` and what `rollstream status` says.

Both are derived from journal and batches, never read back as truth. Taken from `checkpoint.json` are only `total`,
which the run directory cannot know by itself, and `completed`, as the least that must be there.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson

from rollstream.store.export.files import stale_exports
from rollstream.store.journal import write_file_durably
from rollstream.store.keys import RunState
from rollstream.store.lock import is_locked, lock_holder
from rollstream.store.manifest import Manifest
from rollstream.store.merge import Artifact
from rollstream.store.paths import RunPaths
from rollstream.store.run import Run, read_checkpoint
from rollstream.store.scores import sidecar_names
from rollstream.trajectory import failure_cause

_MOST_RANGES = 1000
"""Ranges in `checkpoint.json`: in shuffled order a run has as many as rows, and nobody reads them."""

_MOST_CAUSES = 100
"""Causes of failures that are told apart."""


@dataclass(frozen=True, slots=True)
class FailureCause:
    """Failures that have a cause in common."""

    count: int
    example: str
    """What is said of the first one."""
    index: int | None = None
    """Of the first one, as the next."""
    repeat: int | None = None


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
    half_done: int
    """Of the owed ones: turns of them are kept."""
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
    failure_causes: list[FailureCause]
    """Why rollouts failed, the most frequent cause first."""
    unscored_causes: list[FailureCause]
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
    paths, state, lock = run.paths, run.state(), root / "run.lock"
    done, failed, unscored = state.keys.done, state.keys.failed, state.keys.done - state.rewards.scored
    total, artifact = read_total(root), paths.artifact.exists()
    if total is not None:  # rows that come while it runs may be newer than checkpoint.json
        total = max(total, done + failed)
    is_old = artifact and not Artifact(paths, run.manifest.run_id).is_current()
    return RunStatus(
        run_dir=str(root),
        created=run.manifest.created,
        total=total,
        completed=done,
        failed=failed,
        owed=None if total is None else total - done - failed,
        half_done=len(state.turns),
        unscored=unscored,
        reward_failed=state.rewards.unscored,
        mean_reward=state.rewards.mean,
        rows=state.rows,
        saved_batches=len(state.batches),
        pending_rows=state.journal_rows,
        artifact=artifact,
        artifact_rows=state.artifact_rows,
        stale=[paths.artifact.name] * is_old + stale_exports(root),
        writer=lock_holder(lock) if is_locked(lock) else None,
        damage=state.damage,
        quarantined=[path.name for path in paths.damaged_files()],
        failure_causes=_causes((record.error, record.index, record.repeat) for record in run.failures(state)),
        unscored_causes=_causes(_unscored(run) if unscored else ()),
        scores=scores,
        all_scores=sidecar_names(root),
    )


def read_unscored(root: Path, scores: str | None = None) -> Iterator[dict[str, Any]]:
    """The rollouts that completed and have no reward: `index`, `repeat`, `data_source` and `cause`.

    Raises `RunDirectoryError`.
    """
    run = Run.open(root, scores)
    for table in run.unscored(["index", "repeat", "data_source", "reward_extra"]):
        for row in table.to_pylist():
            cause = _unscored_cause(row.pop("reward_extra"), row["data_source"], scores, _has_function(run))
            yield row | {"cause": cause}


def _has_function(run: Run) -> bool:
    return bool((run.manifest.config.get("custom_reward_function") or {}).get("path"))


def _unscored_cause(extra: str, source: str, scores: str | None, has_function: bool) -> str:
    error = orjson.loads(extra).get("error")
    if error is not None:
        return str(error)
    missing = f"no reward for data source {source!r}"
    if (
        has_function and scores is None
    ):  # one that raises leaves an error, and one that sees whole groups leaves nothing
        missing = "its reward sees whole groups: a run's end, or `rollstream score`, scores it here"
    return missing if scores is None else f"not scored by {scores!r} yet, or {missing}"


def _unscored(run: Run) -> Iterator[tuple[str, int, int]]:
    cause_of, has_function = lru_cache(_MOST_CAUSES)(_unscored_cause), _has_function(run)  # most say the same
    for table in run.unscored(["reward_extra", "data_source", "index", "repeat"]):
        for extra, source, *key in zip(*(column.to_pylist() for column in table.columns), strict=True):
            yield cause_of(extra, source, run.scores, has_function), *key


def _causes(failures: Iterable[tuple[str, int, int]]) -> list[FailureCause]:
    """What went wrong (in words, index and repeat) by its cause, the most frequent first."""
    counts: Counter[str] = Counter()
    examples: dict[str, tuple[str, int, int]] = {}
    cause_of = lru_cache(_MOST_CAUSES)(failure_cause)
    for words, index, repeat in failures:
        cause = cause_of(words)
        if cause not in examples and len(examples) >= _MOST_CAUSES:
            cause = "other"
        counts[cause] += 1
        examples.setdefault(cause, (words, index, repeat))
    return [FailureCause(count, *examples[cause]) for cause, count in counts.most_common()]


def write_checkpoint(paths: RunPaths, manifest: Manifest, state: RunState, *, total: int) -> None:
    """Writes `checkpoint.json`."""
    ranges = state.keys.done_ranges()
    content: dict[str, Any] = {
        "run_id": manifest.run_id,
        "updated": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "n": manifest.n,
        "total": total,
        "completed": state.keys.done,
        "completed_rows": ranges[:_MOST_RANGES],
        "completed_rows_cut": len(ranges) > _MOST_RANGES,
        "failed": state.keys.failed,
        "unscored": max(state.keys.done - state.rewards.scored, 0),
        "reward_failed": state.rewards.unscored,
        "mean_reward": state.rewards.mean,
        "rows": state.rows,
        "saved_batches": [paths.batch(number).name for number in sorted(state.batches)],
        "damaged": [path.name for path in paths.damaged_files()],
    }
    written = orjson.dumps(content, option=orjson.OPT_INDENT_2) + b"\n"
    write_file_durably(paths.root / "checkpoint.json", written)


def refresh_checkpoint(root: Path) -> None:
    """Writes `checkpoint.json` anew after a repair; the lock must be held. Without one there is no total yet."""
    if (total := read_total(root)) is not None:
        run = Run.open(root)
        write_checkpoint(run.paths, run.manifest, run.state(), total=total)


def status_json(status: RunStatus, **more: Any) -> bytes:
    """The status as JSON, with what else is known."""
    return orjson.dumps({**asdict(status), **more}, option=orjson.OPT_INDENT_2)


def read_total(root: Path) -> int | None:
    """Rollouts that the run is to have; None before it has counted its dataset."""
    total = read_checkpoint(root).get("total")
    return total if isinstance(total, int) else None
