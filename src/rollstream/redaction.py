"""Secrets in configurations: known by their names and by how they look, hidden or found. Pure."""

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"

_LAST_WORDS = frozenset(
    ("key", "keys", "token", "pat", "authorization", "cookie", "auth", "pass", "pwd", "passwd")
)
_LAST_ENDINGS = (
    "apikey",
    "accesskey",
    "secretkey",
    "privatekey",
    "accesstoken",
    "authtoken",
    "apitoken",
    "password",
    "secret",
)
_WORDS = frozenset(
    ("secret", "secrets", "password", "passwd", "passphrase", "credential", "credentials", "authorization")
)
"""Of names of secrets: `api_key`, `HF_TOKEN`, `client_secret_1`; not `stop_token_ids` or `tokenizer_path`."""

_NOT_SECRET = frozenset(("prompt_key", "image_key", "video_key", "audio_key"))
"""Keys of ours, and of verl, that name a column."""

_ASSIGNMENT = re.compile(r"((?:\+\+?|--?)?[\w./@:-]+=)(.+)", re.DOTALL)
"""A word of a command line: `+engine_kwargs.api_key=x`, `--api-key=x`."""

_INNER = re.compile(r"""(["']?)([\w.-]+)\1(\s*:\s*)("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^\s,{}\[\]]+)""")
"""A key and its value in such a word's mapping: `{api_key: x, env: {"HF_TOKEN": "y"}}`."""

_USER_INFO = re.compile(r"(?<=://)[^/\s?#@]+(?:@[^/\s?#@]+)*@")
"""What stands before the host of a URL: a user, and a password or a token."""

_QUERY = re.compile(r"([?&;][\w.-]*(?:key|token|secret|password|passwd|signature|sig|auth)=)[^&\s#]+", re.I)
"""Parameters of a URL by which access is given."""

_SHAPES = re.compile(
    r"\b(?:sk-[\w-]{16,}|hf_\w{16,}|gh[oprsu]_\w{16,}|github_pat_\w{16,}|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}"
    r"|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)|(?<=Bearer )\S+|(?<=Basic )\S+",
)
"""Secrets known by how they look, wherever they stand."""


def redact(tree: Any, *, name: str = "") -> Any:
    """A copy of a configuration tree with `***` for what must not leave the run directory.

    Hidden are the values of keys that are named like secrets, also in words `key=value`, in URLs what stands
    before the host and parameters that give access, and texts that look like a well-known kind of key.

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
        if (word := _ASSIGNMENT.fullmatch(tree)) is not None:
            if any(map(names_secret, word[1].rstrip("=").split("."))):
                return f"{word[1]}{HIDDEN}"
            if word[2].lstrip()[:1] in ("{", "["):
                tree = word[1] + _INNER.sub(_without_secret, word[2])
        text = _USER_INFO.sub(f"{HIDDEN}@", tree)
        return _SHAPES.sub(HIDDEN, _QUERY.sub(rf"\g<1>{HIDDEN}", text))
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


def _without_secret(inner: re.Match[str]) -> str:
    return f"{inner[1]}{inner[2]}{inner[1]}{inner[3]}{HIDDEN}" if names_secret(inner[2]) else inner[0]


def names_secret(name: str) -> bool:
    """Whether a key, an argument or a variable of this name holds a secret.

    `api-key` and `HF_TOKEN` do; `long-prefill-token-threshold` and `TOKENIZERS_PARALLELISM` do not.
    """
    if name.lower() in _NOT_SECRET:
        return False
    # `apiKey` and `X-Api-Key` are two words and three.
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().replace("-", "_").split("_")
    last = words[-1]
    return last in _LAST_WORDS or last.endswith(_LAST_ENDINGS) or not _WORDS.isdisjoint(words)
