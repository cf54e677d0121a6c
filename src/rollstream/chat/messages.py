"""Messages as OpenAI's chat API has them, read into the one form in which everything here holds a conversation.

| as it may come | as it is held |
|---|---|
| `content: null`, `content: []`, none | `""`; a user's or a system message needs some |
| content as parts of text | one text, the parts on lines of their own |
| content with other parts, such as images | a list of parts |
| role `developer` | `system`: templates know the old name |
| role `function`, and `function_call` of an assistant | `tool`, and `tool_calls`: the form before 2023-11 |
| arguments of a call as JSON text, or none | a mapping; text that is no JSON object stays |
| keys whose value is null | left out |

The chat API of the gateway and of `rollstream serve`, and prompt rows, are read here; other APIs are brought
into OpenAI's form first.
"""

import difflib
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from rollstream.chat.parsers.base import ToolCall
from rollstream.errors import DataError
from rollstream.trajectory import Message

Part = dict[str, Any]

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


class MessageError(DataError):
    """A message cannot be read. `where` names it, such as `messages[1].content`."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where} {problem}")
        self.where = where


def keep_part(part: Part, where: str) -> Part:
    """Takes a part as it is: it has been read, or will be."""
    return part


def read_messages(
    messages: Sequence[Any],
    where: str,
    read_part: Callable[[Part, str], Part] = keep_part,
    *,
    any_role: bool = False,
) -> list[Message]:
    """Reads messages by the table of this module.

    Args:
        messages: OpenAI's; not changed.
        where: their name in errors.
        read_part: reads a part of a content that is no text, such as an image.
        any_role: roles that OpenAI does not know are taken, too, unless they look mistyped: some chat
            templates have their own.

    Raises:
        MessageError: a message is not whole.
    """
    read: list[Message] = []
    for at, message in enumerate(messages):
        read.append(_read_message(message, f"{where}[{at}]", read_part, any_role, read))
    return read


def answer_message(content: str, reasoning: str | None, calls: Sequence[ToolCall]) -> Message:
    """What a model says, thinks and calls; arguments that cannot be read are the text that it wrote."""
    message: Message = {"role": "assistant", "content": content.strip() if reasoning or calls else content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [_openai_call(call) for call in calls]
    return message


def _openai_call(call: ToolCall) -> dict[str, Any]:
    arguments = call.text if call.arguments is None else call.arguments
    return {"type": "function", "id": call.call_id, "function": {"name": call.name, "arguments": arguments}}


def read_arguments(arguments: Any) -> Any:
    """Arguments of a call as a mapping; what a model wrote that is no JSON object stays as it is."""
    if arguments is None:
        return {}
    if isinstance(arguments, str):
        try:
            value = orjson.loads(arguments or "{}")
        except orjson.JSONDecodeError:
            return arguments
        if isinstance(value, dict):
            return value
    return arguments


def _read_message(
    message: Any, where: str, read_part: Callable[[Part, str], Part], any_role: bool, before: list[Message]
) -> Message:
    if not isinstance(message, dict):
        raise MessageError(where, "must be a mapping with role and content")
    role = message.get("role")
    if not isinstance(role, str) or not role or (role not in ROLES and not any_role):
        keys = f"; its keys are {', '.join(map(str, message))}" if role is None else ""
        raise MessageError(f"{where}.role", f"is {role!r}, want one of {', '.join(ROLES)}{keys}")
    if role not in ROLES and (near := difflib.get_close_matches(role, ROLES, n=1, cutoff=0.85)):
        raise MessageError(f"{where}.role", f"is {role!r}; did you mean {near[0]!r}?")
    for key in ("name", "tool_call_id"):
        if not isinstance(message.get(key), str | None):
            raise MessageError(f"{where}.{key}", "must be a text")
    read: Message = {key: value for key, value in message.items() if value is not None}
    read["role"] = ROLES.get(role, role)
    if "content" not in read and read["role"] in ("system", "user"):
        raise MessageError(f"{where}.content", f"is missing (role {role})")
    read["content"] = _read_content(read.get("content"), f"{where}.content", read_part)
    calls = read.pop("tool_calls", None)
    if (old := read.pop("function_call", None)) is not None:
        calls = [{"id": f"c{len(before):08}", "type": "function", "function": old}]
    if calls:
        if not isinstance(calls, list):
            raise MessageError(f"{where}.tool_calls", "must be a list")
        read["tool_calls"] = [_read_call(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(calls)]
    if role == "function" and before and (calls := before[-1].get("tool_calls")):
        read.setdefault("tool_call_id", calls[0].get("id"))
    return read


def _read_content(content: Any, where: str, read_part: Callable[[Part, str], Part]) -> str | list[Part]:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise MessageError(where, "must be a text or a list of parts")
    parts: list[Part] = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise MessageError(f"{where}[{at}]", "must be a mapping with a type")
        if kind == "text":
            if not isinstance(part.get("text"), str):
                raise MessageError(f"{where}[{at}].text", "must be a text")
            parts.append({"type": "text", "text": part["text"]})
        else:
            parts.append(read_part(part, f"{where}[{at}]"))
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _read_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise MessageError(where, "needs a function with a name")
    if not isinstance(call.get("id"), str | None):
        raise MessageError(f"{where}.id", "must be a text")
    return {**call, "function": {**function, "arguments": read_arguments(function.get("arguments"))}}
