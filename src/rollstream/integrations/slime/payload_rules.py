"""Rules for the payload of a job. They are pure, but look where paths lead.

A payload comes over the wire: it never names a file, program or server that the operator did not allow at start.
"""

import contextlib
import difflib
import ipaddress
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollstream.errors import ConfigError

_MAX_KEYS = 256
"""To compare an unknown one with the known ones takes about 0.1 ms."""
_MAX_COUNT = 2**31 - 1
_DEMO_MODEL = Path(__file__).resolve().parents[2] / "demo" / "model"
"""The model that `rollstream serve` has by default."""

_REPLACED = ("remote_buffer_url", "rollstream")
"""The server puts its own in their place."""
_REFUSED = {"tool_config_path", "function_tool_path", "agent_loop_config_path"}

_PARAMETERS = frozenset(
    {
        "task_type", "remote_engine_url", "remote_buffer_url", "input_file", "num_repeat_per_sample",
        "num_epoch", "num_process", "sampling_params", "skip_instance_ids", "tokenizer_path", "tools",
        "engine", "model", "agent_name", "prompt_key", "max_tokens", "max_prompt_length", "max_attempts",
        "attempt_timeout", "engine_timeout", "max_assistant_turns", "max_user_turns", "tool_format",
        "group_size", "min_valid_group_size_ratio", "min_valid_item_size_ratio", "group_timeout_seconds",
        "min_timeout_group_size_ratio", "raw",
    }
)  # fmt: skip
"""The known ones. A generator file may have others of its own."""

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
        self._inputs = [one.expanduser().resolve() for one in inputs] or [Path.cwd().resolve()]
        self._engines = {_origin(url, "engines") for url in engines}
        self._forbidden = forbidden.expanduser().resolve()
        self.folders = {"inputs": [str(one) for one in self._inputs], "forbidden": str(self._forbidden)}
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
        task = payload.get("task_type")
        if not isinstance(task, str) or not task:
            raise ConfigError(f"task_type: {task!r:.100}, want the TASK_TYPE of a generator file, as text")
        for key in ("num_epoch", "num_process"):
            _check_count(key, payload.get(key))
        skips = [] if payload.get("skip_instance_ids") is None else payload["skip_instance_ids"]
        if not isinstance(skips, list) or not all(type(one) in (int, str) for one in skips):
            raise ConfigError(
                f"skip_instance_ids: {skips!r:.100}, want a list of instance ids (whole numbers or texts)"
            )
        if not isinstance(payload.get("sampling_params"), Mapping | None):
            raise ConfigError(f"sampling_params: {payload['sampling_params']!r:.100}, want an object")
        self._check_tools(payload.get("tools"))
        self._check_engines(payload.get("remote_engine_url"), shown_token)
        checked = {key: value for key, value in payload.items() if key not in _REPLACED}
        checked["skip_instance_ids"] = skips
        warnings = _unknown_keys(checked)
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
        is_below = any(path.is_relative_to(one) for one in self._inputs)
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

    def _check_tools(self, given: Any) -> None:
        if given is None:
            return
        if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
            raise ConfigError(f"tools: {given!r:.100}, want a list of names in the server's --tools FILE")
        for name in given:
            if name not in self._tools:
                known = ", ".join(sorted(self._tools)) or "none, the server has no --tools FILE"
                raise ConfigError(f"tools: {name!r:.100} is not known. Known: {known}")


def _unknown_keys(payload: Mapping[str, Any]) -> list[str]:
    """A line for each key that the buffer does not know: misspelt, it would do nothing."""
    lines = []
    for key in payload.keys() - _PARAMETERS:
        close = difflib.get_close_matches(key, _PARAMETERS, n=1, cutoff=0.85) if len(key) < 64 else []
        hint = f"; did you mean {close[0]!r}?" if close and close[0] not in payload else ""
        lines.append(f"{key[:64]!r} is left to the generator file: the buffer does not know it{hint}")
    return sorted(lines)


def _check_count(key: str, value: Any) -> None:
    number = value
    if isinstance(value, str) and re.fullmatch(r"\s*[0-9]{1,10}\s*", value):
        number = int(value)  # slime's trainer sends texts
    if value is not None and (type(number) is not int or not 1 <= number <= _MAX_COUNT):
        raise ConfigError(f"{key}: {value!r:.100}, want a whole number from 1 to {_MAX_COUNT}")


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
