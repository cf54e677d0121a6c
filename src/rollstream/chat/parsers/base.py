"""What a parser gives, and what one is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

SegmentKind = Literal["content", "thinking", "call", "markup"]
"""`markup` is structure that belongs to none of the others: wrappers, channel headers, end tokens."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that the model wrote, or began to write."""

    name: str
    """The tool; "" when it could not be read."""
    arguments: dict[str, Any] | None
    """Only what `orjson` can store. None exactly when there is an `error`."""
    text: str
    """What the model wrote for this call, its markers included."""
    error: str | None = None
    """Why it cannot be executed, in words for the model; None when it can."""
    call_id: str | None = None
    """The model's own id of the call, where the format has one."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of a turn."""

    kind: SegmentKind
    text: str


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """A turn, read."""

    segments: tuple[Stretch, ...]
    """Their texts, concatenated, are the turn, character for character."""
    calls: tuple[ToolCall, ...]
    """In the order written, at least one for every segment of kind `call`."""

    @property
    def content(self) -> str:
        """What the model says, white space as written."""
        return "".join(segment.text for segment in self.segments if segment.kind == "content")

    @property
    def reasoning(self) -> str:
        """What the model thinks, without markers; a line break between separate stretches of it."""
        return "\n".join(segment.text for segment in self.segments if segment.kind == "thinking")


class ToolCallParser(Protocol):
    """Reads one format of tool calls. It has no state: one object serves any number of rollouts."""

    stop_tokens: tuple[str, ...]
    """Special tokens that end a turn after a call; sampling must stop at them."""

    def parse(
        self, text: str, *, in_thinking: bool = False, tools: Sequence[dict[str, Any]] = ()
    ) -> ParsedOutput:
        """Reads a turn. It never raises, and takes time linear in the text.

        A call that was begun but cannot be read is a `ToolCall` with an `error`; it is neither dropped nor
        repaired. What stands in a thinking block is no call.

        Args:
            text: the turn, decoded with its special tokens, the end token included if there is one.
            in_thinking: the prompt ended inside a thinking block, so the text begins with thinking.
            tools: OpenAI tool schemas; formats that write arguments without types read the types there.
        """


_ParserT = TypeVar("_ParserT", bound=Callable[[], ToolCallParser])
PARSERS: dict[str, Callable[[], ToolCallParser]] = {}
"""The registered ones, by name. Ask `registry`, which knows the built-in ones, too."""


def register_parser(name: str) -> Callable[[_ParserT], _ParserT]:
    """Class decorator: makes a parser known under a name. Its class is called without arguments."""

    def decorate(parser: _ParserT) -> _ParserT:
        PARSERS[name] = parser
        return parser

    return decorate
