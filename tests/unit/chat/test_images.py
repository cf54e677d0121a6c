import base64
import hashlib
import io
import threading
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rollstream.chat.images import decode_data_url, encode_for_engine, image_part, load_image
from rollstream.errors import DataError, TransientError

from .vision import png


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def pixels(image: Image.Image) -> list[tuple[int, int, int]]:
    return [tuple(pixel) for row in np.asarray(image).tolist() for pixel in row]


def test_the_same_image_from_everywhere(tmp_path: Path) -> None:
    data = png(3, 2, "blue")
    path = tmp_path / "an image.png"
    path.write_bytes(data)
    for source in (data, str(path), path.as_uri(), data_url(data)):
        image = load_image(source)
        assert (image.mode, image.size) == ("RGB", (3, 2))
        assert pixels(image) == [(0, 0, 255)] * 6


def saved(image: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format="PNG", **options)
    return file.getvalue()


def test_what_is_transparent_becomes_white_and_an_image_is_turned_upright() -> None:
    image = Image.new("RGBA", (2, 1), (255, 0, 0, 255))
    image.putpixel((1, 0), (0, 0, 0, 0))
    assert pixels(load_image(saved(image))) == [(255, 0, 0), (255, 255, 255)]
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    assert load_image(saved(Image.new("RGB", (2, 1), "red"), exif=exif)).size == (1, 2)


def test_what_an_engine_gets_has_the_same_pixels() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (17, 31, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    url = encode_for_engine(image)
    assert url.startswith("data:image/png;base64,")
    assert np.array_equal(np.asarray(load_image(url)), noise)
    assert decode_data_url(url).startswith(b"\x89PNG")


def test_a_part_for_messages_is_small() -> None:
    data = png(64, 64)
    part = image_part(data)
    assert part == {"type": "image", "sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    assert image_part(data_url(data)) == part
    for source in ("a/b.png", "http://example.com/b.png"):
        assert image_part(source) == {"type": "image", "image": source}
    with pytest.raises(DataError, match="not base64"):
        image_part("data:image/png;base64,?")


def bomb(width: int, height: int) -> bytes:
    """A PNG file of a few bytes that says it is large."""
    data = bytearray(png(1, 1))
    data[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


@pytest.mark.parametrize("size", [(7000, 7000), (10_000, 10_000), (60_000, 60_000)])
def test_a_decompression_bomb_is_not_decoded(size: tuple[int, int]) -> None:
    # Pillow itself says nothing of the first, warns of the second and refuses the third.
    with pytest.raises(DataError, match="pixels"):
        load_image(bomb(*size))
    assert load_image(png(10, 10), max_pixels=100).size == (10, 10)
    with pytest.raises(DataError, match="10 x 10 pixels are more than 99"):
        load_image(png(10, 10), max_pixels=99)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"<svg></svg>", "image of 11 bytes: not an image of a format that is read .PNG, JPEG"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image of a format"),
        (png(40, 40)[:60], "cannot be decoded"),
        (png(40, 40)[:50] + bytes(20), "cannot be decoded"),
        ("data:image/png;base64", "holds no data"),
        ("data:image/png;base64,", "holds no data"),
        ("data:image/png;base64,***", "not base64"),
        ("/no/none.png", r"none\.png: no such file"),
        ("/", "no such file"),
        ("/dev/zero", "no such file"),
        ("\0", "image \0"),
        ("a" * 100_000, r"image a{199}…"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_no_image(data: bytes | str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_image(data)


class Pictures(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/ok.png")
        elif self.path == "/to-a-file":
            self.send_response(302)
            self.send_header("Location", "file:///etc/passwd")
        else:
            self.send_response({"/ok.png": 200, "/gone": 404, "/busy": 503}[self.path])
        self.end_headers()
        if self.path == "/ok.png":
            self.wfile.write(png(5, 4))

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Pictures) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_nothing_is_fetched_unless_allowed(server: str) -> None:
    with pytest.raises(DataError, match=r"ok\.png: not fetched, because"):
        load_image(f"{server}/ok.png")
    assert load_image(f"{server}/ok.png", allow_http=True).size == (5, 4)
    assert load_image(f"{server}/moved", allow_http=True).size == (5, 4)


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("/gone", DataError, "answers 404"),
        ("/busy", TransientError, "answers 503"),
        ("/to-a-file", DataError, "answers 302"),
    ],
)
def test_fetching_that_fails(server: str, path: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        load_image(server + path, allow_http=True)
    with pytest.raises(TransientError, match="cannot be fetched"):
        load_image("http://127.0.0.1:1/x.png", allow_http=True)
    for url in ("http://127.0.0.1:port/x.png", "http://127.0.0.1/a b.png"):
        with pytest.raises(DataError):
            load_image(url, allow_http=True)
