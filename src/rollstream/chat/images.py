"""Images: from what a row names to pixels, and from pixels to what an engine takes.

Rows are untrusted input: what is read is bounded in bytes and in pixels, only common formats are decoded, and
nothing is fetched over the network unless that was allowed.
"""

import base64
import binascii
import contextlib
import hashlib
import http.client
import importlib.util
import io
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollstream.errors import ConfigError, DataError, TransientError

if TYPE_CHECKING:
    from PIL.Image import Image

ImageSource = str | bytes
"""An image as a row has it: the bytes of an image file, a path, or a URL (`file:`, `http(s):`, `data:`)."""

MAX_PIXELS = 40_000_000
"""120 MB when decoded. Photos of most cameras have fewer; what a model is shown has a few million at most."""

MAX_FILE_BYTES = 64 << 20
"""No image of `MAX_PIXELS` in a compressed format needs more."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""What datasets hold. Pillow knows some fifty more, one of which runs Ghostscript."""

_FETCH_SECONDS = 60.0
"""For one image from the network, all of it."""
_STALL_SECONDS = 15.0
"""For one read of a connection."""
_PNG_LEVEL = 1
"""Twice the size of the best level at most, in a tenth of the time: the bytes live for one request."""


def load_image(source: ImageSource, *, allow_http: bool = False, max_pixels: int = MAX_PIXELS) -> "Image":
    """Reads and decodes one image, as a Pillow image of mode RGB. Blocks: call it in a thread.

    An animation gives its first frame. The image is turned upright, and what is transparent becomes white.

    Args:
        source: relative paths are taken from the working directory.
        allow_http: fetch `http:` and `https:` URLs.
        max_pixels: width times height at most; looked at before anything is decoded.

    Raises:
        DataError: it is not there, not an image of `FORMATS`, damaged or too large, or must not be fetched.
        TransientError: fetching it failed in a way that may pass.
        ConfigError: Pillow is not installed.
    """
    require_pillow()
    name = describe(source)
    data = source if isinstance(source, bytes) else _read(source, name, allow_http)
    if len(data) > MAX_FILE_BYTES:
        raise DataError(f"{name}: the file has {len(data)} bytes, more than {MAX_FILE_BYTES}")
    return _decode(data, name, max_pixels)


def encode_for_engine(image: "Image") -> str:
    """An image as engines take it: a PNG file as a `data:` URL.

    PNG keeps every pixel, so the engine sees what the processor has seen here; and a server cannot take a
    `data:` URL for a path or an address of its own.
    """
    file = io.BytesIO()
    image.save(file, format="PNG", compress_level=_PNG_LEVEL)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")


def image_part(source: ImageSource) -> dict[str, Any]:
    """The part of a message that says which image it is, small enough to be stored.

    A path or URL as it is; of an image whose bytes are given, their SHA-256 and how many they are.

    Raises:
        DataError: a `data:` URL that cannot be decoded.
    """
    if isinstance(source, str) and not source.startswith("data:"):
        return {"type": "image", "image": source}
    data = source if isinstance(source, bytes) else decode_data_url(source)
    return {"type": "image", "sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}


def decode_data_url(url: str) -> bytes:
    """The bytes of a `data:` URL (RFC 2397). Raises `DataError`: it has no data, or they are not base64."""
    head, comma, payload = url.partition(",")
    if not comma or not payload:
        raise DataError(f"{describe(url)}: holds no data")
    if not head.endswith(";base64"):
        return urllib.parse.unquote_to_bytes(payload)
    try:
        return base64.b64decode(urllib.parse.unquote_to_bytes(payload), validate=True)
    except binascii.Error as error:
        raise DataError(f"{describe(url)}: not base64 ({error})") from error


def is_file(source: ImageSource) -> bool:
    """Whether an image is named by a path or a `file:` URL: what that names depends on the machine."""
    return isinstance(source, str) and not source.startswith(("data:", "http://", "https://"))


def as_bytes(source: ImageSource) -> ImageSource:
    """An image that is a file here as the file's bytes, for a machine that may not have it.

    Anything else stays as it is; so does a file that cannot be read here, for whoever wants it says why.
    Blocks: call it in a thread.
    """
    if isinstance(source, str) and is_file(source):
        with contextlib.suppress(DataError):
            return _read(source, describe(source), allow_http=False)
    return source


def describe(source: ImageSource) -> str:
    """An image source for messages, never its data."""
    if isinstance(source, bytes):
        return f"image of {len(source)} bytes"
    if source.startswith("data:"):
        return f"image {source.partition(',')[0][:40]},… ({len(source)} characters)"
    return f"image {source if len(source) <= 200 else source[:199] + '…'}"


def require_pillow() -> None:
    """Raises `ConfigError` where Pillow, which decodes images, is not installed."""
    if importlib.util.find_spec("PIL") is None:
        raise ConfigError("images need Pillow, which is not installed: pip install 'rollstream[images]'")


def _read(source: str, name: str, allow_http: bool) -> bytes:
    if source.startswith("data:"):
        return decode_data_url(source)
    if source.startswith(("http://", "https://")):
        if not allow_http:
            raise DataError(
                f"{name}: not fetched, because rows may name any address and that was not allowed; "
                "put the image's path or bytes into the row"
            )
        return _fetch(source, name)
    if source.startswith("file:"):
        path = Path(urllib.request.url2pathname(urllib.parse.urlsplit(source).path))
    else:
        path = Path(source)
    try:
        if not path.is_file():  # nor a device, which may never end
            raise DataError(f"{name}: no such file")
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            raise DataError(f"{name}: the file has {size} bytes, more than {MAX_FILE_BYTES}")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise DataError(f"{name}: cannot be read ({error})") from error


class _HttpOnly(urllib.request.HTTPRedirectHandler):
    """The usual one follows a redirect to ftp, too."""

    def redirect_request(self, *args: Any) -> urllib.request.Request | None:
        request = super().redirect_request(*args)
        return request if request is not None and request.type in ("http", "https") else None


def _fetch(url: str, name: str) -> bytes:
    deadline = time.monotonic() + _FETCH_SECONDS
    data = b""
    try:
        with urllib.request.build_opener(_HttpOnly).open(url, timeout=_STALL_SECONDS) as response:
            while len(data) <= MAX_FILE_BYTES and (more := response.read1(1 << 20)):
                data += more
                if time.monotonic() > deadline:
                    raise TransientError(f"{name}: takes more than {_FETCH_SECONDS:.0f} s to fetch")
    except urllib.error.HTTPError as error:
        kind = TransientError if error.code >= 500 or error.code in (408, 429) else DataError
        raise kind(f"{name}: the server answers {error.code}") from error
    except http.client.InvalidURL as error:
        raise DataError(f"{name}: is no URL ({error})") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise TransientError(f"{name}: cannot be fetched ({error})") from error
    return data


def _decode(data: bytes, name: str, max_pixels: int) -> "Image":
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > max_pixels:
                raise DataError(f"{name}: {width} x {height} pixels are more than {max_pixels}")
            upright = ImageOps.exif_transpose(image)
            if not upright.has_transparency_data:
                return upright.convert("RGB")
            opaque = upright.convert("RGBA")
            return Image.alpha_composite(Image.new("RGBA", opaque.size, "white"), opaque).convert("RGB")
    except DataError:
        raise
    except UnidentifiedImageError as error:
        raise DataError(f"{name}: not an image of a format that is read ({', '.join(FORMATS)})") from error
    except Exception as error:  # Pillow's decoders raise nearly anything for bytes that are damaged
        raise DataError(f"{name}: cannot be decoded ({type(error).__name__}: {error})") from error
