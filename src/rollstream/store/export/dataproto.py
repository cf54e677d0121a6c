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

The artifact is read twice: for lengths and names, then for its rows. A file's tensors are allocated once, and
filled and written in place.

Trajectories with images are refused: verl trains on them with their pixels (`multi_modal_inputs`), which are
never stored, and with the model's own positions (`get_rope_index`), which follow from the pixels.
"""

import logging
import os
import re
import shutil
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from rollstream.errors import ConfigError, StorageError
from rollstream.store.batch import open_parquet, reading
from rollstream.store.export.files import note_export
from rollstream.store.export.room import available_memory
from rollstream.store.export.verl_pickle import write_dataproto
from rollstream.store.export.verl_rows import (
    TEXT_COLUMNS,
    Array,
    Layout,
    NonTensors,
    Widths,
    fill_tensors,
    free_names,
    scored,
)
from rollstream.store.journal import sync_folder
from rollstream.store.merge import MergeCancelledError

logger = logging.getLogger(__name__)

Unscored = Literal["error", "keep", "drop"]

MEDIA = "media"
"""Key of a text part that stands for an image, a video or a sound which is not kept: its type."""

NO_IMAGES = (
    "a DataProto written here has tokens alone: a model would be trained on the places of images without "
    "their pixels, and at positions of text. Formats jsonl, parquet and hf say in `messages` which images "
    "they were (docs/images.md)"
)
"""Why rows with images are refused."""

_READ_ROWS = 1024
"""Rows handled at once. Their indices and masks take about 30 bytes a padded token, besides the tensors."""

_OBJECT_BYTES = 4
"""Python objects take about this many bytes for each byte of their JSON text."""


@dataclass(frozen=True, slots=True)
class DataProtoOptions:
    """How to write it."""

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
class _Plan:
    """What is known of the artifact before a row is written."""

    rows: int
    tokens: int
    text_bytes: int
    """JSON text of all rows."""
    layout: Layout


def export_dataproto(
    artifact: Path,
    target: Path,
    cancelled: Callable[[], bool] = lambda: False,
    *,
    options: DataProtoOptions = DataProtoOptions(),
) -> int:
    """Writes `target`, or `<stem>-00000-of-00004<suffix>` and so on beside it; returns the rows written.

    When it returns, the files of earlier exports under these names are gone. Memory: one file's tensors and
    Python objects, and little else.

    Args:
        artifact: `trajectories.parquet`.
        target: `….pkl`.
        cancelled: asked now and then.
        options: see there.

    Raises:
        ConfigError: packages are missing, a width is too small, rows without reward are in the way, rows have
            images, or a file would not fit into memory.
        DamageError: the artifact is damaged.
        StorageError: the disk is full, or `target` cannot be written.
        MergeCancelledError: `cancelled` said so. Older files stay.
    """
    check_packages()
    _check_options(options)
    plan = _survey(artifact, options, cancelled)
    per_file = min(plan.rows, options.max_rows_per_file or plan.rows)
    count = -(-plan.rows // per_file)
    _check_room(plan, per_file, target)
    names = [target]
    if count > 1:
        names = [target.with_name(f"{target.stem}-{i:05}-of-{count:05}{target.suffix}") for i in range(count)]
    temporaries = [name.with_name(f".{name.name}.{os.getpid()}.tmp") for name in names]
    rows = _Rows(artifact, drop=options.unscored == "drop")
    unknown = 0
    try:
        if (target.parent / "run.json").exists():  # the caller holds its lock: nobody writes them any more
            for left in target.parent.glob(f".{target.stem}*{target.suffix}.*.tmp"):
                left.unlink()
        for number, temporary in enumerate(temporaries):
            size = min(per_file, plan.rows - number * per_file)
            unknown += _write_file(temporary, rows, size, plan.layout, options.pad_token_id, cancelled)
        for temporary, name in zip(temporaries, names, strict=True):
            temporary.replace(name)
        for old in set(dataproto_files(target)) - set(names):
            old.unlink()
        sync_folder(target.parent)
        note_export(artifact, *names)
    except OSError as error:
        raise StorageError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        rows.close()
        for temporary in temporaries:
            temporary.unlink(missing_ok=True)
    if unknown:
        logger.warning(
            "%d of %d rows have no raw_prompt: their loop makes engine calls that are no message of the "
            "conversation, and does not say extra['prompt_messages'] (docs/export.md)",
            *(unknown, plan.rows),
        )
    return plan.rows


def dataproto_files(target: Path) -> list[Path]:
    """The files there are of an export to `target`, of one file or of several."""
    pattern = re.compile(rf"{re.escape(target.stem)}(-\d{{5,}}-of-\d{{5,}})?{re.escape(target.suffix)}")
    # As `target` has its folder, relative or not: these paths are compared with those that were written.
    return sorted(path for path in target.parent.iterdir() if pattern.fullmatch(path.name))


def check_packages() -> None:
    """Raises `ConfigError` when what writes a DataProto is not installed."""
    from importlib.util import find_spec

    missing = [name for name in ("torch", "tensordict") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"a DataProto needs {' and '.join(missing)}, not installed here: "
            "pip install 'rollstream[dataproto]'"
        )


def _check_options(options: DataProtoOptions) -> None:
    for name in ("max_rows_per_file", "prompt_width", "response_width"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1 (it is {value})")


def _survey(artifact: Path, options: DataProtoOptions, cancelled: Callable[[], bool]) -> _Plan:
    """Reads the artifact once for its lengths and names, and for what cannot be written."""
    rows = tokens = text_bytes = without_logprobs = unscored = 0
    longest_prompt = longest_response = 0
    extra: dict[str, None] = {}
    reward_extra: dict[str, None] = {}
    columns = ["prompt_ids", "response_ids", "response_logprobs", "reward", *TEXT_COLUMNS]
    for table in _tables(artifact, columns):
        if cancelled():
            raise MergeCancelledError
        kept = scored(table)
        missing = len(table) - int(pc.sum(kept).as_py() or 0)
        unscored += missing
        if missing and options.unscored == "drop":
            table = table.filter(kept)
        if not len(table):
            continue
        _refuse_images(artifact, table)
        rows += len(table)
        prompts, responses = (pc.list_value_length(table[name]) for name in ("prompt_ids", "response_ids"))
        longest_prompt = max(longest_prompt, pc.max(prompts).as_py())
        longest_response = max(longest_response, pc.max(responses).as_py())
        tokens += pc.sum(prompts).as_py() + pc.sum(responses).as_py()
        without_logprobs += table["response_logprobs"].null_count
        text_bytes += sum(pc.sum(pc.binary_length(table[name])).as_py() for name in TEXT_COLUMNS)
        for names, column in ((extra, "extra"), (reward_extra, "reward_extra")):
            for text in pc.unique(table[column]).to_pylist():
                names.update(dict.fromkeys(orjson.loads(text)))
    _say_unscored(artifact, rows, unscored, options.unscored)
    if 0 < without_logprobs < rows:
        logger.warning(
            "%d of %d rows have no log-probs, so there are no rollout_log_probs", without_logprobs, rows
        )
    of_row, of_reward, left_out = free_names(list(extra), list(reward_extra))
    if left_out:
        logger.warning(
            "columns with names that a DataProto uses itself are left out: %s", ", ".join(left_out)
        )
    layout = Layout(
        widths=Widths(
            _width("prompt", longest_prompt, options.prompt_width),
            _width("response", longest_response, options.response_width),
        ),
        with_logprobs=without_logprobs == 0,
        with_scores=unscored == 0 or options.unscored == "drop",
        extra=of_row,
        reward_extra=of_reward,
    )
    return _Plan(rows=rows, tokens=tokens, text_bytes=text_bytes, layout=layout)


def _refuse_images(artifact: Path, table: pa.RecordBatch) -> None:
    # As the store writes JSON; the same in somebody's text has its quotes escaped, in a tool's arguments not.
    likely = pc.match_substring_regex(table["messages"], f'"type":"image|"{MEDIA}":')
    for text in table["messages"].filter(likely).to_pylist():
        for message in orjson.loads(text):
            parts = message.get("content")
            if isinstance(parts, list) and any(
                isinstance(part, dict) and (part.get("type") in ("image", "image_url") or MEDIA in part)
                for part in parts
            ):
                raise ConfigError(f"{artifact} has conversations with images, and {NO_IMAGES}")


def _say_unscored(artifact: Path, rows: int, unscored: int, rule: Unscored) -> None:
    """Raises or warns about rows without a reward; `rows` are those that stay."""
    if rows == 0:
        raise ConfigError(
            f"none of the {unscored} rows of {artifact} has a reward: nothing would be left"
            if unscored
            else f"{artifact} has no rows"
        )
    if rule == "drop":
        if unscored:
            logger.warning("%d rows without a reward are left out", unscored)
    elif 0 < unscored < rows:
        if rule == "error":
            raise ConfigError(
                f"{unscored} of {rows} rows have no reward, which rm_scores cannot say: --unscored drop "
                "leaves them out, --unscored keep writes all rows without rm_scores"
            )
        logger.warning("%d of %d rows have no reward, so there are no rm_scores", unscored, rows)


def _width(what: str, longest: int, asked: int | None) -> int:
    if asked is None:
        return max(1, longest)
    if asked < longest:
        raise ConfigError(
            f"--{what}-width {asked} is too small: the longest {what} has {longest} tokens, and none is cut"
        )
    return asked


def _check_room(plan: _Plan, per_file: int, target: Path) -> None:
    layout, widths = plan.layout, plan.layout.widths
    total = plan.rows * layout.bytes_of_row()
    logger.info(
        "%d rows padded to %d + %d tokens: %.2f GB (%.1f times the %d tokens that there are)",
        *(plan.rows, widths.prompt, widths.response, total / 1e9),
        *(plan.rows * (widths.prompt + widths.response) / max(1, plan.tokens), plan.tokens),
    )
    total += plan.text_bytes
    free = shutil.disk_usage(target.resolve().parent).free
    if total > free:
        raise StorageError(
            f"{target} would have about {total / 1e9:.1f} GB, and its disk has {free / 1e9:.1f} GB left"
        )
    memory = available_memory()
    one = per_file * layout.bytes_of_row() + _OBJECT_BYTES * plan.text_bytes * per_file // plan.rows
    if memory is not None and one > memory:
        fitting = max(1, int(per_file * memory / one / 2))
        raise ConfigError(
            f"writing {per_file} rows padded to {widths.prompt} + {widths.response} tokens takes about "
            f"{one / 1e9:.1f} GB of memory, and {memory / 1e9:.1f} GB are left: write several files, for "
            f"example with --max-rows-per-file {fitting}"
        )


def _tables(artifact: Path, columns: list[str] | None = None) -> Generator[pa.RecordBatch]:
    with open_parquet(artifact) as file:
        batches = file.iter_batches(_READ_ROWS, columns=columns)
        while True:
            with reading(artifact):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch


class _Rows:
    """Rows of the artifact, as many as are asked for at a time."""

    def __init__(self, artifact: Path, *, drop: bool) -> None:
        self.path = artifact
        self._tables = _tables(artifact)
        self._drop = drop
        self._left: pa.RecordBatch | None = None

    def take(self, count: int) -> pa.RecordBatch | None:
        """The next rows, at least one and at most `count`; None at the end."""
        while self._left is None or not len(self._left):
            table = next(self._tables, None)
            if table is None:
                return None
            self._left = table.filter(scored(table)) if self._drop else table
        taken, self._left = self._left.slice(0, count), self._left.slice(count)
        return taken

    def close(self) -> None:
        """Closes the file."""
        self._tables.close()


def _write_file(
    path: Path, rows: _Rows, size: int, layout: Layout, pad_token_id: int, cancelled: Callable[[], bool]
) -> int:
    """Writes the next `size` rows; returns how many of them have no `raw_prompt`."""
    tensors, arrays = _allocate(size, layout)
    others = NonTensors(size, layout)
    done = 0
    while done < size:
        if cancelled():
            raise MergeCancelledError
        table = rows.take(min(_READ_ROWS, size - done))
        if table is None:
            raise StorageError(f"{rows.path} has changed while it was read")
        here = {name: array[done : done + len(table)] for name, array in arrays.items()}
        fill_tensors(here, table, layout.widths, pad_token_id)
        others.fill(done, table, rows.path)
        done += len(table)
    meta_info = {"reward_extra_keys": list(layout.reward_extra)} if layout.with_scores else {}
    write_dataproto(path, tensors, others.arrays, meta_info, cancelled)
    return others.unknown_prompts


def _allocate(size: int, layout: Layout) -> tuple[Any, dict[str, Array]]:
    """Tensors of zeros in one piece of memory, as verl has them before it pickles, and views of them."""
    import torch
    from tensordict import TensorDict

    # numpy's zeros take no memory before they are written to (torch's do), and `consolidate` only reads them.
    empty = {
        name: torch.from_numpy(np.zeros((size, width), dtype))
        for name, (width, dtype) in layout.shapes().items()
    }
    tensors = TensorDict(empty, batch_size=[size]).consolidate()
    arrays: dict[str, Array] = {name: np.asarray(tensors[name].numpy()) for name in empty}
    return tensors, arrays
