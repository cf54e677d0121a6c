"""Executors by name: whether what they need is installed, and those that live above this room.

An executor that belongs to another system is part of `integrations`, which this room does not know. It is
named here by where it is found, and imported when a run asks for it.
"""

import importlib
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from omegaconf import DictConfig

from rollstream.config.settings import Settings
from rollstream.engine.ray_package import import_ray
from rollstream.errors import ConfigError
from rollstream.generation.replicas import launches_on_ray
from rollstream.stop_signals import StopSignals
from rollstream.store.records import EncodedRollout
from rollstream.store.writer import StoreWriter
from rollstream.trajectory import Failure, Rollout

if TYPE_CHECKING:
    from rollstream.generation.execution import Execution
    from rollstream.generation.setup import Prepared

EMBEDDED_ENGINES = ("hf", "openvino")
"""Engines that run in the process that uses them."""

_ELSEWHERE = {"verl": "rollstream.integrations.verl.execution:VerlExecutor"}
"""Executors above this room: module and class."""


class ExecutorElsewhere(Protocol):
    """An executor with rows and agent loops of its own kind."""

    def check_installed(self) -> None:
        """Raises `ConfigError` with the command that installs what is missing. Takes milliseconds."""
        ...

    async def prepare(self, config: DictConfig) -> "Prepared":
        """As `setup.prepare`."""
        ...

    async def start(
        self,
        prepared: "Prepared",
        writer: StoreWriter,
        *,
        log_dir: Path,
        stop: StopSignals,
        stack: AsyncExitStack,
        on_durable: Callable[[Rollout | EncodedRollout | Failure], None],
    ) -> "Execution":
        """As `execution.start_execution`."""
        ...


def executor_elsewhere(settings: Settings) -> ExecutorElsewhere | None:
    """The executor of a run, if it lives above this room."""
    found = _ELSEWHERE.get(settings.generation.executor)
    if found is None:
        return None
    module, _, name = found.partition(":")
    executor: ExecutorElsewhere = getattr(importlib.import_module(module), name)()
    return executor


def check_executor(settings: Settings) -> None:
    """Refuses an executor that cannot work, before anything is made on disk.

    Raises:
        ConfigError: naming what to change, or the command that installs what is missing.
    """
    _check_processes(settings)
    if settings.generation.executor == "ray" or launches_on_ray(settings):
        import_ray()
    if (elsewhere := executor_elsewhere(settings)) is not None:
        elsewhere.check_installed()


def _check_processes(settings: Settings) -> None:
    """Refuses `generation.processes` where it cannot work. Raises `ConfigError`."""
    generation, engine = settings.generation, settings.actor_rollout_ref.rollout.name
    if generation.processes == 1:
        return
    if generation.executor != "local":
        raise ConfigError(
            f"generation.processes={generation.processes} is for generation.executor=local; with "
            f"{generation.executor} set actor_rollout_ref.rollout.agent.num_workers"
        )
    if engine in EMBEDDED_ENGINES:
        raise ConfigError(
            f"generation.processes={generation.processes}: engine {engine!r} runs in the process that uses it "
            "and takes all cores; for several processes start it as a server (rollstream serve) and give its "
            "URL by actor_rollout_ref.rollout.server_urls, or leave processes at 1"
        )
