"""Calls of a chat API as segments of exact tokens, and segments as trajectories.

A call brings a whole conversation. Mostly that is an earlier conversation, the answer to it, and something
new: then the call goes on after that answer, and only what is new is rendered. A client that rewrites its
history, or asks for several answers to the same, branches:

    segment 0   given | answer | given | answer | given | answer
                               |                ^ a call with the same messages and one more goes on here
    segment 1   context of 0 ..| given' | answer      a branch: the tokens before it are its prompt
    segment 2   given' | answer                       a rewritten history, or other tools: nothing in common

A call is open until it is answered or given up:

    begin --> Ask --+-- answer --> Turn, which later calls may go on after
                    +-- give_up    nothing of it is left

What holds, whatever is called in whatever order, with any number of calls open at once (the tests play it):

- The prompt of a call that goes on is its parent's prompt, the parent's sampled ids, and the rendered ids of
  what is new. No sampled id is ever rendered.
- Of the calls that go on after a turn, the first one continues its segment, as long as it is open or
  answered. Every other one begins a segment.
- A segment is one trajectory. Each turn that counts is sampled (mask 1) in exactly one trajectory, with its
  log-probs and policy versions; in segments that branch off behind it, it is prompt.
- Trajectories are in the order of their last answers.

Nothing here waits, renders, or knows an engine: `Renderer` gives ids, and whoever begins a call answers it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

from rollstream.agent.tokens import TokenTrack
from rollstream.trajectory import Completion, Message, Metrics, Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """A call: what the model is to answer."""

    request_id: str
    """The engine's, the same for all calls of a segment; no two open calls have the same."""
    parent: "Turn | None"
    """What it goes on after; None: it begins a conversation."""
    start: "Ask | None"
    """The call that began its segment; None: this one does."""
    tools: Sequence[dict[str, Any]]
    given: Sequence[Message]
    """Messages after those turns, as the client sent them."""
    shown: Sequence[Message]
    """The same as the model is shown them."""
    given_ids: Sequence[int]
    """The whole prompt of a conversation's first call, else what stands between two answers."""

    @property
    def before(self) -> "list[Turn]":
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

    def track(self, *, logprobs: bool) -> TokenTrack:
        """The tokens of the segment so far, up to where the answer begins."""
        before = self.before
        asks = [*(turn.ask for turn in before), self]
        start = asks.index(self.start or self)
        context = ((*turn.ask.given_ids, *turn.completion.token_ids) for turn in before[:start])
        track = TokenTrack([*chain.from_iterable(context), *asks[start].given_ids], logprobs=logprobs)
        for turn, ask in zip(before[start:], asks[start + 1 :], strict=True):
            track.add_sampled(turn.completion)
            track.add_given(list(ask.given_ids))
        return track


@dataclass(slots=True, eq=False)
class Turn:
    """A call and its answer."""

    ask: Ask
    name: str
    """What the client knows the answer by."""
    message: Message
    completion: Completion
    following: Ask | None = None
    """The call that continues the segment."""
    branches: "list[Turn]" = field(default_factory=list)
    """All turns that go on after this one."""


class Renderer(Protocol):
    """What the model is shown: messages, and their ids."""

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, first: bool
    ) -> tuple[Sequence[Message], Sequence[int]]:
        """A conversation that nothing is known of; `first`: it is what the session began with."""
        ...

    def after(self, turn: Turn, messages: Sequence[Message]) -> tuple[Sequence[Message], Sequence[int]]:
        """What is new after an answer: the end of its turn, the messages, the beginning of the next answer."""
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
        self._name = name
        self._logprobs = logprobs
        self._segments = 0
        self._prompt: tuple[list[Message], list[dict[str, Any]]] | None = None
        self._roots: list[Turn] = []
        self.turns: list[Turn] = []
        """All that were answered, in this order."""

    @property
    def has_begun(self) -> bool:
        """Whether a call has been opened."""
        return self._prompt is not None

    def begin(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Ask:
        """Opens a call with a conversation; `answer` or `give_up` ends it."""
        messages = list(messages)  # whoever has it may add to it
        parent, known = self._find(messages, tools)
        if parent is None:
            asked = (messages, list(tools))
            shown, ids = self._renderer.prompt(*asked, first=self._prompt in (None, asked))
            self._prompt = self._prompt or asked
            return Ask(self._new_id(), None, None, asked[1], messages, shown, ids)
        given, tools = messages[known:], parent.ask.tools
        shown, ids = self._renderer.after(parent, given)
        if parent.following is not None:
            return Ask(self._new_id(), parent, None, tools, given, shown, ids)
        start = parent.ask.start or parent.ask
        parent.following = Ask(start.request_id, parent, start, tools, given, shown, ids)
        return parent.following

    def answer(self, ask: Ask, name: str, message: Message, completion: Completion) -> Turn:
        """Records the answer of an open call. `message` is what the client is told."""
        turn = Turn(ask, name, message, completion)
        (self._roots if ask.parent is None else ask.parent.branches).append(turn)
        self.turns.append(turn)
        return turn

    def give_up(self, ask: Ask) -> None:
        """Ends an open call that gets no answer."""
        if ask.parent is not None and ask.parent.following is ask:
            ask.parent.following = None

    def trajectories(self, kept: Collection[str] | None = None) -> list[Trajectory]:
        """One for each segment, up to its last answer that counts; the one that ends last is the last.

        Args:
            kept: names of the answers that count; None: all of them.
        """
        last: dict[Ask, Turn] = {}
        for turn in self.turns:
            if kept is None or turn.name in kept:
                start = turn.ask.start or turn.ask
                last.pop(start, None)
                last[start] = turn
        return [self._trajectory(turn) for turn in last.values()]

    def _new_id(self) -> str:
        number, self._segments = self._segments, self._segments + 1
        return f"{self._name}.{number}" if number else self._name

    def _find(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> tuple[Turn | None, int]:
        """The turn that a conversation goes on after, and how many messages are known there.

        The turn with the most messages; of several the newest one.
        """
        best, most = None, 0
        open_ends = [(0, turn) for turn in self._roots if turn.ask.tools == tools]
        while open_ends:
            at, turn = open_ends.pop()
            end = at + len(turn.ask.given) + 1
            known = (*turn.ask.given, turn.message)
            if end < len(messages) and all(map(_same, known, messages[at:end])):
                if end > most:
                    best, most = turn, end
                open_ends += [(end, branch) for branch in turn.branches]
        return best, most

    def _trajectory(self, turn: Turn) -> Trajectory:
        track = turn.ask.track(logprobs=self._logprobs)
        track.add_sampled(turn.completion)
        reason = turn.completion.finish_reason
        return Trajectory(
            prompt_ids=track.prompt_ids,
            response_ids=track.response_ids,
            response_mask=track.response_mask,
            response_logprobs=track.response_logprobs,
            policy_versions=track.policy_versions,
            messages=[*turn.ask.messages, turn.message],
            finish_reason="aborted" if reason == "abort" else reason,
            num_turns=2 * (len(turn.ask.before) + 1),  # each answer answers something
            metrics=Metrics(),
        )


def _same(ours: Message, theirs: Message) -> bool:
    """Whether a message of a call is the one that is known.

    Thinking that is left out makes no other message: clients drop it, and the model has seen it.
    """
    if any(ours.get(key) != theirs.get(key) for key in ("role", "content", "tool_call_id")):
        return False
    thought = theirs.get("reasoning_content")
    return (not thought or thought == ours.get("reasoning_content")) and _calls(ours) == _calls(theirs)


def _calls(message: Message) -> list[tuple[Any, Any, Any]]:
    return [
        (call.get("id"), call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    ]
