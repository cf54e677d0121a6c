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
from rollstream.generation.replicas import launches_on_ray
from rollstream.generation.stopping import StopSignals
from rollstream.store.records import EncodedRollout
from rollstream.store.writer import StoreWriter
from rollstream.trajectory import Failure, Rollout

if TYPE_CHECKING:
    from rollstream.generation.execution import Execution
    from rollstream.generation.setup import Prepared

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


def check_executor_installed(settings: Settings) -> None:
    """Refuses an executor whose packages are missing, before anything is made on disk.

    Raises:
        ConfigError: with the command that installs them.
    """
    if settings.generation.executor == "ray" or launches_on_ray(settings):
        import_ray()
    if (elsewhere := executor_elsewhere(settings)) is not None:
        elsewhere.check_installed()
