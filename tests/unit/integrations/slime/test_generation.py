"""The built-in generator against a stub server and a buffer that only keeps."""

import asyncio
import contextlib
import math
import re
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from rollstream.buffer.items import MAX_TEXT, load_item
from rollstream.buffer.rollouts import rollout_item
from rollstream.chat.tokenizer import load_tokenizer
from rollstream.demo import MODEL_PATH
from rollstream.engine.detect import DetectedServer
from rollstream.engine.launch.local import reserve_port
from rollstream.errors import ConfigError, DataError, EngineLostError
from rollstream.integrations.slime.builtin import math_generator, tool_generator
from rollstream.integrations.slime.builtin.math_generator import (
    as_number,
    compute_score,
    final_answer,
    same_answer,
)
from rollstream.integrations.slime.generation import JobPlan, read_settings, run_generation
from rollstream.integrations.slime.payload_rules import PayloadRules
from rollstream.testing.scripted import ScriptedRequest
from rollstream.testing.stub_chat import ChatStub
from rollstream.testing.stub_server import StubServer
from rollstream.testing.text_rules import answer_by_text
from rollstream.trajectory import PromptRow, Rollout, RolloutKey, Trajectory

TOKENIZER = load_tokenizer(str(MODEL_PATH))
TOOLS = Path(__file__).parents[4] / "examples" / "calculator" / "tools.yaml"


class KeepingBuffer(contextlib.AbstractAsyncContextManager["KeepingBuffer"]):
    """Speaks the routes that a generator uses; items by uid, in order of arrival."""

    def __init__(self) -> None:
        self.items: dict[str, dict[str, Any]] = {}
        self.refuses: Callable[[dict[str, Any]], bool] = lambda item: False
        self.answers: list[int] = []  # statuses of the next writes, before it works
        self.seen: set[str | None] = set()
        self.expected = b""
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/v1/items", self._write)
        app.router.add_post("/v1/uids/known", self._known)
        app.router.add_post("/v1/jobs/j1/expected", self._expected)
        self._server = TestServer(app)

    async def __aenter__(self) -> "KeepingBuffer":
        await self._server.start_server()
        self.url = str(self._server.make_url("")).rstrip("/")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.close()

    async def _write(self, request: web.Request) -> web.Response:
        self.seen.add(request.headers.get("authorization"))
        given = msgspec.msgpack.decode(await request.read())
        items = [load_item(msgspec.msgpack.encode(one), "msgpack") for one in given.get("items", [given])]
        if self.answers:
            return web.json_response({"error": {"message": "not now"}}, status=self.answers.pop(0))
        if any(self.refuses(item) for item in items):
            return web.json_response({"error": {"message": "no", "where": "items[0]"}}, status=400)
        results = ["known" if item["uid"] in self.items else "stored" for item in items]
        for item in items:
            self.items.setdefault(item["uid"], item)
        return web.json_response({"results": results})

    async def _known(self, request: web.Request) -> web.Response:
        uids = orjson.loads(await request.read())["uids"]
        assert len(uids) <= 10_000
        return web.json_response({"known": [uid in self.items for uid in uids]})

    async def _expected(self, request: web.Request) -> web.Response:
        self.expected = await request.read()
        return web.json_response({})


def add(prompt: str) -> str:
    a, b = re.findall(r"(\d+) \+ (\d+)", prompt)[-1]
    return str(int(a) + int(b))


def payload(engine: str, buffer: str, file: str, /, **more: Any) -> dict[str, Any]:
    """As slime's trainer sends it: numbers are texts."""
    return {
        **{"remote_engine_url": engine, "remote_buffer_url": buffer, "input_file": file, "task_type": "math"},
        **{"num_repeat_per_sample": "4", "num_epoch": "2", "num_process": "8"},
        "sampling_params": {"max_tokens": "32", "temperature": 1},
        "tokenizer_path": str(MODEL_PATH),
        "rollstream": {"job": "j1", "skip_instance_ids": []},
        **more,
    }


class World:
    """An input file, and a buffer. Row i asks for i + 2i; every other label is wrong."""

    def __init__(self, folder: Path, buffer: KeepingBuffer, engine: StubServer) -> None:
        self.file, self.buffer, self.engine = folder / "input.jsonl", buffer, engine
        self.items = buffer.items

    def write(self, rows: int, **columns: Any) -> None:
        self.write_rows(
            *(
                {
                    "prompt": [{"role": "user", "content": f"{i} + {2 * i} ="}],
                    "label": str(3 * i if i % 2 else -1),
                    "instance_id": i if i % 3 else f"t{i}",
                    "level": i,
                    **columns,
                }
                for i in range(rows)
            )
        )

    def write_rows(self, *rows: dict[str, Any]) -> None:
        self.file.write_bytes(b"\n".join(map(orjson.dumps, rows)))

    def payload(self, **more: Any) -> dict[str, Any]:
        return payload(self.engine.url, self.buffer.url, str(self.file), **more)

    async def run(
        self, run: Callable[..., None] = run_generation, /, data: Any = None, **options: Any
    ) -> None:
        await asyncio.to_thread(run, data or self.payload(), **options)

    async def generate(self, options: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        await self.run(data=self.payload(**more), **{"reward": compute_score, **(options or {})})

    def by_epoch(self) -> Counter[tuple[Any, int]]:
        return Counter((one["instance_id"], one["extra_info"]["epoch"]) for one in self.items.values())


@contextlib.asynccontextmanager
async def a_world(folder: Path, rule: Callable[..., str] = add) -> AsyncIterator[World]:
    async with StubServer(answer_by_text(TOKENIZER, rule)) as engine, KeepingBuffer() as buffer:
        yield World(folder, buffer, engine)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with a_world(tmp_path) as world:
        yield world


async def test_every_repeat_of_every_epoch_is_written_once_with_its_exact_tokens(world: World) -> None:
    world.write(6)
    await world.generate(remote_engine_url=world.engine.url + "/v1")
    ids = ["t0", 1, 2, "t3", 4, 5]
    assert world.by_epoch() == {(one, epoch): 4 for one in ids for epoch in range(2)}
    assert {'j1:"t0":0:0', "j1:1:1:3"} <= world.items.keys() and world.buffer.expected == b'{"items":48}'
    for item in world.items.values():
        extra, level = item["extra_info"], item["extra_info"]["level"]
        assert item["uid"].endswith(f":{extra['epoch']}:{extra['rollout_index']}")
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


async def test_a_second_start_generates_only_what_is_missing(world: World) -> None:
    world.write(5)
    await world.generate()
    assert (answered := world.engine.stats.answered) == 40
    for uid in [*world.items][1::4]:
        del world.items[uid]
    for _ in range(2):
        await world.generate()
        assert world.engine.stats.answered == answered + 10 and len(world.items) == 40


async def test_skips_leave_out_one_epoch_each_and_epochs_are_never_mixed(world: World) -> None:
    world.write(3)
    own = {"job": "j1", "skip_instance_ids": ["t0", "t0", 1]}
    # Those of the payload are what the server adds for generators that know no uids.
    await world.generate(rollstream=own, skip_instance_ids=["t0", "t0", 1, 2], num_process=40)
    assert world.by_epoch() == {(1, 1): 4, (2, 0): 4, (2, 1): 4}
    epochs = [one["extra_info"]["epoch"] for one in world.items.values() if one["instance_id"] == 2]
    assert epochs == sorted(epochs)


async def test_a_failed_rollout_is_written_with_its_cause_and_a_reward_that_is_none(tmp_path: Path) -> None:
    def rule(prompt: str, request: ScriptedRequest) -> str:
        if "2 + 4" in prompt:
            raise RuntimeError("no such sum")
        return add(prompt)

    def make_row(row: PromptRow) -> PromptRow:
        if row.index == 3:
            raise KeyError("no such column")
        return row

    async with a_world(tmp_path, rule) as world:
        world.write(4)
        with world.file.open("ab") as more:
            more.write(b'\n{"prompt": 7, "label": "1"}\n')  # a row that cannot be read
            more.write(b'{"prompt": "1 + 1 ="}\n')  # one that cannot be scored: no label
        # The buffer refuses one row's items, and is away for a while.
        world.buffer.answers = [503, 507, 429]
        world.buffer.refuses = lambda item: item["instance_id"] == 1 and "failure" not in item["extra_info"]
        await world.generate({"make_row": make_row}, max_attempts=2)
        assert len(world.items) == 48
        found = {
            (one["instance_id"], one["extra_info"].get("failure", {}).get("stage"), one["reward"])
            for one in world.items.values()
        }
        assert found == {
            *(("t0", None, 0.0), (1, "store", -1.0), (2, "engine", -1.0)),
            *(("t3", "prompt", -1.0), (4, "prompt", -1.0), (5, "reward", -1.0)),
        }
        failure = world.items["j1:2:0:0"]["extra_info"]["failure"]
        assert failure["attempts"] == 2 and "no such sum" in failure["error"]
        assert "no such column" in world.items['j1:"t3":0:0']["extra_info"]["failure"]["error"]
        unscored = world.items["j1:5:0:0"]
        assert unscored["messages"][-1]["content"] == "2" and unscored["response_ids"]


async def test_a_row_may_be_changed_before_it_is_used(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def make_row(row: PromptRow) -> PromptRow:
        row.messages = [{"role": "user", "content": "20 + 1 ="}]
        row.ground_truth = "21"
        return row

    monkeypatch.setenv("ROLLSTREAM_BUFFER_TOKEN", "secret")
    world.write_rows({"prompt": "what?"})
    await world.generate({"make_row": make_row}, num_epoch=1)
    answers = {(one["messages"][-1]["content"], one["reward"]) for one in world.items.values()}
    assert answers == {("21", 1.0)} and world.buffer.seen == {"Bearer secret"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sampling_params": {"max_tokens": 8, "temprature": 1}}, "temprature"),
        ({"sampling_params": {"max_tokens": 8, "min_p": "x"}}, "min_p"),
        ({"agent_name": "singel_turn_agent"}, "did you mean 'single_turn_agent'"),
        ({"agent_name": "tool_agent"}, "neither tools"),
        ({"tools": ["calcu"], "rollstream": {"tools_file": str(TOOLS)}}, "did you mean 'calculator'"),
        ({"tokenizer_path": "/nowhere"}, "/nowhere"),
        ({"engine": "sglan"}, "did you mean 'sglang'"),
    ],
)
async def test_what_cannot_work_is_refused_by_name(world: World, change: dict[str, Any], words: str) -> None:
    world.write(1)
    with pytest.raises(ConfigError, match=re.escape(words)):
        await world.generate(**change)
    assert not world.items and world.engine.stats.answered == 0


async def test_a_tokenizer_that_an_engine_names_is_below_the_inputs(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shutil.copytree(
        MODEL_PATH, tmp_path / "models" / "m", ignore=shutil.ignore_patterns("*.bin", "*.s*")
    )

    async def detected(urls: Sequence[str], **_: Any) -> DetectedServer:
        return DetectedServer(urls[0], [*urls], "sglang", ("m",), str(model))

    monkeypatch.setattr("rollstream.integrations.slime.generation.detect_server", detected)
    world.write(1)
    data = world.payload()
    del data["tokenizer_path"]
    for inputs, works in ((tmp_path / "prompts", False), (tmp_path / "models", True)):
        rules = PayloadRules([inputs], forbidden=tmp_path / "buffer")
        data["rollstream"] = {"job": "j1", "folders": rules.folders}
        if works:
            await world.run(data=data, reward=compute_score)
        else:
            with pytest.raises(ConfigError, match="--inputs"):
                await world.run(data=data, reward=compute_score)
        assert bool(world.items) == works


async def test_the_tool_generator_calls_the_tools_that_are_named(tmp_path: Path) -> None:
    def rule(prompt: str) -> str:
        if "<tool_response>" in prompt:
            return prompt.rpartition("<tool_response>")[2].partition("</tool_response>")[0].strip()
        arguments = {"name": "calculator", "arguments": {"expression": "7 + 8"}}
        return f"<tool_call>\n{orjson.dumps(arguments).decode()}\n</tool_call>"

    async with a_world(tmp_path, rule) as world:
        world.write(2)
        own = {"job": "j1", "tools_file": str(TOOLS)}
        data = world.payload(tools=["calculator"], rollstream=own, max_assistant_turns=4)
        data["sampling_params"]["max_tokens"] = 256
        await world.run(tool_generator.run_rollout, data)
        assert len(world.items) == 16
        for item in world.items.values():
            roles = [message["role"] for message in item["messages"]]
            assert roles == ["user", "assistant", "tool", "assistant"]
            assert item["messages"][-1]["content"] == "15"
            assert item["extra_info"]["round_number"] == 2
            assert 0 < sum(item["response_mask"]) < len(item["response_mask"])


async def test_an_engine_that_speaks_messages_gives_items_without_tokens(world: World) -> None:
    world.write(2)
    async with ChatStub(lambda body: add(str(body["messages"]))) as engine:
        await world.generate(remote_engine_url=engine.url, num_epoch=1)
    assert len(world.items) == 8
    for item in world.items.values():
        assert item["messages"][-1]["content"] == str(3 * item["extra_info"]["level"])
        assert item["extra_info"]["token_exact"] is False and "response_ids" not in item


async def test_a_server_is_waited_for_and_one_that_stays_away_is_not(world: World) -> None:
    world.write(1)
    with reserve_port("127.0.0.1") as reserved:
        port = reserved.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        with pytest.raises(EngineLostError, match="nothing answers"):
            await world.generate(remote_engine_url=url, engine_timeout=0.1)
        # One of two is enough.
        await world.generate(remote_engine_url=[url, world.engine.url], num_epoch=1)
        assert len(world.items) == 4
        generating = asyncio.create_task(world.generate(remote_engine_url=url))
        async with StubServer(answer_by_text(TOKENIZER, add), port=port):
            await generating
    assert len(world.items) == 8


async def test_a_buffer_that_lets_nobody_in_ends_the_job(world: World) -> None:
    world.write(1)
    world.buffer.answers = [401] * 9
    with pytest.raises(ConfigError, match="remote_buffer_url: "):
        await world.generate()


async def test_an_input_file_with_one_id_twice_or_of_no_known_rule_is_refused(world: World) -> None:
    world.write(3, instance_id="same")
    with pytest.raises(DataError, match="'same' is that of rows 0 and 1"):
        await world.generate()
    world.write_rows(*({"prompt": f"{i} + 1 =", "lable": "7"} for i in range(3)))
    with pytest.raises(ConfigError, match="no reward rule knows data_source"):
        await world.run()
    assert world.engine.stats.requests == 0 and not world.items
    with pytest.raises(DataError, match=r"all \d+ rollouts failed; .*the row has no label"):
        await world.run(math_generator.run_rollout)


async def test_a_generator_whose_rollouts_all_fail_says_why(world: World) -> None:
    def broken(**_: Any) -> float:
        raise KeyError("level")

    world.write(2)
    with pytest.raises(DataError, match=r"all 8 rollouts failed; .*stage reward: .*KeyError.*level"):
        await world.generate({"reward": broken}, num_epoch=1)
    assert len(world.items) == 8
    world.items.clear()
    world.write(100)
    with pytest.raises(DataError, match=r"the first \d+ rollouts failed; .*KeyError.*level"):
        await world.generate({"reward": broken}, num_epoch=9, num_process=4)
    assert 64 <= len(world.items) < 100


IDS = st.lists(st.integers(-3, 12) | st.sampled_from(["7", "a", "ü" * 900]), unique_by=lambda i: (type(i), i))


@given(ids=IDS, repeats=st.integers(1, 4), epochs=st.integers(1, 4), data=st.data())
def test_the_plan_has_every_repeat_of_every_epoch_that_is_not_skipped_once(
    ids: list[int | str], repeats: int, epochs: int, data: st.DataObject
) -> None:
    skips = Counter(data.draw(st.lists(st.sampled_from([*ids, "other"]), max_size=8)))
    plan = JobPlan("j", ids, repeats, epochs, skips)
    asked: list[RolloutKey] = list(plan.keys())
    uids = [plan.uid(key.index, key.repeat) for key in asked]
    assert len(set(uids)) == len(asked) and all(len(uid) <= MAX_TEXT for uid in uids)
    assert Counter((key.index, key.repeat // repeats) for key in asked) == {
        (row, epoch): repeats
        for row, instance_id in enumerate(ids)
        for epoch in range(min(skips[instance_id], epochs), epochs)
    }
    assert [key.repeat // repeats for key in asked] == sorted(key.repeat // repeats for key in asked)


STOCK: dict[str, Any] = {
    **payload("http://10.0.0.1:3000", "http://10.0.0.1:8889", "/data/prompts.jsonl"),
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
        ({"input_file": None}, "input_file: None"),
        ({"sampling_params": "hot"}, "sampling_params: 'hot'"),
        ({"sampling_params": {"temperature": -1}}, "rollout.temperature"),
        ({"sampling_params": {"max_tokens": 1, "max_new_tokens": 1}}, "both"),
        ({"max_tokens": None, "sampling_params": {}}, "max_tokens is missing"),
    ],
)
def test_a_wrong_value_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        read_settings({**STOCK, **change})


def test_snapshots_come_along_and_what_was_not_scored_is_no_zero() -> None:
    def trajectory(reward: float | None, ids: Sequence[int] = (3, 4, 5), **more: Any) -> Trajectory:
        said = [{"role": "assistant", "content": "a"}]
        made = Trajectory([1, 2], [*ids], [1, 0, 1][: len(ids)], None, said, "stop", **more)
        made.reward, made.policy_versions = reward, [(0, 6), (2, 7)]
        return made

    def item(*trajectories: Trajectory) -> dict[str, Any]:
        row = PromptRow(0, "k", [], "unknown", "gt", {"level": 2}, columns={"topic": "t"})
        rollout = Rollout(0, 6, "k", list(trajectories), "unknown", "gt", attempts=2)
        return rollout_item(rollout, row, uid="u", instance_id="x", info={"epoch": 1})

    title = trajectory(0.5, [8], is_snapshot=True, extra={"gateway": {"side_call": True}})
    made = item(title, trajectory(0.5, [9], is_snapshot=True), trajectory(0.5))
    assert made["uid"] == "u" and made["reward"] == 0.5
    assert made["response_ids"] == [3, 4, 5] and [one["response_ids"] for one in made["snapshots"]] == [[9]]
    assert made["policy_versions"] == [[0, 6], [2, 7]] and made["policy_version"] == 6
    about = {"topic": "t", "level": 2, "label": "gt", "epoch": 1, "attempts": 2}
    assert made["extra_info"].items() >= about.items()
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
    for source, text, label, score in (
        ("unknown", "I say 46.0", "46", 1.0),
        ("unknown", "I say 1,000", 1000, 1.0),
        ("unknown", "I say 45", "46", 0.0),
        ("exact_match", "46 ", "46", 1.0),  # a rule of rollstream's
    ):
        assert compute_score(source, text, label) == score
    assert same_answer("Paris", " Paris ") and not same_answer("Paris", "London")
    assert as_number("1e999999999") is None and as_number("1/0") is None
    with pytest.raises(ValueError, match="no label"):
        compute_score("unknown", "46", None)
