"""The model that is served: its names, how text becomes ids, and what it sampled becomes text."""

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

_INCOMPLETE = "\ufffd"
"""What a tokenizer writes for the first bytes of a character."""

_CONTEXT = 3
"""Up to three such marks can become one character with the next token."""


@dataclass(frozen=True, slots=True)
class SampledText:
    """The text of a completion."""

    text: str
    """Without the stop string or end token."""
    matched: str | int | None = None
    """The stop string or token id that ended it; None for another end."""
    ended_itself: bool = False
    """Whether the model's own end token ended it."""

    @property
    def stop_reason(self) -> str | int | None:
        """`matched`, unless it is the model's own end token, which vLLM does not name."""
        return None if self.ended_itself else self.matched


@dataclass(frozen=True)
class ServedModel:
    """The model, which does not change while the server runs."""

    name: str
    """For clients."""
    path: str
    engine: str
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

    def read_prompts(
        self, value: Any, param: str, limit: int, *, most: int, texts: bool = True
    ) -> tuple[list[list[int]], bool]:
        """Ids of prompts, one or many. Whether the vocabulary has them is the engine's to check.

        A text is encoded as it stands, without special tokens around it.

        Args:
            value: texts (unless `texts` is False) or lists of ids.
            param: its name, for messages.
            limit: tokens that the engine takes.
            most: prompts at once.
            texts: whether it may be one.

        Returns:
            the prompts, and whether a list of them was given. An empty list is one empty prompt.

        Raises:
            RequestError: it is something else, there are too many, or a text cannot fit the model.
        """

        def read(prompt: Any) -> list[int]:
            if texts and isinstance(prompt, str):
                if len(prompt) > limit * _CHARS_PER_TOKEN:
                    raise RequestError(
                        f"a prompt of {len(prompt)} characters cannot fit max_model_len {limit}",
                        code="context_length_exceeded",
                    )
                return self.tokenizer.encode(prompt)
            try:
                return msgspec.convert(prompt, list[int])
            except msgspec.ValidationError as error:
                raise RequestError(f"{param!r} must be token ids: {error}", param=param) from error

        many = isinstance(value, list) and bool(value) and isinstance(value[0], list | str)
        prompts = value if many else [value]
        if len(prompts) > most:
            raise RequestError(f"{len(prompts)} prompts: at most {most} are taken at once", param=param)
        return [read(prompt) for prompt in prompts], many

    def read(
        self, completion: Completion, sampling: SamplingParams, *, skip_special_tokens: bool = True
    ) -> SampledText:
        """The text, and what ended it.

        Sampled ids include the token that completes a stop string, or the end token; the text ends before.
        """
        ids = completion.token_ids
        if completion.finish_reason == "stop" and ids:
            text = self._decode(ids)
            if place := self._find_stop(text, ids, sampling.stop):
                at, stop = place
                kept = len(ids) - 1
                while kept and len(self._decode(ids[:kept])) > at:
                    kept -= 1
                # The rest of `text` before the stop string is the beginning of a token.
                begun = text[len(self._decode(ids[:kept])) : at]
                return SampledText(self._decode(ids[:kept], skip_special_tokens) + begun, stop)
            asked_for = ids[-1] in sampling.stop_token_ids
            if asked_for or (ids[-1] in self.end_ids and not sampling.ignore_eos):
                text = self._decode(ids[:-1], skip_special_tokens)
                return SampledText(text, ids[-1], ended_itself=not asked_for)
        return SampledText(self._decode(ids, skip_special_tokens))

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

    def _find_stop(self, text: str, ids: list[int], stops: Sequence[str]) -> tuple[int, str] | None:
        """Where the stop string begins that the last token completed, the leftmost one first."""
        if not stops:
            return None
        before = len(self._decode(ids[:-1]))
        places = ((text.find(stop, max(0, before - len(stop) - _CONTEXT)), stop) for stop in stops)
        return min((place for place in places if place[0] >= 0), default=None)

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
