"""From a row as a file gives it to a `PromptRow`."""

from typing import Any

import orjson

from rollstream.chat.messages import MessageError, read_messages
from rollstream.data.row_images import take_images
from rollstream.data.values import BadRow, Row, content_digest, described
from rollstream.trajectory import Message, PromptRow

UNKNOWN_SOURCE = "unknown"
"""`data_source` of a row that does not say."""

_OTHER_MEDIA = ("videos", "audios")
"""verl's columns of other media: to be refused, never dropped."""

TRUTH_COLUMNS = (
    *("reward_model.ground_truth", "ground_truth", "answer"),
    *("label", "solution", "reward_spec.ground_truth"),  # slime; open-r1 and NuminaMath; SkyRL
)
"""Columns that may have the ground truth; the first that is there and not null counts."""

_JSON_COLUMNS = ("extra_info", "reward_model", "reward_spec", "tools_kwargs")
"""Columns that hold a mapping, which may also be given as JSON text."""


def parse_row(
    row: Row, index: int, prompt_column: str, truth_column: str | None = None
) -> tuple[PromptRow, bytes]:
    """Makes a `PromptRow` of a row, verl-style or simple.

    | PromptRow | taken from |
    |---|---|
    | messages | the prompt column: text (one user message), or a list of messages, maybe as JSON text |
    | ground_truth | `truth_column`, or the first of `TRUTH_COLUMNS` that the row has |
    | tools_kwargs | column `tools_kwargs`, else `extra_info.tools_kwargs` |
    | images | the column `images`, and image parts of messages; see `row_images` |
    | data_source, extra_info, agent_name | the columns of those names |
    | columns | all columns not used above; a mapping without its ground truth, when more is in it |

    Messages are read as those of chat APIs, see `rollstream.chat.messages`; roles of a template's own are taken.
    Images that are paths stay as the row has them: whoever knows the file resolves them.

    Args:
        row: Values that JSON knows. It is used up: parts of it go into the result.
        index: Position in the dataset.
        prompt_column: The column with the prompt.
        truth_column: The column with the ground truth; `a.b` is key `b` of the mapping in column `a`.

    Returns:
        The prompt row, and the 16 bytes of which its `prompt_key` is the hexadecimal form.

    Raises:
        BadRow: The prompt is missing or of a wrong type, or another column is.
    """
    for column in _JSON_COLUMNS:
        if column in row:
            row[column] = as_mapping(row[column], column)
    if type(prompt := row.get(prompt_column)) is str and (in_text := messages_in_text(prompt)) is not None:
        row[prompt_column] = in_text
    digest = content_digest(row)
    if prompt_column not in row:
        raise BadRow(
            f"no column {prompt_column!r} (data.prompt_key); the row has: {', '.join(row) or '(none)'}"
        )
    columns = dict(row)
    messages = _read_prompt(columns.pop(prompt_column), prompt_column)
    for column in _OTHER_MEDIA:
        if columns.get(column):
            raise BadRow(f"it has {column}, which are not known: only text and images are")
    messages, images = take_images(messages, columns.pop("images", None))
    ground_truth = _take_ground_truth(columns, truth_column)
    extra_info: dict[str, Any] = columns.pop("extra_info", {})
    tools_kwargs = columns.pop("tools_kwargs", None) or as_mapping(
        extra_info.get("tools_kwargs"), "extra_info.tools_kwargs"
    )
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


def as_mapping(value: Any, column: str) -> dict[str, Any]:
    """A column's mapping, which may be JSON text; null is an empty one. Raises `BadRow`."""
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


def _take_ground_truth(columns: Row, truth_column: str | None) -> Any:
    """The ground truth, which is taken out of the columns; `extra_info` keeps its own."""
    if truth_column is not None and truth_column.partition(".")[0] not in columns:
        there = ", ".join(columns) or "(none)"
        raise BadRow(
            f"no column {truth_column!r} (data.ground_truth_key); beside the prompt the row has: {there}"
        )
    ground_truth = None
    for name in TRUTH_COLUMNS if truth_column is None else (truth_column,):
        column, _, key = name.partition(".")
        value = columns.get(column)
        ground_truth = value.get(key) if key and type(value) is dict else None if key else value
        if ground_truth is None:
            continue
        if not key:
            del columns[column]
        elif column != "extra_info" and type(value) is dict:
            columns[column] = {other: item for other, item in value.items() if other != key}
        break
    for column in ("reward_model", "reward_spec"):
        if columns.get(column) == {}:
            del columns[column]
    return ground_truth


def messages_in_text(text: str) -> list[Any] | None:
    """The messages whose JSON a text is, as Spark, CSV files and many exports have nested columns; else None."""
    if not text.startswith("["):
        return None
    try:
        messages = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    is_list = type(messages) is list and messages
    return messages if is_list and all(type(each) is dict and "role" in each for each in messages) else None


def _read_prompt(prompt: Any, column: str) -> list[Message]:
    if type(prompt) is str and prompt:
        return [{"role": "user", "content": prompt}]
    if type(prompt) is not list or not prompt:
        raise BadRow(
            f"{column} is {described(prompt) if prompt else 'empty'}, want text or a list of messages"
        )
    try:
        return read_messages(prompt, column, any_role=True)  # images are found later
    except MessageError as error:
        raise BadRow(str(error)) from error
