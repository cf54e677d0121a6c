"""Full text search in messages: a scan that goes on while somebody reads it."""

import re
import time
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rollstream.store.columns import Array, RunColumns
from rollstream.view.reader import as_messages, read_json, text_of

_MOST_HITS: Final = 1000
_EVERY_S: Final = 0.2
_AROUND: Final = 80
"""Characters before and after a match."""

Event = tuple[str, dict[str, Any]]


def search(columns: RunColumns, text: str, rows: Array) -> Iterator[list[Event]]:
    """Looks for a text in the messages of some rows, whatever the case. Each step is short; close it to stop."""
    scanned = hits = 0
    said = 0.0
    # What JSON writes as it is, however deep: a message that does not hold it cannot hold the text.
    pattern = max(re.split(r"[\"\\\x00-\x1f]", text), key=len)

    def progress() -> dict[str, Any]:
        return {"scanned": scanned, "total": len(rows), "hits": hits}

    for numbers, table in columns.read(rows, ["messages"]):
        events: list[Event] = []
        scanned += int((numbers >= 0).sum())
        likely = pc.match_substring(table["messages"].combine_chunks(), pattern, ignore_case=True)
        likely = np.from_dlpack(likely.cast(pa.uint8())) == 1
        for at in np.flatnonzero(likely & (numbers >= 0)).tolist():
            hit = _hit(text, table["messages"][at].as_py())
            if hit is not None and hits < _MOST_HITS:
                hits += 1
                row = int(numbers[at])
                cells = {
                    name: columns.values(name, np.array([row]))[0] for name in ("index", "repeat", "reward")
                }
                events.append(("hit", {"row": row, **cells, **hit}))
        if (now := time.monotonic()) - said >= _EVERY_S:
            said = now
            events.append(("progress", progress()))
        yield events
        if hits >= _MOST_HITS:
            break
    yield [("progress", progress()), ("done", {**progress(), "cut": hits >= _MOST_HITS})]


def _hit(wanted: str, cell: str) -> dict[str, str] | None:
    for message in as_messages(read_json(cell)):
        said = text_of(message)
        lowered = said.lower()
        # A letter whose small form has another length moves what comes behind it.
        at = lowered.find(wanted.lower()) if len(lowered) == len(said) else said.find(wanted)
        if at >= 0:
            end = at + len(wanted)
            around = {"before": said[max(0, at - _AROUND) : at], "match": said[at:end]}
            return {"role": str(message.get("role")), **around, "after": said[end : end + _AROUND]}
    return None
