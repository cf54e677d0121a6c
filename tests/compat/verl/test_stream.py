"""verl's client and manager as rollstream extends them, over fakes of Ray's actors, without a cluster."""

import asyncio
import copy
from collections.abc import Callable, Sequence
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

import ray
from verl.workers.rollout.llm_server import GlobalRequestLoadBalancer, LLMServerClient

from rollstream.agent.base import turn_seed
from rollstream.errors import ConfigError, DataError, EngineLostError, EngineUnavailableError
from rollstream.integrations.verl import stream
from rollstream.integrations.verl.recipe import ClientEngine, verl_servers
from rollstream.integrations.verl.stream import (
    GenerationLoopManager,
    StreamingLLMServerClient,
    StreamingLLMServerManager,
)
from rollstream.integrations.verl.worker import SampleCalls, noting
from rollstream.rollout import workers as workers_executor
from rollstream.rollout.worker_host import WorkerReport
from rollstream.store.records import EncodedRollout, RecordCodec
from rollstream.trajectory import Failure, Rollout, Trajectory


class Method:
    """A method of an actor."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def remote(self, *args: Any, **kwargs: Any) -> "asyncio.Future[Any]":
        return asyncio.ensure_future(self._function(*args, **kwargs))


class Server:
    """An actor that answers after `delays` seconds, one after the other."""

    def __init__(self, *delays: float) -> None:
        self.asked: list[dict[str, Any]] = []
        self._delays = delays
        self.generate = Method(self._generate)

    async def _generate(self, **request: Any) -> Any:
        number = len(self.asked)
        self.asked.append(copy.deepcopy(request))
        await asyncio.sleep(self._delays[number])
        return SimpleNamespace(token_ids=[number], extra_fields={}, stop_reason="completed")


class EngineDeadError(Exception):
    """vLLM's, which has this name and no further base."""


class AsyncEngineDeadError(RuntimeError):
    """That of older ones."""


def task_error(cause: Exception) -> Exception:
    return ray.exceptions.RayTaskError("generate", "Traceback", cause)


class DeadServer(Server):
    """One that answers nothing but an error, and that at once."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    async def _generate(self, **request: Any) -> Any:
        self.asked.append(request)
        raise self._error


def choosing_client(servers: dict[str, Any], name: str = "vllm") -> StreamingLLMServerClient:
    """One that chooses its servers itself."""
    rollout = SimpleNamespace(
        name=name, full_determinism=False, prompt_length=8, response_length=4, max_model_len=None
    )
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
    return StreamingLLMServerClient(config, servers=servers)


def balanced_client(servers: dict[str, Any], name: str = "vllm") -> StreamingLLMServerClient:
    """With verl's own load balancer, in this process."""
    balancer = GlobalRequestLoadBalancer(servers)

    def method(function: Callable[..., Any]) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except RuntimeError as error:
                raise task_error(error) from error

        return Method(call)

    handle = SimpleNamespace(
        **{
            name: method(getattr(balancer, name))
            for name in (
                *("acquire_server", "release_server", "remove_servers", "get_all_servers"),
                *("require_acquire_fields", "require_release_fields"),
            )
        }
    )
    return StreamingLLMServerClient(choosing_client({}, name).config, handle)


CLIENTS = pytest.mark.parametrize("make", [choosing_client, balanced_client])


async def ask(client: StreamingLLMServerClient, prompt: Sequence[int] = (1,)) -> Any:
    return await client.generate("r", prompt_ids=list(prompt), sampling_params={"temperature": 1.0})


async def test_generations_side_by_side_have_seeds_of_their_own() -> None:
    """Best of four within one loop: four answers, not the same one four times."""
    server = Server(0.2, 0.1, 0.15, 0.0)
    client = choosing_client({"only": server})
    calls = SampleCalls(seed=11)
    with noting(calls):
        await asyncio.gather(*(ask(client, range(1, 2 + i)) for i in range(4)))
    seeds = {len(one["prompt_ids"]): one["sampling_params"]["seed"] for one in server.asked}
    assert seeds == {i + 1: turn_seed(11, i) for i in range(4)}
    assert [one.prompt_tokens for one in calls.calls] == [1, 2, 3, 4]


class Talker(Server):
    """Gives that many tokens, and says of their end what one of verl's servers says."""

    def __init__(self, tokens: int, said: str | None, fields: dict[str, Any] | None = None) -> None:
        super().__init__()
        self._output = SimpleNamespace(
            token_ids=[1] * tokens, stop_reason=said, extra_fields=dict(fields or {})
        )

    async def _generate(self, **request: Any) -> Any:
        return self._output


@pytest.mark.parametrize(
    ("tokens", "prompt", "limits", "reason"),
    [
        (3, 2, {}, "stop"),
        (4, 2, {}, "length"),  # the response
        (3, 2, {"sampling": {"max_tokens": 3}}, "length"),
        (4, 2, {"sampling": {"max_tokens": 9}}, "stop"),
        (3, 2, {"model": 5}, "length"),  # the model's
    ],
)
@pytest.mark.parametrize("said", ["completed", None])  # vLLM's servers, TensorRT-LLM's
async def test_what_ends_at_its_limit_is_cut_off(
    tokens: int, prompt: int, limits: dict[str, Any], reason: str, said: str | None
) -> None:
    """verl's servers tell no difference, and a filter on truncation has to."""
    client = choosing_client({"only": Talker(tokens, said)})
    client.config.actor_rollout_ref.rollout.max_model_len = limits.get("model")
    calls = SampleCalls()
    with noting(calls):
        await client.generate("r", prompt_ids=[1] * prompt, sampling_params=limits.get("sampling", {}))
    if said is None and "sampling" in limits:  # a request's own limit is nothing to it
        reason = "length" if tokens == 4 else "stop"
    assert calls.calls[-1].finish_reason == reason


async def test_what_a_server_says_of_the_end_holds() -> None:
    for said, fields, reason in (
        ("stop", {}, "stop"),  # SGLang's servers
        ("aborted", {}, "aborted"),
        ("completed", {"finish_reason": "stop"}, "stop"),  # rollstream's
    ):
        calls = SampleCalls()
        with noting(calls):
            await ask(choosing_client({"only": Talker(4, said, fields)}), [1, 2])
        assert calls.calls[-1].finish_reason == reason


async def test_who_is_cut_off_ends_the_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a server goes on with what nobody waits for, beside the attempt that follows."""
    cancelled: list[Any] = []
    monkeypatch.setattr(ray, "cancel", cancelled.append)
    server = Server(0.0, 30.0)
    client = choosing_client({"only": server})
    await ask(client)
    assert not cancelled
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await ask(client)
    assert len(server.asked) == 2 and len(cancelled) == 1


async def test_a_balancer_that_is_gone_is_an_engine_that_is_not_there() -> None:
    async def gone(**_: Any) -> Any:
        raise ray.exceptions.ActorUnavailableError("restarting", None)

    client = balanced_client({})
    client.balancer.acquire_server = Method(gone)
    with pytest.raises(EngineUnavailableError, match="verl's load balancer is gone"):
        await ask(client)


async def test_a_conversation_stays_with_its_server_and_others_go_to_the_least_busy() -> None:
    servers = {name: Server(*[0.0] * 20) for name in "ab"}
    client = choosing_client(servers)
    for turn in range(6):
        await client.generate("one", prompt_ids=[1], sampling_params={"turn": turn})
    assert sorted(len(server.asked) for server in servers.values()) == [0, 6]
    for server in servers.values():
        server.asked.clear()
    asked = [client.generate(f"r{i}", prompt_ids=[1], sampling_params={}) for i in range(10)]
    await asyncio.gather(*asked)
    assert [len(server.asked) for server in servers.values()] == [5, 5]


@pytest.mark.parametrize(
    "error",
    [ray.exceptions.ActorDiedError(), task_error(EngineDeadError()), task_error(AsyncEngineDeadError())],
)
@CLIENTS
async def test_a_server_of_verls_that_has_ended_is_asked_no_more(make: Any, error: Exception) -> None:
    """It has nothing in flight, so the balancer would give it nearly every request."""
    dead = DeadServer(error)
    client = make({"dead": dead, **{f"good {i}": Server(*[0.0] * 200) for i in range(3)}})
    refused = 0
    for i in range(200):  # the balancers choose at random among those that are as busy
        try:
            await client.generate(f"r{i}", prompt_ids=[1], sampling_params={})
        except EngineUnavailableError as gone:  # charged to no rollout
            assert "dead" in str(gone)
            refused += 1
    assert (refused, len(dead.asked)) == (1, 1)


@CLIENTS
async def test_when_the_last_server_has_ended_the_run_does(make: Any) -> None:
    """Not each of its rollouts (R5): what is left goes on with the same command."""
    client = make({"a": DeadServer(ray.exceptions.ActorDiedError())})
    servers = ClientEngine(client, verl_servers("vllm"))
    assert await servers.health()
    for _ in range(2):
        with pytest.raises(EngineUnavailableError):
            await ask(client)
    with pytest.raises(EngineLostError, match=r"servers.*ended.*run the same command again"):
        await servers.health()


@pytest.mark.parametrize(
    ("name", "error", "raised"),
    [
        # Ray starts rollstream's proxies anew.
        ("rollstream", ray.exceptions.ActorDiedError(), EngineUnavailableError),
        # The connection to it broke: it may be there.
        ("vllm", ray.exceptions.ActorUnavailableError("away", None), EngineUnavailableError),
        # A request that its server refuses is no news of the server.
        ("vllm", task_error(ValueError("too long")), ray.exceptions.RayTaskError),
        ("rollstream", task_error(DataError("bad")), DataError),
    ],
)
async def test_a_server_that_may_serve_stays(name: str, error: Exception, raised: type[Exception]) -> None:
    client = choosing_client({"a": DeadServer(error)}, name)
    for _ in range(2):
        with pytest.raises(raised):
            await ask(client)
    assert list(client.servers or ()) == ["a"]


def test_a_client_that_needs_a_balancer_is_told_where_there_is_none() -> None:
    manager = object.__new__(StreamingLLMServerManager)
    manager.config, manager.global_load_balancer = choosing_client({}).config, None
    manager.server_addresses, manager.server_handles = ["http://x"], ["actor"]
    client = manager.get_client()
    assert isinstance(client, StreamingLLMServerClient) and client.servers == {"http://x": "actor"}
    with pytest.raises(ConfigError, match="derive it from StreamingLLMServerClient"):
        manager.get_client(client_cls=LLMServerClient)


class OneWorker:
    """A supervisor of one worker, which delivers what it is given after a moment."""

    def __init__(self, backend: Any, recipe: Any, owner: Any, **_: Any) -> None:
        self._owner = owner
        self._member = SimpleNamespace(id=1)
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.deaths = 0
        self.is_closed = False

    @property
    def workers(self) -> dict[int, Any]:
        return {1: self._member}

    async def start(self, count: int) -> None:
        pass

    def expected(self) -> int:
        return 1

    def give(self, member: Any, items: Sequence[Any]) -> None:
        report = WorkerReport([encoded(item.index) for item in items])
        asyncio.get_running_loop().call_later(0.01, self._owner.reported, member, report)

    def drop(self) -> None:
        pass

    def fail(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)

    async def close(self) -> None:
        self.is_closed = True


def encoded(index: int) -> EncodedRollout:
    trajectory = Trajectory(
        prompt_ids=[1],
        response_ids=[2],
        response_mask=[1],
        response_logprobs=None,
        messages=[],
        finish_reason="stop",
        policy_versions=[(0, 0)],
        num_turns=1,
        reward=None,
    )
    return RecordCodec().encode(
        Rollout(
            index=index,
            repeat=0,
            prompt_key="k",
            trajectories=[trajectory],
            data_source="d",
            ground_truth=None,
            attempts=1,
        )
    )


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> GenerationLoopManager:
    """With `crews`, the workers of its streams."""

    async def nothing() -> None:
        pass

    crews: list[OneWorker] = []

    def crew(*args: Any, **kwargs: Any) -> OneWorker:
        crews.append(OneWorker(*args, **kwargs))
        return crews[-1]

    monkeypatch.setattr(stream, "bare_recipe", lambda manager, **_: None)
    monkeypatch.setattr(stream, "RayCluster", lambda _: SimpleNamespace(start=nothing, close=nothing))
    monkeypatch.setattr(workers_executor, "WorkerSupervisor", crew)
    made = object.__new__(GenerationLoopManager)
    made.rollout_config = SimpleNamespace(agent=SimpleNamespace(num_workers=1))
    made.crews = crews
    return made


def sample(index: int) -> dict[str, Any]:
    return {"index": index, "raw_prompt": [{"role": "user", "content": "q"}]}


async def test_a_stream_may_be_left_early(manager: Any) -> None:
    async with asyncio.timeout(20):
        async with aclosing(manager.stream(map(sample, range(20)), max_in_flight=8)) as stream:
            async for _ in stream:
                break
    assert manager.crews[0].is_closed


@pytest.mark.parametrize("bad", [{}, {"raw_prompt": None}, {"raw_prompt": ["text"]}, {"raw_prompt": 3}])
async def test_a_sample_without_messages_fails_alone(manager: Any, bad: dict[str, Any]) -> None:
    samples = [sample(0), sample(1), {"index": 3, **bad}, sample(4), sample(5)]
    async with asyncio.timeout(20):
        got = [result async for result in manager.stream(samples)]
    assert sorted(result.index for result in got) == [0, 1, 3, 4, 5]
    (failure,) = [result for result in got if isinstance(result, Failure)]
    assert failure.index == 3 and "want a list of messages" in failure.error
