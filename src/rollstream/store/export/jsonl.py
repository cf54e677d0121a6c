"""The artifact as JSON Lines: one trajectory a line, JSON columns as JSON."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq

from rollstream.store.batch import open_parquet

JSON_COLUMNS = ("messages", "reward_extra", "ground_truth", "extra")
"""Columns that hold JSON text."""
_READ_ROWS = 256
"""Rows held as Python objects at once."""


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Trajectories of an artifact or batch as dicts, JSON columns decoded. Raises `DamageError`."""
    with open_parquet(path) as file:
        for table in file.iter_batches(_READ_ROWS):
            for row in table.to_pylist():
                for column in JSON_COLUMNS:
                    row[column] = orjson.loads(row[column])
                yield row


def export_jsonl(artifact: Path, target: Path) -> int:
    """Writes `target` (by a temporary name); returns its lines."""
    temporary = target.with_name(target.name + ".tmp")
    lines = 0
    try:
        with temporary.open("wb") as file:
            for row in read_rows(artifact):
                file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
                lines += 1
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(target)
    finally:
        temporary.unlink(missing_ok=True)
    return lines


def artifact_rows(artifact: Path) -> int:
    """Rows of an artifact, from its footer."""
    return int(pq.read_metadata(artifact).num_rows)
