"""What the wires of chat APIs have in common: a request as our nouns, an answer to be written, what a wire does.

Whatever API a request came by, its conversation has one form, that of chat templates: content is text (or a
list of parts, where it shows an image), the arguments of calls are mappings, thinking is `reasoning_content`,
and results of tools are messages of the role `tool`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from rollstream.chat.messages import MessageError, Part, keep_part, read_messages
from rollstream.chat.tool_schema import check_names_differ, check_tool_schema
from rollstream.chat.wires.requests import (
    HARMLESS,
    NEUTRAL,
    RequestError,
    StructT,
    read_parameters,
    unsupported,
)
from rollstream.trajectory import Completion, Message
from rollstream.web import HTTPError

SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "seed",
)
"""Parameters that choose the distribution. Who answers decides whether a client may."""

_MOST_TOOLS = 4096
"""No prompt has room for more; each is read by Python."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks for."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    """OpenAI's schemas, to show the model; none where it may not call any."""
    model: str | None = None
    max_tokens: int | None = None
    stops: tuple[str, ...] = ()
    stream: bool = False
    logprobs: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Parameters among `SAMPLING`; the run may decide them in its own way."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """Other parts of the request that are not done as asked, by name."""
    deferred: Sequence[dict[str, Any]] = ()
    """Schemas of tools that the messages show, not the beginning of the prompt."""
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Namespace and own name of each tool that has one, by the name that is shown."""
    previous: str | None = None
    """The answer that the messages go on after; its conversation is not among them."""
    has_instructions: bool = False
    """Whether the first message is the request's own, which the next request does not go on with."""
    raw: Any = None
    """The request in the wire's own form."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model said."""

    name: str
    model: str
    prompt_ids: Sequence[int]
    message: Message
    """Arguments of calls are mappings."""
    completion: Completion
    stop: str | None = None
    """The stop text that ended it; the message does not show it."""

    @property
    def calls(self) -> list[tuple[str, str, dict[str, Any]]]:
        """Id, name and arguments of each tool call."""
        return [
            (call["id"], call["function"]["name"], call["function"]["arguments"])
            for call in self.message.get("tool_calls") or ()
        ]

    @property
    def cut(self) -> bool:
        """Whether it was cut off by a limit of tokens."""
        return self.completion.finish_reason == "length"


class Wire(Protocol):
    """A chat API. Nothing that a client sends raises anything but `HTTPError` and `ConfigError`."""

    prefix: str
    """Names of answers begin with it."""
    keep_alive: bytes
    """What a stream says while the answer is awaited."""

    def read(self, body: Mapping[str, Any], *, images: bool, strict: bool = False) -> Asked:
        """Reads a request. If `strict`, what would be noted and passed over is refused, but for what is harmless."""
        ...

    def body(self, asked: Asked, answer: Answer) -> dict[str, Any]:
        """An answer as one object."""
        ...

    def stream(self, asked: Asked, answer: Answer) -> bytes:
        """An answer as all events of a stream."""
        ...

    def error(self, error: HTTPError) -> dict[str, Any]:
        """The body of a refusal."""
        ...

    def error_event(self, error: HTTPError) -> bytes:
        """What ends a stream whose answer cannot come."""
        ...


def named_events(events: Iterable[Mapping[str, Any]]) -> bytes:
    """Server-sent events that are called by their type."""
    return b"".join(
        b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event)) for event in events
    )


def take_sampling(body: dict[str, Any]) -> dict[str, Any]:
    """Takes the parameters of `SAMPLING` out of a body. Raises `RequestError`: one is no number."""
    sampling = {name: value for name in SAMPLING if (value := body.pop(name, None)) is not None}
    for name, value in sampling.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RequestError(f"{name} must be a number", param=name)
    return sampling


def conversation(
    messages: Sequence[Any], where: str, read_part: Callable[[Part, str], Part] = keep_part
) -> list[Message]:
    """The messages of a request; see `read_messages`. Raises `RequestError`: one is not whole, or there is none."""
    if not messages:
        raise RequestError(f"{where!r} is empty", param=where)
    try:
        return read_messages(messages, where, read_part)
    except MessageError as error:
        raise RequestError(str(error), param=error.where) from error


def image(url: Any, where: str, *, allowed: bool) -> Part:
    """The part of a message that shows an image; an address is fetched only if the run allows it.

    Raises:
        RequestError: images cannot be shown, or it is named by something else, such as a path.
    """
    if not allowed:
        raise RequestError(
            f"{where}: images are not supported: the model or its engine sees none", param=where
        )
    if not isinstance(url, str) or not url.startswith(("data:", "http://", "https://")):
        raise RequestError(f"{where}: an image must be a data: URL, or an http(s): address", param=where)
    return {"type": "image_url", "image_url": {"url": url}}


class Notes(dict[str, Any]):
    """Parts of a request that are not done as asked, by name. A strict run refuses them."""

    def __init__(self, *, strict: bool) -> None:
        self.strict = strict

    def add(self, param: str, value: Any, why: str) -> None:
        """Notes a value of a parameter. Raises `RequestError` where the run is strict."""
        if self.strict:
            raise unsupported(param, f"is not supported: {why}")
        self[param] = value

    def read(self, given: Mapping[str, Any], kind: type[StructT]) -> StructT:
        """Types the parameters, see `read_parameters`."""
        notes = None if self.strict else self
        return read_parameters(given, kind, harmless=HARMLESS, neutral=NEUTRAL, notes=notes)

    def shows_tools(self, choice: Any) -> bool:
        """Whether the model is shown tools; that it has to call one is noted."""
        kind = choice.get("type") if isinstance(choice, dict) else choice
        if kind not in ("auto", "none"):
            self.add("tool_choice", choice, "nothing here forces a model to call a tool")
        return kind != "none"

    def leave_out_tool(self, tool: Mapping[str, Any]) -> None:
        """Notes a tool that no client executes here."""
        if self.strict:
            raise RequestError(
                f"tools of type {tool.get('type')!r}: only functions are supported", param="tools"
            )
        own = tool if not isinstance(custom := tool.get("custom"), dict) else custom
        self[f"tool {own.get('name') or tool.get('type')}"] = "left out"


def tool_schema(tool: Mapping[str, Any], parameters: str) -> dict[str, Any]:
    """A tool as OpenAI's chat API has it, from one whose name stands beside its parameters."""
    own = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get(parameters),
    }
    return {"type": "function", "function": own}


def read_tools(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tool schemas as templates want them: one without parameters has none.

    Raises:
        ConfigError: one is not whole.
        RequestError: there are too many.
    """
    if len(tools) > _MOST_TOOLS:
        raise RequestError(f"{len(tools)} tools: at most {_MOST_TOOLS} are taken", param="tools")
    read = []
    for at, tool in enumerate(tools):
        if isinstance(function := tool.get("function"), dict):
            function = {name: value for name, value in function.items() if value is not None}
            if isinstance(parameters := function.get("parameters", {}), dict) and "type" not in parameters:
                function["parameters"] = {"type": "object", "properties": {}, **parameters}
            tool = {**tool, "function": function}
        read.append(check_tool_schema(tool, f"tools[{at}]"))
    check_names_differ((tool["function"]["name"] for tool in read), "tools")
    return read
