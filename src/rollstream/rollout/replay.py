"""The reward pass: what a run has finished is scored anew, without generating.

    run directory --rows--> workers (stored trajectories, reward) --> scores/NAME.run/ --> scores/NAME.parquet

The pass is a run itself: what it has scored is durable, sealed and found again as the rollouts of a generation are.
The run that it scores is only read.
"""

import hashlib
import logging
import math
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from rollstream.chat.token_text import read_decoder
from rollstream.config.settings import RewardSettings
from rollstream.engine.load import RequestMeter
from rollstream.errors import ConfigError, IdentityMismatchError, RunDirectoryError
from rollstream.reward.base import FunctionReward
from rollstream.reward.rules import RuleReward
from rollstream.rollout.availability import EngineAvailability
from rollstream.rollout.executor import Executor
from rollstream.rollout.processes import ProcessBackend
from rollstream.rollout.setup import load_configured_reward
from rollstream.rollout.worker import score_trajectories
from rollstream.rollout.worker_host import BuiltWorker, LocalBackend, Result
from rollstream.store.arrow import column_values, to_arrow
from rollstream.store.keys import KeyStates
from rollstream.store.manifest import LOOP_IDENTITY, Manifest, new_manifest, read_manifest, write_manifest
from rollstream.store.records import scoring_failed
from rollstream.store.run import Run
from rollstream.store.run_dir import RunDirectory, lock_run, open_run
from rollstream.store.scores import (
    SCORED_COLUMNS,
    is_score_name,
    pass_folder,
    publish_scores,
    rollout_places,
    score_table,
)
from rollstream.store.summary import read_status
from rollstream.store.writer import StoreWriter
from rollstream.trajectory import Failure, PromptRow, Rollout, RolloutKey, Trajectory

logger = logging.getLogger(__name__)

SnapshotRule = Literal["outcome", "own", "none", "keep"]
"""What a snapshot gets: the final trajectory's reward; one for its own last answer; none; what was recorded."""

_COLUMNS = [
    *SCORED_COLUMNS,
    *("prompt_key", "data_source", "ground_truth", "messages", "extra", "is_snapshot", "num_turns"),
    *("reward", "reward_extra", "response_ids", "response_mask"),
]
_TEXT = '"role":"assistant","content":"'
"""In the messages of nearly every trajectory whose answer is text: then no ids are needed for it."""

_BATCH_ROWS = 10_000
"""Trajectories of a batch of a pass."""

_AHEAD = 32
"""Rollouts that a process has beyond those that it scores at once."""


def _scored(row: PromptRow, repeat: int, rewards: Iterable[tuple[float | None, dict[str, Any]]]) -> Rollout:
    """A rollout with a reward for each trajectory, and without what it was scored by: rewards alone travel back."""
    stored = row.columns["trajectories"]
    trajectories = [
        Trajectory([], [], [], None, [], "stop", [], one["is_snapshot"], reward=reward, reward_extra=extra)
        for one, (reward, extra) in zip(stored, rewards, strict=True)
    ]
    finished = stored[-1]["finished_at"] or 0.0
    return Rollout(row.index, repeat, row.prompt_key, trajectories, row.data_source, finished_at=finished)


class _Replay:
    """Scores the stored trajectories of rollouts; in the place of a `RolloutWorker`."""

    def __init__(self, reward: FunctionReward | RuleReward, root: Path, snapshots: SnapshotRule) -> None:
        self._reward = reward
        self._root = root
        self._snapshots = snapshots
        self._prepared: set[str] = set()

    async def run(self, row: PromptRow, repeat: int) -> Rollout:
        if isinstance(self._reward, RuleReward) and row.data_source not in self._prepared:
            await self._reward.prepare(row.data_source)
            self._prepared.add(row.data_source)
        trajectories = [self._trajectory(stored) for stored in row.columns["trajectories"]]
        final, answer, info = trajectories[-1], None, row.extra_info
        program = final.extra.get("gateway")
        if isinstance(program, dict):  # the reward sees the whole conversation, as at the end of the program
            answer, info = program.get("answer"), {**info, "messages": final.messages}
        await score_trajectories(
            self._reward,
            replace(row, extra_info=info),
            trajectories,
            decode=self._decode,
            snapshots=self._snapshots,
            final_answer=answer,
        )
        return _scored(row, repeat, [(one.reward, one.reward_extra) for one in trajectories])

    def _trajectory(self, stored: dict[str, Any]) -> Trajectory:
        kept = self._snapshots == "keep" and stored["is_snapshot"]
        return Trajectory(
            prompt_ids=[0],
            response_ids=stored["sampled"],
            response_mask=[1] * len(stored["sampled"]),
            response_logprobs=None,
            messages=orjson.loads(stored["messages"]),
            finish_reason="stop",
            is_snapshot=stored["is_snapshot"],
            num_turns=stored["num_turns"],
            reward=stored["reward"] if kept else None,
            reward_extra=orjson.loads(stored["reward_extra"]) if kept else {},
            extra=orjson.loads(stored["extra"]),
        )

    def _decode(self, ids: list[int]) -> str:
        return str(self._decoder.decode(ids)) if ids else ""

    @cached_property
    def _decoder(self) -> Any:
        return read_decoder(self._root)


@dataclass(frozen=True, slots=True)
class ReplayRecipe:
    """A worker that scores; see `WorkerRecipe`."""

    settings: RewardSettings
    root: Path
    snapshots: SnapshotRule

    async def build(self, number: int) -> BuiltWorker:
        reward = load_configured_reward(self.settings)

        async def close() -> None:
            reward.close()

        return replace(self.around(reward), close=close)

    def around(self, reward: FunctionReward | RuleReward) -> BuiltWorker:
        """The worker of a reward, which stays the caller's to close."""
        worker = cast(Any, _Replay(reward, self.root, self.snapshots))
        return BuiltWorker(worker, RequestMeter(), EngineAvailability(cast(Any, None), timeout=60.0))


class _Pass:
    """Gives rollouts out, and takes their rewards; the sink of its executor."""

    def __init__(self, run: Run, directory: RunDirectory) -> None:
        self._run = run
        self._is_done = directory.state.keys.is_done
        self.writer = StoreWriter(directory, save_batch_size=_BATCH_ROWS, pull_timeout=math.inf)
        self._rows: dict[RolloutKey, PromptRow] = {}
        """Given out and not durable yet."""
        self.now = 0

    def keys(self) -> Iterator[RolloutKey]:
        """The rollouts that are not scored yet."""
        for table in self._run.rows(_COLUMNS):
            has_text = pc.match_substring(table["messages"], _TEXT).to_pylist()
            ids, mask = table["response_ids"], table["response_mask"]
            rows: list[dict[str, Any]] = table.drop_columns(["response_ids", "response_mask"]).to_pylist()
            trajectories: list[dict[str, Any]] = []
            for at, row in enumerate(rows):
                pairs = () if has_text[at] else zip(ids[at].as_py(), mask[at].as_py(), strict=True)
                trajectories.append({**row, "sampled": [token for token, sampled in pairs if sampled]})
                key = RolloutKey(row["index"], row["repeat"])
                if at + 1 < len(rows) and key == RolloutKey(rows[at + 1]["index"], rows[at + 1]["repeat"]):
                    continue
                if not self._is_done(key.index, key.repeat):
                    self._rows[key] = PromptRow(
                        index=key.index,
                        prompt_key=row["prompt_key"],
                        messages=[],
                        data_source=row["data_source"],
                        ground_truth=orjson.loads(row["ground_truth"]),
                        extra_info=orjson.loads(row["extra"]).get("extra_info") or {},
                        columns={"trajectories": trajectories},
                    )
                    yield key
                trajectories = []

    def load_row(self, key: RolloutKey) -> PromptRow:
        """See `Executor`."""
        return self._rows[key]

    def submit(self, result: Result) -> Awaitable[None]:
        """Makes a rollout's rewards durable; see `Sink`."""
        if isinstance(result, Failure):
            row, error = self._rows[result.key], {"error": " ".join(result.error.split())[:500]}
            result = _scored(row, result.repeat, [(None, error)] * len(row.columns["trajectories"]))
        return self.writer.submit(result)

    def count(self, result: Result) -> None:
        """Counts a rollout whose rewards are durable."""
        del self._rows[result.key]
        self.now += 1


def _outdated(run: Run, scored: Run, *, retry_unscored: bool) -> KeyStates:
    """Rollouts that were generated again since they were scored; those, too, that are to be retried."""
    outdated = KeyStates(run.manifest.n)
    known, _, times = rollout_places(pa.concat_tables(scored.rows(SCORED_COLUMNS)))
    order = np.argsort(known, kind="stable")
    for table in run.rows(SCORED_COLUMNS):
        numbers, _, finished = rollout_places(table)
        at = order[np.minimum(np.searchsorted(known, numbers, sorter=order), len(order) - 1)]
        other = table.filter(to_arrow((known[at] == numbers) & (times[at] != finished)))
        outdated.mark_done_many(column_values(other["index"]), column_values(other["repeat"]))
    if retry_unscored:
        for table in scored.unscored(["index", "repeat", "reward_extra"]):
            for index, repeat, extra in zip(*map(pa.ChunkedArray.to_pylist, table.columns), strict=True):
                if scoring_failed(orjson.loads(extra)):
                    outdated.mark_done(index, repeat)
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
    """Unscored ones on which the reward failed."""
    mean_reward: float | None
    mean_before: float | None
    """Mean of the run's own rewards."""
    causes: dict[str, int]
    """How many are unscored, by the first message of each cause."""
    damage: list[str]


def snapshot_rule(manifest: Manifest) -> SnapshotRule:
    """How a run scores its snapshots, by the options of its agent loops. Raises `ConfigError`."""
    rules: set[SnapshotRule] = set()
    for key, digest in manifest.identity.items():
        if key.startswith(LOOP_IDENTITY):
            with suppress(ValueError, IndexError, AttributeError):
                options = orjson.loads(str(digest).split(" ", 2)[2])
                penalised = options.get("context_penalty") is not None
                rules.add("keep" if penalised else options.get("snapshot_scoring", "outcome"))
    if len(rules) > 1:
        raise ConfigError(
            f"the run's agent loops score snapshots in different ways: {', '.join(sorted(rules))}"
        )
    return rules.pop() if rules else "outcome"


async def score_run(
    root: Path,
    reward: RewardSettings,
    *,
    name: str | None = None,
    snapshots: SnapshotRule | None = None,
    processes: int | None = None,
    retry_unscored: bool = False,
    in_memory: FunctionReward | None = None,
    say: Callable[[int, int, int], object] = lambda done, total, failed: None,
) -> ScoreReport:
    """Scores all finished rollouts of a run that are not scored under a name yet.

    Args:
        root: the run directory, finished or being written; it is only read, but for `scores/`.
        reward: the reward.
        name: of the scores; None: after the reward, and its content.
        snapshots: what snapshots get; None: as in the run.
        processes: that score; None: one for each CPU, four at most.
        retry_unscored: scores those again on which the reward failed earlier.
        in_memory: a reward that is in no file, in place of the one that `reward` names; it scores in this process.
        say: called after each rollout with how many are scored, of how many, and how many of them failed.

    Raises:
        ConfigError: the reward cannot be used, or the name is taken.
        RunDirectoryError: no run directory, nothing in it, or another process scores under this name.
        StorageError: the disk is full; what was scored is safe.
    """
    run = Run.open(root)
    manifest, state = run.manifest, run.state()
    if not state.keys.done:
        raise RunDirectoryError(f"{root} holds no finished rollout yet")
    rule = snapshots or snapshot_rule(manifest)
    loaded = in_memory or load_configured_reward(reward)
    if in_memory is None:
        loaded.close()  # the workers load their own
    digest = hashlib.blake2b(f"{loaded.source_digest} {rule}".encode(), digest_size=16).hexdigest()
    label = loaded.label if isinstance(loaded, FunctionReward) else "rules"
    described = label if reward.path is None else f"{reward.path}:{reward.name}"
    label = label if reward.path is None else Path(reward.path).stem
    name = name or f"{''.join(one if one.isalnum() else '-' for one in label)}-{digest[:8]}"
    if not is_score_name(name):
        raise ConfigError(f"scores {name!r}: letters, digits, '-', '_' and '.'")
    identity = {"scores.run": manifest.run_id, "scores.reward": digest}
    wanted = new_manifest(
        n=manifest.n, identity=identity, dataset={}, versions={}, config={"reward": described}
    )
    with _opened(pass_folder(root, name), wanted) as directory:
        await _settle_earlier(run, directory, retry_unscored=retry_unscored)
        scores, scored = _Pass(run, directory), directory.state

        def on_durable(result: Result) -> None:
            scores.count(result)
            done = scored.keys.done
            say(done, max(state.keys.done, done), scored.rewards.unscored)  # it may grow meanwhile

        scores.writer.start()
        complete = False
        try:
            await _score(scores, ReplayRecipe(reward, root, rule), in_memory, processes, on_durable)
            complete = True
        finally:
            await scores.writer.close(seal=complete)
        directory.merge(keep_batches=False)
        publish_scores(directory.paths.artifact, table := score_table(root, name))
        status = read_status(directory.paths.root)
    return ScoreReport(
        name=name,
        path=str(table),
        rollouts=status.completed,
        now=scores.now,
        unscored=status.unscored,
        failed=status.reward_failed,
        mean_reward=status.mean_reward,
        mean_before=state.rewards.mean,
        causes={cause.example: cause.count for cause in status.unscored_causes},
        damage=run.damage,
    )


@contextmanager
def _opened(folder: Path, wanted: Manifest) -> Iterator[RunDirectory]:
    """The run directory of a pass. Raises `ConfigError` where that of another reward has its place."""
    lock = lock_run(folder)
    try:
        found = read_manifest(folder)
        if found is not None and found.identity == wanted.identity and found.n < wanted.n:  # it was extended
            write_manifest(folder, msgspec.structs.replace(found, n=wanted.n))
        yield open_run(lock, folder, wanted, config_yaml="")
    except IdentityMismatchError as error:
        raise ConfigError(
            f"the scores {folder.stem!r} are of another run or reward, or of what its file said then: choose another "
            "name"
        ) from error
    finally:
        lock.release()


async def _settle_earlier(run: Run, directory: RunDirectory, *, retry_unscored: bool) -> None:
    """Says what is damaged of an earlier pass, and takes out what is to be scored again."""
    for line in directory.state.damage:
        logger.warning("%s: %s: what it held is scored again", directory.paths.root, line)
    if not directory.state.keys.done:
        return
    scored = Run(directory.paths.root, directory.manifest)
    outdated = _outdated(run, scored, retry_unscored=retry_unscored)
    if outdated.done:
        writer = StoreWriter(directory, save_batch_size=_BATCH_ROWS, pull_timeout=math.inf)
        writer.start()
        await writer.close()  # seals what a pass left that was stopped
        directory.forget(outdated)


async def _score(
    scores: _Pass,
    recipe: ReplayRecipe,
    in_memory: FunctionReward | None,
    processes: int | None,
    on_durable: Callable[[Result], None],
) -> None:
    """Scores all that is not scored yet: by a worker in this process, or in processes, where a reward that brings
    one down costs no other rollout.
    """
    keys = scores.keys()
    if (first := next(keys, None)) is None:
        return
    workers = 1 if in_memory is not None else processes or min(os.cpu_count() or 1, 4)
    async with AsyncExitStack() as stack:
        executor = Executor(
            scores,
            ProcessBackend(lambda: recipe) if in_memory is None else LocalBackend(recipe.around(in_memory)),
            load_row=scores.load_row,
            max_in_flight=workers * (recipe.settings.max_concurrency + _AHEAD),
            workers=workers,
            attempt_timeout=recipe.settings.timeout,
            max_attempts=1,
            on_durable=on_durable,
        )
        stack.push_async_callback(executor.close)
        await executor.run(chain([first], keys))
