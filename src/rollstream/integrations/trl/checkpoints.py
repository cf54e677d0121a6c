"""rollstream's own state in a trainer's checkpoint, which checkpoints are whole, and Ctrl-C."""

import contextlib
import json
import logging
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, Self

from rollstream.errors import ConfigError
from rollstream.stop_signals import TOGETHER_S

logger = logging.getLogger(__name__)

STATE_FILE = "rollstream_state.json"
"""In each checkpoint: what has been trained on."""

_LAST_OF_TRL = "trainer_state.json"
"""transformers writes it when all else has been written."""


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Writes the state into a checkpoint: all of it, or nothing.

    TRL's files come after it. Until then the checkpoint is not whole, also where another training has left one.
    """
    (folder / _LAST_OF_TRL).unlink(missing_ok=True)
    partial = folder / f"{STATE_FILE}.partial"
    partial.write_text(json.dumps(state))
    partial.replace(folder / STATE_FILE)


def read_state(checkpoint: str) -> dict[str, Any]:
    """The state in a checkpoint.

    Raises:
        ConfigError: there is none.
    """
    try:
        state: dict[str, Any] = json.loads((Path(checkpoint) / STATE_FILE).read_text())
    except OSError as error:
        raise ConfigError(
            f"{checkpoint} has no {STATE_FILE}: it is no checkpoint of this trainer, and nothing says "
            "which prompts were trained on. To begin with its weights, give it as the model"
        ) from error
    return state


def last_whole(folder: str) -> str | None:
    """The newest checkpoint in a trainer's folder that was written to its end; None: there are none at all.

    Raises:
        ConfigError: there are some, and none is whole.
    """
    steps = {path: path.name.removeprefix("checkpoint-") for path in Path(folder).glob("checkpoint-*/")}
    checkpoints = [path for path in steps if steps[path].isdecimal()]
    for path in sorted(checkpoints, key=lambda path: int(steps[path]), reverse=True):
        if (missing := _missing(path)) is None:
            return str(path)
        logger.warning("%s is passed over: it has no whole %s (its process ended meanwhile)", path, missing)
    if checkpoints:
        raise ConfigError(
            f"no checkpoint in {folder} is whole: name another by resume_from_checkpoint, or begin without it"
        )
    return None


def is_newest(checkpoint: str) -> bool:
    """Whether no later checkpoint beside it is whole."""
    with contextlib.suppress(ConfigError):
        last = last_whole(str(Path(checkpoint).parent))
        return last is None or Path(last).samefile(checkpoint)
    return True


class Interrupt:
    """In it, if enabled, the first Ctrl-C is only noted; a second one, not right after it, ends as usual."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._before: Any = None
        self._asked_at = 0.0
        self.asked = False

    def __enter__(self) -> Self:
        self.asked = False
        if self._enabled and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked and time.monotonic() - self._asked_at > TOGETHER_S:
            raise KeyboardInterrupt
        if not self.asked:
            self.asked, self._asked_at = True, time.monotonic()
            sys.stderr.write("the batch under way is trained and saved; Ctrl-C again ends at once\n")


def how_to_resume(folder: str, step: int) -> str:
    """Says how to resume a training that was ended at a step."""
    try:
        last = last_whole(folder)
    except ConfigError as error:
        return f"ended at step {step}; {error}"
    if last is None:
        return (
            f"ended at step {step}, and there is no checkpoint in {folder} to go on from (save_strategy, "
            "save_steps; save_on_interrupt=True makes one at Ctrl-C)"
        )
    return f"ended at step {step}; to go on from {last}: trainer.train(resume_from_checkpoint=True)"


def _missing(checkpoint: Path) -> str | None:
    for name in (_LAST_OF_TRL, STATE_FILE):
        try:
            json.loads((checkpoint / name).read_bytes())
        except (OSError, ValueError):  # not there, or torn
            return name
    return None
