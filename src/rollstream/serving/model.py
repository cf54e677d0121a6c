"""The model that is served: its names, and how text becomes ids and back."""

import asyncio
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from rollstream.chat.parsers.base import ToolCallParser
from rollstream.chat.template import TurnTemplate
from rollstream.chat.tokenizer import ChatTokenizer
from rollstream.engine.checks import read_model_limits
from rollstream.serving.answer import AnswerReader
from rollstream.serving.refusals import RequestError

_CHARS_PER_TOKEN = 1024
"""More than any vocabulary has in one token: a text beyond it is too long, whatever its tokens are."""

_LONG_TEXT = 50_000
"""Characters that take the tokenizer about ten milliseconds: longer ones are encoded in a thread."""


@dataclass(frozen=True)
class ServedModel:
    """What does not change while the server runs."""

    name: str
    """What clients call it."""
    path: str
    """Its folder."""
    engine: str
    """Name of the engine."""
    tokenizer: ChatTokenizer
    parser: ToolCallParser
    keeps_prefixes: bool
    """Whether the engine has a prefix cache."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix time, seconds."""

    @cached_property
    def template(self) -> TurnTemplate:
        """Knows whether a prompt leaves the model thinking."""
        return TurnTemplate(self.tokenizer)

    @cached_property
    def reader(self) -> AnswerReader:
        """Reads what was sampled."""
        return AnswerReader(self.tokenizer, read_model_limits(Path(self.path)).eos_token_ids)

    @cached_property
    def parser_stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn after a call, where the vocabulary has them."""
        ids = (self.tokenizer.token_id(token) for token in self.parser.stop_tokens)
        return tuple(i for i in ids if i is not None)

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        """Special tokens as text."""
        decode = self.tokenizer.decode
        return tuple(decode([i], skip_special_tokens=False) for i in sorted(self.tokenizer.special_ids))

    async def encode(self, text: str, max_model_len: int | None) -> list[int]:
        """Ids of a text as it stands, without special tokens around it.

        Raises:
            RequestError: it cannot fit the model.
        """
        if max_model_len is not None and len(text) > max_model_len * _CHARS_PER_TOKEN:
            raise RequestError(
                f"a prompt of {len(text)} characters cannot fit max_model_len {max_model_len}",
                code="context_length_exceeded",
            )
        if len(text) > _LONG_TEXT:
            return await asyncio.to_thread(self.tokenizer.encode, text)
        return self.tokenizer.encode(text)


def read_ids(value: Any, param: str) -> list[int]:
    """Token ids of a prompt; whether the vocabulary has them, is checked where requests enter the engine.

    Raises:
        RequestError: it is no list of integers.
    """
    try:
        return msgspec.convert(value, list[int])
    except msgspec.ValidationError as error:
        raise RequestError(f"{param!r} must be token ids: {error}", param=param) from error


def is_batch(value: Any) -> bool:
    """Whether a prompt is several: a list of texts, or of lists of ids. An empty list is one empty prompt."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], list | str)
