"""The page's server, asked over HTTP."""

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import numpy as np
import pytest

from rollstream.errors import ConfigError
from rollstream.trajectory import STREAMS, Metrics
from rollstream.view.app import ViewServer
from rollstream.web import Access
from tests.support.view_runs import (
    HOSTILE,
    SCRIPT,
    agent_run,
    failure,
    hostile_run,
    large_run,
    rollout,
    session_rollout,
    write_run,
    writing,
)
from tests.unit.rollout.test_annotate import annotated
from tests.unit.view.test_tokens import decoded


class Page:
    """What a page asks."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url, self.session = url, session

    async def get(self, path: str, status: int = 200, **query: Any) -> Any:
        async with self.session.get(self.url + path, params=query) as answer:
            assert answer.status == status, await answer.text()
            return await answer.json()

    async def raw(self, path: str, **headers: str) -> tuple[int, bytes, Any]:
        async with self.session.get(self.url + path, headers=headers) as answer:
            return answer.status, await answer.read(), answer.headers

    async def events(self, path: str, **query: Any) -> AsyncIterator[tuple[str, str, Any]]:
        """`(event, id, data)` of a stream."""
        async with self.session.get(self.url + path, params=query) as answer:
            assert answer.headers["content-type"] == "text/event-stream"
            said: dict[str, str] = {}
            async for line in answer.content:
                name, _, value = line.decode().rstrip("\n").partition(": ")
                if name:
                    said[name] = value
                elif "event" in said:
                    yield said["event"], said.get("id", ""), json.loads(said["data"])
                    said = {}

    async def run(self, name: str) -> str:
        sources = (await self.get("/api/sources"))["sources"]
        return "/api/runs/" + next(one["id"] for one in sources if one["name"] == name)


@asynccontextmanager
async def page(*places: Path, **access: Any) -> AsyncIterator[Page]:
    server = ViewServer([str(place) for place in places], Access(**access))
    url = await server.start("127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession() as session:
            yield Page(url, session)
    finally:
        await server.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs."""
    top = tmp_path_factory.mktemp("runs")
    agent_run(top / "agent", prompts=12)
    hostile_run(top / "deeper" / "hostile")
    write_run(top / "plain", [rollout(at // 2, at % 2, reward=at % 2) for at in range(8)], n=2, prompts=4)
    return top


async def test_the_list_of_runs(folder: Path) -> None:
    async with page(folder) as one:
        found = {run["name"]: run for run in (await one.get("/api/sources"))["sources"]}
    assert set(found) == {"agent", "deeper/hostile", "plain"}
    plain = found["plain"]
    assert (plain["kind"], plain["state"], plain["done"], plain["total"]) == ("run", "finished", 8, 8)
    assert (plain["reward_mean"], plain["reward_interval"]) == (0.5, [0.5, 0.5])
    assert found["agent"]["unscored"] == 4 and found["agent"]["failed"] == 0
    assert found["deeper/hostile"]["failed"] == 6


async def test_each_bar_of_the_overview_is_the_rows_of_its_filter(folder: Path) -> None:
    async with page(folder) as one:
        run = await one.run("agent")
        said = await one.get(run)
        base = said["base_filter"]
        assert base == "is_snapshot = false"
        filters = {f'finish_reason = "{name}"': count for name, count in said["finish_reasons"].items()}
        filters |= {f'data_source = "{name}"': each["count"] for name, each in said["sources"].items()}
        for column, name in (("reward", "reward"), ("tokens", "tokens"), ("num_turns", "turns")):
            shown = said["histograms"][name]
            for low, high, count in zip(shown["edges"], shown["edges"][1:], shown["counts"], strict=False):
                filters[f"{column} >= {low} and {column} < {high}"] = count
            assert [sum(each) for each in zip(*shown["by_source"].values(), strict=True)] == shown["counts"]
        filters["reward = null"] = said["unscored"]
        for text, count in filters.items():
            rows = await one.get(f"{run}/rows", filter=f"{base} and {text}", limit=0)
            assert rows["total"] == count, text
        groups = said["groups"]
        kinds = [groups[name] for name in ("all_wrong", "mixed", "all_right", "unscored")]
        assert sum(kinds) == groups["total"] == len(said["solve_strip"]) == 12
        assert sum(said["timeline"]["finished"]) == said["done"]


async def test_rows_come_sorted_filtered_and_by_pages(folder: Path) -> None:
    async with page(folder) as one:
        run = await one.run("agent")
        everything = await one.get(f"{run}/rows", sort="-tokens", columns="tokens,index,reward.correct")
        assert everything["columns"] == ["tokens", "index", "reward.correct"]
        tokens = [row[1] for row in everything["rows"]]
        assert tokens == sorted(tokens, reverse=True) and len(tokens) == everything["all"]
        second = await one.get(f"{run}/rows", sort="-tokens", columns="tokens", offset=10, limit=5)
        assert [row[0] for row in second["rows"]] == [row[0] for row in everything["rows"][10:15]]
        refused = await one.get(f"{run}/rows", status=400, filter="reward < x")
        assert (refused["error"]["code"], refused["error"]["where"]) == ("bad_filter", "9")
        for wrong in ({"sort": "nothing"}, {"columns": "nothing"}, {"limit": -1}, {"limit": 10**9}):
            await one.get(f"{run}/rows", status=400, **wrong)


async def test_the_texts_of_rows(folder: Path) -> None:
    """The last message of a prompt, the last answer, and the truth; only of rows that there are."""
    async with page(folder) as one:
        run = await one.run("agent")
        rows = (await one.get(f"{run}/rows", filter="is_snapshot = false", columns="index", limit=3))["rows"]
        said = await one.get(f"{run}/texts", rows=",".join(str(row) for row, _ in rows) + ",999999")
        assert set(said["texts"]) == {str(row) for row, _ in rows}
        for row, index in rows:
            texts = said["texts"][str(row)]
            assert texts["prompt"].startswith(f"Weather in city {index}?") and texts["truth"].startswith(
                '{"clothes"'
            )
            whole = await one.get(f"{run}/trajectories/{row}")
            assert texts["answer"] == whole["messages"][-1]["content"]
        await one.get(f"{run}/texts", status=400, rows="1,x")


async def test_calls_and_errors_by_tool(tmp_path: Path) -> None:
    made = [
        rollout(
            0,
            0,
            metrics=Metrics(tool_calls=3, tool_errors=1),
            extra={"tool_counts": {"a": [2, 0], "b": [1, 1]}},
        ),
        rollout(0, 1, metrics=Metrics(tool_calls=1), extra={"tool_counts": {"a": [1, 0]}}),
        rollout(0, 2, metrics=Metrics(tool_calls=2), extra={"tool_counts": "of another loop"}),
        rollout(0, 3, extra={"tool_counts": {"never": [0, 0]}}),
    ]
    await asyncio.to_thread(write_run, tmp_path / "run", made, prompts=1)
    async with page(tmp_path) as one:
        run = await one.run("run")
        assert (await one.get(run))["tool_calls"] == 6
        found = {
            tool["name"]: (tool["calls"], tool["errors"]) for tool in (await one.get(f"{run}/tools"))["tools"]
        }
    assert found == {"a": (3, 0), "b": (1, 1), None: (2, 0)}


async def test_how_each_source_of_prompts_does(tmp_path: Path) -> None:
    made = [rollout(0, at, extra={"source": "sums"}, reward=float(at)) for at in range(3)]
    made += [rollout(1, at, extra={"source": "code"}, reward=1.0) for at in range(2)]
    await asyncio.to_thread(write_run, tmp_path / "run", made, prompts=2)
    async with page(tmp_path) as one:
        found = await one.get(f"{await one.run('run')}/sources")
    assert found == {
        "code": {"completed": 2, "failed": 0, "mean_reward": 1.0},
        "sums": {"completed": 3, "failed": 0, "mean_reward": 1.0},
    }


async def test_a_part_of_the_reward_may_have_any_name(tmp_path: Path) -> None:
    made = [rollout(0, at, reward_extra={"a, 100%,b": at}) for at in range(3)]
    await asyncio.to_thread(write_run, tmp_path / "run", made, prompts=1)
    async with page(tmp_path) as one:
        name = quote("reward.a, 100%,b", safe="")
        rows = await one.get(f"{await one.run('run')}/rows", columns=f"repeat,{name}", sort=f"-{name}")
    assert [row[1:] for row in rows["rows"]] == [[2, 2.0], [1, 1.0], [0, 0.0]]
    assert rows["columns"] == ["repeat", "reward.a, 100%,b"]


async def test_groups_and_a_group_side_by_side(folder: Path) -> None:
    async with page(folder) as one:
        run = await one.run("plain")
        groups = await one.get(f"{run}/groups", sort="-spread")
        assert groups["total"] == 4 and groups["groups"][0]["prompt"] == "What is 2 + 2?"
        assert (await one.get(f"{run}/groups", filter="index > 2"))["total"] == 1
        group = await one.get(f"{run}/groups/1")
        assert [each["reward"] for each in group["rollouts"]] == [0.0, 1.0]
        assert (group["previous"], group["next"]) == (0, 2)
        assert group["prompt"] == [{"role": "user", "content": "What is 2 + 2?"}]
        await one.get(f"{run}/groups/77", status=404)
        agent = await one.run("agent")
        snapshots = (await one.get(f"{agent}/groups/0"))["rollouts"][0]["trajectories"]
        assert len(snapshots) == 3
        hostile = await one.get(f"{await one.run('deeper/hostile')}/groups/0")
        assert hostile["rollouts"][1]["failed"]["error"].startswith(SCRIPT)


async def test_a_trajectory_and_what_its_snapshot_still_had(folder: Path) -> None:
    async with page(folder) as one:
        run = await one.run("agent")
        first, second = [await one.get(f"{run}/trajectories/{row}") for row in (0, 1)]
        assert (first["of"], first["siblings"], first["is_snapshot"]) == (3, [0, 1, 2], True)
        assert [each["role"] for each in first["messages"]][:2] == ["system", "user"]
        assert second["previous_row"] == 0 and second["next_row"] == 2
        third = await one.get(f"{run}/trajectories/2")
        assert [each["role"] for each in third["removed"]] == ["tool"]
        assert third["reward_extra"]["correct"] == third["reward"]
        for wrong in ("99999", "-1", "x", "9" * 30):
            await one.get(f"{run}/trajectories/{wrong}", status=404)


async def test_when_calls_ran_and_which_of_them_stood_beside(tmp_path: Path) -> None:
    made = session_rollout(0, 0)
    await asyncio.to_thread(write_run, tmp_path / "run", [made, rollout(0, 1)], prompts=1)
    async with page(tmp_path) as one:
        run = await one.run("run")
        side, final, older = [await one.get(f"{run}/trajectories/{row}") for row in range(3)]
    assert (
        side["call_times"]
        == final["call_times"]
        == {
            "0": [["generate", 0.0, 0.02]],
            "1": [["generate", 0.0, 0.1], ["generate", 0.15, 0.04]],
        }
    )
    assert side["side_calls"] == final["side_calls"] == [0]
    assert side["removed"] == final["removed"] == []
    assert side["extra"] == {"gateway": {"side_call": True}} and final["extra"] == {}
    assert (older["call_times"], older["side_calls"]) == ({}, [])


async def test_tokens_are_binary(folder: Path) -> None:
    async with page(folder) as one:
        run = await one.run("agent")
        _, data, headers = await one.raw(f"{run}/trajectories/7/tokens")
        trajectory = await one.get(f"{run}/trajectories/7")
        assert headers["content-type"] == "application/octet-stream"
    length = int.from_bytes(data[:4], "little")
    header = json.loads(data[4 : 4 + length])
    start = 4 + length + -length % 4
    found = {
        each["name"]: np.frombuffer(data, each["dtype"], each["length"], start + each["offset"])
        for each in header["columns"]
    }
    assert header["prompt"] == trajectory["prompt_tokens"] == 10
    assert header["count"] == len(found["id"]) == 10 + trajectory["response_tokens"]
    assert header["has_text"] and found["text_start"][-1] == len(found["text"])
    assert {"entropy", "trainer_logprob"} < set(found)
    sampled = found["mask"] == 1
    assert np.isfinite(found["logprob"][sampled]).all() and np.isnan(found["logprob"][~sampled]).all()
    assert [turn["role"] for turn in header["turns"]] == ["prompt", "assistant", "tool", "assistant"]
    runs = trajectory["policy_versions"]
    assert set(found["version"]) == {-1, *(each["version"] for each in runs)}


async def test_search_finds_what_is_there_and_ends(folder: Path) -> None:
    async with page(folder) as one:
        run = await one.run("agent")
        events = [each async for each in one.events(f"{run}/search", text="HEAVY coat", filter="reward = 0")]
        rows = await one.get(f"{run}/rows", filter="reward = 0", columns="reward")
        hits = [data for name, _, data in events if name == "hit"]
        assert {hit["match"] for hit in hits} == {"heavy coat"} and hits[0]["before"] == "A "
        assert {hit["row"] for hit in hits} == {row[0] for row in rows["rows"]}
        assert events[-1][0] == "done" and events[-1][2]["scanned"] == rows["total"]
        hostile = await one.run("deeper/hostile")
        for text in HOSTILE:
            found = [
                data async for name, _, data in one.events(f"{hostile}/search", text=text) if name == "hit"
            ]
            assert found and found[0]["match"] == text
        await one.get(f"{run}/search", status=400)


async def test_two_runs_against_each_other(folder: Path, tmp_path: Path) -> None:
    rewards = [1, 1, 0, 1, 0, 0, 1, 0]
    made = [rollout(at // 2, at % 2, reward=rewards[at]) for at in range(8)]
    await asyncio.to_thread(write_run, tmp_path / "b", made, n=2, prompts=9, temperature=0.5)
    async with page(folder, tmp_path / "b") as one:
        ids = [(await one.run(name)).rpartition("/")[2] for name in ("plain", "b")]
        said = await one.get("/api/compare", a=ids[0], b=ids[1], sort="-difference")
        assert (said["prompts"], said["won"], said["lost"], said["tied"]) == (4, 1, 1, 2)
        assert ["temperature", None, 0.5] in said["differs"]
        assert [row["difference"] for row in said["rows"]] == [0.5, 0.0, 0.0, -0.5]
        assert said["interval"][0] < said["difference"] < said["interval"][1]
        for outcome, change in (("won", [0.5]), ("tied", [0.0, 0.0]), ("lost", [-0.5])):
            some = await one.get("/api/compare", a=ids[0], b=ids[1], outcome=outcome)
            assert [row["difference"] for row in some["rows"]] == change
            assert (some["total"], some["prompts"]) == (len(change), 4)
        await one.get("/api/compare", status=400, a=ids[0], b=ids[1], outcome="drawn")
        await one.get("/api/compare", status=404, a=ids[0], b="nothing")


async def test_following_goes_on_from_the_cursor(tmp_path: Path) -> None:
    root = tmp_path / "run"
    async with writing(root, prompts=4) as writer:
        await writer.commit(rollout(0, 0))
        async with page(root) as one:
            run = await one.run("run")
            stream = one.events(f"{run}/follow")
            _, cursor, data = await anext(stream)
            assert (data["done"], data["state"], data["total"]) == (1, "running", 16)
            await writer.commit(rollout(0, 1))
            _, later, data = await anext(stream)
            assert data["rows"] == 2 and later != cursor
            await stream.aclose()
            again = one.events(f"{run}/follow", cursor=cursor)
            assert (await anext(again))[2]["rows"] == 2  # what came meanwhile is said at once
            await again.aclose()
            nothing_new = one.events(f"{run}/follow", cursor=later)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(nothing_new), 1.5)


async def test_hostile_output_is_data(folder: Path) -> None:
    async with page(folder) as one:
        run = await one.run("deeper/hostile")
        for row in range(8):
            status, body, headers = await one.raw(f"{run}/trajectories/{row}")
            assert (status, headers["content-type"]) == (200, "application/json")
            if row < 6:
                assert json.loads(body)["messages"][1]["content"] == HOSTILE[row]
            assert headers["x-content-type-options"] == "nosniff"
            assert "script-src 'self';" in headers["content-security-policy"]
        assert len((await one.get(f"{run}/trajectories/6"))["messages"][1]["content"]) == 10_000_000
        assert (await one.get(run))["finish_reasons"][SCRIPT[:40]] == 1


async def test_arguments_that_are_nested_deeply(tmp_path: Path) -> None:
    nested: Any = "x"
    for _ in range(240):
        nested = [nested]
    messages = [{"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": nested}}]}]
    await asyncio.to_thread(write_run, tmp_path / "deep", [rollout(0, 0, messages=messages)], prompts=1)
    async with page(tmp_path) as one:
        run = await one.run("deep")
        for path in ("trajectories/0", "groups/0", "groups"):
            assert (await one.raw(f"{run}/{path}"))[0] == 200


async def test_nobody_in_who_was_not_let_in(folder: Path) -> None:
    async with page(folder, token="secret") as one:
        assert (await one.raw("/"))[0] == 200  # the page itself holds nothing
        assert (await one.raw("/api/sources"))[0] == 401
        assert (await one.raw("/api/sources", authorization="Bearer secret"))[0] == 200
        assert (await one.raw("/api/sources?token=secret"))[0] == 401
    async with page(folder) as one:
        assert (await one.raw("/api/sources", origin="http://evil.example"))[0] == 403
        assert (await one.raw("/api/sources", host="evil.example"))[0] == 403
        assert (await one.raw("/api/sources", **{"sec-fetch-site": "cross-site"}))[0] == 403
        for path in ("/../app.py", "/%2e%2e/app.py", "/static/../../app.py", "//etc/passwd", "/app.py"):
            status, _, headers = await one.raw(path)
            assert (status, headers["x-content-type-options"]) == (404, "nosniff")
        async with one.session.post(f"{one.url}/api/sources") as answer:
            assert answer.status == 405
    with pytest.raises(ConfigError, match="set a token"):
        await ViewServer([str(folder)], Access()).start("0.0.0.0", 0)
    with pytest.raises(ConfigError, match="no such file"):
        ViewServer([str(folder / "nothing")], Access())


async def test_a_large_run_is_listed_unread_and_opened_when_asked(tmp_path: Path) -> None:
    large_run(tmp_path / "large", 60_000, tokens=4)
    large_run(tmp_path / "other", 8, tokens=4)  # one that is alone is read at once
    async with page(tmp_path) as one:
        listed = (await one.get("/api/sources"))["sources"][0]
        assert (listed["done"], listed["tokens"], listed["state"]) == (60_000, None, "finished")
        run = await one.run("large")
        assert (await one.get(run))["rows"] == 60_000
        assert (await one.get(f"{run}/groups", sort="-mean", limit=3))["total"] == 7_500


async def test_a_damaged_run_says_so(tmp_path: Path) -> None:
    made = [rollout(at, 0) for at in range(4)]
    root = await asyncio.to_thread(write_run, tmp_path / "run", made, prompts=1, rows=2)
    next((root / "batches").glob("*.parquet")).write_bytes(b"nothing")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_text("{")
    odd = json.loads((root / "run.json").read_text()) | {
        "created": "yesterday",
        "config": {"actor_rollout_ref": 7},
    }
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "run.json").write_text(json.dumps(odd))
    async with page(tmp_path) as one:
        found = {run["name"]: run for run in (await one.get("/api/sources"))["sources"]}
        assert {name: run["state"] for name, run in found.items()} == dict.fromkeys(
            ("run", "odd", "other"), "damaged"
        )
        assert found["run"]["done"] == 2 and "damaged" in found["run"]["error"]
        assert "run.json is damaged" in found["other"]["error"]
        assert (await one.get(await one.run("other"), status=422))["error"]["code"] == "not_a_run"


async def test_a_run_with_nothing_in_it(tmp_path: Path) -> None:
    await asyncio.to_thread(write_run, tmp_path / "empty", [], prompts=3)
    await asyncio.to_thread(write_run, tmp_path / "failed", [failure(0, 0)], prompts=3)
    async with page(tmp_path) as one:
        for name, failed in (("empty", 0), ("failed", 1)):
            run = await one.run(name)
            said = await one.get(run)
            assert (said["done"], said["failed"], said["state"]) == (0, failed, "unfinished")
            assert said["timeline"] is None and said["solve_strip"] == []
            for path in ("rows", "groups", "failures"):
                assert (await one.get(f"{run}/{path}"))["total"] == (failed if path == "failures" else 0)
            events = [event async for event, _, _ in one.events(f"{run}/search", text="x")]
            assert events == ["progress", "done"]


async def test_a_trainers_log(tmp_path: Path) -> None:
    history = [
        {"step": 1, "reward": 0.5, "loss": 0.1},
        {"step": 1, "eval_reward": 0.4},
        {"step": 2, "reward": 0.7},
    ]
    for step in (9, 10):
        checkpoint = tmp_path / "out" / f"checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        state = {"log_history": history if step == 10 else []}
        (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    async with page(tmp_path) as one:
        source = (await one.get("/api/sources"))["sources"][0]
        said = await one.get(f"/api/training/{source['id']}")
        assert said["steps"] == [1, 2]
        assert said["series"] == {"reward": [0.5, 0.7], "loss": [0.1, None], "eval_reward": [0.4, None]}
        assert (await one.get(f"/api/training/{source['id']}/groups")) == {"total": 0, "groups": []}
        (tmp_path / "out" / "checkpoint-10" / "trainer_state.json").write_text("{")
        await one.get(f"/api/training/{source['id']}", status=404)


async def test_groups_behind_the_steps_of_a_training(tmp_path: Path) -> None:
    """A batch over two steps, one that was trained twice, and a line that a kill has cut."""
    (tmp_path / "trainer_state.json").write_text('{"log_history": []}')
    batches = [(1, 2, [5, 6]), (3, 4, [7]), (5, 6, [8]), (5, 6, [9])]
    lines = [
        json.dumps({"first": first, "step": step, "groups": [{"index": index} for index in indices]})
        for first, step, indices in batches
    ]
    torn = ['{"first": 1, "step"', "", "null", '{"first": 1, "step": 2, "groups": 3}']
    (tmp_path / "rollstream_groups.jsonl").write_text("\n".join([*lines, *torn, lines[0][:40]]))
    async with page(tmp_path) as one:
        path = f"/api/training/{(await one.get('/api/sources'))['sources'][0]['id']}/groups"
        for after, step, expected in ((0, 1, [5, 6]), (1, 3, [5, 6, 7]), (4, 6, [9]), (6, 9, [])):
            said = await one.get(path, after=after, step=step)
            assert [group["index"] for group in said["groups"]] == expected and said["total"] == len(expected)
        assert (await one.get(path, offset=1, limit=2))["groups"] == [
            {"step": 2, "index": 6},
            {"step": 4, "index": 7},
        ]
        await one.get("/api/training/none-00000000/groups", status=404)


async def test_a_training_without_a_checkpoint_and_where_its_prompts_are(
    folder: Path, tmp_path: Path
) -> None:
    groups = [
        {"index": 5, "mean": 0.5, "spread": 0.5, "scored": 2, "prompt_key": f"{3:032x}"},
        {"index": 6, "mean": 1.0, "spread": 0.0, "scored": 2, "prompt_key": "of no run"},
        {"index": 7, "mean": None, "spread": None, "scored": 0},
    ]
    (tmp_path / "rollstream_groups.jsonl").write_text(json.dumps({"first": 1, "step": 2, "groups": groups}))
    async with page(folder / "plain", tmp_path) as one:
        sources = (await one.get("/api/sources"))["sources"]
        training = next(source for source in sources if source["kind"] == "training")
        run = next(source for source in sources if source["kind"] == "run")
        said = await one.get(f"/api/training/{training['id']}")
        assert said == {"steps": [2], "series": {"groups/reward": [0.75], "groups/teach_nothing": [0.5]}}
        shown = (await one.get(f"/api/training/{training['id']}/groups", step=2))["groups"]
        assert [group.get("runs") for group in shown] == [
            [{"id": run["id"], "name": "plain", "index": 3}],
            None,
            None,
        ]


async def test_a_buffer_by_its_folder_and_its_address(tmp_path: Path) -> None:
    pytest.importorskip("uvloop")
    from rollstream.buffer.app import BufferServer
    from rollstream.buffer.client import AsyncBufferClient
    from rollstream.buffer.groups import GroupSettings
    from rollstream.buffer.service import BufferOptions

    options = BufferOptions(directory=tmp_path / "buffer", settings=GroupSettings(group_size=2))
    server = BufferServer(options, Access())
    url = await server.start("127.0.0.1", 0)
    try:
        async with AsyncBufferClient(url) as client:
            message = {"role": "user", "content": SCRIPT}
            await client.write({"instance_id": 7, "uid": "u", "messages": [message], "reward": 1.0})
        for place in (str(tmp_path / "buffer"), url):
            viewer = ViewServer([place], Access())
            async with aiohttp.ClientSession() as session:
                one = Page(await viewer.start("127.0.0.1", 0), session)
                id = (await one.get("/api/sources"))["sources"][0]["id"]
                assert (await one.get(f"/api/buffers/{id}"))["status"]["store"]["groups"]["open"] == 1
                [group] = (await one.get(f"/api/buffers/{id}/items"))["groups"]
                assert [item["messages"] for item in group["items"]] == [[message]]
                assert (await one.get(f"/api/buffers/{id}/items", state="ready"))["groups"] == []
            await viewer.stop()
    finally:
        await server.stop(0.1)


def test_the_page_needs_none_of_the_heavy_packages(folder: Path) -> None:
    code = f"""
import sys
from rollstream.view import app, reader, tokens, overview
from rollstream.store.filter import Filter, sort_rows
from rollstream.view.sources import Sources

for run in Sources([{str(folder)!r}]).all():
    columns = run.columns()
    overview.overview(columns, run.groups(columns), 0.5)
    overview.tools(columns)
    rows = Filter("reward >= 0 and data_source ~ a and finish_reason < z", columns).rows(columns).nonzero()[0]
    rows = sort_rows(columns, rows, ["-tokens", "data_source"])
    tokens.encode_tokens(reader.find_rollout(columns, 0)[0], *run.token_text)
    list(reader.search(columns, "a", rows))
print(sorted({{"torch", "transformers", "pandas", "ray", "datasets"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr


async def test_a_run_that_was_begun_anew_is_another_run(tmp_path: Path) -> None:
    root = tmp_path / "run"

    async def write(count: int, reward: float) -> None:
        async with writing(root, prompts=count) as writer:
            for index in range(count):
                await writer.commit(rollout(index, 0, reward=reward))

    await write(3, 1.0)
    async with page(root) as one:
        run = await one.run("run")
        stream = one.events(f"{run}/follow")
        assert (await anext(stream))[2]["reward_mean"] == 1.0
        shutil.rmtree(root)
        assert (await one.get(run))["done"] == 3  # what was read is there
        await write(3, 0.0)
        assert (await one.get(run))["reward_mean"] == 0.0
        async for _, _, data in stream:
            if data["done"] == 3 and data["reward_mean"] == 0.0:
                break
        await stream.aclose()


def test_a_stream_is_a_column_of_the_tokens(tmp_path: Path) -> None:
    annotated(write_run(tmp_path / "run", [rollout(0, 0, length=6)], n=1, prompts=1))

    async def ask() -> bytes:
        async with page(tmp_path) as one:
            _, data, _ = await one.raw(f"{await one.run('run')}/trajectories/0/tokens")
            return data

    header, columns = decoded(asyncio.run(ask()))
    assert "teacher_logprob" in [one["name"] for one in header["columns"]]
    assert np.isfinite(columns["teacher_logprob"][-6:]).all()


async def test_a_stream_of_the_rollouts_is_one_too(tmp_path: Path) -> None:
    """As a training keeps it; the page's table of the rest has other things to show."""
    extra = {STREAMS: {"teacher": [-0.5] * 6}, "color": "red"}
    made = [rollout(0, 0, length=6, extra=extra)]
    await asyncio.to_thread(write_run, tmp_path / "run", made, n=1, prompts=1)
    async with page(tmp_path) as one:
        run = await one.run("run")
        _, data, _ = await one.raw(f"{run}/trajectories/0/tokens")
        assert (await one.get(f"{run}/trajectories/0"))["extra"] == {"color": "red"}
    assert decoded(data)[1]["teacher_logprob"][-6:].tolist() == [-0.5] * 6


async def test_the_token_of_a_buffer_is_not_shown() -> None:
    server = ViewServer(["http://x:secret@127.0.0.1:9/"], Access())
    url = await server.start("127.0.0.1", 0)
    async with aiohttp.ClientSession() as session, session.get(f"{url}/api/sources") as answer:
        text = await answer.text()
    await server.stop()
    assert "127.0.0.1:9" in text and "secret" not in text


async def test_arguments_of_tools_are_found_as_they_are_shown(tmp_path: Path) -> None:
    call = {"function": {"name": "look", "arguments": '{"city": "Oslo \\n"}'}}
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    async with writing(tmp_path / "run", prompts=1) as writer:
        await writer.commit(rollout(0, 0, messages=said))
    async with page(tmp_path) as one:
        run = await one.run("run")
        for text, hits in (('{"City": "oslo', 1), ("look", 1), ('\\n"', 1), ('"', 1), ('"bergen"', 0)):
            *_, (event, _, data) = [each async for each in one.events(f"{run}/search", text=text)]
            assert (event, data["hits"]) == ("done", hits), text


async def test_groups_of_a_training_lead_to_its_store(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "agent", tmp_path / "out" / "rollouts")
    (tmp_path / "out" / "rollouts" / "training").mkdir()
    group = {"index": 7, "position": 2, "prompt_key": "another"}
    line = {"first": 1, "step": 1, "groups": [group, {"index": 8}]}
    (tmp_path / "out" / "rollstream_groups.jsonl").write_text(json.dumps(line) + "\n")
    async with page(tmp_path) as one:
        sources = {source["kind"]: source for source in (await one.get("/api/sources"))["sources"]}
        shown = await one.get(f"/api/training/{sources['training']['id']}/groups", step=1)
        [link] = shown["groups"][0]["runs"]
        assert link["index"] == 2 and "runs" not in shown["groups"][1]
        assert (await one.get(f"/api/runs/{link['id']}/groups/2"))["index"] == 2
