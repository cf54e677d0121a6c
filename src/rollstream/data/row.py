"""From a row as a file gives it to a `PromptRow`."""

from typing import Any

import orjson

from rollstream.chat.messages import MessageError, Part, read_messages
from rollstream.data.row_images import has_images, take_images
from rollstream.data.values import BadRow, Row, content_digest, described
from rollstream.trajectory import Message, PromptRow

UNKNOWN_SOURCE = "unknown"
"""`data_source` of a row that does not say."""

_OTHER_MEDIA = {"videos": "<video>", "audios": "<audio>"}
"""verl's columns of other media, and where they stand in a text: to be refused, never dropped."""

_JSON_COLUMNS = ("extra_info", "reward_model", "tools_kwargs")
"""Columns that hold a mapping, which may also be given as JSON text."""


def parse_row(row: Row, index: int, prompt_column: str) -> tuple[PromptRow, bytes]:
    """Makes a `PromptRow` of a row, verl-style or simple.

    | PromptRow | taken from |
    |---|---|
    | messages | the prompt column: text (one user message) or a list of messages |
    | ground_truth | `reward_model.ground_truth`, else column `ground_truth`, else column `answer` |
    | tools_kwargs | column `tools_kwargs`, else `extra_info.tools_kwargs` |
    | images | the column `images`, and image parts of messages; see `row_images` |
    | data_source, extra_info, agent_name | the columns of those names |
    | columns | all columns not used above; `reward_model` without its ground truth, when more is in it |

    Messages are read as those of chat APIs, see `rollstream.chat.messages`; roles of a template's own are taken.
    Images that are paths stay as the row has them: whoever knows the file resolves them.

    Args:
        row: Values that JSON knows. It is used up: parts of it go into the result.
        index: Position in the dataset.
        prompt_column: The column with the prompt.

    Returns:
        The prompt row, and the 16 bytes of which its `prompt_key` is the hexadecimal form.

    Raises:
        BadRow: The prompt is missing or of a wrong type, or another column is.
    """
    for column in _JSON_COLUMNS:
        if column in row:
            row[column] = _mapping(row[column], column)
    digest = content_digest(row)
    if prompt_column not in row:
        there = ", ".join(row) or "(none)"
        raise BadRow(
            f"no column {prompt_column!r}; the row has: {there}. data.prompt_key names the prompt's column"
        )
    columns = dict(row)
    extra_info: dict[str, Any] = columns.pop("extra_info", {})
    tools_kwargs = columns.pop("tools_kwargs", None) or _mapping(
        extra_info.get("tools_kwargs"), "extra_info.tools_kwargs"
    )
    ground_truth = _take_ground_truth(columns)
    messages, images = _take_messages(columns, prompt_column)
    prompt_row = PromptRow(
        index=index,
        prompt_key=digest.hex(),
        messages=messages,
        data_source=_text(columns.pop("data_source", None), "data_source") or UNKNOWN_SOURCE,
        ground_truth=ground_truth,
        extra_info=extra_info,
        agent_name=_text(columns.pop("agent_name", None), "agent_name"),
        tools_kwargs=tools_kwargs,
        columns=columns,
        images=images,
    )
    return prompt_row, digest


def _mapping(value: Any, column: str) -> dict[str, Any]:
    if type(value) is dict:
        return value
    if value is None or value == "":
        return {}
    if type(value) is str:
        try:
            decoded = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise BadRow(f"{column} is text but not JSON ({error})") from error
        if type(decoded) is dict:
            return decoded
        raise BadRow(f"{column} holds JSON that is {described(decoded)}, want a mapping")
    raise BadRow(f"{column} is {described(value)}, want a mapping (or one as JSON text)")


def _text(value: Any, column: str) -> str | None:
    if value is None or type(value) is str:
        return value
    raise BadRow(f"{column} is {described(value)}, want text")


def _take_ground_truth(columns: Row) -> Any:
    reward_model: dict[str, Any] = columns.pop("reward_model", {})
    if "ground_truth" in reward_model:
        ground_truth = reward_model["ground_truth"]
        rest = {key: value for key, value in reward_model.items() if key != "ground_truth"}
    else:
        ground_truth = None
        rest = reward_model
        for column in ("ground_truth", "answer"):
            if columns.get(column) is not None:
                ground_truth = columns.pop(column)
                break
    if rest:
        columns["reward_model"] = rest
    return ground_truth


def _take_messages(columns: Row, prompt_column: str) -> tuple[list[Message], list[str | bytes]]:
    messages = _messages(columns.pop(prompt_column), prompt_column)
    image_column = columns.pop("images", None)
    for column, marker in _OTHER_MEDIA.items():
        if columns.get(column) and any(marker in str(message.get("content")) for message in messages):
            raise BadRow(f"it has {column}, which are not known: only text and images are")
    if not has_images(messages, image_column):
        return messages, []
    return take_images(messages, image_column)


def _messages(prompt: Any, column: str) -> list[Message]:
    if type(prompt) is str:
        if not prompt:
            raise BadRow(f"{column} is empty")
        return [{"role": "user", "content": prompt}]
    if type(prompt) is not list:
        raise BadRow(f"{column} is {described(prompt)}, want text or a list of messages")
    if not prompt:
        raise BadRow(f"{column} is an empty list, want at least one message")
    try:
        return read_messages(prompt, column, _read_part, any_role=True)
    except MessageError as error:
        raise BadRow(str(error)) from error


def _read_part(part: Part, where: str) -> Part:
    """Images are found later, and other media refused: see `row_images`."""
    return part
