"""Images on the way to a server: what it can take, what it gets, and whether its prompt is the same."""

import base64
from collections.abc import AsyncIterator

import orjson
import pytest

from rollstream.engine.sglang import (
    SGLangEngine,
    collapse_images,
    read_reply,
)
from rollstream.errors import EngineError
from rollstream.testing.stub_server import StubModel, StubServer
from rollstream.trajectory import SamplingParams
from tests.support.engines import started

SAMPLING = SamplingParams(max_tokens=4, seed=5)


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


@pytest.fixture
async def server() -> AsyncIterator[StubServer]:
    async with StubServer(model=StubModel(images=True)) as server:
        yield server


async def test_a_server_says_whether_it_sees_images(server: StubServer) -> None:
    async with StubServer() as other:
        for urls, sees in (([server.url], True), ([other.url], False), ([server.url, other.url], False)):
            async with started(SGLangEngine(urls)) as engine:
                assert engine.capabilities.images is sees


async def test_what_is_no_data_url_never_reaches_a_server(server: StubServer) -> None:
    async with started(SGLangEngine([server.url])) as engine:
        for image in ("/etc/passwd.png", "http://example.com/a.png", b"bytes", object()):
            with pytest.raises(EngineError, match="takes images as data: URLs"):
                await engine.generate([1], SAMPLING, request_id="a", images=[data_url(b"x"), image])
    assert server.stats.requests == 0


async def test_a_prompt_without_images_is_answered_as_ever(server: StubServer) -> None:
    images: list[list[object] | None] = [None, [], [data_url(b"x")], [data_url(b"x")]]
    async with started(SGLangEngine([server.url])) as engine:
        plain, none, seen, again = [
            (await engine.generate([1, 2], SAMPLING, request_id="a", images=some)).token_ids
            for some in images
        ]
    assert plain == none == server.book.answer([1, 2], 5, 4)[0]
    assert seen == again != plain


@pytest.mark.parametrize(
    ("ids", "images", "sent"),
    [
        ([1, 7, 7, 7, 2], 1, [1, 7, 2]),
        ([7, 7, 1, 7, 2, 7, 7], 3, [7, 1, 7, 2, 7]),
        ([1, 7, 2], 1, [1, 7, 2]),
        ([1, 7, 7, 7, 2], 2, [1, 7, 7, 7, 2]),  # two images with nothing between them
        ([1, 7, 7, 3, 7, 7, 2], 1, [1, 7, 7, 3, 7, 7, 2]),  # rows of one image
        ([1, 2, 2], 1, [1, 2, 2]),
    ],
)
def test_one_placeholder_is_sent_for_each_image(ids: list[int], images: int, sent: list[int]) -> None:
    before = list(ids)
    assert collapse_images(ids, 7, images) == sent
    assert ids == before
    assert collapse_images(ids, None, images) == before


def reply(prompt_tokens: int | None, finish: str = "stop") -> bytes:
    meta: dict[str, object] = {"id": "r", "output_token_logprobs": [[-0.5, 7, None]]}
    meta |= {"finish_reason": {"type": finish}} | (
        {} if prompt_tokens is None else {"prompt_tokens": prompt_tokens}
    )
    return orjson.dumps({"output_ids": [7], "meta_info": meta})


def read(payload: bytes, tokens: int | None) -> list[int]:
    found = read_reply("server", payload, SAMPLING, rid="r", vocab_size=9, image_prompt_tokens=tokens)
    return found.token_ids


def test_a_server_that_made_another_prompt_of_the_images_is_found_out() -> None:
    assert read(reply(12), 12) == [7]
    for tokens in (11, 13, None):
        with pytest.raises(EngineError, match=f"server made {tokens} tokens of a prompt .* that has 12"):
            read(reply(tokens), 12)
    # Without images a server has nothing to expand, and some do not say.
    assert read(reply(None), None) == read(reply(5), None) == [7]
    assert read(reply(0, "abort"), 12) == []  # its last token is left out, see `read_reply`
