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

_BEFORE, _MARK, _AFTER = _MARKS = "ROLLSTREAMBEFORE", "ROLLSTREAMPROBE", "ROLLSTREAMAFTER"
"""Letters only: no template trims, escapes or splits them."""

_QUESTION: Message = {"role": "user", "content": "."}

_CALL_ID = "c00000000"
"""Nine letters and digits: Mistral's templates take no other id."""


class TemplateForm:
    """Brings conversations into the form that a chat template shows whole."""

    def __init__(self, render: Callable[[list[Message]], str]) -> None:
        """`render` is the template; it may raise whatever it likes."""
        self._render = render
        self._shown: dict[tuple[str | None, str, str | None], bool] = {}
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
        if all(message["role"] in ("user", "assistant") for message in messages):
            return self._users_apart(messages)
        joined = _joined(messages, "system")
        placed: list[Message] = []
        moved: Message | None = None
        for at, message in enumerate(joined):
            role = message["role"]
            if moved is not None and role == "user":
                message, moved = _together(moved, message), None
            elif moved is not None:
                _add_as_user(placed, moved)
                moved = None
            if role in ("user", "assistant") or self._is_shown(joined, at):
                placed.append(message)
            elif role == "system":
                moved = message
                self._warn()
            else:
                raise DataError(f"the chat template leaves out messages[{at}], which has the role {role!r}")
        if moved is not None:
            _add_as_user(placed, moved)
        return self._users_apart(placed)

    def _users_apart(self, messages: list[Message]) -> list[Message]:
        """Users' messages that follow each other are one, where the template wants roles to alternate."""
        in_a_row = any(one["role"] == "user" == other["role"] for one, other in pairwise(messages))
        return _joined(messages, "user") if in_a_row and not self._takes_users_in_a_row else messages

    def _typed(self, messages: list[Message]) -> list[Message]:
        if self._takes_parts_only:
            messages = [_in_parts(message) for message in messages]
        if any(message.get("tool_calls") for message in messages) and self._takes_argument_text:
            messages = [_with_argument_text(message) for message in messages]
        if any(_has_calls_alone(message) for message in messages) and self._takes_no_empty_text:
            messages = [_in_parts(message) if _has_calls_alone(message) else message for message in messages]
        return messages

    def _warn(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the chat template takes no system message at some places: their text stands in a user's turn"
            )

    def _is_shown(self, messages: list[Message], at: int) -> bool:
        """Whether the template shows a message where it stands, by the roles around it."""
        role: str = messages[at]["role"]
        before = messages[at - 1]["role"] if at else None
        after = messages[at + 1]["role"] if at + 1 < len(messages) else None
        kind = (before, role, after)
        if kind not in self._shown:
            try:
                text = self._render(self._typed(_probe(*kind)))
                places = [place for mark in _MARKS if (place := text.find(mark)) >= 0]
                # A system message that is shown elsewhere is lost when only what is new is rendered.
                in_place = role != "system" or places == sorted(places)
                self._shown[kind] = _MARK in text and in_place
            except Exception:
                self._shown[kind] = role != "system"  # the conversation itself will be refused, and says why
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
        text = self._try(*self._typed([{"role": "user", "content": mark} for mark in (_BEFORE, _MARK)]))
        return _BEFORE in text and _MARK in text

    @cached_property
    def _takes_no_empty_text(self) -> bool:
        """Whether an answer of calls alone needs a list of parts, as for a template that looks into `content[0]`."""
        answer = _answer(json.dumps({_BEFORE: _AFTER}) if self._takes_argument_text else {_BEFORE: _AFTER})
        as_text, as_parts = self._try(_QUESTION, answer), self._try(_QUESTION, _in_parts(answer))
        return _BEFORE not in as_text and _BEFORE in as_parts

    @cached_property
    def _takes_argument_text(self) -> bool:
        """Whether arguments of calls have to be JSON text: a mapping is refused, or shown as Python writes it."""
        arguments = {_BEFORE: _AFTER}
        answer = _answer(arguments)
        as_mapping, as_text = self._try(_QUESTION, answer), self._try(_QUESTION, _with_argument_text(answer))
        return json.dumps(arguments) in as_text and (not as_mapping or str(arguments) in as_mapping)


def _probe(*roles: str | None) -> list[Message]:
    """A short conversation with marked messages of these roles; None: nothing stands there."""
    messages: list[Message] = []
    for role, mark in zip(roles, _MARKS, strict=True):
        if role in ("assistant", "tool") and all(message["role"] == "system" for message in messages):
            messages.append(_QUESTION)
        last = messages[-1]["role"] if messages else None
        if role == "tool" and last not in ("assistant", "tool"):
            messages.append({"role": "assistant", "content": ""})
        if role == "tool" and last != "tool":
            messages[-1] = {**messages[-1], "tool_calls": [_call({})]}
        if role == "tool":
            messages.append({"role": role, "content": mark, "tool_call_id": _CALL_ID, "name": "f"})
        elif role is not None:
            messages.append({"role": role, "content": mark})
    return messages


def _call(arguments: Any) -> dict[str, Any]:
    return {"id": _CALL_ID, "type": "function", "function": {"name": "f", "arguments": arguments}}


def _answer(arguments: Any) -> Message:
    """An answer that is one call."""
    return {"role": "assistant", "content": "", "tool_calls": [_call(arguments)]}


def _joined(messages: list[Message], role: str) -> list[Message]:
    """Messages of a role that follow each other are one."""
    joined: list[Message] = []
    for message in messages:
        if message["role"] == role and joined and joined[-1]["role"] == role:
            joined[-1] = _together(joined[-1], message)
        else:
            joined.append(message)
    return joined


def _together(first: Message, second: Message) -> Message:
    """The second message with the content of both."""
    before, after = first.get("content") or "", second.get("content") or ""
    if isinstance(before, str) and isinstance(after, str):
        return {**second, "content": f"{before}\n\n{after}"}
    return {**second, "content": [*_parts(before), *_parts(after)]}


def _add_as_user(placed: list[Message], system: Message) -> None:
    if placed and placed[-1]["role"] == "user":
        placed[-1] = {**placed[-1], "content": _together(placed[-1], system)["content"]}
    else:
        placed.append({"role": "user", "content": system["content"]})


def _parts(content: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _has_calls_alone(message: Message) -> bool:
    return bool(message.get("tool_calls")) and message.get("content") == ""


def _in_parts(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": _parts(content)} if isinstance(content, str) else message


def _with_argument_text(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": _text(call["function"].get("arguments"))}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _text(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments
