"""Finds out what kind of server stands behind a URL, and which model and tokenizer it serves."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import orjson

from rollstream.errors import ConfigError, EngineLostError, unknown_name

_REQUEST_TIMEOUT_S = 20.0
_PAUSE_S = 1.0
KINDS = ("sglang", "vllm", "openai")
_ROUTES = ("/get_model_info", "/version", "/v1/models")


class DetectedServer(NamedTuple):
    """What stands behind a URL."""

    url: str
    """The one that answered."""
    urls: list[str]
    """All that were given, without `/v1`."""
    kind: str
    """sglang (also `rollstream serve`), vllm or openai: a name of an engine."""
    models: tuple[str, ...]
    """What it calls the models that it serves."""
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
    deadline = time.monotonic() + timeout
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(_REQUEST_TIMEOUT_S)) as session:
        while True:
            for url in urls:
                try:
                    answers = [await _get(session, url + route) for route in _ROUTES]
                    return read_answers(url, urls, answers, kind)
                except (aiohttp.ClientError, TimeoutError) as error:
                    cause = f"{type(error).__name__}: {error}"
            if time.monotonic() > deadline:
                raise EngineLostError(f"nothing answers at {', '.join(urls)} for {timeout:g} s ({cause})")
            await asyncio.sleep(_PAUSE_S)


def read_answers(
    url: str, urls: list[str], answers: Sequence[dict[str, Any] | None], kind: str | None
) -> DetectedServer:
    """What a server is by its answers to `_ROUTES`; None where it has no such route. Raises `ConfigError`."""
    info, version, models = answers
    if kind is None:
        by_route = {
            "sglang": info is not None,
            "vllm": "version" in (version or {}),
            "openai": models is not None,
        }
        kind = next((name for name, is_there in by_route.items() if is_there), None)
    if kind is None:
        raise ConfigError(
            f"{url} has no /get_model_info (SGLang, `rollstream serve`), /version (vLLM) or /v1/models "
            "(OpenAI's API): name its kind (sglang, vllm, openai)"
        )
    info = info or {}
    listed = (models or {}).get("data")
    cards = [card for card in listed if isinstance(card, dict)] if isinstance(listed, list) else []
    said = info.get("tokenizer_path") or info.get("model_path")
    if kind == "vllm" and cards:
        said = said or cards[0].get("root")
    is_usable = isinstance(said, str) and (Path(said).is_dir() or not said.startswith((".", "/", "~")))
    names = [info["model_path"]] if info.get("model_path") else [card.get("id") for card in cards]
    return DetectedServer(url, urls, kind, tuple(map(str, names)), said if is_usable else None)


async def _get(session: aiohttp.ClientSession, url: str) -> dict[str, Any] | None:
    async with session.get(url, allow_redirects=False) as response:
        payload = await response.read()
    if response.status in (502, 503, 504):  # a router whose servers are not there yet
        raise aiohttp.ClientConnectionError(f"{url} answers {response.status}")
    answer = None
    with contextlib.suppress(orjson.JSONDecodeError):
        answer = orjson.loads(payload) if response.status == 200 else None
    return answer if isinstance(answer, dict) else None
