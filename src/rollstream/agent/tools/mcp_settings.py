"""How MCP servers are reached: settings from a tool file, or from a `mcpServers` JSON file."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from rollstream.errors import ConfigError

_STDIO = ("stdio",)
_HTTP = ("http", "streamable-http", "streamable_http", "streamableHttp")
_IGNORED = ("alwaysAllow", "autoApprove", "description", "name")
"""What other programs write into `mcpServers` for themselves."""
_KNOWN = ("command", "args", "env", "cwd", "url", "headers", "type", "transport", "disabled")


@dataclass(frozen=True, slots=True)
class McpServerSettings:
    """One server: a command that speaks over its standard streams, or an URL that speaks streamable HTTP."""

    name: str
    """For messages."""
    command: str | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Besides PATH, HOME and the like; nothing else of our environment is passed on. May be secret."""
    cwd: str | None = None
    url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """May be secret."""

    @property
    def identity(self) -> list[Any]:
        """What of it decides what the tools do. Secrets and places are left out: they may change."""
        return [self.command, list(self.args), self.url]


def read_mcp_server(name: str, settings: Any, where: str) -> McpServerSettings | None:
    """Reads one server's settings, as a tool file or `mcpServers` has them.

    Args:
        name: For messages; "" takes the command or the url.
        settings: `command`, `args`, `env`, `cwd`; or `url`, `headers`.
        where: What they are, for messages.

    Returns:
        The settings; None when they say `disabled: true`.

    Raises:
        ConfigError: An unknown key, a wrong type, neither or both of command and url, or a transport that is
            not supported.
    """
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{where}: {settings!r} is no mapping with command or url")
    for key in settings:
        if key not in (*_KNOWN, *_IGNORED):
            near = difflib.get_close_matches(str(key), _KNOWN, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{where}: unknown key {key!r}{hint} Known: {', '.join(_KNOWN)}")
    if settings.get("disabled"):
        return None
    command, url = settings.get("command"), settings.get("url")
    if (command is None) == (url is None):
        raise ConfigError(f"{where}: needs either command (and args, env, cwd) or url (and headers)")
    transport = settings.get("type") or settings.get("transport")
    if transport is not None and transport not in (_STDIO if url is None else _HTTP):
        raise ConfigError(
            f"{where}: transport {transport!r} is not supported; a command speaks stdio, an url http "
            "(streamable HTTP)"
        )
    args = settings.get("args") or []
    if not isinstance(args, list):
        raise ConfigError(f"{where}: args is {args!r}, want a list")
    return McpServerSettings(
        name or str(command or url),
        command=_text(command, f"{where}: command"),
        args=tuple(str(argument) for argument in args),
        env=_texts(settings.get("env"), f"{where}: env"),
        cwd=_text(settings.get("cwd"), f"{where}: cwd"),
        url=_text(url, f"{where}: url"),
        headers=_texts(settings.get("headers"), f"{where}: headers"),
    )


def load_mcp_servers(path: str | Path, where: str) -> list[McpServerSettings]:
    """Reads the servers of a JSON file `{"mcpServers": {name: settings}}`, without those that are disabled.

    Raises:
        ConfigError: No such file, not JSON, no server, or settings that cannot be used.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"{where}: no such file: {file} (looked in {file.absolute().parent})")
    try:
        content = orjson.loads(file.read_bytes())
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{where}: {file} is not JSON ({error})") from error
    servers = content.get("mcpServers") if isinstance(content, dict) else None
    if not isinstance(servers, dict):
        raise ConfigError(f"{where}: {file} needs mcpServers, a mapping of names to servers")
    read = [read_mcp_server(name, settings, f"{where}: {file}, {name}") for name, settings in servers.items()]
    enabled = [settings for settings in read if settings is not None]
    if not enabled:
        raise ConfigError(f"{where}: {file} has no server that is not disabled")
    return enabled


def _text(value: Any, where: str) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        raise ConfigError(f"{where} is {value!r}, want text")
    return value


def _texts(value: Any, where: str) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or any(isinstance(item, Mapping | list) for item in value.values()):
        raise ConfigError(f"{where} must be a mapping of names to texts")
    return {str(key): str(item) for key, item in value.items()}
