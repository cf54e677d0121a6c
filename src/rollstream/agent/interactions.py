"""Interactions: a simulated user, or an environment that answers the model."""

import asyncio
import hashlib
import inspect
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import orjson
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from rollstream.errors import ConfigError, DataError, TransientError
from rollstream.trajectory import Message
from rollstream.user_code import import_name, source_digest

logger = logging.getLogger(__name__)

_KEY = "actor_rollout_ref.rollout.multi_turn.interaction_config_path"
_METHODS = ("start_interaction", "generate_response", "calculate_score", "finalize_interaction")


class Interaction:
    """A partner in the conversation. Subclass it; the contract is that of verl's `BaseInteraction`.

    One object serves all rollouts of a worker; what belongs to one rollout is kept by its `instance_id`.
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
    """The interactions of a worker, by name."""

    by_name: Mapping[str, Interaction] = field(default_factory=dict)
    timeout: float = 120.0
    """Seconds for one call."""
    digest: str = ""
    """Changes when what they do may: configuration and code."""

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
        return InteractionSession(self.by_name[name], kwargs, request_id, self.timeout)


class InteractionSession:
    """One rollout's interaction."""

    def __init__(
        self, interaction: Interaction, kwargs: dict[str, Any], request_id: str, timeout: float
    ) -> None:
        self._interaction = interaction
        self._kwargs = kwargs
        self._instance_id = request_id
        self._timeout = timeout
        self._started = False
        self.turn_scores: list[float] = []
        """One for each turn that was answered."""
        self.score: float | None = None
        """Of the whole interaction, once it is finished."""

    async def respond(self, messages: list[Message]) -> tuple[bool, str]:
        """Whether to end, and what is said to the model. `messages` are the conversation so far; a copy.

        Raises:
            TransientError: it took too long.
            TypeError, ValueError: it answered with something else than it promised.
        """
        if not self._started:
            self._started = True
            started = await self._call(
                "start_interaction", self._interaction.start_interaction, self._instance_id, **self._kwargs
            )
            self._instance_id = started or self._instance_id
        answer = await self._call(
            "generate_response",
            self._interaction.generate_response,
            self._instance_id,
            list(messages),
            **self._kwargs,
        )
        if not isinstance(answer, tuple) or len(answer) != 4:
            raise TypeError(
                f"{self._name}.generate_response must return (should_terminate, response, score, metrics), "
                f"not {answer!r:.200}"
            )
        ended, text, score, _ = answer
        if not isinstance(text, str):
            raise TypeError(f"{self._name}.generate_response: the response must be text, not {text!r:.200}")
        if score is not None:
            self.turn_scores.append(_finite(score, f"{self._name}.generate_response"))
        return bool(ended), text

    async def finish(self) -> None:
        """Takes the score of the whole interaction. Call it when the rollout went well, before `close`."""
        if self._started:
            score = await self._call(
                "calculate_score", self._interaction.calculate_score, self._instance_id, **self._kwargs
            )
            self.score = None if score is None else _finite(score, f"{self._name}.calculate_score")

    async def close(self) -> None:
        """Ends the interaction, if it was started. Also after an error or a cancellation.

        What that raises is logged: it changes nothing about the rollout, whose own end, a cancellation among
        others, must not be lost to it.
        """
        if self._started:
            self._started = False
            try:
                await self._call(
                    "finalize_interaction",
                    self._interaction.finalize_interaction,
                    self._instance_id,
                    **self._kwargs,
                )
            except (Exception, SystemExit):
                logger.warning("%s.finalize_interaction failed", self._name, exc_info=True)

    @property
    def _name(self) -> str:
        return f"interaction {self._interaction.name!r}"

    async def _call(self, what: str, method: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            async with asyncio.timeout(self._timeout) as limit:
                result = method(*args, **kwargs)
                return await result if inspect.isawaitable(result) else result
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise TransientError(
                f"{self._name}.{what} took longer than {self._timeout:g} s "
                "(actor_rollout_ref.rollout.multi_turn.interaction_timeout)"
            ) from error


def load_interactions(path: str | None, *, timeout: float) -> Interactions:
    """Reads `interaction_config_path`: `interaction: [{name, class_name, config}]`, as in verl before 0.8.

    Raises:
        ConfigError: no such file, not such a list, or a class that cannot be made.
    """
    if path is None:
        return Interactions(timeout=timeout)
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"{_KEY}: no such file: {file}")
    try:
        content = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{_KEY}: {file} cannot be read as YAML ({error})") from error
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
        try:
            interaction = made(config)
        except BaseException as error:  # a class of the user's: SystemExit is an error of its, too
            if isinstance(error, KeyboardInterrupt):
                raise
            raise ConfigError(
                f"{where}: {entry['class_name']} cannot be made ({type(error).__name__}: {error})"
            ) from error
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


def _finite(score: Any, where: str) -> float:
    number = float(score)
    if not math.isfinite(number):
        raise ValueError(f"{where}: the score must be finite, not {number}")
    return number
