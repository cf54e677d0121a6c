"""Generators of a real buffer server: slime-style files as they are, the shipped ones, the example."""

import asyncio
import importlib.util
import itertools
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web

from rollstream.buffer.client import AsyncBufferClient
from rollstream.testing.stub_chat import ChatStub
from tests.support.buffer import serve_buffer
from tests.support.until import PATIENCE_S

ROOT = Path(__file__).parents[2]
STOCK = """
import json
import os
import time
import uuid
from functools import partial
from multiprocessing import Process, Queue

import requests

TASK_TYPE = "stock"
SAMPLING_PARAMS = {}


def answer(item, sampling_params):
    time.sleep(0.1)
    messages = item["prompt"] + [{"role": "assistant", "content": str(os.getpid())}]
    return {
        "uid": str(uuid.uuid4()),
        "messages": messages,
        "reward": item["repeat"] % 2,
        "instance_id": item["instance_id"],
        "extra_info": {"timestamp": str(time.time()), "finish_reason": "stop", **sampling_params},
    }


def worker_process(task_queue, done_queue, rollout_func, sampling_params):
    for item in iter(task_queue.get, "STOP"):
        done_queue.put(rollout_func(item, sampling_params))
    done_queue.put("COMPLETE")


def run_rollout(data: dict):
    print(f"Starting rollout with data: {data}")
    for key, value in data["sampling_params"].items():
        SAMPLING_PARAMS[key] = value
    tasks, done = Queue(), Queue()
    count = int(data.get("num_process", 2))
    workers = [
        Process(target=partial(worker_process, sampling_params=SAMPLING_PARAMS), args=(tasks, done, answer))
        for _ in range(count)
    ]
    for process in workers:
        process.start()
    skips = list(data.get("skip_instance_ids") or [])
    with open(data["input_file"]) as lines:
        for i, line in enumerate(lines):
            item = json.loads(line)
            item.setdefault("instance_id", i)
            if item["instance_id"] in skips:
                continue
            for repeat in range(int(data["num_repeat_per_sample"])):
                tasks.put({**item, "repeat": repeat})
    for _ in workers:
        tasks.put("STOP")
    finished = 0
    while finished < count:
        item = done.get()
        if item == "COMPLETE":
            finished += 1
            continue
        response = requests.post(data["remote_buffer_url"].rstrip("/") + "/buffer/write", json=item)
        assert response.status_code == 200, response.text


def is_valid_group(group, min_valid_group_size, task_type="stock"):
    instance_id, items = group
    finished = len(items) >= min_valid_group_size
    return finished and all(item["messages"][-1]["content"] for item in items), finished
"""


def write_generators(folder: Path, **files: str) -> Path:
    folder.mkdir()
    for name, text in files.items():
        (folder / f"{name}_generator.py").write_text(text)
    return folder


async def test_a_file_made_for_slime_runs_as_it_is(tmp_path: Path) -> None:
    pytest.importorskip("requests")
    generators = write_generators(tmp_path / "generators", stock=STOCK)
    file = tmp_path / "input.jsonl"
    rows = [{"prompt": [{"role": "user", "content": str(i)}]} for i in range(6)]
    file.write_bytes(b"\n".join(orjson.dumps(row) for row in rows))
    (tmp_path / "token").write_text("a b/c@d\n")
    options = ("--generators", str(generators), "--inputs", str(tmp_path))
    options += ("--token-file", str(tmp_path / "token"))
    with serve_buffer(tmp_path / "buffer", *options) as server:
        payload = {
            "task_type": "stock",
            "num_process": "3",
            "num_repeat_per_sample": "4",
            "input_file": str(file),
            "remote_buffer_url": "http://where.the.trainer.sees.it:8889",
            "sampling_params": {"max_tokens": 8},
            "skip_instance_ids": [2],
        }
        headers = {"authorization": aiohttp.encode_basic_auth("anybody", "a b/c@d")}
        async with aiohttp.ClientSession(server.url, headers=headers) as client, asyncio.timeout(PATIENCE_S):
            for _ in range(3):  # as the stock client does when the first answer is slow
                async with client.post("/start_rollout", json=payload) as response:
                    assert response.status == 200
                    assert (await response.json())["message"] == "Rollout started"
            found: list[dict[str, Any]] = []
            finished: list[Any] = []
            while len(finished) < 5:
                async with client.post("/get_rollout_data", json={}) as response:
                    body = await response.json()
                assert response.status == 200
                if not body["success"]:
                    assert body["message"].startswith("No data available to read")
                    await asyncio.sleep(0.05)
                    continue
                found += body["data"]["data"]
                finished += body["data"]["meta_info"]["finished_groups"]
        assert sorted(finished) == [0, 1, 3, 4, 5]
        assert Counter(item["instance_id"] for item in found) == dict.fromkeys([0, 1, 3, 4, 5], 4)
        assert {item["raw_reward"] for item in found} == {0, 1}
        assert len({item["messages"][-1]["content"] for item in found}) > 1  # of several processes


async def test_a_file_that_knows_no_uids_goes_on_without_what_is_complete(tmp_path: Path) -> None:
    pytest.importorskip("requests")
    slow = STOCK.replace("time.sleep(0.1)", "time.sleep(0.05)")
    generators = write_generators(tmp_path / "generators", stock=slow)
    file = tmp_path / "input.jsonl"
    rows = [{"prompt": [{"role": "user", "content": str(i)}], "instance_id": f"i{i}"} for i in range(24)]
    file.write_bytes(b"\n".join(orjson.dumps(row) for row in rows))
    payload = {
        "task_type": "stock",
        "num_process": 2,
        "num_repeat_per_sample": "2",
        "input_file": str(file),
        "sampling_params": {},
    }
    found: Counter[str] = Counter()

    async def read(client: AsyncBufferClient) -> None:
        async with await client.read(timeout=0.2) as lease:
            groups = lease.groups
            await lease.ack()
        found.update(str(group.instance_id) for group in groups)

    options = ("--generators", str(generators), "--inputs", str(tmp_path))
    with serve_buffer(tmp_path / "buffer", *options) as server:
        async with AsyncBufferClient(server.url) as client, asyncio.timeout(PATIENCE_S):
            await client.start_job(payload)
            while found.total() < 4:
                await read(client)
        server.kill()
    with serve_buffer(tmp_path / "buffer", *options) as server:
        async with AsyncBufferClient(server.url) as client, asyncio.timeout(PATIENCE_S):
            while (await client.stats())["job"]["state"] == "running" or found.total() < 24:
                await read(client)
            await read(client)  # there is nothing more
    assert found == {f"i{i}": 1 for i in range(24)}


async def test_the_template_for_an_agent_of_ones_own(tmp_path: Path) -> None:
    """Stopped in between and started again, it makes each rollout of each epoch once, and writes failures."""
    pytest.importorskip("openai")
    rows = [
        *({"instance_id": f"i{n}", "prompt": f"{n} + 1 =", "label": n + 1} for n in range(6)),
        {"instance_id": "bad", "prompt": "fails", "label": 0},
    ]
    (tmp_path / "prompts.jsonl").write_bytes(b"\n".join(map(orjson.dumps, rows)))
    generators = write_generators(tmp_path / "generators")
    shutil.copy(ROOT / "examples" / "buffer" / "agent_generator.py", generators)
    asked = itertools.count()

    def answer(body: dict[str, Any]) -> str:
        question = body["messages"][0]["content"]
        if question == "fails":
            raise web.HTTPBadRequest
        right = int(question.partition(" ")[0]) + 1
        return str(right if next(asked) % 2 else 99)

    options = ("--generators", str(generators), "--inputs", str(tmp_path))
    with serve_buffer(tmp_path / "buffer", *options) as server:
        async with (
            ChatStub(answer) as engine,
            AsyncBufferClient(server.url) as client,
            asyncio.timeout(PATIENCE_S),
        ):
            payload = {
                **{"task_type": "agent", "input_file": "prompts.jsonl", "remote_engine_url": engine.url},
                **{"num_repeat_per_sample": "4", "num_epoch": "2", "num_process": "3"},
                "skip_instance_ids": ["i0"],
            }
            job = (await client.start_job(payload))["id"]
            while (await client.stats())["store"]["items_of_job"] < 10:
                await asyncio.sleep(0.01)
            await client.stop_job(job)
            assert (await client.start_job(payload))["id"] == job
            while (await client.stats())["job"]["state"] == "running":
                await asyncio.sleep(0.02)
            assert (await client.stats())["job"]["state"] == "finished", await client.stats()
            groups = await client.groups(job=job)
    assert Counter(one["instance_id"] for one in groups) == {
        "i0": 1, **{f"i{n}": 2 for n in range(1, 6)}, "bad": 2,
    }  # fmt: skip
    assert all(one["n"] == 4 for one in groups)
    assert all((one["failed"] == 4) == (one["instance_id"] == "bad") for one in groups)


def test_the_template_is_the_shipped_generator() -> None:
    shipped = ROOT / "src" / "rollstream" / "integrations" / "slime" / "builtin" / "math_generator.py"
    assert (ROOT / "examples" / "buffer" / "math_generator.py").read_bytes() == shipped.read_bytes()


@pytest.mark.slow
def test_the_demo_accounts_for_every_item(tmp_path: Path) -> None:
    for name in ("openvino_genai", "reasoning_gym"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}")
    command = [sys.executable, str(ROOT / "examples" / "buffer" / "demo.py"), "--dir", str(tmp_path / "demo")]
    done = subprocess.run(
        [*command, "--prompts", "24", "--repeats", "4"], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"groups read +[1-9]", done.stdout), done.stdout
    assert "every item is accounted for" in done.stdout
