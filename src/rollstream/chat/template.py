"""What a chat template puts between the turns of a conversation.

The prompt of the next turn is the prompt of this turn, the ids the model sampled, and the ids of what comes
between: the end of the assistant's turn, new messages, the beginning of the next answer. Only the last part
is rendered here, by the difference of two renderings of a short conversation, so its cost does not grow with
the history and no sampled id is ever rendered again (R1).

    question | answer: ...MARK | end of turn                                     rendered alone
    question | answer: ...MARK | end of turn | new messages | generation prompt  rendered with what is new
                               ^---------------- what this module returns ----^

The same for any template. What the template would do to *earlier* turns when the whole conversation were
rendered again (drop their thinking, move a list of tools) is not done: those tokens were seen by the model.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from rollstream.chat.processor import ChatProcessor
from rollstream.chat.tokenizer import ChatTokenizer
from rollstream.errors import DataError
from rollstream.trajectory import Message

if TYPE_CHECKING:
    from PIL.Image import Image

_MARK = "ROLLSTREAMMARK"
"""Stands for an answer. Letters only: no template trims, escapes or splits it."""

_QUESTION: Message = {"role": "user", "content": "."}

_CLOSES = 128
"""Ways to end a turn that are remembered: without calls, or with calls of these tools in this order."""

_NASTY = (
    *(
        "",
        " ",
        "\n",
        " a ",
        "\n\na\n\n",
        "\t",
        "a\r\nb",
        "{{ a }}",
        "{% a %}",
        "{# a #}",
        "<|im_end|>",
        "&<'\">",
    ),
    *(
        '"a"',
        "\\n\\",
        "[1]",
        '{"a": 1}',
        "<think>a</think>b",
        "<tool_response>\na\n</tool_response>",
        "\u00e9\u200b",
    ),
    *("1", "none", "a|b", "a" * 5000),
)
"""Contents that templates trim, escape, parse or take for something else."""

_SPLICES = 128
"""Shapes of turns that are spliced: finding one out takes as long as some 80 renderings. Others are rendered."""

_PLAIN = frozenset({"role", "content", "tool_call_id", "name"})
"""Keys of messages that are spliced."""

_TAIL = 16
"""Sampled ids that are compared with what follows: an end of turn is a few tokens."""

_THINKING = {"<think>": "</think>", "[THINK]": "[/THINK]"}
"""What opens a thinking block, and what closes it."""

THINKING_OPENERS = tuple(_THINKING)
"""With these at its end, a prompt leaves the model inside a thinking block."""


@dataclass(frozen=True, slots=True)
class _Close:
    """How the template ends an assistant's turn."""

    calls: int
    """How many of the turn's calls, from the last, are rendered: some templates refuse more than one."""
    marks: int
    """How often the mark was rendered; what follows the last one counts."""
    syntax: str
    """What closes the last call. The model has written it itself."""
    end: str
    """The marker of the turn's end and what follows it, such as `<|im_end|>\\n`. May be empty."""

    def cut(self, rendered: str) -> str | None:
        """What follows the answer in a rendering; None if it does not end there as expected."""
        parts = rendered.split(_MARK, self.marks)
        if len(parts) <= self.marks or not parts[-1].startswith(self.syntax):
            return None
        return parts[-1].removeprefix(self.syntax)


@dataclass(frozen=True, slots=True)
class _Splice:
    """What the template puts around the contents of some messages, each of which it copies as it is."""

    around: list[str]
    """Before the first content, between each two, behind the last one."""
    end: str
    """The same as of `_Close`."""

    def text(self, contents: Sequence[str]) -> str:
        """What the template puts after the answer."""
        first, *others = self.around
        return first + "".join(content + after for content, after in zip(contents, others, strict=True))


class TurnTemplate:
    """The ids between an answer and the next one, for one tokenizer. Shared by all rollouts of a worker."""

    def __init__(self, tokenizer: ChatTokenizer, processor: ChatProcessor | None = None) -> None:
        """`processor`: for messages with images."""
        self._tokenizer = tokenizer
        self._processor = processor
        self._closes: dict[tuple[object, ...], _Close] = {}
        self._splices: dict[tuple[object, ...] | None, _Splice | None] = {}
        self._call_ids: dict[tuple[int, bool], bool] = {}
        self._length = cache(lambda end: len(tokenizer.encode(end)))  # of ends of turns, which are few

    def ids_after(
        self,
        answer: Message,
        added: list[Message],
        *,
        sampled_ids: Sequence[int],
        tools: list[dict[str, Any]] | None = None,
        images: Sequence["Image"] = (),
        generation_prompt: bool = True,
    ) -> list[int]:
        """Ids to put between an answer and the next one; none of them was sampled.

        Args:
            answer: the assistant's message; only its `tool_calls` matter.
            added: what follows it: tool results, a user's message.
            sampled_ids: what the model sampled for the answer. When it ends with (a part of) the end of the
                turn, that part is not added again; when it ends with another end token (see
                `ChatTokenizer.end_ids`) than the template's own, that token stands for it.
            tools: schemas, as for the prompt.
            images: one for each image part of `added`, in order. They take time: call it in a thread then.
            generation_prompt: end with the beginning of the next answer.

        Raises:
            DataError: the template refuses these messages, or there is no processor for the images.
        """
        if not self._tokenizer.makes_ids:
            return []
        text, end = self._text_after(answer, added, tools, generation_prompt)
        if not images:
            ids = self._tokenizer.encode(text)
        elif self._processor is not None:
            ids = self._processor.encode(text, images)
        else:
            raise DataError("the model has no image processor")
        return ids[self._already_there(sampled_ids, ids, end) :]

    def _text_after(
        self,
        answer: Message,
        added: list[Message],
        tools: list[dict[str, Any]] | None,
        generation_prompt: bool = True,
    ) -> tuple[str, str]:
        """What follows the answer, and the end of the turn when nothing follows."""
        shape = self._shape(answer, added, tools, generation_prompt)
        if shape is not None and shape not in self._splices and len(self._splices) < _SPLICES:
            self._splices[shape] = self._find_splice(answer, added, tools, generation_prompt)
        splice = self._splices.get(shape)
        if splice is None:
            return self._render_after(answer, added, tools, generation_prompt)
        return splice.text([message["content"] for message in added]), splice.end

    def _shape(
        self,
        answer: Message,
        added: list[Message],
        tools: list[dict[str, Any]] | None,
        generation_prompt: bool,
    ) -> tuple[object, ...] | None:
        """What decides how the template renders these messages, but for their contents; None: it is not known."""
        if not added or not self._tokenizer.template_texts:
            return None
        messages: list[object] = []
        for message in added:
            if not isinstance(message.get("content"), str) or not message.keys() <= _PLAIN:
                return None
            messages.append((message["role"], message.get("name"), "tool_call_id" in message))
        calls = [
            (call["function"]["name"], len(call["id"]), call["id"].isalnum())
            for call in answer.get("tool_calls") or ()
        ]
        shown = [tool["function"]["name"] for tool in tools or ()]
        return (*calls, None, *messages, None, *shown, generation_prompt)

    def _find_splice(
        self,
        answer: Message,
        added: list[Message],
        tools: list[dict[str, Any]] | None,
        generation_prompt: bool,
    ) -> _Splice | None:
        """None where the template shows the ids of calls, or does not copy every content as it is.

        This is known by trying: what breaks careless templates, and each text that this one compares with.
        """

        def render(contents: list[str], letter: str = "x") -> tuple[str, str]:
            ids = {call["id"]: letter + call["id"][1:] for call in answer.get("tool_calls") or ()}
            calls = [{**call, "id": ids[call["id"]]} for call in answer.get("tool_calls") or ()]
            messages = [{**message, "content": given} for message, given in zip(added, contents, strict=True)]
            for message in messages:
                if call_id := message.get("tool_call_id"):
                    message["tool_call_id"] = ids.get(call_id, call_id)
            return self._render_after({**answer, "tool_calls": calls}, messages, tools, generation_prompt)

        texts = self._tokenizer.template_texts
        nasty = (*_NASTY, *texts, *(f"{text}.{text}" for text in texts))
        marks = [f"ROLLSTREAMCONTENT{chr(ord('A') + at)}" for at in range(len(added))]
        tried = [
            [nasty[(start + at) % len(nasty)] for at in range(len(added))] for start in range(len(nasty))
        ]
        try:
            after, end = render(marks)
            splice = _Splice(re.split("|".join(map(re.escape, marks)), after), end)
            once = len(splice.around) == len(marks) + 1 and splice.text(marks) == after
            copied = once and render(marks, "y")[0] == after
            copied = copied and all(render(contents)[0] == splice.text(contents) for contents in tried)
        except DataError:
            return None  # it refuses some content
        return splice if copied else None

    def _render_after(
        self,
        answer: Message,
        added: list[Message],
        tools: list[dict[str, Any]] | None,
        generation_prompt: bool,
    ) -> tuple[str, str]:
        calls: list[dict[str, Any]] = answer.get("tool_calls") or []
        close = self._close(calls, tools)
        marked = _marked_answer(calls[len(calls) - close.calls :])
        rendered = self._tokenizer.render_text(
            [_QUESTION, marked, *added], tools=tools, add_generation_prompt=generation_prompt
        )
        after = close.cut(rendered)
        if after is None:
            close = self._find_close(calls, tools)  # the ids of these calls stand behind the mark
            after = close.cut(rendered)
        if after is None:
            raise DataError(
                "the chat template renders an assistant's turn in another way when messages follow it, so "
                "what it puts between turns cannot be told; use a template that does not "
                "(actor_rollout_ref.model.custom_chat_template)"
            )
        return after, close.end

    def exchange_ids(
        self,
        answer: Message,
        added: list[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        generation_prompt: bool = True,
    ) -> list[int]:
        """Ids of an answer that no model wrote and what follows it, as the template writes earlier turns.

        They follow a prompt that was rendered without a generation prompt.

        Raises:
            DataError: the template refuses the messages, or renders what comes before an answer in another
                way than without it.
        """
        before = self._tokenizer.render_text([_QUESTION], tools=tools, add_generation_prompt=False)
        whole = self._tokenizer.render_text(
            [_QUESTION, answer, *added], tools=tools, add_generation_prompt=generation_prompt
        )
        if not whole.startswith(before):
            raise DataError("the chat template renders a question in another way when an answer follows it")
        return self._tokenizer.encode(whole.removeprefix(before))

    def answer_ids(
        self, answer: Message, *, tools: list[dict[str, Any]] | None = None, ended: bool = True
    ) -> list[int]:
        """Ids of an answer of which only the message is known, as the template writes it.

        They follow a prompt with its generation prompt, and `ids_after` follows them. They are what a model
        of this template would have sampled to say this in the template's own words; nobody sampled them.

        Args:
            answer: the assistant's message; arguments of calls are mappings, or text if unreadable.
            tools: schemas, as for the prompt.
            ended: whether the turn has ended: then the token that ends it is the last one, if the tokenizer
                knows it for an end (`ChatTokenizer.end_ids`).

        Raises:
            DataError: the template refuses the message.
        """
        if not self._tokenizer.makes_ids:
            return []
        calls: list[dict[str, Any]] = answer.get("tool_calls") or []
        together = len(calls) < 2
        if not together:
            close = self._close(calls, tools)
            together = close.calls == len(calls) <= close.marks
        if together:
            text = self._answer_text(answer, tools)
        else:  # some templates refuse, or leave out, all but one: one after the other, in one turn
            parts = [{**answer, "tool_calls": calls[:1]}]
            parts += [{"role": "assistant", "content": "", "tool_calls": [call]} for call in calls[1:]]
            *begun, last = [self._answer_text(part, tools) for part in parts]
            text = "".join(self._without_end(one, calls[:1], tools) for one in begun) + last
        tokenizer = self._tokenizer
        if ended:
            ids = tokenizer.encode(text)
            for at in range(len(ids) - 1, -1, -1):
                if ids[at] in tokenizer.end_ids:
                    return ids[: at + 1]
                if tokenizer.decode([ids[at]], skip_special_tokens=False).strip():
                    break  # the template ends turns in another way: `ids_after` adds it
        return tokenizer.encode(self._without_end(text, calls, tools))

    def _without_end(self, text: str, calls: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        return text.removesuffix(self._close(calls, tools).end)

    def _answer_text(self, answer: Message, tools: list[dict[str, Any]] | None) -> str:
        """What the template writes of an answer after its generation prompt, the end of the turn included."""
        before = self._tokenizer.render_text([_QUESTION], tools=tools, add_generation_prompt=False)
        opened = self._tokenizer.render_text([_QUESTION], tools=tools)
        try:
            whole = self._render_answer(answer, tools)
        except DataError:
            calls = answer.get("tool_calls") or ()
            if all(isinstance(call["function"]["arguments"], dict) for call in calls):
                raise
            # Arguments that are no mapping: some templates take nothing else.
            whole = self._render_answer({**answer, "tool_calls": [_readable(call) for call in calls]}, tools)
        if not (whole.startswith(before) and opened.startswith(before)):
            raise DataError("the chat template renders a question in another way when an answer follows it")
        prompt, turn = opened.removeprefix(before), whole.removeprefix(before)
        if turn.startswith(prompt):
            return turn.removeprefix(prompt)
        for opener, closer in _THINKING.items():
            head, found, rest = prompt.rpartition(opener)
            if found and not rest.strip() and turn.startswith(head):
                # The prompt opens a block that the template leaves out of the turns it shows.
                thinking = str(answer.get("reasoning_content") or "").strip()
                return f"{thinking}\n{closer}\n\n{turn.removeprefix(head)}"
        shared = 0  # what both begin with: the role, as a rule
        while shared < min(len(prompt), len(turn)) and prompt[shared] == turn[shared]:
            shared += 1
        return turn[shared:]

    def _render_answer(self, answer: Message, tools: list[dict[str, Any]] | None) -> str:
        return self._tokenizer.render_text([_QUESTION, answer], tools=tools, add_generation_prompt=False)

    def shows_tool(self, schema: dict[str, Any]) -> bool:
        """Whether the template tells the model of a tool."""
        name = schema["function"]["name"]
        try:
            return name in self._tokenizer.render_text([_QUESTION], tools=[schema])
        except DataError:
            return False

    def shows(
        self, messages: Sequence[Message], at: int, *, tools: list[dict[str, Any]] | None = None
    ) -> bool:
        """Whether the template shows the text of `messages[at]`; also False if it refuses the conversation."""
        marked = [*messages[:at], {**messages[at], "content": _MARK}, *messages[at + 1 :]]
        try:
            return _MARK in self._tokenizer.render_text(marked, tools=tools)
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
        call = {"type": "function", "id": call_id, "function": {"name": "f", "arguments": {}}}
        answer: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        result: Message = {"role": "tool", "content": "", "tool_call_id": call_id, "name": "f"}
        return self.shows([_QUESTION, answer, result], 2)

    def tool_messages(self, calls: list[dict[str, Any]], contents: Sequence[Any]) -> list[Message]:
        """Tool results as messages of role `tool`, in order; one user message where there is no such role.

        Args:
            calls: of the assistant's message, in OpenAI's form.
            contents: one for each call: text, or a list of parts.
        """
        if self.has_tool_role:
            return [
                {
                    "role": "tool",
                    "content": content,
                    "tool_call_id": call["id"],
                    "name": call["function"]["name"],
                }
                for call, content in zip(calls, contents, strict=True)
            ]
        if all(isinstance(content, str) for content in contents):
            framed = "\n".join(f"<tool_response>\n{content}\n</tool_response>" for content in contents)
            return [{"role": "user", "content": framed}]
        parts: list[dict[str, Any]] = []
        for content in contents:
            inner = [{"type": "text", "text": content}] if isinstance(content, str) else content
            start, end = (
                {"type": "text", "text": tag} for tag in ("<tool_response>\n", "\n</tool_response>")
            )
            parts += [start, *inner, end]
        return [{"role": "user", "content": parts}]

    def in_thinking(self, context: Sequence[int]) -> bool:
        """Whether a prompt leaves the model inside a thinking block that the template has opened."""
        tail = self._tokenizer.decode(list(context[-_TAIL:]), skip_special_tokens=False).rstrip()
        return tail.endswith(THINKING_OPENERS)

    def _close(self, calls: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> _Close:
        key = (tuple(call["function"]["name"] for call in calls), bool(tools))
        if key not in self._closes:
            if len(self._closes) >= _CLOSES:
                self._closes.clear()
            self._closes[key] = self._find_close(calls, tools)
        return self._closes[key]

    def _find_close(self, calls: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> _Close:
        plain_marks, plain_end = self._after_mark([], tools)
        refusal: DataError | None = None
        for count in dict.fromkeys((len(calls), 1)) if calls else ():
            try:
                marks, after = self._after_mark(calls[-count:], tools)
            except DataError as error:
                refusal = error
                continue
            if marks == 0:
                break  # the template does not show calls: the turn ends as any other
            start = len(after) - len(plain_end) if after.endswith(plain_end) else self._last_special(after)
            return _Close(count, marks, after[:start], after[start:])
        if plain_marks == 0:
            raise refusal or DataError("the chat template does not show the assistant's messages")
        return _Close(0, plain_marks, "", plain_end)

    def _after_mark(self, calls: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> tuple[int, str]:
        """How often the mark is rendered, and what follows the last one."""
        rendered = self._tokenizer.render_text(
            [_QUESTION, _marked_answer(calls)], tools=tools, add_generation_prompt=False
        )
        return rendered.count(_MARK), rendered.rpartition(_MARK)[2]

    def _last_special(self, text: str) -> int:
        """Where the last special token of a text begins; its end when there is none."""
        special = self._tokenizer.special_ids
        ids = self._tokenizer.encode(text)
        for at in range(len(ids) - 1, -1, -1):
            if ids[at] in special:
                token = self._tokenizer.decode([ids[at]], skip_special_tokens=False)
                return text.rfind(token) if token in text else len(text)
        return len(text)

    def _already_there(self, sampled: Sequence[int], ids: list[int], end: str) -> int:
        """How many of `ids`, from the first, the sampled ids make superfluous.

        Args:
            sampled: what the model wrote.
            ids: what the template puts after it.
            end: how the template ends a turn, white space included; "" when it does not mark the end.
        """
        tokenizer = self._tokenizer
        if sampled and sampled[-1] in tokenizer.end_ids:
            # The turn has its end: cut the template's own off, or the role token that is the end.
            reach = self._length(end) if end.strip() else _TAIL
            for at, token_id in enumerate(ids[:reach]):
                if token_id == sampled[-1] or (token_id in tokenizer.special_ids and end.strip()):
                    return at + 1
                if tokenizer.decode([token_id]).strip():
                    break  # text comes first: nothing there is an end
            return 0
        tail = list(sampled[-_TAIL:])
        for length in range(min(len(tail), len(ids)), 0, -1):
            if tail[-length:] == ids[:length]:
                return length  # a part of the end, such as a stop string that begins the next turn
        return 0


def _marked_answer(calls: list[dict[str, Any]]) -> Message:
    """An assistant's message whose last words are the mark."""
    if not calls:
        return {"role": "assistant", "content": _MARK}
    marked = [{**call, "function": {**call["function"], "arguments": {"mark": _MARK}}} for call in calls]
    return {"role": "assistant", "content": "", "tool_calls": marked}


def _readable(call: dict[str, Any]) -> dict[str, Any]:
    """A call with a mapping as arguments, whatever the model wrote."""
    arguments = call["function"]["arguments"]
    if isinstance(arguments, dict):
        return call
    return {**call, "function": {**call["function"], "arguments": {"unreadable": arguments}}}
