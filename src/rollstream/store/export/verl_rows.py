"""Rows of an artifact as the arrays of a DataProto: padded tensors, and one array for each other name."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rollstream.store.export.jsonl import decode_row
from rollstream.store.export.prompt import PROMPT_MESSAGES, prompt_messages

logger = logging.getLogger(__name__)

Array = npt.NDArray[Any]

TENSOR_NAMES = (
    *("prompts", "responses", "response_mask", "input_ids", "attention_mask", "position_ids"),
    *("rollout_log_probs", "rm_scores"),
)

_NUMBERS = {"__num_turns__": np.int32, "index": np.int64, "repeat": np.int32, "trajectory": np.int32}
_OBJECTS = (
    *("raw_prompt", "messages", "data_source", "reward_model", "uid"),
    *("finish_reason", "policy_versions"),
)
RESERVED = frozenset((*TENSOR_NAMES, *_NUMBERS, *_OBJECTS, "is_snapshot", PROMPT_MESSAGES))
"""Names that a row's own columns cannot have."""

TEXT_COLUMNS = ("messages", "reward_extra", "ground_truth", "extra")
"""Columns that become Python objects."""


@dataclass(frozen=True, slots=True)
class Widths:
    """Columns of the padded tensors."""

    prompt: int
    response: int


@dataclass(frozen=True, slots=True)
class Layout:
    """What every file of an export has in common."""

    widths: Widths
    with_logprobs: bool
    with_scores: bool
    extra: tuple[str, ...]
    """The rows' own columns, and what loops added."""
    reward_extra: tuple[str, ...]

    def shapes(self) -> dict[str, tuple[int, str]]:
        """Width and element type of each tensor."""
        prompt, response = self.widths.prompt, self.widths.response
        shapes = {
            "prompts": (prompt, "int64"),
            "responses": (response, "int64"),
            "response_mask": (response, "int64"),
            "input_ids": (prompt + response, "int64"),
            "attention_mask": (prompt + response, "int64"),
            "position_ids": (prompt + response, "int64"),
        }
        if self.with_logprobs:
            shapes["rollout_log_probs"] = (response, "float32")
        if self.with_scores:
            shapes["rm_scores"] = (response, "float32")
        return shapes

    def bytes_of_row(self) -> int:
        """Of all its tensors."""
        return sum(width * np.dtype(dtype).itemsize for width, dtype in self.shapes().values())


def scored(table: pa.RecordBatch) -> pa.Array:
    """Which rows have a reward: one that is there and is a number."""
    return pc.fill_null(pc.invert(pc.is_nan(table["reward"])), False)


def fill_tensors(into: dict[str, Array], table: pa.RecordBatch, widths: Widths, pad_token_id: int) -> None:
    """Lays rows into the tensors.

    Args:
        into: by name, of as many rows as `table`, zeros; see `Layout.shapes`.
        table: rows of the artifact.
        widths: no row has more tokens.
        pad_token_id: fills `prompts` on the left, `responses` on the right.
    """
    count = len(table)
    prompts, prompt_lengths = _ragged(table["prompt_ids"])
    responses, response_lengths = _ragged(table["response_ids"])
    into["prompts"].fill(pad_token_id)
    into["responses"].fill(pad_token_id)
    left = _places(prompt_lengths, widths.prompt - prompt_lengths)
    right = _places(response_lengths, np.zeros(count, np.int64))
    into["prompts"][left] = prompts
    into["responses"][right] = responses
    into["response_mask"][right] = _ragged(table["response_mask"])[0]
    into["input_ids"][:, : widths.prompt] = into["prompts"]
    into["input_ids"][:, widths.prompt :] = into["responses"]
    columns = np.arange(widths.prompt + widths.response)
    into["attention_mask"][:] = (columns >= (widths.prompt - prompt_lengths)[:, None]) & (
        columns < (widths.prompt + response_lengths)[:, None]
    )
    np.cumsum(into["attention_mask"], axis=1, out=into["position_ids"])
    into["position_ids"] -= 1
    np.maximum(into["position_ids"], 0, out=into["position_ids"])
    if "rollout_log_probs" in into:
        into["rollout_log_probs"][right] = _ragged(table["response_logprobs"])[0]
    if "rm_scores" in into:
        rewards = table["reward"].to_numpy(zero_copy_only=False)
        into["rm_scores"][np.arange(count), np.maximum(response_lengths - 1, 0)] = rewards


def stretches(table: pa.RecordBatch) -> npt.NDArray[np.int64]:
    """Runs of ones in each row's response mask. Shape (rows,)."""
    mask, lengths = _ragged(table["response_mask"])
    starts = mask.astype(np.int64)
    starts[1:] &= 1 - mask[:-1]
    first = np.cumsum(lengths) - lengths
    some = lengths > 0
    starts[first[some]] = mask[first[some]]  # what the row before ends with says nothing
    sums = np.zeros(len(starts) + 1, np.int64)
    np.cumsum(starts, out=sums[1:])
    counts: npt.NDArray[np.int64] = sums[first + lengths] - sums[first]
    return counts


def _ragged(column: Any) -> tuple[Array, npt.NDArray[np.int64]]:
    """The values of a list column, one after another, and how many each row has."""
    values = column.flatten().to_numpy(zero_copy_only=False)
    return values, pc.list_value_length(column).to_numpy(zero_copy_only=False).astype(np.int64)


def _places(
    lengths: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Row and column of every value of a ragged array that is laid into a matrix."""
    rows = np.repeat(np.arange(len(lengths)), lengths)
    before = np.cumsum(lengths) - lengths
    columns = np.arange(int(lengths.sum())) - np.repeat(before - starts, lengths)
    return rows, columns


class NonTensors:
    """What is no tensor: arrays of one entry a row, the same names for every row and file."""

    def __init__(self, size: int, layout: Layout) -> None:
        self.arrays: dict[str, Array] = {name: np.zeros(size, dtype) for name, dtype in _NUMBERS.items()}
        self.arrays["is_snapshot"] = np.zeros(size, np.bool_)
        for name in (*_OBJECTS, *layout.extra, *layout.reward_extra):
            self.arrays[name] = np.full(size, None, object)
        self._layout = layout
        self.unknown_prompts = 0
        """Rows so far whose prompt messages cannot be told."""

    def fill(self, at: int, table: pa.RecordBatch, path: Path) -> None:
        """Fills the rows from `at` on. Raises `DamageError` naming `path`."""
        layout = self._layout
        sampled = stretches(table)
        names = [name for name in table.schema.names if not name.endswith(("_ids", "_mask", "_logprobs"))]
        for number, raw in enumerate(table.select(names).to_pylist()):
            row = decode_row(raw, path)
            prompt = prompt_messages(
                row["messages"],
                stated=row["extra"].get(PROMPT_MESSAGES),
                engine_calls=int(row["metrics"]["engine_calls"]),
                sampled_stretches=int(sampled[number]),
                aborted=row["finish_reason"] == "aborted",
            )
            self.unknown_prompts += prompt is None
            values: dict[str, Any] = {name: row["extra"].get(name) for name in layout.extra}
            values |= {name: row["reward_extra"].get(name) for name in layout.reward_extra}
            values |= {
                "__num_turns__": row["num_turns"],
                "raw_prompt": prompt,
                "messages": row["messages"],
                "data_source": row["data_source"],
                "reward_model": _reward_model(row),
                "index": row["index"],
                "repeat": row["repeat"],
                "trajectory": row["trajectory"],
                "uid": f"{row['prompt_key']}-{row['index']}",
                "is_snapshot": row["is_snapshot"],
                "finish_reason": row["finish_reason"],
                "policy_versions": [(run["start"], run["version"]) for run in row["policy_versions"]],
            }
            for name, value in values.items():
                self.arrays[name][at + number] = value


def _reward_model(row: Mapping[str, Any]) -> dict[str, Any]:
    """As verl's rows have it: the row's own, if it came with one."""
    own = row["extra"].get("reward_model")
    told = dict(own) if isinstance(own, Mapping) else {"style": "rule"}
    return {**told, "ground_truth": row["ground_truth"]}


def free_names(
    extra: Sequence[str], reward_extra: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...], list[str]]:
    """Names of `extra` and of `reward_extra` that can be columns, and those that cannot.

    A name of both belongs to the reward, as in verl. `prompt_messages` is said by `raw_prompt`.
    """
    of_reward = tuple(name for name in reward_extra if name not in RESERVED)
    of_row = tuple(name for name in extra if name not in RESERVED and name not in of_reward)
    kept = {*of_reward, *of_row, PROMPT_MESSAGES}
    if "reward_model" in extra:
        kept.add("reward_model")  # the row's own is what is written
    left_out = [name for name in dict.fromkeys((*extra, *reward_extra)) if name not in kept]
    return of_row, of_reward, left_out
