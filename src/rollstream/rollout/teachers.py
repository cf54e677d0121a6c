"""Teachers of a training: each finished rollout gets their log-probs of its tokens, as a stream.

    a rollout, scored --> the teacher that its row names --> its streams --> the store, the trainer

A teacher that is away is waited for, one that fails is asked again. After that the rollout has no values, and says why.
"""

import asyncio
import logging
import math
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from itertools import chain
from typing import Any

import rollstream
from rollstream.errors import ConfigError, EngineLostError
from rollstream.rollout.annotate import (
    IMAGE,
    Teacher,
    check_vocabulary,
    local_teacher,
    open_scorer,
    served_teacher,
)
from rollstream.rollout.worker import RolloutWorker, make_failure
from rollstream.scratch import ScratchFolder
from rollstream.store.records import json_text
from rollstream.trajectory import STREAMS, Failure, PromptRow, Rollout, Trajectory

logger = logging.getLogger(__name__)

NAME = "teacher"
"""Of the stream."""
ERROR = "teacher_error"
"""In the `extra` of a trajectory that has no values: why."""

_DECIMALS = 6
"""Of a value: those of a float32, in a third of the digits."""
_SAID_LOUDLY = 5


class Teachers:
    """Asks one model about all rollouts, or of several the one that a rollout's row names.

    Args:
        models: a folder or hub name of a model that is loaded here, URLs of servers of one (with spaces between), or a
            `Teacher`; or several of these by name.
        column: of several, which column of a row has the name. A row without one is asked nobody about.
        patience: seconds for which a teacher that is away, or full, is waited for.
        max_in_flight: rollouts at once.
    """

    def __init__(
        self,
        models: str | Teacher | Mapping[str, str | Teacher],
        *,
        column: str = "teacher",
        patience: float = 240.0,
        max_in_flight: int = 128,
    ) -> None:
        self._column = column if isinstance(models, Mapping) else None
        self._models = dict(models) if isinstance(models, Mapping) else {"": models}
        if not self._models or not all(self._models.values()) or max_in_flight < 1 or patience <= 0:
            raise ConfigError(
                f"{models=}, {max_in_flight=}, {patience=}: one model, at least 1, more than 0 s"
            )
        self._patience = patience
        self._places = asyncio.Semaphore(max_in_flight)
        self._opened = AsyncExitStack()
        self._workers: dict[str, RolloutWorker] = {}
        self._asking: dict[str, set[asyncio.Future[Rollout | Failure]]] = {}
        """By teacher, those that wait for it."""
        self._lost: EngineLostError | None = None
        self._failed = 0
        self.made: dict[str, dict[str, Any]] = {}
        """By the name of the stream, who makes it, see `Stream.made`; empty before `start`."""

    async def start(self, tokenizer: bytes | None) -> None:
        """Starts the engines.

        Args:
            tokenizer: content of the student's `tokenizer.json`; None: nobody knows it.

        Raises:
            ConfigError: a teacher has another tokenizer, or gives no log-probs of given ids.
            EngineLostError: its servers do not answer.
        """
        asked = []
        for name, model in self._models.items():
            teacher = model if isinstance(model, Teacher) else await _find(model)
            if not _is_compared(tokenizer, teacher):
                logger.warning("teacher %s: nobody could see whether its tokenizer is the student's", model)
            logs = ScratchFolder("teacher")
            self._opened.callback(logs.cleanup)
            built = await open_scorer(teacher, self._opened, logs.path, self._patience)
            self._workers[name] = built.worker
            asked.append((f"{name}: {teacher.model}" if name else teacher.model, teacher.engine))
        models, engines = (", ".join(dict.fromkeys(one)) for one in zip(*asked, strict=True))
        about = {"model": models, "engine": engines, "mode": "raw", "temperature": 1.0}
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.made = {NAME: {**about, "created": created, "rollstream": rollstream.__version__}}

    async def teach(self, rollout: Rollout) -> None:
        """Puts the values into a rollout, or why there are none.

        Raises:
            ConfigError: its row names a teacher that is not there.
        """
        name = "" if self._column is None else rollout.final.extra.get(self._column) or None
        if name is None or NAME in rollout.final.streams:  # asked before
            return
        if not isinstance(name, str) or name not in self._workers:
            raise ConfigError(
                f"row {rollout.index} names the teacher {name!r} (column {self._column!r}); there are: "
                f"{', '.join(self._workers)}"
            )
        asked = [one for one in rollout.trajectories if not one.is_side_call]
        columns = {"trajectories": [_stored(one) for one in asked]}
        row = PromptRow(rollout.index, rollout.prompt_key, [], rollout.data_source, columns=columns)
        async with self._places:
            found = await self._ask(name, row, rollout.repeat)
        if isinstance(found, Rollout):
            values = [one.response_logprobs or [] for one in found.trajectories]
            if all(map(math.isfinite, chain(*values))):
                for one, numbers in zip(asked, values, strict=True):
                    rounded = [round(number, _DECIMALS) for number in numbers]
                    one.extra = {**one.extra, STREAMS: {**one.streams, NAME: rounded}}
                return
            error = "it gave log-probs that are no numbers"
        else:
            error = f"{found.error} (attempt {found.attempts})"
        self._failed += 1
        level = logging.WARNING if self._failed <= _SAID_LOUDLY else logging.DEBUG
        logger.log(level, "rollout (%d, %d) has no teacher: %s", rollout.index, rollout.repeat, error)
        for one in asked:
            one.extra = {**one.extra, ERROR: error[:500]}

    async def _ask(self, name: str, row: PromptRow, repeat: int) -> Rollout | Failure:
        asking = asyncio.ensure_future(self._workers[name].run(row, repeat))
        others = self._asking.setdefault(name, set())
        others.add(asking)
        try:
            return await asking
        except EngineLostError as lost:
            why = f"the teacher was away for more than {self._patience:g} s: {lost.__cause__ or lost}"
            self._lost = EngineLostError(why)
            for other in others:  # else each would look for itself, one after the other
                other.cancel()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not asking.cancelled() or (task is not None and task.cancelling()):
                asking.cancel()
                raise
        finally:
            others.discard(asking)
        assert self._lost is not None
        return make_failure(row.index, repeat, row.prompt_key, 1, "engine", self._lost)

    async def close(self) -> None:
        """Closes the engines."""
        await self._opened.aclose()


async def _find(model: str) -> Teacher:
    urls = model.split()
    if all(url.startswith(("http://", "https://")) for url in urls):
        return await served_teacher(urls)
    return local_teacher(model)


def _is_compared(tokenizer: bytes | None, teacher: Teacher) -> bool:
    from tokenizers import Tokenizer

    return tokenizer is not None and check_vocabulary(Tokenizer.from_str(tokenizer.decode()), teacher)


def _stored(one: Trajectory) -> dict[str, Any]:
    """The form in which a stored trajectory comes to be scored."""
    names = ("prompt_ids", "response_ids", "response_mask", "is_snapshot")
    return {name: getattr(one, name) for name in names} | {"has_images": IMAGE in json_text(one.messages)}
