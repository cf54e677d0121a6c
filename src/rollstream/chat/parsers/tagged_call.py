"""A call between `<tool_call>` tags with its values as bare text: what GLM's and Qwen's formats share."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from rollstream.chat.parsers.calls import broken_call, call_of_arguments
from rollstream.chat.parsers.parameter_types import parameters_of
from rollstream.chat.parsers.strict_json import UnreadableError
from rollstream.chat.parsers.turn import TurnReader

OPENING, CLOSING = "<tool_call>", "</tool_call>"


class TaggedCall(ABC):
    """The call at the cursor of a turn, and how far it could be read."""

    def __init__(self, turn: TurnReader) -> None:
        self.turn = turn
        self.position = turn.past(OPENING, turn.position)
        self.name = ""

    @abstractmethod
    def read_name(self) -> None:
        """Sets `name` and moves `position` behind it. Raises `UnreadableError`."""

    @abstractmethod
    def read_arguments(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """Moves `position` behind the call. Raises `UnreadableError`.

        Args:
            parameters: the tool's parameter schema; empty if there is none.
        """

    def take(self, tools: Sequence[dict[str, Any]]) -> None:
        """Takes the call, whole or broken."""
        turn, start = self.turn, self.turn.position
        try:
            self.read_name()
            arguments = self.read_arguments(parameters_of(tools, self.name))
        except UnreadableError as error:
            stop = min(turn.find(CLOSING, self.position), turn.find(OPENING, self.position))
            end = turn.end_of_broken(self.position, stop, CLOSING)
            turn.take_call(end, broken_call(turn.text[start:end], str(error), name=self.name))
            return
        end = self.position
        turn.take_call(end, call_of_arguments(self.name, arguments, turn.text[start:end]))
