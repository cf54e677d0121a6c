"""verl's client and manager of servers as rollstream extends them, over fakes of Ray's actors."""

import asyncio
import copy
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

import ray
from verl.workers.rollout.llm_server import LLMServerClient

from rollstream.agent.base import turn_seed
from rollstream.errors import ConfigError, DataError, EngineLostError, EngineUnavailableError
from rollstream.integrations.verl import client as client_module
from rollstream.integrations.verl.client import StreamingLLMServerClient, StreamingLLMServerManager
from rollstream.integrations.verl.executor import start_servers
from rollstream.integrations.verl.recipe import ClientEngine, verl_servers
from rollstream.integrations.verl.worker import SampleCalls, noting
from rollstream.trajectory import SamplingParams


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


def client_of(servers: dict[str, Any], name: str = "vllm") -> StreamingLLMServerClient:
    rollout = SimpleNamespace(
        name=name, full_determinism=False, prompt_length=8, response_length=4, max_model_len=None
    )
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
    return StreamingLLMServerClient(config, servers=servers)


async def ask(client: StreamingLLMServerClient, prompt: Sequence[int] = (1,)) -> Any:
    return await client.generate("r", prompt_ids=list(prompt), sampling_params={"temperature": 1.0})


async def test_generations_side_by_side_have_seeds_of_their_own() -> None:
    """Best of four within one loop: four answers, not the same one four times."""
    server = Server(0.2, 0.1, 0.15, 0.0)
    client = client_of({"only": server})
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
    client = client_of({"only": Talker(tokens, said)})
    client.config.actor_rollout_ref.rollout.max_model_len = limits.get("model")
    calls = SampleCalls()
    with noting(calls):
        await client.generate("r", prompt_ids=[1] * prompt, sampling_params=limits.get("sampling", {}))
    if said is None and "sampling" in limits:  # a request's own limit is nothing to it
        reason = "length" if tokens == 4 else "stop"
    assert calls.calls[-1].finish_reason == reason


@pytest.mark.parametrize(("tokens", "reason"), [(3, "length"), (2, "stop")])
async def test_rollstreams_loops_hear_of_what_the_lengths_cut_off(tokens: int, reason: str) -> None:
    """A prompt that a loop wrote anew may leave less room than the loop asks for."""
    engine = ClientEngine(client_of({"only": Talker(tokens, "completed")}), verl_servers("vllm"))
    completion = await engine.generate([1] * 9, SamplingParams(max_tokens=4, logprobs=False), request_id="r")
    assert completion.finish_reason == reason


async def test_what_a_server_says_of_the_end_holds() -> None:
    for said, fields, reason in (
        ("stop", {}, "stop"),  # SGLang's servers
        ("aborted", {}, "aborted"),
        ("completed", {"finish_reason": "stop"}, "stop"),  # rollstream's
    ):
        calls = SampleCalls()
        with noting(calls):
            await ask(client_of({"only": Talker(4, said, fields)}), [1, 2])
        assert calls.calls[-1].finish_reason == reason


async def test_who_is_cut_off_ends_the_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a server goes on with what nobody waits for, beside the attempt that follows."""
    cancelled: list[Any] = []
    monkeypatch.setattr(ray, "cancel", cancelled.append)
    server = Server(0.0, 30.0)
    client = client_of({"only": server})
    await ask(client)
    assert not cancelled
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await ask(client)
    assert len(server.asked) == 2 and len(cancelled) == 1


async def test_a_conversation_stays_with_its_server_and_others_go_to_the_least_busy() -> None:
    servers = {name: Server(*[0.0] * 20) for name in "ab"}
    client = client_of(servers)
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
async def test_a_server_of_verls_that_has_ended_is_asked_no_more(error: Exception) -> None:
    """It has nothing in flight, so the balancer would give it nearly every request."""
    dead = DeadServer(error)
    client = client_of({"dead": dead, **{f"good {i}": Server(*[0.0] * 200) for i in range(3)}})
    refused = 0
    for i in range(200):  # the balancer chooses at random among those that are as busy
        try:
            await client.generate(f"r{i}", prompt_ids=[1], sampling_params={})
        except EngineUnavailableError as gone:  # charged to no rollout
            assert "dead" in str(gone)
            refused += 1
    assert (refused, len(dead.asked)) == (1, 1)


async def test_when_the_last_server_has_ended_the_run_does() -> None:
    """Not each of its rollouts (R5): what is left goes on with the same command."""
    client = client_of({"a": DeadServer(ray.exceptions.ActorDiedError())})
    servers = ClientEngine(client, verl_servers("vllm"))
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
    client = client_of({"a": DeadServer(error)}, name)
    for _ in range(2):
        with pytest.raises(raised):
            await ask(client)
    assert list(client.servers) == ["a"]


def manager_of(**attributes: Any) -> StreamingLLMServerManager:
    """One that has got as far as these."""
    manager = object.__new__(StreamingLLMServerManager)
    vars(manager).update(attributes)
    return manager


def test_its_clients_know_their_servers() -> None:
    manager = manager_of(config=client_of({}).config, server_addresses=["http://x"], server_handles=["actor"])
    assert manager.get_client().servers == {"http://x": "actor"}
    with pytest.raises(ConfigError, match="derive it from StreamingLLMServerClient"):
        manager.get_client(client_cls=LLMServerClient)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was ended of actors and placement groups; of some Ray says that they are gone."""
    names: list[str] = []

    def end(what: str) -> None:
        names.append(what)
        if what in ("worker 1", "group 1"):
            raise RuntimeError("it is gone already")

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "kill", end)
    monkeypatch.setattr(client_module, "remove_placement_group", end)
    return names


def replica(number: int, pool: Any) -> Any:
    return SimpleNamespace(servers=[f"server {number}"], workers=[f"worker {number}"], resource_pool=pool)


def test_actors_workers_and_placement_groups_are_ended(
    ended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas = [
        replica(1, SimpleNamespace(pgs=["group 1", "group 2"])),
        replica(2, SimpleNamespace(pgs=None)),
        replica(3, None),
    ]
    manager = manager_of(rollout_replicas=replicas, server_handles=["server 1", "server 2", "server 3"])
    manager.close()
    wanted = {f"{what} {number}" for what in ("server", "worker") for number in (1, 2, 3)}
    assert set(ended) == wanted | {"group 1", "group 2"}
    ended.clear()
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    manager.close()  # Ray would start a cluster to kill an actor in
    assert not ended


class HalfStarted(StreamingLLMServerManager):
    """Its servers get no further than their workers."""

    def __init__(self) -> None:
        self.half_made = asyncio.Event()
        self.goes_on: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def _initialize_llm_servers(self) -> None:
        self.rollout_replicas = [replica(7, None)]
        self.half_made.set()
        await self.goes_on


@pytest.mark.parametrize("is_cut_off", [True, False])
async def test_a_start_that_comes_to_nothing_leaves_nothing(ended: list[str], is_cut_off: bool) -> None:
    """On a cluster that stays it would keep its GPUs."""
    servers = HalfStarted()
    with pytest.raises(asyncio.CancelledError if is_cut_off else RuntimeError):
        async with asyncio.timeout(60), AsyncExitStack() as stack:
            starting = start_servers(servers, stack)
            await servers.half_made.wait()
            if is_cut_off:
                raise asyncio.CancelledError
            servers.goes_on.set_exception(RuntimeError("no servers"))
            await starting
    assert ended == ["server 7", "worker 7"]
