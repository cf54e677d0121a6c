"""The loop of a model that edits its own context: one rollout, several trajectories.

    prompt | answer | result | ... | answer with deleteContext      snapshot 0: trained up to here
    prompt with stubs for what was deleted | answer | ...           snapshot 1, or the final trajectory

A deletion takes a snapshot of all tokens up to and including the answer that asked for it. The history is
then put together anew, with a stub in the place of what was deleted, as the prompt of a fresh trajectory.
Answers that stay keep the ids that were sampled; they are context there (no mask), so every sampled token of
the rollout is trained on in exactly one trajectory.
"""

import functools
from collections.abc import Sequence
from typing import Any

from rollstream.agent.base import AgentResources, SnapshotScoring
from rollstream.agent.conversation import Conversation, Turn
from rollstream.agent.tool_agent import State, ToolAgent
from rollstream.agent.tools.session import ToolResult, truncate_text
from rollstream.chat.parsers.base import ToolCall
from rollstream.chat.tool_schema import ArgumentCheck
from rollstream.errors import ConfigError, DataError
from rollstream.trajectory import Message, Metrics, Trajectory

_NOTES_CHARS = 65_536
"""Of all notes of a rollout together: they live in memory, and what is read back fills the context anyway."""


def _schema(name: str, description: str, **parameters: dict[str, str]) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": parameters, "required": list(parameters)},
        },
    }


_MSG_ID = {"type": "integer", "description": "The message's msg_id."}
_KEY = {"type": "string", "description": "The note's name."}
_CONTENT = {"type": "string", "description": "What to remember."}

SCHEMAS = [
    _schema(
        "deleteContext",
        "Deletes a message from the context. A short stub stays in its place. Write down what matters first.",
        msg_id=_MSG_ID,
    ),
    _schema("note", "Writes a new note, which stays when messages are deleted.", key=_KEY, content=_CONTENT),
    _schema("readNote", "Reads a note.", key=_KEY),
    _schema("updateNote", "Replaces the content of a note.", key=_KEY, content=_CONTENT),
]
"""OpenAI schemas of the tools."""

NAMES = frozenset(schema["function"]["name"] for schema in SCHEMAS)


class ContextAgent(ToolAgent):
    """A tool agent whose model has `deleteContext(msg_id)`, `note`, `readNote` and `updateNote` as well.

    A message's id is its position in the conversation. Messages given to the model begin with a line
    `[msg_id: 3]`. Options (in the YAML of `agent_loop_config_path`):

    - `max_snapshots`: further deletions are refused, so that a rollout has an end.
    - `snapshot_scoring`: see `AgentLoop.snapshot_scoring`.
    - `context_penalty`, `context_budget`: a snapshot's reward is `-context_penalty` for every token that its
      prompt and response have beyond `context_budget`. Null: scored by `snapshot_scoring`.
    """

    needs_tools = False
    sees_images = False
    cannot_continue = "it numbers the messages anew"
    conversation: Conversation

    def __init__(
        self,
        *args: Any,
        max_snapshots: int = 16,
        snapshot_scoring: SnapshotScoring = "outcome",
        context_penalty: float | None = None,
        context_budget: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if snapshot_scoring not in ("outcome", "own", "none"):
            raise ConfigError(
                f"context_agent: snapshot_scoring is {snapshot_scoring!r}: outcome, own or none"
            )
        self.snapshot_scoring = snapshot_scoring
        self.max_snapshots = max_snapshots
        self.context_penalty = context_penalty
        self.context_budget = context_budget
        self.snapshots: list[Trajectory] = []
        self.notes: dict[str, str] = {}
        self.deleted: set[int] = set()
        self._answers: dict[int, Turn] = {}
        """By msg_id: their positions in the conversation."""
        self._prompt_messages = 0
        self._prompt_ids: list[int] = []

    @classmethod
    def prompt_tools(cls, tools: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
        return [*tools, *SCHEMAS]

    @classmethod
    def build_shared(cls, resources: AgentResources, **options: Any) -> Any:
        taken = [tool["function"]["name"] for tool in resources.tools.schemas]
        if both := NAMES.intersection(taken):
            raise ConfigError(
                f"context_agent has tools of its own of the names {', '.join(sorted(both))}; rename yours"
            )
        return super().build_shared(resources, **options)

    async def start(self) -> State:
        state = await super().start()
        self._prompt_ids = self.conversation.track.prompt_ids
        return state

    def shown_tools(self) -> list[dict[str, Any]]:
        others = [schema for schema in super().shown_tools() if schema["function"]["name"] not in NAMES]
        return [*others, *SCHEMAS]

    def prompt_messages(self) -> list[Message]:
        if self.row.get("images"):
            raise DataError("context_agent cannot take rows with images; use tool_agent for them")
        given = super().prompt_messages()
        self._prompt_messages = len(given)
        return [_with_id(message, at) for at, message in enumerate(given)]

    def snapshot_reward(self, snapshot: Trajectory) -> float | None:
        """The reward of a snapshot, if it is known before the rollout ends; override for one of your own."""
        if self.context_penalty is None:
            return None
        tokens = len(snapshot.prompt_ids) + len(snapshot.response_ids)
        return -self.context_penalty * max(0, tokens - self.context_budget)

    async def process_tools(self) -> State:
        conversation, turn = self.conversation, self.turn
        at = len(conversation.messages) - 1
        results, asked = await self._execute(turn.calls)
        self.count(turn.calls, results)
        contents, _ = await self.show(results)
        added = self.tool_messages(turn.message["tool_calls"], contents)
        added = [_with_id(message, at + 1 + i) for i, message in enumerate(added)]
        self._answers[at] = turn
        if not asked:
            return State.GENERATING if conversation.add(added) else self.end("tool_overflow")
        messages = [*conversation.messages, *added]
        deleted = self.deleted.union(asked)
        messages = [_stub(m, at) if at in deleted else m for at, m in enumerate(messages)]
        prompt_ids = self._compose(messages, deleted)
        if self.room(len(prompt_ids), 0) < 1:
            return self.end("length")  # nothing can follow: what there is, is the final trajectory
        self._take_snapshot(asked)
        self.note_tools(prompt_ids, self.tools)
        self.conversation = Conversation(
            self, messages, prompt_ids, logprobs=self.sampling.logprobs, tools=self.tools
        )
        self.conversation.assistant_turns = conversation.assistant_turns
        self.conversation.user_turns = conversation.user_turns + 1
        return State.GENERATING

    async def interact(self) -> State:
        at = len(self.conversation.messages)
        state = await super().interact()
        if state is State.GENERATING:
            self._answers[at - 1] = self.turn
        return state

    def users_message(self, text: str) -> Message:
        return _with_id(super().users_message(text), len(self.conversation.messages))

    def finish(self, tool_scores: dict[str, float]) -> list[Trajectory]:
        final = super().finish(tool_scores)
        assert isinstance(final, Trajectory)
        return [*self.snapshots, final]

    async def _execute(self, calls: Sequence[ToolCall]) -> tuple[list[ToolResult], list[int]]:
        """Results of all calls, in order, and the messages to delete."""
        others = [call for call in calls if call.name not in NAMES]
        theirs = iter(await self.timed(self.session.run(others, messages=self.conversation.messages)))
        results: list[ToolResult] = []
        asked: list[int] = []
        for call in calls:
            if call.name not in NAMES:
                results.append(next(theirs))
                continue
            try:
                results.append(ToolResult(self._cut(self._execute_own(call, asked))))
            except Refused as refusal:
                results.append(ToolResult(self._cut(f"Error: {refusal}."), error="bad_arguments"))
        return results, asked

    def _execute_own(self, call: ToolCall, asked: list[int]) -> str:
        if call.arguments is None:
            raise Refused(call.error or "the arguments cannot be read")
        if (misfit := _argument_checks()[call.name].misfit(call.arguments)) is not None:
            raise Refused(f"{call.name}: {misfit}")
        if call.name == "deleteContext":
            msg_id = int(call.arguments["msg_id"])  # 3.0 is an integer, too
            self._check_deletion(msg_id, self.deleted.union(asked))
            asked.append(msg_id)
            return f"Message {msg_id} is deleted."
        key, notes = call.arguments["key"], self.notes
        if call.name == "note" and key in notes:
            raise Refused(f"there is a note {key!r} already; updateNote replaces it")
        if call.name != "note" and key not in notes:
            raise Refused(f"no note {key!r}; notes there are: {', '.join(map(repr, notes)) or 'none'}")
        if call.name == "readNote":
            return notes[key]
        notes = {**notes, key: call.arguments["content"]}
        if (size := sum(map(len, [*notes, *notes.values()]))) > _NOTES_CHARS:
            raise Refused(f"notes may have {_NOTES_CHARS} characters in all; this would make {size}")
        self.notes = notes
        return f"Note {key!r} is {'updated' if call.name == 'updateNote' else 'written'}."

    def _check_deletion(self, msg_id: int, deleted: set[int]) -> None:
        messages = self.conversation.messages
        if len(self.snapshots) >= self.max_snapshots:
            raise Refused("nothing more can be deleted in this conversation")
        if not 0 <= msg_id < len(messages) - 1:
            raise Refused(f"no message has msg_id {msg_id}")
        if messages[msg_id].get("role") == "system":
            raise Refused("the system message cannot be deleted")
        if msg_id in deleted:
            raise Refused(f"message {msg_id} is deleted already")

    def _cut(self, text: str) -> str:
        limits = self.resources.tools.limits
        return truncate_text(text, limits.max_response_length, limits.truncate_side)

    def _take_snapshot(self, asked: list[int]) -> None:
        extra = {"deleted_msg_ids": asked, "tool_counts": self.tool_counts}
        snapshot = self.conversation.trajectory("stop", extra=extra)
        snapshot.is_snapshot = True
        snapshot.reward = self.snapshot_reward(snapshot)
        self.snapshots.append(snapshot)
        self.deleted.update(asked)
        self.metrics, self.tool_counts = Metrics(), {}

    def _compose(self, messages: list[Message], deleted: set[int]) -> list[int]:
        """Ids of the edited history: kept answers as sampled, everything else rendered."""
        kept = [at for at in self._answers if at not in deleted]
        starts = [*kept, len(messages)]
        if starts[0] == self._prompt_messages and deleted.isdisjoint(range(self._prompt_messages)):
            ids = list(self._prompt_ids)  # as it was seen, also where it had to be truncated
        else:
            ids = self.tokenizer.render(messages[: starts[0]], tools=self.tools)
        for at, following in zip(kept, starts[1:], strict=True):
            sampled = self._answers[at].completion.token_ids
            ids += sampled
            ids += self.resources.template.ids_after(
                messages[: at + 1], messages[at + 1 : following], sampled_ids=sampled, tools=self.tools
            )
        return ids


def _with_id(message: Message, msg_id: int) -> Message:
    if message["role"] == "system":
        return message
    content = message.get("content") or ""  # an answer of calls alone may have none
    head = f"[msg_id: {msg_id}]\n"
    if isinstance(content, str):
        return {**message, "content": head + content}
    return {**message, "content": [{"type": "text", "text": head}, *content]}


def _stub(message: Message, msg_id: int) -> Message:
    """What stays of a deleted message: its place, and of its calls the names, since results refer to them."""
    kept = {key: value for key, value in message.items() if key != "reasoning_content"}
    if calls := kept.get("tool_calls"):
        kept["tool_calls"] = [{**call, "function": {**call["function"], "arguments": {}}} for call in calls]
    return {**kept, "content": f"[msg_id: {msg_id}] [deleted]"}


class Refused(Exception):
    """The call cannot be executed; its text is for the model."""


@functools.cache
def _argument_checks() -> dict[str, ArgumentCheck]:
    return {schema["function"]["name"]: ArgumentCheck(schema) for schema in SCHEMAS}
