"""verl's SFT dataset for Parquet whose messages and tools are JSON text.

A column of messages with tool calls has no type of its own in Parquet: as structs, each call gets the arguments of
all others as null, and verl renders those into the text that is trained on. `datasets` writes each message as text,
too, where rows differ.
"""

import json
from typing import Any

import pandas  # verl's dataset is a DataFrame
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset


class TextColumnsDataset(MultiTurnSFTDataset):  # type: ignore[misc]
    """`data.custom_cls`: reads `messages` and `tools` that are text, or lists of texts. Everything else is verl's."""

    def _read_files_and_process(self) -> None:
        super()._read_files_and_process()
        self.messages = self._decoded(self.messages_key)
        if self.tools_key in self.dataframe:
            self.tools = self._decoded(self.tools_key)

    def _decoded(self, key: str) -> list[Any]:
        values = [_decoded(value) for value in self.dataframe[key]]
        self.dataframe[key] = pandas.Series(values, index=self.dataframe.index, dtype=object)
        return values


def _decoded(value: Any) -> Any:
    if isinstance(value, str):
        return json.loads(value)
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    return None if value is pandas.NA else value
