"""The reward pass: what a run has finished is scored anew, without generating.

    run directory --rows--> workers (agent loop `replay`, reward) --frames--> scores/NAME.rsj --> scores/NAME.parquet

The loop gives back a rollout's stored trajectories, and the worker scores them as it does in a run. A rollout is
scored when its frame is durable; a pass of the same name goes on behind it. The run itself is only read.

The rollouts of a pass are numbered, and their number is the `index` that workers and the executor know them by.
"""

import hashlib
import os
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import repeat as repeat_value
from pathlib import Path
from typing import Any, Literal, cast

import orjson
import pyarrow.compute as pc

from rollstream.agent.base import AgentLoop, AgentResources
from rollstream.agent.registry import AgentLoops, LoopEntry
from rollstream.chat.token_text import read_decoder
from rollstream.config.settings import RewardSettings
from rollstream.engine.base import Capabilities
from rollstream.engine.load import RequestMeter
from rollstream.errors import ConfigError, RunDirectoryError
from rollstream.reward.base import FunctionReward, Score
from rollstream.reward.rules import RuleReward
from rollstream.rollout.availability import EngineAvailability
from rollstream.rollout.executor import Executor
from rollstream.rollout.processes import ProcessBackend
from rollstream.rollout.retry import RetryPolicy
from rollstream.rollout.setup import load_configured_reward
from rollstream.rollout.worker import RolloutWorker
from rollstream.rollout.worker_host import BuiltWorker, LocalBackend
from rollstream.store.manifest import LOOP_IDENTITY, Manifest
from rollstream.store.records import EncodedRollout, RecordCodec, json_text, scoring_failed
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
from rollstream.trajectory import (
    Failure,
    PromptRow,
    Rollout,
    RolloutKey,
    SamplingParams,
    Trajectory,
    failure_cause,
)

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

_PROMPT_IDS = [0]
"""A trajectory must have a prompt; the reward does not see its ids."""


class ReplayAgent(AgentLoop):
    """Gives back the stored trajectories of a rollout, without their rewards."""

    needs_tokenizer = False
    _trajectories: Sequence[Trajectory] = ()

    async def run(self, sampling: SamplingParams, **row: Any) -> list[Trajectory]:
        rule: SnapshotRule = row["snapshots"]
        self.snapshot_scoring = "none" if rule == "keep" else rule
        self._trajectories = found = [_trajectory(one, keep=rule == "keep") for one in row["trajectories"]]
        program = found[-1].extra.get("gateway")
        if isinstance(program, dict):  # the reward sees the whole conversation, as at the end of the program
            self.final_answer = program.get("answer")
            self.reward_info = {"messages": found[-1].messages}
        return found

    async def close(self) -> None:
        for trajectory in self._trajectories:  # rewards alone travel back
            trajectory.messages, trajectory.extra = [], {}
            trajectory.response_ids, trajectory.response_mask = [], []


def _trajectory(row: dict[str, Any], *, keep: bool) -> Trajectory:
    kept = keep and row["is_snapshot"]
    return Trajectory(
        prompt_ids=_PROMPT_IDS,
        response_ids=row["sampled"],
        response_mask=[1] * len(row["sampled"]),
        response_logprobs=None,
        messages=orjson.loads(row["messages"]),
        finish_reason="stop",
        is_snapshot=row["is_snapshot"],
        num_turns=row["num_turns"],
        reward=row["reward"] if kept else None,
        reward_extra=orjson.loads(row["reward_extra"]) if kept else {},
        extra=orjson.loads(row["extra"]),
    )


class _NoEngine:
    """Stands where nothing is generated."""

    capabilities = Capabilities(
        token_ids=True,
        logprobs="none",
        seeds=False,
        stop_strings=False,
        stop_token_ids=False,
        images=False,
        update_weights=False,
        max_model_len=None,
    )

    async def health(self) -> bool:
        return True


class _RunTokenizer:
    """Decodes ids by the `tokenizer.json` that the run keeps."""

    makes_ids = False

    def __init__(self, root: Path) -> None:
        self._root = root

    def decode(self, ids: list[int]) -> str:
        return str(self._decoder.decode(ids)) if ids else ""

    @cached_property
    def _decoder(self) -> Any:
        return read_decoder(self._root)


class _PassReward:
    """A reward that is told the prompt row's own index, and prepares the rule of each data source."""

    def __init__(self, reward: FunctionReward | RuleReward) -> None:
        self._reward = reward
        self._prepared: set[str] = set()

    async def score(self, row: PromptRow, solution_str: str) -> Score:
        if isinstance(self._reward, RuleReward) and row.data_source not in self._prepared:
            await self._reward.prepare(row.data_source)
            self._prepared.add(row.data_source)
        return await self._reward.score(replace(row, index=row.columns["index"]), solution_str)


@dataclass(frozen=True, slots=True)
class ReplayRecipe:
    """A worker that scores; see `WorkerRecipe`."""

    reward: RewardSettings
    root: Path

    async def build(self, number: int) -> BuiltWorker:
        reward = load_configured_reward(self.reward)

        async def close() -> None:
            reward.close()

        return replace(build_worker(reward, self.root), close=close)


def build_worker(reward: FunctionReward | RuleReward, root: Path) -> BuiltWorker:
    """A worker that scores the rollouts of a run directory; the reward stays the caller's to close."""
    engine = cast(Any, _NoEngine())
    availability = EngineAvailability(engine, timeout=60.0)
    resources = AgentResources(
        engine, cast(Any, _RunTokenizer(root)), prompts=cast(Any, None), response_length=1
    )

    worker = RolloutWorker(
        resources,
        sampling=SamplingParams(max_tokens=1, logprobs=False),
        seed=None,
        default_agent_loop="replay",
        retry=RetryPolicy(max_attempts=1, delay=1.0, delay_max=1.0),
        attempt_timeout=60.0,
        availability=availability,
        reward=_PassReward(reward),
        loops=AgentLoops({"replay": LoopEntry(ReplayAgent)}),
    )
    return BuiltWorker(worker, RequestMeter(), availability)


class _Pass:
    """Gives rollouts out, and makes durable what their rewards are."""

    def __init__(
        self,
        run: Run,
        snapshots: SnapshotRule,
        journal: ScoreJournal,
    ) -> None:
        self._run = run
        self._snapshots = snapshots
        self._journal = journal
        self._rows: dict[int, PromptRow] = {}
        """Given out and not durable yet."""
        self._codec = RecordCodec()
        self._given = 0
        self.scored = self.failed = 0

    def keys(self, earlier: "ScoredTimes") -> Iterator[RolloutKey]:
        """The rollouts that are not scored yet."""
        for table in self._run.rows(_COLUMNS):
            has_text = pc.match_substring(table["messages"], _TEXT).to_pylist()
            ids, mask = table["response_ids"], table["response_mask"]
            rows: list[dict[str, Any]] = table.drop_columns(["response_ids", "response_mask"]).to_pylist()
            trajectories: list[dict[str, Any]] = []
            for at, row in enumerate(rows):
                pairs = () if has_text[at] else zip(ids[at].as_py(), mask[at].as_py(), strict=True)
                trajectories.append({**row, "sampled": [one for one, sampled in pairs if sampled]})
                key = RolloutKey(row["index"], row["repeat"])
                if at + 1 < len(rows) and key == RolloutKey(rows[at + 1]["index"], rows[at + 1]["repeat"]):
                    continue
                if not earlier.holds(*key_of(row), row["finished_at"]):
                    self._rows[self._given] = self._row(self._given, trajectories)
                    self._given += 1
                    yield RolloutKey(self._given - 1, 0)
                trajectories = []

    def _row(self, number: int, trajectories: list[dict[str, Any]]) -> PromptRow:
        final = trajectories[-1]
        return PromptRow(
            index=number,
            prompt_key=final["prompt_key"],
            messages=[],
            data_source=final["data_source"],
            ground_truth=orjson.loads(final["ground_truth"]),
            extra_info=orjson.loads(final["extra"]).get("extra_info") or {},
            columns={"index": final["index"], "snapshots": self._snapshots, "trajectories": trajectories},
        )

    def load_row(self, number: int) -> PromptRow:
        """See `Executor`."""
        return self._rows[number]

    def submit(self, result: Rollout | EncodedRollout | Failure) -> Awaitable[None]:
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
        reward, extra = scores[-1]
        self.failed += reward is None and scoring_failed(orjson.loads(extra))
        key = RolloutKey(*key_of(stored[-1]))
        return self._journal.submit(key, ScoredRollout(stored[-1]["finished_at"], scores))

    def settled(self, result: Rollout | EncodedRollout | Failure) -> None:
        """Counts a rollout whose scores are durable."""
        del self._rows[result.index]
        self.scored += 1


def key_of(row: dict[str, Any]) -> tuple[int, int]:
    """Index and repeat."""
    return row["index"], row["repeat"]


class ScoredTimes:
    """Which rollouts are scored, each by the time at which it was finished: 8 bytes a rollout."""

    def __init__(self, n: int) -> None:
        """`n` is the number of rollouts of a prompt row."""
        self._n = n
        self._times = array("d")

    def __len__(self) -> int:
        return sum(time >= 0 for time in self._times)

    def add(self, index: int, repeat: int, finished_at: float | None) -> None:
        """Marks one; a later one of its key takes its place."""
        at = index * self._n + repeat
        if at >= len(self._times):
            self._times.extend(repeat_value(-1.0, at + 1 - len(self._times)))
        self._times[at] = finished_at or 0.0

    def discard(self, index: int, repeat: int) -> None:
        """Takes one out that was added."""
        self._times[index * self._n + repeat] = -1.0

    def holds(self, index: int, repeat: int, finished_at: float | None) -> bool:
        """Whether this very rollout is scored."""
        at = index * self._n + repeat
        return at < len(self._times) and self._times[at] == (finished_at or 0.0)


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
    label = label if reward.path is None else Path(reward.path).stem
    name = name or f"{''.join(one if one.isalnum() else '-' for one in label)}-{digest[:8]}"
    if not is_score_name(name):
        raise ConfigError(f"scores {name!r}: letters, digits, '-', '_' and '.'")
    paths = ScorePaths(score_folder(root), name)
    report = ScoreReport(name, str(paths.table), mean_before=state.rewards.mean)
    described = label if reward.path is None else f"{reward.path}:{reward.name}"
    with paths.locked():
        facts = require_facts(paths, manifest.run_id, described, digest)
        with ScoreJournal(paths, facts) as journal:
            earlier, failed = ScoredTimes(manifest.n), set[tuple[int, int]]()
            for key, scored in journal.earlier():
                earlier.add(key.index, key.repeat, scored.finished_at)
                value, extra = scored.trajectories[-1]
                failed.discard((key.index, key.repeat))
                if value is None and scoring_failed(orjson.loads(extra)):
                    failed.add((key.index, key.repeat))
            if retry_unscored:
                for failed_key in failed:
                    earlier.discard(*failed_key)
                failed = set()
            done = len(earlier)
            one_pass = _Pass(run, rule, journal)

            def settled(result: Rollout | EncodedRollout | Failure) -> None:
                one_pass.settled(result)
                total = max(state.keys.done, one_pass.scored)  # it may grow meanwhile
                say(min(done + one_pass.scored, total), total, len(failed) + one_pass.failed)

            worker = None if in_memory is None else build_worker(in_memory, root)
            await _run(one_pass, earlier, ReplayRecipe(reward, root), worker, processes, settled)
            report.now, report.damage = one_pass.scored, run.damage
        _summarise(paths, facts.id, report)
    return report


async def _run(
    one_pass: _Pass,
    earlier: ScoredTimes,
    recipe: ReplayRecipe,
    worker: BuiltWorker | None,
    processes: int | None,
    settled: Callable[[Rollout | EncodedRollout | Failure], None],
) -> None:
    """Scores all that is not scored yet: by a worker in this process, or in processes, where a reward that brings
    one down costs no other rollout.
    """
    keys = one_pass.keys(earlier)
    if (first := next(keys, None)) is None:
        return

    def all_keys() -> Iterator[RolloutKey]:
        yield first
        yield from keys

    window = recipe.reward.max_concurrency + _AHEAD
    workers = 1 if worker is not None else processes or min(os.cpu_count() or 1, 4)
    async with AsyncExitStack() as stack:
        executor = Executor(
            one_pass,
            ProcessBackend(lambda: recipe) if worker is None else LocalBackend(worker),
            load_row=one_pass.load_row,
            max_in_flight=workers * window,
            workers=workers,
            attempt_timeout=recipe.reward.timeout,
            max_attempts=1,
            on_durable=settled,
        )
        stack.push_async_callback(executor.close)
        await executor.start()
        await executor.run(all_keys())


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
