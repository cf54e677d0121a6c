"""What a tool is: the class a user writes, what it is given, and what it gives back."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self
from uuid import uuid4


class OpenAIFunctionToolSchema(dict[str, Any]):
    """A tool's OpenAI schema: a dict whose keys are attributes, too.

    `schema["function"]["name"]` and `schema.function.name` are the same, as is `schema.model_dump()` a plain
    dict: tools written for verl, whose schema is a pydantic model, find what they look for.
    """

    _DEFAULTS: Mapping[str, Any] = {"required": [], "strict": False, "description": None, "enum": None}
    """What verl's models say of keys that are not there."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        super().__init__({key: _wrap(value) for key, value in schema.items()})

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        if name in self._DEFAULTS:
            return copy.copy(self._DEFAULTS[name])
        raise AttributeError(f"the tool schema has no {name!r}")

    @classmethod
    def model_validate(cls, schema: Any) -> Self:
        """A schema from a mapping, or from a pydantic model."""
        return cls(schema if isinstance(schema, Mapping) else schema.model_dump(exclude_none=True))

    def model_dump(self, *, exclude_none: bool = False, **_options: Any) -> dict[str, Any]:
        """A plain copy. Of pydantic's options only `exclude_none` means something here."""
        plain: dict[str, Any] = _plain(self, exclude_none)
        return plain


@dataclass(slots=True)
class ToolResponse:
    """What a tool says."""

    text: str | None = None
    """For the model."""
    image: list[Any] | None = None
    video: list[Any] | None = None
    """No loop can show one yet, so a response with one is an error."""

    def __post_init__(self) -> None:
        for name, value in [("image", self.image), ("video", self.video)]:
            if value is not None and not isinstance(value, list):
                raise ValueError(f"{name} must be a list, not {type(value).__name__}; write [{name}]")

    def is_empty(self) -> bool:
        """Whether it says nothing at all."""
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        """Whether it is text and nothing else."""
        return bool(self.text) and not (self.image or self.video)


class ToolError(Exception):
    """Raise it in a tool: the model sees `Error: ` and its text, line breaks included."""


class Tool(ABC):
    """A tool with a state for each rollout. Subclass it; a class written for verl changes only its imports.

    One object serves all rollouts of a worker, many at once. What belongs to one rollout is kept under its
    `instance_id`: `create` comes before the first call of a rollout, `calc_reward` and `release` at its end.
    Methods may be plain functions as well; those run in threads.

    Attributes:
        stateless: Whether no call depends on the calls before it, so that a rollout may go on in another process
            (`generation.keep_turns`); such a tool has no `calc_reward`.
        config: `config` of the tool file.
        tool_schema: See `OpenAIFunctionToolSchema`.
        name: What the model calls it.
    """

    stateless = False

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        self.config = config
        self.tool_schema = tool_schema
        self.tool_schema = OpenAIFunctionToolSchema.model_validate(
            tool_schema or self.get_openai_tool_schema()
        )
        self.name: str = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema | dict[str, Any]:
        """The schema. Override it when the tool file has no `tool_schema`."""
        if self.tool_schema is None:
            raise NotImplementedError(
                f"{type(self).__name__} has no schema: give tool_schema in the tool file, or override "
                "get_openai_tool_schema"
            )
        return self.tool_schema

    async def create(
        self, instance_id: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse] | str | None:
        """Begins a rollout's use of the tool.

        Args:
            instance_id: Unique; given.
            kwargs: The row's `create_kwargs`, whole under that name and each item under its own.

        Returns:
            The instance's id, alone or with a response, which nobody sees. None: the one given.
        """
        return instance_id if instance_id is not None else str(uuid4()), ToolResponse()

    @abstractmethod
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Executes one call.

        Args:
            instance_id: As `create` said.
            parameters: What the model wrote; it fits the schema.
            kwargs: The row's `execute_kwargs`, and what the loop gives: `messages`, a copy of the
                conversation so far.

        Returns:
            A `ToolResponse`, text, or a dict (shown as JSON); or a tuple of that, a reward or None, and, if
            there is more to say, a dict of metrics.
        """

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        """The reward of a rollout's use of the tool, at its end. None says nothing.

        Args:
            instance_id: As `create` said.
            kwargs: The row's `calc_reward_kwargs`.
        """
        return None

    async def release(self, instance_id: str, **kwargs: Any) -> None:  # noqa: B027  (there need not be any)
        """Ends a rollout's use of the tool. It is always called, also after a failure or a timeout.

        Args:
            instance_id: As `create` said, or as it was given to a `create` that did not end in time.
            kwargs: The row's `release_kwargs`.
        """


def _wrap(value: Any) -> Any:
    if isinstance(value, Mapping):
        return OpenAIFunctionToolSchema(value)
    return [_wrap(item) for item in value] if isinstance(value, list) else value


def _plain(value: Any, exclude_none: bool) -> Any:
    if isinstance(value, dict):
        return {
            key: _plain(item, exclude_none)
            for key, item in value.items()
            if not (exclude_none and item is None)
        }
    return [_plain(item, exclude_none) for item in value] if isinstance(value, list) else value
