"""Prompt rows to prompt ids: rendering, length limit, and a small memory of the last rows."""

from collections import OrderedDict
from typing import Any

from rollstream.chat.tokenizer import ChatTokenizer
from rollstream.chat.truncation import Truncation, truncate
from rollstream.errors import DataError
from rollstream.trajectory import Message

_REMEMBERED_ROWS = 64
"""The repeats of a row are dispatched together; a few rows in flight are enough."""


class PromptRenderer:
    """Renders prompts within a length limit. Shared by all rollouts of a worker."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        *,
        prompt_length: int,
        truncation: Truncation,
        tool_schemas: list[dict[str, Any]] | None = None,
    ) -> None:
        """`prompt_length` in tokens; `tool_schemas` are shown to the model by the chat template."""
        self._tokenizer = tokenizer
        self._prompt_length = prompt_length
        self._truncation: Truncation = truncation
        self._tools = tool_schemas or None
        self._remembered: OrderedDict[str, list[int]] = OrderedDict()

    def length(self, messages: list[Message]) -> int:
        """Tokens of a prompt before truncation."""
        return len(self._tokenizer.render(messages, tools=self._tools))

    def render(self, messages: list[Message], *, prompt_key: str) -> list[int]:
        """Ids of a prompt, at most `prompt_length`. Do not change the list.

        Raises:
            DataError: the template refuses the messages, or they are too long and truncation is `error`.
        """
        ids = self._remembered.get(prompt_key)
        if ids is None:
            ids = self._tokenizer.render(messages, tools=self._tools)
            if not ids:
                raise DataError("the prompt renders to no tokens at all")
            if len(ids) > self._prompt_length:
                ids = truncate(ids, self._prompt_length, self._truncation)
            self._remembered[prompt_key] = ids
            if len(self._remembered) > _REMEMBERED_ROWS:
                self._remembered.popitem(last=False)
        return ids
