"""Finds the conversation of a session that is the rollout's answer, and which of the others helped.

    final       its last text is the answer that the program states; else it is the newest that begins with the
                prompt row (of several those that show tools, if one does); else the newest of all
    branch      begins as the final one does (a retry, a vote), or its answers went into such a conversation
                (a sub-agent, a history that was compacted)
    side call   any other (a title, a commit message), a call after the answer, and a call that says so itself

A conversation's answer went into another one where a call goes on after it, has it among its messages, or quotes
it: the whole text, or a piece of it that is long enough to be no chance. A text that the conversation had been
shown itself is no quotation.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import orjson

from rollstream.gateway.sessions import AnsweredCall, PendingCall, Segment, Session
from rollstream.trajectory import Message

_PIECE_CHARS = 12
"""A shorter piece of an answer than this may stand in a later message by chance: "two numbers" in a title."""

_SEARCHED, _LOOK = 256 << 20, 1_000
"""Characters that are searched for quotations at most, and the cost of a look beside its text. Conversations that
are not searched count as used: those of a session with thousands would stop all other sessions meanwhile."""

_BOUNDARY = re.compile(r"[^\w ]+")
"""Between pieces: lines, punctuation, and the quotes of JSON."""


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """Answers of one conversation that go on after each other: a trajectory."""

    turns: Sequence[AnsweredCall]
    """At least one."""
    is_side_call: bool = False

    @property
    def segment(self) -> Segment:
        return self.turns[0].ask.segment

    @property
    def last(self) -> AnsweredCall:
        return self.turns[-1]

    @property
    def origin(self) -> AnsweredCall:
        """The first answer of its conversation, which may be another branch's."""
        return (*_before(self), self.turns[0])[0]


@dataclass(frozen=True, slots=True)
class Branches:
    """The branches of a session, in the order of their trajectories."""

    branches: Sequence[Branch]
    """The final one last."""
    is_guess: bool = False
    """Whether another conversation might as well be the final one: no answer is stated that fits, and the prompt
    row, tools and time do not tell them apart. Then only conversations that say so themselves are side calls."""


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
        kept: names of the answers that count; None: all of them. The answers before them in their conversations
            count, too.
        find_side_calls: if not, only those are side calls that say so themselves.
    """
    counted = {turn.ask.segment: turn for turn in session.turns if kept is None or turn.name in kept}
    branches = [Branch(segment.turns[: segment.turns.index(turn) + 1]) for segment, turn in counted.items()]
    if not branches:
        return Branches([])
    usage = _Quotations()
    final, is_guess = _final(branches, answer, prompt, usage)
    whole = next(branch for branch in branches if branch.segment is final.segment)
    branches.remove(whole)
    if rest := whole.turns[len(final.turns) :]:
        branches.append(Branch(rest))
    helped = _helpers(branches, final, usage) if find_side_calls and not is_guess else {*branches}
    others = [
        replace(branch, is_side_call=branch.segment.is_side_call or branch not in helped)
        for branch in _in_order(branches)
    ]
    return Branches([*others, final], is_guess)


def _final(
    branches: Sequence[Branch], answer: str | None, prompt: Sequence[Message], usage: "_Quotations"
) -> tuple[Branch, bool]:
    """The conversation that is the answer, up to the answer; and whether that is no more than a guess."""
    candidates = [branch for branch in branches if not branch.segment.is_side_call] or branches
    stated = _plain(answer or "")
    fits = {branch: _fit(stated, branch.last) for branch in candidates} if stated else {}
    if stated and not any(fits.values()):
        # The program may have gone on talking after its answer.
        earlier = [
            Branch(branch.turns[: at + 1])
            for branch in candidates
            for at, turn in enumerate(branch.turns)
            if _fit(stated, turn) == _SAME
        ]
        candidates = earlier or candidates
    best = max(fits.values(), default=0)
    candidates = [branch for branch in candidates if fits.get(branch, 0) == best]
    begins = _begins_with(prompt, candidates, usage)
    most = max(begins.values())
    candidates = [branch for branch in candidates if begins[branch] == most]
    # OpenCode's title call has the prompt, too, and no tools.
    rivals = [branch for branch in candidates if most and branch.origin.ask.tools] or candidates
    final = _newest(rivals)
    # A title may be the very number that was asked for.
    as_asked = [branch for branch in rivals if _system(branch.origin.ask.given) == _system(prompt)]
    if best and as_asked and not any(usage.of(final, branch) for branch in as_asked):
        final = _newest(as_asked)
    others = (branch for branch in candidates if branch.segment.beginning != final.segment.beginning)

    def is_no_rival(branch: Branch) -> bool:
        was_over = branch.last.answered < final.last.ask.begun
        is_plainer = bool(final.origin.ask.tools) and not branch.origin.ask.tools
        return (bool(most) and was_over and is_plainer) or _carries_on(final, branch, usage)

    is_stated = bool(stated) and _fit(stated, final.last) > 0
    return final, not (is_stated or all(map(is_no_rival, others)))


_SAME, _CONTAINED = 2, 1


def _fit(stated: str, turn: AnsweredCall) -> int:
    """Whether a turn ends in an answer: says just it, has it among its words or arguments, or neither."""
    if _plain(_text(turn.message)) == stated:
        return _SAME
    return _CONTAINED if _has_words(_plain(_all_text(turn)), stated) else 0


def _begins_with(
    prompt: Sequence[Message], branches: Sequence[Branch], usage: "_Quotations"
) -> dict[Branch, int]:
    """How conversations begin: 2 with the prompt row's messages, 1 with its last text somewhere, else 0.

    System messages do not count. A conversation that carries on an earlier one, with its system messages and
    tools, has a rewritten history, and begins as the earlier one did.
    """
    task = [text for text in map(_text, _without_system(prompt)) if text]

    def direct(branch: Branch) -> int:
        texts = [_text(message) for message in _without_system(branch.origin.ask.given)]
        if task and texts[: len(task)] == task:
            return 2
        return int(bool(task) and any(task[-1] in text for text in texts))

    begins = {branch: direct(branch) for branch in branches}
    for later in sorted(branches, key=lambda branch: branch.turns[0].ask.begun):
        for earlier in branches if begins[later] < 2 else ():
            if begins[earlier] > begins[later] and _carries_on(later, earlier, usage):
                begins[later] = begins[earlier]
    return begins


def _carries_on(later: Branch, earlier: Branch, usage: "_Quotations") -> bool:
    frames = [(branch.origin.ask.tools, _system(branch.origin.ask.given)) for branch in (later, earlier)]
    if frames[0] != frames[1]:
        return False
    repeats = any(not {*earlier.turns}.isdisjoint(ask.again) for ask in _asks(later))
    # A question about an answer, as for its title, is no rewritten history: tools or instructions tell.
    return repeats or (any(frames[0]) and usage.of(later, earlier))


def _newest(branches: Sequence[Branch]) -> Branch:
    """The branch that was answered last. Among several that were under way at once it is the longest, not the
    slowest; their texts decide between equally long ones.
    """
    newest = max(branch.last.ask.begun for branch in branches)
    last = [branch for branch in branches if branch.last.answered > newest]
    return max(last, key=lambda branch: (branch.last.ask.number, branch.last.form))


def _helpers(branches: Sequence[Branch], final: Branch, usage: "_Quotations") -> set[Branch]:
    """Branches that begin as the final one does and do not go on after it, and all that went into one of them."""
    alike = (branch for branch in branches if branch.segment.beginning == final.segment.beginning)
    helped = {
        branch for branch in alike if not branch.segment.is_side_call and final.last not in _before(branch)
    }
    todo = [final, *helped]
    while todo:
        later = todo.pop()
        new = {branch for branch in branches if branch not in helped and usage.of(later, branch)}
        helped |= new
        todo += new
    return helped


def _in_order(branches: Iterable[Branch]) -> list[Branch]:
    """Sorts conversations by time. Those that overlapped have no order in time: their texts decide."""
    placed: list[tuple[int, bytes, Branch]] = []
    wave = until = 0
    for branch in sorted(branches, key=lambda branch: branch.turns[0].ask.begun):
        wave += branch.turns[0].ask.begun > until  # whatever began before was over
        until = max(until, branch.last.answered)
        placed.append((wave, branch.last.form, branch))
    return [branch for *_, branch in sorted(placed, key=lambda place: place[:2])]


class _Quotations:
    """Says which conversations an answer went into."""

    def __init__(self) -> None:
        self._left = _SEARCHED
        self._shown: dict[Branch, str] = {}

    def of(self, later: Branch, earlier: Branch) -> bool:
        """Whether an answer of the earlier branch went into the later one."""
        asks, turns = _asks(later), {*earlier.turns}
        self._left -= _LOOK
        if self._left < 0 or any(ask.parent in turns or not turns.isdisjoint(ask.again) for ask in asks):
            return True
        if earlier not in self._shown:
            given = (message for turn in (*_before(earlier), *earlier.turns) for message in turn.ask.given)
            self._shown[earlier] = "\n".join(map(_text, given))
        return any(self._quoted(turn, asks, self._shown[earlier]) for turn in reversed(earlier.turns))

    def _quoted(self, turn: AnsweredCall, asks: Sequence[PendingCall], shown: str) -> bool:
        """Whether a later message quotes a turn, which is not what the turn's own conversation was `shown`."""
        whole, parts = _text(turn.message), map(str.strip, _BOUNDARY.split(_all_text(turn)))
        pieces = [piece for piece in parts if len(piece) >= _PIECE_CHARS]
        for text in (_text(message) for ask in asks if ask.begun > turn.answered for message in ask.given):
            self._left -= len(text) * (1 + len(pieces)) + _LOOK
            if self._left < 0:
                return True
            quoted = (whole and _has_words(text, whole)) or any(
                piece in text and piece not in shown for piece in pieces
            )
            if quoted and text not in shown:
                return True
        return False


def _asks(branch: Branch) -> list[PendingCall]:
    return [turn.ask for turn in branch.turns]


def _before(branch: Branch) -> list[AnsweredCall]:
    """The turns of its conversation before it, which are other branches'."""
    return branch.turns[0].ask.before


def _text(message: Message) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content.strip()
    return "\n".join(part["text"] for part in content if "text" in part).strip()


def _all_text(turn: AnsweredCall) -> str:
    """The text of a turn and the arguments of its calls."""
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
