"""Images of rows and of tools, as a model's processor and an engine take them."""

import asyncio
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollstream.chat.images import encode_for_engine, image_part, load_image, require_pillow
from rollstream.chat.processor import ChatProcessor
from rollstream.errors import DataError
from rollstream.trajectory import Message

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class SeenImage:
    """An image that is part of a prompt."""

    pixels: "Image"
    """For the processor."""
    sent: str
    """For the engine: a `data:` URL."""
    part: dict[str, Any]
    """For messages that are stored: says which image it is."""


class ImageReader:
    """Reads images in threads. Shared by all rollouts of a worker."""

    def __init__(self, processor: ChatProcessor | None, *, allow_http: bool = False) -> None:
        """`processor`: None where there are no ids; `allow_http`: fetch images named by `http(s):` URLs."""
        self._processor = processor
        self._allow_http = allow_http

    @property
    def processor(self) -> ChatProcessor:
        """The model's, which makes ids of images."""
        assert self._processor is not None
        return self._processor

    async def read(self, sources: Sequence[Any]) -> list[SeenImage]:
        """Reads images from bytes of image files, paths, URLs, or Pillow images.

        Raises:
            DataError: one cannot be read.
            TransientError: fetching one failed in a way that may pass.
        """
        return await asyncio.to_thread(lambda: [self.read_one(source) for source in sources])

    def read_one(self, source: Any) -> SeenImage:
        """The same for one image. Blocks."""
        if not isinstance(source, str | bytes):
            source = _as_png(source)
        pixels = load_image(source, allow_http=self._allow_http)
        return SeenImage(pixels, encode_for_engine(pixels), image_part(source))


def shows_images(messages: Sequence[Message]) -> bool:
    """Whether messages have image parts."""
    return any(
        isinstance(part, dict) and part.get("type") in ("image", "image_url")
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
    )


def _as_png(image: Any) -> bytes:
    """The file of a Pillow image, as tools written for verl return them."""
    require_pillow()
    from PIL.Image import Image

    if not isinstance(image, Image):
        raise DataError(
            f"an image must be bytes, a path, a URL or a Pillow image, not {type(image).__name__}"
        )
    file = io.BytesIO()
    image.save(file, format="PNG", compress_level=1)
    return file.getvalue()
