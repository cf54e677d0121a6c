"""R2, R3: a session is stored once, whatever its client repeats, and whenever its server is killed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.errors import StorageError, TransientError
from rollstream.gateway.app import Endpoint
from rollstream.sessions.service import (
    CreateSession,
    Ended,
    FinishSession,
    Place,
    SessionInfo,
    SessionService,
    ended_info,
    render_error,
    session_of,
    translate,
)
from rollstream.store.records import EncodingError
from rollstream.testing.scripted import ScriptedEngine
from rollstream.trajectory import Failure, Rollout
from rollstream.web import Access, WebServer
from tests.support.until import until
from tests.unit.agent.rollouts import make_row, make_worker, resources

HELLO = {"model": "m", "messages": [{"role": "user", "content": "3 + 9 ="}]}


class MemorySink:
    """Durable as long as the test."""

    def __init__(self) -> None:
        self.written: list[tuple[str, Rollout | Failure]] = []
        self.freed: list[Place] = []
        self.faults: list[Exception] = []
        """Raised by the next writes."""

    @property
    def finished(self) -> dict[str, Rollout]:
        return {id: result for id, result in self.written if isinstance(result, Rollout)}

    def place(self, id: str, asked: CreateSession) -> Place:
        return Place(make_row(int(asked.instance_id or 0)), 0, is_key=True)

    def free(self, place: Place) -> None:
        self.freed.append(place)

    async def write(self, id: str, place: Place, result: Rollout | Failure) -> None:
        await asyncio.sleep(0)
        if self.faults:
            raise self.faults.pop(0)
        self.written.append((id, result))

    async def find(self, id: str) -> Ended | None:
        result = self.finished.get(id)
        if result is None:
            return None
        found = session_of(result.final.extra)
        assert found is not None and found[0] == id
        return Ended(ended_info(id, Place(make_row(result.index), 0, is_key=True), result), found[1])


class Served:
    """A service on a sink, and its clients."""

    def __init__(self, service: SessionService, url: str, client: aiohttp.ClientSession) -> None:
        self.service, self.url, self.client = service, url, client

    async def ask(self, method: str, path: str, body: Any = None, **more: Any) -> tuple[int, Any]:
        url = path if path.startswith("http") else self.url + path
        async with self.client.request(method, url, json=body, **more) as response:
            is_json = response.content_type == "application/json"
            return response.status, await (response.json() if is_json else response.text())

    async def create(self, **given: Any) -> dict[str, Any]:
        status, info = await self.ask("POST", "/v1/sessions", given)
        assert status == 200, info
        return info  # type: ignore[no-any-return]

    async def call(self, session: dict[str, Any]) -> int:
        return (await self.ask("POST", f"{session['base_url']}/chat/completions", HELLO))[0]

    async def finish(self, id: str, **result: Any) -> tuple[int, Any]:
        return await self.ask("POST", f"/v1/sessions/{id}/finish", result)


@asynccontextmanager
async def serving(
    sink: MemorySink, engine: ScriptedEngine | None = None, access: Access | None = None, **given: Any
) -> AsyncIterator[Served]:
    """A gateway that is killed at the end of the block: nothing that is open is recorded."""
    engine = engine or ScriptedEngine()
    await engine.start()
    endpoint = Endpoint("m", None)
    shared = resources(engine)
    service = SessionService(make_worker(shared, max_attempts=1).run, sink, endpoint, **given)
    server = WebServer(
        service.routes(),
        access=access,
        translate=translate,
        render_error=render_error,
        on_answer=service.count,
    )
    endpoint.url = await server.start()
    try:
        async with aiohttp.ClientSession() as client:
            yield Served(service, endpoint.url, client)
    finally:
        await service.drain(0.0)
        await server.stop(0.0)


async def test_a_session_becomes_a_rollout() -> None:
    sink = MemorySink()
    async with serving(sink) as served:
        session = await served.create(id="a", instance_id=3)
        assert session["messages"] == [{"role": "user", "content": "3 + 9 ="}]
        assert session["api_key"] in session["base_url"]
        assert (await served.finish("a", reward=1.0))[1]["error"]["code"] == "no_calls"
        assert [await served.call(session) for _ in range(2)] == [200, 200]
        told = (await served.ask("GET", "/v1/sessions/a"))[1]
        assert (told["state"], told["calls"], told["tokens"]) == ("open", 2, 32)
        status, info = await served.finish("a", reward=0.5, reward_extra={"x": 1}, extra={"y": 2})
        assert (status, info) == (
            200,
            {"id": "a", "state": "finished", "index": 3, "repeat": 0, "trajectories": 2, "reward": 0.5},
        )
        assert await served.call(session) == 404
        metrics = (await served.ask("GET", "/metrics"))[1]
    (result,) = sink.finished.values()
    assert (result.index, [one.is_snapshot for one in result.trajectories]) == (3, [True, False])
    assert [one.reward for one in result.trajectories] == [0.5, 0.5]
    final = result.final
    assert (final.reward_extra, final.extra["y"]) == ({"x": 1}, 2)
    assert 'rollstream_gateway_sessions_total{state="finished"} 1.0' in metrics
    assert "rollstream_gateway_calls_total 2.0" in metrics


async def test_a_write_that_fails_is_tried_again_by_the_same_finish() -> None:
    sink = MemorySink()
    async with serving(sink) as served:
        assert await served.call(await served.create(id="a")) == 200
        sink.faults = [StorageError("full"), TransientError("away")]
        assert (await served.finish("a", reward=1.0))[0] == 507
        assert (await served.ask("GET", "/v1/sessions/a"))[1]["state"] == "ending"
        assert (await served.finish("a", reward=2.0))[0] == 503
        assert (await served.finish("a", reward=2.0))[0] == 409
        assert (await served.finish("a", reward=1.0))[0] == 200
    assert [result.final.reward for result in sink.finished.values()] == [1.0]


async def test_what_cannot_be_stored_is_a_failure() -> None:
    sink = MemorySink()
    async with serving(sink) as served:
        assert await served.call(await served.create(id="a")) == 200
        sink.faults = [EncodingError("no form")]
        status, answer = await served.finish("a")
    assert status == 409 and "no form" in answer["error"]["message"]
    assert [type(result) for _, result in sink.written] == [Failure]


async def test_one_that_is_left_alone_fails_but_not_while_it_waits_for_an_answer() -> None:
    now, sink = 0.0, MemorySink()
    engine = ScriptedEngine(latency=lambda request: 60.0 if request.request_id.startswith("slow") else 0.0)
    async with serving(sink, engine, clock=lambda: now, expire_s=10.0) as served:
        sessions = {id: await served.create(id=id) for id in ("idle", "busy", "slow")}
        slow = asyncio.create_task(served.call(sessions["slow"]))
        await until(lambda: engine.in_flight)
        now = 9.0
        assert await served.call(sessions["busy"]) == 200
        served.service.expire()
        now = 18.0
        served.service.expire()
        await until(lambda: sink.written)
        assert [id for id, _ in sink.written] == ["idle"]
        assert await served.call(sessions["idle"]) == 404
        status, answer = await served.finish("idle")
        assert status == 409 and "left alone" in answer["error"]["message"]
        assert (await served.create(id="idle"))["state"] == "open"
        slow.cancel()


async def test_bounds_tokens_and_garbage() -> None:
    sink = MemorySink()
    async with serving(sink, access=Access("secret"), max_sessions=1) as served:
        assert (await served.ask("POST", "/v1/sessions", {}))[0] == 401
        assert (await served.ask("GET", "/healthz"))[0] == 200
        served.client.headers["authorization"] = "Bearer secret"
        session = await served.create(id="a")
        assert (await served.create(id="a"))["base_url"] == session["base_url"]
        assert (await served.ask("POST", "/v1/sessions", {"id": "a", "instance_id": 1}))[0] == 409
        assert (await served.ask("POST", "/v1/sessions", {"id": "b"}))[0] == 429
        del served.client.headers["authorization"]
        assert await served.call(session) == 200  # its own secret is enough
        assert await served.call({"base_url": f"{served.url}/s/guess/v1"}) == 404
        auth = {"headers": {"authorization": f"Bearer {session['api_key']}"}}
        assert (await served.ask("POST", "/v1/sessions/a/finish", {}, **auth))[0] == 401
        auth = {"headers": {"authorization": "Bearer secret"}}
        for path, body in (
            ("/v1/sessions", {"id": "a/b"}),
            ("/v1/sessions", {"id": "a\n"}),
            ("/v1/sessions", {"rows": {}}),
            ("/v1/sessions/a/finish", {"reward": "1"}),
            ("/v1/sessions/a/finish", {"reward_extra": "tired"}),
            ("/v1/weights", {}),
            ("/v1/sessions", {"row": {"prompt": "q", "number": 2**64}}),
            ("/v1/sessions/a/finish", {"extra": {"number": 2**64}}),
        ):
            assert (await served.ask("POST", path, body, **auth))[0] == 400, path
        assert (await served.ask("GET", "/v1/sessions/none", **auth))[0] == 404
        assert (await served.ask("DELETE", "/v1/sessions/a", **auth))[1]["state"] == "failed"


async def test_weights_come_from_the_folders_that_were_allowed(tmp_path: Any) -> None:
    given, good = [], tmp_path / "ok" / "step-1"
    good.mkdir(parents=True)
    (tmp_path / "ok" / "loop").symlink_to("loop")
    (tmp_path / "ok" / "out").symlink_to("..")
    behind_a_loop = tmp_path / "ok" / "loop" / ".." / "out"

    async def update(source: str, version: int) -> None:
        given.append((source, version))

    async with serving(MemorySink(), update_weights=update, weights=(tmp_path / "ok",)) as served:
        for path, status in (
            (good, 200),
            (tmp_path, 403),
            (good / ".." / "..", 403),
            (behind_a_loop, 403),
            (good / "x", 400),
        ):
            assert (await served.ask("POST", "/v1/weights", {"model_path": str(path)}))[0] == status, path
        body = {"model_path": str(good), "version": 7}
        assert (await served.ask("POST", "/v1/weights", body))[1] == {"version": 7}
        assert (await served.ask("GET", "/v1/weights"))[1] == {"version": 7}
    assert given == [(str(good), 1), (str(good), 7)]


async def test_the_end_waits_for_open_sessions() -> None:
    sink = MemorySink()
    async with serving(sink) as served:
        sessions = [await served.create(id=id) for id in ("a", "b")]
        assert await served.call(sessions[0]) == 200
        ending = asyncio.create_task(served.service.drain(60.0))
        await asyncio.sleep(0)
        assert (await served.ask("POST", "/v1/sessions", {"id": "c"}))[0] == 503
        assert (await served.ask("GET", "/healthz"))[0] == 503
        assert (await served.finish("a", reward=1.0))[0] == 200
        assert not ending.done()
        assert (await served.ask("DELETE", "/v1/sessions/b"))[0] == 200
        assert await ending == 0


async def test_a_session_that_is_finished_while_others_are_dropped_is_durable() -> None:
    class Finishing(MemorySink):
        def free(self, place: Place) -> None:
            super().free(place)
            if len(self.freed) == 1:  # two more are to be dropped now
                given = FinishSession(reward=1.0)
                finishing.append(asyncio.create_task(served.service.finish("c", given)))

    finishing: list[asyncio.Task[SessionInfo]] = []
    sink = Finishing()
    async with serving(sink) as served:
        sessions = [await served.create(id=id) for id in ("a", "b", "c")]
        assert await served.call(sessions[-1]) == 200
        assert await served.service.drain(0.0) == 2
        assert (await finishing[0]).state == "finished"
    assert [*sink.finished] == ["c"]


IDS = st.sampled_from(["a", "b"])
STEPS = st.one_of(
    st.tuples(st.sampled_from(["create", "call", "delete", "get"]), IDS),
    st.tuples(st.just("finish"), IDS, st.sampled_from([0.0, 1.0])),
    st.tuples(st.just("fault")),
    st.tuples(st.just("wait")),
    st.tuples(st.just("kill")),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(STEPS, max_size=25))
def test_whatever_is_repeated_and_killed_each_is_stored_once(steps: list[Any]) -> None:
    asyncio.run(_play(steps))


async def _play(steps: list[Any]) -> None:
    """R3. `promised`: rewards of finishes that were answered 200."""
    sink, promised, clock = MemorySink(), dict[str, Any](), [0.0]
    open_sessions: dict[str, Any] = {}
    remaining = iter(steps)
    more = True
    while more:
        more = False
        async with serving(sink, clock=lambda: clock[0], expire_s=10.0) as served:
            open_sessions.clear()
            for verb, *words in remaining:
                id = words[0] if words else ""
                if verb == "kill":
                    more = True
                    break
                if verb == "fault":
                    sink.faults = [TransientError("away")]
                elif verb == "wait":
                    clock[0] += 11.0
                    served.service.expire()
                    served.service.expire()
                    await asyncio.sleep(0.01)
                elif verb == "create":
                    status, info = await served.ask("POST", "/v1/sessions", {"id": id})
                    assert status == 200
                    assert (info["state"] == "finished") == (id in sink.finished)
                    if info["state"] == "open":
                        open_sessions[id] = info
                elif verb == "call" and id in open_sessions:
                    assert await served.call(open_sessions[id]) in (200, 404)
                elif verb == "delete":
                    status, _ = await served.ask("DELETE", f"/v1/sessions/{id}")
                    assert (status == 409) == (id in sink.finished) or status == 503
                elif verb == "get":
                    status, info = await served.ask("GET", f"/v1/sessions/{id}")
                    assert status in (200, 404)
                    assert id not in promised or info["reward"] == promised[id]
                elif verb == "finish":
                    status, info = await served.finish(id, reward=words[1])
                    assert status in (200, 404, 409, 503)
                    if id in promised:
                        assert status == (200 if words[1] == promised[id] else 409)
                    if status == 200:
                        assert (info["state"], info["reward"]) == ("finished", words[1])
                        promised[id] = words[1]
            sink.faults = []
        stored = [id for id, result in sink.written if isinstance(result, Rollout)]
        assert len(stored) == len(set(stored))
        rewards = {id: result.final.reward for id, result in sink.finished.items()}
        assert {id: rewards.get(id) for id in promised} == promised
        assert served.service.progress().startswith("0 sessions open")


async def test_calls_wait_for_an_engine_that_is_away() -> None:
    engine = ScriptedEngine()
    async with serving(MemorySink(), engine, engine_wait=60.0) as served:
        session = await served.create(id="a")
        engine.go_down()
        call = asyncio.create_task(served.call(session))

        async def is_waiting() -> bool:
            told = (await served.ask("GET", "/v1/sessions/a"))[1]
            return bool(told["open_calls"])

        await until(is_waiting)
        engine.come_back()
        assert await call == 200
