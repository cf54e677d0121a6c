"""A pass over what a run has finished, without generating: rewards (`replay`), numbers per token (`annotate`).

    run directory --rows--> workers (stored trajectories) --> KIND/NAME.run/ --> KIND/NAME.parquet

The pass is a run itself: what it has done is durable, sealed and found again as the rollouts of a generation are.
The run that it reads is only read.
"""

import logging
import math
import shutil
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson
import pyarrow as pa

import rollstream
from rollstream.errors import ConfigError, IdentityMismatchError, RunDirectoryError
from rollstream.rollout.executor import Executor, WorkerBackend
from rollstream.rollout.worker_host import Result
from rollstream.store.arrow import column_values, to_arrow
from rollstream.store.keys import KeyStates, row_numbers
from rollstream.store.manifest import Manifest, new_manifest, read_manifest, write_manifest
from rollstream.store.records import scoring_failed
from rollstream.store.run import Array, Run
from rollstream.store.run_dir import RunDirectory, lock_run, open_run
from rollstream.store.scores import (
    SCORED_COLUMNS,
    SidecarKind,
    is_sidecar_name,
    pass_folder,
    rollout_places,
    sidecar_table,
)
from rollstream.store.summary import read_status
from rollstream.store.writer import StoreWriter
from rollstream.trajectory import Failure, PromptRow, Rollout, RolloutKey, Trajectory

logger = logging.getLogger(__name__)

_BATCH_ROWS = 10_000
"""Trajectories of a batch of a pass."""


@dataclass(frozen=True, slots=True)
class PassPlan:
    """What a pass reads, who works on it, and where it goes."""

    kind: SidecarKind
    name: str
    identity: Mapping[str, Any]
    """By whom it is done: another one may not go on with it."""
    config: Mapping[str, Any]
    """The same for people."""
    columns: Sequence[str]
    """Of the rows; with `SCORED_COLUMNS`, `prompt_key`, `data_source` and `is_snapshot`."""
    read_rows: Callable[[pa.Table], list[dict[str, Any]]]
    """Gives the workers' view of rows, one for each."""
    publish: Callable[[Path, Path, Manifest], object]
    """Makes the table of the artifact of the pass."""
    open_backend: Callable[[AsyncExitStack], Awaitable[WorkerBackend]]
    """Called where something is left to do."""
    workers: int
    max_in_flight: int
    timeout: float
    """Seconds for one rollout."""
    by_group: bool = False
    """Whether a prompt's rollouts are done together, when none is owed. Workers find them in the row's `GROUP`."""


GROUP = "group"
"""The column of a row with all rollouts of its prompt, a list that they share."""

_GROUPS_TOGETHER = 64
"""That are read together."""


def scored_rollout(row: PromptRow, repeat: int, trajectories: Sequence[Trajectory]) -> Rollout:
    """A rollout of a pass: with what was found, without what it was found by, in the place of the stored one."""
    finished = row.columns["trajectories"][-1]["finished_at"] or 0.0
    return Rollout(
        row.index, repeat, row.prompt_key, list(trajectories), row.data_source, finished_at=finished
    )


def pass_trajectory(
    is_snapshot: bool, reward: float | None, extra: dict[str, Any], **tokens: Any
) -> Trajectory:
    """A trajectory of a pass: a reward, and what else there is."""
    values = {"response_ids": [], "response_mask": [], "response_logprobs": None, **tokens}
    return Trajectory(
        prompt_ids=[],
        messages=[],
        finish_reason="stop",
        policy_versions=[],
        is_snapshot=is_snapshot,
        reward=reward,
        reward_extra=extra,
        **values,
    )


class _Pass:
    """Gives rollouts out, and takes what becomes of them; the sink of its executor."""

    def __init__(self, plan: PassPlan, run: Run, directory: RunDirectory, rows: Array) -> None:
        self._plan, self._run = plan, run
        self._settled = rows
        self._is_done = directory.state.keys.is_done
        self.writer = StoreWriter(directory, save_batch_size=_BATCH_ROWS, pull_timeout=math.inf)
        self._rows: dict[RolloutKey, PromptRow] = {}
        """Given out and not durable yet."""
        self.now = 0

    def keys(self) -> Iterator[RolloutKey]:
        """The rollouts that are not done yet."""
        if self._plan.by_group:
            yield from self._keys_by_group()
            return
        for table in self._run.rows(self._plan.columns):
            rows = self._plan.read_rows(table)
            for key, group in groupby(rows, key=lambda row: RolloutKey(row["index"], row["repeat"])):
                if self._is_done(key.index, key.repeat):
                    continue
                trajectories = [*group]
                row = trajectories[-1]
                self._rows[key] = PromptRow(
                    index=key.index,
                    prompt_key=row["prompt_key"],
                    messages=[],
                    data_source=row["data_source"],
                    ground_truth=orjson.loads(row.get("ground_truth", "null")),
                    extra_info=orjson.loads(row.get("extra", "{}")).get("extra_info") or {},
                    columns={"trajectories": trajectories},
                )
                yield key

    def _keys_by_group(self) -> Iterator[RolloutKey]:
        for at in range(0, len(self._settled), _GROUPS_TOGETHER):
            groups: dict[int, list[Rollout]] = {}
            for one in self._run.rollouts(self._settled[at : at + _GROUPS_TOGETHER], merged=True):
                groups.setdefault(one.index, []).append(one)
            for index, group in sorted(groups.items()):
                group.sort(key=lambda one: one.repeat)
                for one in group:
                    if self._is_done(index, one.repeat):
                        continue
                    stored = [
                        {"is_snapshot": part.is_snapshot, "finished_at": one.finished_at}
                        for part in one.trajectories
                    ]
                    columns = {"trajectories": stored, GROUP: group}
                    self._rows[one.key] = PromptRow(
                        index, one.prompt_key, [], one.data_source, columns=columns
                    )
                    yield one.key

    def load_row(self, key: RolloutKey) -> PromptRow:
        """See `Executor`."""
        return self._rows[key]

    def submit(self, result: Result) -> Awaitable[None]:
        """Makes what was found of a rollout durable; see `Sink`."""
        row = self._rows[result.key]
        if isinstance(result, Failure):
            error, stored = {"error": " ".join(result.error.split())[:500]}, row.columns["trajectories"]
            failed = [pass_trajectory(one["is_snapshot"], None, error) for one in stored]
            result = scored_rollout(row, result.repeat, failed)
        elif isinstance(result, Rollout):  # a `RolloutWorker` says in `extra` what it was given
            for one in result.trajectories:
                one.extra = {}
            result = scored_rollout(row, result.repeat, result.trajectories)
        return self.writer.submit(result)

    def count(self, result: Result) -> None:
        """Counts a rollout that is durable."""
        del self._rows[result.key]
        self.now += 1


def _outdated(run: Run, scored: Run, *, retry_failed: bool, by_group: bool) -> KeyStates:
    """Rollouts that were generated again since they were scored; those, too, that are to be retried.

    Of groups all are, where one is, or one came since, or has not been scored yet.
    """
    outdated = KeyStates(run.manifest.n)
    known, _, times = rollout_places(pa.concat_tables(scored.rows(SCORED_COLUMNS)))
    order = np.argsort(known, kind="stable")
    for table in run.rows(SCORED_COLUMNS):
        numbers, _, finished = rollout_places(table)
        at = order[np.minimum(np.searchsorted(known, numbers, sorter=order), len(order) - 1)]
        other = table.filter(to_arrow((known[at] == numbers) & (times[at] != finished)))
        outdated.mark_done_many(column_values(other["index"]), column_values(other["repeat"]))
    if retry_failed:
        for table in scored.unscored(["index", "repeat", "reward_extra"]):
            for index, repeat, extra in zip(*map(pa.ChunkedArray.to_pylist, table.columns), strict=True):
                if scoring_failed(orjson.loads(extra)):
                    outdated.mark_done(index, repeat)
    if by_group:
        rows = np.unique(row_numbers(known))
        done, before = (one.state().keys.done_of(rows) for one in (run, scored))
        changed = (done != before).any(1) | outdated.done_of(rows).any(1)
        at, repeats = np.nonzero(before & changed[:, None])
        outdated.mark_done_many(rows[at], repeats.astype(np.int32))
    return outdated


@dataclass(slots=True)
class ScoreReport:
    """What a pass did. Counts of rollouts."""

    name: str
    path: str
    rollouts: int
    """In the table."""
    now: int
    """Scored by this pass."""
    unscored: int
    failed: int
    """Unscored ones on which the reward, or the engine, failed."""
    mean_reward: float | None
    mean_before: float | None
    """Mean of the run's own rewards."""
    causes: dict[str, int]
    """How many are unscored, by the first message of each cause."""
    damage: list[str]


async def run_pass(
    run: Run,
    plan: PassPlan,
    *,
    retry_failed: bool,
    say: Callable[[int, int, int], object] = lambda done, total, failed: None,
) -> ScoreReport:
    """Does for all finished rollouts of a run what is not done under a name yet.

    Args:
        run: finished or being written; it is only read, but for the folder of the plan's kind.
        plan: what to do.
        retry_failed: does it again for those that failed earlier.
        say: called after each rollout with how many are done, of how many, and how many of them failed.

    Raises:
        ConfigError: the name is taken by another pass.
        RunDirectoryError: nothing in the run, or another process is at this.
        StorageError: the disk is full; what was done is safe.
        EngineLostError: the engine stayed away; the same.
    """
    root, manifest, state = run.root, run.manifest, run.state()
    if not state.keys.done:
        raise RunDirectoryError(f"{root} holds no finished rollout yet")
    settled = state.keys.settled_rows()
    if plan.by_group and not len(settled):
        raise RunDirectoryError(f"{root} holds no prompt yet of which no rollout is owed")
    if not is_sidecar_name(plan.name):
        raise ConfigError(f"{plan.kind} {plan.name!r}: letters, digits, '-', '_' and '.'")
    wanted = new_manifest(
        n=manifest.n,
        identity={f"{plan.kind}.run": manifest.run_id, **plan.identity},
        dataset={},
        versions={"rollstream": rollstream.__version__},
        config={**plan.config},
    )
    with _opened(pass_folder(root, plan.name, plan.kind), wanted) as directory:
        await _settle_earlier(run, directory, retry_failed=retry_failed, by_group=plan.by_group)
        sink, done = _Pass(plan, run, directory, settled), directory.state

        def on_durable(result: Result) -> None:
            sink.count(result)
            count = done.keys.done
            say(count, max(state.keys.done, count), done.rewards.unscored)  # it may grow meanwhile

        sink.writer.start()
        complete = False
        try:
            async with AsyncExitStack() as stack:
                keys = sink.keys()
                if (first := next(keys, None)) is not None:
                    executor = Executor(
                        sink,
                        await plan.open_backend(stack),
                        load_row=sink.load_row,
                        max_in_flight=plan.max_in_flight,
                        workers=plan.workers,
                        attempt_timeout=plan.timeout,
                        max_attempts=1,
                        on_durable=on_durable,
                    )
                    stack.push_async_callback(executor.close)
                    await executor.run(chain([first], keys))
            complete = True
        finally:
            await sink.writer.close(seal=complete)
        directory.merge(keep_batches=False)
        table = sidecar_table(root, plan.name, plan.kind)
        plan.publish(directory.paths.artifact, table, directory.manifest)
        status = read_status(directory.paths.root)
    return ScoreReport(
        name=plan.name,
        path=str(table),
        rollouts=status.completed,
        now=sink.now,
        unscored=status.unscored,
        failed=status.reward_failed,
        mean_reward=status.mean_reward,
        mean_before=state.rewards.mean,
        causes={cause.example: cause.count for cause in status.unscored_causes},
        damage=run.damage,
    )


@contextmanager
def _opened(folder: Path, wanted: Manifest) -> Iterator[RunDirectory]:
    """The run directory of a pass; one that is refused with nothing done leaves none.

    Raises `ConfigError` where that of another pass has its place.
    """
    lock = lock_run(folder)
    try:
        found = read_manifest(folder)
        if found is not None and found.identity == wanted.identity and found.n < wanted.n:  # it was extended
            write_manifest(folder, msgspec.structs.replace(found, n=wanted.n))
        directory = open_run(lock, folder, wanted, config_yaml="")
        try:
            yield directory
        except ConfigError:
            if not directory.state.keys.done:
                shutil.rmtree(folder)
            raise
    except IdentityMismatchError as error:
        raise ConfigError(
            f"{folder.parent.name}/{folder.stem} is of another run, reward or model, or of what its file said then: "
            "choose another name"
        ) from error
    finally:
        lock.release()


async def _settle_earlier(run: Run, directory: RunDirectory, *, retry_failed: bool, by_group: bool) -> None:
    """Says what is damaged of an earlier pass, and takes out what is to be done again."""
    for line in directory.state.damage:
        logger.warning("%s: %s: what it held is done again", directory.paths.root, line)
    if not directory.state.keys.done:
        return
    scored = Run(directory.paths.root, directory.manifest)
    outdated = _outdated(run, scored, retry_failed=retry_failed, by_group=by_group)
    if outdated.done:
        writer = StoreWriter(directory, save_batch_size=_BATCH_ROWS, pull_timeout=math.inf)
        writer.start()
        await writer.close()  # seals what a pass left that was stopped
        directory.forget(outdated)
