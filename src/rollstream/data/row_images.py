"""The images of a row: found in its messages and its column `images`, and taken out of both.

| in the row | in the messages afterwards |
|---|---|
| `<image>` in a text, where the row has images in its column | an image part between text parts |
| `{"type": "image"}` | the same, for the next image of the column |
| `{"type": "image", "image": IMAGE}`, also with `path`, `url` or `bytes` as the key | an image part |
| `{"type": "image_url", "image_url": {"url": IMAGE}}` | an image part |

An image part says which image it is, and is small: `{"type": "image", "image": "cats/1.png"}` for a path or
URL, `{"type": "image", "sha256": ..., "size": bytes}` for one whose bytes are in the row. So messages can be
stored; the images themselves go beside them.
"""

import base64
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rollstream.chat.images import ImageSource, decode_data_url, image_part
from rollstream.data.values import BadRow, described
from rollstream.errors import DataError
from rollstream.trajectory import Message

MARKER = "<image>"
"""Where an image of the column stands in a text, as in verl."""

_SOURCE_KEYS = ("bytes", "image", "image_url", "url", "path")
"""Of a mapping that is an image; the first that is there counts. Hugging Face stores `bytes` and `path`, and
`path` is only the name then."""

_IMAGE_TYPES = ("image", "image_url")

_OTHER_MEDIA = ("video", "audio", "input_audio")
"""Parts that nothing here knows. A chat template may show them as tokens that stand for nothing."""


def take_images(messages: list[Message], column: Any) -> tuple[list[Message], list[ImageSource]]:
    """Finds the images of a row.

    Args:
        messages: of the row, checked: `content` is text, None or a list of parts.
        column: the row's column `images`: one image, a list of them, or None.

    Returns:
        The messages, with an image part for each image, and the images in the order of those parts.

    Raises:
        BadRow: the column has not as many images as the messages have places for, or something is no image.
    """
    given = [] if column is None else column if type(column) is list else [column]
    waiting = [_source(image, f"images[{i}]") for i, image in enumerate(given)]
    if not waiting and not any(type(message.get("content")) is list for message in messages):
        return messages, []
    contents = [_parts(message.get("content"), split=bool(waiting)) for message in messages]
    places = sum(_is_bare(part) for parts in contents for part in parts or ())
    if places != len(waiting):
        raise BadRow(
            f"its messages have {places} places for images ({MARKER} or an image part without an image), "
            f"but column 'images' has {len(waiting)}"
        )
    images: list[ImageSource] = []
    rest = iter(waiting)
    for i, parts in enumerate(contents):
        for j, part in enumerate(parts or ()):
            where = f"messages[{i}].content[{j}]"
            if part["type"].removesuffix("_url") in _OTHER_MEDIA:
                raise BadRow(f"{where} is of type {part['type']!r}: only text and images are known")
            if part["type"] not in _IMAGE_TYPES:
                continue
            own = {key: value for key, value in part.items() if key != "type"}
            if _is_bare(part):
                _refuse_more(own, where)
            images.append(next(rest) if _is_bare(part) else _source(own, where))
            assert parts is not None
            parts[j] = image_part(images[-1])
    taken = [
        message if parts is None else message | {"content": parts}
        for message, parts in zip(messages, contents, strict=True)
    ]
    return taken, images


def resolve(images: list[ImageSource], folder: Path) -> list[ImageSource]:
    """The images with relative paths taken from `folder`."""
    return [
        str(folder / image)
        if isinstance(image, str) and urlsplit(image).scheme not in ("http", "https", "file")
        else image
        for image in images
    ]


def _parts(content: Any, *, split: bool) -> list[dict[str, Any]] | None:
    """The parts of a message's content; None for text that stays as it is.

    Null keys are left out, because Arrow gives all parts all keys. With `split`, a marker in a text becomes
    an image part that does not say which image it is.
    """
    if type(content) is str and split and MARKER in content:
        content = [{"type": "text", "text": content}]
    if type(content) is not list:
        return None
    parts = []
    for part in content:
        part = {key: value for key, value in part.items() if value is not None}
        text = part.get("text")
        if split and part["type"] == "text" and type(text) is str and MARKER in text:
            pieces = [piece for piece in re.split(f"({MARKER})", text) if piece]
            parts += [{"type": "image"} if piece == MARKER else {**part, "text": piece} for piece in pieces]
        else:
            parts.append(part)
    return parts


def _is_bare(part: dict[str, Any]) -> bool:
    """Whether it is an image part that does not say which image it is: the next one of the column."""
    return part["type"] in _IMAGE_TYPES and not any(key in part for key in _SOURCE_KEYS)


def _source(image: Any, where: str) -> ImageSource:
    """Bytes come as base64 text: so they are read from Arrow, and so JSON Lines must have them."""
    if type(image) is str and image:
        try:
            return decode_data_url(image) if image.startswith("data:") else image
        except DataError as error:
            raise BadRow(f"{where}: {error}") from error
    key = next((key for key in _SOURCE_KEYS if type(image) is dict and image.get(key) is not None), None)
    if key is None:
        raise BadRow(f"{where} is {described(image)}, want a path, a URL, or a mapping with bytes or path")
    _refuse_more({name: value for name, value in image.items() if name not in _SOURCE_KEYS}, where)
    if key != "bytes":
        return _source(image[key], f"{where}.{key}")
    try:
        data = base64.b64decode(image[key], validate=True)
    except (TypeError, ValueError) as error:
        raise BadRow(f"{where}.bytes is not base64 ({error})") from error
    if not data:
        raise BadRow(f"{where}.bytes is empty")
    return data


def _refuse_more(rest: dict[str, Any], where: str) -> None:
    """Refuses what would change the image, but for OpenAI's default detail."""
    if extra := sorted(
        key for key, value in rest.items() if value is not None and (key, value) != ("detail", "auto")
    ):
        raise BadRow(f"{where} has {', '.join(extra)}, which is not known for an image")
