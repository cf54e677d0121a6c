"""Finds out what kind of server stands behind a URL, and which model and tokenizer it serves."""

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rollstream.engine.http_server import CONNECTION_KWARGS, HttpServer
from rollstream.engine.replica import ReplicaUnavailableError
from rollstream.errors import ConfigError, EngineError, EngineLostError, unknown_name

logger = logging.getLogger(__name__)

_PAUSE_S = 1.0
KINDS = ("sglang", "vllm", "openai")
_ROUTES = ("/get_model_info", "/version", "/v1/models")


class DetectedServer(NamedTuple):
    """A server behind a URL."""

    url: str
    """The one that answered."""
    urls: list[str]
    """All that were given, without `/v1`."""
    kind: str
    """sglang (also `rollstream serve`), vllm or openai: a name of an engine."""
    models: tuple[str, ...]
    """Its names for the models that it serves."""
    tokenizer: str | None
    """A folder of this machine, or a name on the hub; None: the server does not say, or it is elsewhere."""


async def detect_server(urls: Sequence[str], *, timeout: float, kind: str | None = None) -> DetectedServer:
    """Asks the first server that answers. It may still be starting, so this waits for `timeout` seconds.

    Args:
        urls: base URLs, with or without `/v1`.
        timeout: seconds.
        kind: known already: only models and tokenizer are found out.

    Raises:
        ConfigError: it is of no kind that is known.
        EngineLostError: no server answered.
    """
    if kind is not None and kind not in KINDS:
        raise unknown_name("kind of server", kind, KINDS)
    urls = [url.rstrip("/").removesuffix("/v1").rstrip("/") for url in urls]
    servers = [HttpServer(url, CONNECTION_KWARGS) for url in urls]
    deadline, said = time.monotonic() + timeout, False
    try:
        while True:
            for server in servers:
                try:
                    answers = [await _ask(server, route) for route in _ROUTES]
                    return read_answers(server.url, urls, answers, kind)
                except ReplicaUnavailableError as error:
                    cause = error
            if time.monotonic() > deadline:
                raise EngineLostError(f"nothing answers for {timeout:g} s: {cause}")
            if not said:
                logger.warning("no server answers yet, it has %g s: %s", timeout, cause)
            said = True
            await asyncio.sleep(_PAUSE_S)
    finally:
        await asyncio.gather(*(server.close() for server in servers))


def read_answers(
    url: str, urls: list[str], answers: Sequence[dict[str, Any]], kind: str | None
) -> DetectedServer:
    """A server by its answers to `_ROUTES`; empty where it has no such route. Raises `ConfigError`."""
    info, version, models = answers
    if kind is None:
        by_route = {"sglang": info, "vllm": version.get("version"), "openai": models}
        kind = next((name for name, answer in by_route.items() if answer), None)
    if kind is None:
        raise ConfigError(
            f"{url} has no /get_model_info (SGLang, `rollstream serve`), /version (vLLM) or /v1/models "
            "(OpenAI's API): name its kind (sglang, vllm, openai)"
        )
    listed = models.get("data")
    cards = [card for card in listed if isinstance(card, dict)] if isinstance(listed, list) else []
    tokenizer = info.get("tokenizer_path") or info.get("model_path")
    if kind == "vllm" and cards:
        tokenizer = tokenizer or cards[0].get("root")
    is_usable = isinstance(tokenizer, str) and (
        Path(tokenizer).is_dir() or not tokenizer.startswith((".", "/", "~"))
    )
    names = [info["model_path"]] if info.get("model_path") else [card.get("id") for card in cards]
    return DetectedServer(url, urls, kind, tuple(map(str, names)), tokenizer if is_usable else None)


async def _ask(server: HttpServer, route: str) -> dict[str, Any]:
    try:
        return await server.ask(route)
    except ReplicaUnavailableError:
        raise
    except EngineError:  # it refuses, or answers with something else
        return {}
