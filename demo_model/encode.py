"""Chats as token ids, with the tokens the model is to learn marked."""

import random
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Qwen2Tokenizer

from demo_model.chats import Message

IGNORED = -100
"""The label that torch's cross entropy leaves out."""


@dataclass(frozen=True)
class EncodedChat:
    """One chat as an engine would see it."""

    ids: list[int]
    """The whole chat, up to and with the last assistant message's end token."""
    learnt: list[bool]
    """One for each id: whether the model writes it."""


def encode_chat(
    tokenizer: Qwen2Tokenizer,
    chat: list[Message],
    tools: list[dict[str, Any]] | None = None,
    last_only: bool = False,
) -> EncodedChat:
    """Encode a chat that ends with an assistant message.

    What the model writes is encoded apart from the template's text around it, so that the tokens are those
    that meet in sampling: a prompt's ids, then sampled ids, then the next turn's ids.

    Args:
        tokenizer: The tokenizer, with its chat template.
        chat: The messages.
        tools: Schemas of the tools offered.
        last_only: Learn the last message alone, for a chat whose earlier answers are wrong.

    Raises:
        ValueError: if the template renders an earlier part of the chat differently than within the whole.
    """
    ids: list[int] = []
    learnt: list[bool] = []
    done = ""
    for index, message in enumerate(chat):
        if message["role"] != "assistant":
            continue
        asked = _render(tokenizer, chat[:index], tools, ask=True)
        answered = _render(tokenizer, chat[: index + 1], tools, ask=False).removesuffix("\n")
        if not (asked.startswith(done) and answered.startswith(asked)):
            raise ValueError(f"message {index}: the chat template does not extend what it rendered before")
        for text, is_learnt in ((asked[len(done) :], False), (answered[len(asked) :], True)):
            piece = tokenizer(text, add_special_tokens=False)["input_ids"]
            ids += piece
            learnt += [is_learnt and (not last_only or index == len(chat) - 1)] * len(piece)
        done = answered
    return EncodedChat(ids, learnt)


def stack_chats(chats: list[EncodedChat], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad chats on the right to a batch.

    Returns:
        Ids and labels, both ``[chats, longest]`` int64. Padding needs no attention mask: it comes after
        everything that is learnt, and attention is causal.
    """
    width = max(len(chat.ids) for chat in chats)
    ids = torch.full((len(chats), width), pad)
    labels = torch.full((len(chats), width), IGNORED)
    for row, chat in enumerate(chats):
        length = len(chat.ids)
        ids[row, :length] = torch.tensor(chat.ids)
        learnt = torch.tensor(chat.learnt)
        labels[row, :length][learnt] = ids[row, :length][learnt]
    return ids, labels


def draw_chats(rng: random.Random, chats: list[EncodedChat], count: int) -> list[EncodedChat]:
    """Draw that many different chats, or all in a random order if there are fewer."""
    return rng.sample(chats, min(count, len(chats)))


def _render(
    tokenizer: Qwen2Tokenizer, chat: list[Message], tools: list[dict[str, Any]] | None, ask: bool
) -> str:
    return str(tokenizer.apply_chat_template(chat, tools=tools, tokenize=False, add_generation_prompt=ask))
