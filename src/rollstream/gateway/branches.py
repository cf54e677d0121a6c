"""Which conversation of a session is the rollout's answer, and which of the others helped.

    final       its last text is the answer that the program states; else it is the newest that begins with the
                prompt row (of several those that show tools, if one does); else the newest of all
    branch      begins as the final one does (a retry, a vote), or its answers went into such a conversation
                (a sub-agent, a history that was compacted)
    side call   any other (a title, a commit message), what was asked after the answer, and what says so itself

A conversation's answer went into another one where a call goes on after it, has it among its messages, or quotes
it: the whole text, or a piece of it that is long enough to be no chance. A text that the conversation had been
shown itself is no quotation.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import orjson

from rollstream.gateway.sessions import Ask, Segment, Session, Turn
from rollstream.trajectory import Message

_PIECE_CHARS = 12
"""A shorter piece of an answer than this may stand in a later message by chance: "two numbers" in a title."""

_SEARCHED, _LOOK = 256 << 20, 1_000
"""Characters that are searched for quotations at most, and what a look costs beside its text. What is not searched
counts as used: a session of thousands of conversations would stop all others meanwhile."""

_BOUNDARY = re.compile(r"[^\w ]+")
"""Between pieces: lines, punctuation, and the quotes of JSON."""


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """Answers of one conversation that go on after each other: a trajectory."""

    turns: Sequence[Turn]
    """At least one."""
    is_side_call: bool = False

    @property
    def segment(self) -> Segment:
        return self.turns[0].ask.segment

    @property
    def last(self) -> Turn:
        return self.turns[-1]

    @property
    def origin(self) -> Turn:
        """The first answer of its conversation, which may be another branch's."""
        return (*_before(self), self.turns[0])[0]


@dataclass(frozen=True, slots=True)
class Branches:
    """A session's, in the order of their trajectories."""

    branches: Sequence[Branch]
    """The final one last."""
    is_guess: bool = False
    """Whether another conversation might as well be the final one: nothing is stated that fits, and either neither
    begins with the prompt row, or both do, and neither tools nor time tell. Then none is known to be a side call,
    unless it says so itself."""


def find_branches(
    session: Session,
    *,
    answer: str | None = None,
    prompt: Sequence[Message] = (),
    kept: Collection[str] | None = None,
    find_side_calls: bool = True,
) -> Branches:
    """Finds the final conversation and sorts the others.

    Args:
        session: when its program has ended.
        answer: what the program states.
        prompt: messages of the prompt row.
        kept: names of the answers that count; None: all of them. Of a conversation, the answers before one that
            counts do count.
        find_side_calls: if not, only those are side calls that say so themselves.
    """
    counted = {turn.ask.segment: turn for turn in session.turns if kept is None or turn.name in kept}
    found = [Branch(segment.turns[: segment.turns.index(turn) + 1]) for segment, turn in counted.items()]
    if not found:
        return Branches([])
    usage = _Usage()
    final, is_guess = _final(found, answer, prompt, usage)
    whole = next(branch for branch in found if branch.segment is final.segment)
    found.remove(whole)
    if rest := whole.turns[len(final.turns) :]:
        found.append(Branch(rest))
    helped = _helpers(found, final, usage) if find_side_calls and not is_guess else {*found}
    others = [Branch(one.turns, one.segment.is_side_call or one not in helped) for one in _in_order(found)]
    return Branches([*others, final], is_guess)


def _final(
    found: Sequence[Branch], answer: str | None, prompt: Sequence[Message], usage: "_Usage"
) -> tuple[Branch, bool]:
    """The conversation that is the answer, up to it; and whether that is no more than a guess."""
    candidates = [one for one in found if not one.segment.is_side_call] or found
    stated = _plain(answer or "")
    fits = {one: _fit(stated, one.last) for one in candidates} if stated else {}
    if stated and not any(fits.values()):
        # The program may have gone on talking after its answer.
        earlier = [
            Branch(one.turns[: at + 1])
            for one in candidates
            for at, turn in enumerate(one.turns)
            if _fit(stated, turn) == _SAME
        ]
        candidates = earlier or candidates
    best = max(fits.values(), default=0)
    candidates = [one for one in candidates if fits.get(one, 0) == best]
    begins = _begins_with(prompt, candidates, usage)
    most = max(begins.values())
    candidates = [one for one in candidates if begins[one] == most]
    # OpenCode's title call has the prompt, too, and no tools.
    final = _newest([one for one in candidates if most and one.origin.ask.tools] or candidates)
    others = (one for one in candidates if one.segment.beginning != final.segment.beginning)

    def is_no_rival(one: Branch) -> bool:
        was_over = one.last.answered < final.last.ask.begun
        is_plainer = bool(final.origin.ask.tools) and not one.origin.ask.tools
        return (bool(most) and was_over and is_plainer) or _carries_on(final, one, usage)

    is_stated = bool(stated) and _fit(stated, final.last) > 0
    return final, not (is_stated or all(map(is_no_rival, others)))


_SAME, _CONTAINED = 2, 1


def _fit(stated: str, turn: Turn) -> int:
    """Whether a turn ends in an answer: says just it, has it among its words or arguments, or neither."""
    if _plain(_text(turn.message)) == stated:
        return _SAME
    return _CONTAINED if _has_words(_plain(_said(turn)), stated) else 0


def _begins_with(prompt: Sequence[Message], found: Sequence[Branch], usage: "_Usage") -> dict[Branch, int]:
    """How conversations begin: 2 with the prompt row's messages, 1 with its last text somewhere, else 0.

    Both apart from system messages. One that carries on another, with its system messages and tools, begins as
    that one did: its history was rewritten.
    """
    asked = [text for text in map(_text, _without_system(prompt)) if text]

    def direct(one: Branch) -> int:
        texts = [_text(message) for message in _without_system(one.origin.ask.given)]
        if asked and texts[: len(asked)] == asked:
            return 2
        return int(bool(asked) and any(asked[-1] in text for text in texts))

    begins = {one: direct(one) for one in found}
    for later in sorted(found, key=lambda one: one.turns[0].ask.begun):
        for earlier in found if begins[later] < 2 else ():
            if begins[earlier] > begins[later] and _carries_on(later, earlier, usage):
                begins[later] = begins[earlier]
    return begins


def _carries_on(later: Branch, earlier: Branch, usage: "_Usage") -> bool:
    frames = [(one.origin.ask.tools, _system(one.origin.ask.given)) for one in (later, earlier)]
    if frames[0] != frames[1]:
        return False
    repeats = any(not {*earlier.turns}.isdisjoint(ask.again) for ask in _asks(later))
    # A question about an answer, as for its title, is no rewritten history: tools or instructions tell.
    return repeats or (any(frames[0]) and usage.of(later, earlier))


def _newest(found: Sequence[Branch]) -> Branch:
    """The last one to be answered. Of those that were under way at once it is not the slowest: the longest, and
    of equally long ones what they say decides.
    """
    newest = max(one.last.ask.begun for one in found)
    last = [one for one in found if one.last.answered > newest]
    return max(last, key=lambda one: (one.last.ask.number, one.last.form))


def _helpers(found: Sequence[Branch], final: Branch, usage: "_Usage") -> set[Branch]:
    """All that begin as the final one does and do not go on after it, and whatever went into one of them."""
    alike = (one for one in found if one.segment.beginning == final.segment.beginning)
    helped = {one for one in alike if not one.segment.is_side_call and final.last not in _before(one)}
    todo = [final, *helped]
    while todo:
        later = todo.pop()
        new = {one for one in found if one not in helped and usage.of(later, one)}
        helped |= new
        todo += new
    return helped


def _in_order(found: Iterable[Branch]) -> list[Branch]:
    """Conversations that did not overlap as they came; of the others what they say decides."""
    placed: list[tuple[int, bytes, Branch]] = []
    wave = until = 0
    for one in sorted(found, key=lambda one: one.turns[0].ask.begun):
        wave += one.turns[0].ask.begun > until  # whatever began before was over
        until = max(until, one.last.answered)
        placed.append((wave, one.last.form, one))
    return [one for *_, one in sorted(placed, key=lambda place: place[:2])]


class _Usage:
    """Says whose answers went into which conversations."""

    def __init__(self) -> None:
        self._left = _SEARCHED
        self._shown: dict[Branch, str] = {}

    def of(self, later: Branch, earlier: Branch) -> bool:
        """Whether an answer of the earlier one went into the later one."""
        asks, turns = _asks(later), {*earlier.turns}
        self._left -= _LOOK
        if self._left < 0 or any(ask.parent in turns or not turns.isdisjoint(ask.again) for ask in asks):
            return True
        if earlier not in self._shown:
            given = (message for turn in (*_before(earlier), *earlier.turns) for message in turn.ask.given)
            self._shown[earlier] = "\n".join(map(_text, given))
        return any(self._quoted(turn, asks, self._shown[earlier]) for turn in reversed(earlier.turns))

    def _quoted(self, turn: Turn, asks: Sequence[Ask], shown: str) -> bool:
        """Whether a later message quotes a turn, which is not what the turn's own conversation was `shown`."""
        whole, said = _text(turn.message), map(str.strip, _BOUNDARY.split(_said(turn)))
        pieces = [piece for piece in said if len(piece) >= _PIECE_CHARS]
        for text in (_text(message) for ask in asks if ask.begun > turn.answered for message in ask.given):
            self._left -= len(text) * (1 + len(pieces)) + _LOOK
            if self._left < 0:
                return True
            found = (whole and _has_words(text, whole)) or any(
                piece in text and piece not in shown for piece in pieces
            )
            if found and text not in shown:
                return True
        return False


def _asks(branch: Branch) -> list[Ask]:
    return [turn.ask for turn in branch.turns]


def _before(branch: Branch) -> list[Turn]:
    """The turns of its conversation before it, which are other branches'."""
    return branch.turns[0].ask.before


def _text(message: Message) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content.strip()
    return "\n".join(part["text"] for part in content if "text" in part).strip()


def _said(turn: Turn) -> str:
    """All that a turn said, the arguments of its calls included."""
    calls = turn.message.get("tool_calls") or ()
    arguments = [orjson.dumps(call["function"].get("arguments")).decode() for call in calls]
    return "\n".join([_text(turn.message), *arguments])


def _system(messages: Iterable[Message]) -> list[str]:
    return [_text(message) for message in messages if message["role"] == "system"]


def _without_system(messages: Iterable[Message]) -> list[Message]:
    return [message for message in messages if message["role"] != "system"]


def _plain(text: str) -> str:
    return " ".join(text.split())


def _has_words(text: str, words: str) -> bool:
    """Whether a text has these words, and not as a part of others: 1 does not stand in 12."""
    return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", text) is not None
