"""What a chat template puts between the turns of a conversation.

The prompt of the next turn is the prompt of this turn, the ids the model sampled, and the ids of what comes
between: the end of the assistant's turn, new messages, the beginning of the next answer. It is what the
template's rendering of the whole conversation has there, found by a mark in the place of the last answer:

    messages | answer: ...MARK | end of turn                                     rendered without what is new
    messages | answer: ...MARK | end of turn | new messages | generation prompt  rendered with it
                               ^---------------- what this module returns ----^

No sampled id is ever rendered again (R1). What the template would do to *earlier* turns when the whole
conversation were rendered again (drop their thinking, move a list of tools) is not done: those tokens were seen
by the model.
"""

import re
import secrets
import string
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rollstream.chat.processor import ChatProcessor
from rollstream.chat.tokenizer import ChatTokenizer
from rollstream.errors import DataError
from rollstream.trajectory import Message

if TYPE_CHECKING:
    from PIL.Image import Image

_MARK = "MARK" + "".join(secrets.choice(string.ascii_uppercase) for _ in range(20))
"""Stands for an answer. Letters only, so that no template trims, escapes or splits it; no text has it by chance."""
_MARKED: Message = {"role": "assistant", "content": _MARK}
_QUESTION: Message = {"role": "user", "content": "."}
_ANSWER: Message = {"role": "assistant", "content": "."}

_EXCHANGES = 8
"""The last calls with their results that are rendered; of older ones see `TurnTemplate._after`."""
_TAIL = 16
"""Sampled ids that are compared with what follows: an end of turn is a few tokens."""
_THINKING = ("<think>", "[THINK]")
"""What opens a thinking block."""

_REWRITES = (
    "the chat template leaves an assistant's turn out, or renders it in another way, when messages follow it, so "
    "what it puts between turns cannot be told; use another one (actor_rollout_ref.model.custom_chat_template)"
)

Tools = list[dict[str, Any]] | None


class TurnTemplate:
    """The ids between an answer and the next one, for one tokenizer. Shared by all rollouts of a worker."""

    def __init__(self, tokenizer: ChatTokenizer, processor: ChatProcessor | None = None) -> None:
        """`processor`: for messages with images."""
        self._tokenizer = tokenizer
        self._processor = processor
        self._call_ids: dict[tuple[int, bool], bool] = {}
        self._looks_back: dict[tuple[object, ...], bool] = {}

    def ids_after(
        self,
        messages: Sequence[Message],
        added: Sequence[Message],
        *,
        sampled_ids: Sequence[int],
        tools: Tools = None,
        images: Sequence["Image"] = (),
    ) -> list[int]:
        """Ids to put between an answer and the next one; none of them was sampled.

        Args:
            messages: the conversation up to the answer, which is the last one.
            added: what follows it: tool results, a user's message. An assistant's message among them is
                rendered, too.
            sampled_ids: what the model sampled for the answer. When it ends with (a part of) the end of the
                turn, that part is not added again; when it ends with another end token (see
                `ChatTokenizer.end_ids`) than the template's own, that token stands for the template's end.
            tools: schemas, as for the prompt.
            images: one for each image part of `added`, in order. They take time: call it in a thread then.

        Raises:
            DataError: the template refuses these messages, or renders the answer in another way when something
                follows it; there is no processor for the images.
        """
        text, marked = self._after(messages, added, tools)
        if not images:
            ids = self._tokenizer.encode(text)
        elif self._processor is not None:
            ids = self._processor.encode(text, images)
        else:
            raise DataError("the model has no image processor")
        return ids[self._already_there(sampled_ids, ids, lambda: self._end(marked, added, text, tools)) :]

    def why_not(self, *, calls: bool, tools: Tools = None) -> str | None:
        """Why nothing can follow an answer of text (or, with `calls`, one of a call); None if it can."""
        answer, added = _ANSWER, [_QUESTION]
        if calls:
            call = _call("c00000000", tools[0]["function"]["name"] if tools else "f")
            answer, added = {**answer, "tool_calls": [call]}, self.tool_messages([call], ["."])
        try:
            for sampled in ([], *([token] for token in sorted(self._tokenizer.end_ids))):
                self.ids_after([_QUESTION, answer], added, sampled_ids=sampled, tools=tools)
        except DataError as error:
            return str(error)
        return None

    def shows_tool(self, schema: dict[str, Any]) -> bool:
        """Whether the template tells the model of a tool."""
        try:
            return schema["function"]["name"] in self._tokenizer.render_text([_QUESTION], tools=[schema])
        except DataError:
            return False

    def takes_call_id(self, call_id: str) -> bool:
        """Whether the template renders a call and its result with an id like this one; some want a form."""
        form = (len(call_id), call_id.isalnum())
        if form not in self._call_ids:
            self._call_ids[form] = self._shows_result(call_id) or not self.has_tool_role
        return self._call_ids[form]

    @cached_property
    def has_tool_role(self) -> bool:
        """Whether the template shows messages of role `tool`; some refuse them, some leave them out."""
        return self._shows_result("c00000000")

    def _shows_result(self, call_id: str) -> bool:
        answer = {"role": "assistant", "content": "", "tool_calls": [_call(call_id)]}
        result = {"role": "tool", "content": _MARK, "tool_call_id": call_id, "name": "f"}
        try:
            return self._behind_mark([_QUESTION, answer, result], None) is not None
        except DataError:
            return False

    def tool_messages(self, calls: list[dict[str, Any]], contents: Sequence[Any]) -> list[Message]:
        """Tool results as messages of role `tool`, in order; one user message where there is no such role.

        `contents` are one for each of the assistant's calls: text, or a list of parts.
        """
        if self.has_tool_role:
            return result_messages(calls, contents)
        opening, closing = "<tool_response>\n", "\n</tool_response>"
        if all(isinstance(content, str) for content in contents):
            return [{"role": "user", "content": "\n".join(f"{opening}{text}{closing}" for text in contents)}]
        parts: list[dict[str, Any]] = []
        for content in contents:
            inner = [{"type": "text", "text": content}] if isinstance(content, str) else content
            parts += [{"type": "text", "text": opening}, *inner, {"type": "text", "text": closing}]
        return [{"role": "user", "content": parts}]

    def in_thinking(self, context: Sequence[int]) -> bool:
        """Whether a prompt leaves the model inside a thinking block that the template has opened."""
        tail = self._tokenizer.decode(list(context[-_TAIL:]), skip_special_tokens=False).rstrip()
        return tail.endswith(_THINKING)

    def _after(
        self, messages: Sequence[Message], added: Sequence[Message], tools: Tools
    ) -> tuple[str, list[Message]]:
        """Renders what follows the answer, and gives the conversation with a mark in the answer's place.

        Older calls are left out, once it is known of such a turn that the template does not look back to them.
        """
        recent = _recent(messages)
        kind = (frozenset(m["role"] for m in added), bool(tools), bool(messages[-1].get("tool_calls")))
        if len(recent) == len(messages) or self._looks_back.get(kind) is False:
            return self._render_after(recent, added, tools)
        after = self._render_after(messages, added, tools)
        if kind not in self._looks_back:
            self._looks_back[kind] = after[0] != self._render_after(recent, added, tools)[0]
        return after

    def _render_after(
        self, messages: Sequence[Message], added: Sequence[Message], tools: Tools
    ) -> tuple[str, list[Message]]:
        refusal: DataError | None = None
        for shown in _ways(messages):
            marked = [*shown[:-1], _marked(shown[-1])]
            try:
                whole = self._behind_mark([*marked, *added], tools)
                if whole is None:
                    continue  # the template does not show such answers
                syntax = self._split(marked, tools)[0] if marked[-1].get("tool_calls") else ""
            except DataError as error:
                refusal = refusal or error
                continue
            if not whole.startswith(syntax):
                raise DataError(_REWRITES)
            return whole.removeprefix(syntax), marked
        raise refusal or DataError(_REWRITES)

    def _behind_mark(self, messages: list[Message], tools: Tools, *, prompt: bool = True) -> str | None:
        """The text behind the last mark; None if there is no mark."""
        text = self._tokenizer.render_text(messages, tools=tools, add_generation_prompt=prompt)
        _, found, after = text.rpartition(_MARK)
        return after if found else None

    def _split(self, marked: list[Message], tools: Tools) -> tuple[str, str]:
        """Reads what stands behind the mark of the last message when nothing follows.

        Returns:
            The syntax that closes a call, which the model has written itself; and how the turn ends, such as
            `<|im_end|>\\n`: maybe by nothing at all. Where a generation prompt is always written, it is there, too.
        """
        alone = self._behind_mark(marked, tools, prompt=False)
        if alone is not None and marked[-1].get("tool_calls") and (known := self._ends.search(alone)):
            return alone[: known.start()], alone[known.start() :]
        end = self._behind_mark([*marked[:-1], _MARKED], tools, prompt=False) or ""
        if alone is None or not marked[-1].get("tool_calls"):  # maybe it does not show calls
            return "", end
        start = len(alone)
        if alone.endswith(end):
            start -= len(end)
        elif structure := [match.start() for match in self._tokenizer.find_special_tokens(alone)]:
            start = structure[-1]
        return alone[:start], alone[start:]

    def _end(self, marked: list[Message], added: Sequence[Message], after: str, tools: Tools) -> str:
        """How the last turn ends, or one that something follows if the last one stays open; "" if that is unknown.

        Raises:
            DataError: the template puts text of its own before the end if something follows.
        """
        try:
            syntax, end = self._split(marked, tools)
            if not end.strip():
                other = _ANSWER if added[0]["role"] == "user" else _QUESTION
                known = self._behind_mark([*marked, other], tools) or ""
                kept = after[: _shared([after, known.removeprefix(syntax)])]  # whoever speaks next
                found = self._ends.search(kept)
                return kept[: found.end()] if found else ""
        except DataError:
            return ""
        own, put = map(self._text_first, (end, after))
        if own not in (put, end.strip()) and not any(text.strip() in put for text in _texts(added[0])):
            raise DataError(_REWRITES)
        return end

    def _text_first(self, text: str) -> str:
        """The text before the first special token, without white space; all of it, if there is none."""
        first = next(self._tokenizer.find_special_tokens(text), None)
        return text[: first and first.start()].strip()

    @cached_property
    def _ends(self) -> re.Pattern[str]:
        decode = self._tokenizer.decode
        texts = (decode([token], skip_special_tokens=False) for token in sorted(self._tokenizer.end_ids))
        return re.compile("|".join(re.escape(text) for text in texts if text.strip()) or r"(?!)")

    def _already_there(self, sampled: Sequence[int], ids: list[int], find_end: Callable[[], str]) -> int:
        """How many of `ids`, which the template puts after the answer, the sampled ids make superfluous.

        `find_end` gives what it puts there when nothing follows; "" when it does not mark the end.
        """
        tokenizer = self._tokenizer
        tail = list(sampled[-_TAIL:])
        for length in range(min(len(tail), len(ids)), 0, -1):
            if tail[-length:] == ids[:length]:
                return length  # the end, or a part of it, such as a stop string that begins the next turn
        if not sampled or sampled[-1] not in tokenizer.end_ids:
            return 0
        end = find_end()
        if not end.strip():  # the role token of the next turn may be the end
            for at, token_id in enumerate(ids[:_TAIL]):
                if token_id == sampled[-1]:
                    return at + 1
                if tokenizer.decode([token_id], skip_special_tokens=False).strip():
                    break
            return 0
        # Another token ended the turn. The template's end is what is there whether something follows or not, or
        # one token: some have another one at the end of all.
        reach = ids[: _shared([tokenizer.encode(end), ids]) or 1]
        ends = [at for at, token_id in enumerate(reach) if token_id == sampled[-1]]
        ends = ends or [at for at, token_id in enumerate(reach) if token_id in tokenizer.end_ids]
        ends = ends or [at for at, token_id in enumerate(reach) if token_id in tokenizer.special_ids][:1]
        return ends[-1] + 1 if ends else 0


def result_messages(calls: Sequence[dict[str, Any]], contents: Sequence[Any]) -> list[Message]:
    """Tool results as messages of role `tool`, in the order of the assistant's calls."""
    return [
        {"role": "tool", "content": content, "tool_call_id": call["id"], "name": call["function"]["name"]}
        for call, content in zip(calls, contents, strict=True)
    ]


def _call(call_id: str, name: str = "f") -> dict[str, Any]:
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": {}}}


def _with_arguments(call: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _marked(answer: Message) -> Message:
    """An assistant's message whose last words are the mark."""
    if not (calls := answer.get("tool_calls")):
        return _MARKED
    return {
        **_MARKED,
        "content": "",
        "tool_calls": [_with_arguments(call, {"mark": _MARK}) for call in calls],
    }


def _ways(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """A conversation that ends with an answer: as it is, and in forms for templates that refuse it so.

    Some take one call in a turn only, some mappings as arguments only, some no calls.
    """
    tried = [*messages]
    yield tried
    for taken in (slice(None), slice(-1, None), slice(0)):
        way = [_with_calls(message, taken) if message.get("tool_calls") else message for message in messages]
        if way != tried:
            yield way
        tried = way


def _with_calls(message: Message, taken: slice) -> Message:
    """A message with some of its calls, whose arguments are mappings, whatever the model wrote."""
    calls = []
    for call in message["tool_calls"][taken]:
        arguments = call["function"]["arguments"]
        calls.append(
            call if isinstance(arguments, dict) else _with_arguments(call, {"unreadable": arguments})
        )
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "tool_calls": calls} if calls else rest


def _texts(message: Message) -> list[str]:
    content = message.get("content") or ""
    return [content] if isinstance(content, str) else [part.get("text", "") for part in content]


def _recent(messages: Sequence[Message]) -> Sequence[Message]:
    """A conversation without its older calls and their results."""
    exchanges: list[range] = []
    for at, message in enumerate(messages[:-1]):
        if message.get("tool_calls") and messages[at + 1]["role"] == "tool":
            exchanges.append(range(at, at + 1))
        elif message["role"] == "tool" and exchanges and exchanges[-1].stop == at:
            exchanges[-1] = range(exchanges[-1].start, at + 1)
    old = {at for exchange in exchanges[:-_EXCHANGES] for at in exchange}
    return [message for at, message in enumerate(messages) if at not in old] if old else messages


def _shared(texts: Sequence[Sequence[Any]]) -> int:
    """How many letters, or tokens, from the first are the same in all."""
    places = enumerate(zip(*texts, strict=False))
    return next((at for at, each in places if len({*each}) > 1), min(map(len, texts)))
