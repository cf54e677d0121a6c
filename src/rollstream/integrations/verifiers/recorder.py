"""Answers one agent's requests by the run's engine, and keeps the exact tokens."""

import hashlib
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from rollstream.agent.base import AgentLoop
from rollstream.agent.chat_answer import calls_of, identified, openai_call
from rollstream.agent.tokens import TokenTrack
from rollstream.chat.wires.requests import RequestError
from rollstream.errors import ConfigError, DataError, RollstreamError
from rollstream.integrations.verifiers.segments import Point, Segment, find_point
from rollstream.integrations.verifiers.wire import TurnAnswer, TurnRequest, content_of, read_request
from rollstream.trajectory import Completion, Message, SamplingParams, Trajectory


class Recorder:
    """The model behind one agent of one attempt at a rollout.

    `answer` may be called many times at once. What it raises has been noted: an error of the engine by
    `on_broken`, so that the attempt ends with it whatever the environment makes of it; a refusal in
    `refusal`.
    """

    def __init__(
        self,
        loop: AgentLoop,
        sampling: SamplingParams,
        *,
        model: str,
        name: str,
        on_broken: Callable[[Exception], None],
    ) -> None:
        """Args:
        loop: of the attempt; its engine, template and limits are used, its metrics count.
        sampling: of the rollout.
        model: what requests call the model.
        name: of the agent within the attempt; request ids begin with it.
        on_broken: told of what ends the attempt.
        """
        self._loop = loop
        self._sampling = sampling
        self._model = model
        self._name = name
        self._on_broken = on_broken
        self._answers = 0
        self.segments: list[Segment] = []
        self.refusal: RollstreamError | None = None
        """Why the last request that got no answer got none, where it is the request's own fault."""
        self.ran_out_of_room = False
        """Whether a request was refused because nothing would fit behind it."""

    async def answer(self, body: Mapping[str, Any]) -> tuple[TurnRequest, TurnAnswer]:
        """Lets the model answer the body of a request.

        Raises:
            RequestError: it cannot be answered as it is, or there is no room for an answer.
            ConfigError: a tool's schema is not whole.
            DataError: the chat template refuses the messages.
            EngineError: the engine's.
        """
        try:
            request = read_request(body, self._sampling)
            return request, await self._answer(request)
        except (RequestError, ConfigError) as error:
            self.refusal = error
            raise
        except DataError as error:
            if self.segments:
                self.refusal = error
            else:
                self._on_broken(error)  # the rollout's own prompt: an error as with every other loop
            raise
        except Exception as error:
            self._on_broken(error)
            raise

    async def _answer(self, request: TurnRequest) -> TurnAnswer:
        segment, added_ids, shown, seen = await self._place(request)
        prompt_ids = [*segment.track.context, *added_ids]
        sampling = self._turn_sampling(request, segment, len(added_ids))
        number, self._answers = self._answers, self._answers + 1
        in_thinking = self._loop.resources.template.in_thinking(prompt_ids)
        segment.busy = True
        try:
            completion = await self._generate(segment, prompt_ids, sampling, [*segment.messages, *shown])
        finally:
            segment.busy = False
        message = self._read(completion, segment.tools, in_thinking=in_thinking, number=number)
        answer = TurnAnswer(f"chatcmpl-{uuid.uuid4().hex}", self._model, message, prompt_ids, completion)
        point = Point(
            messages=len(segment.seen) + len(seen) + 1,
            shown=len(segment.messages) + len(shown) + 1,
            tokens=len(segment.track) + len(added_ids) + len(completion.token_ids),
            answer=message,
            sampled_ids=completion.token_ids,
            finish_reason=completion.finish_reason,
            response_id=answer.id,
            number=number,
        )
        if not segment.points:
            self.segments.append(segment)
        segment.accept(added_ids, [*shown, message], [*seen, message], completion, point)
        return answer

    async def _place(self, request: TurnRequest) -> tuple[Segment, list[int], list[Message], list[Message]]:
        """The segment that a request goes on with, maybe a new one; the ids and messages that it adds."""
        found = find_point(self.segments, request.messages, request.tools)
        if found is None:
            return await self._fresh(request), [], [], []
        segment, point = found
        seen = request.messages[point.messages :]
        shown = self._shown(seen, point.answer.get("tool_calls") or ())
        added_ids = self._loop.resources.template.ids_after(
            point.answer, shown, sampled_ids=point.sampled_ids, tools=segment.tools or None
        )
        if point is segment.points[-1] and not segment.busy:
            return segment, added_ids, shown, seen
        whole = [*segment.track.prompt_ids, *segment.track.response_ids[: point.tokens], *added_ids]
        before = segment.answers_before + 1 + segment.points.index(point)
        fork = self._segment(
            whole,
            segment.tools,
            [*segment.messages[: point.shown], *shown],
            [*segment.seen[: point.messages], *seen],
        )
        fork.answers_before = before
        return fork, [], [], []

    async def _fresh(self, request: TurnRequest) -> Segment:
        tools = request.tools
        if self.segments:  # a history that was rewritten, or another agent's: as long as it may be
            shown = self._shown(request.messages)
            ids = self._loop.tokenizer.render(shown, tools=tools or None)
            return self._segment(ids, tools, shown, list(request.messages))
        form = orjson.dumps([request.messages, tools], option=orjson.OPT_SORT_KEYS)
        key = hashlib.blake2b(form, digest_size=16).hexdigest()
        ids = await self._loop.render(list(request.messages), prompt_key=key, tools=tools)
        return self._segment(ids, tools, list(request.messages), list(request.messages))

    def _segment(
        self, prompt_ids: list[int], tools: list[dict[str, Any]], shown: list[Message], seen: list[Message]
    ) -> Segment:
        name = self._name if not self._answers else f"{self._name}.{self._answers}"
        track = TokenTrack(prompt_ids, logprobs=self._sampling.logprobs)
        return Segment(name, track, tools, shown, seen)

    def _turn_sampling(self, request: TurnRequest, segment: Segment, added: int) -> SamplingParams:
        resources, sampling = self._loop.resources, self._sampling
        room = self._loop.room(len(segment.track.prompt_ids), len(segment.track) + added)
        if room < 1:
            self.ran_out_of_room = True
            raise RequestError(
                f"a prompt of {len(segment.track.prompt_ids)} and a response of {len(segment.track) + added} "
                "tokens leave no room for an answer within the context length: response_length is "
                f"{resources.response_length}, max_model_len {resources.max_model_len}",
                param="messages",
                code="context_length_exceeded",
            )
        limit = min(sampling.max_tokens, room, request.max_tokens or room)
        stop = tuple(dict.fromkeys((*sampling.stop, *request.stop)))
        if request.stop and not resources.engine.capabilities.stop_strings:
            raise RequestError("the run's engine knows no stop strings", param="stop")
        stop_ids = sampling.stop_token_ids
        if segment.tools and resources.token_exact:
            stop_ids = tuple(dict.fromkeys((*stop_ids, *resources.parser_stop_ids)))
        return replace(sampling, max_tokens=limit, stop=stop, stop_token_ids=stop_ids)

    async def _generate(
        self, segment: Segment, prompt_ids: list[int], sampling: SamplingParams, messages: list[Message]
    ) -> Completion:
        # Several answers may be on their way at once, and an engine knows each by its own id. `generate`
        # reads the id before it waits for anything, so the next call may set another.
        self._loop.request_id = segment.name
        return await self._loop.generate(prompt_ids, sampling, messages=messages, tools=segment.tools or None)

    def _read(
        self, completion: Completion, tools: list[dict[str, Any]], *, in_thinking: bool, number: int
    ) -> Message:
        """The answer as a message; calls that can be executed are in `tool_calls`, others in the content."""
        resources = self._loop.resources
        if completion.message is not None:
            given = completion.message
            calls = [call for call in calls_of(given) if call.error is None]
            message: Message = {**given, "content": given.get("content") or ""}
            message.pop("tool_calls", None)
        else:
            ends = resources.tokenizer.end_ids.union(resources.parser_stop_ids)
            ids = completion.token_ids
            ids = ids[:-1] if ids and ids[-1] in ends else ids
            text = resources.tokenizer.decode(ids, skip_special_tokens=False)
            parsed = resources.parser.parse(text, in_thinking=in_thinking, tools=tools)
            calls = [call for call in parsed.calls if call.error is None] if tools else []
            special = [
                resources.tokenizer.decode([i], skip_special_tokens=False)
                for i in sorted(resources.tokenizer.special_ids.intersection(ids))
            ]
            message = {"role": "assistant", "content": content_of(parsed, special, tools=bool(tools))}
            if parsed.reasoning:
                message["reasoning_content"] = parsed.reasoning
        if calls:
            named = identified(calls, resources.template, turn=number + 1)
            message["tool_calls"] = [openai_call(call) for call in named]
        return message

    def _shown(self, given: Sequence[Message], calls: Sequence[dict[str, Any]] = ()) -> list[Message]:
        """Messages of a request as the model is shown them.

        No special token in them may end a turn or begin one. Results of `calls` have the tool's name, and
        stand in a user's message where the chat template has no role for them.
        """
        by_id = {call["id"]: call for call in calls}
        shown: list[Message] = []
        results: list[tuple[dict[str, Any], Any]] = []
        for message in given:
            if message["role"] in ("user", "tool"):
                message = {
                    **message,
                    "content": self._loop.tokenizer.escape_special_tokens(message["content"]),
                }
            call = by_id.get(message.get("tool_call_id"))
            if message["role"] != "tool" or call is None:
                shown.append(message)
            elif self._loop.resources.template.has_tool_role:
                shown.append({"name": call["function"]["name"], **message})
            else:
                results.append((call, message["content"]))
        if results:
            template = self._loop.resources.template
            shown[:0] = template.tool_messages(
                [call for call, _ in results], [content for _, content in results]
            )
        return shown

    def newest_answer(self) -> str | None:
        """The name of the answer that was given last; None if none was."""
        points = [segment.points[-1] for segment in self.segments]
        return max(points, key=lambda point: point.number).response_id if points else None

    def trajectories(self, kept: Collection[str] | None = None) -> list[Trajectory]:
        """What was recorded: one for each segment, the one with the newest answer last.

        Args:
            kept: names of the answers that count; None: all of them.
        """
        found: list[tuple[int, Trajectory]] = []
        for segment in self.segments:
            if (trajectory := segment.trajectory(kept)) is not None:
                newest = max(p.number for p in segment.points if kept is None or p.response_id in kept)
                found.append((newest, trajectory))
        return [trajectory for _, trajectory in sorted(found, key=lambda pair: pair[0])]
