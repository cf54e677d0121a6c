"""The built-in generator: a generation run whose sink is the rollout buffer.

    payload -> settings -> plan, without what the buffer has -> Executor -> item -> durable

A rollout's uid is a pure function of job, instance, epoch and repeat. So a generator that is started again
asks the buffer which uids it has, and generates the others. Epochs follow one another: the buffer makes groups of
items in the order of their arrival, so those of two epochs would be mixed.
"""

import asyncio
import contextlib
import functools
import hashlib
import itertools
import logging
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
from omegaconf import OmegaConf

from rollstream.buffer.client import AsyncBufferClient, BufferClientError
from rollstream.buffer.items import InstanceId, ItemError
from rollstream.buffer.rollouts import failure_of, rollout_item
from rollstream.config.load import compose, to_settings
from rollstream.config.settings import Settings
from rollstream.data.prompts import load_prompts
from rollstream.engine.detect import detect_server
from rollstream.errors import ConfigError, DataError
from rollstream.integrations.slime.payload_rules import PayloadRules
from rollstream.reward.base import ComputeScore, FunctionReward
from rollstream.reward.rules import find_rule
from rollstream.rollout.executor import Executor, FailureStreak
from rollstream.rollout.setup import build_setup, in_flight_limit, load_agents
from rollstream.rollout.worker_host import LocalBackend
from rollstream.store.records import EncodingError
from rollstream.trajectory import Failure, PromptRow, Rollout, RolloutKey

_LOG = logging.getLogger(__name__)

MakeRow = Callable[[PromptRow], PromptRow]
"""Changes a row of the input file: other messages, a data source, a ground truth. It has to be quick."""

_ROLLOUT = "actor_rollout_ref.rollout"
_PARAMETERS = {
    "num_repeat_per_sample": f"{_ROLLOUT}.n",
    "num_process": "generation.max_in_flight",
    "max_prompt_length": "data.max_prompt_length",
    "agent_name": f"{_ROLLOUT}.agent.default_agent_loop",
    "tool_format": f"{_ROLLOUT}.multi_turn.format",
    "tokenizer_path": "actor_rollout_ref.model.tokenizer_path",
    "prompt_key": "data.prompt_key",
    **{key: f"{_ROLLOUT}.multi_turn.{key}" for key in ("max_assistant_turns", "max_user_turns")},
    **{key: f"generation.{key}" for key in ("max_attempts", "attempt_timeout", "engine_timeout")},
}
"""Parameters of a payload, and where the configuration has them."""

_SAMPLING = {
    "max_tokens": f"{_ROLLOUT}.response_length",
    "logprobs": f"{_ROLLOUT}.calculate_log_probs",
    "seed": "generation.seed",
    **{
        key: f"{_ROLLOUT}.{key}"
        for key in ("temperature", "top_p", "top_k", "stop", "stop_token_ids", "ignore_eos")
    },
}
"""Likewise of `sampling_params`; further ones go to the engine as they are."""

_TEXTS = ("agent_name", "tool_format", "tokenizer_path", "prompt_key")
_NO_LIMIT = 2**31 - 1  # of a prompt's tokens: what does not fit the server leaves no room for a response
_NOT_THE_ITEM = (401, 403, 404, 405)  # statuses that say nothing about an item
_ALL_FAIL = 64
"""So many failed in one way before one success: no chance, where even a tenth works."""


def run_generation(
    data: dict[str, Any],
    *,
    agent_loop: str = "single_turn_agent",
    reward: ComputeScore | None = None,
    make_row: MakeRow | None = None,
) -> None:
    """Generates all that a payload asks for and writes it to the buffer; returns when all is durable.

    Keys of the payload; numbers may be texts, as slime's trainer sends them:

    - `task_type`, `remote_engine_url`: which generator; an inference server, or a list of servers of one model
    - `input_file`: prompts, in any format of docs/data.md. A row has a `prompt`, a `label` (or another of
      `data.row.TRUTH_COLUMNS`), an `instance_id` (its number by default), and what else a prompt row may have
    - `num_repeat_per_sample`: rollouts of a prompt in an epoch, the size of a group (default: the server's)
    - `num_epoch`: groups of each prompt, one after the other (1); `num_process`: rollouts at once (100)
    - `sampling_params`: `max_tokens` (needed), `temperature`, `top_p`, `top_k`, `stop`, `stop_token_ids`,
      `ignore_eos`, `seed`, `logprobs`, and numbers that the engine takes (`min_p`, …)
    - `skip_instance_ids`: each time an id stands here, one of its epochs is left out
    - `tokenizer_path`: a folder below `--inputs`, or a hub name (default: what the server says; `openai` needs none)
    - `engine`, `model`: `sglang`, `vllm` or `openai`; the model's name (default: what the server answers to)
    - `agent_name`, `prompt_key`, `max_prompt_length`, `max_attempts`, `attempt_timeout`, `engine_timeout`,
      `max_assistant_turns`, `max_user_turns`, `tool_format`: as in a run
    - `tools`: names of tools in the operator's `--tools FILE`
    - `group_size`, `min_valid_group_size_ratio`, `min_valid_item_size_ratio`, `group_timeout_seconds`,
      `min_timeout_group_size_ratio`, `raw`: of this job's groups (default: the server's)

    Args:
        data: what `run_rollout` is called with: the job's payload.
        agent_loop: for rows that name none, unless the payload does (`agent_name`).
        reward: `compute_score(data_source, solution_str, ground_truth, extra_info)`, as in verl, sync or
            async; gives a number, or a dict with `score`. None takes the rule for a row's `data_source`.
        make_row: applied to each row of the input file.

    Raises:
        ConfigError: a parameter is wrong, or the engine cannot give what is asked for. No restart helps.
        DataError: the input file cannot be used, or all rollouts fail. No restart helps.
        EngineLostError: the engine stayed away for `engine_timeout`.
    """
    data = {"agent_name": agent_loop, **{key: value for key, value in data.items() if value is not None}}
    scorer = reward and FunctionReward(reward, label="the generator's reward", source_digest="")
    asyncio.run(_generate(data, scorer, make_row))


async def _generate(
    data: dict[str, Any],
    reward: FunctionReward | None,
    make_row: MakeRow | None,
) -> None:
    settings = read_settings(data)
    rows = await asyncio.to_thread(Rows, settings, make_row)
    plan = JobPlan.read(data, rows.instance_ids, settings.actor_rollout_ref.rollout.n)
    source = rows.row(0).data_source
    if reward is None and find_rule(source) is None:
        raise ConfigError(f"no reward rule knows data_source {source!r} of the first row (docs/rewards.md)")
    settings = read_settings(data, await _find_engine(data, settings.generation.engine_timeout))
    agents = await load_agents(settings, tools=data.get("tools"))
    loop = settings.actor_rollout_ref.rollout.agent.default_agent_loop
    async with contextlib.AsyncExitStack() as stack:
        setup = await build_setup(settings, agents, shows_images=rows.has_images, reward=reward)
        agents.check({loop}, setup.tokenizer, show_tools=True, images=rows.has_images)
        stack.push_async_callback(setup.close)
        engine = setup.create_engine(Path())
        stack.push_async_callback(engine.close)
        await asyncio.gather(engine.start(), setup.prepare_reward([source]))
        if engine.capabilities.logprobs == "none" and "logprobs" not in _sampling(data):
            setup.sampling = replace(setup.sampling, logprobs=False)
        setup.check_engine(engine, longest="max_prompt_length" in data)
        url = _text(data, "remote_buffer_url")
        # It never gives up: the buffer ends its generators with itself.
        client = await stack.enter_async_context(AsyncBufferClient(url, give_up_after=math.inf))
        keys = list(plan.keys())
        try:
            known = await client.known([plan.uid(key.index, key.repeat) for key in keys])
        except BufferClientError as error:
            raise ConfigError(f"remote_buffer_url: {error}") from error
        _LOG.info("%d rollouts of %d rows, %d are there", len(known), len(rows.instance_ids), sum(known))
        with contextlib.suppress(BufferClientError):  # no such job: a generator that was started by hand
            await client.expect_items(plan.job, len(known))
        sink = JobSink(client, plan, rows, _text(data, "task_type"), known=sum(known))
        executor = Executor(
            sink,
            LocalBackend(setup.make_worker(engine, [loop])),
            load_row=lambda key: rows.row(key.index),
            max_in_flight=in_flight_limit(settings),
            adaptive=True,
            engine=engine,
        )
        stack.push_async_callback(executor.close)
        owed = (key for key, is_known in zip(keys, known, strict=True) if not is_known)
        for _, epoch in itertools.groupby(owed, lambda key: key.repeat // plan.repeats):
            await executor.run(epoch)
        sink.check_end()


def read_settings(data: Mapping[str, Any], engine: Mapping[str, Any] | None = None) -> Settings:
    """The settings of a payload, and of its engine. Pure, and nothing in a payload is interpolated."""
    data, sampling = {"num_process": 100, "max_prompt_length": _NO_LIMIT, **data}, _sampling(data)
    values: dict[str, Any] = {"data.train_files": [_text(data, "input_file")]}
    for given, places in ((data, _PARAMETERS), (sampling, _SAMPLING)):
        for key in given.keys() & places.keys():
            values[places[key]] = given[key] if key in _TEXTS else _number(given[key])
    values[f"{_ROLLOUT}.extra_sampling"] = {
        key: _number(sampling[key]) for key in sampling.keys() - _SAMPLING.keys()
    }
    values[f"{_ROLLOUT}.prompt_length"] = values["data.max_prompt_length"]
    if data.get("tools"):  # names; the file is the operator's
        values[f"{_ROLLOUT}.multi_turn.tool_config_path"] = data.get("rollstream", {}).get("tools_file")
    tree: Any = OmegaConf.to_container(compose(), resolve=True)
    for place, value in {**values, **(engine or {})}.items():
        *parents, last = place.split(".")
        functools.reduce(operator.getitem, parents, tree)[last] = value
    return to_settings(tree)


def _sampling(data: Mapping[str, Any]) -> dict[str, Any]:
    given = data.get("sampling_params", {})
    if not isinstance(given, Mapping):
        raise ConfigError(f"sampling_params: {given!r:.100}, want a mapping")
    sampling = {key: value for key, value in given.items() if value is not None}
    if "max_new_tokens" in sampling:  # SGLang's name of it
        if "max_tokens" in sampling:
            raise ConfigError("sampling_params has both max_tokens and max_new_tokens: leave one of them out")
        sampling["max_tokens"] = sampling.pop("max_new_tokens")
    if sampling.setdefault("max_tokens", data.get("max_tokens")) is None:
        raise ConfigError("sampling_params.max_tokens is missing: tokens of a response, at most")
    if isinstance(sampling.get("stop"), str):
        sampling["stop"] = [sampling["stop"]]
    if _number(sampling.get("top_k")) == 0:
        sampling["top_k"] = -1
    return sampling


def _number(value: Any) -> Any:
    """The number that a text is: slime's trainer sends texts."""
    for kind in (int, float) if isinstance(value, str) else ():
        with contextlib.suppress(ValueError):
            return kind(value)
    return value


def _text(data: Mapping[str, Any], key: str) -> str:
    if not isinstance(value := data.get(key), str) or not value:
        raise ConfigError(f"{key}: {value!r:.100}, want a text")
    return value


async def _find_engine(data: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    """The settings of the engine that a payload names."""
    given = data.get("remote_engine_url")
    urls = [given] if isinstance(given, str) else given
    if not isinstance(urls, list) or not urls or not all(str(url).startswith("http") for url in urls):
        raise ConfigError(f"remote_engine_url: {given!r:.200}, want http://host:port, or a list of such URLs")
    server = await detect_server(urls, timeout=timeout, kind=data.get("engine"))
    _LOG.info("%s is a server of kind %s", server.url, server.kind)
    models = [name for name in server.models if data.get("model") in (None, name, Path(name).name)]
    if server.kind == "openai" and not server.models:
        models = [_text(data, "model")]  # an endpoint need not list its models
    if (server.models and not models) or (server.kind == "openai" and len(models) > 1):
        raise ConfigError(f"model: {server.url} serves {', '.join(server.models)[:500]}: name one of them")
    tokenizer = None if server.kind == "openai" else data.get("tokenizer_path", server.tokenizer)
    if tokenizer is None and server.kind != "openai":
        raise ConfigError("tokenizer_path is missing: the folder or hub name of the model's tokenizer")
    if tokenizer and "tokenizer_path" not in data and (folders := data.get("rollstream", {}).get("folders")):
        rules = PayloadRules([*map(Path, folders["inputs"])], forbidden=Path(folders["forbidden"]))
        if rules.tokenizer(tokenizer) is None:
            raise ConfigError(
                f"tokenizer_path: the engine names {tokenizer!r:.200}, which is not below the buffer's --inputs, "
                "and the engine is not one of its --engines"
            )
    return {
        f"{_ROLLOUT}.name": server.kind,
        f"{_ROLLOUT}.server_urls": server.urls,
        f"{_ROLLOUT}.engine_kwargs": {"check_model": "model" in data},
        "actor_rollout_ref.model.path": (*models, tokenizer)[0],
        "actor_rollout_ref.model.tokenizer_path": tokenizer,
    }


class Rows:
    """The prompt rows of the input file, by position.

    Raises:
        DataError: the file cannot be read, or two rows have one instance id.
    """

    def __init__(self, settings: Settings, make_row: MakeRow | None) -> None:
        self._dataset, self._make_row = load_prompts(settings.data), make_row
        self.has_images = False
        first: dict[InstanceId, int] = {}
        for index in range(len(self._dataset)):
            instance_id: Any = index
            with contextlib.suppress(DataError):  # the rollouts of such a row fail, each with this error
                row = self._dataset.row(index)
                instance_id = row.columns.get("instance_id", index)
                self.has_images |= bool(self._made(row).images)
            if type(instance_id) not in (int, str) or instance_id == "":
                where = self._dataset.location(index)
                raise DataError(
                    f"{where}: instance_id is {instance_id!r:.100}, want a whole number or a text"
                )
            if (other := first.setdefault(instance_id, index)) != index:
                raise DataError(f"instance_id {instance_id!r} is that of rows {other} and {index}")
        self.instance_ids: list[InstanceId] = list(first)

    def row(self, index: int) -> PromptRow:
        return self._made(self._dataset.row(index))

    def _made(self, row: PromptRow) -> PromptRow:
        try:
            return row if self._make_row is None else self._make_row(row)
        except Exception as error:
            where = self._dataset.location(row.index)
            raise DataError(f"{where}: {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class JobPlan:
    """Every repeat of every instance in every epoch, but for those that are skipped."""

    job: str
    instance_ids: Sequence[InstanceId]
    repeats: int
    epochs: int
    skips: Counter[InstanceId]
    """How many epochs of an instance were done before the job."""

    @classmethod
    def read(cls, data: Mapping[str, Any], instance_ids: Sequence[InstanceId], repeats: int) -> "JobPlan":
        epochs, own = _number(data.get("num_epoch", 1)), data.get("rollstream", {})
        if type(epochs) is not int or epochs < 1:
            raise ConfigError(f"num_epoch: {epochs!r:.100}, want a whole number from 1 on")
        skips = own.get("skip_instance_ids", data.get("skip_instance_ids")) or ()
        return cls(str(own.get("job", "job")), instance_ids, repeats, epochs, Counter(skips))

    def keys(self) -> Iterator[RolloutKey]:
        """The keys by epoch, then by row, then by repeat, which counts through the epochs."""
        for epoch in range(self.epochs):
            for row, instance_id in enumerate(self.instance_ids):
                if epoch >= self.skips[instance_id]:
                    for repeat in range(self.repeats):
                        yield RolloutKey(row, epoch * self.repeats + repeat)

    def uid(self, index: int, repeat: int) -> str:
        """JOB:"ID":EPOCH:REPEAT. A long id stands there by its digest, as uids have a limit."""
        name = orjson.dumps(self.instance_ids[index])
        text = name.decode() if len(name) <= 200 else hashlib.blake2b(name, digest_size=16).hexdigest()
        epoch, repeat = divmod(repeat, self.repeats)
        return f"{self.job}:{text}:{epoch}:{repeat}"


class JobSink:
    """Writes results to the buffer. No reader sees a failed one: if all fail, it ends the job with the cause."""

    def __init__(
        self, client: AsyncBufferClient, plan: JobPlan, rows: Rows, task_type: str, *, known: int
    ) -> None:
        self._client, self._plan, self._rows, self._task_type = client, plan, rows, task_type
        self._written = self._failed = 0
        self._first = ""
        """The first failure."""
        self._streak = FailureStreak(0 if known else _ALL_FAIL, len(plan.instance_ids))
        self._known = known

    async def submit(self, result: Rollout | Failure, /) -> None:
        """Returns when the result is durable. Raises `DataError` when that all failed so far tells enough."""
        row = None
        if not isinstance(result, Failure) or result.stage != "store":  # then the row may be what is refused
            with contextlib.suppress(DataError):
                row = self._rows.row(result.index)
        epoch, repeat = divmod(result.repeat, self._plan.repeats)
        item = rollout_item(
            result,
            row,
            uid=self._plan.uid(result.index, result.repeat),
            instance_id=self._plan.instance_ids[result.index],
            info={"epoch": epoch, "rollout_index": repeat},
        )
        try:
            await self._client.write({**item, "task_type": self._task_type, "job": self._plan.job})
        except (BufferClientError, ItemError) as error:
            if isinstance(error, BufferClientError) and error.status in _NOT_THE_ITEM:
                raise ConfigError(f"remote_buffer_url: {error}") from error
            raise EncodingError(f"the buffer does not take it: {error}") from error
        self._written += 1
        if (failure := failure_of(result)) is None:
            self._streak.completed()
            return
        self._failed += 1
        cause, stage = str(failure["error"]).strip(), failure["stage"]
        name, line = self._plan.instance_ids[result.index], cause.partition("\n")[0]
        self._first = self._first or f"instance {name!r:.100}, stage {stage}: {line:.500}"
        if self._streak.failed(Failure(result.index, result.repeat, "", 1, stage, cause, "", 0.0)):
            raise DataError(f"the first {self._failed} rollouts failed; the first one: {self._first}")

    def check_end(self) -> None:
        """Raises `DataError` when all failed."""
        _LOG.info("done: %d are written, %d of them failed", self._written, self._failed)
        if self._failed == self._written > 0 and not self._known:
            raise DataError(f"all {self._failed} rollouts failed; the first one: {self._first}")
