"""Interactions: a simulated user, or an environment that answers the model."""

import copy
import hashlib
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from uuid import uuid4

import msgspec
import orjson

from rollstream.aio import finish_despite_cancellation
from rollstream.errors import ConfigError, DataError, TransientError
from rollstream.trajectory import Message
from rollstream.user_calls import CallsRefusedError, UserCalls
from rollstream.user_code import construct, import_name, read_yaml, source_digest

logger = logging.getLogger(__name__)

_KEYS = "actor_rollout_ref.rollout.multi_turn"
_METHODS = ("start_interaction", "generate_response", "calculate_score", "finalize_interaction")


class Interaction:
    """A partner in the conversation. Subclass it; the contract is that of verl's `BaseInteraction`.

    One object serves all rollouts of a worker; what belongs to one rollout is kept by its `instance_id`.
    Methods may be plain functions as well; those run in threads.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        """`config` as in the YAML, with its `name`."""
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begins one rollout's interaction; `kwargs` are the row's `interaction_kwargs`. Returns its id."""
        return instance_id or uuid4().hex

    async def generate_response(
        self, instance_id: str, messages: list[Message], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Answers the model.

        Args:
            instance_id: As `start_interaction` said.
            messages: A copy of the conversation so far.
            kwargs: The row's `interaction_kwargs`.

        Returns:
            Whether to end here (the answer is then not shown to the model), the answer, the score of this
            turn, and what else there is to keep.
        """
        return False, "Your current result seems acceptable.", 0.8, {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float | None:
        """Scores the whole interaction, after its last turn; None: nothing to say."""
        return None

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Ends one rollout's interaction, whatever happened. Always called once after a start."""


@dataclass(frozen=True, slots=True)
class Interactions:
    """The interactions of a worker, by name. Belongs to one event loop, from the first call on."""

    by_name: Mapping[str, Interaction] = field(default_factory=dict)
    timeout: float = 120.0
    """Seconds for one call, waiting for a thread excluded."""
    digest: str = ""
    """Changes when what they do may: configuration and code."""
    calls: UserCalls = field(default_factory=lambda: UserCalls("interaction"), repr=False, compare=False)

    def open(self, interaction_kwargs: Mapping[str, Any], *, request_id: str) -> "InteractionSession | None":
        """The interaction that a row asks for; None if it asks for none.

        Raises:
            DataError: it asks for one that is not there, or in another form than a mapping.
        """
        if not isinstance(interaction_kwargs, Mapping):
            raise DataError(f"extra_info.interaction_kwargs is {interaction_kwargs!r:.200}, want a mapping")
        kwargs = dict(interaction_kwargs)
        if all(value is None for value in kwargs.values()):
            return None  # a Parquet column has all keys in all rows
        name = kwargs.pop("name", None)
        if name is None and len(self.by_name) == 1:
            name = next(iter(self.by_name))
        if not isinstance(name, str) or name not in self.by_name:
            known = ", ".join(sorted(self.by_name)) or "none"
            raise DataError(
                f"extra_info.interaction_kwargs.name is {name!r}; interactions there are: {known}"
            )
        return InteractionSession(self, self.by_name[name], kwargs, request_id)

    def close(self) -> None:
        """Ends the threads, each when its call returns. Waits for none; twice is fine."""
        self.calls.close()


class InteractionSession:
    """One rollout's interaction."""

    def __init__(
        self, interactions: Interactions, interaction: Interaction, kwargs: dict[str, Any], request_id: str
    ) -> None:
        self._interactions = interactions
        self._interaction = interaction
        self._kwargs = kwargs
        self._instance_id = request_id
        self._started = False
        self.turn_scores: list[float] = []
        """One for each turn that was answered with a score."""
        self.score: float | None = None
        """Of the whole interaction, once it is finished."""

    async def respond(self, messages: list[Message]) -> tuple[bool, str]:
        """Whether to end, and what is said to the model. `messages` are the conversation so far.

        Raises:
            TransientError: it took too long, or too many earlier calls still hang.
            TypeError, ValueError: it answered with something else than it promised.
            RuntimeError: it raised what would end more than this rollout, SystemExit among others.
        """
        if not self._started:
            self._started = True
            self._instance_id = await self._call("start_interaction") or self._instance_id
        answer = await self._call("generate_response", copy.deepcopy(messages), read=_read_answer)
        ended, text, score = answer
        if score is not None:
            self.turn_scores.append(score)
        return ended, text

    async def finish(self) -> None:
        """Takes the score of the whole interaction. Call it when the rollout went well, before `close`."""
        if self._started:
            self.score = await self._call("calculate_score", read=_read_score)

    async def close(self) -> None:
        """Ends the interaction, if it was started. Also after an error or a cancellation.

        What that raises is logged: it changes nothing about the rollout, whose own end, a cancellation among
        others, must not be lost to it.

        Raises:
            CancelledError: The caller was cancelled meanwhile; the interaction is ended all the same.
        """
        if self._started:
            self._started = False
            await finish_despite_cancellation(self._finalize())

    async def _finalize(self) -> None:
        try:
            await self._call("finalize_interaction")
        except Exception:
            logger.warning("interaction %r was not ended", self._interaction.name, exc_info=True)

    async def _call(self, method: str, *args: Any, read: Callable[[Any], Any] | None = None) -> Any:
        where, seconds = f"interaction {self._interaction.name!r}.{method}", self._interactions.timeout
        outcome = await self._interactions.calls.run(
            partial(getattr(self._interaction, method), self._instance_id, *args, **self._kwargs),
            name=where,
            seconds=seconds,
            read=read,
        )
        if outcome.timed_out:
            raise TransientError(f"{where} took longer than {seconds:g} s ({_KEYS}.interaction_timeout)")
        match outcome.error:
            case None:
                return outcome.value
            case CallsRefusedError() as error:
                raise TransientError(str(error)) from error
            case Exception() as error:
                error.add_note(f"in {where}")
                raise error
            case error:
                raise RuntimeError(f"{where} raised {error!r:.200}") from error


class _InteractionEntry(msgspec.Struct):
    class_name: str
    name: str | None = None
    config: dict[Any, Any] | None = None


class _File(msgspec.Struct):
    interaction: Annotated[list[_InteractionEntry], msgspec.Meta(min_length=1)]


def load_interactions(path: str | None, *, timeout: float) -> Interactions:
    """Reads `interaction_config_path`: `interaction: [{name, class_name, config}]`, as in verl before 0.8.

    Raises:
        ConfigError: no such file, not such a list, or a class that cannot be made.
    """
    if path is None:
        return Interactions(timeout=timeout)
    file, key = Path(path).expanduser(), f"{_KEYS}.interaction_config_path"
    try:
        entries = msgspec.convert(read_yaml(file, key=key), _File).interaction
    except msgspec.ValidationError as error:
        raise ConfigError(f"{key}: {file}: {error}") from error
    by_name: dict[str, Interaction] = {}
    parts: list[Any] = []
    for at, entry in enumerate(entries):
        where = f"{key}: {file}, interaction[{at}]"
        made = import_name(entry.class_name, key=where, beside=file)
        name = entry.name or str(getattr(made, "__name__", at))
        config = {**(entry.config or {}), "name": name}
        interaction = construct(partial(made, config), f"{where}: {entry.class_name}")
        for method in _METHODS:
            if not callable(getattr(interaction, method, None)):
                raise ConfigError(f"{where}: {entry.class_name} has no method {method}")
        if name in by_name:
            raise ConfigError(f"{where}: the name {name!r} is there twice")
        by_name[name] = interaction
        parts.append([name, config, source_digest(made)])
    options = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS
    digest = hashlib.blake2b(orjson.dumps(parts, option=options, default=repr), digest_size=16)
    return Interactions(by_name, timeout, digest.hexdigest())


def _read_answer(answer: Any) -> tuple[bool, str, float | None]:
    if not isinstance(answer, tuple) or len(answer) != 4 or not isinstance(answer[1], str):
        raise TypeError(f"it must return (should_terminate, response, score, metrics), not {answer!r:.200}")
    return bool(answer[0]), answer[1], _read_score(answer[2])


def _read_score(score: Any) -> float | None:
    """A score as a finite number, or None; one that is not finite is logged."""
    if score is None:
        return None
    number = float(score)
    if math.isfinite(number):
        return number
    logger.warning("an interaction's score is %s, no finite number; taken as none", number)
    return None
