"""How the rollouts of each prompt went, as columns that `store.filter.Filter` reads."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollstream.evaluate.samples import Samples
from rollstream.store.arrow import column_values

Array = npt.NDArray[Any]


class PromptFigures:
    """A row for each prompt of some rollouts.

    Args:
        samples: the rollouts.
        sources: the data source of each, shape (N,); None where it is not known.
        solved_at: a reward from here on counts as solved.
    """

    def __init__(self, samples: Samples, sources: Sequence[str | None], solved_at: float) -> None:
        prompt, reward = samples.prompt, samples.reward
        scored, ended = ~np.isnan(reward), ~samples.failed
        self.keys = [key.decode() for key in samples.keys.tolist()]
        self.rows = len(self.keys)

        def number(which: Array) -> Array:
            return np.bincount(prompt[which], minlength=self.rows)

        def mean(values: Array, which: Array) -> Array:
            sums = np.bincount(prompt[which], values[which], self.rows)
            with np.errstate(invalid="ignore"):
                return np.asarray(sums / number(which))

        mean_reward = samples.prompt_means()
        self._numbers: dict[str, Array] = {
            "pass_rate": mean(reward >= solved_at, scored),
            "mean_reward": mean_reward,
            "std_reward": np.sqrt(mean((reward - mean_reward[prompt]) ** 2, scored)),
            "rollouts": number(np.ones(len(prompt), bool)),
            "failed": number(samples.failed),
            "unscored": number(ended & ~scored),
            "truncated": mean(samples.truncated, ended),
            "tokens": mean(samples.tokens, ended),
            "turns": mean(samples.turns, ended),
        }
        named = np.full(self.rows, "", object)
        named[prompt] = [source or "" for source in sources]
        self._sources: pa.DictionaryArray = pa.array(named.tolist(), pa.string()).dictionary_encode()

    def columns(self) -> list[dict[str, str]]:
        """See `store.filter.Filterable`."""
        numbers = [{"name": name, "type": "number"} for name in self._numbers]
        return [*numbers, {"name": "data_source", "type": "text"}]

    def __getitem__(self, name: str) -> Array:
        found: Array = column_values(self._sources.indices) if name == "data_source" else self._numbers[name]
        return found

    def texts(self, name: str) -> pa.StringArray:
        """See `store.filter.Filterable`."""
        return self._sources.dictionary

    def pass_rates(self) -> dict[str, float | None]:
        """The pass rate of each prompt, by its key; None where nothing is scored."""
        rates = self._numbers["pass_rate"].tolist()
        return {key: None if rate != rate else rate for key, rate in zip(self.keys, rates, strict=True)}
