"""The base generator against a stub server and a buffer that only keeps."""

import asyncio
import math
import re
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollstream.buffer.builtin import math_generator, tool_generator
from rollstream.buffer.builtin.math_generator import compute_score
from rollstream.buffer.generation import run_generation
from rollstream.chat.tokenizer import load_tokenizer
from rollstream.demo import MODEL_PATH
from rollstream.errors import ConfigError, DataError, EngineLostError
from rollstream.testing.scripted import ScriptedRequest
from rollstream.testing.stub_chat import ChatStub
from rollstream.testing.stub_faults import Faults
from rollstream.testing.stub_server import StubServer
from rollstream.testing.text_rules import answer_by_text
from rollstream.trajectory import PromptRow
from tests.unit.buffer.generator_worlds import KeepingBuffer

TOKENIZER = load_tokenizer(str(MODEL_PATH))


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


def payload(engine: StubServer, buffer: KeepingBuffer, file: Path, **more: Any) -> dict[str, Any]:
    return {
        "remote_engine_url": engine.url + "/v1",
        "remote_buffer_url": buffer.url,
        "input_file": str(file),
        "task_type": "math",
        "num_repeat_per_sample": "4",
        "num_epoch": "2",
        "num_process": "8",
        "sampling_params": {"max_tokens": "32", "temperature": 1},
        "tokenizer_path": str(MODEL_PATH),
        "rollstream": {"rollout_id": "r1", "skip_instance_ids": []},
        **more,
    }


async def generate(data: dict[str, Any]) -> None:
    async with asyncio.timeout(60):
        await asyncio.to_thread(run_generation, data, reward=compute_score)


def keys(items: dict[str, dict[str, Any]]) -> Counter[tuple[Any, int, int]]:
    return Counter(
        (one["instance_id"], one["extra_info"]["epoch"], one["extra_info"]["rollout_index"])
        for one in items.values()
    )


async def test_every_repeat_of_every_epoch_is_written_once_with_its_exact_tokens(tmp_path: Path) -> None:
    file = write_input(tmp_path, 6)
    async with StubServer(answer_by_text(TOKENIZER, add)) as engine, KeepingBuffer() as buffer:
        await generate(payload(engine, buffer, file))
        ids = ["t0", 1, 2, "t3", 4, 5]
        assert keys(buffer.items) == Counter(
            {(one, epoch, repeat): 1 for one in ids for epoch in range(2) for repeat in range(4)}
        )
        for item in buffer.items.values():
            level = item["extra_info"]["level"]
            assert item["messages"][-1] == {"role": "assistant", "content": str(3 * level)}
            assert item["reward"] == float(level % 2)
            assert item["extra_info"]["label"] == str(3 * level if level % 2 else -1)
            assert item["extra_info"]["finish_reason"] == "stop"
            assert item["extra_info"]["round_number"] == 1
            assert TOKENIZER.decode(item["response_ids"]) == str(3 * level)
            assert item["response_mask"] == [1] * len(item["response_ids"])
            assert len(item["response_logprobs"]) == len(item["response_ids"])
            assert all(math.isfinite(value) for value in item["response_logprobs"])
            assert item["prompt_ids"] and item["policy_version"] == 0
            assert item["rollout_id"] == "r1" and item["task_type"] == "math"


async def test_a_second_start_generates_only_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollstream.buffer.generation._ASKED_AT_ONCE", 7)
    file = write_input(tmp_path, 5)
    async with StubServer(answer_by_text(TOKENIZER, add)) as engine, KeepingBuffer() as buffer:
        data = payload(engine, buffer, file)
        await generate(data)
        asked = engine.stats.answered
        assert asked == 40
        for uid in [uid for i, uid in enumerate(buffer.items) if i % 4 == 1]:
            del buffer.items[uid]
        await generate(data)
        assert engine.stats.answered == asked + 10
        assert len(buffer.items) == 40
        await generate(data)
        assert engine.stats.answered == asked + 10


async def test_skips_leave_out_one_epoch_each(tmp_path: Path) -> None:
    file = write_input(tmp_path, 3)
    async with StubServer(answer_by_text(TOKENIZER, add)) as engine, KeepingBuffer() as buffer:
        own = {"rollout_id": "r1", "skip_instance_ids": ["t0", "t0", 1]}
        # What the server adds for generators that know no uids is not looked at.
        await generate(payload(engine, buffer, file, rollstream=own, skip_instance_ids=["t0", "t0", 1, 2]))
        found = Counter((one, epoch) for one, epoch, _ in keys(buffer.items).elements())
        assert found == {(1, 1): 4, (2, 0): 4, (2, 1): 4}


async def test_groups_that_the_buffer_has_forgotten_are_not_generated_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_input(tmp_path, 3)
    own: dict[str, Any] = {"rollout_id": "r1", "skip_instance_ids": [1]}
    async with StubServer(answer_by_text(TOKENIZER, add)) as engine, KeepingBuffer() as buffer:
        data = payload(engine, buffer, file, num_epoch=3)
        await generate({**data, "rollstream": own})
        asked = engine.stats.answered
        assert asked == 32
        finished = [["t0", 2], [1, 1], [2, 1]]
        for uid, one in list(buffer.items.items()):
            epoch, repeat = one["extra_info"]["epoch"], one["extra_info"]["rollout_index"]
            if (one["instance_id"], epoch) in (("t0", 0), (1, 1), (2, 2)) or (epoch, repeat) == (1, 0):
                del buffer.items[uid]
        # All are remembered: what is not known was never written.
        left = len(buffer.items)
        missing = {("t0", 1, 0), (2, 1, 0), *((2, 2, repeat) for repeat in range(4))}
        before = set(buffer.items)
        own = {**own, "finished": finished, "remember_uids": 31}
        await generate({**data, "rollstream": own})
        made = {uid: one for uid, one in buffer.items.items() if uid not in before}
        assert keys(made) == Counter(missing) and len(buffer.items) == left + 6
        assert "--remember-uids" in caplog.text
        caplog.clear()
        await generate({**data, "rollstream": {**own, "remember_uids": 32}})
        assert len(buffer.items) == 32 and "--remember-uids" not in caplog.text


async def test_epochs_of_an_instance_are_never_mixed(tmp_path: Path) -> None:
    file = write_input(tmp_path, 1)
    async with StubServer(answer_by_text(TOKENIZER, add)) as engine, KeepingBuffer() as buffer:
        await generate(payload(engine, buffer, file, num_epoch=5, num_process=20))
        epochs = [one["extra_info"]["epoch"] for one in buffer.items.values()]
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
        await generate(payload(engine, buffer, file, num_epoch=1, max_attempts=2))
        assert len(buffer.items) == 24
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
        assert by_id[2][0]["extra_info"]["failure"]["attempts"] == 2
        assert "no such sum" in by_id[2][0]["extra_info"]["failure"]["error"]
        assert by_id[5][0]["messages"][-1]["content"] == "2" and by_id[5][0]["response_ids"]


async def test_what_the_buffer_refuses_is_written_as_a_failure_and_an_absence_is_waited_out(
    tmp_path: Path,
) -> None:
    file = write_input(tmp_path, 4)
    async with StubServer(answer_by_text(TOKENIZER, add)) as engine, KeepingBuffer() as buffer:
        buffer.answers = [503, 507, 429]
        buffer.refuses = lambda item: item["instance_id"] == 1 and "failure" not in item["extra_info"]
        url = buffer.url.replace("http://", "http://rollstream:s%2Fecret@")
        await generate(payload(engine, buffer, file, remote_buffer_url=url))
        assert len(buffer.items) == 32
        failed = {uid for uid, one in buffer.items.items() if "failure" in one["extra_info"]}
        assert failed == {uid for uid, one in buffer.items.items() if one["instance_id"] == 1}
        assert buffer.seen_tokens == {"rollstream:s/ecret"}


async def test_an_interrupted_generation_goes_on_where_it_was(tmp_path: Path) -> None:
    file = write_input(tmp_path, 3)
    # What a prompt has beyond this is the beginning of its answer.
    length = len(TOKENIZER.render([{"role": "user", "content": "0 + 0 ="}]))
    stub = StubServer(response_tokens=24, prompt_tokens=length, faults=Faults(abort=0.5))
    async with stub as engine, KeepingBuffer() as buffer:
        await generate(payload(engine, buffer, file, num_epoch=1))
        assert {len(one["response_ids"]) for one in buffer.items.values()} == {24}
        assert {one["extra_info"]["finish_reason"] for one in buffer.items.values()} == {"stop"}
        assert engine.stats.answered > 12  # some were answered in pieces


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sampling_params": {"max_tokens": 8, "temprature": 1}}, "did you mean 'temperature'"),
        ({"sampling_params": {}}, "sampling_params.max_tokens is missing"),
        ({"agent_name": "singel_turn_agent"}, "did you mean 'single_turn_agent'"),
        ({"agent_name": "tool_agent"}, "has no tools"),
        ({"num_process": "many"}, "num_process: 'many'"),
        ({"tokenizer_path": "/nowhere"}, "/nowhere"),
    ],
)
async def test_wrong_parameters_are_told_by_name(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    file = write_input(tmp_path, 1)
    async with StubServer(answer_by_text(TOKENIZER, add)) as engine, KeepingBuffer() as buffer:
        with pytest.raises(ConfigError, match=re.escape(words)):
            await generate(payload(engine, buffer, file, **change))
        assert not buffer.items


async def test_rows_that_share_an_id_are_refused(tmp_path: Path) -> None:
    file = write_input(tmp_path, 3, instance_id="same")
    async with StubServer(answer_by_text(TOKENIZER, add)) as engine, KeepingBuffer() as buffer:
        with pytest.raises(DataError, match="rows 0 and 1"):
            await generate(payload(engine, buffer, file))


async def test_the_tool_generator_calls_tools(tmp_path: Path) -> None:
    file = write_input(tmp_path, 2)
    calls: list[str] = []

    def rule(prompt: str) -> str:
        if "<tool_response>" in prompt:
            return prompt.rpartition("<tool_response>")[2].partition("</tool_response>")[0].strip()
        a, b = re.findall(r"(\d+) \+ (\d+)", prompt)[-1]
        calls.append(f"{a} + {b}")
        arguments = {"name": "calculator", "arguments": {"expression": f"{a} + {b}"}}
        return f"<tool_call>\n{orjson.dumps(arguments).decode()}\n</tool_call>"

    tools = Path(__file__).parents[3] / "examples" / "calculator" / "tools.yaml"
    async with StubServer(answer_by_text(TOKENIZER, rule)) as engine, KeepingBuffer() as buffer:
        data = payload(engine, buffer, file, tool_config_path=str(tools), max_assistant_turns=4)
        data["sampling_params"]["max_tokens"] = 256
        async with asyncio.timeout(60):
            await asyncio.to_thread(tool_generator.run_rollout, data)
        assert len(calls) == 16
        for item in buffer.items.values():
            roles = [message["role"] for message in item["messages"]]
            assert roles == ["user", "assistant", "tool", "assistant"]
            assert item["messages"][-1]["content"] == str(3 * item["extra_info"]["level"])
            assert item["extra_info"]["round_number"] == 2
            assert 0 < sum(item["response_mask"]) < len(item["response_mask"])


async def test_an_engine_that_speaks_messages_gives_items_without_tokens(tmp_path: Path) -> None:
    file = write_input(tmp_path, 2)
    stub = ChatStub(lambda body: add(str(body["messages"])))
    async with stub as engine, KeepingBuffer() as buffer:
        data = payload(StubServer(), buffer, file, num_epoch=1)
        data["remote_engine_url"] = engine.url  # which says that it is one, and what it serves
        await generate(data)
        assert len(buffer.items) == 8
        for item in buffer.items.values():
            assert item["messages"][-1]["content"] == str(3 * item["extra_info"]["level"])
            assert item["extra_info"]["token_exact"] is False and "response_ids" not in item


async def test_a_server_that_is_not_there_yet_is_waited_for_and_one_that_stays_away_is_not(
    tmp_path: Path,
) -> None:
    file = write_input(tmp_path, 1)
    engine = StubServer(answer_by_text(TOKENIZER, add))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    async with KeepingBuffer() as buffer:
        data = payload(engine, buffer, file, remote_engine_url=f"http://127.0.0.1:{port}")
        with pytest.raises(EngineLostError, match="nothing answers"):
            await generate({**data, "engine_timeout": 0.1})
        async with StubServer(answer_by_text(TOKENIZER, add)) as other:  # one of two is enough
            urls = [data["remote_engine_url"], other.url]
            await generate({**data, "remote_engine_url": urls, "num_epoch": 1})
            assert len(buffer.items) == 4
        generating = asyncio.create_task(generate(data))
        engine = StubServer(answer_by_text(TOKENIZER, add), port=port)
        async with engine:
            await generating
        assert len(buffer.items) == 8


async def test_a_buffer_that_lets_nobody_in_is_told(tmp_path: Path) -> None:
    file = write_input(tmp_path, 1)
    async with StubServer(answer_by_text(TOKENIZER, add)) as engine, KeepingBuffer() as buffer:
        buffer.answers = [401]
        with pytest.raises(ConfigError, match="remote_buffer_url: "):
            await generate(payload(engine, buffer, file))


async def test_a_row_that_its_own_function_refuses_hurts_itself_only(tmp_path: Path) -> None:
    file = write_input(tmp_path, 3)

    def make_row(row: PromptRow) -> PromptRow:
        if row.index == 1:
            raise KeyError("no such column")
        row.messages = [{"role": "user", "content": "20 + 1 ="}]
        return row

    async with StubServer(answer_by_text(TOKENIZER, add)) as engine, KeepingBuffer() as buffer:
        data = payload(engine, buffer, file, num_epoch=1)
        async with asyncio.timeout(60):
            await asyncio.to_thread(run_generation, data, reward=compute_score, make_row=make_row)
        assert len(buffer.items) == 12
        for item in buffer.items.values():
            if item["instance_id"] == 1:
                assert "no such column" in item["extra_info"]["failure"]["error"]
            else:
                assert item["messages"][-1]["content"] == "21"


async def test_a_file_without_labels_is_refused_before_anything_is_generated(tmp_path: Path) -> None:
    file = tmp_path / "input.jsonl"
    rows = [{"prompt": f"{i} + 1 =", "lable": "7", "level": 2} for i in range(3)]
    file.write_bytes(b"\n".join(orjson.dumps(row) for row in rows) + b"\n")
    async with StubServer(answer_by_text(TOKENIZER, add)) as engine, KeepingBuffer() as buffer:
        data = payload(engine, buffer, file, num_epoch=1)
        for run in (math_generator.run_rollout, tool_generator.run_rollout):
            with pytest.raises(DataError, match=r"no row has a label .*lable, level\); did you mean 'lable'"):
                await asyncio.to_thread(run, data)
        assert engine.stats.requests == 0 and buffer.items == {}
        # One row that has a label, or a rule that knows the data source, is enough; others fail alone.
        rows[2]["answer"] = "3"
        file.write_bytes(b"\n".join(orjson.dumps(row) for row in rows) + b"\n")
        async with asyncio.timeout(60):
            await asyncio.to_thread(math_generator.run_rollout, data)
        failed = {
            key[0]
            for key, item in zip(keys(buffer.items), buffer.items.values(), strict=True)
            if "failure" in item["extra_info"]
        }
        assert failed == {0, 1} and len(buffer.items) == 12


async def test_a_generator_whose_rollouts_all_fail_says_why(tmp_path: Path) -> None:
    file = write_input(tmp_path, 2)

    def broken(**_: Any) -> float:
        raise KeyError("level")

    async with StubServer(answer_by_text(TOKENIZER, add)) as engine, KeepingBuffer() as buffer:
        data = payload(engine, buffer, file, num_epoch=1)
        with pytest.raises(DataError, match=r"all 8 rollouts failed; .*stage reward: .*KeyError.*level"):
            await asyncio.to_thread(run_generation, data, reward=broken)
        assert len(buffer.items) == 8
