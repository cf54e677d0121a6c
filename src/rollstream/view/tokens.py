"""The tokens of a trajectory with all that is known of each, as one binary answer."""

import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import orjson

from rollstream.chat.token_text import TokenText
from rollstream.store.columns import Array
from rollstream.view.reader import Row, as_messages

_MOST_COLUMNS: Final = 16
"""Taken of what a loop or a trainer has put into `extra`, one number a token of the response."""

_OWN: Final = ("id", "mask", "logprob", "version", "text_start", "text")
_KNOWN: Final = {
    "entropies": "entropy",
    "trainer_logprobs": "trainer_logprob",
    "old_logprobs": "trainer_logprob",
    "reference_logprobs": "reference_logprob",
}
"""Names that columns over the response have with others, and here."""


def encode_tokens(row: Row, text: TokenText | None, reason: str) -> bytes:
    """All tokens of a trajectory.

    Four bytes with the length of a JSON header, the header, zeros up to a multiple of four, then the arrays
    that it names, little-endian, each at a multiple of four.

    Args:
        row: from `reader.find_rollout`.
        text: of the run's tokens, if it is known.
        reason: why it is not.
    """
    prompt, response = _values(row["prompt_ids"], np.int32), _values(row["response_ids"], np.int32)
    first, count = len(prompt), len(prompt) + len(response)

    def over_all(values: Any, fill: float, dtype: Any) -> Array:
        """Values over the response, as many as there are, as a column over all tokens."""
        found = np.full(count, fill, dtype)
        values = values[: len(response)]
        found[first : first + len(values)] = values
        return found

    mask = over_all(_values(row["response_mask"], np.uint8), 0, np.uint8)
    logprobs = {
        "logprob": _values(row["response_logprobs"], np.float32),
        **_further(row["extra"], len(response)),
    }
    versions = np.full(count, -1, np.int32)
    for run in row["policy_versions"].as_py():
        versions[first + (run["start"] or 0) :] = (run["version"] or 0) & 0x7FFFFFFF
    columns = {"id": np.concatenate([prompt, response]), "mask": mask, "version": versions}
    for name, values in logprobs.items():
        columns.setdefault(
            name, np.where(mask == 1, over_all(values, np.nan, np.float32), np.float32(np.nan))
        )
    if text is not None:
        pieces = [text.bytes_of(one) for one in columns["id"].tolist()]
        columns["text_start"] = np.cumsum([0, *map(len, pieces)], dtype=np.uint32)
        columns["text"] = np.frombuffer(b"".join(pieces), np.uint8)
    described, data = [], b""
    for name, values in columns.items():
        described.append(
            {"name": name, "dtype": values.dtype.name, "offset": len(data), "length": len(values)}
        )
        data += values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes() + bytes(
            -values.nbytes % 4
        )
    turns = _turns(first, mask[first:], as_messages(row["messages"]))
    said = {"prompt": first, "count": count, "columns": described, "turns": turns}
    header = orjson.dumps({**said, "has_text": text is not None, "reason": reason})
    return struct.pack("<I", len(header)) + header + bytes(-len(header) % 4) + data


def _values(scalar: Any, dtype: Any) -> Array:
    """A list of a file as an array; what is null is none, or 0 in a list."""
    found = np.array([value or 0 for value in scalar.as_py() or ()], np.float64)
    return found.astype(dtype)


def _further(extra: Any, length: int) -> dict[str, Array]:
    """What else there is one number a token for: entropies, another's log-probs, advantages."""
    found: dict[str, Array] = {}
    for name, values in extra.items() if isinstance(extra, dict) else ():
        if isinstance(values, list) and len(values) == length > 0 and len(found) < _MOST_COLUMNS:
            try:
                found[_KNOWN.get(str(name), str(name))] = np.array(values, np.float64)
            except (TypeError, ValueError):  # no numbers
                continue
    return {name: values for name, values in found.items() if values.ndim == 1 and name not in _OWN}


def _turns(first: int, mask: Array, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Where each turn begins: the prompt, then what the model said and what others said, in turn."""
    turns = [{"at": 0, "role": "prompt"}] if first else []
    roles = [str(one.get("role")) for one in messages]
    roles = roles[roles.index("assistant") :] if "assistant" in roles else []
    for begin in np.flatnonzero(np.diff(mask, prepend=np.uint8(2))).tolist():
        sampled = bool(mask[begin] == 1)
        role = "assistant" if sampled else roles[0] if roles else "template"
        turns.append({"at": first + begin, "role": role})
        while roles and (roles[0] == "assistant") == sampled:
            roles.pop(0)
    return turns
