"""The model behind a session: the run's engine answers its calls, and the session keeps the tokens."""

import asyncio
import hashlib
import logging
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import chain, groupby, pairwise
from typing import Any

import orjson

from rollstream.agent.base import AgentLoop, turn_seed
from rollstream.agent.chat_answer import identified
from rollstream.agent.images import shows_images
from rollstream.agent.turns import asked_digest
from rollstream.aio import Backoff
from rollstream.chat.images import image_part, load_image
from rollstream.chat.wires.openai_chat import assistant_message
from rollstream.engine.base import Capabilities
from rollstream.errors import ConfigError, DataError, EngineUnavailableError, TransientError
from rollstream.gateway.branches import Branch, find_branches
from rollstream.gateway.sessions import AnsweredCall, PendingCall, Session
from rollstream.trajectory import CALL_TIMES, Completion, Message, SamplingParams, Trajectory
from rollstream.web import HTTPError

logger = logging.getLogger(__name__)

_FIRST_PROBE_S, _PROBE_S_MAX = 0.2, 1.0
"""Between questions whether an engine that was away is back."""

_NAMED = 8
"""Values of a parameter that a trajectory's `extra` names at most."""

_NOTES = 50
"""Notes of a session at most."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """The bounds of one session."""

    calls: int = 10_000
    """Calls; those without an answer count, too."""
    bytes: int = 256 << 20
    """Memory, roughly: some 48 bytes a token, and the text."""


@dataclass(frozen=True, slots=True)
class Call:
    """A client's request, whatever API it came by."""

    messages: list[Message]
    """In the form of chat templates: content as text (as parts where there is an image), arguments of calls as
    mappings (as text where they are no JSON object), `reasoning_content`, `tool_call_id`."""
    tools: list[dict[str, Any]]
    """Schemas to show."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    """Texts that end the answer, which the client is not told."""
    sampling: SamplingParams | None = None
    """How to sample in place of the run's way, where the run allows it."""
    own_seed: bool = False
    """Whether the seed is the client's: then it goes to the engine as it is."""
    deferred: Sequence[dict[str, Any]] = ()
    """Schemas that the messages show, beside `tools`."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Parts of the request that are not done as asked, by name."""
    name: str | None = None
    """The answer's id; None: one is made."""
    is_side_call: bool = False
    """Whether the client says so."""


@dataclass(eq=False)
class Recorder:
    """Answers the calls of one agent in one attempt at a rollout. `answer` may be called many times at once."""

    loop: AgentLoop
    """The attempt's; its engine, template and limits are used, its metrics count."""
    sampling: SamplingParams
    """The rollout's."""
    _: KW_ONLY
    name: str
    """Request ids begin with it."""
    broken: "asyncio.Future[Exception]"
    """Is given the first error that is not the agent's to handle: the engine's, or a bug."""
    limits: SessionLimits = SessionLimits()
    engine_wait: float = 0.0
    """Seconds that a call waits while no engine is there, before its error is set on `broken`."""

    def __post_init__(self) -> None:
        self._templates = _Templates(self.loop)
        self.session = Session(self._templates, name=self.name, logprobs=self.sampling.logprobs)
        self.refusal: Exception | None = None
        """Why the last refused call was refused: a fault of the call itself."""
        self.ran_out_of_room = False
        """Whether a call was refused because nothing would fit behind it."""
        self.final_is_guess = False
        """Whether the final trajectory is no more than the newest, see `Branches`."""
        self.tokens = 0
        """Sampled so far."""
        self._times: dict[int, tuple[str, float, float]] = {}
        """Of calls by their serials, see `AgentLoop.call_times`."""
        self._notes: dict[str, Any] = {}
        self._noted: set[str] = set()

    @property
    def capabilities(self) -> Capabilities:
        """The engine's capabilities."""
        return self.loop.resources.engine.capabilities

    @property
    def takes_images(self) -> bool:
        """Whether messages may have images."""
        return self.loop.resources.images is not None

    @property
    def calls(self) -> int:
        """Calls that were answered."""
        return len(self.session.turns)

    @property
    def open_calls(self) -> int:
        """Calls that wait for an answer."""
        return self.session.open_calls

    async def count_tokens(self, messages: list[Message], tools: list[dict[str, Any]]) -> int:
        """Tokens of a prompt with these messages; nothing is begun.

        Raises:
            HTTPError: the chat template refuses them, or an image cannot be shown.
        """
        if shows_images(messages):
            messages = await self._with_images(messages)
        try:
            return len(self._templates.prompt(messages, tools, first=False)[1])
        except DataError as error:
            raise HTTPError(400, str(error), where="messages") from error

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Notes why a call gets no answer, in `refusal` or `broken`, and raises it."""
        try:
            yield
        except Exception as error:
            # The rollout's own prompt, if it cannot be rendered, is an error as with every other loop.
            own_prompt = isinstance(error, DataError) and not self.session.begun
            if isinstance(error, HTTPError | ConfigError | DataError) and not own_prompt:
                self.refusal = error
            elif not self.broken.done():
                self.broken.set_result(error)
            raise

    async def answer(
        self, call: Call, *, gone: Callable[[], bool] = lambda: False
    ) -> tuple[AnsweredCall, list[int]]:
        """Lets the model answer.

        Args:
            call: what is asked for.
            gone: whether the client went away: then the answer is not kept, for nobody will have read it.

        Returns:
            The call with its answer, and the prompt that the engine got.

        Raises:
            HTTPError: there is no room for an answer, or the engine cannot do what is asked.
            DataError: the chat template refuses the messages.
            EngineError: the engine's.
            CancelledError: the client went away.
        """
        if shows_images(call.messages):
            call = replace(call, messages=await self._with_images(call.messages))
        self._admit(call)
        changed_before = self.session.system_changed
        ask = self.session.begin(call.messages, call.tools, is_side_call=call.is_side_call)
        if self.session.system_changed > changed_before:
            logger.warning(
                "session %s: a call differs from an earlier conversation in a system text only, so it begins a "
                "trajectory of its own; if each call does (a time, a counter), take that out of the prompt",
                self.session.name,
            )
        try:
            context, prompt_length = ask.context, ask.prompt_length
            sampling = self._sampling_of(call, prompt_length, len(context) - prompt_length)
            if sampling.seed is not None and not call.own_seed:
                # The conversation that the session began with has the seeds that `tool_agent` has. Others go by
                # their places among the calls, not by when they came: calls at once come in any order.
                is_first = ask.segment.is_first
                place = ask.number - 1 if is_first else int.from_bytes(ask.path[:6], "little")
                sampling = replace(sampling, seed=turn_seed(sampling.seed, place))
            in_thinking = self.loop.resources.template.in_thinking(context)
            asked, kept = b"", None
            if (turns := self.loop.turns) is not None:
                images = self._templates.images_of(ask.messages) if self.takes_images else []
                asked = asked_digest(context, sampling, images)
                kept = turns.take(asked)
            completion = kept or await self._generate(context, sampling, ask, gone)
            if kept is None:
                self._times[ask.serial] = self.loop.call_times[-1]  # nothing else ran since it was noted
            message, stop = self._read(completion, ask, call, in_thinking=in_thinking)
            if gone():
                raise asyncio.CancelledError  # as the server is about to cancel it
        except BaseException:
            self.session.give_up(ask)
            raise
        name = call.name or f"chatcmpl-{uuid.uuid4().hex}"
        turn = self.session.answer(ask, name, message, completion, stop=stop)
        if kept is None:
            self.loop.keep_turn(asked, completion)
        self.tokens += len(completion.token_ids)
        self._note(call)
        return turn, context

    def trajectories(
        self,
        *,
        answer: str | None = None,
        prompt: Sequence[Message] = (),
        kept: Collection[str] | None = None,
        find_side_calls: bool = True,
    ) -> list[Trajectory]:
        """The recorded trajectories, the final one last. See `find_branches` for the arguments.

        `extra` has `prompt_messages`, `shown_tools` (schemas) and `tool_counts` where there were any, `call_times` of
        a session of several calls, and in `gateway` what there is to say:

        - `side_call`: true of one that had no part in the rollout's answer.
        - `rendered_again_tokens`: sampled for answers that the client sent back in a history of its own making:
          their texts were rendered, and stand in the prompt as the template writes them.
        - `client_sampling`: what calls of the session chose, distinct values.
        - `notes`: what calls of the session asked for that was not done as asked.
        - `replaced_surrogates`: lone surrogates that became U+FFFD, in the request that had most.
        """
        recorded = find_branches(
            self.session, answer=answer, prompt=prompt, kept=kept, find_side_calls=find_side_calls
        )
        trajectories = [self._trajectory(branch) for branch in recorded.branches]
        for trajectory in trajectories[:-1]:
            trajectory.is_snapshot = True
        self.final_is_guess = recorded.is_guess
        return trajectories

    def _trajectory(self, branch: Branch) -> Trajectory:
        turns = branch.turns
        trajectory = self.session.trajectory(turns)
        metrics, extra = trajectory.metrics, trajectory.extra
        metrics.cached_prompt_tokens = sum(turn.completion.cached_prompt_tokens for turn in turns)
        called = Counter(
            call["function"]["name"] for turn in turns for call in turn.message.get("tool_calls") or ()
        )
        metrics.tool_calls = called.total()
        if called:  # whether one went wrong is the program's to know
            extra["tool_counts"] = {name: [calls, 0] for name, calls in called.items()}
        if self.calls > 1:
            times = [self._times.get(turn.ask.serial) for turn in turns]
            extra[CALL_TIMES] = [known for known in times if known is not None]
        first = turns[0].ask
        extra["prompt_messages"] = len(first.messages)
        if first.tools:
            extra["shown_tools"] = list(first.tools)
        about = {
            "side_call": branch.is_side_call,
            "rendered_again_tokens": sum(
                len(answer.completion.token_ids)
                for turn in (*first.before, *turns)
                for answer in turn.ask.again
            ),
        }
        if about := {name: value for name, value in about.items() if value} | self._notes:
            extra["gateway"] = about
        return trajectory

    def _admit(self, call: Call) -> None:
        session, limits = self.session, self.limits
        size = session.size + sum(map(len, self._templates.images.values()))
        if session.begun >= limits.calls or size > limits.bytes:
            raise HTTPError(
                400,
                f"the session has had {session.begun} calls and takes {size} bytes: at most "
                f"{limits.calls} calls and {limits.bytes} bytes are allowed",
                code="session_limit_exceeded",
            )

    def check_length(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> None:
        """Refuses what is far too long, before it is rendered: all sessions would wait meanwhile.

        Raises:
            HTTPError: it is.
        """
        resources = self.loop.resources
        limit = resources.max_model_len
        if limit is None or (not self.session.begun and self.loop.prompts.truncation != "error"):
            return  # the rollout's own prompt is cut
        if characters := self.loop.tokenizer.characters_beyond(limit, messages, tools):
            self.ran_out_of_room = True
            raise HTTPError(
                400,
                f"the messages have {characters} characters, far more than the context length of {limit} tokens",
                code="context_length_exceeded",
                where="messages",
            )

    async def _with_images(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with small image parts, which say what image it is. New images are read and kept.

        Raises:
            HTTPError: the model sees none, or one cannot be read.
        """
        reader, kept = self.loop.resources.images, self._templates.images
        if reader is None:
            raise HTTPError(400, "this model is shown no images here", where="messages")

        async def read(part: dict[str, Any]) -> dict[str, Any]:
            if part["type"] != "image_url":
                return part
            source = part["image_url"]["url"]
            part = image_part(source)
            if (key := _image_key(part)) not in kept:
                kept[key] = (await reader.read([source]))[0].sent
            return part

        try:
            return [
                {**message, "content": [await read(part) for part in message["content"]]}
                if isinstance(message.get("content"), list)
                else message
                for message in messages
            ]
        except (DataError, TransientError) as error:
            status = 400 if isinstance(error, DataError) else 503
            raise HTTPError(status, str(error), where="messages") from error

    def note_surrogates(self, replaced: int) -> None:
        """Notes how many lone surrogates of a request were replaced; later ones send the same text again."""
        if replaced:
            self._notes["replaced_surrogates"] = max(replaced, self._notes.get("replaced_surrogates", 0))

    def _note(self, call: Call) -> None:
        notes = {**call.notes, **self._templates.notes}
        if self.session.system_changed:
            notes["system text"] = "differs from call to call"
        for name, value in notes.items():
            if name not in self._noted and len(self._noted) < _NOTES:
                self._noted.add(name)
                self._notes.setdefault("notes", []).append(f"{name}: {value}")
        if call.sampling is not None:
            for name in ("temperature", "top_p", "top_k", "seed"):
                if (value := getattr(call.sampling, name)) != getattr(self.sampling, name):
                    values = self._notes.setdefault("client_sampling", {}).setdefault(name, [])
                    if value not in values and len(values) < _NAMED:
                        values.append(value)

    async def _generate(
        self, context: list[int], sampling: SamplingParams, ask: PendingCall, gone: Callable[[], bool]
    ) -> Completion:
        """Asks the engine, and waits for it while it is away."""
        clock = asyncio.get_running_loop().time
        away_since, backoff = None, Backoff(_FIRST_PROBE_S, _PROBE_S_MAX)
        while True:
            try:
                # Calls that are open at once have ids and images of their own. `generate` reads them before it
                # waits.
                self.loop.request_id = ask.request_id
                self.loop.images = self._templates.images_of(ask.messages) if self.takes_images else []
                return await self.loop.generate(context, sampling, own_seed=True)
            except EngineUnavailableError:
                away_since = clock() if away_since is None else away_since
                if clock() - away_since >= self.engine_wait or gone():
                    raise
            while clock() - away_since < self.engine_wait:
                await asyncio.sleep(backoff.pause())
                with suppress(EngineUnavailableError, TimeoutError):
                    async with asyncio.timeout(10 * _PROBE_S_MAX):
                        if await self.loop.resources.engine.health():
                            break

    def _sampling_of(self, call: Call, prompt_tokens: int, response_tokens: int) -> SamplingParams:
        resources, run = self.loop.resources, call.sampling or self.sampling
        room = self.loop.room(prompt_tokens, response_tokens)
        if room < 1:
            self.ran_out_of_room = True
            raise HTTPError(
                400,
                f"a prompt of {prompt_tokens} and a response of {response_tokens} tokens leave no room for an "
                f"answer within the context length: response_length is {resources.response_length}, "
                f"max_model_len {resources.max_model_len}",
                code="context_length_exceeded",
                where="messages",
            )
        if call.stop and not resources.engine.capabilities.stop_strings:
            raise HTTPError(400, "the run's engine knows no stop strings", where="stop")
        parser_stops = resources.parser_stop_ids if call.tools else ()
        return replace(
            run,
            max_tokens=min(run.max_tokens, room, call.max_tokens or room),
            stop=tuple(dict.fromkeys((*run.stop, *call.stop))),
            stop_token_ids=tuple(dict.fromkeys((*run.stop_token_ids, *parser_stops))),
        )

    def _read(
        self, completion: Completion, ask: PendingCall, call: Call, *, in_thinking: bool
    ) -> tuple[Message, str | None]:
        """The answer as a message, and the client's stop text that ended it.

        Only calls that can be executed are `tool_calls`.
        """
        resources, tokenizer = self.loop.resources, self.loop.tokenizer
        ids, stop, stops = completion.token_ids, None, call.stop
        tools = [*ask.tools, *call.deferred]
        parsed = resources.parse(ids, in_thinking=in_thinking, tools=tools)
        if stops and completion.finish_reason == "stop" and ids:
            text = tokenizer.decode(ids, skip_special_tokens=False)
            last = len(tokenizer.decode(ids[:-1], skip_special_tokens=False))
            # The last token completed it; some tokenizers write a token another way at the end.
            places = ((text.find(one, max(0, last - len(one) - _NAMED)), one) for one in stops)
            if found := min((place for place in places if place[0] >= 0), default=None):
                stop = found[1]
                parsed = resources.parser.parse(text[: found[0]], in_thinking=in_thinking, tools=tools)
        calls = identified(parsed.calls, resources.template.takes_call_id, turn=ask.serial)
        special = sorted(tokenizer.special_ids.intersection(ids))
        message = assistant_message(
            replace(parsed, calls=tuple(calls)),
            [tokenizer.decode([token], skip_special_tokens=False) for token in special],
            tools=bool(tools),
        )
        return message, stop


class _Templates:
    """Renders by the model's chat template; no special token in a message ends a turn or begins one."""

    def __init__(self, loop: AgentLoop) -> None:
        self._loop = loop
        self.images: dict[str, str] = {}
        """Images in the form that the engine takes, by `_image_key` of their message parts."""
        self.notes: dict[str, str] = {}
        """Says what is shown in another form than it was sent in."""

    def images_of(self, messages: Sequence[Message]) -> list[str]:
        """All images that messages show, in order."""
        if not shows_images(messages):
            return []
        contents = (message["content"] for message in messages if isinstance(message["content"], list))
        return [self.images[_image_key(part)] for part in chain(*contents) if part["type"] == "image"]

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, first: bool
    ) -> tuple[Sequence[Message], Sequence[int]]:
        schemas, template = list(tools), self._loop.resources.template
        if not first:
            messages = _named(messages)
        if any(message["role"] == "tool" for message in messages) and not template.has_tool_role:
            messages = self._results_of_users(messages)
        images = self._pixels(messages)
        if images or not first:
            messages = [self._escaped(message) for message in messages]
        shown = self._placed(messages)
        if images:
            processor = self._loop.resources.images.processor  # type: ignore[union-attr]
            return shown, processor.render(shown, images, tools=schemas or None)
        if not first:  # a rewritten history, or a helper's prompt: as long as it may be
            return shown, self._loop.tokenizer.render(shown, tools=schemas or None)
        form = orjson.dumps([shown, schemas], option=orjson.OPT_SORT_KEYS)
        key = hashlib.blake2b(form, digest_size=16).hexdigest()
        return shown, self._loop.prompts.render(shown, prompt_key=key, tools=schemas)

    def after(
        self, turn: AnsweredCall, messages: Sequence[Message]
    ) -> tuple[Sequence[Message], Sequence[int]]:
        template = self._loop.resources.template
        calls = {call["id"]: call for call in turn.message.get("tool_calls") or ()}
        shown: list[Message] = []
        results: list[tuple[dict[str, Any], Any]] = []
        for message in map(self._escaped, messages):
            call = calls.get(message.get("tool_call_id"))
            if message["role"] != "tool" or call is None:
                shown.append(message)
            elif template.has_tool_role:
                shown.append({"name": call["function"]["name"], **message})
            else:
                results.append((call, message["content"]))
        if results:  # they stand in a user's message
            shown[:0] = template.tool_messages(
                [call for call, _ in results], [content for _, content in results]
            )
        shown = self._placed([turn.message, *shown])[1:]
        ids = template.ids_after(
            [*turn.ask.messages, turn.message],
            shown,
            sampled_ids=turn.completion.token_ids,
            tools=list(turn.ask.tools) or None,
            images=self._pixels(shown),
        )
        return shown, ids

    def _results_of_users(self, messages: Sequence[Message]) -> list[Message]:
        """A history with results of tools in users' messages, for a template without a role for them."""
        shown: list[Message] = []
        for are_results, group in groupby(messages, key=lambda message: message["role"] == "tool"):
            turn = [*group]
            if are_results:
                turn = self._loop.resources.template.tool_messages(
                    turn, [message["content"] for message in turn]
                )
            shown += turn
        return shown

    def _placed(self, messages: Sequence[Message]) -> list[Message]:
        placed = self._loop.tokenizer.form.placed(list(messages))
        roles = [message["role"] for message in messages]
        turns = sum(before != "system" == role for before, role in pairwise(["", *roles]))
        if turns > sum(message["role"] == "system" for message in placed):
            self.notes["system message"] = "shown in a user's turn"
        return placed

    def _pixels(self, messages: Sequence[Message]) -> list[Any]:
        """Decodes each image, without a thread: a session begins a call at once."""
        return [load_image(image) for image in self.images_of(messages)]

    def _escaped(self, message: Message) -> Message:
        if message["role"] not in ("user", "tool"):
            return message
        content, escape = message["content"], self._loop.tokenizer.escape_special_tokens
        if isinstance(content, str):
            return {**message, "content": escape(content)}
        parts = [{**part, "text": escape(part["text"])} if "text" in part else part for part in content]
        return {**message, "content": parts}


def _named(messages: Sequence[Message]) -> list[Message]:
    """A history whose results say what was called, as those that follow an answer do: some templates want it."""
    names = {
        call.get("id"): call["function"]["name"] for one in messages for call in one.get("tool_calls") or ()
    }
    return [
        {"name": names[known], **one}
        if one["role"] == "tool" and (known := one.get("tool_call_id")) in names
        else one
        for one in messages
    ]


def _image_key(part: Mapping[str, Any]) -> str:
    """Names an image by its content, or by its address."""
    return str(part.get("sha256") or part["image"])
