"""What `rollstream gateway serve` does: an engine, a sink, and the sessions between them, over HTTP."""

import argparse
import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
from omegaconf import DictConfig, OmegaConf

from rollstream.aio import finish_despite_cancellation
from rollstream.buffer.client import AsyncBufferClient
from rollstream.buffer.command import read_token
from rollstream.config.load import compose, refuse_keys, to_settings, to_stored_yaml
from rollstream.data.prompts import PromptDataset
from rollstream.data.stored import STORED_RUN
from rollstream.errors import ConfigError
from rollstream.gateway.app import SESSION_SHARE, Endpoint
from rollstream.gateway.recorder import SessionLimits
from rollstream.generation.identity import build_identity
from rollstream.generation.logs import log_to_file
from rollstream.generation.plan import make_plan, manifest_for, peek_manifest
from rollstream.rollout.setup import RolloutSetup, build_setup, launches_on_ray, load_agents
from rollstream.scratch import ScratchFolder
from rollstream.sessions.service import LOOP, SessionService, render_error, translate
from rollstream.sessions.sinks import BufferSink, RunSink, SessionRows
from rollstream.stderr_log import log_to_stderr
from rollstream.stop_signals import StoppedEarly, StopSignals, stop_signals
from rollstream.store.manifest import Manifest
from rollstream.store.run_dir import RunDirectory, lock_run, open_run
from rollstream.store.writer import StoreWriter
from rollstream.user_calls import in_daemon_thread
from rollstream.web import Access, ServerLimits, WebServer

logger = logging.getLogger(__name__)

_EVERY_S = 10.0
"""Between two progress lines, and two writes of `checkpoint.json`."""

_LAST_ANSWERS_S = 5.0
"""For answers that are being sent, when the server ends."""

_BUFFER_S = 20.0
"""How long a request waits for a buffer that is away; its client may send it again."""

_NO_LIMIT_S = 1e7
"""Of a session: what is left alone expires."""

_SPARE_CONNECTIONS = 256
"""Beside four for each session."""

_USED = (
    *("seed", "engine_timeout", "save_batch_size", "pull_timeout", "retry_failed", "log_level"),
    *("client_sampling", "strict", "train_side_calls", "max_calls", "max_bytes"),
)
"""Keys of `generation` and `gateway` that have an effect here."""

_AGENT, _TURNS = "actor_rollout_ref.rollout.agent", "actor_rollout_ref.rollout.multi_turn"
_UNUSED = (
    *("data.tool_config_path", "trainer.logger"),
    *(f"{_AGENT}.{name}" for name in ("default_agent_loop", "agent_loop_config_path", "num_workers")),
    *(f"{_TURNS}.{name}" for name in ("tool_config_path", "function_tool_path", "interaction_config_path")),
    *(f"{_TURNS}.{name}" for name in ("show_tools", "max_assistant_turns", "max_user_turns")),
)


def run(options: argparse.Namespace) -> int:
    """Serves until SIGINT or SIGTERM; returns the exit code. Raises `RollstreamError`."""
    for name, least in (("expire_seconds", 0.1), ("grace_seconds", 0.0), ("max_sessions", 1)):
        if not least <= getattr(options, name) <= _NO_LIMIT_S:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(options, name)}, want {least} or more")
    if options.public_url is not None and not options.public_url.startswith(("http://", "https://")):
        raise ConfigError(f"--public-url {options.public_url}: want http://HOST:PORT")
    if options.public_url is not None and options.token_file is None and not options.insecure:
        raise ConfigError(
            "--public-url: others reach it, its /v1 too: give a --token-file, or let everybody in with --insecure"
        )
    log_to_stderr()
    asyncio.run(_run(read_config(options), options))
    return 0


def read_config(options: argparse.Namespace) -> DictConfig:
    """The configuration of a command line. Raises `ConfigError`, also for keys that have no effect here."""
    config = compose(options.overrides, layers=options.config)
    keys = [
        *_UNUSED,
        *(f"generation.{key}" for key in config.generation if key not in _USED),
        *(f"gateway.{key}" for key in config.gateway if key not in _USED),
    ]
    refuse_keys(
        config,
        keys,
        "no effect on `rollstream gateway serve`: agent programs bring their loop and their tools",
    )
    resolved = OmegaConf.create(OmegaConf.to_container(config, resolve=True))
    assert isinstance(resolved, DictConfig)
    return resolved


def _as_executed(given: DictConfig, weights: Sequence[Path]) -> DictConfig:
    """The configuration with what makes a rollout of a session, and what servers that are launched need."""
    config: Any = given.copy()
    launch = config.actor_rollout_ref.rollout.launch
    if launch.server == "rollstream" and weights:
        launch.args = {"weights": [str(folder) for folder in weights], **launch.args}
    config.actor_rollout_ref.rollout.agent.default_agent_loop = LOOP
    config.generation.attempt_timeout, config.generation.max_attempts = _NO_LIMIT_S, 1
    assert isinstance(config, DictConfig)
    return config


async def _run(given: DictConfig, options: argparse.Namespace) -> None:
    signals = stop_signals(options.grace_seconds + _LAST_ANSWERS_S)
    with contextlib.suppress(StoppedEarly):
        async with AsyncExitStack() as stack:
            await _serve(stack, given, options, signals)


async def _serve(
    stack: AsyncExitStack, given: DictConfig, options: argparse.Namespace, signals: StopSignals
) -> None:
    token = read_token(options.token_file)
    setup, dataset, manifest = await signals.unless_stopped(_prepare(given, options.weights))
    stack.push_async_callback(setup.close)
    settings, generation, gateway = setup.settings, setup.settings.generation, setup.settings.gateway
    rows = SessionRows(dataset, settings.data.prompt_key, settings.data.ground_truth_key)
    sink: RunSink | BufferSink
    if options.buffer is None:
        directory = await _open_run(stack, given, setup, manifest)
        size, timeout = generation.save_batch_size, generation.pull_timeout
        writer = StoreWriter(directory, save_batch_size=size, pull_timeout=timeout)
        sink = RunSink(directory, writer, rows, retry_failed=generation.retry_failed)
        stack.push_async_callback(_merge, directory, sink, signals)
        stack.push_async_callback(sink.close)
        await sink.start()
        log_dir = directory.paths.logs
    else:
        try:
            client = AsyncBufferClient(options.buffer, give_up_after=_BUFFER_S)
        except ValueError as error:
            raise ConfigError(f"--buffer: {error}") from error
        await stack.enter_async_context(client)
        sink = BufferSink(client, rows, task_type=options.task_type)
        log_dir = stack.enter_context(ScratchFolder("gateway")).path
    engine = setup.create_engine(log_dir)
    stack.push_async_callback(engine.close)
    await signals.unless_stopped(setup.start_engine(engine, longest=False))
    if isinstance(sink, RunSink) and setup.sampling.logprobs:
        directory.note_logprobs(engine.capabilities.logprobs)
    endpoint = Endpoint(
        "rollstream",
        setup.agent_resources(engine).max_model_len,
        client_sampling=gateway.client_sampling,
        strict=gateway.strict,
        max_sessions=options.max_sessions,
    )
    service = SessionService(
        setup.make_worker(engine, [LOOP]).worker.run,
        sink,
        endpoint,
        train_side_calls=gateway.train_side_calls,
        limits=SessionLimits(gateway.max_calls, gateway.max_bytes),
        engine_wait=generation.engine_timeout,
        expire_s=options.expire_seconds,
        max_sessions=options.max_sessions,
        update_weights=engine.update_weights if engine.capabilities.update_weights else None,
        weights=tuple(options.weights),
    )
    public = urlsplit(options.public_url or "")
    connections = 4 * options.max_sessions + _SPARE_CONNECTIONS
    server = WebServer(
        service.routes(),
        access=Access(
            token,
            allowed_hosts=frozenset({*options.allow_host, *filter(None, [public.hostname])}),
            insecure=options.insecure,
        ),
        limits=ServerLimits(max_connections=connections, client_share=SESSION_SHARE),
        translate=translate,
        render_error=render_error,
        on_answer=service.count,
    )
    url = await server.start(options.host, options.port)
    stack.push_async_callback(server.stop, _LAST_ANSWERS_S)
    endpoint.url = (options.public_url or url).rstrip("/")
    ready = orjson.dumps({"url": url, "pid": os.getpid()}).decode()
    sys.stdout.write(f"{ready if options.json else f'gateway at {url}'}\n")
    sys.stdout.flush()
    logger.info("sessions are stored in %s", options.buffer or settings.trainer.default_local_dir)
    await _until_told(service, sink, signals, options.grace_seconds)


async def _until_told(
    service: SessionService, sink: RunSink | BufferSink, signals: StopSignals, grace_s: float
) -> None:
    """Returns when the sessions are over. Raises what breaks the sink."""
    asked = asyncio.create_task(signals.requested.wait())
    tasks = [asyncio.create_task(service.watch()), asyncio.create_task(_report(service, sink))]
    ends: set[asyncio.Future[Any]] = {asked, *tasks}
    if isinstance(sink, RunSink):
        ends.add(sink.writer.failed)
    try:
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for one in done:
            one.result()
        logger.info("ending: %s; open ones get %g s to finish", service.progress(), grace_s)
    finally:
        if dropped := await service.drain(grace_s if signals.signal is not None else 0.0):
            logger.warning("%d sessions did not finish: nothing of them is recorded", dropped)
        for task in (asked, *tasks):
            task.cancel()
        await asyncio.gather(asked, *tasks, return_exceptions=True)
        logger.info("%s", service.progress())


async def _merge(run: RunDirectory, sink: RunSink, signals: StopSignals) -> None:
    """Makes the artifact of a run that is whole, when everything else has ended."""
    if signals.signal is not None and sink.all_done():
        signals.take_time()
        await in_daemon_thread(run.merge)


async def _report(service: SessionService, sink: RunSink | BufferSink) -> None:
    """Says now and then how it goes, where something has changed."""
    said = ""
    while True:
        if (line := service.progress()) != said:
            said = line
            logger.info("%s", line)
            if isinstance(sink, RunSink):
                await finish_despite_cancellation(asyncio.to_thread(sink.write_checkpoint))
        await asyncio.sleep(_EVERY_S)


async def _prepare(
    given: DictConfig, weights: Sequence[Path]
) -> tuple[RolloutSetup, PromptDataset | None, Manifest]:
    """Everything that is decided before the engine starts, with the prompt rows, where they are configured."""
    config = _as_executed(given, weights)
    settings = to_settings(config)
    if launches_on_ray(settings):
        raise ConfigError("servers on Ray: launch them by themselves, and give their URLs (server_urls)")
    if config.data.train_files or config.train_tasks or config.data.sources:
        plan = await make_plan(config, peek_manifest(config), groups=False)
        names = chain(plan.settings.data.files, *(one.files for one in plan.dataset.sources))
        if any(name.startswith(STORED_RUN) for name in names):
            raise ConfigError(
                "data.train_files: a session cannot go on with a stored conversation: its program begins it"
            )
        plan.say_unscored()
        await plan.setup.prepare_reward(plan.scored_sources)
        return plan.setup, plan.dataset, plan.manifest
    setup = await build_setup(settings, await load_agents(settings))
    setup.agents.check({LOOP}, setup.tokenizer, show_tools=False, images=False)
    agents = setup.agents.identity({LOOP}, settings.actor_rollout_ref.rollout.multi_turn.format)
    identity = build_identity(setup, agents, fingerprint="rows come with sessions", rows=0)
    return setup, None, manifest_for(given, setup, None, identity)


async def _open_run(
    stack: AsyncExitStack, given: DictConfig, setup: RolloutSetup, manifest: Manifest
) -> RunDirectory:
    """Opens the run directory. Raises `RunDirectoryError`."""
    settings = setup.settings
    path = Path(settings.trainer.default_local_dir).expanduser()
    tokenizer, text = setup.stored_tokenizer(), to_stored_yaml(given)
    run = await in_daemon_thread(
        lambda: open_run(lock_run(path), path, manifest, config_yaml=text, tokenizer=tokenizer)
    )
    stack.callback(run.close)
    stack.enter_context(log_to_file(run.paths.logs, settings.generation.log_level))
    return run
