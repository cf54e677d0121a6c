"""The text of tokens, for who looks at a run: by the `tokenizer.json` that the run keeps, and nothing else.

A look at a run needs neither its model nor transformers nor a network, and runs no code that the run names. Ids become
bytes here, and never the other way round.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from rollstream.chat.byte_level import BYTES
from rollstream.errors import ConfigError
from rollstream.untrusted import read_regular

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_T = TypeVar("_T")

FILE = "tokenizer.json"
"""Its name in a run directory."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""How a vocabulary of sentencepiece names a byte that is in no other token."""

_SPACE = "\u2581"
"""How it writes a space."""


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = {}
    """A list where a token's place is its id (Unigram)."""


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Decoder(msgspec.Struct):
    type: str = ""
    decoders: list["_Decoder"] = []


class _File(msgspec.Struct):
    """What is read of `tokenizer.json`; merges, the largest part, are passed over."""

    model: _Model
    added_tokens: list[_AddedToken] = []
    decoder: _Decoder | None = None


_decoder = msgspec.json.Decoder(_File)


class TokenText:
    """The bytes of each token of a vocabulary."""

    def __init__(self, content: bytes) -> None:
        """`content`: that of a `tokenizer.json`. Raises `ValueError` if it is none."""
        file = _decoder.decode(content)
        vocabulary = file.model.vocab
        self._tokens = (
            {token_id: token for token, token_id in vocabulary.items()}
            if isinstance(vocabulary, dict)
            else {token_id: token for token_id, (token, _) in enumerate(vocabulary)}
        )
        self._added = {token.id: token.content for token in file.added_tokens}
        decoder = file.decoder or _Decoder()
        steps = decoder.decoders if decoder.type == "Sequence" else [decoder]
        self._by_bytes = any(step.type == "ByteLevel" for step in steps)
        self._known: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """A token as it stands in the text, maybe a part of a character; nothing of an unknown id."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._bytes_of(token_id)
        return found

    def _bytes_of(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        token = self._tokens.get(token_id, "") if added is None else added
        if self._by_bytes:
            named = added is None and all(character in BYTES for character in token)
            return bytes(map(BYTES.__getitem__, token)) if named else token.encode()
        if (byte := _BYTE_TOKEN.fullmatch(token)) is not None:
            return bytes.fromhex(byte[1])
        return token.replace(_SPACE, " ").encode()

    def decode(self, ids: Iterable[int]) -> str:
        """The text of many, special tokens included, with U+FFFD where the bytes are none."""
        return b"".join(map(self.bytes_of, ids)).decode("utf-8", "replace")


def read_token_text(run_dir: Path) -> TokenText:
    """The texts of a run's tokens, by the `tokenizer.json` that it keeps.

    Raises:
        ConfigError: they cannot be had; says why.
    """
    return _read(run_dir, TokenText)


def read_decoder(run_dir: Path) -> "Tokenizer":
    """The tokenizer that a run keeps, to decode ids as the run did. Raises `ConfigError`."""
    from tokenizers import Tokenizer

    return _read(run_dir, lambda content: Tokenizer.from_str(content.decode()))


def _read(run_dir: Path, make: Callable[[bytes], _T]) -> _T:
    path = run_dir / FILE
    try:
        content = read_regular(path)
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}; the model's own {FILE}, put there, will do"
        ) from error
    try:
        return make(content)
    except Exception as error:  # the package `tokenizers` raises no other class
        raise ConfigError(f"{path} cannot be read as a tokenizer ({error})") from error
