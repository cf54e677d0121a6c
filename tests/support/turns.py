"""Kinds of turns x ways in which a model may have ended its answer, for any chat template.

The oracle is transformers' `apply_chat_template` of the whole conversation, rendered with two answers that differ
in their last letters: what the two renderings end with is what follows the answer. Tokenizers are made here, with
each template's special tokens.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from rollstream.chat.template import TurnTemplate
from rollstream.chat.tokenizer import ChatTokenizer
from rollstream.errors import DataError
from rollstream.trajectory import Message

_TOKENS = re.compile(
    r"<｜[^｜<>]+｜>|</?\|?[A-Za-z_][\w▁.:-]*\|?>|\[/?[A-Z][A-Z_]*\]|\[\|/?\w+\|\]|\[e~\[|\]~!?b[\[\]]"
)
_IN_TEXT = re.compile(
    r"</?(\w+:)?(think|tool_|tools|function|arg_|parameter|response|answer|call|invoke|im_)\w*>"
)
"""Tokens that are no structure of turns; models' tokenizers have them as words, if at all."""
_ENDS = re.compile(r"end|eos|eot|eom|</s>|return|sep|^<turn\|>|^\[e~\[", re.IGNORECASE)

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Which one."}},
                "required": ["city"],
            },
        },
    }
]
SYSTEM: Message = {"role": "system", "content": "Keep it short."}
FIRST: Message = {"role": "user", "content": "Dry in Lyon?"}
SAID: Message = {"role": "assistant", "content": "Dry all day."}
NEXT: Message = {"role": "user", "content": "And in Nice?"}


def calls(count: int, *, start: int = 0, last: str = "", **more: Any) -> Message:
    """An assistant's message of calls; the last one's argument ends with `last`."""
    made = [
        {
            "type": "function",
            "id": f"k{at:08d}",
            "function": {
                "name": "weather",
                "arguments": {"city": "Nice" if at + 1 < start + count else f"Lyon{last}"},
            },
        }
        for at in range(start, start + count)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made, **more}


@dataclass
class Kind:
    """A kind of turn."""

    name: str
    before: list[Message] = field(default_factory=lambda: [FIRST])
    calls: int = 0
    results: tuple[str, ...] = ()
    thinking: str = ""
    content: str = ""
    tools: bool = False
    then: list[Message] = field(default_factory=list)

    def answer(self, last: str) -> Message:
        """The answer, which ends with `last`."""
        more: Message = {"reasoning_content": self.thinking} if self.thinking else {}
        if self.calls:
            return calls(self.calls, start=len(self.before), last=last, content=self.content, **more)
        return {"role": "assistant", "content": f"Wet until noon{last}", **more}

    def added(self, template: TurnTemplate) -> list[Message]:
        """What follows it."""
        if not self.calls:
            return [NEXT]
        return [*template.tool_messages(self.answer("")["tool_calls"], self.results), *self.then]


def result(call: Message, text: str) -> Message:
    made = call["tool_calls"][0]
    return {"role": "tool", "content": text, "tool_call_id": made["id"], "name": "weather"}


LOOKED_UP = [FIRST, calls(1), result(calls(1), "dry")]
TALKED = [FIRST, SAID, {"role": "user", "content": "And tomorrow?"}]
ONE = ("18 degrees",)
KINDS = [
    Kind("text"),
    Kind("text, system", [SYSTEM, FIRST]),
    Kind("text, tools", tools=True),
    Kind("text, system, tools", [SYSTEM, FIRST], tools=True),
    Kind("text, later turn", TALKED),
    Kind("text, later turn, system", [SYSTEM, *TALKED]),
    Kind("text, later turn, system, tools", [SYSTEM, *TALKED], tools=True),
    Kind("text, third turn", [SYSTEM, *TALKED, SAID, {"role": "user", "content": "Why?"}]),
    Kind("thinking", thinking="It may rain."),
    Kind("thinking, later turn", [FIRST, {**SAID, "reasoning_content": "So dry."}, NEXT], thinking="Rain."),
    Kind("call", calls=1, results=ONE, tools=True),
    Kind("call, system", [SYSTEM, FIRST], calls=1, results=ONE, tools=True),
    Kind("call, no tools shown", calls=1, results=ONE),
    Kind("two calls", calls=2, results=("18 degrees", "20 degrees"), tools=True),
    Kind("three calls", calls=3, results=("18", "20", "22"), tools=True),
    Kind("call, empty result", calls=1, results=("",), tools=True),
    Kind("call with text", calls=1, results=ONE, content="I look it up.", tools=True),
    Kind("call with thinking", calls=1, results=ONE, thinking="I need data.", tools=True),
    Kind("second call", LOOKED_UP, calls=1, results=ONE, tools=True),
    Kind("text after result", LOOKED_UP, tools=True),
    Kind("call in later turn", [SYSTEM, *TALKED], calls=1, results=ONE, tools=True),
    Kind("call, result and question", calls=1, results=ONE, tools=True, then=[NEXT]),
]


@cache
def load(source: str) -> ChatTokenizer:
    """A byte-level tokenizer with the template, its special tokens, and the end token that it writes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE({letter: at for at, letter in enumerate(alphabet)}, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    found = dict.fromkeys(["<s>", "</s>", *_TOKENS.findall(source)])
    words = [token for token in found if _IN_TEXT.fullmatch(token)]
    bpe.add_tokens([AddedToken(word, normalized=False) for word in words])
    bpe.add_special_tokens([AddedToken(token, normalized=False) for token in found if token not in words])
    own = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")
    own.chat_template = source
    tokenizer = ChatTokenizer(own)
    try:
        alone = behind(tokenizer, KINDS[0], [], prompt=False)
        after = behind(tokenizer, KINDS[0], [NEXT], prompt=True)
        known = _TOKENS.findall(shared(alone, after)) or _TOKENS.findall(alone) or _TOKENS.findall(after)[:1]
        ends = [token for token in known if _ENDS.search(token)]
    except DataError:
        ends = []
    return ChatTokenizer(own, end_ids=[] if not ends else [own.convert_tokens_to_ids(ends[-1])])


def shared(first: str, second: str) -> str:
    """What both texts begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return first[: next((at for at, (one, other) in pairs if one != other), min(len(first), len(second)))]


def behind(tokenizer: ChatTokenizer, kind: Kind, added: list[Message], *, prompt: bool) -> str:
    """What the rendering of the whole conversation has behind the answer."""
    rendered = [
        tokenizer.render_text(
            [*kind.before, kind.answer(last), *added],
            tools=TOOLS if kind.tools else None,
            add_generation_prompt=prompt,
        )
        for last in ("1x", "2y")
    ]
    if kind.calls and not all(last in text for last, text in zip(("1x", "2y"), rendered, strict=True)):
        # The template shows no calls: what follows them follows a text.
        return behind(tokenizer, Kind("", kind.before, tools=kind.tools), added, prompt=prompt)
    after = shared(*(text[::-1] for text in rendered))[::-1]
    if kind.content and kind.content in after:
        # The template moves the text behind the call; it stands before it already, as it was sampled.
        return behind(tokenizer, replace(kind, content=""), added, prompt=prompt)
    return after


@dataclass
class Report:
    """What came of a template."""

    tried: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Kinds of turns that are refused at start, by reason. What the template itself refuses is not counted."""
    differences: list[str] = field(default_factory=list)


def trials(tokenizer: ChatTokenizer, kind: Kind, added: list[Message]) -> Iterator[tuple[str, str, str]]:
    """Ways to end the answer: name, what was sampled behind its last letters, and what has to follow.

    Raises:
        DataError: the template refuses the conversation.
    """
    whole = behind(tokenizer, kind, added, prompt=True)
    alone = behind(tokenizer, kind, [], prompt=False)
    syntax = ""
    if kind.calls:
        plain = behind(tokenizer, Kind("", kind.before, tools=kind.tools), [], prompt=False)
        known = (m.start() for m in _TOKENS.finditer(alone) if tokenizer.token_id(m[0]) in tokenizer.end_ids)
        first = next(known, None)
        syntax = alone[:first] if first is not None else alone.removesuffix(plain)
    rest, alone = whole.removeprefix(syntax), alone.removeprefix(syntax)
    yield "no end", syntax, rest
    kept = shared(alone, rest)
    places = [m.end() for m in _TOKENS.finditer(kept) if _ENDS.search(m[0])]
    if not places:
        # Some templates end the last turn in another way than those before it.
        own, other = _TOKENS.match(alone), _TOKENS.match(rest)
        if own and other and _ENDS.search(own[0]):
            yield "whole end", syntax + own[0], rest.removeprefix(other[0])
        if not own and other and tokenizer.token_id(other[0]) in tokenizer.end_ids and other[0] != "</s>":
            yield "whole end", syntax + other[0], rest.removeprefix(other[0])  # the last turn stays open
            yield "another end token", syntax + "</s>", rest.removeprefix(other[0])
        return
    end = kept[: places[-1]]
    yield "whole end", syntax + end, rest.removeprefix(end)
    tokens = [*_TOKENS.finditer(end)]
    if len(tokens) > 1:
        part = end[: tokens[0].end()]
        yield "first token", syntax + part, rest.removeprefix(part)
    if "</s>" not in end:
        yield "another end token", syntax + "</s>", rest.removeprefix(end)


def try_template(source: str) -> Report:
    """Tries all kinds of turns and ends."""
    tokenizer = load(source)
    template, report = TurnTemplate(tokenizer), Report()
    for kind in KINDS:
        tools = TOOLS if kind.tools else None
        try:
            tokenizer.render_text(kind.before, tools=tools)
        except DataError:
            continue
        added = kind.added(template)
        if reason := template.why_not(calls=bool(kind.calls), tools=tools):
            report.refused[reason] += 1
            continue
        messages = [*kind.before, kind.answer("3z")]
        try:
            ways = [*trials(tokenizer, kind, added)]
        except DataError:
            continue
        for way, sampled, expected in ways:
            report.tried += 1
            ids = tokenizer.encode("Wet until noon and some more 3z" + sampled)
            try:
                got = template.ids_after(messages, added, sampled_ids=ids, tools=tools)
                text = tokenizer.decode(got, skip_special_tokens=False)
            except DataError as error:
                text = f"error: {error}"
            if text != expected:
                report.differences.append(
                    f"{kind.name}, {way}: {sampled!r} then {text[:90]!r}, not {expected[:90]!r}"
                )
    return report
