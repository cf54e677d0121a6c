"""The built-in task `reasoning_gym`: problems made by the package of that name."""

import difflib
import importlib.metadata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import orjson

from rollstream.data.prompt_template import PromptTemplate
from rollstream.data.tasks import MISSING_EXTRA, Task, TaskConfig
from rollstream.data.values import Row, to_jsonable
from rollstream.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningGymConfig(TaskConfig):
    """An entry `{name: reasoning_gym, dataset: chain_sum, size: 500, seed: 1, config: {...}}`."""

    dataset: str
    """Name of the reasoning-gym dataset: chain_sum, countdown, ..."""
    size: int = 500
    """Rows."""
    seed: int = 0
    """Decides the problems."""
    config: dict[str, Any] = field(default_factory=dict)
    """The dataset's own settings: `{min_terms: 2, max_terms: 2}`."""


class ReasoningGymTask(Task):
    """Rows with all that reasoning-gym's `score_answer` needs.

    `data_source` is `reasoning_gym/<dataset>`; `extra_info` has `entry` (question, answer and metadata, as
    JSON text) and `config` (the dataset's settings, as JSON text); the ground truth is the entry's answer.
    """

    config_type: ClassVar[type[TaskConfig]] = ReasoningGymConfig

    @classmethod
    def config_keys(cls) -> list[str]:
        return [
            "name", "dataset", "size", "seed", "config", "system_prompt", "prompt_template", "max_samples",
            "custom_cls",
        ]  # fmt: skip

    def check(self) -> None:
        super().check()
        config = self.config
        for key, kind in (("dataset", str), ("size", int), ("seed", int), ("config", dict)):
            value = getattr(config, key)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise ConfigError(f"{self.label}: {key} is {value!r}, want {kind.__name__}")
        if config.size < 1:
            raise ConfigError(f"{self.label}: size is {config.size}, want 1 or more")
        if self._template is None:
            self._template = PromptTemplate("{question}", self.label)

    def dependencies(self) -> dict[str, Any]:
        try:
            return {"reasoning-gym": importlib.metadata.version("reasoning-gym")}
        except importlib.metadata.PackageNotFoundError as error:
            raise ConfigError(f"{self.label}: needs the package reasoning-gym: {MISSING_EXTRA}") from error

    def load(self) -> Iterable[Mapping[str, Any]]:
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise ConfigError(f"{self.label}: needs the package reasoning-gym: {MISSING_EXTRA}") from error
        config = self.config
        if config.dataset not in DATASETS:
            near = difflib.get_close_matches(config.dataset, DATASETS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {len(DATASETS)}: {', '.join(DATASETS)}"
            raise ConfigError(f"{self.label}: reasoning-gym has no dataset {config.dataset!r}; {hint}")
        try:
            problems: Any = reasoning_gym.create_dataset(
                config.dataset, size=config.size, seed=config.seed, **config.config
            )
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(f"{self.label}: {config.dataset} refuses its config: {error}") from error
        _check_scores_as_json(problems, self.label)
        return (problems[i] for i in range(config.size))

    def make_row(self, example: Mapping[str, Any], position: int) -> Row | None:
        return {
            "data_source": f"reasoning_gym/{self.config.dataset}",
            "prompt": self.make_prompt(example),
            "reward_model": {"style": "rule", "ground_truth": self.make_ground_truth(example)},
            "extra_info": {"index": position, **self.make_extra_info(example)},
        }

    def make_ground_truth(self, example: Mapping[str, Any]) -> Any:
        return example["answer"]

    def make_extra_info(self, example: Mapping[str, Any]) -> dict[str, Any]:
        return {"entry": _json_text(dict(example)), "config": _json_text(self.config.config)}


def _json_text(value: dict[str, Any]) -> str:
    return orjson.dumps(to_jsonable(value)).decode()


def _check_scores_as_json(problems: Any, label: str) -> None:
    """Makes sure that a problem is scored the same after JSON, where keys become text and tuples lists."""
    entry = problems[0]
    answer = entry.get("answer")
    if not isinstance(answer, str):
        return
    stored = orjson.loads(_json_text(entry))
    score, stored_score = problems.score_answer(answer, entry), problems.score_answer(answer, stored)
    if score != stored_score:
        raise DataError(
            f"{label}: its problems cannot be stored: the first one's answer scores {score}, "
            f"but {stored_score} after the problem went through JSON"
        )
