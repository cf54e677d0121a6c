"""The reward pass: what a run has finished is scored anew, without generating; see `stored_pass`."""

import asyncio
import hashlib
import os
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, cast

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from rollstream.chat.token_text import read_decoder
from rollstream.config.settings import RewardSettings
from rollstream.data.mixed import SOURCE
from rollstream.engine.load import RequestMeter
from rollstream.errors import ConfigError
from rollstream.reward.base import FunctionReward
from rollstream.reward.rules import RuleReward
from rollstream.rollout.availability import EngineAvailability
from rollstream.rollout.executor import WorkerBackend
from rollstream.rollout.group_reward import GroupReward, give_reward, score_group
from rollstream.rollout.processes import ProcessBackend
from rollstream.rollout.setup import Reward, load_configured_reward
from rollstream.rollout.stored_pass import (
    GROUP,
    PassPlan,
    ScoreReport,
    pass_trajectory,
    run_pass,
    scored_rollout,
)
from rollstream.rollout.worker import score_trajectories
from rollstream.rollout.worker_host import BuiltWorker, LocalBackend
from rollstream.store.arrow import column_values
from rollstream.store.manifest import LOOP_IDENTITY, Manifest
from rollstream.store.run import Run
from rollstream.store.scores import SCORED_COLUMNS, publish_sidecar
from rollstream.trajectory import OWN_REWARD, PromptRow, Rollout, Trajectory

SnapshotRule = Literal["outcome", "own", "none", "keep"]
"""What a snapshot gets: the final trajectory's reward; one for its own last answer; none; what was recorded."""

_COLUMNS = [
    *SCORED_COLUMNS,
    *("prompt_key", "data_source", "ground_truth", "messages", "extra", "is_snapshot", "num_turns"),
    *("reward", "reward_extra", "response_ids", "response_mask"),
]
_OF_TRAJECTORY = ("prompt_ids", "response_logprobs", "finish_reason")
"""What is read besides for a function that asks for the trajectory."""
_TEXT = '"role":"assistant","content":"'
"""In the messages of nearly every trajectory whose answer is text: then no ids are needed for it."""

_AHEAD = 32
"""Rollouts that a process has beyond those that it scores at once."""


class _Replay:
    """Scores the stored trajectories of rollouts; in the place of a `RolloutWorker`.

    `data_sources`: by the name of a source of prompts what its rows have now, whatever they were stored with.
    """

    def __init__(
        self, reward: Reward, root: Path, snapshots: SnapshotRule, data_sources: Mapping[str, str]
    ) -> None:
        self._reward = reward
        self._data_sources = data_sources
        self._root = root
        self._snapshots = snapshots
        self._prepared: set[str] = set()

    async def run(self, row: PromptRow, repeat: int) -> Rollout:
        trajectories = [self._trajectory(stored) for stored in row.columns["trajectories"]]
        source = trajectories[-1].extra.get(SOURCE)
        if isinstance(source, str) and source in self._data_sources:
            row = replace(row, data_source=self._data_sources[source])
        if isinstance(self._reward, RuleReward) and row.data_source not in self._prepared:
            await self._reward.prepare(row.data_source)
            self._prepared.add(row.data_source)
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
        scored = [pass_trajectory(one.is_snapshot, one.reward, one.reward_extra) for one in trajectories]
        return scored_rollout(row, repeat, scored)

    def _trajectory(self, stored: dict[str, Any]) -> Trajectory:
        kept = self._snapshots == "keep" and stored["is_snapshot"]
        return Trajectory(
            prompt_ids=stored.get("prompt_ids", [0]),
            response_ids=stored["response_ids"],
            response_mask=list(stored["response_mask"]),
            response_logprobs=stored.get("response_logprobs"),
            messages=orjson.loads(stored["messages"]),
            finish_reason=stored.get("finish_reason", "stop"),
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


class _GroupReplay:
    """Scores the stored groups of rollouts; in the place of a `RolloutWorker`."""

    def __init__(self, reward: GroupReward, root: Path, snapshots: SnapshotRule) -> None:
        self._reward, self._root, self._snapshots = reward, root, snapshots
        self._judging: dict[int, asyncio.Task[None]] = {}

    async def run(self, row: PromptRow, repeat: int) -> Rollout:
        group: list[Rollout] = row.columns[GROUP]
        if row.index not in self._judging:
            self._judging[row.index] = asyncio.create_task(self._judge(group))
        await asyncio.shield(self._judging[row.index])
        if repeat == group[-1].repeat:
            self._judging.pop(row.index)
        found = next(one for one in group if one.repeat == repeat)
        scored = [
            pass_trajectory(one.is_snapshot, one.reward, one.reward_extra) for one in found.trajectories
        ]
        return scored_rollout(row, repeat, scored)

    async def _judge(self, group: list[Rollout]) -> None:
        for rollout in group:
            for one in rollout.trajectories:
                if (own := one.extra.get(OWN_REWARD)) is not None:
                    one.reward, one.reward_extra = own["reward"], own["extra"]
                elif not (one.is_snapshot and self._snapshots == "keep"):
                    one.reward, one.reward_extra = None, {}
            if OWN_REWARD in rollout.final.extra:
                give_reward(rollout, rollout.final.reward, {}, snapshots=self._snapshots)
        await score_group(self._reward, group, decode=self._decode, snapshots=self._snapshots)

    def _decode(self, ids: list[int]) -> str:
        return str(read_decoder(self._root).decode(ids)) if ids else ""


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

    def around(self, reward: Reward) -> BuiltWorker:
        """The worker of a reward, which stays the caller's to close."""
        return _built(_Replay(reward, self.root, self.snapshots, self.settings.data_sources))


def _built(worker: Any) -> BuiltWorker:
    return BuiltWorker(worker, RequestMeter(), EngineAvailability(cast(Any, None), timeout=60.0))


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

    A reward that sees groups scores those of which no rollout is owed, in this process unless `processes` are given.

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
    run, own = Run.open(root), reward.processes
    reward = replace(reward, processes=0)  # the pass has processes of its own
    rule = snapshots or snapshot_rule(run.manifest)
    loaded = in_memory or load_configured_reward(reward)
    by_group = not isinstance(loaded, RuleReward) and loaded.sees_group
    if in_memory is None:
        loaded.close()  # the workers load their own
    digest = hashlib.blake2b(f"{loaded.source_digest} {rule}".encode(), digest_size=16).hexdigest()
    whole = getattr(loaded, "takes_trajectory", False)
    label = described = loaded.label
    if reward.path is not None and not reward.of_sources:
        label, described = Path(reward.path).stem, f"{reward.path}:{reward.name}"
    recipe, workers = ReplayRecipe(reward, root, rule), processes or min(os.cpu_count() or 1, 4)

    async def open_backend(stack: AsyncExitStack) -> WorkerBackend:
        """In processes a reward that brings one down costs no other rollout."""
        if by_group:
            judge = in_memory or load_configured_reward(replace(reward, processes=processes or own))
            assert not isinstance(judge, RuleReward)
            if in_memory is None:
                stack.callback(judge.close)
            return LocalBackend(_built(_GroupReplay(judge, root, rule)))
        if in_memory is None:
            return ProcessBackend(lambda: recipe)
        return LocalBackend(recipe.around(in_memory))

    alone = by_group or in_memory is not None
    at_once = reward.max_concurrency + _AHEAD
    if by_group:
        at_once = run.manifest.n * reward.max_concurrency
    plan = PassPlan(
        kind="scores",
        name=name or f"{''.join(one if one.isalnum() else '-' for one in label)}-{digest[:8]}",
        identity={"scores.reward": digest},
        config={"reward": described},
        columns=[*_COLUMNS, *(_OF_TRAJECTORY if whole else ())],
        read_rows=partial(_answers, whole=whole),
        publish=lambda artifact, table, _: publish_sidecar(artifact, table),
        open_backend=open_backend,
        workers=1 if alone else workers,
        max_in_flight=(1 if alone else workers) * at_once,
        timeout=reward.timeout,
        by_group=by_group,
    )
    return await run_pass(run, plan, retry_failed=retry_unscored, say=say)


def _answers(table: pa.Table, *, whole: bool) -> list[dict[str, Any]]:
    """Rows with their masks as bytes, and with ids where these may be needed for the answer, or for the `whole`."""
    has_text = pc.match_substring(table["messages"], _TEXT).to_pylist()
    ids, mask = table["response_ids"], table["response_mask"]
    rows: list[dict[str, Any]] = table.drop_columns(["response_ids", "response_mask"]).to_pylist()
    for at, row in enumerate(rows):
        row["response_ids"] = [] if has_text[at] and not whole else ids[at].as_py()
        row["response_mask"] = column_values(mask[at].values).tobytes()
    return rows
