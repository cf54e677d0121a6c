"""What `rollstream serve` does: loads a model, serves it until it is told to stop."""

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from rollstream.chat.parsers.registry import get_parser
from rollstream.chat.tokenizer import load_tokenizer
from rollstream.engine.base import Engine
from rollstream.engine.registry import create_engine, data_deciding_kwargs
from rollstream.errors import ConfigError
from rollstream.serving.app import LAST_ANSWERS_S, Server
from rollstream.serving.model import ServedModel
from rollstream.stderr_log import log_to_stderr
from rollstream.stop_signals import StoppedEarly, stop_signals

_PARENT_POLL_S = 1.0
"""Where the kernel does not tell: twice a second would be no better for anybody."""


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
    return engine, ServedModel(name, path, options.engine, tokenizer, parser, keeps_prefixes)


async def _serve(engine: Engine, model: ServedModel, options: argparse.Namespace, parent_pid: int) -> None:
    signals = stop_signals(LAST_ANSWERS_S)
    server = Server(
        engine,
        model,
        host=options.host,
        port=options.port,
        max_queue=options.max_queue,
        weights=options.weights,
        api_key=_api_key(options.api_key_env),
        allowed_hosts=options.allow_host,
        insecure=options.insecure,
    )
    watch = asyncio.create_task(_stop_with_parent(parent_pid)) if options.exit_with_parent else None
    try:
        await signals.unless_stopped(engine.start())
        await server.start()
        _announce(server.url, engine, model, as_json=options.json)
        await signals.requested.wait()
    except StoppedEarly:
        pass
    finally:
        if watch is not None:
            watch.cancel()
        await server.stop()


async def _stop_with_parent(parent_pid: int) -> None:
    await parent_ended(parent_pid)
    os.kill(os.getpid(), signal.SIGTERM)


def _announce(url: str, engine: Engine, model: ServedModel, *, as_json: bool) -> None:
    """Tells a program, or a person, that requests are answered now."""
    if as_json:
        line = orjson.dumps({"url": url, "pid": os.getpid(), "model": model.name}).decode()
    else:
        length = engine.capabilities.max_model_len
        line = f"{model.name} ({model.engine}, {length} tokens) at {url}, for OpenAI's clients {url}/v1"
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


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


async def parent_ended(parent_pid: int) -> None:
    """Returns when the parent is gone.

    On Linux the kernel says so, by a file descriptor of the process. (Its signal for children,
    `PR_SET_PDEATHSIG`, comes also when only the *thread* ends that started them.)

    Args:
        parent_pid: `os.getppid()` as early as possible: a parent that ended before is noticed, too.
    """
    if sys.platform == "linux" and os.getppid() == parent_pid:
        with contextlib.suppress(OSError):  # an old kernel, or it has just ended
            await _readable(os.pidfd_open(parent_pid))
            return
    while os.getppid() == parent_pid:  # noqa: ASYNC110  nothing here tells when it changes
        await asyncio.sleep(_PARENT_POLL_S)


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
