"""Rules for the payload of a job. They are pure, but look where paths lead.

A payload comes over the wire: it never names a file, program or server that the operator did not allow at start.
"""

import contextlib
import ipaddress
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from rollstream.buffer.groups import GroupSettings
from rollstream.errors import ConfigError

_MAX_KEYS = 256
_DEMO_MODEL = Path(__file__).resolve().parents[2] / "demo" / "model"
"""The model that `rollstream serve` has by default."""

_REPLACED = ("remote_buffer_url", "rollstream")
"""The server puts its own in their place."""
_REFUSED = {"tool_config_path", "function_tool_path", "agent_loop_config_path"}

_Count = Annotated[int, Meta(ge=1, lt=2**31)]


class _Payload(msgspec.Struct):
    """The parameters that the buffer reads. slime's trainer sends numbers as texts."""

    task_type: Annotated[str, Meta(min_length=1)]
    num_epoch: _Count | None = None
    num_process: _Count | None = None
    skip_instance_ids: list[int | str] | None = None
    sampling_params: dict[str, Any] | None = None
    tools: list[str] | None = None


_KNOWN = {
    *_Payload.__struct_fields__,
    *("remote_engine_url", "remote_buffer_url", "input_file", "num_repeat_per_sample", "tokenizer_path"),
    *("engine", "model", "agent_name", "prompt_key", "max_tokens", "max_prompt_length", "max_attempts"),
    *("attempt_timeout", "engine_timeout", "max_assistant_turns", "max_user_turns", "tool_format"),
    *GroupSettings.__struct_fields__,
}
"""A generator file may have further ones of its own."""

_URL = re.compile(
    r"(https?)://([a-z0-9.-]+|\[[0-9a-f:.]+])(?::([0-9]{1,5}))?(?:/[\w.~%/-]*)?", re.ASCII | re.IGNORECASE
)
"""No user, no query, no backslash: every client finds the same host in it."""
_HUB_NAME = re.compile(r"\w[\w.-]{0,95}(/\w[\w.-]{0,95})?", re.ASCII)


class PayloadRules:
    """The rules of an operator.

    Args:
        inputs: Folders with input files and tokenizers; none: the working directory.
        engines: URLs of inference servers, beside those on this machine; scheme, host and port count.
        forbidden: The server's own folder.
        tools: The names in the operator's tool file.

    Raises:
        ConfigError: An engine's URL is none.
    """

    def __init__(
        self,
        inputs: Sequence[Path] = (),
        engines: Sequence[str] = (),
        *,
        forbidden: Path,
        tools: frozenset[str] = frozenset(),
    ) -> None:
        self._inputs = [folder.expanduser().resolve() for folder in inputs] or [Path.cwd().resolve()]
        self._engines = {_origin(url, "engines") for url in engines}
        self._forbidden = forbidden.expanduser().resolve()
        self.folders = {"inputs": [str(folder) for folder in self._inputs], "forbidden": str(self._forbidden)}
        """The arguments that make rules of these folders in another process."""
        self._tools = tools

    def check(self, payload: Any, shown_token: bool) -> tuple[dict[str, Any], list[str]]:
        """The payload as a generator gets it, and warnings. Checked again, it stays the same.

        Raises:
            ConfigError: A value is wrong, or not allowed; names its key.
        """
        if not isinstance(payload, Mapping):
            raise ConfigError("the payload of a job must be an object")
        if len(payload) > _MAX_KEYS:
            raise ConfigError(f"the payload has {len(payload)} keys, at most {_MAX_KEYS} are allowed")
        for key in payload.keys() & _REFUSED:
            raise ConfigError(
                f"{key}: a payload names no files of tools or agent loops; name tools in `tools`"
            )
        try:
            typed = msgspec.convert(dict(payload), _Payload, strict=False)
        except msgspec.ValidationError as error:
            text, _, at = str(error).rstrip("`").partition(" - at `$.")
            raise ConfigError(f"{at.partition('[')[0] or 'task_type'}: {text}") from None
        if unknown := set(typed.tools or ()) - self._tools:
            known = ", ".join(sorted(self._tools)) or "none, the server has no --tools FILE"
            raise ConfigError(f"tools: {min(unknown)!r:.100} is not known. Known: {known}")
        self._check_engines(payload.get("remote_engine_url"), shown_token)
        checked = {key: value for key, value in payload.items() if key not in _REPLACED}
        checked["skip_instance_ids"] = payload.get("skip_instance_ids") or []
        warnings = [
            f"{key[:64]!r} is left to the generator file: the buffer does not know it"
            for key in sorted(checked.keys() - _KNOWN)
        ]
        if checked.get("input_file") is not None:
            checked["input_file"] = self._input_file(checked["input_file"])
        if checked.get("tokenizer_path") is not None:
            given = checked.pop("tokenizer_path")
            if (tokenizer := self.tokenizer(given)) is not None:
                checked["tokenizer_path"] = tokenizer
            else:
                warnings.append(
                    f"tokenizer_path: {given!r:.200} is left out: no folder below {self._folders()}, and no "
                    "name on the hub. The engine says which tokenizer it has"
                )
        return checked, warnings

    def _input_file(self, given: Any) -> str:
        path = self._resolve("input_file", given)
        if not self._is_allowed(path):
            raise ConfigError(
                f"input_file: {given!r:.200} is not below {self._folders()}, or is in the server's own --dir; "
                "--inputs DIR allows other folders"
            )
        if not path.exists():
            raise ConfigError(f"input_file: there is no {path}")
        return str(path)

    def tokenizer(self, given: Any) -> str | None:
        """A tokenizer that may be loaded: a folder, or a name on the hub. Raises `ConfigError`."""
        path = self._resolve("tokenizer_path", given)
        is_name = _HUB_NAME.fullmatch(given) is not None and ".." not in given
        if is_name and not path.exists() and not Path(given).exists():
            return str(given)
        allowed = self._is_allowed(path) or path == _DEMO_MODEL
        return str(path) if allowed and path.is_dir() else None

    def are_operators(self, urls: Any) -> bool:
        """Whether all of these engines, at least one, were named at start."""
        urls = urls if isinstance(urls, list) else [urls] * (urls is not None)
        return bool(urls) and all(_origin(url, "remote_engine_url") in self._engines for url in urls)

    def _resolve(self, key: str, given: Any) -> Path:
        if not isinstance(given, str) or not given:
            raise ConfigError(f"{key}: {given!r:.100}, want a path, as text")
        try:
            path = (self._inputs[0] / given).resolve()
            # What comes behind a loop of links is left as it was: `loop/../link` would still be a link.
            if path.resolve() != path:
                raise RuntimeError("a loop of links")
            path.exists()
        except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL, a loop of links
            raise ConfigError(f"{key}: {given!r:.200} is no path that can be looked up: {error}") from None
        return path

    def _is_allowed(self, path: Path) -> bool:
        is_below = any(path.is_relative_to(folder) for folder in self._inputs)
        return is_below and not path.is_relative_to(self._forbidden)

    def _folders(self) -> str:
        return " or ".join(map(str, self._inputs))

    def _check_engines(self, given: Any, shown_token: bool) -> None:
        if given is None:
            return
        urls = given if isinstance(given, list) else [given]
        if not urls:
            raise ConfigError("remote_engine_url: an empty list")
        for url in urls:
            origin = _origin(url, "remote_engine_url")
            if not (shown_token or origin in self._engines or _is_own(origin[1])):
                raise ConfigError(
                    f"remote_engine_url: {url:.200} is not on the server's machine. Start the server with "
                    f"--engines {origin[0]}://{origin[1]}:{origin[2]}, or with a token, and send it"
                )


def _origin(url: Any, key: str) -> tuple[str, str, int]:
    """Scheme, host and port of an engine's URL."""
    found = _URL.fullmatch(url) if isinstance(url, str) else None
    if found is not None:
        scheme, host, port = (part and part.lower() for part in found.groups())
        number = int(port or {"http": 80, "https": 443}[scheme])
        with contextlib.suppress(ValueError):
            if host.startswith("["):
                host = f"[{ipaddress.IPv6Address(host[1:-1])}]"
            if 0 < number < 2**16:
                return scheme, host, number
    raise ConfigError(
        f"{key}: {url!r:.200}, want http://host:port, without user and password, or a list of such URLs"
    )


def _is_own(host: str) -> bool:
    """Whether it is this machine: slime's trainer names its engines by the machine's address."""
    if host in ("localhost", "[::1]"):
        return True
    try:
        address = ipaddress.IPv4Address(host)
    except ValueError:
        return False
    if address.is_loopback:
        return True
    with contextlib.suppress(OSError), socket.socket() as trial:
        trial.bind((host, 0))  # only an address of one's own can be taken
        return not (address.is_unspecified or address.is_multicast or address.is_reserved)
    return False
