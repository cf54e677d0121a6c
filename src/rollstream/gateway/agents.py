"""The common part of agent loops whose calls come over the gateway: a session, and its result."""

import asyncio
import logging
import math
import time
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Any, ClassVar, TypeVar

import msgspec
import orjson

from rollstream.agent.base import AgentLoop, AgentResources
from rollstream.config.load import compose, read_value, to_settings
from rollstream.config.settings import GatewaySettings, Settings
from rollstream.errors import ConfigError, RollstreamError, unknown_name
from rollstream.gateway.app import Endpoint
from rollstream.gateway.recorder import Recorder, SessionLimits
from rollstream.surrogates import replace_in_value
from rollstream.trajectory import Message, SamplingParams, Trajectory

logger = logging.getLogger(__name__)

MODEL = "rollstream"
"""The model's name in every API."""

_CLEAN_UP_S = 30.0
"""How long a rollout that was cut off waits for its agent to clean up. One that takes longer goes on by itself."""

_ENGINE_WAIT_S = 30.0
"""How long a call waits for an engine that went away. After that the whole attempt is given up and made anew, at
no charge, when the engine is back: else an agent's own time limit would run meanwhile."""

_HIDDEN = ("ground_truth", "reward_model", "answer", "solution")
"""Parts of a prompt row that an agent is not shown: it could read there what it is to find."""

_AGENTS_OWN = ("client_sampling", "strict", "train_side_calls", "max_calls", "max_bytes")
"""Options of every such loop that decide its data."""

_GUESS = (
    "a program had several conversations, and which one is its answer is a guess: it should state its answer "
    "(docs/gateway.md); this is said once"
)

T = TypeVar("T")


class AgentFailedError(RollstreamError):
    """An agent gave no result that can be used: says why, and the end of what it wrote."""


class Outcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An agent's own result of a rollout. An empty one leaves the score to the run's reward function."""

    answer: str | None = None
    reward: float | None = None
    reward_extra: dict[str, Any] = {}
    extra: dict[str, Any] = {}


class SharedEndpoint:
    """An endpoint that the rollouts of one worker share.

    It is opened for the first rollout and closed when the event loop ends, which cancels the task that holds it
    open: what a task enters, it has to leave itself.
    """

    _holding: ClassVar[set[asyncio.Task[None]]] = set()
    """A loop itself keeps no task alive, and the worker may be gone before its loop."""

    def __init__(
        self,
        make: Callable[[], Endpoint],
        beside: Callable[[Endpoint], AbstractAsyncContextManager[Any]] = lambda _: nullcontext(),
    ) -> None:
        """Args:
        make: the endpoint, not serving yet.
        beside: what else is open as long as it serves.
        """
        self._make, self._beside = make, beside
        self._endpoint: asyncio.Future[Endpoint] | None = None

    async def get(self) -> Endpoint:
        """The endpoint, serving. What opening raises is raised to all who wait, and is tried again by the next."""
        opening, loop = self._endpoint, asyncio.get_running_loop()
        failed = opening is not None and opening.done() and (opening.cancelled() or opening.exception())
        if opening is None or opening.get_loop() is not loop or failed:
            opening = self._endpoint = loop.create_future()
            holding = loop.create_task(self._hold(opening))
            self._holding.add(holding)
            holding.add_done_callback(self._holding.discard)
        return await asyncio.shield(opening)

    async def _hold(self, opening: "asyncio.Future[Endpoint]") -> None:
        try:
            endpoint = self._make()
            async with endpoint.serving(), self._beside(endpoint):
                opening.set_result(endpoint)
                await asyncio.Event().wait()  # until it is cancelled with its loop
        except Exception as error:
            if opening.done():
                logger.warning("what agents share did not close well", exc_info=error)
            else:
                opening.set_exception(error)


async def unless_broken(acting: Coroutine[Any, Any, T], broken: "asyncio.Future[Exception]") -> T:
    """Awaits an agent, but ends it when the engine fails, whatever it would make of that.

    Raises:
        Exception: what `broken` gives, or what the agent raises.
    """
    task = asyncio.create_task(acting)
    try:
        await asyncio.wait((task, broken), return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not task.done():
            task.cancel()
            _, late = await asyncio.wait((task,), timeout=_CLEAN_UP_S)
            if late:
                logger.warning("an agent still cleans up %g s after its rollout ended", _CLEAN_UP_S)
    if not broken.done():
        return task.result()
    if task.done() and not task.cancelled():
        task.exception()  # what it made of the engine's error is not told
    raise broken.result()


@dataclass(slots=True)
class Shared:
    """The settings and the endpoint that all agents of one worker share."""

    settings: GatewaySettings
    endpoint: SharedEndpoint


class RecordedAgent(AgentLoop):
    """Runs an agent that speaks a chat API, and records what the model says to it.

    Options are the keys of `gateway`, by default those of the run's settings.
    """

    brings_images = True
    cannot_continue = "its program begins every conversation itself"
    printed = ""
    """The output of an agent that gave no answer, for the message."""

    def __init__(self, *args: Any, request_id: str, shared: Any = None, **options: Any) -> None:
        super().__init__(*args, request_id=request_id, shared=shared)
        self.settings: GatewaySettings = read_options(options) if shared is None else shared.settings

    @abstractmethod
    async def act(self, url: str, row: dict[str, Any]) -> Outcome:
        """Lets the agent work.

        Args:
            url: of its session; OpenAI's clients take it with `/v1`.
            row: the prompt row, as the agent may see it.

        Raises:
            AgentFailedError: it gave no result.
        """

    async def run(self, sampling: SamplingParams, **row: Any) -> list[Trajectory]:
        endpoint: Endpoint = await self.shared.endpoint.get()
        broken: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        recorder = Recorder(
            self,
            sampling,
            name=self.request_id,
            broken=broken,
            limits=SessionLimits(calls=self.settings.max_calls, bytes=self.settings.max_bytes),
            engine_wait=_ENGINE_WAIT_S,
        )
        if self.turns is not None:
            self.metrics.generate_s = self.turns.earlier.generate_s
        started = time.monotonic() - self.metrics.generate_s
        reader, images = self.resources.images, row.get("images")
        urls = [image.sent for image in await reader.read(images)] if reader is not None and images else []
        try:
            with endpoint.open(recorder) as url:
                outcome = await unless_broken(self.act(url, shown_row(row, urls)), broken)
            trajectories = finished(
                self,
                recorder,
                outcome,
                started,
                endpoint,
                prompt=row["raw_prompt"],
                train_side_calls=self.settings.train_side_calls,
            )
            if not trajectories:
                raise AgentFailedError(f"the agent ended without an answer of the model{self.printed}")
        except AgentFailedError as error:
            if recorder.refusal is None:
                raise
            text = f"{error}\nits last refused call: {recorder.refusal}"
            raise AgentFailedError(text) from recorder.refusal
        return trajectories


def finished(
    loop: AgentLoop,
    recorder: Recorder,
    outcome: Outcome,
    started: float,
    endpoint: Endpoint,
    *,
    prompt: Sequence[Message],
    train_side_calls: bool,
) -> list[Trajectory]:
    """The recorded trajectories of a rollout whose agent has ended, with the agent's outcome; perhaps none."""
    trajectories = recorder.trajectories(
        answer=outcome.answer, prompt=prompt, find_side_calls=not train_side_calls
    )
    if recorder.final_is_guess:
        endpoint.log_once("a final trajectory is a guess", _GUESS, level=logging.WARNING)
    for final in trajectories[-1:]:
        final.metrics.generate_s = loop.metrics.generate_s
        # The agent has all time but that in which it waited for answers.
        final.metrics.tool_s = max(0.0, time.monotonic() - started - loop.metrics.generate_s)
        final.reward, final.reward_extra = outcome.reward, outcome.reward_extra
        if outcome.answer is not None:
            final.extra["gateway"] = {**final.extra.get("gateway", {}), "answer": outcome.answer}
        final.extra = {**outcome.extra, **final.extra}
        if recorder.ran_out_of_room and final.finish_reason == "stop":
            final.finish_reason = "length"
        loop.final_answer = outcome.answer
        loop.reward_info["messages"] = final.messages
    return trajectories


def shared_endpoint(
    resources: AgentResources,
    settings: GatewaySettings,
    beside: Callable[[Endpoint], AbstractAsyncContextManager[Any]] = lambda _: nullcontext(),
) -> SharedEndpoint:
    """The endpoint of a worker's agents."""
    limit = resources.max_model_len or resources.engine.capabilities.max_model_len
    sampling, strict = settings.client_sampling, settings.strict
    return SharedEndpoint(lambda: Endpoint(MODEL, limit, client_sampling=sampling, strict=strict), beside)


def shown_row(row: Mapping[str, Any], image_urls: Sequence[str] = ()) -> dict[str, Any]:
    """A prompt row as an agent sees it: without what it is to find.

    `image_urls` stand in the messages in the place of its images, as an API takes them.
    """
    urls = iter(image_urls)

    def shown(part: Any) -> Any:
        if isinstance(part, dict) and part.get("type") == "image":
            return {"type": "image_url", "image_url": {"url": next(urls)}}
        return part

    prompt = [
        {**message, "content": [*map(shown, message["content"])]}
        if isinstance(message.get("content"), list)
        else message
        for message in row["raw_prompt"]
    ]
    left_out = ("raw_prompt", "prompt_key", "extra_info", "images", "tools_kwargs")
    columns = {key: value for key, value in row.items() if key not in left_out}
    extra_info = _without_answers(row.get("extra_info") or {})
    return {"prompt": prompt, **_without_answers(columns), "extra_info": extra_info}


def _without_answers(value: Any) -> Any:
    """Without the hidden parts, also within mappings, lists, and texts that are JSON of such."""
    if isinstance(value, Mapping):
        return {key: _without_answers(inner) for key, inner in value.items() if key not in _HIDDEN}
    if isinstance(value, list):
        return [*map(_without_answers, value)]
    if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        try:
            read = orjson.loads(value)
        except orjson.JSONDecodeError:
            return value
        shown = _without_answers(read)
        return value if shown == read else orjson.dumps(shown).decode()
    return value


def read_outcome(given: Any, what: str) -> Outcome:
    """Reads an outcome: `{"answer", "reward", "reward_extra", "extra"}`, all of them optional.

    Raises:
        AgentFailedError: it is not that; begins with `what`.
    """
    if not isinstance(given, dict):
        raise AgentFailedError(f"{what} is not an object, but {type(given).__name__}")
    given = {key: value for key, value in replace_in_value(given).items() if value is not None}
    if "reward" in given:
        reward, given["reward"] = given["reward"], math.nan
        with suppress(TypeError):
            given["reward"] = math.nan if isinstance(reward, str) else float(reward)
        if not math.isfinite(given["reward"]):
            raise AgentFailedError(f"{what}: the reward is no finite number: {reward!r:.100}")
    try:
        if not isinstance(given.get("answer", ""), str):
            given["answer"] = orjson.dumps(given["answer"]).decode()
        form = orjson.dumps(given, option=orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError as error:
        raise AgentFailedError(f"{what} cannot be kept as JSON: {error}") from error
    try:
        return msgspec.json.decode(form, type=Outcome)
    except msgspec.ValidationError as error:
        raise AgentFailedError(f"{what}: {error}") from error


@cache
def _defaults() -> dict[str, Any]:
    return asdict(to_settings(compose()).gateway)


def gateway_options(settings: Settings) -> dict[str, Any]:
    """The options that a run's settings give its recorded agents."""
    options = asdict(settings.gateway)
    if options["timeout"] is None:  # before the attempt ends, so that what the program wrote can be told
        options["timeout"] = 0.95 * settings.generation.attempt_timeout
    return {**options, "workdirs": f"{settings.trainer.default_local_dir}/workdirs"}


def merged_options(settings: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """An agent's own options laid over those of the settings."""
    limits = given.get("limits")
    if isinstance(limits, Mapping):
        given = {**given, "limits": {**settings["limits"], **limits}}
    return {**settings, **given}


def read_options(options: Mapping[str, Any]) -> GatewaySettings:
    """Raises `ConfigError` for options that there are not, or of the wrong type."""
    known = {one.name for one in fields(GatewaySettings)}
    given = {name: value for name, value in options.items() if name != "workdirs"}
    for name in given:
        if name not in known:
            raise unknown_name("option", name, known)
    problems: list[str] = []
    tree = merged_options(_defaults(), given)
    settings = read_value(GatewaySettings, msgspec.to_builtins(tree), "gateway", problems)
    if problems:
        raise ConfigError("; ".join(problems))
    assert isinstance(settings, GatewaySettings)
    return settings


def deciding(options: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The options of these names and those of every recorded agent, with their defaults."""
    settings = asdict(read_options(options))
    return {name: settings[name] for name in (*names, *_AGENTS_OWN)}
