"""The engine behind `remote_engine_url`: what kind of server it is, and which tokenizer belongs to it."""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from rollstream.buffer.generator_settings import GeneratorSettings
from rollstream.engine.base import Engine
from rollstream.engine.registry import create_engine
from rollstream.errors import ConfigError, EngineLostError

_LOG = logging.getLogger(__name__)

_ASK_TIMEOUT_S = 20.0
_PAUSE_S = 1.0
"""Between looks at a server that is not there yet: a trainer starts its buffer before its servers."""


@dataclass(frozen=True, slots=True)
class FoundEngine:
    """A server's engine, not started."""

    engine: Engine
    kind: str
    """sglang, vllm or openai."""
    tokenizer_path: str | None
    """What the server says, if that is a folder of this machine or looks like a hub's name."""


@dataclass(frozen=True, slots=True)
class _Answers:
    """What a server says of itself; None: it has no such route."""

    model_info: dict[str, Any] | None
    version: dict[str, Any] | None
    models: dict[str, Any] | None


async def find_engine(settings: GeneratorSettings) -> FoundEngine:
    """Asks the first server that answers what it is, and makes the engine for all of them.

    Raises:
        ConfigError: it is none that is known, or serves several models and none is named.
        EngineLostError: it did not answer for `engine_timeout`.
    """
    url, answers = await _ask(settings.engine_urls, settings.engine_timeout)
    kind = settings.engine or kind_of(answers)
    if kind is None:
        raise ConfigError(
            f"remote_engine_url: {url} has no /get_model_info (SGLang, `rollstream serve`), /version (vLLM) "
            "or /v1/models (OpenAI's API): name its kind by the parameter engine (sglang, vllm, openai)"
        )
    info = answers.model_info or {}
    model, urls = settings.model, settings.engine_urls
    if kind == "openai":
        model = model or _only_model(url, answers.models)
        urls = tuple(f"{one}/v1" for one in urls)
    said = info.get("tokenizer_path") or info.get("model_path")
    _LOG.info("%s is %s server", url, {"openai": "an OpenAI", "sglang": "an SGLang"}.get(kind, "a vLLM"))
    engine = create_engine(kind, model_path=model, server_urls=urls, log_dir=Path())
    usable = isinstance(said, str) and (Path(said).is_dir() or not said.startswith((".", "/", "~")))
    return FoundEngine(engine, kind, str(said) if usable else None)


def kind_of(answers: _Answers) -> str | None:
    """Which engine speaks to a server that answers like this; None: none."""
    if answers.model_info is not None:
        return "sglang"
    if answers.version is not None and "version" in answers.version:
        return "vllm"
    return "openai" if answers.models is not None else None


def _only_model(url: str, models: dict[str, Any] | None) -> str:
    served = models.get("data") if models else None
    names = (
        [str(one.get("id")) for one in served if isinstance(one, dict)] if isinstance(served, list) else []
    )
    if len(names) != 1:
        there = f"serves {', '.join(names[:10])}" if names else "does not say which models it serves"
        raise ConfigError(f"{url} {there}: name one by the parameter model")
    return names[0]


async def _ask(urls: Sequence[str], timeout: float) -> tuple[str, _Answers]:
    deadline = time.monotonic() + timeout
    last: Exception = TimeoutError()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(_ASK_TIMEOUT_S)) as session:
        while True:
            for url in urls:
                try:
                    return url, _Answers(
                        await _get(session, f"{url}/get_model_info"),
                        await _get(session, f"{url}/version"),
                        await _get(session, f"{url}/v1/models"),
                    )
                except (aiohttp.ClientError, TimeoutError) as error:
                    _LOG.info("nothing answers at %s yet (%s)", url, type(error).__name__)
                    last = error
            if time.monotonic() > deadline:
                raise EngineLostError(
                    f"remote_engine_url: nothing answers at {', '.join(urls)} for {timeout:g} s "
                    f"({type(last).__name__}: {last})"
                ) from last
            await asyncio.sleep(_PAUSE_S)


async def _get(session: aiohttp.ClientSession, url: str) -> dict[str, Any] | None:
    async with session.get(url) as response:
        payload = await response.read()
    if response.status in (502, 503, 504):  # a router whose servers are not there yet
        raise aiohttp.ClientConnectionError(f"{url} answers {response.status}")
    if response.status != 200:
        return None
    try:
        answer = orjson.loads(payload)
    except orjson.JSONDecodeError:
        return None
    return answer if isinstance(answer, dict) else None
