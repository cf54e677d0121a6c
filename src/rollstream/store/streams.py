"""Streams: numbers per token beside the sampler's log-probs, by name, such as a teacher's log-probs.

    streams/NAME.run/      the run directory of the pass that asked an engine for them (`rollstream annotate`)
    streams/NAME.parquet   key, finished_at and values of each trajectory, sorted by key

    streams/NAME.json      who made a stream that a training asked for: its values are in the `extra` of its rollouts

`values` has a number for each response token, 0.0 where the mask is 0, as `response_logprobs` has; it is null where
the engine gave none. With `--top-k` there are `top_ids` and `top_logprobs`, too: a list for each token, empty where the
mask is 0. Who made them stands in the file's metadata, as JSON, under `rollstream.stream`. Values belong to
the rollout that they were computed of, as scores do.

What a reward says of turns and tokens is no file of its own: it stands in `reward_extra`, and is read from there.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from rollstream.errors import DamageError, RunDirectoryError
from rollstream.store.arrow import column_values, to_arrow
from rollstream.store.batch import SCHEMA, DamagedFileError, check_size, reading
from rollstream.store.journal import write_file_durably
from rollstream.store.manifest import Manifest
from rollstream.store.scores import (
    SCORED_COLUMNS,
    find_places,
    is_sidecar_name,
    publish_sidecar,
    rollout_places,
    sidecar_names,
    sidecar_table,
)
from rollstream.trajectory import REWARD_STREAMS, STREAMS, reward_values
from rollstream.untrusted import read_regular

STREAM_SCHEMA = pa.schema([*map(SCHEMA.field, SCORED_COLUMNS), pa.field("values", pa.list_(pa.float32()))])
_VALUES: Final = STREAM_SCHEMA.field("values").type

TOP: Final = {"top_ids": pa.list_(pa.list_(pa.int32())), "top_logprobs": pa.list_(pa.list_(pa.float32()))}
"""Columns of a stream that has the likeliest ids, too; `NAME.top_ids` names one as a stream."""

_TOP_SCHEMA = pa.schema([*STREAM_SCHEMA, *map(pa.field, TOP, TOP.values())])

LOOP: Final = "loop."
"""Before the name of a stream of the loop's."""

_MADE: Final = b"rollstream.stream"
"""Metadata key of who made a stream."""
_HELD_BYTES: Final = 64 << 20
"""Of row groups in memory, so that rows in nearly the stream's order read each of them once."""


def publish_stream(artifact: Path, table: Path, manifest: Manifest) -> None:
    """Makes the file of a stream of the artifact of its pass, whose manifest says who made it."""
    made = {**manifest.config, "created": manifest.created, "rollstream": manifest.versions["rollstream"]}
    metadata = {_MADE.decode(): orjson.dumps(made).decode()}
    said = TOP if made.get("top_k") else {}
    publish_sidecar(artifact, table, STREAM_SCHEMA, {"values": "response_logprobs"}, metadata, said)


class RewardStream:
    """A stream that stands in the rewards of a run; `name` is one of `REWARD_STREAMS`."""

    columns = (*SCORED_COLUMNS, "reward_extra", "response_mask")
    """What its values are made of."""

    def __init__(self, name: str) -> None:
        self.name = name

    def values_of(self, table: pa.Table) -> pa.Array:
        """The values of some trajectories, null where the reward gave none."""
        pairs = zip(table["reward_extra"].to_pylist(), table["response_mask"], strict=True)
        marker = f'"{REWARD_STREAMS[self.name]}":'
        values = [
            reward_values(self.name, orjson.loads(extra), mask.as_py()) if marker in extra else None
            for extra, mask in pairs
        ]
        return pa.array(values, STREAM_SCHEMA.field("values").type)


class LoopStream:
    """A stream that agent loops gave in `extra.token_streams`; `name` is `loop.` and what they call it."""

    columns = ("extra",)

    def __init__(self, name: str) -> None:
        self.name = name

    def values_of(self, table: pa.Table) -> pa.Array:
        """The values of some trajectories, null where the loop gave none."""
        name = self.name.removeprefix(LOOP)
        return pa.array([_values(text, name) for text in table["extra"].to_pylist()], _VALUES)


def own_stream(root: Path, name: str) -> Path:
    """The file that says who made a stream of which the rollouts themselves have the values."""
    return root / "streams" / f"{name}.json"


def note_streams(root: Path, streams: Mapping[str, Mapping[str, Any]]) -> None:
    """Says who makes streams of which the rollouts themselves have the values; and who made them before."""
    for name, made in streams.items():
        own_stream(root, name).parent.mkdir(exist_ok=True)
        before: Any = None
        with suppress(DamageError):  # it is written anew
            before = Stream(root, name).made.get("model") if own_stream(root, name).exists() else None
        models = [*(before.split("; ") if isinstance(before, str) else []), made["model"]]
        every = "; ".join(dict.fromkeys(models))
        write_file_durably(own_stream(root, name), orjson.dumps({**made, "model": every}))


def stream_names(root: Path) -> list[str]:
    """The streams of a run that are complete, and those that its rollouts have."""
    own = {path.stem for path in (root / "streams").glob("*.json") if is_sidecar_name(path.stem)}
    return sorted(own.union(sidecar_names(root, "streams")))


class Stream:
    """A stream of a run, of which a part is in memory.

    Attributes:
        made: who made it: `model`, `engine`, `mode`, `temperature`, `created`, `rollstream` (the version).
        columns: that `values_of` needs of rows.
    """

    def __init__(self, root: Path, name: str) -> None:
        """Raises `RunDirectoryError` where there is no such stream, `DamageError` where it cannot be read."""
        known, self.name, self._column = stream_names(root), name, "values"
        base, _, column = name.rpartition(".")
        if name not in known and column in TOP and sidecar_table(root, base, "streams").exists():
            name, self._column = base, column
        if name not in known:
            there = ", ".join(known) or "none"
            raise RunDirectoryError(f"{root} has no complete stream {name!r}; there are: {there}")
        self._path = sidecar_table(root, name, "streams")
        self.columns, self._file = SCORED_COLUMNS, None
        if not self._path.exists():
            self.columns, self._path = ["extra"], own_stream(root, name)
            with reading(self._path):
                self.made = self._checked(read_regular(self._path))
            return
        with reading(self._path):
            self._file = pq.ParquetFile(pa.OSFile(str(self._path)), page_checksum_verification=True)
            footer = self._file.metadata
            there = self._file.schema_arrow
            if there not in (STREAM_SCHEMA, _TOP_SCHEMA):
                raise DamagedFileError(self._path, f"{self._path.name} does not have the columns of a stream")
            self.made = self._checked((footer.metadata or {}).get(_MADE, b"{}"))
        if self._column not in there.names:
            raise RunDirectoryError(f"{root}: the stream {name!r} was made without --top-k")
        groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
        for group in groups:
            check_size(self._path, group)
        statistics = [group.column(0).statistics for group in groups]
        bounds = [(0, 1 << 62) if one is None else (one.min, one.max) for one in statistics]
        self._low, self._high = np.array(bounds, np.int64).reshape(-1, 2).T
        self._held: dict[int, pa.Table] = {}

    def values_of(self, table: pa.Table) -> pa.ChunkedArray:
        """The values of some trajectories, null where there are none.

        Args:
            table: with `columns`.
        """
        if self._file is None:
            texts = table["extra"].to_pylist()
            return pa.chunked_array([pa.array([_values(text, self.name) for text in texts], _VALUES)])
        kind = _TOP_SCHEMA.field(self._column).type
        index, parts = column_values(table["index"]), [pa.array([], kind)]
        places, valid, count = np.zeros(len(index), np.int64), np.zeros(len(index), bool), 0
        low, high = (index.min(), index.max()) if len(index) else (0, -1)
        for number in np.flatnonzero((self._low <= high) & (self._high >= low)).tolist():
            group = self._group(number)
            at, known = find_places(rollout_places(group), table)
            parts.append(group[self._column].combine_chunks().take(to_arrow(at[known])))
            places[known] = count + np.arange(known.sum())
            valid |= known
            count += len(parts[-1])
        return pa.chunked_array([pa.concat_arrays(parts).take(to_arrow(places, valid))])

    def _checked(self, made: bytes) -> dict[str, Any]:
        found = orjson.loads(made)
        if not isinstance(found, dict):
            raise DamagedFileError(self._path, f"{self._path.name} does not say who made it")
        return found

    def _group(self, number: int) -> pa.Table:
        assert self._file is not None
        if number not in self._held:
            with reading(self._path):
                columns = [*SCORED_COLUMNS, self._column]
                self._held[number] = self._file.read_row_group(number, columns, use_threads=False)
            while len(self._held) > 1 and sum(one.nbytes for one in self._held.values()) > _HELD_BYTES:
                del self._held[next(iter(self._held))]
        return self._held[number]


def _values(extra: str, name: str) -> list[float] | None:
    """Of a stream, by the `extra` of a row, which a stranger may have written."""
    try:
        found = orjson.loads(extra)[STREAMS][name]
    except (ValueError, LookupError, TypeError):
        return None
    return found if isinstance(found, list) and all(isinstance(one, int | float) for one in found) else None
