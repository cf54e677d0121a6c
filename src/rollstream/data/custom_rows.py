"""`data.custom_cls`: rows from a dataset class of the user's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollstream.config.settings import DataSettings
from rollstream.data.user_class import load_class
from rollstream.data.values import BadRow, Row, described, to_jsonable
from rollstream.errors import DataError


class CustomRows:
    """The rows of a user's dataset.

    The class is made with keyword arguments `files` (`data.train_files` as a list of str, maybe empty) and
    `data` (the `DataSettings`). It has `__len__`, and `__getitem__(position)` that returns a row as a dict,
    of the same columns as a row of a file: `prompt`, `data_source`, `reward_model`, ... The same position
    must give the same row each time. `__getitem__` may be called from several threads.

    Args:
        data: Where `custom_cls` is set.

    Raises:
        ConfigError: The class cannot be loaded.
        DataError: It cannot be made, or has no rows.
    """

    def __init__(self, data: DataSettings) -> None:
        cls = load_class(data.custom_cls.path, data.custom_cls.name, "data.custom_cls")
        self._label = f"{cls.__name__} ({data.custom_cls.path})"
        try:
            self._dataset: Any = cls(files=data.files, data=data)
            self._length = len(self._dataset)
        except (Exception, SystemExit) as error:
            raise DataError(f"{self._label}: cannot be made ({type(error).__name__}: {error})") from error
        if not hasattr(cls, "__getitem__"):
            raise DataError(f"{self._label}: has no __getitem__(position)")
        if self._length == 0:
            raise DataError(f"{self._label}: holds no rows")

    def __len__(self) -> int:
        return self._length

    def row(self, position: int) -> Row:
        try:
            row = self._dataset[position]
        except (Exception, SystemExit) as error:
            raise BadRow(f"the dataset raised {type(error).__name__}: {error}") from error
        if not isinstance(row, dict):
            raise BadRow(f"the dataset gave {described(row)}, want a dict")
        copied: Row = to_jsonable(row)
        return copied

    def scan(self) -> Iterator[Row | BadRow]:
        for position in range(self._length):
            try:
                yield self.row(position)
            except BadRow as error:
                yield error

    def location(self, position: int) -> str:
        return f"{self._label}, row {position}"

    def folder(self, position: int) -> Path | None:
        return None  # only the class knows where its data lie
