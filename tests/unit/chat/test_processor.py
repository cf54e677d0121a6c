import itertools
import json
from pathlib import Path

import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rollstream.chat.images import encode_for_engine
from rollstream.chat.processor import ChatProcessor, load_processor
from rollstream.chat.tokenizer import ChatTokenizer, load_tokenizer
from rollstream.engine.sglang import SGLangEngine
from rollstream.errors import ConfigError, DataError, EngineError
from rollstream.testing.stub_server import StubModel, StubServer
from rollstream.trajectory import SamplingParams

from .vision import IMAGE_PAD, MERGE, TEXT_TEMPLATE, load_model, picture, write_model

IMAGE = {"type": "image", "image": "a.png"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> ChatTokenizer:
    return load_model(model)[0]


@pytest.fixture(scope="module")
def processor(model: Path) -> ChatProcessor:
    return load_model(model)[1]


def user(*content: object) -> list[dict[str, object]]:
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    return [{"role": "user", "content": parts}]


def grid_tokens(model: Path, *images: object) -> list[int]:
    """How many tokens the image processor says each image is."""
    grids = Qwen2VLImageProcessorPil.from_pretrained(model)(images)["image_grid_thw"]
    return [int(time * height * width) // MERGE**2 for time, height, width in grids]


def runs(ids: list[int]) -> list[int]:
    """Lengths of the runs of placeholders."""
    return [len([*run]) for token_id, run in itertools.groupby(ids) if token_id == IMAGE_PAD]


def test_an_image_has_as_many_placeholders_as_its_grid_says(
    model: Path, tokenizer: ChatTokenizer, processor: ChatProcessor
) -> None:
    image = picture(140, 84)
    ids = processor.render(user("look at", IMAGE, "."), [image])
    assert runs(ids) == grid_tokens(model, image) == [5 * 3]
    # All else is as the tokenizer has it.
    plain = tokenizer.render(user("look at", IMAGE, "."))
    at = plain.index(IMAGE_PAD)
    assert ids == plain[:at] + [IMAGE_PAD] * 15 + plain[at + 1 :]
    only_text = [{"role": "user", "content": "look at this ."}]
    assert processor.render(only_text, []) == tokenizer.render(only_text)
    large = picture(2000, 1000)  # is shrunk as the processor does it
    (tokens,) = runs(processor.render(user(IMAGE), [large]))
    assert [tokens] == grid_tokens(model, large) and 32 < tokens <= 64


def test_images_keep_their_order(model: Path, processor: ChatProcessor) -> None:
    wide, tall = picture(280, 28), picture(56, 84)
    assert grid_tokens(model, wide, tall) == [10, 6]
    several = [*user(IMAGE), {"role": "assistant", "content": "."}, *user("and", IMAGE)]
    for messages in (user(IMAGE, "and", IMAGE), several):
        assert runs(processor.render(messages, [wide, tall])) == [10, 6]
        assert runs(processor.render(messages, [tall, wide])) == [6, 10]


@pytest.mark.parametrize(
    ("messages", "images"),
    [
        (user(IMAGE, IMAGE), 1),
        (user(IMAGE), 2),
        (user("look"), 1),
        (user(IMAGE), 0),
        (user("look at <|image_pad|>", IMAGE), 1),
    ],
)
def test_a_wrong_number_of_images(
    processor: ChatProcessor, messages: list[dict[str, object]], images: int
) -> None:
    with pytest.raises(DataError, match=rf"has {images} images, but <\|image_pad\|> stands in it"):
        processor.render(messages, [picture(28, 28)] * images)


def test_a_template_for_text_shows_no_images(tmp_path: Path) -> None:
    _, processor = load_model(write_model(tmp_path, template=TEXT_TEMPLATE))
    assert processor.placeholder is None
    with pytest.raises(DataError, match="the chat template shows no images"):
        processor.render(user(IMAGE), [picture(28, 28)])
    assert processor.render(user("look"), [])


def test_a_processor_that_cannot_be_loaded_and_models_for_text(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    tokenizer, file = load_tokenizer(str(folder)), folder / "preprocessor_config.json"
    file.write_text("{")
    with pytest.raises(ConfigError, match=r"the image processor of .* cannot be loaded"):
        load_processor(str(folder), tokenizer)
    file.write_text(json.dumps({"feature_extractor_type": "WhatHears"}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert load_processor(str(folder), tokenizer) is None
    file.unlink()
    (folder / "processor_config.json").unlink(missing_ok=True)
    assert load_processor(str(folder), tokenizer) is None


def test_the_digest_tells_settings_apart(tmp_path: Path, processor: ChatProcessor) -> None:
    for name, pixels in (("same", 64), ("other", 32)):
        (tmp_path / name).mkdir()
        found = load_model(write_model(tmp_path / name, max_pixels=28 * 28 * pixels))[1]
        assert (found.digest() == processor.digest()) == (name == "same")


@pytest.mark.parametrize("server_token", [IMAGE_PAD, None])
async def test_a_server_gets_the_images_of_the_prompt(
    model: Path, processor: ChatProcessor, server_token: int | None
) -> None:
    """With the model's folder, one placeholder for each image is sent, and the server's count is compared.

    A server that does not expand them (here, one that does not know the token) is found out.
    """
    images = [picture(56, 28, "red"), picture(28, 28, "blue")]
    prompt_ids = processor.render(user(IMAGE, "and", IMAGE), images)
    sampling = SamplingParams(max_tokens=16)
    encoded: list[object] = [encode_for_engine(image) for image in images]
    async with StubServer(model=StubModel(images=True, image_token_id=server_token)) as server:
        engine = SGLangEngine([server.url], model_path=str(model))
        await engine.start()
        try:
            if server_token is None:
                with pytest.raises(
                    EngineError, match=f"{len(prompt_ids) - 1} tokens of a prompt with images"
                ):
                    await engine.generate(prompt_ids, sampling, request_id="a", images=encoded)
                return
            completion = await engine.generate(prompt_ids, sampling, request_id="a", images=encoded)
            swapped_ids = processor.render(user(IMAGE, "and", IMAGE), images[::-1])
            swapped = await engine.generate(swapped_ids, sampling, request_id="b", images=encoded[::-1])
        finally:
            await engine.close()
    assert runs(prompt_ids) == [2, 1]
    assert server.stats.images == 4
    first, second, *rest = server.stats.image_digests
    assert first != second and rest == [second, first]
    assert len(completion.token_ids) == 16 and completion.token_ids != swapped.token_ids
