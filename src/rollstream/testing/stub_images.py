"""What a stub server makes of images: files to tell apart, and a length of the prompt."""

import base64
import hashlib

_TOKEN_PIXELS = 28
"""Width and height of an image token, as of Qwen2-VL."""

_PNG_SIZE = slice(16, 24)
"""Where a PNG file has its width and height, 4 bytes each."""


def image_files(image_data: str | list[str] | None) -> list[bytes]:
    """The image files of a request: base64, as it is or as a `data:` URL.

    Raises:
        TypeError, ValueError: it is something else.
    """
    images = [image_data] if isinstance(image_data, str) else image_data or []
    if not all(isinstance(image, str) for image in images):
        raise TypeError("image_data is no text, nor a list of texts")
    return [base64.b64decode(image.rpartition(",")[2], validate=True) for image in images]


def image_digest(file: bytes) -> str:
    """SHA-256 of an image file, in hexadecimal digits."""
    return hashlib.sha256(file).hexdigest()


def expanded_length(prompt_ids: list[int], files: list[bytes], image_token_id: int | None) -> int:
    """Tokens of a prompt when each lone placeholder is written as often as its image has tokens.

    The images are PNG files that a Qwen2-VL processor would not shrink: a token for each 28 x 28 pixels. A
    prompt whose placeholders are not one for each image has the length it has.
    """
    if image_token_id is None or prompt_ids.count(image_token_id) != len(files):
        return len(prompt_ids)
    return len(prompt_ids) + sum(_tokens(file) - 1 for file in files)


def _tokens(file: bytes) -> int:
    size = file[_PNG_SIZE]
    sides = (int.from_bytes(size[:4], "big"), int.from_bytes(size[4:], "big"))
    width, height = (max(1, round(side / _TOKEN_PIXELS)) for side in sides)
    return width * height
