"""The artifact as verl's DataProto: padded tensors, and everything else beside them.

Names, types and paddings are those of verl 0.9.1 (`verl/experimental/agent_loop/agent_loop.py`,
`_postprocess`): prompts are padded on the left, responses on the right. R is rows, P and Q are the widths of
prompts and responses.

| tensor | shape | type | |
|---|---|---|---|
| prompts | (R, P) | int64 | |
| responses | (R, Q) | int64 | |
| response_mask | (R, Q) | int64 | 1 = sampled by the model |
| input_ids, attention_mask, position_ids | (R, P + Q) | int64 | |
| rollout_log_probs | (R, Q) | float32 | where every row has them |
| rm_scores | (R, Q) | float32 | where every row has a reward: it stands at the last response token |

The artifact is read twice: for lengths and names, then for its rows, a file's at a time.

Of rows with images verl has the pixels (`multi_modal_inputs`, beside the tensors) and, of models with positions of
their own (`get_rope_index`), `position_ids` of shape (R, 4, P + Q). Pixels are never stored: `ImageInputs` says both.
"""

import io
import logging
import pickle
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from rollstream.errors import ConfigError
from rollstream.sampling import changes_of_distribution
from rollstream.store.batch import logprobs_of, read_footer, read_tables
from rollstream.store.export.files import JSON_COLUMNS, decode_row, replacing
from rollstream.store.merge import MergeCancelledError, until
from rollstream.trajectory import CALL_TIMES, REWARD_STREAMS, LogprobKind, is_side_call, sampled_stretches

logger = logging.getLogger(__name__)

Array = npt.NDArray[Any]
Row = dict[str, Any]

Unscored = Literal["error", "keep", "drop"]

MEDIA = "media"
"""Type of a part, and key in it, that stands for an image, a video or a sound which is not kept: its type."""

PROMPT_MESSAGES = "prompt_messages"
"""Key of a trajectory's `extra` by which an agent loop says how many of `messages` the prompt shows."""

IMAGE_INPUTS = "multi_modal_inputs"
"""Name of the pixels of a row, and what else of its images the model takes; in a file with images only."""

_ROWS_AT_ONCE = 1024
"""Rows padded at once: their indices and masks take about 30 bytes a padded token, besides the tensors."""

TENSORS = {
    **dict.fromkeys(("prompts", "responses", "response_mask"), np.int64),
    **dict.fromkeys(("input_ids", "attention_mask", "position_ids"), np.int64),
    **dict.fromkeys(("rollout_log_probs", "rm_scores"), np.float32),
}
_COLUMNS = {
    **{"__num_turns__": np.int32, "index": np.int64, "repeat": np.int32, "trajectory": np.int32},
    **dict.fromkeys(("raw_prompt", "messages", "data_source", "reward_model", "uid"), object),
    **{"finish_reason": object, "policy_versions": object, "is_snapshot": np.bool_},
}
"""Arrays beside the tensors that every file has."""
_RESERVED = {*TENSORS, *_COLUMNS, PROMPT_MESSAGES, IMAGE_INPUTS}
"""Names that no column of a row's own may have."""


class ImageInputs(Protocol):
    """What a model takes for the images of a run's trajectories. All raise `ConfigError`."""

    @property
    def position_rows(self) -> int:
        """1: positions count tokens; 4: those, and three of the model."""

    def inputs(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Tensors by name, of a row as the artifact has it, JSON decoded; of one without images, none."""

    def positions(self, ids: npt.NDArray[np.int64], inputs: Mapping[str, Any]) -> npt.NDArray[np.int64]:
        """The model's own positions of the ids of a row, shape (3, length)."""


@dataclass(frozen=True, slots=True)
class DataProtoOptions:
    """How to write one."""

    pad_token_id: int = 0
    max_rows_per_file: int | None = None
    """None: one file."""
    prompt_width: int | None = None
    """None: that of the longest prompt, the same in all files. So with responses."""
    response_width: int | None = None
    unscored: Unscored = "error"
    """When some rows have a reward and some have none: `error`; `keep` all rows, without `rm_scores`; `drop`
    the rows that have none. When no row has one, there are no `rm_scores`, but for `drop`, which is an error.
    """


@dataclass(frozen=True, slots=True)
class _Layout:
    """What every file of an export has in common, known before a row is written."""

    rows: int
    shapes: dict[str, tuple[int, ...]]
    """Of a row of each tensor there is."""
    meta_info: Row
    extra: list[str]
    """Names of the rows' own columns, and of what loops added."""
    reward_extra: list[str]
    images: ImageInputs | None
    """Where a row has images."""


def export_dataproto(
    artifact: Path,
    target: Path,
    cancelled: Callable[[], bool] = lambda: False,
    *,
    options: DataProtoOptions = DataProtoOptions(),
    images: Callable[[], ImageInputs] | None = None,
    sampling: Mapping[str, Any] | None = None,
) -> int:
    """Writes `target`, or `<stem>-00000-of-00004<suffix>` and so on beside it; returns the rows written.

    When it returns, the files of earlier exports under these names are gone. Memory: about twice one file's
    tensors, its Python objects, and the pixels of its rows, once for a prompt row.

    Args:
        artifact: `trajectories.parquet`.
        target: `….pkl`.
        cancelled: asked now and then.
        options: see there.
        images: makes what reads the images; called if a row has some.
        sampling: what of the run's sampling changes the model's distribution, see `Manifest`.

    Raises:
        ConfigError: packages are missing, a width is too small, rows without reward are in the way, or images
            cannot be read.
        DamageError: the artifact is damaged.
        StorageError: the disk is full, or `target` cannot be written.
        MergeCancelledError: `cancelled` said so. Older files stay.
    """
    check_packages()
    for option in ("max_rows_per_file", "prompt_width", "response_width"):
        value = getattr(options, option)
        if value is not None and value < 1:
            raise ConfigError(f"--{option.replace('_', '-')} must be at least 1 (it is {value})")
    layout = _survey(artifact, options, cancelled, images, sampling or {})
    per_file = min(layout.rows, options.max_rows_per_file or layout.rows)
    count = -(-layout.rows // per_file)
    names = [target]
    if count > 1:
        names = [target.with_name(f"{target.stem}-{i:05}-of-{count:05}{target.suffix}") for i in range(count)]
    unknown = 0
    with ExitStack() as files:
        temporaries = [files.enter_context(replacing(name)) for name in names]
        tables = _tables_of_files(artifact, per_file, drop=options.unscored == "drop")
        for temporary, table in zip(temporaries, tables, strict=True):
            unknown += _write_file(temporary, table, layout, options.pad_token_id, artifact, cancelled)
    for old in {*dataproto_files(target)} - {*names}:
        old.unlink()
    if unknown:
        logger.warning(
            "%d of %d rows have no raw_prompt: their loop makes engine calls that are no message of the "
            "conversation, and does not say extra['prompt_messages'] (docs/export.md)",
            unknown,
            layout.rows,
        )
    return layout.rows


def dataproto_files(target: Path) -> list[Path]:
    """The files there are of an export to `target`, of one file or of several."""
    pattern = re.compile(rf"{re.escape(target.stem)}(-\d{{5,}}-of-\d{{5,}})?{re.escape(target.suffix)}")
    # As `target` has its folder, relative or not: these paths are compared with those that were written.
    return sorted(path for path in target.parent.iterdir() if pattern.fullmatch(path.name))


def check_packages() -> None:
    """Raises `ConfigError` when what writes a DataProto is not installed."""
    missing = [name for name in ("torch", "tensordict") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"a DataProto needs {' and '.join(missing)}: pip install 'rollstream[dataproto]'")


# -- what is in the artifact


def _survey(
    artifact: Path,
    options: DataProtoOptions,
    cancelled: Callable[[], bool],
    images: Callable[[], ImageInputs] | None,
    sampling: Mapping[str, Any],
) -> _Layout:
    """Reads the artifact once for its lengths and names, and for what cannot be written."""
    rows = without_logprobs = unscored = 0
    with_images, changes = False, dict(sampling)
    longest = {"prompt": 0, "response": 0}
    names: dict[str, dict[str, None]] = {"extra": {}, "reward_extra": {}}
    columns = ["prompt_ids", "response_ids", "response_logprobs", "reward", *JSON_COLUMNS]
    for table in until(map(_without_side_calls, read_tables(artifact, columns)), cancelled):
        scored = table.filter(_scored(table))
        unscored += len(table) - len(scored)
        table = scored if options.unscored == "drop" else table
        with_images = with_images or _has_images(table)
        rows += len(table)
        for what in longest:
            lengths = pc.list_value_length(table[f"{what}_ids"])
            if what == "prompt" and pc.min(lengths).as_py() == 0:
                raise ConfigError(f"{artifact} has trajectories without token ids")
            longest[what] = max(longest[what], pc.max(lengths).as_py() or 0)
        without_logprobs += table["response_logprobs"].null_count
        for column, known in names.items():
            for text in pc.unique(table[column]).to_pylist():
                values = orjson.loads(text)
                known.update(dict.fromkeys(values))
                if column == "extra":
                    changes |= _own_sampling(values)
    _check_unscored(artifact, rows, unscored, options.unscored)
    if with_images and images is None:
        raise ConfigError(f"{artifact} has conversations with images, and nothing here reads them")
    if 0 < without_logprobs < rows:
        logger.warning(
            "%d of %d rows have no log-probs, so there are no rollout_log_probs", without_logprobs, rows
        )
    kind: LogprobKind | None = None if without_logprobs else logprobs_of(read_footer(artifact))
    if kind == "raw" and changes:
        logger.warning(
            "rollout_log_probs are the raw model's, and tokens were drawn with %s: they are not the log-probs of "
            "what was drawn from, which verl's corrections take them for (docs/export.md)",
            ", ".join(f"{name} {value}" for name, value in changes.items()),
        )
    # A name of both belongs to the reward, as in verl. `prompt_messages` is said by `raw_prompt`, and the row's own
    # reward model is what is written.
    all_names = {**names["extra"], **names["reward_extra"]}
    per_token = REWARD_STREAMS.values()  # lists: verl takes means of what these keys name
    rewards = [name for name in names["reward_extra"] if name not in _RESERVED and name not in per_token]
    left_out = _RESERVED & all_names.keys() - {PROMPT_MESSAGES, "reward_model"}
    if left_out:
        logger.warning(
            "columns with names that a DataProto uses itself are left out: %s", ", ".join(sorted(left_out))
        )
    with_scores = unscored == 0 or options.unscored == "drop"
    meta_info: Row = {}
    if with_scores:
        meta_info["reward_extra_keys"] = rewards
    if kind is not None:
        meta_info["logprobs"] = kind
    prompt = _width("prompt", longest["prompt"], options.prompt_width)
    response = _width("response", longest["response"], options.response_width)
    widths = {"prompts": prompt, "responses": response, "response_mask": response}
    widths |= dict.fromkeys(("input_ids", "attention_mask", "position_ids"), prompt + response)
    widths |= {} if without_logprobs else {"rollout_log_probs": response}
    widths |= {"rm_scores": response} if with_scores else {}
    shapes: dict[str, tuple[int, ...]] = {name: (width,) for name, width in widths.items()}
    reader = images() if with_images and images is not None else None
    if reader is not None and reader.position_rows > 1:
        shapes["position_ids"] = reader.position_rows, prompt + response
    logger.info("%d rows padded to %d + %d tokens", rows, prompt, response)
    extra = [name for name in names["extra"] if name not in {*_RESERVED, *rewards, CALL_TIMES}]
    return _Layout(rows, shapes, meta_info, extra, rewards, reader)


def _own_sampling(extra: Mapping[str, Any]) -> Row:
    """The sampling of a row, or of a program's calls, that leaves the model's own distribution."""
    own = extra.get("sampling_params")
    if isinstance(own, str):
        own = orjson.loads(own)
    changes = changes_of_distribution(own) if isinstance(own, Mapping) else {}
    gateway = extra.get("gateway")
    calls = gateway.get("client_sampling") if isinstance(gateway, Mapping) else None
    for name, values in (calls or {}).items():
        for value in values:
            changes |= changes_of_distribution({name: value})
    return changes


def _scored(table: pa.Table) -> pa.ChunkedArray:
    """Which rows have a reward: one that is there and is a number."""
    return pc.fill_null(pc.invert(pc.is_nan(table["reward"])), False)


def _without_side_calls(table: pa.Table) -> pa.Table:
    """Leaves side calls out, as `Rollout.without_side_calls` does."""
    likely = pc.match_substring(table["extra"], '"side_call":true').to_pylist()
    if not any(likely):
        return table
    rows = zip(likely, table["extra"].to_pylist(), strict=True)
    return table.filter(pa.array([not (may and is_side_call(orjson.loads(text))) for may, text in rows]))


def _has_images(table: pa.Table) -> bool:
    # As the store writes JSON; the same in somebody's text has its quotes escaped, in a tool's arguments not.
    likely = pc.match_substring_regex(table["messages"], f'"type":"image|"{MEDIA}":')
    texts = table["messages"].filter(likely).to_pylist()
    return any(any(image_parts(orjson.loads(text))) for text in texts)


def image_parts(messages: Iterable[Mapping[str, Any]]) -> Iterator[Row]:
    """The parts of messages that are images, in order."""
    for message in messages:
        parts = message.get("content")
        for part in parts if isinstance(parts, list) else []:
            if isinstance(part, dict) and (part.get("type") in ("image", "image_url") or MEDIA in part):
                yield part


def _check_unscored(artifact: Path, rows: int, unscored: int, rule: Unscored) -> None:
    """Raises or warns about rows without a reward; `rows` are those that stay."""
    if rows == 0:
        raise ConfigError(f"{artifact} has no rows{' with a reward' * (unscored > 0)}: nothing would be left")
    if rule == "error" and 0 < unscored < rows:
        raise ConfigError(
            f"{unscored} of {rows} rows have no reward, which rm_scores cannot say: --unscored drop "
            "leaves them out, --unscored keep writes all rows without rm_scores"
        )
    if rule == "drop" and unscored:
        logger.warning("%d rows without a reward are left out", unscored)
    elif 0 < unscored < rows:
        logger.warning("%d of %d rows have no reward, so there are no rm_scores", unscored, rows)


def _width(what: str, longest: int, wanted: int | None) -> int:
    if wanted is not None and wanted < longest:
        raise ConfigError(
            f"--{what}-width {wanted} is too small: the longest {what} has {longest} tokens, and none is cut"
        )
    return wanted or max(1, longest)


# -- writing


def _tables_of_files(artifact: Path, per_file: int, *, drop: bool) -> Iterator[pa.Table]:
    """The rows of each file."""
    held = pa.table({})
    for table in map(_without_side_calls, read_tables(artifact)):
        table = table.filter(_scored(table)) if drop else table
        held = pa.concat_tables([held, table]) if len(held) else table
        while len(held) >= per_file:
            yield held.slice(0, per_file)
            held = held.slice(per_file)
    if len(held):
        yield held


def _write_file(
    path: Path,
    table: pa.Table,
    layout: _Layout,
    pad_token_id: int,
    artifact: Path,
    cancelled: Callable[[], bool],
) -> int:
    """Writes one file; returns how many of its rows have no `raw_prompt`."""
    import torch
    from tensordict import TensorDict

    size = len(table)
    # In one piece of memory, as verl has them before it pickles, and views of it that are filled in place.
    # numpy's zeros take no memory before they are written to (torch's do), and `consolidate` only reads them.
    zeros = {name: np.zeros((size, *shape), TENSORS[name]) for name, shape in layout.shapes.items()}
    tensors = TensorDict({name: torch.from_numpy(array) for name, array in zeros.items()}, batch_size=[size])
    tensors = tensors.consolidate()
    views: dict[str, Array] = {name: np.asarray(tensors[name].numpy()) for name in zeros}
    others: dict[str, Array] = {name: np.zeros(size, dtype) for name, dtype in _COLUMNS.items()}
    own = [*layout.extra, *layout.reward_extra, *([] if layout.images is None else [IMAGE_INPUTS])]
    others |= {name: np.full(size, None, object) for name in own}
    for at in range(0, size, _ROWS_AT_ONCE):
        if cancelled():
            raise MergeCancelledError
        part = table.slice(at, _ROWS_AT_ONCE).combine_chunks()
        fill_tensors({name: view[at : at + len(part)] for name, view in views.items()}, part, pad_token_id)
        # Tokens become Python's numbers where images are placed among them.
        wide = "prompt_ids", "response_ids", "response_logprobs"
        kept = part if layout.images is not None else part.drop_columns(wide)
        for number, raw in enumerate(kept.to_pylist(), at):
            row = decode_row(raw, artifact)
            for name, value in _other_columns(row, layout).items():
                others[name][number] = value
            if layout.images is not None:
                inputs = others[IMAGE_INPUTS][number] = layout.images.inputs(row)
                if layout.images.position_rows > 1:
                    ids = np.array([*row["prompt_ids"], *row["response_ids"]], np.int64)
                    seen = views["attention_mask"][number].astype(bool)
                    positions = views["position_ids"][number]
                    positions[0] = 1  # as verl fills up
                    positions[0, seen] = np.arange(len(ids))
                    positions[1:, seen] = layout.images.positions(ids, inputs)
    if cancelled():
        raise MergeCancelledError
    save_dataproto(path, tensors, others, layout.meta_info)
    return sum(prompt is None for prompt in others["raw_prompt"])


def fill_tensors(into: Mapping[str, Array], table: pa.Table, pad_token_id: int) -> None:
    """Lays rows into tensors of zeros; `pad_token_id` fills prompts on the left, responses on the right.

    Args:
        into: arrays of the names and types of `TENSORS`.
        table: the columns of an artifact that they are made of.
        pad_token_id: the tokenizer's.
    """
    prompts, prompt_lengths = _ragged(table["prompt_ids"])
    responses, response_lengths = _ragged(table["response_ids"])
    width = into["prompts"].shape[1]
    into["prompts"].fill(pad_token_id)
    into["responses"].fill(pad_token_id)
    left = _places(prompt_lengths, width - prompt_lengths)
    right = _places(response_lengths, np.zeros(len(table), np.int64))
    into["prompts"][left] = prompts
    into["responses"][right] = responses
    into["response_mask"][right] = _ragged(table["response_mask"])[0]
    into["input_ids"][:, :width] = into["prompts"]
    into["input_ids"][:, width:] = into["responses"]
    columns = np.arange(into["input_ids"].shape[1])
    into["attention_mask"][:] = (columns >= (width - prompt_lengths)[:, None]) & (
        columns < (width + response_lengths)[:, None]
    )
    if into["position_ids"].ndim == 2:  # else they are a model's own
        np.cumsum(into["attention_mask"], axis=1, out=into["position_ids"])
        into["position_ids"] -= 1
        np.maximum(into["position_ids"], 0, out=into["position_ids"])
    if "rollout_log_probs" in into:
        into["rollout_log_probs"][right] = _ragged(table["response_logprobs"])[0]
    if "rm_scores" in into:
        rewards = table["reward"].to_numpy()
        into["rm_scores"][np.arange(len(table)), np.maximum(response_lengths - 1, 0)] = rewards


def _ragged(column: pa.ChunkedArray) -> tuple[Array, npt.NDArray[np.int64]]:
    """The values of a list column, one after another, and how many each row has."""
    flat: Array = column.combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return flat, pc.list_value_length(column).to_numpy().astype(np.int64)


def _places(
    lengths: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Row and column of every value of a ragged array that is laid into a matrix."""
    rows = np.repeat(np.arange(len(lengths)), lengths)
    before = np.cumsum(lengths) - lengths
    columns = np.arange(int(lengths.sum())) - np.repeat(before - starts, lengths)
    return rows, columns


def _other_columns(row: Row, layout: _Layout) -> Row:
    """What of a row is no tensor."""
    model = row["extra"].get("reward_model")
    return {
        **{name: row["extra"].get(name) for name in layout.extra},
        **{name: row["reward_extra"].get(name) for name in layout.reward_extra},
        **{name: row[name] for name in _COLUMNS if name in row},
        "__num_turns__": row["num_turns"],
        "raw_prompt": shown_prompt(row),
        "reward_model": {
            **(model if isinstance(model, Mapping) else {"style": "rule"}),
            "ground_truth": row["ground_truth"],
        },
        "uid": f"{row['prompt_key']}-{row['index']}",
        "policy_versions": [(run["start"], run["version"]) for run in row["policy_versions"]],
    }


def shown_prompt(row: Mapping[str, Any]) -> list[Row] | None:
    """The messages that a trajectory's `prompt_ids` show; None where that cannot be known.

    An artifact has the whole conversation in one list. What the loop states in `extra` counts. Otherwise every engine
    call must have given an assistant message and a stretch of sampled tokens, as it does in a `Conversation`:
    then the prompt ends before as many assistant messages from the end. The last call of one that was aborted may
    have given no tokens; without a tokenizer there is no mask, and the calls alone tell.
    """
    messages, stated = row["messages"], row["extra"].get(PROMPT_MESSAGES)
    if isinstance(stated, int) and not isinstance(stated, bool) and 0 <= stated <= len(messages):
        return list(messages[:stated])
    calls, aborted = int(row["metrics"]["engine_calls"]), row["finish_reason"] == "aborted"
    stretches = len(sampled_stretches(row["response_mask"])) if row.get("prompt_ids", True) else calls
    if stretches != calls and not (aborted and stretches == calls - 1):
        return None
    answers = [at for at, message in enumerate(messages) if message.get("role") == "assistant"]
    return list(messages[: answers[-calls]]) if 0 < calls <= len(answers) else None


def save_dataproto(path: Path, tensors: Any, non_tensor_batch: Row, meta_info: Row) -> None:
    """Writes what `verl.DataProto.load_from_disk` reads.

    Args:
        path: is overwritten.
        tensors: a consolidated TensorDict with a batch size of `(rows,)`.
        non_tensor_batch: numpy arrays of length rows.
        meta_info: plain Python values.
    """
    with _dataproto_class() as dataproto, path.open("wb") as file:
        pickle.dump(dataproto(tensors, non_tensor_batch, meta_info), file, protocol=4)


class _DataProto:
    """Pickles as verl's class of that name does."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __getstate__(self) -> tuple[Any, ...]:
        import torch

        batch, *others = self.parts
        buffer = io.BytesIO()
        torch.save(batch, buffer)
        return buffer.getvalue(), *others


@contextmanager
def _dataproto_class() -> Iterator[Any]:
    """`verl.DataProto`; where verl is not installed, a class that goes by its name for the while."""
    if find_spec("verl") is not None:
        from verl import DataProto

        yield DataProto
        return
    package, module = ModuleType("verl"), ModuleType("verl.protocol")
    stand_in = type("DataProto", (_DataProto,), {"__module__": "verl.protocol"})
    setattr(module, "DataProto", stand_in)  # noqa: B010 (a module has no such attribute for the type checker)
    sys.modules |= {"verl": package, "verl.protocol": module}
    try:
        yield stand_in
    finally:
        for name in ("verl", "verl.protocol"):
            del sys.modules[name]
