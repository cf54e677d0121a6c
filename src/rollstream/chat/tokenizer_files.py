"""Tokenizers and chat templates by their files alone, without transformers.

transformers takes seconds to import (torch with it, where that is installed). What most tokenizers need of it
is little: `tokenizer.json` is read by the package `tokenizers`, and a chat template is Jinja with a few
additions. `read_tokenizer` does that where the files are plain, so that the result is known to be the same;
everything else is left to transformers.
"""

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import orjson
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rollstream.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

ChatTemplate = str | dict[str, str]
"""Jinja source, or several by name: `default`, and `tool_use` for prompts with tools."""

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that have a name; chat templates know them by it."""

_REBUILT: dict[str, tuple[dict[str, Any], list[str]]] = {
    "Qwen2Tokenizer": (
        {
            "normalizer": {"type": "NFC"},
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    {
                        "type": "Split",
                        "pattern": {
                            "Regex": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
                            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
                        },
                        "behavior": "Isolated",
                        "invert": False,
                    },
                    {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
                ],
            },
        },
        ["unk_token", "eos_token", "pad_token"],
    ),
    "GPT2Tokenizer": (
        {
            "normalizer": None,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        },
        ["unk_token", "bos_token", "eos_token"],
    ),
}
"""Classes of which transformers takes only vocabulary and merges from tokenizer.json, and writes the rest
itself: that rest, to be compared, and the special tokens that are `<|endoftext|>` where none is given."""

_FROM_FILE = ("PreTrainedTokenizer", "TokenizersBackend")
"""Classes with which transformers takes tokenizer.json as it stands."""

_MODELS_FROM_FILE = ("deepseek_v2", "deepseek_v3", "minimax_m2", "phi3", "phimoe")
"""Models with which it does so whatever class their files name."""


class FileTokenizer:
    """A tokenizer read from its files; what `ChatTokenizer` uses of a transformers tokenizer, by its names."""

    def __init__(
        self,
        backend: "Tokenizer",
        named: dict[str, str],
        extra: list[str],
        chat_template: ChatTemplate | None,
    ) -> None:
        """`named` and `extra` are the special tokens, by name and without one."""
        self.backend_tokenizer = backend
        self.special_tokens_map = named
        self.all_special_tokens = list(dict.fromkeys([*named.values(), *extra]))
        self.chat_template = chat_template

    def __len__(self) -> int:
        size: int = self.backend_tokenizer.get_vocab_size()
        return size

    @property
    def eos_token_id(self) -> int | None:
        return self._named_id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        return self._named_id("pad_token")

    @property
    def all_special_ids(self) -> list[int]:
        ids = map(self.backend_tokenizer.token_to_id, self.all_special_tokens)
        return [token_id for token_id in ids if token_id is not None]

    @property
    def added_tokens_decoder(self) -> "dict[int, AddedToken]":
        tokens: dict[int, AddedToken] = self.backend_tokenizer.get_added_tokens_decoder()
        return tokens

    def get_vocab(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self.backend_tokenizer.get_vocab()
        return vocabulary

    def get_added_vocab(self) -> dict[str, int]:
        return {str(token): token_id for token_id, token in self.added_tokens_decoder.items()}

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [self.backend_tokenizer.id_to_token(token_id) for token_id in ids]

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        tokenize: bool = False,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """The conversation as the template writes it, as text; `chat_template` as transformers has it."""
        own = self.chat_template
        if chat_template is not None:
            own = own.get(chat_template, chat_template) if isinstance(own, dict) else chat_template
        template = compile_template(pick_template(own, tools))
        return template.render(
            messages=messages,
            tools=tools,
            documents=variables.pop("documents", None),
            add_generation_prompt=add_generation_prompt,
            **{**self.special_tokens_map, **variables},
        )

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens_map.get(name)
        return None if token is None else self.backend_tokenizer.token_to_id(token)


def read_tokenizer(folder: Path) -> FileTokenizer | None:
    """Reads the tokenizer of a model folder.

    Returns:
        None where its ids may be others than those of transformers' tokenizer for this folder, because there
        is no tokenizer.json, it has code of its own, or a class is named that changes what the file says.

    Raises:
        ConfigError: a file is broken; names it.
    """
    file = folder / "tokenizer.json"
    config = read_json(folder / "tokenizer_config.json")
    model = read_json(folder / "config.json") or {}
    if not file.is_file() or config is None:
        return None
    from tokenizers import Tokenizer

    try:
        backend = Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises no other class
        raise ConfigError(f"{file} cannot be read as a tokenizer ({error})") from error
    content = orjson.loads(file.read_bytes())
    defaults = _is_plain(folder, config, model, content)
    if defaults is None:
        return None
    given = {**dict.fromkeys(defaults, "<|endoftext|>"), **config}
    if "added_tokens_decoder" not in config:
        given |= read_json(folder / "special_tokens_map.json") or {}
    named = {name: _text(given[name]) for name in _NAMED if given.get(name) is not None}
    extra = [
        _text(token)
        for token in given.get("extra_special_tokens", given.get("additional_special_tokens")) or []
    ]
    special = {token["content"] for token in content["added_tokens"] if token["special"]}
    if not special.issuperset([*named.values(), *extra]):
        return None  # transformers would add them
    backend.no_truncation()
    backend.no_padding()
    return FileTokenizer(backend, named, extra, _read_template(folder, config))


def _is_plain(
    folder: Path, config: dict[str, Any], model: dict[str, Any], content: dict[str, Any]
) -> list[str] | None:
    """Whether tokenizer.json says all: names of the special tokens with a default; None if it does not."""
    model_type = str(model.get("model_type") or "")
    # Mistral's files have a wrong pattern, which transformers mends for some.
    if "stral" in model_type or any(
        config.get(key) for key in ("split_special_tokens", "add_prefix_space", "fast_tokenizer_files")
    ):
        return None
    if "auto_map" in config or any(
        key.endswith("_token") and key not in _NAMED and isinstance(value, str | dict)
        for key, value in config.items()
    ):
        return None  # code of its own, or tokens that a model with images names
    if isinstance(config.get("extra_special_tokens"), dict):
        return None
    listed = config.get("added_tokens_decoder")
    if listed is None and (folder / "added_tokens.json").is_file():
        return None
    if listed is not None and {int(at): token | {"id": int(at)} for at, token in listed.items()} != {
        token["id"]: token for token in content["added_tokens"]
    }:
        return None
    name = str(config.get("tokenizer_class") or model.get("tokenizer_class") or "").removesuffix("Fast")
    if model_type == "qwen2":
        name = "Qwen2Tokenizer"
    if name in _FROM_FILE or model_type in _MODELS_FROM_FILE:
        return []
    if name not in _REBUILT:
        return None
    rebuilt, defaults = _REBUILT[name]
    bpe = {key: value for key, value in content["model"].items() if key not in ("vocab", "merges") and value}
    same = bpe == {"type": "BPE"} and content["decoder"]["type"] == "ByteLevel"
    same &= all(_has(content[part], wanted) for part, wanted in rebuilt.items())
    return defaults if same else None


def _has(given: Any, wanted: Any) -> bool:
    """Whether `given` says what `wanted` does, and nothing else of weight (`trim_offsets` has none)."""
    if isinstance(wanted, dict):
        return isinstance(given, dict) and all(_has(given.get(key), value) for key, value in wanted.items())
    if isinstance(wanted, list):
        return isinstance(given, list) and len(given) == len(wanted) and all(map(_has, given, wanted))
    return bool(given == wanted)


def read_json(file: Path) -> dict[str, Any] | None:
    """A mapping from a JSON file; None when there is no file. Raises `ConfigError`, which names the file."""
    try:
        content = orjson.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, orjson.JSONDecodeError) as error:
        raise ConfigError(f"{file} cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} holds no JSON object")
    return content


def _read_template(folder: Path, config: dict[str, Any]) -> ChatTemplate | None:
    """The folder's chat template: files before what the configuration says, as transformers has it."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    found = {name: file.read_text("utf-8") for name, file in files.items() if file.is_file()}
    if found:
        return found["default"] if [*found] == ["default"] else found
    given = config.get("chat_template")
    if isinstance(given, list):
        return {each["name"]: each["template"] for each in given}
    return given


def pick_template(template: ChatTemplate | None, tools: object) -> str:
    """The source that renders a prompt with these tools."""
    if isinstance(template, Mapping):
        template = template.get("tool_use" if tools is not None and "tool_use" in template else "default")
    if template is None:
        raise jinja2.TemplateError("there are several chat templates, but none is named default")
    return template


def _text(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


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
def compile_template(source: str) -> jinja2.Template:
    """A chat template, with the additions that transformers makes to Jinja.

    Raises:
        jinja2.TemplateSyntaxError: it is not Jinja; knows the line.
    """
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
