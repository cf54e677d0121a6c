"""The reward pass: what a run has finished is scored anew, without generating.

    run directory --rows--> workers (stored trajectories, reward) --frames--> scores/NAME.rsj --> scores/NAME.parquet

A rollout is scored when its frame is durable; a pass of the same name goes on behind it. The run itself is only
read. The rollouts of a pass are numbered, and their number is the `index` that workers and the executor know.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal, cast

import orjson
import pyarrow.compute as pc

from rollstream.chat.token_text import read_decoder
from rollstream.config.settings import RewardSettings
from rollstream.engine.load import RequestMeter
from rollstream.errors import ConfigError, RunDirectoryError
from rollstream.reward.base import FunctionReward
from rollstream.reward.rules import RuleReward
from rollstream.rollout.availability import EngineAvailability
from rollstream.rollout.executor import Executor
from rollstream.rollout.processes import ProcessBackend
from rollstream.rollout.setup import load_configured_reward
from rollstream.rollout.worker import score_trajectories
from rollstream.rollout.worker_host import BuiltWorker, LocalBackend, Result
from rollstream.store.manifest import LOOP_IDENTITY, Manifest
from rollstream.store.records import RecordCodec, json_text, scoring_failed
from rollstream.store.run import Run
from rollstream.store.scores import (
    SCORED_COLUMNS,
    ScoredRollout,
    ScoreJournal,
    ScorePaths,
    is_score_name,
    require_facts,
    score_folder,
    seal_scores,
)
from rollstream.trajectory import Failure, PromptRow, Rollout, RolloutKey, Trajectory, failure_cause

SnapshotRule = Literal["outcome", "own", "none", "keep"]
"""What a snapshot gets: the final trajectory's reward; one for its own last answer; none; what was recorded."""

_COLUMNS = [
    *SCORED_COLUMNS,
    *("prompt_key", "data_source", "ground_truth", "messages", "extra", "is_snapshot", "num_turns"),
    *("reward", "reward_extra", "response_ids", "response_mask"),
]
_TEXT = '"role":"assistant","content":"'
"""In the messages of nearly every trajectory whose answer is text: then no ids are needed for it."""

_AHEAD = 32
"""Rollouts that a process has beyond those that it scores at once."""


class _Replay:
    """Scores the stored trajectories of rollouts; in the place of a `RolloutWorker`."""

    def __init__(self, reward: FunctionReward | RuleReward, root: Path, snapshots: SnapshotRule) -> None:
        self._reward = reward
        self._root = root
        self._snapshots = snapshots
        self._prepared: set[str] = set()

    async def run(self, row: PromptRow, repeat: int) -> Rollout:
        """The rollout with its rewards, and without what it was scored by: rewards alone travel back."""
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
            replace(row, index=row.columns["index"], extra_info=info),
            trajectories,
            decode=self._decode,
            snapshots=self._snapshots,
            final_answer=answer,
        )
        for trajectory in trajectories:
            trajectory.messages, trajectory.extra = [], {}
            trajectory.response_ids, trajectory.response_mask = [], []
        return Rollout(row.index, repeat, row.prompt_key, trajectories, row.data_source)

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
    """Gives rollouts out, and makes durable what their rewards are."""

    def __init__(self, run: Run, journal: ScoreJournal) -> None:
        self._run = run
        self._journal = journal
        self._rows: dict[int, PromptRow] = {}
        """Given out and not durable yet."""
        self._codec = RecordCodec()
        self.earlier: dict[int, float | None] = {}
        """When each rollout was finished that is scored, by its place in the run."""
        self.now = self.failed = 0

    def place(self, index: int, repeat: int) -> int:
        return index * self._run.manifest.n + repeat

    def keys(self) -> Iterator[RolloutKey]:
        """The rollouts that are not scored yet."""
        given = 0
        for table in self._run.rows(_COLUMNS):
            has_text = pc.match_substring(table["messages"], _TEXT).to_pylist()
            ids, mask = table["response_ids"], table["response_mask"]
            rows: list[dict[str, Any]] = table.drop_columns(["response_ids", "response_mask"]).to_pylist()
            trajectories: list[dict[str, Any]] = []
            for at, row in enumerate(rows):
                pairs = () if has_text[at] else zip(ids[at].as_py(), mask[at].as_py(), strict=True)
                trajectories.append({**row, "sampled": [token for token, sampled in pairs if sampled]})
                place = self.place(row["index"], row["repeat"])
                if at + 1 < len(rows) and place == self.place(rows[at + 1]["index"], rows[at + 1]["repeat"]):
                    continue
                if place not in self.earlier or self.earlier[place] != row["finished_at"]:
                    self._rows[given] = PromptRow(
                        index=given,
                        prompt_key=row["prompt_key"],
                        messages=[],
                        data_source=row["data_source"],
                        ground_truth=orjson.loads(row["ground_truth"]),
                        extra_info=orjson.loads(row["extra"]).get("extra_info") or {},
                        columns={"index": row["index"], "trajectories": trajectories},
                    )
                    yield RolloutKey(given, 0)
                    given += 1
                trajectories = []

    def load_row(self, number: int) -> PromptRow:
        """See `Executor`."""
        return self._rows[number]

    def submit(self, result: Result) -> Awaitable[None]:
        """Makes a rollout's scores durable; see `Sink`."""
        stored = self._rows[result.index].columns["trajectories"]
        if isinstance(result, Failure):
            extra = json_text({"error": " ".join(result.error.split())[:500]})
            scores: list[tuple[float | None, str]] = [(None, extra)] * len(stored)
        elif isinstance(result, Rollout):
            scores = [(one.reward, json_text(one.reward_extra)) for one in result.trajectories]
        else:
            record = self._codec.decode_rollout(result.body)
            scores = [(one.reward, one.reward_extra) for one in record.trajectories]
        scored = ScoredRollout(stored[-1]["finished_at"], scores)
        self.failed += _failed(scored)
        return self._journal.submit(RolloutKey(stored[-1]["index"], stored[-1]["repeat"]), scored)

    def count(self, result: Result) -> None:
        """Counts a rollout whose scores are durable."""
        del self._rows[result.index]
        self.now += 1


def _failed(scored: ScoredRollout) -> bool:
    reward, extra = scored.trajectories[-1]
    return reward is None and scoring_failed(orjson.loads(extra))


@dataclass(slots=True)
class ScoreReport:
    """What a pass did. Counts of rollouts."""

    name: str
    path: str
    rollouts: int = 0
    """In the table."""
    now: int = 0
    """Scored by this pass."""
    unscored: int = 0
    failed: int = 0
    """Unscored ones on which the reward failed."""
    mean_reward: float | None = None
    mean_before: float | None = None
    """Mean of the run's own rewards."""
    causes: dict[str, int] = field(default_factory=dict)
    """How often the reward failed, by the first message of each cause."""
    damage: list[str] = field(default_factory=list)


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
    paths = ScorePaths(score_folder(root), name)
    report = ScoreReport(name, str(paths.table), mean_before=state.rewards.mean)
    with paths.locked():
        facts = require_facts(paths, manifest.run_id, described, digest)
        with ScoreJournal(paths, facts) as journal:
            scores, failed = _Pass(run, journal), set[int]()
            for key, scored in journal.earlier():  # a later one of its key takes its place
                place = scores.place(key.index, key.repeat)
                scores.earlier[place] = scored.finished_at
                (failed.add if _failed(scored) else failed.discard)(place)
            if retry_unscored:
                scores.earlier = {place: at for place, at in scores.earlier.items() if place not in failed}
                failed = set()

            def on_durable(result: Result) -> None:
                scores.count(result)
                total = max(state.keys.done, scores.now)  # it may grow meanwhile
                say(min(len(scores.earlier) + scores.now, total), total, len(failed) + scores.failed)

            recipe = ReplayRecipe(reward, root, rule)
            await _score(scores, recipe, in_memory, processes, on_durable)
            report.now, report.damage = scores.now, run.damage
        _summarise(paths, facts.id, report)
    return report


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


def _summarise(paths: ScorePaths, facts_id: str, report: ScoreReport) -> None:
    """Makes the table of what the journal holds, and counts it."""
    total, scored, causes, examples = 0.0, 0, Counter[str](), dict[str, str]()
    for _, rollout in seal_scores(paths, facts_id):
        report.rollouts += 1
        reward, extra = rollout.trajectories[-1]
        if reward is not None:
            total, scored = total + reward, scored + 1
        elif (error := orjson.loads(extra).get("error")) is not None:
            cause = failure_cause(str(error))
            causes[cause] += 1
            examples.setdefault(cause, str(error))
    report.unscored = report.rollouts - scored
    report.failed = causes.total()
    report.mean_reward = total / scored if scored else None
    report.causes = {examples[cause]: count for cause, count in causes.most_common()}
