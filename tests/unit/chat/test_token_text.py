"""Texts of tokens by tokenizer.json alone."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from rollstream.chat.token_text import TokenText, read_decoder, read_token_text
from rollstream.errors import ConfigError
from tests.support import tokenizers


@pytest.fixture(scope="module", params=tokenizers.NAMES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizers.write(request.param, tmp_path_factory.mktemp("model") / request.param)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=40))
def test_text_is_what_the_tokenizer_decodes(folder: Path, text: str) -> None:
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = read_token_text(folder)
    ids = backend.encode(f"<|im_start|>user\n{text}<tool_call> x<|im_end|>", add_special_tokens=False).ids
    # Decoders of sentencepiece take a space from the start, which is a token of the text.
    assert texts.decode(ids).lstrip(" ") == backend.decode(ids, skip_special_tokens=False).lstrip(" ")
    assert b"".join(map(texts.bytes_of, ids)).decode() == texts.decode(ids)
    assert read_decoder(folder).decode(ids) == backend.decode(ids)


def test_tokens_that_are_a_part_of_a_character_or_none() -> None:
    backend = Tokenizer(models.BPE({"\u00e2\u0124": 0, "\u00ac": 1, "\u4f60": 2}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|x|>"])
    texts = TokenText(backend)
    assert (texts.bytes_of(0), texts.bytes_of(1)) == (b"\xe2\x82", b"\xac")
    assert (texts.decode([0, 1]), texts.decode([0])) == ("\u20ac", "\ufffd")
    assert (texts.bytes_of(2), texts.bytes_of(3)) == ("\u4f60".encode(), b"<|x|>")
    assert texts.bytes_of(99) == texts.bytes_of(-1) == b""


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", '{"model": {"vocab": 3}}', '{"model": null}', "[" * 100_000),
        '{"model": {"vocab": {}}, "decoder": {"type": "Sequence", "decoders": [1]}}',
    ],
)
def test_a_file_that_is_no_tokenizer(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token_text(tmp_path)


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_token_text(tmp_path)
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(ConfigError, match="not a regular file"):
        read_token_text(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with (tmp_path / "tokenizer.json").open("wb") as sparse:
        sparse.truncate(3 << 30)
    with pytest.raises(ConfigError, match="larger than"):
        read_token_text(tmp_path)
