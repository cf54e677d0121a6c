"""The common generator: an agent loop of rollstream against a server, its rollouts written to the buffer.

    from rollstream.buffer.generation import run_generation

    TASK_TYPE = "math"

    def run_rollout(data: dict) -> None:
        run_generation(data, reward=compute_score)

The way of a rollout:

    plan --> known to the buffer? --yes--> left out
              no --> its instance's epoch before is written --> worker --> item --> durable
"""

import asyncio
import difflib
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from rollstream.agent.base import AgentResources, TurnLimits
from rollstream.agent.prompt import PromptRenderer
from rollstream.agent.registry import AgentLoops
from rollstream.agent.tools.limits import ToolLimits
from rollstream.agent.tools.toolbox import ToolBox, load_toolbox
from rollstream.buffer.async_client import AsyncBufferClient, BufferClientError
from rollstream.buffer.generation_engine import find_engine
from rollstream.buffer.generation_failures import FailureWatch
from rollstream.buffer.generation_input import LABELS, InputFile, MakeRow
from rollstream.buffer.generation_items import FAILED_REWARD, completed_item, failed_item
from rollstream.buffer.generation_plan import EpochOrder, Plan, Work
from rollstream.buffer.generation_writer import FOR_EVER, ItemRefusedError, ItemWriter
from rollstream.buffer.generator_settings import GeneratorSettings
from rollstream.chat.tokenizer import load_tokenizer
from rollstream.engine.base import Engine
from rollstream.engine.interruptible import InterruptibleEngine
from rollstream.engine.registry import check_capabilities
from rollstream.errors import ConfigError, DataError
from rollstream.reward.base import ComputeScore, FunctionReward
from rollstream.reward.rules import RuleReward, find_rule
from rollstream.rollout.gate import EngineGate
from rollstream.rollout.retry import RetryPolicy
from rollstream.rollout.worker import RolloutWorker, make_failure
from rollstream.trajectory import PromptRow, Rollout

_LOG = logging.getLogger(__name__)

_RETRY_DELAY_S, _RETRY_DELAY_MAX_S = 0.5, 30.0
"""Between attempts at a rollout, as in generation.yaml."""

_ASKED_AT_ONCE = 1000
"""Uids that the buffer is asked for at once, about: of whole groups."""

_SAID_EVERY_S = 30.0

_LOOKED_AT = 100
"""Rows that are looked at for a label: one that has none is its own fault, a file's first hundred are not."""

_NO_LIMIT = 2**31 - 1
"""Tokens of a prompt, where the server does not say what fits: it refuses what does not."""


def run_generation(
    data: dict[str, Any],
    *,
    agent_loop: str = "single_turn_agent",
    reward: ComputeScore | None = None,
    needs_label: bool = False,
    make_row: MakeRow | None = None,
    loops: AgentLoops | None = None,
) -> None:
    """Generates all that a payload asks for and writes it to the buffer; returns when all is durable.

    Args:
        data: what `run_rollout` is called with; see docs/buffer.md for its parameters.
        agent_loop: for rows that name none, unless the payload does (`agent_name`).
        reward: `compute_score(data_source, solution_str, ground_truth, extra_info)`, as in verl, sync or
            async; gives a number, or a dict with `score`. None takes the rule for a row's `data_source`.
        needs_label: the reward compares with a row's label: an input file without any is refused at once,
            unless a rule knows its `data_source`.
        make_row: applied to each row of the input file.
        loops: further agent loops by name.

    Raises:
        ConfigError: a parameter is wrong, or the engine cannot give what is asked for. No restart helps.
        DataError: the input file cannot be used; or all rollouts fail, see `FailureWatch`. No restart helps.
        EngineLostError: the engine stayed away for `engine_timeout`.
    """
    settings = GeneratorSettings.read(data)
    generation = _Generation(
        settings, agent_loop, reward, make_row, loops or AgentLoops(), needs_label=needs_label
    )
    asyncio.run(generation.run())


@dataclass(slots=True)
class _Counts:
    written: int = 0
    known: int = 0


class _Generation:
    """One call of `run_generation`."""

    def __init__(
        self,
        settings: GeneratorSettings,
        agent_loop: str,
        reward: ComputeScore | None,
        make_row: MakeRow | None,
        loops: AgentLoops,
        *,
        needs_label: bool,
    ) -> None:
        self._settings = settings
        self._loop_name = settings.agent_name or agent_loop
        self._loops = loops
        self._loops.entry(self._loop_name)
        self._given_reward = reward
        self._reward: FunctionReward | RuleReward = RuleReward()
        if reward is not None:
            self._reward = FunctionReward(reward, label="the generator's reward", source_digest="")
        self._make_row = make_row
        self._order = EpochOrder()
        self._counts = _Counts()
        self._watch = FailureWatch()
        self._needs_label = needs_label
        self._ready: deque[Work] = deque()
        self._taking = asyncio.Lock()

    async def run(self) -> None:
        settings = self._settings
        self._input = await asyncio.to_thread(
            InputFile, settings.input_file, prompt_key=settings.prompt_key, make_row=self._make_row
        )
        plan = Plan(
            settings.rollout_id,
            self._input.instance_ids,
            settings.repeats,
            settings.epochs,
            Counter(settings.skip_instance_ids),
        )
        if settings.remember_uids is not None and len(plan) > settings.remember_uids:
            _LOG.warning(
                "%d rollouts, and the buffer remembers %d uids of items that have left it: after a crash, "
                "groups that it has forgotten are told by how many of their instance are complete. One "
                "that was handed out before it was whole may count twice; --remember-uids makes it exact",
                len(plan),
                settings.remember_uids,
            )
            # Not otherwise: uids tell exactly what is missing, counts do not.
            plan = replace(plan, finished=Counter(dict(settings.finished)))
        self._check_reward()
        tools = load_toolbox(
            tool_config_path=settings.tool_config_path,
            function_tool_path=settings.function_tool_path,
            limits=ToolLimits(),
        )
        found = await find_engine(settings)
        engine = InterruptibleEngine(found.engine)
        try:
            await engine.start()
            await tools.start()
            worker = await self._equip(engine, found.tokenizer_path, tools)
            async with AsyncBufferClient(settings.buffer_url, backoff=FOR_EVER) as client:
                writer = ItemWriter(client)
                await self._work_off(plan, worker, client, writer)
        finally:
            await engine.close()
            await tools.close()
            self._reward.close()

    async def _work_off(
        self, plan: Plan, worker: RolloutWorker, client: AsyncBufferClient, writer: ItemWriter
    ) -> None:
        _LOG.info("%d rollouts of %d instances", len(plan), len(plan.instance_ids))
        works = plan.work()
        slots = min(self._settings.in_flight, max(1, len(plan)))
        try:
            async with asyncio.TaskGroup() as companions:
                writing = companions.create_task(writer.run())
                saying = companions.create_task(self._say(len(plan)))
                async with asyncio.TaskGroup() as group:
                    for _ in range(slots):
                        group.create_task(self._slot(plan, works, worker, client, writer))
                writing.cancel()
                saying.cancel()
        except BaseExceptionGroup as errors:
            first = _first(errors)
            raise first from first.__cause__
        counts = self._counts
        _LOG.info(
            "done: %d written, %d of them failed; %d were there already",
            *(counts.written, self._watch.failed, counts.known),
        )
        if counts.known == 0:
            self._watch.check_end()

    async def _slot(
        self,
        plan: Plan,
        works: Iterator[Work],
        worker: RolloutWorker,
        client: AsyncBufferClient,
        writer: ItemWriter,
    ) -> None:
        while (work := await self._next(plan, works, client)) is not None:
            try:
                await self._one(work, worker, writer)
            finally:
                self._order.leave(work)

    async def _next(self, plan: Plan, works: Iterator[Work], client: AsyncBufferClient) -> Work | None:
        """The next work that the buffer does not have; entered in the epochs' order."""
        async with self._taking:
            while not self._ready:
                groups = max(1, _ASKED_AT_ONCE // plan.repeats)
                asked = list(itertools.islice(works, groups * plan.repeats))
                if not asked:
                    return None
                try:
                    known = await client.known([work.uid for work in asked])
                except BufferClientError as error:
                    raise ConfigError(f"remote_buffer_url: {error}") from error
                missing = plan.missing(asked, known)
                self._counts.known += len(asked) - len(missing)
                self._ready += missing
            work = self._ready.popleft()
            # Within the lock: what comes before this in the plan has entered.
            await self._order.enter(work)
            return work

    async def _one(self, work: Work, worker: RolloutWorker, writer: ItemWriter) -> None:
        settings = self._settings
        # A number of its own for each epoch's repeats: seeds and request ids are made of it.
        repeat = work.epoch * settings.repeats + work.repeat
        row: PromptRow | None = None
        try:
            row = await asyncio.to_thread(self._input.row, work.row)
        except Exception as error:  # a bad row, or `make_row` on it: its own fault only
            result: Any = make_failure(work.row, repeat, "", 1, "prompt", error)
        else:
            result = await worker.run(row, repeat)
        if isinstance(result, Rollout):
            assert row is not None
            item = completed_item(work, result, row, task_type=settings.task_type)
            try:
                await writer.write(item)
            except ItemRefusedError as error:
                failure = make_failure(work.row, repeat, "", result.attempts, "store", error)
                item = failed_item(work, failure, None, task_type=settings.task_type)
                await writer.write(item)
        else:
            item = failed_item(work, result, row, task_type=settings.task_type)
            try:
                await writer.write(item)
            except ItemRefusedError:  # what the row itself holds cannot be stored
                await writer.write(failed_item(work, result, None, task_type=settings.task_type))
        self._counts.written += 1
        failed = item["reward"] == FAILED_REWARD and "failure" in item["extra_info"]
        self._watch.add(work.instance_id, item["extra_info"]["failure"] if failed else None)

    async def _say(self, total: int) -> None:
        began = time.monotonic()
        while True:
            await asyncio.sleep(_SAID_EVERY_S)
            counts = self._counts
            rate = counts.written / (time.monotonic() - began)
            _LOG.info(
                "%d of %d rollouts, %d failed, %.1f/s",
                *(counts.known + counts.written, total, self._watch.failed, rate),
            )

    def _check_reward(self) -> None:
        """Refuses an input file that cannot be scored: all of it would be filtered out (R8)."""
        if self._needs_label:
            self._check_labels()
        if self._given_reward is not None:
            return
        row = self._input.row(0)
        if find_rule(row.data_source) is None:
            raise ConfigError(
                f"no reward rule knows data_source {row.data_source!r} of the input file's first row: give "
                "rows one that does (docs/rewards.md), or run_generation a reward"
            )

    def _check_labels(self) -> None:
        columns: list[str] = []
        for index in range(min(_LOOKED_AT, len(self._input))):
            try:
                row = self._input.row(index)
            except Exception:  # a bad row, or `make_row` on it: its own rollouts fail
                continue
            if row.ground_truth is not None or find_rule(row.data_source) is not None:
                return
            columns = columns or [name for name in row.columns if name != "instance_id"]
        near = [name for name in columns if difflib.get_close_matches(name.lower(), LABELS, n=1)]
        there = f"; did you mean {near[0]!r} by one of them?" if near else ""
        others = f" (other columns: {', '.join(columns)[:300]})" if columns else ""
        raise DataError(
            f"{self._settings.input_file}: no row has a label to score answers with; name the column "
            f"{', '.join(LABELS[:-1])} or {LABELS[-1]}{others}{there}"
        )

    async def _equip(self, engine: Engine, served_tokenizer: str | None, tools: ToolBox) -> RolloutWorker:
        settings = self._settings
        path = settings.tokenizer_path or served_tokenizer
        if path is None:
            raise ConfigError("tokenizer_path is missing: the folder or hub name of the model's tokenizer")
        tokenizer = await asyncio.to_thread(load_tokenizer, path)
        capabilities = engine.capabilities
        limit = capabilities.max_model_len
        response_length = settings.sampling.max_tokens
        resources = AgentResources(
            engine=engine,
            tokenizer=tokenizer,
            prompts=PromptRenderer(
                tokenizer,
                prompt_length=settings.max_prompt_length or (_NO_LIMIT if limit is None else limit - 1),
                truncation="error",
            ),
            response_length=response_length,
            max_model_len=limit,
            tools=tools,
            turns=TurnLimits(settings.max_assistant_turns, settings.max_user_turns),
            parser_name=settings.tool_format,
        )
        has_logprobs = capabilities.logprobs != "none"
        wanted = settings.wants_logprobs
        sampling = replace(settings.sampling, logprobs=has_logprobs if wanted is None else wanted)
        stops = sampling.stop_token_ids
        if tools.schemas and resources.token_exact:
            stops = (*stops, *resources.parser_stop_ids)  # which the loop adds
        check_capabilities(
            capabilities,
            replace(sampling, stop_token_ids=stops),
            prompt_length=settings.max_prompt_length or 1,
            response_length=response_length if limit is None else min(response_length, limit - 1),
            max_model_len=None,
        )
        self._loops.check([self._loop_name], resources)
        entry = self._loops.entry(self._loop_name)
        if entry.loop.needs_tools and not tools.schemas:
            raise ConfigError(
                f"agent loop {self._loop_name!r} has no tools: give tool_config_path or function_tool_path"
            )
        unseen = [schema for schema in tools.schemas if not resources.template.shows_tool(schema)]
        if unseen:
            name = unseen[0]["function"]["name"]
            raise ConfigError(f"the chat template at {path!r} does not tell the model of tool {name!r}")
        if self._given_reward is None and isinstance(self._reward, RuleReward):
            await self._reward.prepare(self._input.row(0).data_source)
        return RolloutWorker(
            resources,
            sampling=sampling,
            seed=settings.sampling.seed,
            default_agent_loop=self._loop_name,
            retry=RetryPolicy(settings.max_attempts, _RETRY_DELAY_S, _RETRY_DELAY_MAX_S),
            attempt_timeout=settings.attempt_timeout,
            gate=EngineGate(engine, timeout=settings.engine_timeout),
            reward=self._reward,
            loops=self._loops,
            refusal_patience=settings.engine_timeout,
        )


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    for error in errors.exceptions:
        return _first(error) if isinstance(error, BaseExceptionGroup) else error
    return errors
