"""Prompt rows by verl's own dataset: what its loops get, and what rollstream knows of a row."""

import contextlib
import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from omegaconf import DictConfig

from rollstream.data.prompts import PromptDataset
from rollstream.data.sources import VERL_PROMPT, RowSource, without_verls_own
from rollstream.data.values import BadRow, Row, described, to_jsonable
from rollstream.errors import DataError
from rollstream.store.export.dataproto import MEDIA
from rollstream.trajectory import PromptRow

_KEPT_ROWS = 8
"""Rows that are kept for their repeats, which follow each other; some may be large, with images."""


@dataclass(slots=True)
class VerlRow(PromptRow):
    """A prompt row, with what verl's loop gets of it."""

    sample: dict[str, Any] = field(default_factory=dict)


def sample_row(index: int, sample: Mapping[str, Any]) -> VerlRow:
    """A sample of verl's dataset as a row, where nothing but the loop looks at it.

    Raises:
        DataError: it has no messages.
    """
    messages: Any = sample.get(VERL_PROMPT)
    if hasattr(messages, "tolist"):  # an array, as a batch of verl's holds them
        messages = messages.tolist()
    if not isinstance(messages, list | tuple) or not all(isinstance(each, Mapping) for each in messages):
        raise DataError(f"sample {index}: {VERL_PROMPT} is {described(messages)}; want a list of messages")
    plain = [dict(message) for message in messages]
    sampling = {"sampling_params": sample["sampling_params"]} if sample.get("sampling_params") else {}
    return VerlRow(index, f"{index:032x}", plain, "unknown", columns=sampling, sample=dict(sample))


class VerlRows(RowSource):
    """The rows of a dataset of verl's, or of a class of the user's for verl, as a `RowSource`.

    Args:
        dataset: with `__len__` and `__getitem__`.
        prompt_column: `data.prompt_key`.
    """

    def __init__(self, dataset: Any, prompt_column: str) -> None:
        self._dataset = dataset
        # What is rollstream's of a row and what is the loop's are made of one reading: verl's opens images.
        self._read = lru_cache(maxsize=_KEPT_ROWS)(dataset.__getitem__)
        self.prompt_column = prompt_column
        super().__init__(f"verl's {type(dataset).__name__}")  # it has opened what a row names
        if not len(dataset):
            raise DataError(f"{self._label} holds no rows")

    def __len__(self) -> int:
        return len(self._dataset)

    def sample(self, position: int) -> dict[str, Any]:
        """A row as a loop gets it. Raises `BadRow`."""
        try:
            row = self._read(position)
        except (Exception, SystemExit) as error:
            raise BadRow(f"verl's dataset raised {type(error).__name__}: {error}") from error
        if not isinstance(row, Mapping):
            raise BadRow(f"verl's dataset gave {described(row)}, want a mapping")
        if not isinstance(row.get(VERL_PROMPT), list | tuple):
            raise BadRow(
                f"{self.prompt_column} is {described(row.get(VERL_PROMPT))}; verl wants a list of messages"
            )
        return {str(key): value for key, value in row.items() if key != "dummy_tensor"}

    def row(self, position: int) -> Row:
        sample = self.sample(position)
        sample[VERL_PROMPT] = [_message(message) for message in sample[VERL_PROMPT]]
        # A column of mappings has in every row what any row has.
        plain: Row = to_jsonable(without_verls_own(sample, self.prompt_column), drop_none=True)
        return plain


def _parts(message: Any) -> list[Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    return list(content) if isinstance(content, list | tuple) else []


def shows_media(row: PromptRow) -> bool:
    """Whether images, videos or sounds are in its messages."""
    parts = [part for message in row.messages for part in _parts(message)]
    return any(isinstance(part, Mapping) and MEDIA in part for part in parts)


def _message(message: Any) -> Any:
    """A message whose images, videos and sounds are replaced by what tells them apart."""
    if not (parts := _parts(message)):
        return message
    content = [
        part
        if not isinstance(part, Mapping) or part.get("type") == "text"
        else {"type": MEDIA, "text": f"<{part.get('type')} {_digest(part)}>", MEDIA: part.get("type")}
        for part in parts
    ]
    return {**message, "content": content}


def _digest(part: Mapping[str, Any]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for key, value in sorted(part.items()):
        content = value.tobytes() if hasattr(value, "tobytes") else repr(value).encode()
        digest.update(key.encode() + b"\0" + content)
    return digest.hexdigest()


def create_dataset(config: DictConfig) -> Any:
    """What verl's trainers read their prompts with, over the files of verl's configuration.

    Its own choice of rows (`train_max_samples`, with `shuffle` a seeded random one) and its own filter of
    long prompts hold.

    Raises:
        DataError: it cannot be made.
    """
    from verl.trainer.ppo.utils import create_rl_dataset
    from verl.utils.config import omega_conf_to_dataclass

    try:
        with contextlib.redirect_stdout(sys.stderr):  # it prints; standard output is the result's
            model = omega_conf_to_dataclass(config.actor_rollout_ref.model)
            return create_rl_dataset(
                config.data.train_files,
                config.data,
                model.tokenizer,
                model.processor,
                is_train=True,
                max_samples=config.data.get("train_max_samples", -1),
            )
    except (Exception, SystemExit) as error:
        raise DataError(
            f"verl cannot read data.train_files={list(config.data.train_files)}: "
            f"{type(error).__name__}: {error}"
        ) from error


class VerlDataset(PromptDataset):
    """The prompt rows of a run by verl's dataset; `row` gives `VerlRow`s.

    An index is a position in the dataset that verl made, after its own filter and choice.
    """

    def __init__(self, rows: VerlRows, *, shuffle_seed: int | None, truth_column: str | None = None) -> None:
        self._rows = rows
        super().__init__(
            rows, prompt_column=rows.prompt_column, truth_column=truth_column, shuffle_seed=shuffle_seed
        )

    def row(self, index: int) -> VerlRow:
        """See `PromptDataset.row`. The repeats of a row share its `sample`, which must not be changed."""
        plain = super().row(index)
        try:
            sample = self._rows.sample(index)
        except BadRow as error:
            raise DataError(f"{self.location(index)}: {error}") from error
        values = {name: getattr(plain, name) for name in PromptRow.__dataclass_fields__}
        return VerlRow(**values, sample=sample)
