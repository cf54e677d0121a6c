"""The text of tokens, for who looks at a run: by the `tokenizer.json` that the run keeps, and nothing else.

A look at a run needs neither its model nor transformers nor a network, and runs no code that the run names. Ids become
bytes here, and never the other way round.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rollstream.chat.byte_level import BYTES
from rollstream.errors import ConfigError
from rollstream.untrusted import read_regular

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE = "tokenizer.json"
"""Its name in a run directory."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""How a vocabulary of sentencepiece names a byte that is in no other token."""
_SPACE = "\u2581"
"""How it writes a space."""


class TokenText:
    """The bytes of each token of a vocabulary."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._added = tokenizer.get_added_tokens_decoder()
        self._is_byte_level = "ByteLevel" in str(tokenizer.decoder)
        self._known: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """A token as it stands in the text, maybe a part of a character; nothing of an unknown id."""
        if (content := self._known.get(token_id)) is None:
            content = self._known[token_id] = self._bytes_of(token_id)
        return content

    def _bytes_of(self, token_id: int) -> bytes:
        token: str = (self._tokenizer.id_to_token(token_id) if token_id >= 0 else None) or ""
        if self._is_byte_level:
            is_named = token_id not in self._added and all(character in BYTES for character in token)
            return bytes(map(BYTES.__getitem__, token)) if is_named else token.encode()
        if byte := _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(byte[1])
        return token.replace(_SPACE, " ").encode()

    def decode(self, ids: Iterable[int]) -> str:
        """The text of many, special tokens included, with U+FFFD where the bytes are none."""
        return b"".join(map(self.bytes_of, ids)).decode("utf-8", "replace")


def read_token_text(run_dir: Path) -> TokenText:
    """The texts of a run's tokens, by the `tokenizer.json` that it keeps. Raises `ConfigError`."""
    return TokenText(read_decoder(run_dir))


def read_decoder(run_dir: Path) -> "Tokenizer":
    """The tokenizer that a run keeps, to decode ids as the run did. Raises `ConfigError`."""
    from tokenizers import Tokenizer

    path = run_dir / FILE
    try:
        return Tokenizer.from_str(read_regular(path).decode())
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}; the model's own {FILE}, put there, will do"
        ) from error
    except Exception as error:  # the package `tokenizers` raises no other class
        raise ConfigError(f"{path} cannot be read as a tokenizer ({error})") from error
