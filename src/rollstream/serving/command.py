"""What `rollstream serve` does: loads a model, serves it until it is told to stop."""

import argparse
import asyncio
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import orjson

from rollstream.chat.parsers.registry import get_parser
from rollstream.chat.tokenizer import load_tokenizer
from rollstream.command_line import read_key_values
from rollstream.engine.base import Engine
from rollstream.engine.registry import create_engine, data_deciding_kwargs
from rollstream.errors import ConfigError
from rollstream.serving.app import LAST_ANSWERS_S, Server
from rollstream.serving.model import ServedModel
from rollstream.stderr_log import log_to_stderr
from rollstream.stop_signals import StoppedEarly, stop_signals
from rollstream.web import Access

_PARENT_POLL_S = 0.5


def run(options: argparse.Namespace, parent_pid: int) -> int:
    """Executes a parsed command line.

    Args:
        options: as `main.add_arguments` has them.
        parent_pid: of the process with which this one ends, if asked to.

    Raises:
        ConfigError: what was asked for cannot work.
        EngineError: the engine cannot start. Its message names a log, which stays then.
    """
    log_to_stderr()
    log_dir = options.log_dir or Path(tempfile.mkdtemp(prefix="rollstream-serve-"))
    is_needed = options.log_dir is not None
    try:
        engine, model = _load(options, log_dir)
        asyncio.run(_serve(engine, model, options, parent_pid))
    except BaseException:
        is_needed = is_needed or any(log_dir.iterdir())
        raise
    finally:
        if not is_needed:
            shutil.rmtree(log_dir, ignore_errors=True)
    return 0


def _load(options: argparse.Namespace, log_dir: Path) -> tuple[Engine, ServedModel]:
    """The engine, not started, and what is known of its model."""
    path = str(Path(options.model).expanduser())
    parser = get_parser(options.tool_parser)
    kwargs = read_key_values(options.engine_kwargs)
    engine = create_engine(
        options.engine,
        model_path=path,
        max_model_len=options.max_model_len,
        engine_kwargs=kwargs,
        log_dir=log_dir,
    )
    return engine, ServedModel(
        name=options.served_model_name or Path(path).resolve().name,
        path=path,
        engine=options.engine,
        tokenizer=load_tokenizer(path),
        parser=parser,
        keeps_prefixes=bool(data_deciding_kwargs(options.engine, kwargs).get("enable_prefix_caching")),
    )


async def _serve(engine: Engine, model: ServedModel, options: argparse.Namespace, parent_pid: int) -> None:
    signals = stop_signals(LAST_ANSWERS_S)
    server = Server(
        engine,
        model,
        host=options.host,
        port=options.port,
        max_queue=options.max_queue,
        weights=options.weights,
        access=Access(
            _api_key(options.api_key_env),
            allowed_hosts=frozenset(options.allow_host),
            insecure=options.insecure,
        ),
    )
    watch = asyncio.create_task(_stop_with(parent_pid)) if options.exit_with_parent else None
    try:
        await signals.unless_stopped(engine.start())
        url = await server.start()
        if options.json:
            line = orjson.dumps({"url": url, "pid": os.getpid(), "model": model.name}).decode()
        else:
            length = engine.capabilities.max_model_len
            line = f"{model.name} ({model.engine}, {length} tokens) at {url}, for OpenAI's clients {url}/v1"
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
        await signals.requested.wait()
    except StoppedEarly:
        pass
    finally:
        if watch is not None:
            watch.cancel()
        await server.stop()


async def _stop_with(parent_pid: int) -> None:
    """Ends this process as a signal would when its parent is gone.

    (The kernel's signal for it, `PR_SET_PDEATHSIG`, comes also when only the thread ends that started this.)
    """
    while os.getppid() == parent_pid:  # noqa: ASYNC110  nothing tells when it changes
        await asyncio.sleep(_PARENT_POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)


def _api_key(name: str | None) -> str | None:
    if name is not None and not os.environ.get(name):
        raise ConfigError(f"--api-key-env: no {name!r} in the environment")
    return None if name is None else os.environ[name]
