"""Calls of a chat API as segments of exact tokens, and segments as trajectories.

A call brings a whole conversation. Mostly that is an earlier conversation, the answer to it, and something
new: then the call goes on after that answer, and only what is new is rendered. A client that rewrites its
history, or asks for several answers to the same, branches:

    segment 0   given | answer | given | answer | given | answer
                               |                ^ a call with the same messages and one more goes on here
    segment 1   context of 0 ..| given' | answer      a branch: the tokens before it are its prompt
    segment 2   given' | answer                       a rewritten history, or other tools: nothing in common

A call is open until it is answered or given up:

    begin --> PendingCall --+-- answer --> AnsweredCall, which later calls may go on after
                            +-- give_up    nothing of it is left

What holds, whatever is called in whatever order, with any number of calls open at once (the tests play it):

- The prompt of a call that goes on is its parent's prompt, the parent's sampled ids, and the rendered ids of
  what is new. No sampled id is ever rendered.
- Of the calls that go on after a turn, the first one continues its segment, as long as it is open or
  answered. Every other one begins a segment.
- A segment is one trajectory (or two, where the program went on after its answer: `branches`). Each turn that
  counts is sampled (mask 1) in exactly one of them, with its log-probs and policy versions; in segments that
  branch off behind it, it is prompt.

A call costs what its own messages and tokens cost, whatever was called before, but for what its renderer looks
back to: conversations are paths in one table of `(place, message) -> place`.

Nothing here waits, renders, or knows an engine: `Renderer` gives ids, and whoever begins a call answers it.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain, pairwise
from typing import Any, Protocol

import orjson

from rollstream.agent.tokens import TokenTrack
from rollstream.trajectory import Completion, Message, Metrics, Trajectory

_TOKEN_BYTES, _CALL_BYTES = 48, 2_000
"""Memory of a token and of a call here, without their text, roughly."""

_FLOAT = re.compile(rb"\d\.0\b|\de")
"""A number that may be a whole one, or a text like it."""


@dataclass(slots=True, eq=False)
class Segment:
    """Tokens that are one trajectory: a prompt, and answers that go on after each other."""

    request_id: str
    """The engine's, the same for all its calls; no two open calls have the same."""
    is_first: bool
    """Whether the session began with it."""
    base: "AnsweredCall | None"
    """Its prompt begins with the context of this turn, the answer included."""
    beginning: int
    """The same for all conversations that begin with the same messages and tools."""
    is_side_call: bool
    """Whether its calls say that they are side calls."""
    ids: list[int] = field(default_factory=list)
    """Given and sampled ids behind the prompt."""
    turns: "list[AnsweredCall]" = field(default_factory=list)


@dataclass(slots=True, eq=False)
class PendingCall:
    """A call: what the model is to answer."""

    segment: Segment
    parent: "AnsweredCall | None"
    """The answer before it; None: it begins a conversation."""
    tools: Sequence[dict[str, Any]]
    given: Sequence[Message]
    """Messages after the parent's, as the client sent them."""
    shown: Sequence[Message]
    """The same as the model is shown them."""
    given_ids: Sequence[int]
    """The whole prompt of a conversation's first call, else what stands between two answers."""
    begun: int
    """Tells what came first, together with `AnsweredCall.answered`."""
    place: int
    """The place of the parent's answer."""
    keys: Sequence[Hashable]
    """The keys of `given`."""
    number: int
    """Its answer is the first, second, ... one of its conversation."""
    serial: int
    """It is the first, second, ... call of the session."""
    path: bytes
    """A digest of the conversation and of how often it was asked before: the same when calls come anew, in
    whatever order. For its seed."""
    turns_hash: int
    """Names the conversation apart from its system messages, see `_hash_turns`."""
    again: "Sequence[AnsweredCall]"
    """Turns whose answers are in `given`: their text is rendered anew."""

    @property
    def request_id(self) -> str:
        """The engine's, the same for all calls of a segment; no two open calls have the same."""
        return self.segment.request_id

    @property
    def before(self) -> "list[AnsweredCall]":
        """The turns of its conversation so far, oldest first."""
        turns, turn = [], self.parent
        while turn is not None:
            turns.append(turn)
            turn = turn.ask.parent
        return turns[::-1]

    @property
    def messages(self) -> list[Message]:
        """The whole conversation as the model is shown it."""
        earlier = ((*turn.ask.shown, turn.message) for turn in self.before)
        return [*chain.from_iterable(earlier), *self.shown]

    @property
    def context(self) -> list[int]:
        """The prompt that the engine gets: whatever the model has seen and said, and what is new."""
        ids = _context(self.parent)
        ids += self.given_ids
        return ids

    @property
    def prompt_length(self) -> int:
        """Tokens of the context that are its trajectory's prompt; the others are response."""
        if not self.segment.turns:
            return len(_context(self.parent)) + len(self.given_ids)
        return len(_context(self.segment.base)) + self.segment.turns[0].start


@dataclass(slots=True, eq=False)
class AnsweredCall:
    """A call and its answer."""

    ask: PendingCall
    name: str
    """The answer's id, as the client knows it."""
    message: Message
    completion: Completion
    answered: int
    """On the clock of `PendingCall.begun`."""
    start: int
    """The offset of its answer in its segment's ids."""
    place: int
    """The place that its conversation leads to, see `Session`."""
    turns_hash: int
    """See `PendingCall.turns_hash`."""
    stop: str | None = None
    """The stop text that ended it; the message ends before it."""
    following: PendingCall | None = None
    """The call that continues the segment."""

    @property
    def conversation(self) -> list[Message]:
        """All messages as the client sent them, and the answers, this one included."""
        turns = [*self.ask.before, self]
        return [*chain.from_iterable((*turn.ask.given, turn.message) for turn in turns)]

    @property
    def form(self) -> bytes:
        """Tells turns apart by what the model saw and said."""
        return _digest([_context(self), self.message])


class Renderer(Protocol):
    """Renders what the model is shown: messages, and their ids."""

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, first: bool
    ) -> tuple[Sequence[Message], Sequence[int]]:
        """A conversation that nothing is known of; `first`: it is what the session began with."""
        ...

    def after(
        self, turn: AnsweredCall, messages: Sequence[Message]
    ) -> tuple[Sequence[Message], Sequence[int]]:
        """Renders what follows an answer: the end of its turn, the messages, the beginning of the next answer."""
        ...


class Session:
    """The calls of one agent program in one attempt at a rollout."""

    def __init__(self, renderer: Renderer, *, name: str, logprobs: bool) -> None:
        """Args:
        renderer: gives ids; what it raises is raised by `begin`, which leaves nothing behind then.
        name: request ids begin with it.
        logprobs: whether trajectories have them; then every completion has.
        """
        self._renderer = renderer
        self.name = name
        self._logprobs = logprobs
        self._segments = 0
        self._clock = 0
        self._first: int | None = None
        self._tools: tuple[Sequence[dict[str, Any]], int] | None = None
        self._roots: dict[bytes, int] = {}
        """The places at which conversations with these tools begin: even numbers; other places are odd."""
        self._next: dict[tuple[int, Hashable], int] = {}
        """The place that a message leads to."""
        self._ends: dict[int, list[AnsweredCall]] = {}
        """The turns whose answers lead there, the newest one last: their texts are the same."""
        self._said: dict[Hashable, AnsweredCall] = {}
        """The newest turn with this answer."""
        self._places_by_hash: dict[int, int] = {}
        """The places of conversations up to an answer, by `PendingCall.turns_hash`."""
        self.system_changed = False
        """Whether a call had the turns of an earlier conversation, and other system messages."""
        self._asked: Counter[bytes] = Counter()
        """How often what a path has was asked."""
        self.open_calls = 0
        """Calls that wait for their answers."""
        self.size = 0
        """Bytes that it takes, about."""
        self.begun = 0
        """Calls so far, those that were given up included."""
        self.turns: list[AnsweredCall] = []
        """All that were answered, in this order."""

    def begin(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, is_side_call: bool = False
    ) -> PendingCall:
        """Opens a call with a conversation; `answer` or `give_up` ends it.

        Args:
            messages: all of it.
            tools: schemas that it shows.
            is_side_call: it continues no segment of other calls, and they do not continue its own.
        """
        root, keys = self._root(tools), _keys(messages)
        parent, place, known = self._find(root, messages, keys)
        given = list(messages[known:])  # a copy: whoever has it may add to it
        if parent is None:
            tools = list(tools)
            first = hash((root, *keys))
            shown, ids = self._renderer.prompt(given, tools, first=self._first in (None, first))
            self._first = first if self._first is None else self._first
            segment, number = self._new_segment(None, first, is_side_call), 1
            turns_hash, there = hash(root), root
            for key in keys:
                turns_hash, there = _hash_turns(turns_hash, key), self._next.get((there, key), -1)
                known_place = self._places_by_hash.get(turns_hash, there)
                self.system_changed |= key[0] == "assistant" and known_place != there
        else:
            given = _with_ids(given, zip(_ids(messages[:known]), _ids(parent.conversation), strict=True))
            tools, number = parent.ask.tools, parent.ask.number + 1
            shown, ids = self._renderer.after(parent, given)
            segment = parent.ask.segment
            goes_on = parent.following is None and segment.is_side_call == is_side_call
            if not goes_on:
                segment = self._new_segment(parent, segment.beginning, is_side_call)
            turns_hash = reduce(_hash_turns, keys[known:], parent.turns_hash)
        self.begun += 1
        ask = PendingCall(
            segment=segment,
            parent=parent,
            tools=tools,
            given=given,
            shown=shown,
            given_ids=ids,
            begun=self._tick(),
            place=place,
            keys=keys[known:],
            number=number,
            serial=self.begun,
            path=self._path(b"" if parent is None else parent.ask.path, ids or given),
            turns_hash=turns_hash,
            again=[self._said[key] for key in keys[known:] if key in self._said],
        )
        if parent is not None and goes_on:
            parent.following = ask
        self.open_calls += 1
        return ask

    def answer(
        self,
        ask: PendingCall,
        name: str,
        message: Message,
        completion: Completion,
        *,
        stop: str | None = None,
    ) -> AnsweredCall:
        """Records the answer of an open call. `message` is what the client is told."""
        segment = ask.segment
        segment.ids += ask.given_ids
        place = ask.place
        key = _key(message)
        for one in (*ask.keys, key):
            place = self._next.setdefault((place, one), 2 * len(self._next) + 1)
        turns_hash = _hash_turns(ask.turns_hash, key)
        self._places_by_hash[turns_hash] = place
        turn = AnsweredCall(
            ask,
            name,
            message,
            completion,
            answered=self._tick(),
            start=len(segment.ids),
            place=place,
            turns_hash=turns_hash,
            stop=stop,
        )
        segment.ids += completion.token_ids
        segment.turns.append(turn)
        self._ends.setdefault(place, []).append(turn)
        self._said[key] = turn
        self.turns.append(turn)
        tokens = len(ask.given_ids) + len(completion.token_ids)
        texts = sum(len(one["content"]) for one in ask.given if isinstance(one.get("content"), str))
        self.size += _CALL_BYTES + _TOKEN_BYTES * tokens + texts
        ask.given_ids = ask.keys = ()  # the segment has them now
        self.open_calls -= 1
        return turn

    def give_up(self, ask: PendingCall) -> None:
        """Ends an open call that gets no answer."""
        if ask.parent is not None and ask.parent.following is ask:
            ask.parent.following = None
        self.open_calls -= 1

    def trajectory(self, turns: Sequence[AnsweredCall]) -> Trajectory:
        """Turns of a segment that go on after each other."""
        first, turn = turns[0].ask, turns[-1]
        segment = first.segment
        base = [] if segment.base is None else _context(segment.base)
        track = TokenTrack([*base, *segment.ids[: turns[0].start]], logprobs=self._logprobs)
        track.add_sampled(turns[0].completion)
        for before, after in pairwise(turns):
            end = before.start + len(before.completion.token_ids)
            track.add_given(segment.ids[end : after.start])
            track.add_sampled(after.completion)
        reason = turn.completion.finish_reason
        return Trajectory(
            prompt_ids=track.prompt_ids,
            response_ids=track.response_ids,
            response_mask=track.response_mask,
            response_logprobs=track.response_logprobs,
            policy_versions=track.policy_versions,
            messages=[*turn.ask.messages, turn.message],
            finish_reason="aborted" if reason == "abort" else reason,
            num_turns=2 * turn.ask.number,  # each answer answers something
            metrics=Metrics(engine_calls=len(turns)),
        )

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _path(self, before: bytes, new: Sequence[Any]) -> bytes:
        path = _digest([before.hex(), list(new)])
        self._asked[path] += 1
        return _digest([path.hex(), self._asked[path]])

    def _new_segment(self, base: AnsweredCall | None, beginning: int, is_side_call: bool) -> Segment:
        number, self._segments = self._segments, self._segments + 1
        name = f"{self.name}.{number}" if number else self.name
        return Segment(name, not number, base, beginning, is_side_call)

    def _root(self, tools: Sequence[dict[str, Any]]) -> int:
        if self._tools is None or self._tools[0] != tools:
            form = hashlib.blake2b(orjson.dumps(tools, option=orjson.OPT_SORT_KEYS)).digest()
            self._tools = list(tools), self._roots.setdefault(form, 2 * len(self._roots))
        return self._tools[1]

    def _find(
        self, root: int, messages: Sequence[Message], keys: Sequence[Hashable]
    ) -> tuple[AnsweredCall | None, int, int]:
        """The turn that a conversation goes on after, its place, and how many messages are known there.

        The turn with the most messages; of several, whose answers are the same, the newest one that nothing
        goes on after, or the newest one. Something has to be new after it.
        """
        place, at = root, 0
        found: list[tuple[int, int, int]] = []
        thoughts: list[str] = []
        while at < len(messages) - 1:
            message, end = messages[at], at + 1
            following = self._next.get((place, keys[at]))
            if following is None and message["role"] == "assistant":
                # Some clients send what a model thought, said and called as messages of their own.
                while end < len(messages) and messages[end]["role"] == "assistant":
                    end += 1
                if end > at + 1:
                    message = _joined(messages[at:end])
                    following = self._next.get((place, _key(message)))
            if following is None or end == len(messages):
                break
            place, at = following, end
            if message["role"] == "assistant":
                thoughts.append((message.get("reasoning_content") or "").strip())
            if place in self._ends:
                found.append((place, at, len(thoughts)))
        for place, at, told in reversed(found):
            turns = sorted(self._ends[place], key=_free_and_new, reverse=True)
            if len(turns) > 1 and (ids := _ids(messages[:at])):
                turns.sort(key=lambda turn: _ids(turn.conversation) != ids)
            for turn in turns:
                if not any(thoughts) or _thought(turn, thoughts[:told]):
                    return turn, place, at
        return None, root, 0


def _thought(turn: AnsweredCall, thoughts: Sequence[str]) -> bool:
    """Whether the thinking that a client has sent is that of a conversation.

    Thinking that is left out makes no other message: clients drop it, and the model has seen it.
    """
    answers = (one for one in turn.conversation if one["role"] == "assistant")
    ours = ((one.get("reasoning_content") or "").strip() for one in answers)
    return all(theirs in ("", own) for theirs, own in zip(thoughts, ours, strict=False))


def _context(turn: AnsweredCall | None) -> list[int]:
    """Whatever the model has seen and said up to the end of a turn. A new list."""
    parts: list[list[int]] = []
    while turn is not None:
        parts.append(turn.ask.segment.ids[: turn.start + len(turn.completion.token_ids)])
        turn = turn.ask.segment.base
    return parts[0] if len(parts) == 1 else [*chain.from_iterable(reversed(parts))]


def _free_and_new(turn: AnsweredCall) -> tuple[bool, int]:
    return turn.following is None, turn.answered


def _keys(messages: Sequence[Message]) -> list[tuple[Hashable, ...]]:
    """The same for messages that are the same, whatever a client changes when it sends them back.

    Clients rename calls: a result counts by the place of its call among those of the answer before it.
    """
    keys: list[tuple[Hashable, ...]] = []
    places: dict[Any, int] = {}
    for at, message in enumerate(messages):
        if message["role"] == "assistant":
            if not at or messages[at - 1]["role"] != "assistant":
                places = {}
            for call in message.get("tool_calls") or ():
                places[call.get("id")] = len(places)
            keys.append(_key(message))
        else:
            known = message.get("tool_call_id")
            keys.append((*_key(message), places.get(known, known)))
    return keys


def _key(message: Message) -> tuple[Hashable, ...]:
    role, content = message["role"], message.get("content") or ""
    if not isinstance(content, str):
        content = _digest(content)
    if role != "assistant":
        return role, content, (role != "tool" and message.get("name")) or ""
    calls = message.get("tool_calls")
    said = content.strip() if isinstance(content, str) else content
    return role, said, tuple(map(_call_key, calls)) if calls else ()


def _call_key(call: dict[str, Any]) -> Hashable:
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        form = orjson.dumps(arguments, option=orjson.OPT_SORT_KEYS)
        if _FLOAT.search(form):  # JavaScript writes 1.0 as 1
            form = orjson.dumps(_whole(arguments), option=orjson.OPT_SORT_KEYS)
    else:
        form = str(arguments or "").strip().encode()
    return function["name"], form


def _hash_turns(before: int, key: tuple[Hashable, ...]) -> int:
    """Names a conversation and its next message by a number; system messages do not change it."""
    return before if key[0] == "system" else hash((before, key))


def _ids(messages: Sequence[Message]) -> list[Any]:
    """The ids of all calls."""
    return [call.get("id") for message in messages for call in message.get("tool_calls") or ()]


def _with_ids(messages: Sequence[Message], names: Iterable[tuple[Any, Any]]) -> list[Message]:
    """Results of calls under the ids that the model was shown, by pairs of a client's id and that one."""
    renamed = {theirs: ours for theirs, ours in names if theirs != ours}
    return [
        {**message, "tool_call_id": renamed[known]}
        if (known := message.get("tool_call_id")) in renamed
        else message
        for message in messages
    ]


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, dict):
        return {name: _whole(one) for name, one in value.items()}
    return [_whole(one) for one in value] if isinstance(value, list) else value


def _joined(messages: Sequence[Message]) -> Message:
    """Messages of an assistant that are parts of one answer."""
    parts = [str(one.get("content") or "") for one in messages]
    thoughts = [one["reasoning_content"] for one in messages if one.get("reasoning_content")]
    joined: Message = {"role": "assistant", "content": "\n".join(filter(None, parts))}
    joined["tool_calls"] = [call for one in messages for call in one.get("tool_calls") or ()]
    return {**joined, "reasoning_content": "\n".join(thoughts)} if thoughts else joined


def _digest(value: Any) -> bytes:
    return hashlib.blake2b(orjson.dumps(value, option=orjson.OPT_SORT_KEYS), digest_size=16).digest()
