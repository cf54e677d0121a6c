"""What a reward promises, and rewards that are a function of the user's."""

import functools
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from rollstream.daemon_threads import Outcome, is_async
from rollstream.errors import RewardError
from rollstream.reward.calls import BoundedThreads, LoopThread
from rollstream.reward.score import Score, read_score
from rollstream.trajectory import PromptRow

ComputeScore = Callable[..., Any]
"""verl's `compute_score(data_source, solution_str, ground_truth, extra_info, **reward_kwargs)`."""


@runtime_checkable
class RewardFunction(Protocol):
    """Scores rollouts. Used from one event loop, which it never blocks; many `score` may run at once."""

    @property
    def source_digest(self) -> str:
        """Changes when the rewards may: 32 hexadecimal digits, part of a run's identity."""
        ...

    async def score(self, row: PromptRow, solution_str: str) -> Score:
        """Scores one answer.

        Args:
            row: The prompt row.
            solution_str: The model's answer, as text.

        Returns:
            The reward, and what else there is to say; reward None: nothing knows how to score this row.

        Raises:
            RewardError: Scoring failed, returned no finite number, or took too long. The cause is attached.
        """
        ...

    def close(self) -> None:
        """Frees threads. Waits for nothing."""
        ...


class FunctionReward:
    """A `RewardFunction` that calls one function, verl-style, by keyword arguments.

    A plain function runs in daemon threads; one that hangs is left behind at its timeout. An async function
    runs on an event loop of its own.

    Args:
        function: Any callable that takes `data_source`, `solution_str`, `ground_truth` and `extra_info` as
            keyword arguments, sync or async; returns a number or a dict with `score`.
        label: What messages call it.
        reward_kwargs: Further keyword arguments.
        timeout: Seconds for one call.
        max_concurrency: Calls at once.
        source_digest: See `RewardFunction`.
    """

    def __init__(
        self,
        function: ComputeScore,
        *,
        label: str,
        source_digest: str,
        reward_kwargs: Mapping[str, Any] | None = None,
        timeout: float = 60.0,
        max_concurrency: int = 32,
    ) -> None:
        self.label = label
        self.source_digest = source_digest
        self._caller = FunctionCaller(timeout, max_concurrency)
        self._function = functools.partial(function, **(reward_kwargs or {}))
        self._is_async = is_async(function)

    async def score(self, row: PromptRow, solution_str: str) -> Score:
        return await self._caller.score(self._function, self._is_async, self.label, row, solution_str)

    def close(self) -> None:
        self._caller.close()


class FunctionCaller:
    """Calls reward functions off the event loop and reads what they return.

    Args:
        timeout: Seconds for one call, > 0.
        max_concurrency: Calls at once, > 0; plain and async ones each.
    """

    def __init__(self, timeout: float, max_concurrency: int) -> None:
        self._timeout = timeout
        self._threads = BoundedThreads(max_concurrency, "rollstream-reward")
        self._loop = LoopThread(max_concurrency, "rollstream-reward-loop")

    async def score(
        self, function: ComputeScore, is_async: bool, label: str, row: PromptRow, solution_str: str
    ) -> Score:
        """Scores one answer by `function`.

        Raises:
            RewardError: See `RewardFunction.score`; names `label` and the row.
        """
        call = functools.partial(
            function,
            data_source=row.data_source,
            solution_str=solution_str,
            ground_truth=row.ground_truth,
            extra_info=dict(row.extra_info),
        )
        where = f"{label}, row {row.index} ({row.data_source})"
        try:
            outcome = await self._call(call, is_async)
        except TimeoutError:
            raise RewardError(f"{where}: took longer than {self._timeout:g} seconds") from None
        except RewardError as error:
            raise RewardError(f"{where}: {error}") from error
        if outcome.error is not None:
            error_text = f"{type(outcome.error).__name__}: {outcome.error}"
            raise RewardError(f"{where}: raised {error_text}") from outcome.error
        try:
            return read_score(outcome.value)
        except RewardError as error:
            raise RewardError(f"{where}: {error}") from error.__cause__

    async def run(self, function: Callable[[], Any], timeout: float) -> Outcome:
        """Calls any function in a thread.

        Raises:
            TimeoutError: It took longer than `timeout` seconds.
            RewardError: Closed, or too many calls hang.
        """
        return await self._threads.run(function, timeout)

    def close(self) -> None:
        """Frees threads. Waits for nothing."""
        self._threads.close()
        self._loop.close()

    async def _call(self, call: Callable[[], Any], is_async: bool) -> Outcome:
        if is_async:
            return await self._loop.run(call, self._timeout)
        began = time.monotonic()
        outcome = await self._threads.run(call, self._timeout)
        if not inspect.isawaitable(outcome.value):
            return outcome
        awaitable: Awaitable[Any] = outcome.value  # a plain callable that wraps an async one
        return await self._loop.run(lambda: awaitable, self._timeout - (time.monotonic() - began))
