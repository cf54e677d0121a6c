"""The trainer's weights on their way to the engine: through a folder, or shared and changed in place."""

import asyncio
import concurrent.futures
import contextlib
import copy
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollstream.errors import ConfigError, WeightUpdateError
from rollstream.integrations.trl.environment import EnvironmentGroups, unwrap_engine
from rollstream.integrations.trl.session import Running, cause_first
from rollstream.scratch import ScratchFolder


class FolderWeights:
    """Writes the weights as safetensors into a folder, for an engine (or servers) that reads them there.

    Args:
        accelerator: the trainer's.
        parent: where folders are made; None: this machine's temporary folder.
    """

    def __init__(self, accelerator: Any, parent: str | None) -> None:
        self._accelerator = accelerator
        self._parent = parent
        self._root: ScratchFolder | None = None
        self._folders: list[Path] = []

    def write(self, model: Any, step: int) -> str | None:
        """Writes the weights of a step; in the main process, the folder's path.

        All processes call it: gathering a sharded model takes all of them. The folders before it stay, for an
        engine that is started again reads the weights that it had: `forget_older` when it has the new ones.

        Raises:
            ConfigError: the model is a PEFT model, whose adapters no engine here takes.
            WeightUpdateError: the folder cannot be written.
        """
        unwrapped = self._accelerator.unwrap_model(model)
        if hasattr(unwrapped, "peft_config"):
            raise ConfigError("a PEFT model's weights cannot be given to the engine: train the whole model")
        state = self._accelerator.get_state_dict(model)
        if not self._accelerator.is_main_process:
            return None
        try:
            if self._root is None:
                self._root = ScratchFolder("weights", self._parent)
            folder = self._root.path / str(step)
            with _without_progress_bar():
                unwrapped.save_pretrained(folder, state_dict=state)
        except OSError as error:
            raise WeightUpdateError(
                f"weights of step {step} cannot be written to {self._parent or tempfile.gettempdir()}: "
                f"{error} (weights_dir)"
            ) from error
        if folder not in self._folders:
            self._folders.append(folder)
        return str(folder)

    def forget_older(self) -> None:
        """The engine has the weights that were written last: the folders before go."""
        while len(self._folders) > 1:
            shutil.rmtree(self._folders.pop(0), ignore_errors=True)

    def close(self) -> None:
        """Removes the folders."""
        if self._root is not None:
            self._root.cleanup()
            self._root = None
            self._folders.clear()


class SharedWeights:
    """Holds the `hf` engine still while the optimizer changes the weights that both have.

        hold(version) -> optimizer.step() -> release()

    Args:
        groups: whose engine it is.
        running: the thread in which they run.
        timeout: seconds for the engine to come to a halt.
    """

    def __init__(self, groups: EnvironmentGroups, running: Running, timeout: float) -> None:
        self._groups = groups
        self._running = running
        self._timeout = timeout
        self._release: asyncio.Event | None = None
        self._holding: concurrent.futures.Future[None] | None = None

    def hold(self, version: int) -> None:
        """Returns when no step of the engine runs. Tokens sampled after `release` are of `version`.

        Raises:
            WeightUpdateError: the engine did not come to a halt in time.
            GenerationFailedError: generation has ended, with the cause.
        """
        engine = unwrap_engine(self._groups.engine)
        if engine is None:
            return  # nothing has been generated yet
        halted: concurrent.futures.Future[asyncio.Event] = concurrent.futures.Future()

        async def hold_still() -> None:
            release = asyncio.Event()
            async with engine.changing_weights(version):
                halted.set_result(release)
                await release.wait()

        with cause_first(self._running):
            holding = self._running.submit(hold_still())
            holding.add_done_callback(lambda done: _pass_on(done, halted))
            try:
                self._release = halted.result(self._timeout)
            except TimeoutError:
                holding.cancel()
                raise WeightUpdateError(
                    f"the engine did not halt within {self._timeout:g} s for version {version} "
                    "(weight_sync_timeout)"
                ) from None
            except Exception as error:
                raise WeightUpdateError(f"the engine did not halt for version {version}: {error}") from error
        self._holding = holding

    def release(self) -> None:
        """The weights have been changed; the engine goes on.

        Raises:
            WeightUpdateError: it does not.
            GenerationFailedError: generation has ended meanwhile, with the cause.
        """
        holding = self._holding
        if holding is None:
            return
        self.let_go()
        with cause_first(self._running):
            try:
                holding.result(self._timeout)
            except TimeoutError:
                raise WeightUpdateError(f"the engine did not go on within {self._timeout:g} s") from None
            except Exception as error:  # cut off, or its own
                raise WeightUpdateError(
                    f"the engine did not go on: {type(error).__name__}: {error}"
                ) from error

    def let_go(self) -> None:
        """Lets the engine go on if it is held, whatever becomes of it. Raises nothing."""
        holding, self._holding = self._holding, None
        if holding is None or self._release is None or self._groups.loop is None:
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits any more
            self._groups.loop.call_soon_threadsafe(self._release.set)


def lend(model: Any) -> Any:
    """The model's modules around the same weights, without the `forward` that TRL has put on the model.

    TRL's forward calls the module it was made for, which the engine's copy is not.
    """
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    copied = copy.deepcopy(model, shared)
    for module in copied.modules():
        module.__dict__.pop("forward", None)
    return copied


@contextlib.contextmanager
def _without_progress_bar() -> Iterator[None]:
    """One a step is drawn over the trainer's own."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _pass_on(
    done: "concurrent.futures.Future[None]", halted: "concurrent.futures.Future[asyncio.Event]"
) -> None:
    """An engine that fails before it has halted says so to whoever waits for that."""
    if not halted.done():
        error = WeightUpdateError("it was stopped") if done.cancelled() else done.exception()
        halted.set_exception(error or WeightUpdateError("it went on by itself"))
