"""verl's servers and load balancer, as workers that wait for them see them."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.exceptions import ActorDiedError, ActorUnavailableError

from rollstream.errors import EngineLostError, EngineUnavailableError
from rollstream.integrations.verl.recipe import ClientEngine, verl_servers
from rollstream.rollout.availability import EngineAvailability


def remote(answer: Callable[[], Any]) -> Any:
    """A method of an actor, as Ray has them."""

    async def told() -> Any:
        return answer()

    return SimpleNamespace(remote=lambda: told())


def actor(answer: Callable[[], Any], *, health: bool = False) -> Any:
    return SimpleNamespace(**{"health" if health else "__ray_ready__": remote(answer)})


def raising(error: Exception) -> Callable[[], Any]:
    def answer() -> Any:
        raise error

    return answer


def well() -> bool:
    return True


def seen(handles: list[Any], *, balancer: Any = None, left: dict[str, Any] | None = None) -> ClientEngine:
    return ClientEngine(SimpleNamespace(balancer=balancer, servers=left), verl_servers("vllm"), handles)


def test_servers_by_name_take_seeds_or_do_not() -> None:
    assert verl_servers("vllm").seeds
    assert not verl_servers("sglang").seeds and not verl_servers("trtllm").seeds


async def test_one_server_that_is_well_is_enough() -> None:
    gone = actor(raising(ActorUnavailableError("away", None)))
    assert await seen([gone, actor(well, health=True)]).health()
    assert not await seen([gone, gone]).health()
    # Nobody to ask: what is asked of them shows it.
    assert await seen([]).health()


async def test_servers_that_ended_for_good_are_not_waited_for() -> None:
    ended = actor(raising(ActorDiedError()))
    away = actor(raising(ActorUnavailableError("away", None)))
    assert not await seen([ended, away]).health()
    with pytest.raises(EngineLostError, match="run the same command again"):
        await seen([ended, ended]).health()
    # Actors that live on, and of whose engines the client has heard that they are dead.
    with pytest.raises(EngineLostError, match="run the same command again"):
        await seen([actor(well)], left={}).health()


async def test_a_balancer_that_starts_anew_is_waited_for() -> None:
    """Servers that are well are no engine while nobody says which one to ask: work waits."""
    answers = iter([raising(ActorUnavailableError("restarting", None)), raising(TimeoutError()), well])
    balancer = SimpleNamespace(__ray_ready__=SimpleNamespace(remote=lambda: _answer(next(answers))))
    servers = seen([actor(well, health=True)], balancer=balancer)
    assert not await servers.health()
    assert not await servers.health()
    assert await servers.health()


async def _answer(answer: Callable[[], Any]) -> Any:
    return answer()


async def test_a_balancer_that_ended_for_good_ends_the_run() -> None:
    """Not, one after the other, every rollout that is left (R5)."""
    balancer = actor(raising(ActorDiedError()))
    availability = EngineAvailability(seen([actor(well, health=True)], balancer=balancer), timeout=600)
    availability.mark_away(EngineUnavailableError("verl's load balancer is gone"), availability.returns)
    waiting: Awaitable[None] = asyncio.wait_for(availability.wait(), 20)
    with pytest.raises(EngineLostError, match=r"load balancer has ended.*run the same command again"):
        await waiting
