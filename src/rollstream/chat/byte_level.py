"""Byte-level BPE, the tokenizers of nearly all chat models, in a few dictionary lookups.

The package `tokenizers` decides every id and every byte; this module remembers what it said, of a token when
decoding and of a word when encoding. Both are used only where they are known to be right: the tokenizer is
built in the known way, a sample agrees at load, and encoding is of ASCII text, in which a tokenizer's pattern
means the same to Python as to `tokenizers`. All else is left to `tokenizers`, piece by piece.
"""

import re
import unicodedata
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import orjson

MAX_WORDS = 32_768
"""Words remembered: the vocabulary of some books. They take some 5 MB."""
MAX_WORD_LENGTH = 32
"""Characters of a remembered word; what is longer is data, and does not come again."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What `ByteLevel` splits by where it is told to."""

_ESCAPE = re.compile(r"\\p\{(\w{1,2})\}|\\.")

_SAMPLES = (
    "What is 12345 + 6.7?\n\n  He's said: \"don't\"\tI'LL  go!!\r\n   ",
    'def f(x):\n    return {"a": [1, 2], "b": x ** 2}  # done\n\n\n',
    "caf\u00e9 \u4f60\u597d \U0001f600\U0001f1e9 e\u0301 \u200b\x00\x1c\x85 x",
)

_shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
_hidden = [byte for byte in range(256) if byte not in _shown]
BYTES = {chr(byte): byte for byte in _shown} | {chr(256 + at): byte for at, byte in enumerate(_hidden)}
"""The byte that each character of a byte-level vocabulary (GPT-2's) stands for."""
_CHARACTERS = {byte: character for character, byte in BYTES.items() if byte < 128}


class _Remembered(dict[Any, Any]):
    """A dict that asks for what it does not have, and keeps what is not None or too long."""

    def __init__(self, ask: Callable[[Any], Any]) -> None:
        self._ask = ask

    def __missing__(self, key: Any) -> Any:
        value = self._ask(key)
        if not isinstance(key, str):
            self[key] = value
        elif len(key) <= MAX_WORD_LENGTH:
            if len(self) >= MAX_WORDS:
                self.clear()
            self[key] = value
        return value


class ByteLevel:
    """Encodes and decodes as its tokenizer does."""

    def __init__(self, backend: Any) -> None:
        """`backend` is of the package `tokenizers`. Raises `ValueError` where ids or text might be others."""
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._added = {str(token): token_id for token_id, token in added.items()}
        self._special = {str(token) for token in added.values() if token.special}
        self._text, self._all = (_Remembered(partial(self._bytes_of, skip=skip)) for skip in (True, False))
        model, steps = backend.model, _steps(backend.pre_tokenizer)
        last = steps[-1] if steps else {}
        normalizer = _state(backend.normalizer).get("type", "NFC")  # others may change ASCII
        if not (
            (type(model).__name__, last.get("type"), normalizer) == ("BPE", "ByteLevel", "NFC")
            and _state(backend.decoder).get("type") == "ByteLevel"
            and not (model.dropout or backend.encode_special_tokens or last["add_prefix_space"])
            and not any(token.lstrip or token.rstrip or token.single_word for token in added.values())
        ):
            raise ValueError("this tokenizer does more than byte-level BPE")
        self._words = _Remembered(lambda word: [t.id for t in model.tokenize(word.translate(_CHARACTERS))])
        self._patterns = [_ascii_pattern(_split_source(step)) for step in steps[:-1]]
        if last["use_regex"]:
            self._patterns.append(_ascii_pattern(_GPT2))
        # Those that are looked for in normalized text come second, in what is left.
        groups = (
            [str(token) for token in added.values() if token.normalized == late] for late in (False, True)
        )
        self._finders = [_finder(texts) for texts in groups if texts]
        self._check()

    def encode(self, text: str, stage: int = 0) -> list[int]:
        """The ids; no special tokens are added. Added tokens of earlier stages have been found."""
        if stage < len(self._finders):
            ids: list[int] = []
            for at, part in enumerate(self._finders[stage].split(text)):
                if at % 2:
                    ids.append(self._added[part])
                elif part:
                    ids += self.encode(part, stage + 1)
            return ids
        if not text.isascii():
            return _ids_of(self._backend, text)
        words = [text]
        for pattern in self._patterns:
            words = list(chain.from_iterable(map(pattern.findall, words)))
        return list(chain.from_iterable(map(self._words.__getitem__, words)))

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text, with U+FFFD where the bytes are none."""
        table = self._text if skip_special_tokens else self._all
        return b"".join(map(table.__getitem__, ids)).decode("utf-8", "replace")

    def _bytes_of(self, token_id: int, *, skip: bool) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None or (skip and token in self._special):
            return b""
        try:
            return bytes(map(BYTES.__getitem__, token))
        except KeyError:  # an added token, as it stands
            return str(token).encode()

    def _check(self) -> None:
        backend, added = self._backend, [*self._added]
        for text in (*_SAMPLES, *("".join(f"a {token}\n" for token in added[at::7]) for at in range(7))):
            if self.encode(text) != _ids_of(backend, text):
                raise ValueError("this tokenizer splits text in another way")
        size = backend.get_vocab_size()
        for start in range(0, size, max(1, size // 64)):
            ids = [(start + 31 * at * at) % size for at in range(24)]
            for skip in (True, False):
                if self.decode(ids, skip_special_tokens=skip) != backend.decode(
                    ids, skip_special_tokens=skip
                ):
                    raise ValueError("this tokenizer decodes in another way")


def _ids_of(backend: Any, text: str) -> list[int]:
    ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def _state(part: Any) -> dict[str, Any]:
    """A part of a tokenizer as its file has it; nothing where there is none."""
    state: dict[str, Any] = {} if part is None else orjson.loads(part.__getstate__())
    return state


def _steps(part: Any) -> list[dict[str, Any]]:
    state = _state(part)
    return state["pretokenizers"] if state.get("type") == "Sequence" else [state]


def _finder(texts: list[str]) -> re.Pattern[str]:
    """What splits a text by these, the longest first, and keeps them."""
    return re.compile("(" + "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) + ")")


def _split_source(step: dict[str, Any]) -> str:
    """The pattern of a `Split` that keeps every character, as a word of its own or not."""
    if (step["type"], step.get("behavior"), step.get("invert")) != ("Split", "Isolated", False):
        raise ValueError(f"no plain split: {step['type']}")
    return str(step["pattern"].get("Regex", "\\"))  # a lone backslash is no pattern


def _ascii_pattern(source: str) -> re.Pattern[str]:
    """A pattern of `tokenizers` for ASCII text, in Python's words. What lies between two matches is a word as well.

    Raises:
        ValueError: it may mean something else.
    """
    rest = _ESCAPE.sub("", source)
    if any(unknown in rest for unknown in ("[[", "&&", "}+", "(?<")):
        raise ValueError(f"not known: {source}")
    is_inside = False

    def translate(piece: re.Match[str]) -> str:
        nonlocal is_inside
        text, category = piece[0], piece[1]
        if text in "[]":
            is_inside = text == "["
        elif category or text in (r"\s", r"\S", r"\d"):
            codes = "".join(
                rf"\x{code:02x}" for code in range(128) if _is_in(chr(code), category or text[1].lower())
            )
            if is_inside and text != r"\S":
                return codes
            if not is_inside:
                codes = f"^{codes}" if text == r"\S" else codes
                return f"[{codes}]" if codes else "(?!)"
            raise ValueError(f"not known: {text} in brackets")
        elif text[1].isalnum() and text[1] not in "rnt":
            raise ValueError(f"not known: {text}")
        return text

    text = re.sub(rf"{_ESCAPE.pattern}|[\[\]]", translate, source)
    try:
        pattern = re.compile(f"{text}|(?:(?!{text}).)+", re.DOTALL)
    except re.error as error:
        raise ValueError(str(error)) from error
    if pattern.groups:
        raise ValueError(f"it has groups: {source}")
    return pattern


def _is_in(character: str, kind: str) -> bool:
    """Whether an ASCII character belongs to a Unicode category, or to `s` or `d`."""
    if kind == "s":
        return character in "\t\n\v\f\r "
    return unicodedata.category(character).startswith("Nd" if kind == "d" else kind)
