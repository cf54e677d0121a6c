"""A look at the first prompt rows: what is probably not as it was meant, though every row can be read."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from rollstream.chat.template import TurnTemplate
from rollstream.chat.tokenizer import ChatTokenizer
from rollstream.chat.tool_schema import row_tools
from rollstream.data.row import messages_in_text
from rollstream.errors import DataError
from rollstream.trajectory import PromptRow

LOOKED_AT = 64
"""Rows: enough to see what they have in common, few enough to be read at each start."""


def first_look(
    rows: Sequence[PromptRow], tokenizer: ChatTokenizer | None, *, scored: bool, prompts: Sequence[Any] = ()
) -> list[str]:
    """Says in one line each what is probably wrong with a run's or a training's prompt rows.

    Args:
        rows: The first ones, `LOOKED_AT` at most.
        tokenizer: Whose chat template shows the prompts; None where an endpoint does.
        scored: Whether a reward function scores their answers by the ground truth.
        prompts: Their prompts as the data have them, before they were read.
    """
    lines = []
    if scored and rows and all(row.ground_truth is None for row in rows):
        lines.append(
            f"none of the first {len(rows)} prompt rows has a ground truth, so the reward function is given None: "
            f"data.ground_truth_key names its column (other columns: {', '.join(rows[0].columns) or 'none'})"
        )
    if tokenizer is not None and (quoted := _quoted(rows, tokenizer)):
        lines.append(
            f"{len(quoted)} of the first {len(rows)} prompts have special tokens of the chat template in their text "
            f"already ({', '.join(sorted(quoted[0]))}), and the template is put around it once more: give messages, "
            "or plain text (docs/data.md)"
        )
    if unread := sum(bool(tools := row.columns.get("tools")) and not row_tools(tools) for row in rows):
        lines.append(
            f"the column tools of {unread} of the first {len(rows)} prompt rows is no list of function schemas: it is "
            "not shown to the model"
        )
    schema = next((schemas[0] for row in rows if (schemas := row_tools(row.columns.get("tools")))), None)
    if tokenizer is not None and schema is not None and not TurnTemplate(tokenizer).shows_tool(schema):
        lines.append("the chat template shows no tools, and rows have some in their column tools")
    if in_text := sum(type(prompt) is str and messages_in_text(prompt) is not None for prompt in prompts):
        lines.append(
            f"{in_text} of the first {len(prompts)} prompts are messages as JSON text: taken as messages"
        )
    return lines


def _quoted(rows: Sequence[PromptRow], tokenizer: ChatTokenizer) -> list[set[str]]:
    """For each prompt that has some, the special tokens in it that the template puts around a message."""
    own = set()
    with suppress(DataError):  # it wants other messages; the rows say more
        own = tokenizer.special_tokens_in(tokenizer.render_text([{"role": "user", "content": "."}]))
    return [tokens for row in rows if (tokens := tokenizer.special_tokens_in(_text(row)) & own)]


def _text(row: PromptRow) -> str:
    contents = [message.get("content") for message in row.messages]
    parts = [part for content in contents for part in (content if isinstance(content, list) else [content])]
    return "\n".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in parts)
