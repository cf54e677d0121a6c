"""The form in which a chat template shows a conversation whole.

Templates differ in what they take: content as text or as parts, arguments of calls as mappings or as JSON text,
system messages at the start only, or none. What a template would refuse or leave out is found out by rendering
short conversations with marks in them, once for each kind of place, and avoided:

    system, system, user               one system message, its texts joined
    user, assistant, system, user      as it is, where the template shows it there; else
    user, assistant, user              the system's text stands before the user's
    user, user                         as it is, where the template takes it; else one message, its texts joined
"""

import json
import logging
from collections.abc import Callable
from functools import cached_property
from itertools import pairwise
from typing import Any

from rollstream.errors import DataError
from rollstream.trajectory import Message

logger = logging.getLogger(__name__)

_MARKS = "ROLLSTREAMBEFORE", "ROLLSTREAMPROBE", "ROLLSTREAMAFTER"
"""Letters only: no template trims, escapes or splits them."""
_MARK = _MARKS[1]
_QUESTION: Message = {"role": "user", "content": "."}
_ARGUMENT = "ROLLSTREAMARGUMENT"
_ARGUMENTS = {_ARGUMENT: "."}
_CALL: dict[str, Any] = {
    "id": "c00000000",
    "type": "function",
    "function": {"name": "f", "arguments": _ARGUMENTS},
}
"""Its id has nine letters and digits: Mistral's templates take no other one."""
_CALLS_ALONE: Message = {"role": "assistant", "content": "", "tool_calls": [_CALL]}


class TemplateForm:
    """Brings conversations into the form that a chat template shows whole."""

    def __init__(self, render: Callable[[list[Message]], str]) -> None:
        """`render` is the template; it may raise whatever it likes."""
        self._render = render
        self._shown: dict[tuple[str | None, ...], bool] = {}
        self._has_warned = False

    def of(self, messages: list[Message]) -> list[Message]:
        """The conversation as the template takes it. Raises `DataError`: see `placed`."""
        return self._typed(self.placed(messages))

    def placed(self, messages: list[Message]) -> list[Message]:
        """The conversation with its system messages where the template shows them, and users' turns as it takes them.

        System messages that follow each other are one. One that the template would refuse or leave out becomes
        text of the user's turn after it; of the turn before it, where no user's turn follows; else a turn of its
        own. Rendering it piece by piece gives the same, where each piece begins with an answer.

        Raises:
            DataError: the template leaves out a message of another role.
        """
        placed: list[Message] = []
        moved: list[Message] = []
        joined = _joined(messages, "system")
        for at, message in enumerate(joined):
            role = message["role"]
            if moved and role == "user":
                message = _together(moved.pop(), message)
            elif moved:
                _append(placed, moved.pop(), "user")
            if role in ("user", "assistant") or self._is_shown(joined, at):
                placed.append(message)
            elif role == "system":
                moved = [{"role": "user", "content": message["content"]}]
                self._warn()
            else:
                raise DataError(f"the chat template leaves out messages[{at}], which has the role {role!r}")
        for message in moved:
            _append(placed, message, "user")
        in_a_row = any(first["role"] == "user" == second["role"] for first, second in pairwise(placed))
        return _joined(placed, "user") if in_a_row and not self._takes_users_in_a_row else placed

    def _typed(self, messages: list[Message]) -> list[Message]:
        if self._takes_parts_only:
            messages = [_in_parts(message) for message in messages]
        if any(message.get("tool_calls") for message in messages):
            if self._takes_argument_text:
                messages = [_with_argument_text(message) for message in messages]
            if any(map(_is_calls_alone, messages)) and self._takes_no_empty_text:
                messages = [
                    _in_parts(message) if _is_calls_alone(message) else message for message in messages
                ]
        return messages

    def _warn(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the chat template takes no system message at some places: their text stands in a user's turn"
            )

    def _is_shown(self, messages: list[Message], at: int) -> bool:
        """Whether the template shows a message where it stands, by the roles around it."""
        kind = tuple(messages[i]["role"] if 0 <= i < len(messages) else None for i in (at - 1, at, at + 1))
        if kind not in self._shown:
            is_system = kind[1] == "system"
            try:
                text = self._render(self._typed(_probe(kind)))
                places = [place for mark in _MARKS if (place := text.find(mark)) >= 0]
                # A system message that is shown elsewhere is lost when only what is new is rendered.
                self._shown[kind] = _MARK in text and (not is_system or places == sorted(places))
            except Exception:
                self._shown[kind] = not is_system  # the conversation itself will be refused, and says why
        return self._shown[kind]

    def _try(self, *messages: Message) -> str:
        """Renders messages; "" if the template refuses them."""
        try:
            return self._render([*messages])
        except Exception:
            return ""

    @cached_property
    def _takes_parts_only(self) -> bool:
        """Whether the template leaves text out unless it is a list of parts, as those of some models with images."""
        message = {"role": "user", "content": _MARK}
        return _MARK not in self._try(message) and _MARK in self._try(_in_parts(message))

    @cached_property
    def _takes_users_in_a_row(self) -> bool:
        """Whether the template shows two messages of a user that follow each other."""
        marks = _MARKS[:2]
        text = self._try(*self._typed([{"role": "user", "content": mark} for mark in marks]))
        return all(mark in text for mark in marks)

    @cached_property
    def _takes_no_empty_text(self) -> bool:
        """Whether an answer of calls alone needs a list of parts, as for a template that looks into `content[0]`."""
        answer = _with_argument_text(_CALLS_ALONE) if self._takes_argument_text else _CALLS_ALONE
        as_text, as_parts = self._try(_QUESTION, answer), self._try(_QUESTION, _in_parts(answer))
        return _ARGUMENT not in as_text and _ARGUMENT in as_parts

    @cached_property
    def _takes_argument_text(self) -> bool:
        """Whether arguments of calls have to be JSON text: a mapping is refused, or shown as Python writes it."""
        as_mapping = self._try(_QUESTION, _CALLS_ALONE)
        as_text = self._try(_QUESTION, _with_argument_text(_CALLS_ALONE))
        return json.dumps(_ARGUMENTS) in as_text and (not as_mapping or str(_ARGUMENTS) in as_mapping)


def _probe(roles: tuple[str | None, ...]) -> list[Message]:
    """A short conversation with marked messages of these roles; None: nothing stands there."""
    messages: list[Message] = []
    for role, mark in zip(roles, _MARKS, strict=True):
        if role is None:
            continue
        if role in ("assistant", "tool") and all(message["role"] == "system" for message in messages):
            messages.append(_QUESTION)
        message = {"role": role, "content": mark}
        if role == "tool":
            message |= {"tool_call_id": _CALL["id"], "name": "f"}
            if messages[-1]["role"] == "assistant":
                messages[-1] = {**messages[-1], "tool_calls": [_CALL]}
            elif messages[-1]["role"] != "tool":
                messages.append(_CALLS_ALONE)
        messages.append(message)
    return messages


def _joined(messages: list[Message], role: str) -> list[Message]:
    """Messages of a role that follow each other are one."""
    joined: list[Message] = []
    for message in messages:
        _append(joined, message, role)
    return joined


def _append(messages: list[Message], message: Message, role: str) -> None:
    if messages and messages[-1]["role"] == message["role"] == role:
        messages[-1] = _together(messages[-1], message)
    else:
        messages.append(message)


def _together(first: Message, second: Message) -> Message:
    """One message with the content of both."""
    before, after = first.get("content") or "", second.get("content") or ""
    if isinstance(before, str) and isinstance(after, str):
        content: Any = f"{before}\n\n{after}"
    else:
        content = [*_parts(before), *_parts(after)]
    return {**first, **second, "content": content}


def _parts(content: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _is_calls_alone(message: Message) -> bool:
    return bool(message.get("tool_calls")) and message.get("content") == ""


def _in_parts(message: Message) -> Message:
    return {**message, "content": _parts(message["content"])} if "content" in message else message


def _with_argument_text(message: Message) -> Message:
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"].get("arguments")
        if isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls} if calls else message
