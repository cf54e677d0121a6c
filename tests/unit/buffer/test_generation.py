"""The built-in generator against a stub server and a buffer that only keeps."""

import asyncio
import math
import re
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import orjson
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from rollstream.buffer.builtin import math_generator, tool_generator
from rollstream.buffer.builtin.math_generator import as_number, compute_score, final_answer, same_answer
from rollstream.buffer.generation import EpochOrder, Plan, Progress, make_item, read_settings, run_generation
from rollstream.buffer.items import MAX_TEXT, load_item
from rollstream.chat.tokenizer import load_tokenizer
from rollstream.demo import MODEL_PATH
from rollstream.errors import ConfigError, DataError, EngineLostError
from rollstream.testing.scripted import ScriptedRequest
from rollstream.testing.stub_chat import ChatStub
from rollstream.testing.stub_faults import Faults
from rollstream.testing.stub_server import StubServer
from rollstream.testing.text_rules import answer_by_text
from rollstream.trajectory import Failure, PromptRow, Rollout, RolloutKey, Trajectory

TOKENIZER = load_tokenizer(str(MODEL_PATH))
TOOLS = Path(__file__).parents[3] / "examples" / "calculator" / "tools.yaml"


class KeepingBuffer:
    """Speaks the routes that a generator uses; items by uid, in order of arrival."""

    def __init__(self) -> None:
        self.items: dict[str, dict[str, Any]] = {}
        self.refuses: Callable[[dict[str, Any]], bool] = lambda item: False
        self.answers: list[int] = []  # statuses of the next writes, before it works
        self.seen: set[str | None] = set()
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/v1/items", self._write)
        app.router.add_post("/v1/uids/known", self._known)
        app.router.add_post("/v1/jobs/j1/expected", self._expected)
        self.expected = b""
        self._runner = web.AppRunner(app)
        self.url = ""

    async def __aenter__(self) -> "KeepingBuffer":
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _write(self, request: web.Request) -> web.Response:
        self.seen.add(request.headers.get("authorization"))
        items = [load_item(msgspec.msgpack.encode(one), "msgpack") for one in await _items(request)]
        if self.answers:
            return web.json_response({"error": {"message": "not now"}}, status=self.answers.pop(0))
        if any(self.refuses(item) for item in items):
            return web.json_response({"error": {"message": "no", "where": "items[0]"}}, status=400)
        stored = [item["uid"] not in self.items for item in items]
        for item in items:
            self.items.setdefault(item["uid"], item)
        results = ["stored" if one else "known" for one in stored]
        answer = {"stored": sum(stored), "known": len(items) - sum(stored), "results": results}
        return web.json_response(answer)

    async def _known(self, request: web.Request) -> web.Response:
        uids = orjson.loads(await request.read())["uids"]
        assert len(uids) <= 1000
        return web.json_response({"known": [uid in self.items for uid in uids]})

    async def _expected(self, request: web.Request) -> web.Response:
        self.expected = await request.read()
        return web.json_response({})


async def _items(request: web.Request) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = msgspec.msgpack.decode(await request.read())["items"]
    return items


def add(prompt: str) -> str:
    found = re.findall(r"(\d+) \+ (\d+)", prompt)
    return str(sum(int(number) for number in found[-1]))


def write_input(path: Path, rows: int, **columns: Any) -> Path:
    file = path / "input.jsonl"
    lines = [
        orjson.dumps(
            {
                "prompt": [{"role": "user", "content": f"{i} + {2 * i} ="}],
                "label": str(3 * i if i % 2 else -1),  # every other answer is wrong
                "instance_id": i if i % 3 else f"t{i}",
                "level": i,
                **columns,
            }
        )
        for i in range(rows)
    ]
    file.write_bytes(b"\n".join(lines) + b"\n")
    return file


def payload(engine: str, buffer: str, file: Path, /, **more: Any) -> dict[str, Any]:
    return {
        "remote_engine_url": engine,
        "remote_buffer_url": buffer,
        "input_file": str(file),
        "task_type": "math",
        "num_repeat_per_sample": "4",  # slime's trainer sends texts
        "num_epoch": "2",
        "num_process": "8",
        "sampling_params": {"max_tokens": "32", "temperature": 1},
        "tokenizer_path": str(MODEL_PATH),
        "rollstream": {"job": "j1", "skip_instance_ids": []},
        **more,
    }


async def generate(data: dict[str, Any], **options: Any) -> None:
    async with asyncio.timeout(60):
        await asyncio.to_thread(run_generation, data, **{"reward": compute_score, **options})


def keys(items: dict[str, dict[str, Any]]) -> Counter[tuple[Any, int, int]]:
    return Counter(
        (one["instance_id"], one["extra_info"]["epoch"], one["extra_info"]["rollout_index"])
        for one in items.values()
    )


async def test_every_repeat_of_every_epoch_is_written_once_with_its_exact_tokens(tmp_path: Path) -> None:
    file = write_input(tmp_path, 6)
    async with StubServer(answer_by_text(TOKENIZER, add)) as engine, KeepingBuffer() as buffer:
        await generate(payload(engine.url + "/v1", buffer.url, file))
        ids = ["t0", 1, 2, "t3", 4, 5]
        assert keys(buffer.items) == Counter(
            {(one, epoch, repeat): 1 for one in ids for epoch in range(2) for repeat in range(4)}
        )
        assert {'j1:"t0":0:0', "j1:1:1:3"} <= buffer.items.keys() and buffer.expected == b'{"items":48}'
        for item in buffer.items.values():
            extra, level = item["extra_info"], item["extra_info"]["level"]
            assert item["messages"][-1] == {"role": "assistant", "content": str(3 * level)}
            assert item["reward"] == float(level % 2)
            assert extra["label"] == str(3 * level if level % 2 else -1) and "instance_id" not in extra
            assert extra["finish_reason"] == "stop" and extra["round_number"] == 1
            assert TOKENIZER.decode(list(item["response_ids"])) == str(3 * level)
            assert list(item["response_mask"]) == [1] * len(item["response_ids"])
            assert len(item["response_logprobs"]) == len(item["response_ids"])
            assert all(math.isfinite(value) for value in item["response_logprobs"])
            assert item["prompt_ids"] and item["policy_version"] == 0
            assert item["job"] == "j1" and item["task_type"] == "math"


async def test_a_second_start_generates_only_what_is_missing(tmp_path: Path) -> None:
    file = write_input(tmp_path, 5)
    async with StubServer(answer_by_text(TOKENIZER, add)) as engine, KeepingBuffer() as buffer:
        data = payload(engine.url, buffer.url, file)
        await generate(data)
        asked = engine.stats.answered
        assert asked == 40
        for uid in [uid for i, uid in enumerate(buffer.items) if i % 4 == 1]:
            del buffer.items[uid]
        await generate(data)
        assert engine.stats.answered == asked + 10 and len(buffer.items) == 40
        await generate(data)
        assert engine.stats.answered == asked + 10


async def test_skips_leave_out_one_epoch_each(tmp_path: Path) -> None:
    file = write_input(tmp_path, 3)
    async with StubServer(answer_by_text(TOKENIZER, add)) as engine, KeepingBuffer() as buffer:
        own = {"job": "j1", "skip_instance_ids": ["t0", "t0", 1]}
        # Those of the payload are what the server adds for generators that know no uids.
        data = payload(engine.url, buffer.url, file, rollstream=own, skip_instance_ids=["t0", "t0", 1, 2])
        await generate(data)
        found = Counter((one, epoch) for one, epoch, _ in keys(buffer.items).elements())
        assert found == {(1, 1): 4, (2, 0): 4, (2, 1): 4}


async def test_epochs_of_an_instance_are_never_mixed(tmp_path: Path) -> None:
    file = write_input(tmp_path, 2)
    async with StubServer(answer_by_text(TOKENIZER, add)) as engine, KeepingBuffer() as buffer:
        await generate(payload(engine.url, buffer.url, file, num_epoch=5, num_process=40))
        for one in ("t0", 1):
            epochs = [e["extra_info"]["epoch"] for e in buffer.items.values() if e["instance_id"] == one]
            assert epochs == sorted(epochs) and len(epochs) == 20


async def test_a_failed_rollout_is_written_with_its_cause_and_a_reward_that_is_none(tmp_path: Path) -> None:
    file = write_input(tmp_path, 4)

    def rule(prompt: str, request: ScriptedRequest) -> str:
        if "2 + 4" in prompt:
            raise RuntimeError("no such sum")
        return add(prompt)

    with file.open("ab") as more:
        more.write(b'{"prompt": 7, "label": "1"}\n')  # a row that cannot be read
        more.write(b'{"prompt": "1 + 1 ="}\n')  # one that cannot be scored: no label
    async with StubServer(answer_by_text(TOKENIZER, rule)) as engine, KeepingBuffer() as buffer:
        await generate(payload(engine.url, buffer.url, file, max_attempts=2))
        assert len(buffer.items) == 48
        by_id: dict[Any, list[dict[str, Any]]] = {}
        for item in buffer.items.values():
            by_id.setdefault(item["instance_id"], []).append(item)
        stages = {
            one: {item["extra_info"].get("failure", {}).get("stage") for item in items}
            for one, items in by_id.items()
        }
        assert stages == {"t0": {None}, 1: {None}, 2: {"engine"}, "t3": {None}, 4: {"prompt"}, 5: {"reward"}}
        for one in (2, 4, 5):
            assert {item["reward"] for item in by_id[one]} == {-1.0}
        failure = by_id[2][0]["extra_info"]["failure"]
        assert failure["attempts"] == 2 and "no such sum" in failure["error"]
        assert by_id[5][0]["messages"][-1]["content"] == "2" and by_id[5][0]["response_ids"]


async def test_what_the_buffer_refuses_is_a_failure_and_an_absence_is_waited_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_input(tmp_path, 4)
    monkeypatch.setenv("ROLLSTREAM_BUFFER_TOKEN", "secret")
    async with StubServer(answer_by_text(TOKENIZER, add)) as engine, KeepingBuffer() as buffer:
        buffer.answers = [503, 507, 429]
        buffer.refuses = lambda item: item["instance_id"] == 1 and "failure" not in item["extra_info"]
        await generate(payload(engine.url, buffer.url, file))
        assert len(buffer.items) == 32 and buffer.seen == {"Bearer secret"}
        failed = {uid for uid, one in buffer.items.items() if "failure" in one["extra_info"]}
        assert failed == {uid for uid, one in buffer.items.items() if one["instance_id"] == 1}
        assert buffer.items["j1:1:0:0"]["extra_info"]["failure"]["stage"] == "store"


async def test_an_interrupted_generation_goes_on_where_it_was(tmp_path: Path) -> None:
    file = write_input(tmp_path, 3)
    # What a prompt has beyond this is the beginning of its answer.
    length = len(TOKENIZER.render([{"role": "user", "content": "0 + 0 ="}]))
    stub = StubServer(response_tokens=24, prompt_tokens=length, faults=Faults(abort=0.5))
    async with stub as engine, KeepingBuffer() as buffer:
        await generate(payload(engine.url, buffer.url, file, num_epoch=1))
        assert {len(one["response_ids"]) for one in buffer.items.values()} == {24}
        assert {one["extra_info"]["finish_reason"] for one in buffer.items.values()} == {"stop"}
        assert engine.stats.answered > 12  # some were answered in pieces


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sampling_params": {"max_tokens": 8, "temprature": 1}}, "did you mean 'temperature'"),
        ({"sampling_params": {"max_tokens": 8, "length_penalty": 1}}, "presence_penalty, repetition_penalty"),
        ({"sampling_params": {"max_tokens": 8, "min_p": "x"}}, "sampling_params"),
        ({"agent_name": "singel_turn_agent"}, "did you mean 'single_turn_agent'"),
        ({"agent_name": "tool_agent"}, "has no tools"),
        ({"tools": ["calculator"]}, "unknown tool 'calculator'"),
        ({"tools": ["calcu"], "rollstream": {"tools_file": str(TOOLS)}}, "did you mean 'calculator'"),
        ({"tokenizer_path": "/nowhere"}, "/nowhere"),
        ({"engine": "sglan"}, "did you mean 'sglang'"),
    ],
)
async def test_what_cannot_work_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    file = write_input(tmp_path, 1)
    async with StubServer(answer_by_text(TOKENIZER, add)) as engine, KeepingBuffer() as buffer:
        with pytest.raises(ConfigError, match=re.escape(words)):
            await generate(payload(engine.url, buffer.url, file, **change))
        assert not buffer.items and engine.stats.answered == 0


async def test_further_sampling_parameters_reach_the_engine(tmp_path: Path) -> None:
    file = write_input(tmp_path, 1)
    asked: list[ScriptedRequest] = []

    def rule(prompt: str, request: ScriptedRequest) -> str:
        asked.append(request)
        return add(prompt)

    sampling = {"max_tokens": 8, "repetition_penalty": "1.1", "min_p": 0.1}
    stub = StubServer(answer_by_text(TOKENIZER, rule))
    async with stub as engine, KeepingBuffer() as buffer:
        await generate(payload(engine.url, buffer.url, file, num_epoch=1, sampling_params=sampling))
        assert len(buffer.items) == 4
        assert all(one.sampling.extra == {"repetition_penalty": 1.1, "min_p": 0.1} for one in asked) and asked


async def test_the_tool_generator_calls_the_tools_that_are_named(tmp_path: Path) -> None:
    file = write_input(tmp_path, 2)

    def rule(prompt: str) -> str:
        if "<tool_response>" in prompt:
            return prompt.rpartition("<tool_response>")[2].partition("</tool_response>")[0].strip()
        a, b = re.findall(r"(\d+) \+ (\d+)", prompt)[-1]
        arguments = {"name": "calculator", "arguments": {"expression": f"{a} + {b}"}}
        return f"<tool_call>\n{orjson.dumps(arguments).decode()}\n</tool_call>"

    async with StubServer(answer_by_text(TOKENIZER, rule)) as engine, KeepingBuffer() as buffer:
        own = {"job": "j1", "tools_file": str(TOOLS)}
        data = payload(
            engine.url, buffer.url, file, tools=["calculator"], rollstream=own, max_assistant_turns=4
        )
        data["sampling_params"]["max_tokens"] = 256
        async with asyncio.timeout(60):
            await asyncio.to_thread(tool_generator.run_rollout, data)
        assert len(buffer.items) == 16
        for item in buffer.items.values():
            roles = [message["role"] for message in item["messages"]]
            assert roles == ["user", "assistant", "tool", "assistant"]
            assert item["messages"][-1]["content"] == str(3 * item["extra_info"]["level"])
            assert item["extra_info"]["round_number"] == 2
            assert 0 < sum(item["response_mask"]) < len(item["response_mask"])


async def test_an_engine_that_speaks_messages_gives_items_without_tokens(tmp_path: Path) -> None:
    file = write_input(tmp_path, 2)
    async with ChatStub(lambda body: add(str(body["messages"]))) as engine, KeepingBuffer() as buffer:
        await generate(payload(engine.url, buffer.url, file, num_epoch=1))
        assert len(buffer.items) == 8
        for item in buffer.items.values():
            assert item["messages"][-1]["content"] == str(3 * item["extra_info"]["level"])
            assert item["extra_info"]["token_exact"] is False and "response_ids" not in item


async def test_a_server_is_waited_for_and_one_that_stays_away_is_not(tmp_path: Path) -> None:
    file = write_input(tmp_path, 1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    async with KeepingBuffer() as buffer:
        data = payload(f"http://127.0.0.1:{port}", buffer.url, file)
        with pytest.raises(EngineLostError, match="nothing answers"):
            await generate({**data, "engine_timeout": 0.1})
        async with StubServer(answer_by_text(TOKENIZER, add)) as other:  # one of two is enough
            urls = [data["remote_engine_url"], other.url]
            await generate({**data, "remote_engine_url": urls, "num_epoch": 1})
            assert len(buffer.items) == 4
        generating = asyncio.create_task(generate(data))
        async with StubServer(answer_by_text(TOKENIZER, add), port=port):
            await generating
        assert len(buffer.items) == 8


async def test_a_buffer_that_lets_nobody_in_ends_the_job(tmp_path: Path) -> None:
    file = write_input(tmp_path, 1)
    async with StubServer(answer_by_text(TOKENIZER, add)) as engine, KeepingBuffer() as buffer:
        buffer.answers = [401] * 9
        with pytest.raises(ConfigError, match="remote_buffer_url: "):
            await generate(payload(engine.url, buffer.url, file))


async def test_a_row_that_make_row_refuses_fails_alone(tmp_path: Path) -> None:
    file = write_input(tmp_path, 3)

    def make_row(row: PromptRow) -> PromptRow:
        if row.index == 1:
            raise KeyError("no such column")
        row.messages = [{"role": "user", "content": "20 + 1 ="}]
        return row

    async with StubServer(answer_by_text(TOKENIZER, add)) as engine, KeepingBuffer() as buffer:
        await generate(payload(engine.url, buffer.url, file, num_epoch=1), make_row=make_row)
        assert len(buffer.items) == 12
        for item in buffer.items.values():
            if item["instance_id"] == 1:
                assert "no such column" in item["extra_info"]["failure"]["error"]
            else:
                assert item["messages"][-1]["content"] == "21"


async def test_an_input_file_without_labels_or_with_one_id_twice_is_refused(tmp_path: Path) -> None:
    file = write_input(tmp_path, 3, instance_id="same")
    async with StubServer(answer_by_text(TOKENIZER, add)) as engine, KeepingBuffer() as buffer:
        with pytest.raises(DataError, match="'same' is that of rows 0 and 1"):
            await generate(payload(engine.url, buffer.url, file))
        rows = [{"prompt": f"{i} + 1 =", "lable": "7"} for i in range(3)]
        file.write_bytes(b"\n".join(orjson.dumps(row) for row in rows))
        data = payload(engine.url, buffer.url, file, num_epoch=1)
        with pytest.raises(DataError, match=r"no row has a label .*lable"):
            await asyncio.to_thread(math_generator.run_rollout, data)
        assert engine.stats.requests == 0 and not buffer.items
        with pytest.raises(ConfigError, match="no reward rule knows data_source"):
            await generate(data, reward=None)


async def test_a_generator_whose_rollouts_all_fail_says_why(tmp_path: Path) -> None:
    file = write_input(tmp_path, 2)

    def broken(**_: Any) -> float:
        raise KeyError("level")

    async with StubServer(answer_by_text(TOKENIZER, add)) as engine, KeepingBuffer() as buffer:
        data = payload(engine.url, buffer.url, file, num_epoch=1)
        with pytest.raises(DataError, match=r"all 8 rollouts failed; .*stage reward: .*KeyError.*level"):
            await generate(data, reward=broken)
        assert len(buffer.items) == 8


def failed(index: int, error: str = "KeyError: 'level'\nand more") -> Failure:
    return Failure(index, 0, "k", 1, "reward", error, "", 0.0)


def test_a_bad_start_ends_with_its_first_cause_and_repeats_of_few_prompts_are_none() -> None:
    plan = Plan("j", list(range(100)), 4, 1, Counter())
    progress = Progress(plan, known=0)
    with pytest.raises(
        DataError, match=r"first 64 rollouts failed; .*instance 0, stage reward: KeyError: 'l"
    ):
        for number in range(100):
            progress.add(failed(number // 4, *(["another"] if number else [])))
    assert progress.ended == 64
    progress = Progress(plan, known=0)
    for number in range(1000):
        progress.add(failed(number % 15))
    with pytest.raises(DataError, match="all 1000 rollouts failed"):
        progress.end()
    Progress(plan, known=0).end()
    late = Progress(plan, known=1)
    late.add(failed(0))
    late.end()


IDS = st.lists(st.integers(-3, 12) | st.sampled_from(["7", "a", "ü" * 900]), unique_by=lambda i: (type(i), i))


@given(ids=IDS, repeats=st.integers(1, 4), epochs=st.integers(1, 4), data=st.data())
def test_the_plan_has_every_repeat_of_every_epoch_that_is_not_skipped_once(
    ids: list[int | str], repeats: int, epochs: int, data: st.DataObject
) -> None:
    skips = Counter(data.draw(st.lists(st.sampled_from([*ids, "other"]), max_size=8)))
    plan = Plan("j", ids, repeats, epochs, skips)
    asked: list[RolloutKey] = list(plan.keys())
    uids = [plan.uid(key.index, key.repeat) for key in asked]
    assert len(set(uids)) == len(asked) and all(len(uid) <= MAX_TEXT for uid in uids)
    found = Counter((key.index, key.repeat // repeats) for key in asked)
    assert found == {
        (row, epoch): repeats
        for row, instance_id in enumerate(ids)
        for epoch in range(min(skips[instance_id], epochs), epochs)
    }
    assert [key.repeat // repeats for key in asked] == sorted(key.repeat // repeats for key in asked)


@given(
    rows=st.integers(1, 3),
    epochs=st.integers(1, 4),
    repeats=st.integers(1, 3),
    slots=st.integers(1, 12),
    pauses=st.randoms(use_true_random=False),
)
def test_results_of_an_epoch_pass_when_the_one_before_is_written(
    rows: int, epochs: int, repeats: int, slots: int, pauses: Random
) -> None:
    written: list[Failure] = []

    class Rollouts:
        async def run(self, row: PromptRow, repeat: int) -> Failure:
            for _ in range(pauses.randrange(6)):
                await asyncio.sleep(0)
            return Failure(row.index, repeat, "k", 1, "engine", "", "", 0.0)

    async def run() -> None:
        order = EpochOrder(Rollouts(), repeats)
        keys = order.opened(Plan("j", list(range(rows)), repeats, epochs, Counter()).keys())

        async def slot() -> None:
            for key in keys:
                result = await order.run(PromptRow(key.index, "k", [], ""), key.repeat)
                await asyncio.sleep(0)
                assert isinstance(result, Failure)
                written.append(result)
                order.written(result)

        async with asyncio.timeout(10):
            await asyncio.gather(*(slot() for _ in range(slots)))

    asyncio.run(run())
    for row in range(rows):
        found = [one.repeat // repeats for one in written if one.index == row]
        assert found == sorted(found) and len(found) == epochs * repeats


STOCK: dict[str, Any] = {
    **payload("http://10.0.0.1:3000", "http://10.0.0.1:8889", Path("/data/prompts.jsonl")),
    "max_tokens": "4096",
    "max_prompt_length": 100,
}


def test_the_payload_is_a_configuration() -> None:
    rollout = read_settings({**STOCK, "prompt_key": "${oc.env:HOME}"})
    assert rollout.data.prompt_key == "${oc.env:HOME}"  # data, and nothing to look up
    assert rollout.actor_rollout_ref.rollout.n == 4 and rollout.generation.max_in_flight == 8
    sampling = {"temperature": "0.5", "top_k": 0, "stop": "\n", "min_p": "0.1"}
    read = read_settings({**STOCK, "sampling_params": sampling}).actor_rollout_ref.rollout
    assert (read.response_length, read.temperature, read.top_k) == (4096, 0.5, -1)
    assert (read.stop, read.extra_sampling) == (["\n"], {"min_p": 0.1})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_process": "many"}, "max_in_flight"),
        ({"attempt_timeout": 0}, "attempt_timeout must be above 0"),
        ({"input_file": None}, "input_file: None"),
        ({"sampling_params": "hot"}, "sampling_params: 'hot'"),
        ({"sampling_params": {"temperature": -1}}, "rollout.temperature must be at least 0"),
        ({"sampling_params": {"top_p": "nan"}}, "rollout.top_p"),
        ({"sampling_params": {"max_tokens": 1, "max_new_tokens": 1}}, "both"),
        ({"sampling_params": {"ignore_eos": 1}}, "rollout.ignore_eos"),
        ({"sampling_params": {"min_p": "inf"}}, "extra_sampling.min_p"),
        ({"max_tokens": None, "sampling_params": {}}, "max_tokens is missing"),
    ],
)
def test_a_wrong_value_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        read_settings({**STOCK, **change})


def test_names_in_errors_are_those_of_the_payload() -> None:
    with pytest.raises(ConfigError, match=r"^num_process: Expected `int`"):
        run_generation({**STOCK, "num_process": "many"})


def test_snapshots_come_along_and_what_was_not_scored_is_no_zero() -> None:
    def trajectory(reward: float | None, **more: Any) -> Trajectory:
        tokens: dict[str, Any] = {"response_ids": [3, 4, 5], "response_mask": [1, 0, 1], **more}
        return Trajectory(
            prompt_ids=[1, 2],
            response_logprobs=None,
            messages=[{"role": "assistant", "content": "a"}],
            finish_reason="stop",
            policy_versions=[(0, 6), (2, 7)],
            reward=reward,
            **tokens,
        )

    def item(*trajectories: Trajectory) -> dict[str, Any]:
        plan = Plan("j", ["x"], 4, 2, Counter())
        row = PromptRow(0, "k", [], "unknown", "gt", {"level": 2}, columns={"topic": "t"})
        return make_item(
            plan, Rollout(0, 6, "k", list(trajectories), "unknown", "gt", attempts=2), row, "math"
        )

    cut = trajectory(0.5, is_snapshot=True, response_ids=[9], response_mask=[1])
    made = item(cut, trajectory(0.5))
    assert made["uid"] == 'j:"x":1:2' and made["reward"] == 0.5
    assert made["response_ids"] == [3, 4, 5] and made["snapshots"][0]["response_ids"] == [9]
    assert made["policy_versions"] == [[0, 6], [2, 7]] and made["policy_version"] == 6
    assert (
        made["extra_info"].items()
        >= {"topic": "t", "level": 2, "label": "gt", "epoch": 1, "attempts": 2}.items()
    )
    unscored = item(trajectory(None))
    assert unscored["reward"] is None and "failure" not in unscored["extra_info"]
    broken = item(trajectory(None, reward_extra={"error": "no label"}))
    assert broken["reward"] == -1.0 and broken["response_ids"]
    assert broken["extra_info"]["failure"] == {"error": "no label", "stage": "reward", "attempts": 2}


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so it is \\boxed{42}.", "42"),
        ("\\boxed{1} no, \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{7", "7"),
        ("it costs $1,234.50 in all", "1,234.50"),
        ("Paris ", "Paris"),
        ("", ""),
    ],
)
def test_final_answers(text: str, answer: str) -> None:
    assert final_answer(text) == answer


def test_scores() -> None:
    assert compute_score("unknown", "I say 46.0", "46") == 1.0
    assert compute_score("unknown", "I say 1,000", 1000) == 1.0
    assert compute_score("unknown", "I say 45", "46") == 0.0
    assert compute_score("exact_match", "46 ", "46") == 1.0  # a rule of rollstream's
    assert same_answer("Paris", " Paris ") and not same_answer("Paris", "London")
    assert as_number("1e999999999") is None and as_number("1/0") is None
    with pytest.raises(ValueError, match="no label"):
        compute_score("unknown", "46", None)
