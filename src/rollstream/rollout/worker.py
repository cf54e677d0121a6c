"""The rollout worker: one rollout from prompt row to scored trajectories, with retries.

The life of a rollout:

    waiting for the engine -> attempt -> scoring -> Rollout
          ^                  | engine away (not charged): waiting again
          |                  | transient error, attempts left: back-off, waiting again
          |                  | engine full (not charged): back-off, waiting again
          +------------------+ else: Failure

A worker never raises for what one rollout does; it raises when the engine is lost for good.

A request that brings its engine down would do so for ever, uncharged, with all others. So a rollout that
was in flight at `_FREE_OUTAGES` outages is a suspect; a suspect that is alone in flight at an outage is
charged an attempt (see `_Isolator`).
"""

import asyncio
import hashlib
import logging
import math
import random
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import compress
from typing import Any, Protocol

from rollstream.agent.base import AgentLoop, AgentResources
from rollstream.agent.registry import AgentLoops
from rollstream.agent.turns import Turns
from rollstream.data.mixed import SOURCE
from rollstream.engine.continuation import ContinuingEngine
from rollstream.engine.load import Counts
from rollstream.errors import (
    AttemptTimeoutError,
    ConfigError,
    DataError,
    EngineError,
    EngineOverloadedError,
    RewardError,
)
from rollstream.reward.base import check_counts, last_answer, scored_row
from rollstream.rollout.availability import EngineAvailability
from rollstream.rollout.retry import RetryPolicy, find_unavailable, is_transient
from rollstream.rollout.validate import check_trajectories
from rollstream.sampling import sampling_of_row
from rollstream.trajectory import (
    CALL_TIMES,
    CONTINUES,
    OWN_REWARD,
    Failure,
    PromptRow,
    Rollout,
    SamplingParams,
    Trajectory,
)

logger = logging.getLogger(__name__)

_FREE_OUTAGES = 8
"""Outages that one rollout lives through unsuspected. With the pauses between probes that is some six seconds of an
engine that says it is well and is not."""

_REFUSAL_WAIT_S_MAX = 5.0
"""Between two tries at a full engine: a rollout that sleeps longer leaves room unused that has come since,
and a hundred that ask this often are twenty small requests a second."""

_SAID_LOUDLY = 5

_TRACEBACK_CHARS = 8_000
"""Of a failure's traceback, its end: enough to see the cause, small enough for 100,000 of them."""


class RewardScorer(Protocol):
    """Scores one answer. Raises `RewardError` when it cannot."""

    async def score(self, row: PromptRow, solution_str: str) -> tuple[float | None, dict[str, Any]]:
        """Returns the score (None: no rule for this row) and what else the reward says."""
        ...


class _Isolator:
    """Who may be in flight while requests are sought that bring their engine down.

    While there are suspects nobody else starts, and of the suspects `limit` may be in flight: one at first, twice
    as many after each that passes, one again after an outage. So innocents are through after a few rounds, and
    whoever is alone in flight at an outage has caused it. Owns no task and no clock.
    """

    def __init__(self) -> None:
        self.suspects = 0
        self._in_flight = 0
        self._limit = 1
        self._changed = asyncio.Event()

    def resolve(self, *, passed: bool) -> None:
        """A suspect has ended; `passed`: it completed, so it was innocent."""
        self.suspects -= 1
        self._limit = 1 if not self.suspects else self._limit * 2 if passed else self._limit
        self._notify()

    async def enter(self, *, suspected: bool) -> bool:
        """Waits until an attempt may begin. Returns whether it is alone in flight, and will be."""
        while self._in_flight >= self._limit if suspected else self.suspects:
            await self._changed.wait()
        self._in_flight += 1
        return suspected and self._limit == 1

    def leave(self, *, outage: bool) -> None:
        """The attempt is over; `outage`: the engine went away under it."""
        self._in_flight -= 1
        if outage:
            self._limit = 1
        if self.suspects:
            self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


@dataclass(eq=False)
class RolloutWorker:
    """Runs rollouts, any number at once, in one event loop."""

    resources: AgentResources
    _: KW_ONLY
    sampling: SamplingParams
    """For every generation; its seed is replaced by the rollout's own."""
    seed: int | None
    """Makes tokens repeatable, rollout by rollout; None leaves seeds to the engine."""
    default_agent_loop: str
    """For rows that name none."""
    retry: RetryPolicy
    attempt_timeout: float
    """Seconds for one attempt."""
    availability: EngineAvailability
    reward: RewardScorer | None = None
    """None leaves rollouts unscored."""
    loops: AgentLoops | None = None
    """By name; None knows the built-in and the registered ones."""
    refusal_patience: float = 0.0
    """Seconds from the first time on that the engine refuses a rollout for want of room, for which its refusals are
    charged to no attempt."""
    limits: Mapping[str, asyncio.Semaphore] = field(default_factory=dict)
    """By the name of a source of prompts: its rollouts wait for it before they begin."""
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self._loops = self.loops or AgentLoops()
        self._isolator = _Isolator()
        self._jitter = random.Random()

    async def run(
        self,
        row: PromptRow,
        repeat: int,
        *,
        name: str = "",
        on_scoring: Callable[[], object] = lambda: None,
        turns: Turns | None = None,
    ) -> Rollout | Failure:
        """Executes one rollout to its end. Raises `EngineLostError` when the engine stays away.

        The engine knows its requests by `name`, by default of row and repeat: whoever runs one of those twice
        at once gives names. `on_scoring` is called when the reward begins. `turns` are those that are finished; a
        loop that can goes on behind them, also after an outage. A new attempt begins anew.
        """
        dispatched = time.monotonic()
        async with self.limits.get(str(row.columns.get(SOURCE)), nullcontext()):
            return await self._attempts(row, repeat, dispatched, name, on_scoring, turns)

    async def _attempts(
        self,
        row: PromptRow,
        repeat: int,
        dispatched: float,
        name: str,
        on_scoring: Callable[[], object],
        turns: Turns | None,
    ) -> Rollout | Failure:
        name = name or f"{row.index}-{repeat}"
        attempt, outages, refusals, refused_at = 1, 0, 0, math.inf
        suspected = passed = False
        try:
            while not passed:
                await self.availability.wait()
                alone = await self._isolator.enter(suspected=suspected)
                returns, started, outage = self.availability.returns, time.monotonic(), None
                try:
                    if not self.availability.is_available:
                        continue  # it closed while this one waited
                    loop, trajectories = await self._attempt(row, repeat, attempt, f"{name}-{attempt}", turns)
                    passed = True
                    break
                except Exception as error:
                    failure, outage = error, find_unavailable(error)
                finally:
                    self._isolator.leave(outage=outage is not None)
                if outage is not None:
                    self.availability.mark_away(outage, returns)
                    self.counts.unavailable += 1
                    outages += 1
                    if outages >= _FREE_OUTAGES and not suspected:
                        suspected = True
                        self._isolator.suspects += 1
                    if not alone:
                        continue
                if isinstance(failure, EngineOverloadedError):
                    refusals += 1
                    refused_at = min(refused_at, time.monotonic())
                    if time.monotonic() - refused_at < self.refusal_patience:
                        # The engine is there and full: it makes room at the pace of answers, not of retries.
                        await asyncio.sleep(min(_REFUSAL_WAIT_S_MAX, self.retry.wait(refusals, self._jitter)))
                        continue
                if attempt >= self.retry.max_attempts or not (outage is not None or is_transient(failure)):
                    return make_failure(row.index, repeat, row.prompt_key, attempt, _stage(failure), failure)
                self.counts.retries += 1
                wait = self.retry.wait(attempt, self._jitter)
                line = (
                    f"({row.index}, {repeat}): attempt {attempt}: {_one_line(failure)}; again in {wait:.1f} s"
                )
                _log_few(line, self.counts.retries)
                attempt += 1
                if turns is not None:
                    turns.forget()
                await asyncio.sleep(wait)
        finally:
            if suspected:
                self._isolator.resolve(passed=passed)
        try:
            row_extra = {**row.columns, **({"extra_info": row.extra_info} if row.extra_info else {})}
            if (stored := row.stored_prompt) is not None:
                row_extra[CONTINUES] = {k: v for k, v in row.columns[CONTINUES].items() if v is not stored}
            for trajectory in trajectories:
                trajectory.metrics.queue_s = started - dispatched
                tools = loop.tool_marks(trajectory.prompt_ids)
                trajectory.extra = {**row_extra, **tools, **trajectory.extra, **self.resources.marks}
                is_settled = trajectory.reward is not None or (
                    trajectory.is_snapshot and loop.snapshot_scoring == "none"
                )
                if is_settled and getattr(self.reward, "sees_group", False):
                    given = {"reward": trajectory.reward, "extra": trajectory.reward_extra}
                    trajectory.extra[OWN_REWARD] = given
            if sum(one.metrics.engine_calls for one in trajectories) > 1:
                trajectories[-1].extra.setdefault(CALL_TIMES, loop.call_times)
            on_scoring()
            await score_trajectories(
                self.reward,
                replace(row, extra_info={**row.extra_info, **loop.reward_info}),
                trajectories,
                decode=self.resources.decode,
                snapshots=loop.snapshot_scoring,
                final_answer=loop.final_answer,
                on_error=self._count_unscored,
            )
        except Exception as error:  # a loop's own odd trajectory: its fault, not the run's
            return make_failure(row.index, repeat, row.prompt_key, attempt, "agent", error)
        finally:
            await loop.close()
        total_s = time.monotonic() - dispatched + (turns.earlier.total_s if turns is not None else 0.0)
        for trajectory in trajectories:
            trajectory.metrics.total_s = total_s
        return Rollout(
            index=row.index,
            repeat=repeat,
            prompt_key=row.prompt_key,
            trajectories=list(trajectories),
            data_source=row.data_source,
            ground_truth=row.ground_truth,
            attempts=attempt,
        )

    async def _attempt(
        self, row: PromptRow, repeat: int, attempt: int, request_id: str, turns: Turns | None
    ) -> tuple[AgentLoop, Sequence[Trajectory]]:
        """The loop, which the caller closes, and its result."""
        name = row.agent_name or self.default_agent_loop
        loop = self._loops.create(name, self.resources, request_id=request_id)
        if row.stored_prompt is not None:
            loop.continues = row
        engine = self.resources.engine
        if turns is not None and loop.says_resumable():
            turns.begin()
            loop.turns = turns
        try:
            with engine.pinned(request_id) if isinstance(engine, ContinuingEngine) else nullcontext():
                return loop, await self._run(loop, name, row, repeat, attempt)
        except BaseException:
            await loop.close()
            raise

    async def _run(
        self, loop: AgentLoop, name: str, row: PromptRow, repeat: int, attempt: int
    ) -> Sequence[Trajectory]:
        sampling = self.sampling
        if (own := row.columns.get("sampling_params")) is not None:
            sampling = sampling_of_row(sampling, own)
        if self.seed is not None:
            sampling = replace(sampling, seed=rollout_seed(self.seed, row.index, repeat))
        arguments = {
            **row.columns,
            "raw_prompt": row.messages,
            "prompt_key": row.prompt_key,
            "index": row.index,
            "data_source": row.data_source,
            "ground_truth": row.ground_truth,
            "extra_info": row.extra_info,
            "tools_kwargs": row.tools_kwargs,
            "images": row.images,
        }
        if (stored := row.stored_prompt) is not None and loop.cannot_continue:
            raise DataError(f"{name!r} cannot go on with a stored conversation: {loop.cannot_continue}")
        try:
            async with asyncio.timeout(self.attempt_timeout) as limit:
                result = await loop.run(sampling, **arguments)
        except TimeoutError as error:
            if limit.expired():
                self.counts.timeouts += 1
                raise AttemptTimeoutError(
                    f"attempt {attempt} took longer than {self.attempt_timeout:g} s (generation.attempt_timeout)"
                ) from error
            raise
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise RuntimeError(f"agent loop {name!r} let a CancelledError of its own escape") from error
        except (Exception, GeneratorExit):
            raise
        except BaseException as error:  # SystemExit, KeyboardInterrupt: it would end the run, not the rollout
            raise RuntimeError(f"agent loop {name!r} raised {error!r}") from error
        trajectories = [result] if isinstance(result, Trajectory) else result
        if (
            not isinstance(trajectories, list | tuple)
            or not trajectories
            or not all(isinstance(one, Trajectory) for one in trajectories)
        ):
            raise TypeError(f"agent loop {name!r} must return trajectories, not {result!r:.200}")
        if stored is not None and trajectories[0].prompt_ids[: len(stored["ids"])] != stored["ids"]:
            raise DataError(f"agent loop {name!r} did not begin with the stored conversation of its row")
        check_trajectories(
            trajectories,
            logprobs=sampling.logprobs,
            ids=self.resources.tokenizer is not None,
            vocab_size=self.resources.vocab_size,
        )
        return trajectories

    def _count_unscored(self, error: RewardError) -> None:
        self.counts.reward_errors += 1
        _log_few(f"could not be scored: {_one_line(error)}", self.counts.reward_errors)


async def score_trajectories(
    reward: RewardScorer | None,
    row: PromptRow,
    trajectories: Sequence[Trajectory],
    *,
    decode: Callable[[list[int]], str],
    snapshots: str,
    final_answer: str | None = None,
    on_error: Callable[[RewardError], object] = lambda error: None,
) -> None:
    """Gives every trajectory of a rollout that has no reward yet the one it is due.

    Args:
        reward: scores one answer; None leaves all unscored but for snapshots of a final one that has a reward.
        row: of the rollout.
        trajectories: the final one last.
        decode: the text of sampled ids, where no message has the answer.
        snapshots: what earlier ones get: the final one's reward ("outcome"), one of their own answer ("own"), none.
        final_answer: what is scored of the final one; None: its last answer.
        on_error: called when the reward fails, which leaves None and `error` in `reward_extra`.
    """

    async def score(trajectory: Trajectory, answer: str | None) -> None:
        if reward is None or trajectory.reward is not None:
            return
        started = time.monotonic()
        try:
            if answer is None and (answer := last_answer(trajectory.messages)) is None:
                answer = decode(list(compress(trajectory.response_ids, trajectory.response_mask)))
            found, extra = await reward.score(scored_row(row, trajectory), answer)
            check_counts(extra, trajectory)
            trajectory.reward = found
        except RewardError as error:
            extra = {"error": _one_line(error)}
            on_error(error)
        trajectory.reward_extra = {**trajectory.reward_extra, **extra}
        trajectory.metrics.reward_s = time.monotonic() - started

    *earlier, final = trajectories
    await score(final, final_answer)
    for snapshot in earlier:
        if snapshots == "own":
            await score(snapshot, None)
        elif snapshots == "outcome" and snapshot.reward is None:
            snapshot.reward = final.reward
            if final.reward is None and "error" in final.reward_extra:
                snapshot.reward_extra = {**snapshot.reward_extra, "error": final.reward_extra["error"]}


def _log_few(line: str, count: int) -> None:
    """Logs what may happen to every rollout: the first few times loudly, then for the curious."""
    logger.log(logging.WARNING if count <= _SAID_LOUDLY else logging.DEBUG, "rollout %s", line)


def rollout_seed(seed: int, index: int, repeat: int) -> int:
    """The sampling seed of one rollout, `0 <= seed < 2**31`: a pure function, whatever the order of work."""
    digest = hashlib.blake2b(f"{seed}:{index}:{repeat}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


def make_failure(
    index: int, repeat: int, prompt_key: str, attempts: int, stage: str, error: BaseException
) -> Failure:
    """A failure with the cause as text."""
    text = "".join(traceback.format_exception(error))
    return Failure(
        index=index,
        repeat=repeat,
        prompt_key=prompt_key,
        attempts=attempts,
        stage=stage,
        error=f"{type(error).__name__}: {error}"[:2000],
        traceback=text[-_TRACEBACK_CHARS:],
        failed_at=time.time(),
    )


def _stage(error: BaseException) -> str:
    if isinstance(error, EngineError):
        return "engine"
    return "prompt" if isinstance(error, DataError | ConfigError) else "agent"


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:500]
