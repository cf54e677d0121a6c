"""`data.sources`: prompt rows of several sources, each with its share, agent loop and tools."""

import asyncio
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from rollstream.data.row import as_mapping
from rollstream.data.shares import Shares
from rollstream.data.sources import RowSource
from rollstream.data.values import BadRow, Row
from rollstream.errors import ConfigError, unknown_name

SOURCE = "source"
"""The column with the name of a row's source."""


class SourceReward(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """As the keys of `custom_reward_function`."""

    path: Annotated[str, Meta(min_length=1)]
    name: str = "compute_score"
    reward_kwargs: dict[str, Any] = {}


class SourceConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """An entry of `data.sources`."""

    name: Annotated[str, Meta(min_length=1)]
    train_files: str | list[str] | None = None
    """As `data.train_files`."""
    task: dict[str, Any] | None = None
    """As an entry of `train_tasks`, in place of files."""
    weight: Annotated[float, Meta(gt=0)] = 1.0
    """Its share is its weight by the sum of all."""
    agent: str | None = None
    """The agent loop of rows that name none."""
    tools: list[str] | None = None
    """The tools that its rows may use, of those that the run has."""
    data_source: str | None = None
    """Of its rows, whatever they say: it chooses the reward."""
    reward: Annotated[str, Meta(min_length=1)] | SourceReward | None = None
    """What scores its rows; a text is the path. Their data source is then `data_source`, or the source's name."""
    max_in_flight: Annotated[int, Meta(ge=1)] | None = None
    """Of its rollouts, so many run at once in a process; the others wait."""
    max_failed_share: Annotated[float, Meta(ge=0, le=1)] | None = None
    """See `training.Source`."""

    @property
    def files(self) -> list[str]:
        """`train_files` as a list."""
        return [self.train_files] if isinstance(self.train_files, str) else list(self.train_files or ())

    @property
    def chosen_data_source(self) -> str | None:
        """The data source of all its rows; None where each says its own."""
        return self.data_source or (self.name if self.reward is not None else None)


def read_sources(entries: Sequence[Any] | None) -> list[SourceConfig]:
    """The entries of `data.sources`. Raises `ConfigError`."""
    known = SourceConfig.__struct_fields__
    for key in (key for one in entries or () if isinstance(one, Mapping) for key in one if key not in known):
        raise ConfigError(f"data.sources: {unknown_name('key', key, known)}")
    try:
        found = msgspec.convert(list(entries or ()), list[SourceConfig])
    except msgspec.ValidationError as error:
        raise ConfigError(f"data.sources: {error}") from error
    names = [one.name for one in found]
    for one in found:
        if names.count(one.name) > 1:
            raise ConfigError(f"data.sources: two are called {one.name!r}")
        if (one.train_files is None) == (one.task is None):
            raise ConfigError(f"data.sources: {one.name!r} has train_files, or a task")
    return found


def source_limits(sources: Iterable[SourceConfig]) -> dict[str, asyncio.Semaphore]:
    """What the rollouts of sources with `max_in_flight` wait for, by the source's name."""
    return {
        one.name: asyncio.Semaphore(one.max_in_flight) for one in sources if one.max_in_flight is not None
    }


def source_rewards(entries: Sequence[Any] | None) -> dict[str, SourceReward]:
    """The rewards of `data.sources`, by the data source of the rows that they score. Raises `ConfigError`."""
    rewards, sources = dict[str, SourceReward](), read_sources(entries)
    for source in sources:
        if (reward := source.reward) is None:
            continue
        key = source.chosen_data_source or source.name
        rewards[key] = SourceReward(path=reward) if isinstance(reward, str) else reward
        if shared := [
            other.name for other in sources if other is not source and key == other.chosen_data_source
        ]:
            raise ConfigError(
                f"data.sources: {source.name!r} has a reward, and {shared[0]!r} the same data_source: {key!r}"
            )
    return rewards


def chosen_data_sources(entries: Sequence[Any] | None) -> dict[str, str]:
    """By the name of a source the data source of all its rows, where it chooses one. Raises `ConfigError`."""
    return {one.name: one.chosen_data_source for one in read_sources(entries) if one.chosen_data_source}


class SourceRows(RowSource):
    """The rows of a source, marked with what it says of them."""

    def __init__(self, rows: RowSource, source: SourceConfig, rewarded: Container[str]) -> None:
        """`rewarded`: the data sources that have the reward of a source."""
        super().__init__(source.name, None, rows.files)
        self._rows, self._source, self._rewarded = rows, source, rewarded

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, position: int) -> Row:
        row, source = self._rows.row(position), self._source
        if SOURCE in row:
            row[f"{SOURCE}_in_file"] = row[SOURCE]
        row[SOURCE] = source.name
        if source.agent is not None and row.get("agent_name") is None:
            row["agent_name"] = source.agent
        if (data_source := source.chosen_data_source) is not None:
            row["data_source"] = data_source
        elif isinstance(own := row.get("data_source"), str) and own in self._rewarded:
            raise BadRow(
                f"data_source is {own!r}, which has the reward of another source: set data_source of {source.name!r}"
            )
        if source.tools is not None:
            extra_info = as_mapping(row.get("extra_info"), "extra_info")
            row["extra_info"] = {"tool_selection": source.tools, **extra_info}
        return row

    def location(self, position: int) -> str:
        return self._rows.location(position)

    def folder(self, position: int) -> Any:
        return self._rows.folder(position)


def in_shares(
    visiting: npt.NDArray[np.int64], source_of: npt.NDArray[np.int64], weights: Sequence[float]
) -> npt.NDArray[np.int64]:
    """Indices in an order in which each source has its share, from the first on, until it has no more.

    Args:
        visiting: indices, whose order within a source stays.
        source_of: the number of the source of each, of the same shape.
        weights: of the sources.
    """
    queues: list[Iterator[int]] = [
        iter(visiting[source_of == number].tolist()) for number, _ in enumerate(weights)
    ]
    shares, order = Shares(weights), np.empty_like(visiting)
    for at in range(len(order)):
        while (index := next(queues[number := shares.take()], None)) is None:
            shares.pause(number)
        order[at] = index
    return order
