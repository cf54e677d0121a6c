"""OpenAI's chat messages as chat templates want them."""

from collections.abc import Sequence
from typing import Any

import orjson

from rollstream.chat.tool_schema import check_names_differ, check_tool_schema
from rollstream.serving.refusals import RequestError
from rollstream.trajectory import Message

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""OpenAI renamed the system role; templates know the old name, and many drop a role that they don't know."""


def read_messages(messages: Sequence[Any]) -> list[Message]:
    """Messages with text as content and with arguments of calls as mappings.

    Raises:
        RequestError: naming the message that cannot be shown to the model as it is meant.
    """
    if not messages:
        raise RequestError("'messages' is empty", param="messages")
    return [_read_message(message, f"messages[{at}]") for at, message in enumerate(messages)]


def read_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Tool schemas, word for word. Raises `ConfigError` when one is not whole."""
    for at, tool in enumerate(tools):
        check_tool_schema(tool, f"tools[{at}]")
    check_names_differ((tool["function"]["name"] for tool in tools), "tools")
    return list(tools)


def _read_message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise RequestError(f"{where} must be an object", param=where)
    role = message.get("role")
    if role not in _ROLES:
        raise RequestError(
            f"{where}.role is {role!r}, want one of {', '.join(_ROLES)}", param=f"{where}.role"
        )
    if message.get("function_call") is not None:
        raise RequestError(f"{where}.function_call is not supported: use tool_calls", param=where)
    read: Message = {key: value for key, value in message.items() if value is not None}
    read["role"] = _ROLES[role]
    read["content"] = _read_content(message.get("content"), f"{where}.content")
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise RequestError(f"{where}.tool_calls must be a list", param=f"{where}.tool_calls")
        read["tool_calls"] = [_read_call(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(calls)]
    return read


def _read_content(content: Any, where: str) -> str:
    if content is None:
        return ""  # of a message that only calls tools; templates join it with text
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a text or a list of parts", param=where)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(f"{where} has a part of type {kind!r}; only text is supported", param=where)
        texts.append(part["text"])
    return "\n".join(texts)


def _read_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} needs a function with a name", param=where)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            value = orjson.loads(arguments or "{}")
        except orjson.JSONDecodeError:
            value = None  # what a model wrote that is no JSON stays as it is
        if isinstance(value, dict):
            arguments = value
    return {**call, "function": {**function, "arguments": arguments}}
