"""The artifact as JSON Lines: one trajectory a line, JSON columns as JSON."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson

from rollstream.store.batch import DamagedFileError, read_tables
from rollstream.store.export.files import replacing
from rollstream.store.merge import MergeCancelledError

JSON_COLUMNS = ("messages", "reward_extra", "ground_truth", "extra")
"""Columns that hold JSON text."""


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Trajectories of an artifact or batch as dicts, JSON columns decoded.

    Raises:
        DamageError: its bytes are not what was written.
        StorageError: it cannot be read right now.
    """
    for table in read_tables(path):
        for row in table.to_pylist():
            yield decode_row(row, path)


def decode_row(row: dict[str, Any], path: Path) -> dict[str, Any]:
    """A row with its JSON columns decoded. Raises `DamageError` naming `path`."""
    try:
        return {key: orjson.loads(value) if key in JSON_COLUMNS else value for key, value in row.items()}
    except ValueError as error:
        raise DamagedFileError(path, f"{path.name} is damaged: {error}") from error


def export_jsonl(artifact: Path, target: Path, cancelled: Callable[[], bool] = lambda: False) -> int:
    """Writes `target` (by a temporary name); returns its lines.

    Raises:
        DamageError: the artifact is damaged.
        StorageError: the disk is full, or `target` cannot be written.
        MergeCancelledError: `cancelled`, asked now and then, said so. An older `target` stays.
    """
    lines = 0
    with replacing(target, artifact) as temporary, temporary.open("wb") as file:
        for row in read_rows(artifact):
            if cancelled():
                raise MergeCancelledError
            file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
            lines += 1
    return lines
