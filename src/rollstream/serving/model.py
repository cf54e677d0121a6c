"""The model that is served: its names, how text becomes ids, and what it sampled becomes text."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from rollstream.chat.parsers.base import ToolCallParser
from rollstream.chat.template import TurnTemplate
from rollstream.chat.tokenizer import ChatTokenizer
from rollstream.chat.wires.requests import RequestError
from rollstream.engine.checks import read_model_limits
from rollstream.trajectory import Completion, SamplingParams

_CHARS_PER_TOKEN = 1024
"""More than any vocabulary has in one token: a text beyond it is too long, whatever its tokens are."""

_LONG_TEXT = 50_000
"""Characters that take the tokenizer about ten milliseconds: longer ones are encoded in a thread."""

_INCOMPLETE = "\ufffd"
"""What a tokenizer writes for the first bytes of a character."""

_CONTEXT = 3
"""Up to three such marks can become one character with the next token."""


@dataclass(frozen=True, slots=True)
class SampledText:
    """The text of a completion."""

    text: str
    """Without the stop string or end token."""
    matched: str | int | None
    """The stop string or token id that ended it; None for another end."""
    ended_itself: bool = False
    """Whether the model's own end token ended it."""

    @property
    def stop_reason(self) -> str | int | None:
        """`matched`, unless it is the model's own end token, which vLLM does not name."""
        return None if self.ended_itself else self.matched


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
    def end_ids(self) -> frozenset[int]:
        """The model's own end tokens."""
        return frozenset(read_model_limits(Path(self.path)).eos_token_ids)

    @cached_property
    def parser_stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn after a call, where the vocabulary has them."""
        ids = (self.tokenizer.token_id(token) for token in self.parser.stop_tokens)
        return tuple(i for i in ids if i is not None)

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        """Special tokens as text."""
        return tuple(self._decode([i]) for i in sorted(self.tokenizer.special_ids))

    async def read_prompts(
        self, value: Any, param: str, max_model_len: int | None, *, most: int, texts: bool = True
    ) -> tuple[list[list[int]], bool]:
        """Ids of prompts, one or many. Whether the vocabulary has them is checked where they enter the engine.

        A text is encoded as it stands, without special tokens around it.

        Args:
            value: texts (unless `texts` is False) or lists of ids.
            param: its name, for messages.
            max_model_len: of the engine.
            most: prompts at once.
            texts: whether it may be one.

        Returns:
            the prompts, and whether a list of them was given. An empty list is one empty prompt.

        Raises:
            RequestError: it is something else, there are too many, or a text cannot fit the model.
        """
        many = isinstance(value, list) and bool(value) and isinstance(value[0], list | str)
        if many and len(value) > most:
            raise RequestError(f"{len(value)} prompts: at most {most} are taken at once", param=param)
        prompts = [
            await self._encode(one, max_model_len)
            if texts and isinstance(one, str)
            else _read_ids(one, param)
            for one in (value if many else [value])
        ]
        return prompts, many

    async def _encode(self, value: str, max_model_len: int | None) -> list[int]:
        if max_model_len is not None and len(value) > max_model_len * _CHARS_PER_TOKEN:
            raise RequestError(
                f"a prompt of {len(value)} characters cannot fit max_model_len {max_model_len}",
                code="context_length_exceeded",
            )
        if len(value) > _LONG_TEXT:
            return await asyncio.to_thread(self.tokenizer.encode, value)
        return self.tokenizer.encode(value)

    def read(
        self, completion: Completion, sampling: SamplingParams, *, skip_special_tokens: bool = True
    ) -> SampledText:
        """The text, and what ended it.

        Sampled ids include the token that completes a stop string, or the end token; the text ends before.
        """
        ids = completion.token_ids
        text = self._decode(ids, skip_special_tokens)
        if completion.finish_reason != "stop" or not ids:
            return SampledText(text, None)
        if found := self._find_stop(text, ids, sampling.stop, skip_special_tokens):
            at, stop = found
            return SampledText(text[:at], stop)
        last = ids[-1]
        asked_for = last in sampling.stop_token_ids
        if asked_for or (last in self.end_ids and not sampling.ignore_eos):
            return SampledText(self._decode(ids[:-1], skip_special_tokens), last, ended_itself=not asked_for)
        raw = self._decode(ids)
        if found := self._find_stop(raw, ids, sampling.stop, False):
            # A stop string with special tokens in it, which the text does not show: whole tokens are kept.
            at, stop = found
            kept = len(ids) - 1
            while kept and len(self._decode(ids[:kept])) > at:
                kept -= 1
            return SampledText(self._decode(ids[:kept], skip_special_tokens), stop)
        return SampledText(text, None)

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each token, special ones included; joined they are the text of all.

        A token that ends inside a character is "", and the token that completes it has the character.
        """
        texts = []
        # Some tokenizers write a token another way at the beginning: so the tokens before go with it.
        start = read = 0
        for at in range(len(ids)):
            before, now = self._decode(ids[start:read]), self._decode(ids[start : at + 1])
            if now.endswith(_INCOMPLETE) and at < len(ids) - 1:
                texts.append("")
            else:
                texts.append(now[len(before) :])
                start, read = read, at + 1
        return texts

    def _find_stop(
        self, text: str, ids: list[int], stops: Sequence[str], skip_special_tokens: bool
    ) -> tuple[int, str] | None:
        """Where the stop string stands that the last token completed, the leftmost one first."""
        if not stops:
            return None
        before = len(self._decode(ids[:-1], skip_special_tokens))
        places = ((text.find(stop, max(0, before - len(stop) - _CONTEXT)), stop) for stop in stops)
        return min((place for place in places if place[0] >= 0), default=None)

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)


def _read_ids(value: Any, param: str) -> list[int]:
    try:
        return msgspec.convert(value, list[int])
    except msgspec.ValidationError as error:
        raise RequestError(f"{param!r} must be token ids: {error}", param=param) from error
