"""Built-in rewards, chosen by a row's `data_source`."""

import functools
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import orjson

from rollstream.errors import ConfigError, RewardError
from rollstream.reward.base import ComputeScore, RewardFunction, Score, call_score
from rollstream.trajectory import PromptRow
from rollstream.user_calls import UserCalls

_PREPARE_TIMEOUT = 300.0
"""Seconds a rule gets to import what it needs: generous, as a cold network disk can take a minute."""

FunctionT = TypeVar("FunctionT", bound=ComputeScore)


@dataclass(frozen=True, slots=True)
class Rule:
    """A built-in reward."""

    prefix: str
    """The data sources it scores: `reasoning_gym` scores `reasoning_gym` and `reasoning_gym/...`."""
    function: ComputeScore
    """Has the signature of verl's `compute_score`."""
    prepare: Callable[[], object] | None
    """Imports what the function needs; called at start, without its timeout."""


_rules: dict[str, Rule] = {}


def register_reward(
    prefix: str, *, prepare: Callable[[], object] | None = None
) -> Callable[[FunctionT], FunctionT]:
    """Makes a function the reward of data sources that are `prefix` or begin with `prefix/`.

    The longest prefix that fits counts.

    Args:
        prefix: Without a slash at its end.
        prepare: See `Rule`.

    Raises:
        ConfigError: Another function has that prefix.
    """

    def register(function: FunctionT) -> FunctionT:
        other = _rules.get(prefix)
        if other is not None and _name(other.function) != _name(function):
            raise ConfigError(f"data sources {prefix!r} have a reward already: {_name(other.function)}")
        _rules[prefix] = Rule(prefix, function, prepare)
        return function

    return register


def default_reward(data_source: str) -> ComputeScore | None:
    """The reward function of a data source; None when there is none."""
    rule = find_rule(data_source)
    return None if rule is None else rule.function


def find_rule(data_source: str) -> Rule | None:
    """The rule of a data source; None when there is none."""
    prefix = data_source
    while prefix not in _rules:
        prefix, slash, _ = prefix.rpartition("/")
        if not slash:
            return None
    return _rules[prefix]


class RuleReward:
    """The `RewardFunction` of a run where the data source of a row chooses what scores it.

    Args:
        timeout: Seconds for one call of a rule.
        max_concurrency: Calls of rules at once.
        functions: The functions of data sources, in place of their rules.
        otherwise: The function of all other data sources, in place of rules.
    """

    def __init__(
        self,
        timeout: float = 60.0,
        max_concurrency: int = 32,
        functions: Mapping[str, RewardFunction] = MappingProxyType({}),
        otherwise: RewardFunction | None = None,
    ) -> None:
        self._timeout = timeout
        self._calls = UserCalls("reward", limit=max_concurrency, own_loop=True)
        self._functions, self._otherwise = dict(functions), otherwise
        self.label = "sources" if functions else "rules"
        everyone = [*self._functions.values(), *([otherwise] if otherwise else [])]
        self.takes_trajectory = any(getattr(one, "takes_trajectory", False) for one in everyone)

    @property
    def source_digest(self) -> str:
        """Digest of what scores which data sources; not of the code of rules, so an upgrade can resume."""
        names = sorted(f"{rule.prefix} {_name(rule.function)}" for rule in _rules.values())
        if self._otherwise is not None:
            names = [self._otherwise.source_digest]
        names += sorted(f"{source}: {one.source_digest}" for source, one in self._functions.items())
        return hashlib.blake2b("\n".join(names).encode(), digest_size=16).hexdigest()

    def function(self, data_source: str) -> RewardFunction | None:
        """The function that scores a data source; None where a rule does, or nothing."""
        return self._functions.get(data_source, self._otherwise)

    def knows(self, data_source: str) -> bool:
        """Whether something scores a data source."""
        return self.function(data_source) is not None or find_rule(data_source) is not None

    async def prepare(self, data_source: str) -> bool:
        """Imports what the rule of a data source needs; at start, this shows what is missing.

        Returns:
            Whether something scores it.

        Raises:
            ConfigError: A package is missing.
            RewardError: It failed otherwise, or took longer than five minutes.
        """
        rule = None if self.function(data_source) is not None else find_rule(data_source)
        if rule is None or rule.prepare is None:
            return self.knows(data_source)
        outcome = await self._calls.run(rule.prepare, name="prepare", seconds=_PREPARE_TIMEOUT)
        if outcome.timed_out:
            raise RewardError(f"preparing the reward of {data_source} takes too long")
        if isinstance(outcome.error, ConfigError):
            raise outcome.error
        if outcome.error is not None:
            raise RewardError(
                f"the reward of {data_source} cannot be prepared: {outcome.error!r}"
            ) from outcome.error
        return True

    async def score(self, row: PromptRow, solution_str: str) -> Score:
        if (function := self.function(row.data_source)) is not None:
            return await function.score(row, solution_str)
        rule = find_rule(row.data_source)
        if rule is None:
            return Score(None, {})
        label = f"reward {rule.prefix}"
        return await call_score(self._calls, rule.function, label, self._timeout, row, solution_str)

    def close(self) -> None:
        self._calls.close()
        for function in (*self._functions.values(), self._otherwise):
            if function is not None:
                function.close()


def _name(function: ComputeScore) -> str:
    return (
        f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}"
    )


@register_reward("exact_match")
def exact_match(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    """1 when the answer is the ground truth, as text, but for space around it; else 0.

    Raises:
        ValueError: The row has no ground truth.
    """
    if ground_truth is None:
        raise ValueError("the row has no ground truth")
    return float(solution_str.strip() == str(ground_truth).strip())


def _import_reasoning_gym() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigError(
            "data source reasoning_gym/... needs the package reasoning-gym: pip install 'rollstream[tasks]'"
        ) from error
    return reasoning_gym


@register_reward("reasoning_gym", prepare=_import_reasoning_gym)
def score_reasoning_gym(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    """reasoning-gym's own `score_answer`, between 0 and 1; the answer is the text without space around it.

    Args:
        data_source: `reasoning_gym/<dataset>`.
        solution_str: The model's answer.
        ground_truth: Not used: the entry has it.
        extra_info: `entry`: question, answer and metadata; `config`: the dataset's settings. Both may be JSON
            text.

    Raises:
        ConfigError: reasoning-gym is not installed.
        ValueError: The row has no entry, or reasoning-gym does not know the dataset.
    """
    entry = _mapping((extra_info or {}).get("entry"))
    if not entry:
        raise ValueError("the row has no extra_info.entry, which the task reasoning_gym writes")
    dataset = data_source.partition("/")[2]
    config = orjson.dumps(_mapping((extra_info or {}).get("config")), option=orjson.OPT_SORT_KEYS).decode()
    return float(_scorer(dataset, config)(solution_str.strip(), entry))


@functools.lru_cache(maxsize=256)
def _scorer(dataset: str, config: str) -> Callable[[str, dict[str, Any]], float]:
    """`score_answer` of a dataset of these settings (JSON); making the dataset takes a while."""
    problems: Any = _import_reasoning_gym().create_dataset(dataset, **orjson.loads(config))
    scorer: Callable[[str, dict[str, Any]], float] = problems.score_answer
    return scorer


def _mapping(value: Any) -> dict[str, Any]:
    decoded = orjson.loads(value) if isinstance(value, str) else value
    return decoded if isinstance(decoded, dict) else {}
