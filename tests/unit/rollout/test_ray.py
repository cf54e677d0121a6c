"""What the executor and the Ray backend say of workers that do not come, with workers that are played."""

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from rollstream.childproc import ChildDiedError
from rollstream.errors import ConfigError, RollstreamError
from rollstream.rollout import executor
from rollstream.rollout import ray as ray_backend
from rollstream.rollout.executor import Executor
from rollstream.rollout.ray import RayBackend, RayWorker


class NoRoom:
    """A backend whose workers never come."""

    is_local = False
    shares_files = True

    def __init__(self, no_room: bool) -> None:
        self.no_room = no_room

    def spawn(self, number: int) -> Any:
        return SimpleNamespace(start=asyncio.Event().wait, kill=lambda: None)

    async def waits_for_room(self, handle: object) -> bool:
        return self.no_room

    def describe_room(self) -> str:
        return "there are 2 CPUs"


@pytest.mark.parametrize(
    ("no_room", "line"),
    [(False, "INFO worker 0 still is starting, after"), (True, "INFO worker 0 still waits for room, after")],
)
async def test_no_room_is_told_from_a_slow_start(
    no_room: bool, line: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(executor, "_SAY_EVERY_S", 0.02)
    monkeypatch.setattr(executor, "_EXPECTED_S", 1.06)
    monkeypatch.setattr(executor, "_FIRST_WORKER_S", 0.5)
    sink: Any = None
    one = Executor(sink, NoRoom(no_room), load_row=lambda index: sink, max_in_flight=1)
    with (
        caplog.at_level(logging.INFO, "rollstream"),
        pytest.raises(RollstreamError, match=r"no worker could be started .*there are 2 CPUs"),
    ):
        await one.start()
    await one.close()
    lines = [f"{record.levelname} {record.message}" for record in caplog.records]
    assert any(said.startswith(line) for said in lines)
    warnings = [said for said in lines if said.startswith("WARNING")]
    assert len(warnings) == no_room
    assert all("still waits for room" in said and "there are 2 CPUs" in said for said in warnings)


class Refusing:
    """What `ray.remote` makes of a class, here."""

    def options(self, **options: Any) -> "Refusing":
        raise ValueError("The precision of the fractional quantity of resource num_cpus cannot go beyond")


def test_what_ray_refuses_is_an_error_of_the_configuration_without_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    played = SimpleNamespace(
        remote=lambda kind: Refusing(), cluster_resources=lambda: {"CPU": 1.0}, available_resources=dict
    )
    monkeypatch.setattr(ray_backend, "import_ray", lambda: played)
    secret = {"num_cpus": 0.00001, "runtime_env": {"env_vars": {"MY_TOKEN": "TELLNOBODY"}}}
    backend = RayBackend(lambda: None, secret)  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match=r"ray_kwargs\.worker: Ray does not take .*precision") as caught:
        backend.spawn(0)
    assert "TELLNOBODY" not in str(caught.value)
    assert "MY_TOKEN" in backend.describe_room() and "TELLNOBODY" not in backend.describe_room()


async def test_why_an_actor_is_gone_is_asked_until_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    exceptions = pytest.importorskip("ray").exceptions
    unavailable = exceptions.ActorUnavailableError("Socket closed", b"0" * 16)
    died = exceptions.ActorDiedError()

    async def blameless(first: BaseException, *answers: BaseException | None) -> bool:
        left = list(answers)

        async def ready() -> None:
            if not left:
                await asyncio.Event().wait()
            if (error := left.pop(0)) is not None:
                raise error

        async def refuse() -> None:
            raise first

        actor = SimpleNamespace(
            __ray_ready__=SimpleNamespace(remote=ready), close=SimpleNamespace(remote=refuse)
        )
        with pytest.raises(ChildDiedError) as caught:
            await RayWorker(actor).close()
        return caught.value.blameless

    monkeypatch.setattr(ray_backend, "_WHY_S", 3.0)
    assert not await blameless(unavailable, unavailable, died)
    assert await blameless(unavailable, None)  # it lives: only the way to it was lost
    assert not await blameless(died)
    monkeypatch.setattr(ray_backend, "_WHY_S", 0.7)
    assert await blameless(unavailable)  # its machine does not answer


async def test_a_worker_that_ray_has_forgotten_is_lost_and_the_run_goes_on() -> None:
    """Ray raises at the call of an actor that died some time ago, not where its answer is awaited."""

    def forgotten(*_: object) -> None:
        raise Exception('Failed to submit task to actor ActorID(1) due to b"Can\'t find actor 1."')

    method = SimpleNamespace(remote=forgotten, options=lambda **_: SimpleNamespace(remote=forgotten))
    names = ("start", "give", "reports", "follow", "drop", "close")
    worker = RayWorker(SimpleNamespace(**dict.fromkeys(names, method)))
    for call in (worker.start(), worker.give([]), anext(worker.reports()), worker.close()):
        with pytest.raises(ChildDiedError, match="died"):
            await call
    await worker.follow(["http://127.0.0.1:1"])
    await worker.drop()
