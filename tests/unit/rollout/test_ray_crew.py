"""What is said of workers, with actors that are played."""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from rollstream.errors import ConfigError
from rollstream.rollout import ray_crew
from rollstream.rollout.fleet import Fleet
from rollstream.rollout.ray_crew import Crew, WorkerPlace

pytest.importorskip("ray")


class Never:
    """A worker that does not come."""

    def __init__(self) -> None:
        self.start = SimpleNamespace(remote=lambda: asyncio.Event().wait())


class Refusing:
    """What `ray.remote` makes of a class, here."""

    def options(self, **options: Any) -> "Refusing":
        if "num_cpus" in options and options["num_cpus"] < 0.0001:
            raise ValueError("The precision of the fractional quantity of resource num_cpus cannot go beyond")
        return self

    def remote(self, *arguments: object) -> Never:
        return Never()


@pytest.fixture(autouse=True)
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    played = SimpleNamespace(
        remote=lambda kind: Refusing(),
        kill=lambda actor: None,
        cluster_resources=lambda: {"CPU": 1.0},
        available_resources=dict,
    )
    monkeypatch.setattr(ray_crew, "import_ray", lambda: played)
    monkeypatch.setattr(WorkerPlace, "here", classmethod(lambda cls: None))
    yield


def crew(options: Mapping[str, Any]) -> Crew:
    owner: Any = SimpleNamespace(joined=None, given_up=None)
    recipe: Any = lambda: None  # noqa: E731
    return Crew(
        recipe,
        owner,
        options=options,
        attempt_timeout=1,
        engine_timeout=1,
        fleet=Fleet(shared_engine=None),
        urls=None,
    )


async def test_what_only_ray_can_refuse_is_an_error_of_the_configuration_without_secrets() -> None:
    options = {"num_cpus": 0.00001, "runtime_env": {"env_vars": {"MY_TOKEN": "TELLNOBODY"}}}
    one = crew(options)
    with pytest.raises(ConfigError, match=r"ray_kwargs\.worker: Ray does not take .*precision") as caught:
        await one.start(1)
    assert "TELLNOBODY" not in str(caught.value)
    await one.close()


async def test_a_worker_that_does_not_come_shows_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_crew, "_FIRST_WORKER_S", 0.05)
    one = crew({"num_cpus": 1, "runtime_env": {"env_vars": {"MY_TOKEN": "TELLNOBODY"}}})
    with pytest.raises(Exception, match="no worker could be started") as caught:
        await one.start(1)
    assert "TELLNOBODY" not in str(caught.value)
    assert "MY_TOKEN" in str(caught.value)
    await one.close()


@pytest.mark.parametrize(
    ("placed", "said"),
    [
        (True, "INFO worker 0 is still starting, after"),
        (False, "INFO worker 0 still waits for room in the cluster, after"),
        (None, "INFO worker 0 still waits for room"),
    ],
)
async def test_no_room_is_told_from_a_slow_start(
    placed: bool | None, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray_crew, "_SAY_EVERY_S", 0.02)
    monkeypatch.setattr(ray_crew, "_WAITED_FOR_S", 1.06)
    monkeypatch.setattr(ray_crew, "_FIRST_WORKER_S", 0.5)
    monkeypatch.setattr(ray_crew, "is_placed", lambda actor: placed)
    one = crew({})
    with caplog.at_level(logging.INFO, "rollstream"), pytest.raises(Exception, match="no worker"):
        await one.start(1)
    await one.close()
    lines = [f"{record.levelname} {record.message}" for record in caplog.records]
    assert any(line.startswith(said) for line in lines)
    warnings = [line for line in lines if line.startswith("WARNING")]
    if placed:
        assert warnings == []
    else:
        assert len(warnings) == 1
        assert "still waits for room in the cluster" in warnings[0] and "'num_cpus': 1" in warnings[0]


async def test_why_a_worker_is_gone_is_asked_until_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    exceptions = pytest.importorskip("ray").exceptions
    monkeypatch.setattr(ray_crew, "import_ray", lambda: SimpleNamespace(exceptions=exceptions))
    unavailable = exceptions.ActorUnavailableError("Socket closed", b"0" * 16)
    died = exceptions.ActorDiedError()

    def actor(*answers: BaseException | None) -> Any:
        left = list(answers)

        async def answer() -> None:
            if not left:
                await asyncio.Event().wait()
            if (error := left.pop(0)) is not None:
                raise error

        return SimpleNamespace(__ray_ready__=SimpleNamespace(remote=answer))

    monkeypatch.setattr(ray_crew, "_WHY_S", 3.0)
    assert await ray_crew._why_gone(actor(unavailable, died), unavailable) is died
    assert await ray_crew._why_gone(actor(None), unavailable) is unavailable  # it lives
    assert await ray_crew._why_gone(actor(), died) is died  # nobody is asked
    monkeypatch.setattr(ray_crew, "_WHY_S", 0.7)
    assert await ray_crew._why_gone(actor(), unavailable) is unavailable  # its machine says nothing
