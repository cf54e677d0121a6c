"""The text of single tokens, for who looks at trajectories: by `tokenizer.json` alone, and at once.

No tokenizer is built for it, and nothing is fetched: a look at a run needs neither transformers nor a network.
Ids become bytes here, and never the other way round.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rollstream.chat.byte_level import BYTES
from rollstream.errors import ConfigError

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


class _File(msgspec.Struct):
    """What is read of `tokenizer.json`; merges, the largest part, are passed over."""

    model: _Model
    added_tokens: list[_AddedToken] = []
    decoder: dict[str, Any] | None = None


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
        decoder = file.decoder or {}
        steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
        self._by_bytes = any(step.get("type") == "ByteLevel" for step in steps)
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


def read_token_text(model: Mapping[str, Any]) -> TokenText:
    """The token texts of a run's model.

    Args:
        model: `actor_rollout_ref.model` of the run's configuration.

    Raises:
        ConfigError: they cannot be had; says why.
    """
    name = model.get("tokenizer_path") or model.get("path")
    if not name:
        raise ConfigError("the run has no tokenizer")
    try:
        folder = Path(str(name)).expanduser()
        content = ((folder if folder.is_dir() else _cached(str(name))) / "tokenizer.json").read_bytes()
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"there is no tokenizer.json of {name} on this machine") from error
    try:
        return TokenText(content)
    except ValueError as error:
        raise ConfigError(f"tokenizer.json of {name} cannot be read ({error})") from error


def _cached(name: str) -> Path:
    """Where the hub's cache has a model of this name, if it does."""
    from huggingface_hub import constants  # alone, it is imported in no time

    repository = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    try:
        revision = (repository / "refs" / "main").read_text().strip()
    except OSError:
        revision = "main"
    return repository / "snapshots" / revision
