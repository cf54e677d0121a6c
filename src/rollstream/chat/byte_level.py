"""Byte-level BPE, the tokenizers of nearly all chat models, in a few dictionary lookups.

The package `tokenizers` decides every id and every byte; this module remembers what it said, of a token when
decoding and of a word when encoding. Both are used only where they are known to be right: the tokenizer is
built in the known way, a sample agrees at load, and encoding is of ASCII text, in which a tokenizer's pattern
means the same to Python as to `tokenizers`. All else is left to `tokenizers`, piece by piece.
"""

import re
import unicodedata
from collections.abc import Callable
from itertools import chain
from typing import Any

import orjson

MAX_WORDS = 32_768
"""Words remembered: the vocabulary of some books. They take some 5 MB."""
MAX_WORD_LENGTH = 32
"""Characters of a remembered word; what is longer is data, and does not come again."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What `ByteLevel` splits by where it is told to."""

_ASCII = "".join(map(chr, range(128)))
_SPACE = "\t\n\v\f\r "
_CLASSES = {"s": _SPACE, "d": "0123456789"}
_ESCAPE = re.compile(r"\\(?:(p)\{(\w{1,2})\}|([sd])|(S)|[rnt]|[^\w\s])")

_SAMPLES = (
    "What is 12345 + 6.7?\n\n  He's said: \"don't\"\tI'LL  go!!\r\n   ",
    'def f(x):\n    return {"a": [1, 2], "b": x ** 2}  # done\n\n\n',
    "caf\u00e9 \u4f60\u597d \U0001f600\U0001f1e9 e\u0301 \u200b\x00\x1c\x85 x",
)


def _alphabet() -> dict[str, int]:
    """The characters that stand for bytes in the vocabulary (GPT-2's), with the byte of each."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + at): byte for at, byte in enumerate(hidden)}


BYTES = _alphabet()
"""The byte that each character of a byte-level vocabulary stands for."""
_SHOWN = {byte: character for character, byte in BYTES.items() if byte < 128}


class _Remembered(dict[Any, Any]):
    """A dict that asks for what it does not have, and keeps it if it may."""

    def __init__(self, ask: Callable[[Any], tuple[Any, bool]]) -> None:
        self._ask = ask

    def __missing__(self, key: Any) -> Any:
        value, keep = self._ask(key)
        if keep:
            if len(self) >= MAX_WORDS and isinstance(key, str):
                self.clear()
            self[key] = value
        return value


class ByteDecoder:
    """Text of ids, from the bytes of each."""

    def __init__(self, backend: Any) -> None:
        special = {str(token) for token in backend.get_added_tokens_decoder().values() if token.special}

        def read(skip: bool) -> Callable[[int], tuple[bytes, bool]]:
            def bytes_of(token_id: int) -> tuple[bytes, bool]:
                token = backend.id_to_token(token_id)
                if token is None or (skip and token in special):
                    return b"", token is not None
                try:
                    return bytes(map(BYTES.__getitem__, token)), True
                except KeyError:  # an added token, as it stands
                    return token.encode(), True

            return bytes_of

        self._all = _Remembered(read(False)).__getitem__
        self._text = _Remembered(read(True)).__getitem__

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text, with U+FFFD where the bytes are none."""
        table = self._text if skip_special_tokens else self._all
        return b"".join(map(table, ids)).decode("utf-8", "replace")


class WordEncoder:
    """Ids of a text, from those of its words."""

    def __init__(self, backend: Any, added: list[re.Pattern[str]], patterns: list[re.Pattern[str]]) -> None:
        """Args:
        backend: the tokenizer.
        added: what finds its added tokens, one after the other, in a group.
        patterns: each splits a word of the one before into words, and covers it.
        """
        self._backend = backend
        self._added = added
        self._patterns = patterns
        model = backend.model

        def ids_of(word: str) -> tuple[list[int], bool]:
            tokens = model.tokenize(word.translate(_SHOWN))
            return [token.id for token in tokens], len(word) <= MAX_WORD_LENGTH

        self._ids = _Remembered(ids_of).__getitem__
        self._token_ids: dict[str, int] = {
            str(token): token_id for token_id, token in backend.get_added_tokens_decoder().items()
        }

    def encode(self, text: str) -> list[int]:
        """The ids; no special tokens are added."""
        return self._encode(text, 0)

    def _encode(self, text: str, stage: int) -> list[int]:
        if stage < len(self._added):
            ids: list[int] = []
            for at, part in enumerate(self._added[stage].split(text)):
                if at % 2:
                    ids.append(self._token_ids[part])
                elif part:
                    ids += self._encode(part, stage + 1)
            return ids
        if not text.isascii():
            others: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
            return others
        words = [text]
        for pattern in self._patterns:
            words = (
                pattern.findall(text)
                if len(words) == 1
                else [w for word in words for w in pattern.findall(word)]
            )
        return list(chain.from_iterable(map(self._ids, words)))


def byte_decoder(backend: Any) -> ByteDecoder | None:
    """The decoder of a tokenizer; None where its text may be another."""
    if _json(backend.decoder).get("type") != "ByteLevel":
        return None
    decoder = ByteDecoder(backend)
    size = backend.get_vocab_size()
    for start in range(0, size, max(1, size // 64)):
        ids = [(start + 31 * at * at) % size for at in range(24)]
        for skip in (True, False):
            if decoder.decode(ids, skip_special_tokens=skip) != backend.decode(ids, skip_special_tokens=skip):
                return None
    return decoder


def word_encoder(backend: Any) -> WordEncoder | None:
    """The encoder of a tokenizer; None where its ids may be others."""
    pre = _json(backend.pre_tokenizer)
    steps = pre["pretokenizers"] if pre.get("type") == "Sequence" else [pre]
    if _json(backend.normalizer).get("type", "NFC") != "NFC" or type(backend.model).__name__ != "BPE":
        return None  # other normalizers may change ASCII
    if backend.model.dropout or backend.encode_special_tokens or steps[-1].get("type") != "ByteLevel":
        return None
    sources = [_split_source(step) for step in steps[:-1]]
    if steps[-1]["use_regex"]:
        sources.append(_GPT2)
    added = list(backend.get_added_tokens_decoder().values())
    patterns = [None if source is None else _ascii_pattern(source) for source in sources]
    if steps[-1]["add_prefix_space"] or any(
        token.lstrip or token.rstrip or token.single_word for token in added
    ):
        return None
    known = [pattern for pattern in patterns if pattern is not None]
    if len(known) < len(patterns):
        return None
    exact = [str(token) for token in added if not token.normalized]
    normalized = [str(token) for token in added if token.normalized]  # looked for in what is left
    finders = [_finder(texts) for texts in (exact, normalized) if texts]
    encoder = WordEncoder(backend, finders, known)
    samples = [
        *_SAMPLES,
        *("".join(f"a {token}\n" for token in [*exact, *normalized][at::7]) for at in range(7)),
    ]
    for text in samples:
        if encoder.encode(text) != backend.encode_batch_fast([text], add_special_tokens=False)[0].ids:
            return None
    return encoder


def _json(part: Any) -> dict[str, Any]:
    """A part of a tokenizer as its file has it; nothing where there is none."""
    state: dict[str, Any] = {} if part is None else orjson.loads(part.__getstate__())
    return state


def _finder(texts: list[str]) -> re.Pattern[str]:
    """What splits a text by these, the longest first, and keeps them."""
    return re.compile("(" + "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) + ")")


def _split_source(step: dict[str, Any]) -> str | None:
    """The pattern of a `Split` that keeps every character, as a word of its own or not."""
    if step.get("type") != "Split" or step["behavior"] != "Isolated" or step["invert"]:
        return None
    pattern: str | None = step["pattern"].get("Regex")
    return pattern


def _ascii_pattern(source: str) -> re.Pattern[str] | None:
    """A pattern of `tokenizers` for ASCII text, in Python's words; None where it may mean something else.

    What lies between two matches is a word as well.
    """
    rest = _ESCAPE.sub("", source)
    if any(unknown in rest for unknown in ("\\", "[[", "&&", "}+", "(?<")):
        return None
    pattern, at, inside = [], 0, False
    while at < len(source):
        if source[at] == "\\":
            escape = _ESCAPE.match(source, at)
            if escape is None or (inside and escape[4]):
                return None
            pattern.append(_in_ascii(escape, inside=inside))
            at = escape.end()
            continue
        inside = source[at] == "[" or (inside and source[at] != "]")
        pattern.append(source[at])
        at += 1
    try:
        text = "".join(pattern)
        found = re.compile(f"{text}|(?:(?!{text}).)+", re.DOTALL)
    except re.error:
        return None
    return None if found.groups else found


def _in_ascii(escape: re.Match[str], *, inside: bool) -> str:
    """An escape of a pattern, with what it means of ASCII; inside of brackets or not."""
    if escape[1]:
        characters = "".join(c for c in _ASCII if unicodedata.category(c).startswith(escape[2]))
    elif escape[3] or escape[4]:
        characters = _CLASSES[(escape[3] or escape[4]).lower()]
    else:
        return escape[0]
    codes = "".join(f"\\x{ord(c):02x}" for c in characters)
    if inside:
        return codes
    if not codes:
        return "(?!)"
    return f"[^{codes}]" if escape[4] else f"[{codes}]"
