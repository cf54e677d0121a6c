"""Prompt rows to prompt ids: rendering, length limit, and a small memory of the last rows."""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal
from weakref import WeakValueDictionary

from rollstream.agent.images import ImageReader, shows_images
from rollstream.chat.template import TurnTemplate
from rollstream.chat.tokenizer import ChatTokenizer
from rollstream.chat.tool_schema import schema_digest
from rollstream.errors import DataError
from rollstream.trajectory import Message, PromptRow

_REMEMBERED_ROWS = 64
"""The repeats of a row are dispatched together; a few rows in flight are enough."""
_REMEMBERED_IMAGE_ROWS = 8
"""Fewer: an encoded photo is some megabytes."""

Truncation = Literal["error", "left", "right", "middle"]
"""Which side is cut off, as verl names it; `error` cuts nothing."""

_Key = tuple[str, tuple[str, ...] | None]


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """A prompt with images."""

    ids: list[int]
    """With as many placeholders as the images have tokens."""
    images: list[str]
    """As the engine takes them, in order."""


class PromptRenderer:
    """Renders prompts within a length limit. Shared by all rollouts of a worker."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        *,
        prompt_length: int,
        truncation: Truncation,
        tool_schemas: list[dict[str, Any]] | None = None,
        images: ImageReader | None = None,
    ) -> None:
        """Args:
        tokenizer: of the model.
        prompt_length: in tokens.
        truncation: what happens to a longer prompt. One with images is never cut.
        tool_schemas: shown to the model by loops that execute no tools.
        images: None: the model sees none.
        """
        self._tokenizer = tokenizer
        self._prompt_length = prompt_length
        self.truncation: Truncation = truncation
        self.tools = tool_schemas or None
        """Schemas that loops without tools show."""
        self._images = images
        self._remembered: OrderedDict[_Key, tuple[list[Message], list[int]]] = OrderedDict()
        """With a copy of the messages: a row's loops may each change them in their own way."""
        self._remembered_images: OrderedDict[_Key, tuple[list[Message], ImagePrompt]] = OrderedDict()
        self._reading: WeakValueDictionary[_Key, asyncio.Lock] = WeakValueDictionary()
        """Repeats of a row wait for the first of them; when that one is cancelled, the next takes over."""

    def length(
        self,
        messages: list[Message],
        images: Sequence[Any] = (),
        *,
        tools: list[dict[str, Any]] | None = None,
    ) -> int:
        """Tokens of a prompt before truncation; arguments as of `render`. Blocks while images are read."""
        tools = self.tools if tools is None else tools
        if not images:
            return len(self._render(messages, tools))
        reader = self._reader()
        pixels = [reader.read_one(source).pixels for source in images]
        return len(reader.processor.render(messages, pixels, tools=tools))

    def stored(
        self, prompt: Mapping[str, Any], messages: list[Message], tools: Sequence[dict[str, Any]] | None
    ) -> list[int]:
        """Ids of a prompt that is a stored conversation (`PromptRow.stored_prompt`): never cut.

        Raises:
            DataError: they mean another thing here: another template, other tools; or they are too long.
        """
        ids = self._stored_ids(prompt, messages, tools)
        if len(ids) > self._prompt_length:
            raise DataError(
                f"the stored conversation has {len(ids)} tokens, more than data.max_prompt_length="
                f"{self._prompt_length}; it is never cut: raise the length, or set data.filter_overlong_prompts"
            )
        return ids

    def _stored_ids(
        self, prompt: Mapping[str, Any], messages: list[Message], tools: Sequence[dict[str, Any]] | None
    ) -> list[int]:
        if (prompt["tokenizer"], prompt["template_kwargs"]) != self._template:
            raise DataError(
                "the stored run had another tokenizer, chat template or data.apply_chat_template_kwargs, so its ids "
                "are no prompt of this one"
            )
        if prompt["tools"] != [schema_digest(tool) for tool in tools or ()]:
            raise DataError("the stored conversation shows other tools than this run")
        ids: list[int] = list(prompt["ids"])
        if prompt["opened"] and ids[-1] in self._tokenizer.end_ids:
            raise DataError("the last answer of the stored conversation has ended")
        if asked_after := prompt["asked_after"]:
            turns = TurnTemplate(self._tokenizer)
            sampled = ids[-asked_after:]
            ids += turns.ids_after(
                messages[:-1], messages[-1:], sampled_ids=sampled, tools=list(tools or ()) or None
            )
        return ids

    @cached_property
    def _template(self) -> tuple[str, dict[str, Any]]:
        return self._tokenizer.digest(), self._tokenizer.template_kwargs

    def lengths(
        self, rows: Sequence[PromptRow], tools_of: Callable[[PromptRow], list[dict[str, Any]] | None]
    ) -> list[int]:
        """Tokens of many rows' prompts before truncation; 0 of one that cannot be rendered.

        Texts are encoded together, which takes all cores.
        """
        texts, measured = [""] * len(rows), {}
        for i, row in enumerate(rows):
            with contextlib.suppress(DataError):  # the rollout says why
                tools = self.tools if (own := tools_of(row)) is None else own
                if (stored := row.stored_prompt) is not None:
                    measured[i] = len(self._stored_ids(stored, row.messages, tools))
                elif row.images:
                    measured[i] = self.length(row.messages, row.images, tools=tools)
                else:
                    texts[i] = self._tokenizer.render_text(row.messages, tools=tools)
        return [measured.get(i, count) for i, count in enumerate(self._tokenizer.count(texts))]

    def render(
        self, messages: list[Message], *, prompt_key: str, tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        """Ids of a prompt without images, at most `prompt_length`. Do not change the list.

        Repeats of a row are rendered once, as long as their messages are the same. `tools` None shows
        `tool_schemas`. Raises `DataError`: the template refuses the messages, or they are too long and
        truncation is `error`.
        """
        key = (prompt_key, _names(tools))
        known, ids = self._remembered.get(key, (None, []))
        if known != messages:
            ids = self._render(messages, self.tools if tools is None else tools)
            if not ids:
                raise DataError("the prompt renders to no tokens at all")
            ids = truncate(ids, self._prompt_length, self.truncation)
            self._remembered[key] = (deepcopy(messages), ids)
            if len(self._remembered) > _REMEMBERED_ROWS:
                self._remembered.popitem(last=False)
        return ids

    async def render_with_images(
        self,
        messages: list[Message],
        images: Sequence[Any],
        *,
        prompt_key: str,
        tools: list[dict[str, Any]] | None = None,
    ) -> ImagePrompt:
        """The same of a prompt with images, which are read in a thread, once for a row.

        The messages have an image part for each of `images` (bytes, paths or URLs), in order.

        Raises:
            DataError: as `render`; an image cannot be read; the model sees none; the prompt is too long.
        """
        key = (prompt_key, _names(tools))
        reading = self._reading.setdefault(key, asyncio.Lock())  # held as long as somebody waits
        async with reading:
            known = self._remembered_images.get(key)
            if known is not None and known[0] == messages:
                return known[1]
            prompt = await self._read_and_render(messages, images, self.tools if tools is None else tools)
            self._remembered_images[key] = (deepcopy(messages), prompt)
            if len(self._remembered_images) > _REMEMBERED_IMAGE_ROWS:
                self._remembered_images.popitem(last=False)
        return prompt

    async def _read_and_render(
        self, messages: list[Message], sources: Sequence[Any], tools: list[dict[str, Any]] | None
    ) -> ImagePrompt:
        reader = self._reader()
        images = await reader.read(sources)
        pixels = [image.pixels for image in images]
        ids = await asyncio.to_thread(reader.processor.render, messages, pixels, tools=tools)
        if len(ids) > self._prompt_length:
            raise DataError(
                f"the prompt has {len(ids)} tokens with its images, more than "
                f"data.max_prompt_length={self._prompt_length}; a prompt with images is never cut: raise the "
                "length, or set data.filter_overlong_prompts"
            )
        return ImagePrompt(ids, [image.sent for image in images])

    def _render(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> list[int]:
        _refuse_images(messages)
        return self._tokenizer.render(messages, tools=tools)

    def _reader(self) -> ImageReader:
        if self._images is None:
            raise DataError("the row has images, but the model has no image processor")
        return self._images


def _refuse_images(messages: list[Message]) -> None:
    if shows_images(messages):
        raise DataError("the messages have image parts, but no images are there for them")


def _names(tools: list[dict[str, Any]] | None) -> tuple[str, ...] | None:
    return None if tools is None else tuple(tool["function"]["name"] for tool in tools)


def truncate(ids: list[int], max_length: int, how: Truncation) -> list[int]:
    """Cuts prompt ids to `max_length`, > 0, the way verl's `data.truncation` does.

    `left` cuts the beginning off and keeps the end; `right` keeps the beginning; `middle` keeps the first
    `max_length // 2` and from the end what then still fits; `error` raises. `ids` itself when it fits.

    Raises:
        DataError: `how` is `error` and `ids` does not fit.
    """
    if len(ids) <= max_length:
        return ids
    if how == "error":
        raise DataError(
            f"the prompt has {len(ids)} tokens, more than data.max_prompt_length={max_length}; raise it, "
            "or set data.truncation (left, right, middle) or data.filter_overlong_prompts"
        )
    head = {"left": 0, "right": max_length, "middle": max_length // 2}[how]
    return ids[:head] + ids[len(ids) - (max_length - head) :]
