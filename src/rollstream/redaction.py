"""Secrets in configurations: known by the names of their keys, hidden or found. Pure."""

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"

_SECRET = re.compile(
    r"(?:^|_)(?:keys?|token|pat|cookie|auth|pass|pwd)$"
    r"|(?:api|access|secret|private)key$|(?:api|access|auth)token$|(?:password|secret)$"
    r"|(?:^|_)(?:secrets?|password|passwd|passphrase|credentials?|authorization)(?:_|$)"
)
"""Names of secrets: `api_key`, `HF_TOKEN`, `client_secret_1`; not `stop_token_ids` or `tokenizer_path`."""

_NOT_SECRET = frozenset(
    (
        *("prompt_key", "image_key", "video_key", "audio_key", "answer_key", "label_key", "response_key"),
        *("bos_token", "eos_token", "pad_token", "end_token", "stop_token", "special_token"),
    )
)
"""Keys of ours, of verl and of rewards that name a column, or a token of the vocabulary."""

_ASSIGNMENT = re.compile(r"((?:\+\+?|--?)?[\w./@:-]+=).+", re.DOTALL)
"""A word of a command line: `+engine_kwargs.api_key=x`, `--api-key=x`."""

_NAMED = re.compile(r"""([\w.-]+)(["']?\s*[:=]\s*)("[^"]*"|'[^']*'|[^\s"'?;&,{}\[\]]+)""")
"""A key and its value within a text: in such a word's mapping, in the parameters of a URL."""

_USER_INFO = re.compile(r"(?<=://)[^/\s?#]+@")
"""What stands before the host of a URL: a user, and a password or a token."""


def redact(tree: Any, *, name: str = "") -> Any:
    """A copy of a configuration tree with `***` for what must not leave the run directory.

    Hidden are the values of keys that are named like secrets, also within texts (`key=value`, `key: value`), and
    in URLs what stands before the host.

    Args:
        tree: mappings, lists and plain values.
        name: of the key that has it.
    """
    if tree is None or isinstance(tree, bool):
        return tree  # a switch is none: `use_auth_token: true` takes the one that is stored
    if names_secret(name):
        return HIDDEN
    if isinstance(tree, Mapping):
        return {str(key): redact(value, name=str(key)) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [redact(value, name=name) for value in tree]
    if isinstance(tree, str):
        word = _ASSIGNMENT.fullmatch(tree)
        if word is not None and any(map(names_secret, word[1].rstrip("=").split("."))):
            return f"{word[1]}{HIDDEN}"
        return _NAMED.sub(_without_secret, _USER_INFO.sub(f"{HIDDEN}@", tree))
    return tree


def find_secret(tree: Any, path: str) -> str | None:
    """Where a configuration tree has a secret, by what `redact` would hide; None where it has none.

    Args:
        tree: mappings, lists and plain values.
        path: of the tree, dotted.
    """
    name = path.rpartition(".")[2]
    if isinstance(tree, Mapping) and not names_secret(name):
        found = (find_secret(value, f"{path}.{key}") for key, value in tree.items())
        return next((one for one in found if one is not None), None)
    if isinstance(tree, list | tuple):
        return next((path for value in tree if find_secret(value, path) is not None), None)
    hidden = redact(tree, name=name)
    return path if tree and hidden is not tree and hidden != tree else None


def _without_secret(found: re.Match[str]) -> str:
    secret = any(map(names_secret, found[1].split(".")))
    return f"{found[1]}{found[2]}{HIDDEN}" if secret else found[0]


def names_secret(name: str) -> bool:
    """Whether a key, an argument or a variable of this name holds a secret.

    `api-key` and `HF_TOKEN` do; `long-prefill-token-threshold` and `TOKENIZERS_PARALLELISM` do not.
    """
    # `apiKey` and `X-Api-Key` are two words and three.
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().replace("-", "_")
    return words not in _NOT_SECRET and _SECRET.search(words) is not None
