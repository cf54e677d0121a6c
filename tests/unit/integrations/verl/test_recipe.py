"""verl's servers, as workers that wait for them see them."""

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


def seen(*servers: Any) -> ClientEngine:
    client = SimpleNamespace(servers={str(number): server for number, server in enumerate(servers)})
    return ClientEngine(client, verl_servers("vllm"))


def test_servers_by_name_take_seeds_or_do_not() -> None:
    assert verl_servers("vllm").seeds
    assert not verl_servers("sglang").seeds and not verl_servers("trtllm").seeds


async def test_one_server_that_is_well_is_enough() -> None:
    gone = actor(raising(ActorUnavailableError("away", None)))
    assert await seen(gone, actor(well, health=True)).health()
    assert not await seen(gone, gone).health()
    # A client that does not know them: what is asked of them shows it.
    assert await ClientEngine(SimpleNamespace(), verl_servers("vllm")).health()


async def test_servers_that_ended_for_good_end_the_run() -> None:
    """Not, one after the other, every rollout that is left (R5)."""
    ended = actor(raising(ActorDiedError()))
    away = actor(raising(ActorUnavailableError("away", None)))
    assert not await seen(ended, away).health()
    for servers in (seen(ended, ended), seen()):  # the client has left out all of them
        availability = EngineAvailability(servers, timeout=600)
        availability.mark_away(EngineUnavailableError("none is left"), availability.returns)
        waiting: Awaitable[None] = asyncio.wait_for(availability.wait(), 20)
        with pytest.raises(EngineLostError, match="run the same command again"):
            await waiting
