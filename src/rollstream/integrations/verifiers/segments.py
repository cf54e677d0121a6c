"""The conversations of one agent as lines of exact tokens, and which of them a request goes on with.

A request for an answer brings a whole conversation. Mostly it is an earlier one, the answer to it, and
something new: then it goes on with the ids that are there. An environment that rewrites its history, or asks
for several answers to the same, branches:

    segment 0   prompt | answer | added | answer | added | answer
                                ^point           ^point         ^tip
    segment 1   ..........................prompt | added' | answer       forks from segment 0's second point
    segment 2   prompt' | answer                                         has nothing in common with them

A segment becomes one trajectory. The ids before a fork are its prompt: as they were sampled, but context
there (no mask), so every sampled token is trained on in exactly one trajectory.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollstream.agent.tokens import TokenTrack
from rollstream.trajectory import Completion, Message, Metrics, Trajectory


@dataclass(frozen=True, slots=True)
class Point:
    """Where an answer ends: a later conversation may go on from here."""

    messages: int
    """How many messages there are up to here, as the environment has them, the answer included."""
    shown: int
    """How many as the model was shown them."""
    tokens: int
    """How many response tokens."""
    answer: Message
    sampled_ids: Sequence[int]
    finish_reason: str
    response_id: str
    """What the answer was called when it was given."""
    number: int
    """Which answer of the agent it is, from 0."""


@dataclass(slots=True)
class Segment:
    """One line of exact tokens."""

    name: str
    """The engine's request id for its generations."""
    track: TokenTrack
    tools: list[dict[str, Any]]
    """Schemas that its prompt shows."""
    messages: list[Message]
    """As the model was shown them, and its answers."""
    seen: list[Message]
    """The same messages as the environment has them: what requests are compared with."""
    points: list[Point] = field(default_factory=list)
    answers_before: int = 0
    """Answers in its prompt, if it is a fork."""
    busy: bool = False
    """Whether an answer is being generated."""

    def accept(
        self,
        added_ids: list[int],
        shown: list[Message],
        seen: list[Message],
        completion: Completion,
        point: Point,
    ) -> None:
        """Adds an answer and what it answers.

        Args:
            added_ids: between the answer before and this one; none of a first answer.
            shown: messages added, as the model was shown them, and the answer.
            seen: the same as the environment has them.
            completion: the answer.
            point: where it ends.
        """
        self.track.add_given(added_ids)
        self.track.add_sampled(completion)
        self.messages += shown
        self.seen += seen
        self.points.append(point)

    def trajectory(self, kept: Collection[str] | None = None) -> Trajectory | None:
        """The segment up to the last of its answers that counts; None if none does.

        Args:
            kept: names of the answers that count; None: all of them.
        """
        last = next(
            (
                at
                for at in range(len(self.points), 0, -1)
                if kept is None or self.points[at - 1].response_id in kept
            ),
            0,
        )
        if not last:
            return None
        point = self.points[last - 1]
        end, track = point.tokens, self.track
        logprobs = track.response_logprobs
        return Trajectory(
            prompt_ids=track.prompt_ids,
            response_ids=track.response_ids[:end],
            response_mask=track.response_mask[:end],
            response_logprobs=None if logprobs is None else logprobs[:end],
            policy_versions=[
                (start, version) for start, version in track.policy_versions if start < max(end, 1)
            ],
            messages=self.messages[: point.shown],
            finish_reason="aborted" if point.finish_reason == "abort" else point.finish_reason,
            num_turns=2 * (self.answers_before + last),  # each answer answers something
            metrics=Metrics(),
        )


def same_message(ours: Message, theirs: Message) -> bool:
    """Whether a message of a request is the one that is known.

    Thinking that is left out is no other message: environments drop it, and the model has seen it.
    """
    if any(ours.get(key) != theirs.get(key) for key in ("role", "content", "tool_call_id")):
        return False
    thought = theirs.get("reasoning_content")
    if thought and thought != ours.get("reasoning_content"):
        return False
    return _calls(ours) == _calls(theirs)


def _calls(message: Message) -> list[tuple[Any, Any, Any]]:
    return [
        (call.get("id"), call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    ]


def find_point(
    segments: Iterable[Segment], messages: Sequence[Message], tools: Sequence[dict[str, Any]]
) -> tuple[Segment, Point] | None:
    """Where a request goes on: after the answer with the most messages in common with it.

    Of several, the newest one's segment. An answer that is the request's last message is none to go on from.

    Args:
        segments: oldest first.
        messages: of the request, in the form of `Segment.seen`.
        tools: that it shows; with other tools the prompt is another one.
    """
    best: tuple[Segment, Point] | None = None
    for segment in segments:
        if segment.tools != list(tools):
            continue
        common = 0
        for ours, theirs in zip(segment.seen, messages, strict=False):
            if not same_message(ours, theirs):
                break
            common += 1
        for point in reversed(segment.points):
            if point.messages <= common and point.messages < len(messages):
                if best is None or point.messages >= best[1].messages:
                    best = segment, point
                break
    return best
