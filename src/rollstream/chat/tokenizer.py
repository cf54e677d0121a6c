"""The tokenizer: chat messages to prompt ids, sampled ids to text."""

import hashlib
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import orjson

from rollstream.chat import tokenizer_cache
from rollstream.chat.byte_level import ByteLevel
from rollstream.chat.template_form import TemplateForm
from rollstream.errors import ConfigError, DataError
from rollstream.trajectory import Message

_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tiktoken.model")
"""Files that hold a vocabulary, by their usual names."""

_CHARS_A_TOKEN = 8
"""Usual text has fewer. A conversation that has more for each token of the model's length is counted in pieces."""

_OPEN_MARK = "ROLLSTREAMOPEN"
"""Stands for what comes next in a message. Letters only: no template trims, escapes or splits it."""


class ChatTokenizer:
    """A Hugging Face tokenizer with its chat template."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        template_kwargs: dict[str, Any] | None = None,
        end_ids: Iterable[int] = (),
    ) -> None:
        """A transformers tokenizer; `end_ids` end the model's turn, besides the tokenizer's own end token."""
        self._tokenizer = tokenizer
        own = tokenizer.eos_token_id
        self.end_ids = frozenset([*end_ids, *([] if own is None else [own])])
        """Tokens that end a turn of the model."""
        self.template_kwargs = template_kwargs or {}
        """Handed to the chat template at every rendering."""
        # The package `tokenizers` itself, where transformers uses it: without offsets and type checks it takes
        # a third less per prompt and half per answer, and gives the same ids and text.
        self._backend: Any | None = getattr(tokenizer, "backend_tokenizer", None)

    @property
    def pad_id(self) -> int | None:
        """What fills batches up: the padding token, else the end token, as verl and others do."""
        own, end = self._tokenizer.pad_token_id, self._tokenizer.eos_token_id
        padding: int | None = end if own is None else own
        return padding

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return len(self._tokenizer)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that stand for structure, not text: end of turn, start of a role, padding."""
        added = self._tokenizer.added_tokens_decoder.items()
        return frozenset({*self._tokenizer.all_special_ids, *(i for i, token in added if token.special)})

    def escape_special_tokens(self, text: str) -> str:
        """A text that cannot be taken for structure: special tokens in it are broken by a zero-width space.

        For what comes from outside, such as a tool's result: a web page that quotes `<|im_end|>` must not
        end the turn.
        """
        return self._special_texts.sub(lambda match: f"{match[0][0]}\u200b{match[0][1:]}", text)

    def find_special_tokens(self, text: str) -> Iterator[re.Match[str]]:
        """The special tokens in a text, which `encode` takes for structure, in order."""
        return self._special_texts.finditer(text)

    def special_tokens_in(self, text: str) -> set[str]:
        """The special tokens that a text has."""
        return {match[0] for match in self.find_special_tokens(text)}

    @cached_property
    def _special_texts(self) -> re.Pattern[str]:
        texts = self._tokenizer.convert_ids_to_tokens(sorted(self.special_ids))
        # Longest first; a token of one or two characters is text that happens to be special.
        known = sorted((text for text in texts if len(text) > 2), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, known)) or r"(?!)")

    @cached_property
    def form(self) -> TemplateForm:
        """How conversations have to be written for the chat template to show all of them."""
        return TemplateForm(lambda messages: self._render(messages, None, True))

    def token_id(self, token: str) -> int | None:
        """The id of a token by its exact text; None if the vocabulary has none."""
        token_id: int | None = self._tokenizer.get_vocab().get(token)
        return token_id

    def render(
        self,
        messages: list[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Ids of a conversation, ready for the model to answer.

        With `add_generation_prompt` they end with the beginning of an answer; with `continue_final_message`
        inside the last message, an answer that the model goes on with. Raises `DataError`: the chat template
        refuses these messages.
        """
        if not continue_final_message:
            text = self.render_text(messages, tools=tools, add_generation_prompt=add_generation_prompt)
            return self.encode(text)
        *before, last = messages
        open_text = last.get("content")
        if last.get("role") != "assistant" or not isinstance(open_text, str) or last.get("tool_calls"):
            raise DataError("only an assistant's message of text, without calls, can be gone on with")
        # Rendered with a mark behind it, so that no template trims the end, and cut off there.
        marked = [*before, {**last, "content": open_text + _OPEN_MARK}]
        head, found, _ = self.render_text(marked, tools=tools, add_generation_prompt=False).rpartition(
            _OPEN_MARK
        )
        if not found or not head.endswith(open_text):
            raise DataError("the chat template does not show the last message as it is")
        return self.encode(head)

    def render_text(
        self,
        messages: list[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """A conversation as the chat template writes it, in the form in which it shows all of it.

        Raises:
            DataError: the template refuses the conversation, or leaves out a message.
        """
        messages = self.form.of(messages)
        try:
            return self._render(messages, tools, add_generation_prompt)
        except Exception as error:
            if type(error) is jinja2.TemplateError:  # what `raise_exception` raises
                raise DataError(f"the chat template refuses this prompt: {error}") from error
            raise DataError(
                f"the chat template fails on this prompt ({type(error).__name__}: {error}); if it does so on "
                "every prompt, the template is broken (actor_rollout_ref.model.custom_chat_template)"
            ) from error

    def _render(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, add_generation_prompt: bool
    ) -> str:
        text: str = self._tokenizer.apply_chat_template(
            messages,
            tools=tools or None,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **self.template_kwargs,
        )
        return text

    def encode(self, text: str) -> list[int]:
        """Ids of a text as it stands: no special tokens are added."""
        if self._byte_level is not None:
            return self._byte_level.encode(text)
        ids: list[int]
        if self._backend is not None:
            ids = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        else:
            ids = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def characters_beyond(self, limit: int, messages: Sequence[Message], tools: Sequence[Any]) -> int:
        """Characters of a conversation with more than twice `limit` tokens; 0 if it is shorter.

        This takes as long as for a conversation of the limit: what is longer is not looked at.
        """
        if len(messages) <= limit and sum(map(len, _texts((messages, tools)))) <= _CHARS_A_TOKEN * limit:
            return 0
        text, tokens = "\n".join(_texts((messages, tools))), 0
        for at in range(0, len(text), _CHARS_A_TOKEN * limit):
            tokens += len(self.encode(text[at : at + _CHARS_A_TOKEN * limit]))
            if tokens > 2 * limit:  # templates leave out a little
                return len(text)
        return 0

    def count(self, texts: list[str]) -> list[int]:
        """How many tokens each of many texts has; the tokenizer uses all cores."""
        if self._backend is None:
            return [len(self.encode(text)) for text in texts]
        return [len(encoded) for encoded in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids."""
        if self._byte_level is not None:
            return self._byte_level.decode(ids, skip_special_tokens=skip_special_tokens)
        text: str
        if self._backend is not None:
            text = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        else:
            text = self._tokenizer.decode(
                ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        return text

    @cached_property
    def _byte_level(self) -> ByteLevel | None:
        try:
            return None if self._backend is None else ByteLevel(self._backend)
        except ValueError:
            return None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_byte_level", "form")}

    def to_json(self) -> bytes | None:
        """The content of a `tokenizer.json`; None for a tokenizer that has its own code."""
        return None if self._backend is None else self._backend.to_str().encode()

    def digest(self) -> str:
        """Hash of what decides ids: vocabulary, merges, chat template."""
        content = self.to_json() or repr(sorted(self._tokenizer.get_vocab().items())).encode()
        return hashlib.blake2b(
            content + repr(self._tokenizer.chat_template).encode(), digest_size=16
        ).hexdigest()

    def differences(self, tokenizer: Any) -> list[str]:
        """In what a transformers tokenizer is another one: `vocabulary`, `end token`, `chat template`.

        A padding token that was added to it is none: it is in no prompt and no answer.
        """
        own = self._tokenizer
        words, others = own.get_vocab(), tokenizer.get_vocab()
        if tokenizer.pad_token not in words:
            others = {word: number for word, number in others.items() if word != tokenizer.pad_token}
        is_other = {
            "vocabulary": words != others,
            "end token": own.eos_token_id != tokenizer.eos_token_id,
            "chat template": own.chat_template != tokenizer.chat_template,
        }
        return [name for name, differs in is_other.items() if differs]


def load_tokenizer(
    path: str,
    *,
    custom_chat_template: str | None = None,
    template_kwargs: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> ChatTokenizer:
    """Loads the tokenizer of a model by transformers.

    Args:
        path: folder or hub name.
        custom_chat_template: a Jinja file that replaces the tokenizer's own template.
        template_kwargs: handed to the chat template at every rendering.
        trust_remote_code: run tokenizer code that ships with the model.

    Raises:
        ConfigError: no tokenizer there, one without a vocabulary, or it has no chat template.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not trust_remote_code:
            _check_files(folder)
        path = str(folder)
    elif path.startswith((".", "/", "~")):
        raise ConfigError(f"model folder {path} does not exist (actor_rollout_ref.model.path)")
    tokenizer = _from_pretrained(path, trust_remote_code)
    if custom_chat_template is not None:
        try:
            tokenizer.chat_template = Path(custom_chat_template).expanduser().read_text("utf-8")
        except OSError as error:
            raise ConfigError(f"chat template {custom_chat_template}: {error.strerror}") from error
    if not tokenizer.chat_template:
        raise ConfigError(
            f"the tokenizer at {path!r} has no chat template; give one by "
            "actor_rollout_ref.model.custom_chat_template=FILE.jinja"
        )
    _check_syntax(tokenizer, custom_chat_template or f"of the tokenizer at {path!r}")
    return ChatTokenizer(tokenizer, template_kwargs=template_kwargs, end_ids=_generation_end_ids(path))


def _check_files(folder: Path) -> None:
    """Refuses a folder without a vocabulary: transformers makes an empty tokenizer of it without a word."""
    names = {path.name for path in folder.iterdir()}
    if not names & {*_VOCABULARY_FILES} and not any(name.endswith((".model", ".tiktoken")) for name in names):
        raise ConfigError(
            f"no tokenizer found at {str(folder)!r}: the folder has none of {', '.join(_VOCABULARY_FILES)}; name "
            "one that has them by actor_rollout_ref.model.tokenizer_path"
        )


def _from_pretrained(path: str, trust_remote_code: bool) -> Any:
    def make() -> Any:
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        logging.getLogger("transformers").setLevel(logging.ERROR)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)

    try:
        is_plain = Path(path).is_dir() and not trust_remote_code
        tokenizer = tokenizer_cache.load(Path(path), make) if is_plain else make()
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(
            f"no tokenizer found at {path!r}: {reason.rstrip('.')}. actor_rollout_ref.model.path (or tokenizer_path) "
            "must be a folder with tokenizer files, or a hub name that can be reached."
        ) from error
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        backend.no_truncation()  # a length in tokenizer.json would cut prompts without a word
        backend.no_padding()
    return tokenizer


def _check_syntax(tokenizer: Any, where: str) -> None:
    """Raises `ConfigError` for a chat template that is not Jinja; what it does with messages is seen later."""
    templates = tokenizer.chat_template
    for source in templates.values() if isinstance(templates, dict) else [templates]:
        try:
            tokenizer.apply_chat_template([{"role": "user"}], chat_template=source, tokenize=False)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template {where} is broken: line {error.lineno}: {error.message}"
            ) from error
        except Exception:  # no template has to take a message without content
            continue


def _generation_end_ids(path: str) -> list[int]:
    """End tokens that `generation_config.json` names, where there is one."""
    if (folder := Path(path)).is_dir():
        try:
            eos = orjson.loads((folder / "generation_config.json").read_bytes()).get("eos_token_id")
        except FileNotFoundError:
            return []
        except (OSError, orjson.JSONDecodeError, AttributeError) as error:
            raise ConfigError(f"{path}: generation_config.json cannot be read ({error})") from error
    else:
        from transformers import GenerationConfig

        try:
            eos = GenerationConfig.from_pretrained(path).eos_token_id
        except OSError:
            return []
    return [i for i in (eos if isinstance(eos, list) else [eos]) if isinstance(i, int)]


def _texts(value: Any) -> Iterator[str]:
    """All texts in messages or tools, but for images."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        if value.get("type") != "image_url":
            yield from _texts(list(value.values()))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)
