"""A process that scores rollouts for `rollstream.evaluate.score`.

    parent: ScoreItems ----pickle over a socket pair---->  JSON decoded, reward called, frames encoded
            ScoredFrames <---

A reward that holds Python's interpreter lock, or brings its process down, hurts what is in that process only.
The process ends when its parent does.
"""

import asyncio
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

import orjson

from rollstream.chat.token_text import read_decoder
from rollstream.errors import ConfigError, RewardError
from rollstream.reward.base import FunctionReward, last_answer, scored_row
from rollstream.reward.custom import load_reward
from rollstream.reward.rules import RuleReward
from rollstream.store.journal import encode_frame
from rollstream.store.records import json_text, scoring_failed
from rollstream.store.scores import ScoredRollout, encode_scores
from rollstream.trajectory import PromptRow, RolloutKey, Trajectory

_LINGER_S = 0.02
"""How long a result waits for company: the parent makes durable at once what comes together."""

_GONE = (("workdir",), ("sandbox",))
_IS_GONE = (
    "the reward reads extra_info[{!r}], which is there only while a rollout ends: the folder of an agent program is "
    "gone when it is scored anew. Score what is in extra_info['messages'], or generate again"
)
_ERROR_CHARS = 500
_PR_SET_PDEATHSIG = 1

SnapshotRule = Literal["outcome", "own", "none", "keep"]
"""What a snapshot gets: the final trajectory's reward; one for its own last answer; none; what was recorded."""


@dataclass(frozen=True, slots=True)
class RewardRecipe:
    """What computes rewards; see `load_reward`."""

    path: str | None
    """None: the rules, by data source."""
    name: str
    kwargs: Mapping[str, Any]
    timeout: float
    max_concurrency: int

    def load(self) -> FunctionReward | RuleReward:
        """Raises `ConfigError`."""
        if self.path is None:
            return RuleReward(self.timeout, self.max_concurrency)
        return load_reward(
            self.path, self.name, self.kwargs, timeout=self.timeout, max_concurrency=self.max_concurrency
        )


class ScoreItem(NamedTuple):
    """A rollout to score, as it is stored."""

    key: RolloutKey
    finished_at: float | None
    prompt_key: str
    data_source: str
    ground_truth: str
    trajectories: list["ScoreRow"]


class ScoreRow(NamedTuple):
    """One of its trajectories."""

    is_snapshot: bool
    num_turns: int
    messages: str
    extra: str
    reward: float | None
    """As it was recorded."""
    reward_extra: str
    sampled: list[int] | None
    """Ids, where the text of the answer may not be in the messages."""


class ScoredFrame(NamedTuple):
    """A rollout that was scored."""

    key: RolloutKey
    frame: bytes
    """For the journal of scores."""
    failed: bool
    """Whether the reward failed on it."""


def scored_frame(item: ScoreItem, scores: list[tuple[float | None, str]]) -> ScoredFrame:
    """A rollout as it goes into the journal."""
    (reward, extra), key = scores[-1], item.key
    failed = reward is None and scoring_failed(orjson.loads(extra))
    body = encode_scores(ScoredRollout(item.finished_at, scores))
    return ScoredFrame(key, encode_frame(key.index, key.repeat, len(scores), body), failed)


def failed_frame(item: ScoreItem, error: str) -> ScoredFrame:
    """A rollout that could not be scored."""
    extra = json_text({"error": " ".join(error.split())[:_ERROR_CHARS]})
    return scored_frame(item, [(None, extra)] * len(item.trajectories))


class Scorer:
    """Scores rollouts, any number at once, in one event loop.

    Args:
        recipe: of the reward.
        snapshots: what snapshots get.
        root: the run directory, for its tokenizer.
    """

    def __init__(self, recipe: RewardRecipe, snapshots: SnapshotRule, root: Path) -> None:
        self._reward = recipe.load()
        self._snapshots = snapshots
        self._root = root
        self._tokenizer: Any = None
        self._sources: dict[str, asyncio.Future[bool]] = {}

    async def score(self, item: ScoreItem) -> ScoredFrame:
        """Scores a rollout; one that cannot be scored says why. Raises `ConfigError`: none can."""
        try:
            await self._prepare(item.data_source)
            return scored_frame(item, await self._score_all(item))
        except ConfigError:
            raise
        except Exception as error:  # a damaged cell, an odd answer: its own fault
            return failed_frame(item, f"{type(error).__name__}: {error}")

    async def _prepare(self, source: str) -> None:
        """Imports what the rule of a data source needs, once."""
        if isinstance(self._reward, RuleReward):
            if source not in self._sources:
                self._sources[source] = asyncio.ensure_future(self._reward.prepare(source))
            await asyncio.shield(self._sources[source])

    async def _score_all(self, item: ScoreItem) -> list[tuple[float | None, str]]:
        *snapshots, final = item.trajectories
        reward, extra = await self._score(item, final)
        shared = {"error": extra["error"]} if reward is None and scoring_failed(extra) else {}
        scored: list[tuple[float | None, str]] = []
        for snapshot in snapshots:
            if self._snapshots == "own":
                own, said = await self._score(item, snapshot)
                scored.append((own, json_text(said)))
            elif self._snapshots == "keep":
                scored.append((snapshot.reward, snapshot.reward_extra))
            else:
                scored.append((reward, json_text(shared)) if self._snapshots == "outcome" else (None, "{}"))
        return [*scored, (reward, json_text(extra))]

    async def _score(self, item: ScoreItem, row: ScoreRow) -> tuple[float | None, dict[str, Any]]:
        extra = orjson.loads(row.extra)
        trajectory = Trajectory(
            *([], [], [], None),
            messages=orjson.loads(row.messages),
            finish_reason="",
            is_snapshot=row.is_snapshot,
            num_turns=row.num_turns,
            extra=extra,
        )
        prompt = PromptRow(
            item.key.index,
            item.prompt_key,
            [],
            item.data_source,
            orjson.loads(item.ground_truth),
            extra.get("extra_info") or {},
        )
        answer = last_answer(trajectory.messages)
        if not isinstance(gateway := extra.get("gateway"), dict):
            gateway = None
        else:  # an agent program's: see AgentLoop.reward_info
            answer = gateway.get("answer", answer)
            prompt.extra_info = {**prompt.extra_info, "messages": trajectory.messages}
        try:
            if answer is None:
                answer = self._decode(row.sampled or [])
            return await self._reward.score(scored_row(prompt, trajectory), answer)
        except RewardError as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            cause = error.__cause__
            if gateway is not None and isinstance(cause, KeyError) and cause.args[:1] in _GONE:
                text = f"RewardError: {_IS_GONE.format(*cause.args)}"
            return None, {"error": text[:_ERROR_CHARS]}

    def _decode(self, ids: list[int]) -> str:
        """Text of ids. Raises `RewardError`."""
        if not ids:
            return ""
        if self._tokenizer is None:
            try:
                self._tokenizer = read_decoder(self._root)
            except ConfigError as error:
                raise RewardError(f"its answer is there as token ids only, and {error}") from error
        text: str = self._tokenizer.decode(ids)
        return text


async def _serve(connection: Connection) -> None:
    """Scores what the parent sends, until its end."""
    loop, inbox = asyncio.get_running_loop(), asyncio.Queue[list[ScoreItem] | None]()
    scored: list[ScoredFrame] = []
    some = asyncio.Event()

    def read() -> None:
        try:
            while True:
                items = connection.recv()
                loop.call_soon_threadsafe(inbox.put_nowait, items)
        except (EOFError, OSError):
            loop.call_soon_threadsafe(inbox.put_nowait, None)

    async def score(item: ScoreItem) -> None:
        scored.append(await scorer.score(item))
        some.set()

    async def report() -> None:
        while True:
            await some.wait()
            await asyncio.sleep(_LINGER_S)
            some.clear()
            connection.send(list(scored))
            scored.clear()

    scorer = Scorer(*connection.recv())
    connection.send(None)
    threading.Thread(target=read, daemon=True).start()
    async with asyncio.TaskGroup() as tasks:
        reporting = tasks.create_task(report())
        while (items := await inbox.get()) is not None:
            for item in items:
                tasks.create_task(score(item))
        reporting.cancel()
        os._exit(0)  # nobody is there to be told


def main() -> None:
    """The process's program: the socket's number is its argument."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    connection = Connection(int(sys.argv[1]))
    sys.path.extend(path for path in connection.recv() if path not in sys.path)
    try:
        asyncio.run(_serve(connection))
    except* ConfigError as errors:
        connection.send(ConfigError(str(errors.exceptions[0])))
    except* (BrokenPipeError, EOFError):
        pass  # the parent has ended
    sys.stderr.flush()
    os._exit(0)  # threads of hanging rewards keep nobody waiting
