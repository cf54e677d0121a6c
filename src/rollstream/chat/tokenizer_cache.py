"""Tokenizers that transformers has loaded once, kept as files in the user's cache folder.

Importing transformers takes two to four seconds of CPU, in each process that renders prompts. What it makes of a
model's files is a `tokenizers.Tokenizer`, the special tokens' names and a chat template. They are kept by a hash of
the files and of the packages' versions, so that a later process reads exactly these, in milliseconds. Tokenizers that
are more than this (code of their own, sentencepiece without a fast form) are loaded by transformers each time.
"""

import contextlib
import hashlib
import inspect
import json
import os
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import msgspec
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

if TYPE_CHECKING:
    from tokenizers import AddedToken

_SUFFIXES = {".json", ".jinja", ".model", ".txt", ".tiktoken"}
"""Files of a model's folder that a tokenizer is made of."""


class _CachedFiles(msgspec.Struct, array_like=True):
    backend: str
    special_tokens: dict[str, str | list[str]]
    special_ids: list[int]
    eos_id: int | None
    pad_id: int | None
    chat_template: str | dict[str, str] | None


class CachedTokenizer:
    """The part of transformers' tokenizer that `ChatTokenizer` uses, under its names."""

    def __init__(self, entry: _CachedFiles) -> None:
        from tokenizers import Tokenizer

        self.backend_tokenizer = Tokenizer.from_str(entry.backend)
        self.special_tokens_map = entry.special_tokens
        self.all_special_ids = entry.special_ids
        self.eos_token_id = entry.eos_id
        self.pad_token_id = entry.pad_id
        self.chat_template = entry.chat_template

    def __len__(self) -> int:
        size: int = self.backend_tokenizer.get_vocab_size()
        return size

    @property
    def added_tokens_decoder(self) -> "dict[int, AddedToken]":
        tokens: dict[int, AddedToken] = self.backend_tokenizer.get_added_tokens_decoder()
        return tokens

    def get_vocab(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self.backend_tokenizer.get_vocab()
        return vocabulary

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [self.backend_tokenizer.id_to_token(token_id) for token_id in ids]

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = False,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """The conversation as text; `chat_template` is Jinja, or a name where there are several templates."""
        source: Any = self.chat_template
        if isinstance(source, Mapping):
            name = chat_template or ("tool_use" if tools is not None and "tool_use" in source else "default")
            source = source.get(name, chat_template)
        else:
            source = chat_template or source
        if source is None:
            raise jinja2.TemplateError("there are several chat templates, but none is named default")
        values = {**self.special_tokens_map, "documents": None, **variables}
        return _compiled(source).render(
            messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **values
        )


def load(folder: Path, make: Callable[[], Any]) -> Any:
    """The tokenizer of a model's folder: from the cache, else made by `make` (transformers) and kept."""
    digest = hashlib.blake2b(
        repr([version("transformers"), version("tokenizers"), 1]).encode(), digest_size=16
    )
    for path in sorted(folder.rglob("*")):
        if path.suffix in _SUFFIXES and path.is_file():
            content = path.read_bytes()
            digest.update(f"{path.relative_to(folder)}\0{len(content)}\0".encode() + content)
    root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rollstream" / "tokenizers"
    file = root / digest.hexdigest()
    with contextlib.suppress(Exception):  # not there, or damaged: it is made again
        return CachedTokenizer(msgspec.msgpack.decode(file.read_bytes(), type=_CachedFiles))
    tokenizer = make()
    if (entry := _entry(tokenizer)) is not None:
        with contextlib.suppress(OSError):  # a home that cannot be written costs time, no more
            root.mkdir(parents=True, exist_ok=True)
            temporary = file.with_name(f"{file.name}.{os.getpid()}")
            temporary.write_bytes(msgspec.msgpack.encode(entry))
            temporary.replace(file)
    return tokenizer


def _entry(tokenizer: Any) -> _CachedFiles | None:
    """All of a tokenizer; None if it does more than `CachedTokenizer` can."""
    from transformers import PreTrainedTokenizerBase

    own = inspect.getattr_static(type(tokenizer), "apply_chat_template", None)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or own is not inspect.getattr_static(PreTrainedTokenizerBase, "apply_chat_template"):
        return None
    try:
        return msgspec.convert(
            [
                backend.to_str(),
                tokenizer.special_tokens_map,
                tokenizer.all_special_ids,
                tokenizer.eos_token_id,
                tokenizer.pad_token_id,
                tokenizer.chat_template,
            ],
            type=_CachedFiles,
        )
    except Exception:  # `to_str` of parts written in Python; special tokens that are no text
        return None


class _GenerationTag(Extension):
    """`{% generation %}` marks what the model wrote, for training; it changes nothing about the text."""

    tags = {"generation"}  # noqa: RUF012  (as Jinja declares it)

    def parse(self, parser: "jinja2.parser.Parser") -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


@lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    """A chat template with what transformers adds to Jinja."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
