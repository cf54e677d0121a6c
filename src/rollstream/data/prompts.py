"""The prompt rows of a run: which, in what order, a fingerprint of them all, and without those too long."""

import hashlib
import logging
import marshal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from rollstream.config.settings import DataSettings
from rollstream.data.mixed import SourceConfig, SourceRows, in_shares, read_sources, source_rewards
from rollstream.data.row import parse_row
from rollstream.data.row_images import resolve
from rollstream.data.sources import Concatenated, RowSource, custom_rows, expand_paths, open_source
from rollstream.data.stored import STORED_RUN, open_stored
from rollstream.data.values import BadRow, Row
from rollstream.errors import ConfigError, DataError
from rollstream.trajectory import PromptRow

logger = logging.getLogger(__name__)

_SHOWN_ERRORS = 5
"""Bad rows named in an error: enough to see what they have in common."""
_DIGEST_BYTES = 16
_KEPT_ROWS = 16
"""Parsed rows kept: the repeats of a row begin one after the other. Few, as a row may hold images."""
_KEPT_SOURCES = 1000
"""Data sources that are counted each by itself; the rows of further ones are counted together."""
OTHER_SOURCES = "(others)"
_PROGRESS_SECONDS = 5.0
_FIELDS = tuple(PromptRow.__dataclass_fields__)


class FileDigest(TypedDict):
    """What one data file holds."""

    name: str
    """File name; for a file of a dataset folder, with the folder's name before it."""
    size: int
    """Bytes."""
    digest: str
    """BLAKE2b of the bytes, 32 hexadecimal digits."""


class KnownDataset(NamedTuple):
    """The facts about all rows of a dataset, as a run's manifest keeps them. See `PromptDataset`."""

    file_digests: list[FileDigest]
    fingerprint: str
    agent_names: frozenset[str] = frozenset()
    has_images: bool = False
    data_sources: Mapping[str, int] = MappingProxyType({})


class PromptDataset:
    """Prompt rows by index, read from their source when asked for.

    Memory is 24 bytes a row (JSON Lines: 32) beyond what the source needs; few rows are kept as objects. What
    is said of all rows (`fingerprint`, `agent_names`, `has_images`, `data_sources`) takes reading and checking
    them all, once, unless the files are those of `known`; a row that cannot be used is a `DataError` then.

    Args:
        source: The rows.
        prompt_column: The column with the prompt.
        truth_column: As of `parse_row`.
        shuffle_seed: Visit the rows in the random order of this seed; None: as they come.
        max_samples: Visit this many rows at most; None: all.
        known: Facts that an earlier run found; used when the files are the same, byte for byte.
        parts: The sources whose rows follow one another, with their lengths; each has its share of the order.

    Raises:
        DataError: The first row cannot be used; names further ones, too.
    """

    def __init__(
        self,
        source: RowSource,
        *,
        prompt_column: str = "prompt",
        truth_column: str | None = None,
        shuffle_seed: int | None = None,
        max_samples: int | None = None,
        known: KnownDataset | None = None,
        parts: Sequence[tuple[SourceConfig, int]] = (),
    ) -> None:
        self._source = source
        self._prompt_column, self._truth_column = prompt_column, truth_column
        self._known = known
        self._file_digests: list[FileDigest] | None = None
        self._facts: KnownDataset | None = None
        self._digests: bytes | None = None  # content digests by index, 16 bytes each; once scanned
        self._visiting = np.arange(len(source), dtype=np.int64)
        if shuffle_seed is not None:
            # RandomState and not default_rng: numpy keeps its stream for ever, and the order is identity.
            self._visiting = np.random.RandomState(shuffle_seed).permutation(len(source)).astype(np.int64)
        self.sources = [part for part, _ in parts]
        """The entries of `data.sources`, if these are the rows."""
        self._of_source = np.repeat(np.arange(len(parts)), [rows for _, rows in parts])
        if parts:
            weights = [part.weight for part in self.sources]
            self._visiting = in_shares(self._visiting, self._of_source[self._visiting], weights)
        self.max_samples = max_samples
        self._row_bytes = lru_cache(maxsize=_KEPT_ROWS)(self._read)
        try:
            self.row(0)
        except DataError:
            self._scan()  # names further bad rows, too
            raise

    def __len__(self) -> int:
        """Rows in the files, before filter and cut."""
        return len(self._source)

    def row(self, index: int) -> PromptRow:
        """Reads one row. Safe to call from several threads.

        Args:
            index: Position in the concatenated files, before filter and shuffle.

        Raises:
            IndexError: Not `0 <= index < len`.
            DataError: The row cannot be used, or is not the one that was fingerprinted; names file and row.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        # Whoever gets a row may change it, so each gets a copy; this is the quickest way to a deep one.
        return PromptRow(*marshal.loads(self._row_bytes(index)))

    def _parse(self, index: int) -> tuple[PromptRow, bytes]:
        return parse_row(self._source.row(index), index, self._prompt_column, self._truth_column)

    def _read(self, index: int) -> bytes:
        try:
            prompt_row, digest = self._parse(index)
            at = index * _DIGEST_BYTES
            if self._digests is not None and self._digests[at : at + _DIGEST_BYTES] != digest:
                raise BadRow("the row has changed since the run began")
        except BadRow as error:
            raise DataError(f"{self._source.location(index)}: {error}") from error
        if prompt_row.images and (folder := self._source.folder(index)) is not None:
            prompt_row.images = resolve(prompt_row.images, folder)
        return marshal.dumps([getattr(prompt_row, name) for name in _FIELDS])

    @property
    def visiting(self) -> npt.NDArray[np.int64]:
        """Indices in visiting order, before the cut to `max_samples`; without rows that a filter left out."""
        return self._visiting

    @property
    def order(self) -> npt.NDArray[np.int64]:
        """The indices to visit, in order: shuffled, filtered, then cut to `max_samples`."""
        return self._visiting[: self.max_samples]

    def restrict(self, visiting: npt.NDArray[np.int64]) -> None:
        """Visits only these indices, in this order (still cut to `max_samples`). For filters."""
        self._visiting = visiting

    def source_names(self) -> list[str]:
        """The source of each row of `order`, by the entries of `data.sources`."""
        return [self.sources[number].name for number in self._of_source[self.order]]

    def given_row(self, index: int) -> Row:
        """A row as the file has it."""
        return self._source.row(index)

    def given_prompt(self, index: int) -> Any:
        """The prompt of a row as the file has it."""
        return self.given_row(index).get(self._prompt_column)

    def location(self, index: int) -> str:
        """Where a row is, for people: `train.jsonl, row 17 (line 18)`."""
        return self._source.location(index)

    @property
    def file_digests(self) -> list[FileDigest] | None:
        """Digests of the data files, in order; reads them whole the first time.

        None when the rows come from a class of the user's: then nothing tells whether they changed.
        """
        if self._file_digests is None and self._source.files is not None:
            self._file_digests = [_digest_file(file) for file in self._source.files]
        return self._file_digests

    @property
    def fingerprint(self) -> str:
        """Digest over the content of all rows, by index: 32 hexadecimal digits.

        Rows that are written to other files, in another format or with other key order keep it.

        Raises:
            DataError: Rows that cannot be used: names the first five, and how many there are.
        """
        return self._all_rows().fingerprint

    def agent_names(self) -> frozenset[str]:
        """The agent loops that rows name, each by its `agent_name`; rows that name none add nothing."""
        return self._all_rows().agent_names

    def first_row_of(self, agent_name: str) -> str:
        """Where the first row that names this agent loop is, for people."""
        indices = (index for index in range(len(self)) if self.row(index).agent_name == agent_name)
        return self.location(next(indices))

    def has_images(self) -> bool:
        """Whether a row has images."""
        return self._all_rows().has_images

    def data_sources(self) -> Mapping[str, int]:
        """How many rows of the files are of each data source."""
        return self._all_rows().data_sources

    def prompt_keys(self) -> Iterator[str]:
        """The prompt keys of all rows, by index. Reads and checks every row if that was not done yet.

        Raises:
            DataError: As `fingerprint`.
        """
        if self._digests is None:
            self._facts = self._scan()
        assert self._digests is not None
        for start in range(0, len(self._digests), _DIGEST_BYTES):
            yield self._digests[start : start + _DIGEST_BYTES].hex()

    def _all_rows(self) -> KnownDataset:
        if self._facts is None:
            known = self._known
            mine = [(file["size"], file["digest"]) for file in self.file_digests or ()] if known else []
            if (
                known is not None
                and mine
                and mine == [(file["size"], file["digest"]) for file in known.file_digests]
            ):
                self._facts = known
            else:
                self._facts = self._scan()
        return self._facts

    def _scan(self) -> KnownDataset:
        """Reads every row once: checks it, keeps its digest, and digests those."""
        errors: list[str] = []
        digests = bytearray()
        agent_names: set[str | None] = {None}
        data_sources: Counter[str] = Counter()
        has_images = False
        bad = 0
        for index in range(len(self)):
            try:
                prompt_row, digest = self._parse(index)
            except BadRow as error:
                bad += 1
                if bad <= _SHOWN_ERRORS:
                    errors.append(f"{self._source.location(index)}: {error}")
                continue
            agent_names.add(prompt_row.agent_name)
            has_images = has_images or bool(prompt_row.images)
            is_counted = len(data_sources) < _KEPT_SOURCES or prompt_row.data_source in data_sources
            data_sources[prompt_row.data_source if is_counted else OTHER_SOURCES] += 1
            digests += digest
        if bad == 1:
            raise DataError(errors[0])
        if bad:
            more = [f"… and {bad - len(errors)} more"] if bad > len(errors) else []
            raise DataError("\n  ".join([f"{bad} of {len(self)} rows cannot be used:", *errors, *more]))
        self._digests = bytes(digests)
        self._row_bytes.cache_clear()  # what was read before is compared, too
        fingerprint = hashlib.blake2b(digests, digest_size=_DIGEST_BYTES).hexdigest()
        names = frozenset(name for name in agent_names if name is not None)
        return KnownDataset(self._file_digests or [], fingerprint, names, has_images, dict(data_sources))


def load_prompts(
    data: DataSettings, *, known: KnownDataset | None = None, rows: RowSource | None = None
) -> PromptDataset:
    """Opens the dataset of a run and checks its first row; `fingerprint` checks all of them.

    Args:
        data: `data` of the configuration; used are train_files, custom_cls, prompt_key, ground_truth_key,
            shuffle, seed and train_max_samples. Lengths are for `filter_overlong` and `truncate`.
        known: As of `PromptDataset`.
        rows: Given in memory, instead of data that are named.

    Raises:
        ConfigError: No data named, or some besides `rows`, or `data.custom_cls` cannot be loaded.
        DataError: A file is missing, empty, damaged or of a format that is not read; the first row is bad.
    """
    if data.train_max_samples == 0:
        raise ConfigError("data.train_max_samples: 0 leaves no rows; -1 takes all")
    has_class = bool(data.custom_cls.path or data.custom_cls.name)
    source = rows
    if source is not None and (data.files or has_class):
        raise ConfigError(
            "prompts are given in memory, so data.train_files, data.custom_cls and train_tasks stay unset"
        )
    if source is None and has_class:
        source = custom_rows(data)
    entries = read_sources(data.sources)
    if entries and (data.files or source is not None):
        raise ConfigError(
            "data.sources has all rows: leave out data.train_files, train_tasks and data.custom_cls, "
            "or set them to null"
        )
    if source is None and not data.files and not entries:
        raise ConfigError(
            "data.train_files: not set; name the files with prompts, or train_tasks to build some"
        )
    parts = list[tuple[SourceConfig, int]]()
    if entries:
        rewarded = source_rewards(data.sources)
        mixed = [SourceRows(_open_files(entry.files, data), entry, rewarded) for entry in entries]
        source, parts = (
            Concatenated(mixed),
            [(one, len(rows)) for one, rows in zip(entries, mixed, strict=True)],
        )
    elif source is None:
        source = _open_files(data.files, data)
    return PromptDataset(
        source,
        prompt_column=data.prompt_key,
        truth_column=data.ground_truth_key,
        shuffle_seed=data.seed if data.shuffle else None,
        max_samples=data.train_max_samples if data.train_max_samples > 0 else None,
        known=known,
        parts=parts,
    )


def _open_files(names: Sequence[str], data: DataSettings) -> RowSource:
    sources = list[RowSource]()
    for name in names:
        if name.startswith(STORED_RUN):
            sources.append(open_stored(name, data))
        else:
            sources += map(open_source, expand_paths([name]))
    return sources[0] if len(sources) == 1 else Concatenated(sources)


def _digest_file(file: Path) -> FileDigest:
    try:
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=_DIGEST_BYTES))
            size = opened.tell()
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error})") from error
    name = f"{file.parent.name}/{file.name}" if file.suffix == ".arrow" else file.name
    return {"name": name, "size": size, "digest": digest.hexdigest()}


class OverlongCount(NamedTuple):
    """How many rows `filter_overlong` left out, of how many."""

    removed: int
    checked: int
    """Rows whose length was looked at; fewer than all when `max_samples` was reached before."""


def filter_overlong(
    dataset: PromptDataset,
    measure: Callable[[list[PromptRow]], list[int]],
    max_prompt_length: int,
    *,
    batch_size: int = 1024,
) -> OverlongCount:
    """Leaves prompts that are too long out of `dataset.order`, before it is cut to `max_samples`.

    So `max_samples` rows are visited whenever that many fit. (verl cuts first and filters what is left.)
    Rows are looked at in visiting order and only until `max_samples` of them fit.

    Args:
        dataset: Its `order` is changed.
        measure: Gives the prompt length of each row, in tokens.
        max_prompt_length: Tokens; a prompt of exactly this length stays.
        batch_size: Rows given to `measure` at once.

    Raises:
        DataError: No row fits, or a row cannot be used.
    """
    visiting = dataset.visiting
    lengths: list[int] = []
    fitting, told = 0, time.monotonic()
    for start in range(0, len(visiting), batch_size):
        batch = measure([dataset.row(index) for index in visiting[start : start + batch_size].tolist()])
        lengths += batch
        fitting += sum(length <= max_prompt_length for length in batch)
        if time.monotonic() - told > _PROGRESS_SECONDS:
            told = time.monotonic()
            logger.info(
                "data.filter_overlong_prompts: %d of %d prompts measured", len(lengths), len(visiting)
            )
        if dataset.max_samples is not None and fitting >= dataset.max_samples:
            break
    if not fitting:
        raise DataError(
            f"all {len(lengths)} prompts are longer than data.max_prompt_length={max_prompt_length} tokens "
            f"(the shortest has {min(lengths)}); raise it"
        )
    dataset.restrict(visiting[: len(lengths)][np.asarray(lengths) <= max_prompt_length])
    return OverlongCount(removed=len(lengths) - fitting, checked=len(lengths))
