"""Ray's actors as workers, with actors that are played."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rollstream.childproc import ChildDiedError
from rollstream.errors import ConfigError
from rollstream.rollout import ray as ray_backend
from rollstream.rollout.ray import RayBackend, RayWorker


@pytest.mark.parametrize("placed", [False, None, True])
async def test_a_worker_that_waits_for_room_is_said(
    placed: bool | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    played = SimpleNamespace(cluster_resources=lambda: {"CPU": 2.0}, available_resources=dict)
    monkeypatch.setattr(ray_backend, "import_ray", lambda: played)
    monkeypatch.setattr(ray_backend, "is_placed", lambda actor: placed)
    monkeypatch.setattr(ray_backend, "_ROOM_S", 0.01)
    started = asyncio.Event()

    async def start() -> int:
        await started.wait()
        return 7

    actor = SimpleNamespace(start=SimpleNamespace(remote=start))
    starting = asyncio.create_task(RayWorker(actor, {"num_cpus": 8}).start())
    await asyncio.sleep(0.1)
    started.set()
    assert await starting == 7
    assert bool(caplog.messages) == (placed is False)


class Refusing:
    """What `ray.remote` makes of a class, here."""

    def options(self, **options: Any) -> "Refusing":
        raise ValueError("The precision of the fractional quantity of resource num_cpus cannot go beyond")


def test_what_ray_refuses_is_an_error_of_the_configuration_without_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_backend, "import_ray", lambda: SimpleNamespace(remote=lambda kind: Refusing()))
    secret = {"num_cpus": 0.00001, "runtime_env": {"env_vars": {"MY_TOKEN": "TELLNOBODY"}}}
    backend = RayBackend(lambda: None, secret)  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match="precision") as caught:
        backend.spawn(0)
    assert "TELLNOBODY" not in str(caught.value)


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
