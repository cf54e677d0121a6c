"""The contract of rewards, and rewards that are a function of the user's."""

import copy
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from rollstream.errors import RewardError, TransientError
from rollstream.surrogates import replace_in_text
from rollstream.trajectory import REWARD_STREAMS, Message, PromptRow, Trajectory, sampled_stretches
from rollstream.user_calls import CallsRefusedError, UserCalls

T = TypeVar("T")

ComputeScore = Callable[..., Any]
"""verl's `compute_score(data_source, solution_str, ground_truth, extra_info, **reward_kwargs)`."""


class Score(NamedTuple):
    """A rollout's reward, and what comes with it."""

    reward: float | None
    """Finite; None when no rule knows the row's data source: not scored."""
    extra: dict[str, Any]
    """The reward function's other results; JSON values."""


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
    """A `RewardFunction` that calls one function, verl-style, by keyword arguments, off the event loop.

    Args:
        function: Any callable that takes `data_source`, `solution_str`, `ground_truth` and `extra_info` as
            keyword arguments, sync or async; returns a number or a dict with `score`. One that has a parameter
            `trajectory` is given the `Trajectory`, too: a copy; None where only the answer is known. One with
            `solution_strs` takes the plurals of all these, and returns a list.
        label: What messages call it.
        source_digest: See `RewardFunction`.
        reward_kwargs: Further keyword arguments.
        timeout: Seconds for one call.
        max_concurrency: Calls at once.
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
        self.sees_group = has_parameter(function, ANSWERS)
        """Whether it scores all rollouts of a prompt together, by `score_group`; `score` then has no reward."""
        self.takes_trajectory = has_parameter(function, SCORED, f"{SCORED[:-1]}ies")
        self._function = functools.partial(function, **(reward_kwargs or {}))
        self._timeout = timeout
        self._limit = max_concurrency
        self._calls = UserCalls("reward", limit=max_concurrency, own_loop=True)

    def reopened(self) -> "FunctionReward":
        """The same reward, after a `close`."""
        again = copy.copy(self)
        again._calls = UserCalls("reward", limit=self._limit, own_loop=True)
        return again

    async def score(self, row: PromptRow, solution_str: str) -> Score:
        if self.sees_group:
            return Score(None, {})
        function: ComputeScore = self._function
        if self.takes_trajectory:
            function = functools.partial(function, trajectory=copy.deepcopy(row.columns.get(SCORED)))
        return await call_score(self._calls, function, self.label, self._timeout, row, solution_str)

    async def score_group(self, rows: Sequence[PromptRow], answers: Sequence[str]) -> list[Score]:
        """Scores the answers of all rollouts of a prompt, `rows` as `score` has one. Raises `RewardError`."""
        given: dict[str, list[Any]] = {
            "data_sources": [row.data_source for row in rows],
            ANSWERS: [*answers],
            "ground_truths": [row.ground_truth for row in rows],
            "extra_infos": [dict(row.extra_info) for row in rows],
        }
        if self.takes_trajectory:
            given["trajectories"] = [copy.deepcopy(row.columns.get(SCORED)) for row in rows]

        def read(returned: Any) -> list[Score]:
            found = returned.tolist() if hasattr(returned, "tolist") else returned  # numpy and torch
            if not isinstance(found, list | tuple) or len(found) != len(rows):
                raise RewardError(f"returned {_shown(returned)}, want a list of {len(rows)} scores")
            return [*map(read_score, found)]

        call = functools.partial(self._function, **given)
        return await _call(self._calls, call, self.label, self._timeout, rows[0], read)

    def close(self) -> None:
        self._calls.close()


SCORED = "trajectory"
"""Among the columns of a row as the reward sees it: the trajectory, where it is known."""


ANSWERS = "solution_strs"
"""The parameter by which a function sees all rollouts of a prompt, as those of verl see a batch."""


def has_parameter(function: ComputeScore, *names: str) -> bool:
    """Whether a reward function asks for something, by the name of a parameter."""
    try:
        return not inspect.signature(function).parameters.keys().isdisjoint(names)
    except (TypeError, ValueError):  # written in C
        return False


async def call_score(
    calls: UserCalls, function: ComputeScore, label: str, timeout: float, row: PromptRow, solution_str: str
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
    return await _call(calls, call, label, timeout, row, read_score)


async def _call(
    calls: UserCalls,
    call: Callable[[], Any],
    label: str,
    timeout: float,
    row: PromptRow,
    read: Callable[[Any], T],
) -> T:
    where = f"{label}, row {row.index} ({row.data_source})"
    try:
        outcome = await calls.run(call, name=label, seconds=timeout)
    except TransientError as error:
        raise RewardError(f"{where}: {error}") from error
    if outcome.timed_out:
        raise RewardError(f"{where}: took longer than {timeout:g} seconds")
    if isinstance(outcome.error, CallsRefusedError):
        raise RewardError(f"reward {outcome.error}") from outcome.error
    if (raised := outcome.error) is not None:
        raise RewardError(f"{where}: raised {type(raised).__name__}: {_message(raised)}") from raised
    try:
        return read(outcome.value)
    except RewardError as error:
        raise RewardError(f"{where}: {error}") from error.__cause__


def last_answer(messages: Sequence[Message]) -> str | None:
    """The text of the last assistant message, which is scored; None where no message of the assistant has any."""
    for message in reversed(messages):
        if message.get("role") == "assistant" and isinstance(message.get("content"), str):
            return str(message["content"])
    return None


_SCORED_EXTRAS = ("tool_rewards", "tool_scores", "turn_scores", "interaction_score")
"""A loop may leave these in a trajectory's `extra`, and a reward may want to know them."""


def scored_row(row: PromptRow, trajectory: Trajectory) -> PromptRow:
    """The row as the reward sees it: its `extra_info` also says how the rollout went."""
    told: dict[str, Any] = {"num_turns": trajectory.num_turns, "is_snapshot": trajectory.is_snapshot}
    for message in reversed(trajectory.messages):
        if message.get("role") == "assistant":
            if "reasoning_content" in message:
                told["reasoning_content"] = message["reasoning_content"]
            break
    told |= {key: trajectory.extra[key] for key in _SCORED_EXTRAS if key in trajectory.extra}
    return replace(row, extra_info={**row.extra_info, **told}, columns={**row.columns, SCORED: trajectory})


def check_counts(extra: Mapping[str, Any], trajectory: Trajectory) -> None:
    """Raises `RewardError` where `steps` are not as many as the model's turns, or `tokens` as the response's tokens."""
    mask = trajectory.response_mask
    for name, wanted, of in (
        ("steps", len(sampled_stretches(mask)), "turns of the model"),
        ("tokens", len(mask), "tokens of the response"),
    ):
        if isinstance(extra.get(name), list) and len(extra[name]) != wanted:
            raise RewardError(f"returned {len(extra[name])} {name} for {wanted} {of}")


def read_score(returned: Any) -> Score:
    """Reads a number, or a dict with `score`, whose other items become `extra`.

    Numbers are int, float, bool, and what numpy and torch have for them. In `extra`, arrays become lists,
    NaN and infinities None, and lone surrogates U+FFFD. What JSON does not know is left out, and `not_stored`
    says so: the score counts all the same. `steps` and `tokens`, where they are lists, are numbers like the score.

    Raises:
        RewardError: Anything else, or a score, a step or a token's number that is not finite.
    """
    if not isinstance(returned, dict):
        return Score(_number(returned, ""), {})
    if "score" not in returned:
        keys = ", ".join(map(str, returned)) or "(none)"
        raise RewardError(f"returned a dict without score; its keys are: {keys}")
    extra: dict[str, Any] = {}
    not_stored: dict[str, str] = {}
    for key, item in returned.items():
        if key == "score":
            continue
        if key in REWARD_STREAMS.values():
            item = item.tolist() if hasattr(item, "tolist") else item  # numpy and torch
            if isinstance(item, list | tuple):
                extra[key] = [_number(one, f"{key} with ") for one in item]
                continue
        try:
            extra[_text(key)] = _jsonable(item, str(key))
        except (RewardError, RecursionError) as error:
            not_stored[_text(key)] = _message(error)
    if not_stored:
        extra["not_stored"] = not_stored
    return Score(_number(returned["score"], "a score of "), extra)


def _number(value: Any, what: str) -> float:
    plain = value
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # numpy and torch scalars
        plain = value.item()
    if not isinstance(plain, int | float):
        raise RewardError(
            f"returned {what}{_shown(value)} ({type(value).__name__}), want a number or a dict with score"
        )
    try:
        number = float(plain)
    except OverflowError as error:
        raise RewardError(f"returned {what}an integer too large for a float") from error
    if not math.isfinite(number):
        raise RewardError(f"returned {what}{number}, want a finite number")
    return number


def _jsonable(value: Any, where: str) -> Any:
    if isinstance(value, str):
        return _text(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if -(2**63) <= value < 2**63:
            return int(value)
        raise RewardError(f"returned an integer beyond 64 bits in {where}; return it as text")
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {_text(key): _jsonable(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if hasattr(value, "tolist"):  # numpy and torch
        return _jsonable(value.tolist(), where)
    raise RewardError(
        f"returned a {type(value).__name__} in {where}, which JSON does not know: {_shown(value)}"
    )


def _text(value: Any) -> str:
    return replace_in_text(str(value))


def _message(error: BaseException) -> str:
    """The text of a user's exception, in a form that can be stored."""
    try:
        return str(error).encode("utf-8", "backslashreplace").decode()
    except Exception:  # its own __str__ fails
        return "(its message cannot be shown)"


def _shown(value: Any) -> str:
    try:
        text = repr(value).encode("utf-8", "backslashreplace").decode()
    except Exception:  # its own __repr__ fails
        text = object.__repr__(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
