"""The tools with which a model edits its own context: deletions and notes."""

from dataclasses import dataclass, field
from typing import Any

from rollstream.chat.parsers.base import ToolCall
from rollstream.trajectory import Message

_NOTES_CHARS = 65_536
"""Of all notes of a rollout together: they live in memory, and what is read back fills the context anyway."""


def _schema(name: str, description: str, **parameters: dict[str, str]) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": parameters, "required": list(parameters)},
        },
    }


_MSG_ID = {"type": "integer", "description": "The message's msg_id."}
_KEY = {"type": "string", "description": "The note's name."}
_CONTENT = {"type": "string", "description": "What to remember."}

SCHEMAS = [
    _schema(
        "deleteContext",
        "Deletes a message from the context. A short stub stays in its place. Write down what matters first.",
        msg_id=_MSG_ID,
    ),
    _schema("note", "Writes a new note, which stays when messages are deleted.", key=_KEY, content=_CONTENT),
    _schema("readNote", "Reads a note.", key=_KEY),
    _schema("updateNote", "Replaces the content of a note.", key=_KEY, content=_CONTENT),
]
"""OpenAI schemas of the tools."""

NAMES = frozenset(schema["function"]["name"] for schema in SCHEMAS)


class Refused(Exception):
    """The call cannot be executed; its text is for the model."""


@dataclass(slots=True)
class Notes:
    """A rollout's notes."""

    by_key: dict[str, str] = field(default_factory=dict)

    def execute(self, name: str, arguments: dict[str, Any]) -> str:
        """Runs `note`, `readNote` or `updateNote`; returns what the model is told. Raises `Refused`."""
        key = _text(arguments, "key")
        if name == "readNote":
            return self._existing(key)
        content = _text(arguments, "content")
        if name == "note" and key in self.by_key:
            raise Refused(f"there is a note {key!r} already; updateNote replaces it")
        if name == "updateNote":
            self._existing(key)
        size = sum(len(k) + len(v) for k, v in self.by_key.items() if k != key) + len(key) + len(content)
        if size > _NOTES_CHARS:
            raise Refused(f"notes may have {_NOTES_CHARS} characters in all; this would make {size}")
        self.by_key[key] = content
        return f"Note {key!r} is {'updated' if name == 'updateNote' else 'written'}."

    def _existing(self, key: str) -> str:
        if key not in self.by_key:
            known = ", ".join(repr(one) for one in self.by_key) or "none"
            raise Refused(f"no note {key!r}; notes there are: {known}")
        return self.by_key[key]


def read_msg_id(call: ToolCall, messages: list[Message], deleted: set[int]) -> int:
    """The message that a `deleteContext` call names.

    Args:
        call: its arguments could be read.
        messages: the conversation up to and including the answer that asks.
        deleted: ids that are deleted already.

    Raises:
        Refused: no such message, or one that cannot be deleted.
    """
    given = (call.arguments or {}).get("msg_id")
    if isinstance(given, str) and given.strip().isdecimal() and len(given) < 10:
        given = int(given)
    if isinstance(given, bool) or not isinstance(given, int):
        raise Refused(f"msg_id must be an integer, not {given!r:.100}")
    if not 0 <= given < len(messages) - 1:
        raise Refused(f"no message has msg_id {given}")
    if messages[given].get("role") == "system":
        raise Refused("the system message cannot be deleted")
    if given in deleted:
        raise Refused(f"message {given} is deleted already")
    return given


def _text(arguments: dict[str, Any], name: str) -> str:
    value = arguments.get(name)
    if not isinstance(value, str) or not value:
        raise Refused(f"{name} must be a text that is not empty")
    return value
