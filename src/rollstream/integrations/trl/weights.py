"""The trainer's weights on their way to the engine: through a folder, or shared and changed in place."""

import asyncio
import concurrent.futures
import contextlib
import copy
import functools
import shutil
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollstream.engine.weight_channel import WeightChannel
from rollstream.engine.weight_deltas import DeltaChannel
from rollstream.engine.weight_probe import own_logprobs, write_probe
from rollstream.errors import WeightUpdateError
from rollstream.integrations.trl.groups import EnvironmentGroups, unwrap_engine
from rollstream.scratch import ScratchFolder
from rollstream.training.ahead import BatchesAhead


class FolderWeights:
    """Writes the weights as safetensors into a folder, for an engine (or servers) that reads them there.

    Of a PEFT model those are its active adapter's. The model's own log-probs are put beside them: whatever loads the
    folder is compared with those.

    Args:
        accelerator: the trainer's.
        parent: where folders are made; None: this machine's temporary folder.
        kept: folders, the newest of which the engine has, that `forget_older` leaves.
        channel: by which servers get them in place of a folder.
    """

    def __init__(
        self,
        accelerator: Any,
        parent: str | None,
        kept: int = 1,
        channel: WeightChannel | DeltaChannel | None = None,
    ) -> None:
        self._accelerator = accelerator
        self._kept = kept
        self._channel = channel
        self._parent = parent
        self._root: ScratchFolder | None = None
        self._folders: list[Path] = []

    def write(self, model: Any, step: int) -> str:
        """Writes the weights of a step; returns what the engine is told, which is "" in all but the main process.

        All processes call it: gathering a sharded model takes all of them. The folders before it stay, for an
        engine that is started again reads the weights that it had: `forget_older` when it has the new ones.

        Raises:
            WeightUpdateError: the folder cannot be written.
        """
        unwrapped = self._accelerator.unwrap_model(model)
        state = self._accelerator.get_state_dict(model)
        logprobs = own_logprobs(model, unwrapped.get_input_embeddings().num_embeddings)
        if not self._accelerator.is_main_process:
            return ""
        if self._channel is not None:
            return self._channel.put(unwrapped, state, logprobs=logprobs)
        from transformers.utils import logging

        shows_bars = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()  # it would be drawn over the trainer's own at each step
        try:
            if self._root is None:
                self._root = ScratchFolder("weights", self._parent)
            folder = self._root.path / str(step)
            source, adapter = folder, getattr(unwrapped, "active_adapter", None)
            if not hasattr(unwrapped, "get_base_model"):  # of peft
                unwrapped.save_pretrained(folder, state_dict=state)
            else:
                # Else peft asks the hub at each step whether the embedding was resized.
                own: dict[str, Any] = {"selected_adapters": [adapter], "save_embedding_layers": False}
                unwrapped.save_pretrained(folder, state_dict=state, **own)
                source = folder if adapter == "default" else folder / str(adapter)  # as peft lays them out
            if logprobs:
                write_probe(source, logprobs)
        except OSError as error:
            where = self._parent or tempfile.gettempdir()
            raise WeightUpdateError(
                f"weights of step {step} cannot be written to {where}: {error} (weights_dir)"
            ) from error
        finally:
            if shows_bars:
                logging.enable_progress_bar()
        if folder not in self._folders:
            self._folders.append(folder)
        return str(source)

    def forget_older(self) -> None:
        """The engine has the weights that were written last: older folders go, but for those that are kept."""
        while len(self._folders) > self._kept:
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
        batches: in whose thread they run.
        timeout: seconds for the engine to come to a halt.
    """

    def __init__(self, groups: EnvironmentGroups, batches: BatchesAhead, timeout: float) -> None:
        self._groups = groups
        self._batches = batches
        self._timeout = timeout
        self._holding: concurrent.futures.Future[None] | None = None
        self._go_on: Callable[[], object] = lambda: None

    def hold(self, version: int) -> None:
        """Returns when no step of the engine runs. Tokens sampled after `release` are of `version`.

        Raises:
            WeightUpdateError: the engine did not come to a halt in time.
            GenerationFailedError: generation has ended, with the cause.
        """
        engine = unwrap_engine(self._groups.engine)
        if engine is None:
            return  # nothing has been generated yet
        halted: concurrent.futures.Future[Callable[[], object]] = concurrent.futures.Future()

        async def hold_still() -> None:
            release, loop = asyncio.Event(), asyncio.get_running_loop()
            async with engine.changing_weights(version):
                halted.set_result(lambda: loop.call_soon_threadsafe(release.set))
                await release.wait()

        with self._batches.cause_first():
            holding = self._batches.submit(hold_still())
            both: list[concurrent.futures.Future[Any]] = [halted, holding]
            concurrent.futures.wait(both, self._timeout, concurrent.futures.FIRST_COMPLETED)
            if halted.done():
                self._holding, self._go_on = holding, halted.result()
                return
            holding.cancel()
            try:
                holding.result(0.0)
            except Exception as error:  # its own; or `CancelledError`: it was too late
                raise WeightUpdateError(
                    f"the engine did not halt within {self._timeout:g} s (weight_sync_timeout) for version "
                    f"{version}: {type(error).__name__}: {error}"
                ) from error

    def release(self) -> None:
        """The weights have been changed; the engine goes on.

        Raises:
            WeightUpdateError: it does not.
            GenerationFailedError: generation has ended meanwhile, with the cause.
        """
        if (holding := self._holding) is None:
            return
        self.let_go()
        with self._batches.cause_first():
            try:
                holding.result(self._timeout)
            except Exception as error:  # too late, cut off, or its own
                message = f"the engine did not go on: {type(error).__name__}: {error}"
                raise WeightUpdateError(message) from error

    def let_go(self) -> None:
        """Lets the engine go on if it is held, whatever becomes of it. Raises nothing."""
        if self._holding is not None:
            self._holding = None
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits any more
                self._go_on()


def adapter_rank(model: Any) -> int:
    """The greatest rank of a PEFT model's active adapter; 0 of a model that is trained whole."""
    if not hasattr(model, "get_base_model"):  # of peft
        return 0
    config = model.peft_config[model.active_adapter]
    ranks: list[int] = [config.r, *(getattr(config, "rank_pattern", None) or {}).values()]
    return max(ranks)


def lend(model: Any, autocast: Callable[[], contextlib.AbstractContextManager[Any]] | None = None) -> Any:
    """The model's modules around the same weights, without the `forward` that TRL has put on the model.

    TRL's forward calls the module it was made for, which the engine's copy is not.

    Args:
        model: the trainer's.
        autocast: in which the trainer computes: without it the engine would sample from another policy. None: in none.
    """
    if hasattr(model, "get_base_model"):  # its adapter's layers are in the model itself
        model = model.get_base_model()
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    copied = copy.deepcopy(model, shared)
    for module in copied.modules():
        module.__dict__.pop("forward", None)
    if autocast is not None:
        plain = type(copied).forward

        @functools.wraps(plain)
        def forward(self: Any, *arguments: Any, **keywords: Any) -> Any:
            with autocast():
                return plain(self, *arguments, **keywords)

        copied.forward = types.MethodType(forward, copied)
    return copied
