"""Interactions: a simulated user, or an environment that answers the model."""

import copy
import hashlib
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import orjson

from rollstream.aio import finish_despite_cancellation
from rollstream.daemon_threads import CallsRefusedError, UserCalls
from rollstream.errors import ConfigError, DataError, TransientError
from rollstream.trajectory import Message
from rollstream.user_code import construct, import_name, read_yaml, source_digest

logger = logging.getLogger(__name__)

_KEY = "actor_rollout_ref.rollout.multi_turn.interaction_config_path"
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
    _calls: UserCalls = field(
        default_factory=lambda: UserCalls("interaction"), init=False, repr=False, compare=False
    )

    def open(self, interaction_kwargs: Mapping[str, Any], *, request_id: str) -> "InteractionSession | None":
        """The interaction that a row asks for; None if it asks for none.

        Raises:
            DataError: it asks for one that is not there, or in another form than a mapping.
        """
        if not isinstance(interaction_kwargs, Mapping):
            raise DataError(f"extra_info.interaction_kwargs is {interaction_kwargs!r:.200}, want a mapping")
        if all(value is None for value in interaction_kwargs.values()):
            return None  # a Parquet column has all keys in all rows
        name = interaction_kwargs.get("name")
        if name is None and len(self.by_name) == 1:
            name = next(iter(self.by_name))
        if not isinstance(name, str) or name not in self.by_name:
            known = ", ".join(sorted(self.by_name)) or f"none; {_KEY} lists them"
            raise DataError(
                f"extra_info.interaction_kwargs.name is {name!r}; interactions there are: {known}"
            )
        kwargs = {key: value for key, value in interaction_kwargs.items() if key != "name"}
        return InteractionSession(
            self.by_name[name], kwargs, calls=self._calls, request_id=request_id, timeout=self.timeout
        )

    def close(self) -> None:
        """Ends the threads, each when its call returns. Waits for none; twice is fine."""
        self._calls.close()


class InteractionSession:
    """One rollout's interaction."""

    def __init__(
        self,
        interaction: Interaction,
        kwargs: dict[str, Any],
        *,
        calls: UserCalls,
        request_id: str,
        timeout: float,
    ) -> None:
        self._interaction = interaction
        self._kwargs = kwargs
        self._calls = calls
        self._instance_id = request_id
        self._timeout = timeout
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
        ended, text, score = await self._call(
            "generate_response", copy.deepcopy(messages), read=self._read_answer
        )
        if score is not None:
            self.turn_scores.append(score)
        return ended, text

    async def finish(self) -> None:
        """Takes the score of the whole interaction. Call it when the rollout went well, before `close`."""
        if self._started:
            where = f"{self._name}.calculate_score"
            self.score = await self._call("calculate_score", read=partial(_read_score, where=where))

    async def close(self) -> None:
        """Ends the interaction, if it was started. Also after an error or a cancellation.

        What that raises is logged: it changes nothing about the rollout, whose own end, a cancellation among
        others, must not be lost to it.

        Raises:
            CancelledError: The caller was cancelled meanwhile; the interaction is ended all the same.
        """
        if not self._started:
            return
        self._started = False
        await finish_despite_cancellation(self._finalize())

    async def _finalize(self) -> None:
        try:
            await self._call("finalize_interaction")
        except Exception as error:
            logger.warning("%s.finalize_interaction failed: %s: %s", self._name, type(error).__name__, error)
            logger.debug("it failed here:", exc_info=True)

    @property
    def _name(self) -> str:
        return f"interaction {self._interaction.name!r}"

    async def _call(self, what: str, *args: Any, read: Callable[[Any], Any] | None = None) -> Any:
        method = getattr(self._interaction, what)
        where = f"{self._name}.{what}"
        outcome = await self._calls.run(
            partial(method, self._instance_id, *args, **self._kwargs),
            name=where,
            seconds=self._timeout,
            read=read,
        )
        if outcome.timed_out:
            raise TransientError(
                f"{where} took longer than {self._timeout:g} s "
                "(actor_rollout_ref.rollout.multi_turn.interaction_timeout)"
            )
        match outcome.error:
            case None:
                return outcome.value
            case CallsRefusedError() as error:
                raise TransientError(str(error)) from error
            case Exception() as error:
                raise error
            case error:
                raise RuntimeError(f"{where} raised {error!r:.200}") from error

    def _read_answer(self, answer: Any) -> tuple[bool, str, float | None]:
        where = f"{self._name}.generate_response"
        if not isinstance(answer, tuple) or len(answer) != 4:
            raise TypeError(
                f"{where} must return (should_terminate, response, score, metrics), not {answer!r:.200}"
            )
        ended, text, score, _ = answer
        if not isinstance(text, str):
            raise TypeError(f"{where}: the response must be text, not {text!r:.200}")
        return bool(ended), text, _read_score(score, where)


def load_interactions(path: str | None, *, timeout: float) -> Interactions:
    """Reads `interaction_config_path`: `interaction: [{name, class_name, config}]`, as in verl before 0.8.

    Raises:
        ConfigError: no such file, not such a list, or a class that cannot be made.
    """
    if path is None:
        return Interactions(timeout=timeout)
    file = Path(path).expanduser()
    content = read_yaml(file, key=_KEY)
    entries = content.get("interaction") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{_KEY}: {file} needs `interaction:` with a list of interactions")
    by_name: dict[str, Interaction] = {}
    parts: list[Any] = []
    for at, entry in enumerate(entries):
        where = f"{_KEY}: {file}, interaction[{at}]"
        if not isinstance(entry, dict) or not isinstance(entry.get("class_name"), str):
            raise ConfigError(f"{where}: needs a class_name")
        made = import_name(entry["class_name"], key=where, beside=file)
        name = str(entry.get("name") or getattr(made, "__name__", at))
        given = entry.get("config") or {}
        if not isinstance(given, dict):
            raise ConfigError(f"{where}: config is {given!r}, want a mapping")
        config = {**given, "name": name}
        interaction = construct(partial(made, config), f"{where}: {entry['class_name']}")
        for method in _METHODS:
            if not callable(getattr(interaction, method, None)):
                raise ConfigError(f"{where}: {entry['class_name']} has no method {method}")
        if name in by_name:
            raise ConfigError(f"{where}: the name {name!r} is there twice")
        by_name[name] = interaction
        parts.append([name, config, source_digest(made)])
    options = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS
    digest = hashlib.blake2b(orjson.dumps(parts, option=options, default=repr), digest_size=16)
    return Interactions(by_name, timeout, digest.hexdigest())


def _read_score(score: Any, where: str) -> float | None:
    """A score as a finite number, or None; one that is not finite is logged."""
    if score is None:
        return None
    number = float(score)
    if math.isfinite(number):
        return number
    logger.warning("%s: the score is %s, no finite number; taken as none", where, number)
    return None
