"""What `rollstream serve` does: loads a model, serves it until it is told to stop."""

import argparse
import asyncio
import contextlib
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from rollstream.chat.parsers.registry import get_parser
from rollstream.chat.tokenizer import load_tokenizer
from rollstream.engine.base import Engine
from rollstream.engine.continuation import ContinuingEngine
from rollstream.engine.registry import create_engine, data_deciding_kwargs
from rollstream.errors import ConfigError
from rollstream.serving.model import ServedModel
from rollstream.serving.parent import parent_ended
from rollstream.serving.server import Server
from rollstream.stderr_log import log_to_stderr
from rollstream.stop_signals import stop_signals

_LOG = logging.getLogger(__name__)

_REPORT_S = 10.0
"""Between two lines about requests: a person reads along, and a thousand requests are one line."""


def run(options: argparse.Namespace, parent_pid: int) -> int:
    """Executes a parsed command line.

    Args:
        options: as `main.add_arguments` has them.
        parent_pid: of the process with which this one ends, if asked to.

    Raises:
        ConfigError: what was asked for cannot work.
        EngineError: the engine cannot start.
    """
    log_to_stderr()
    with _log_folder(options.log_dir) as log_dir:
        engine, model = _load(options, log_dir)
        asyncio.run(_serve(engine, model, options, parent_pid))
    return 0


def _load(options: argparse.Namespace, log_dir: Path) -> tuple[Engine, ServedModel]:
    """The engine, not started, and what is known of its model."""
    path = str(Path(options.model).expanduser())
    name = options.served_model_name or Path(path).resolve().name
    parser = get_parser(options.tool_parser)
    kwargs = _read_engine_kwargs(options.engine_kwargs)
    for option, least in (("max_queue", 1), ("max_model_len", 2), ("port", 0)):
        value = getattr(options, option)
        if value is not None and value < least:
            raise ConfigError(f"--{option.replace('_', '-')} is {value}, want {least} or more")
    try:
        engine = create_engine(
            options.engine,
            model_path=path,
            max_model_len=options.max_model_len,
            engine_kwargs=kwargs,
            log_dir=log_dir,
        )
        keeps_prefixes = bool(data_deciding_kwargs(options.engine, kwargs).get("enable_prefix_caching"))
        tokenizer = load_tokenizer(path)
    except ConfigError as error:
        # The same engines are set up by `rollstream generate`, whose word for it this is.
        raise ConfigError(str(error).replace("actor_rollout_ref.model.path", "--model")) from error
    # Who is in flight when weights are updated goes on with the new ones.
    return ContinuingEngine(engine), ServedModel(
        name, path, options.engine, tokenizer, parser, keeps_prefixes
    )


async def _serve(engine: Engine, model: ServedModel, options: argparse.Namespace, parent_pid: int) -> None:
    stop = stop_signals()
    owned: list[asyncio.Task[None]] = []
    if options.exit_with_parent:
        owned.append(asyncio.create_task(_stop_with_parent(parent_pid, stop)))
    server = Server(
        engine,
        model,
        host=options.host,
        port=options.port,
        max_queue=options.max_queue,
        api_key=_api_key(options.api_key_env),
        allowed_hosts=options.allow_host,
        insecure=options.insecure,
    )
    try:
        if not await _unless(stop, engine.start()):
            return
        await server.start()
        owned.append(asyncio.create_task(_report(server)))
        _announce(server, model, as_json=options.json)
        await stop.wait()
        _LOG.info("stopping")
    finally:
        for task in owned:
            task.cancel()
        await asyncio.gather(*owned, return_exceptions=True)
        await server.stop()


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Awaits `work`; False when `stop` came first, and `work` was cancelled."""
    task, waiter = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        waiter.cancel()
        task.cancel()
        await asyncio.wait({task, waiter})


async def _stop_with_parent(parent_pid: int, stop: asyncio.Event) -> None:
    await parent_ended(parent_pid)
    stop.set()


def _announce(server: Server, model: ServedModel, *, as_json: bool) -> None:
    """Tells a program, or a person, that requests are answered now."""
    if as_json:
        line = orjson.dumps({"url": server.url, "pid": os.getpid(), "model": model.name}).decode()
    else:
        capabilities = server.service.capabilities
        line = (
            f"{model.name} ({model.engine}, {capabilities.max_model_len} tokens) at {server.url}, "
            f"for OpenAI's clients {server.url}/v1"
        )
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def _report(server: Server) -> None:
    """Logs what was answered, now and then, and nothing while nothing happens."""
    service = server.service
    requests, tokens = 0, 0
    while True:
        await asyncio.sleep(_REPORT_S)
        if (server.counts.total, service.generated_tokens) != (requests, tokens):
            _LOG.info(
                "%d requests answered, %d tokens sampled in %g s; %d samples in flight",
                server.counts.total - requests,
                service.generated_tokens - tokens,
                _REPORT_S,
                service.running + service.waiting,
            )
            requests, tokens = server.counts.total, service.generated_tokens


def _read_engine_kwargs(words: Sequence[str]) -> dict[str, Any]:
    for word in words:
        if "=" not in word:
            raise ConfigError(f"--engine-kwargs: {word!r} is not of the form k=v")
    try:
        values = OmegaConf.to_container(OmegaConf.from_dotlist(list(words)))
    except (OmegaConfBaseException, YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"--engine-kwargs cannot be read: {reason}") from error
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _api_key(name: str | None) -> str | None:
    if name is None:
        return None
    if not os.environ.get(name):
        raise ConfigError(f"--api-key-env: no {name!r} in the environment")
    return os.environ[name]


@contextlib.contextmanager
def _log_folder(chosen: Path | None) -> Iterator[Path]:
    """A folder for the engine's log. A temporary one with a log stays after an error, which names it."""
    if chosen is not None:
        yield chosen
        return
    folder = Path(tempfile.mkdtemp(prefix="rollstream-serve-"))
    try:
        yield folder
    except BaseException:
        with contextlib.suppress(OSError):  # it is not empty
            folder.rmdir()
        raise
    shutil.rmtree(folder, ignore_errors=True)
