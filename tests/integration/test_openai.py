"""Engine `openai` through whole runs: with the demo model behind `rollstream serve`, and with a stub."""

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollstream.cli import main as cli
from rollstream.demo import MODEL_PATH
from rollstream.errors import ConfigError
from rollstream.generation.run import as_config, generate
from rollstream.store.manifest import read_manifest
from rollstream.store.validate import validate_run
from rollstream.testing.stub_chat import ChatFault, ChatStub
from tests.faults.runs import rows_of
from tests.integration.test_agents import FUNCTION, mean_reward, run, words
from tests.integration.test_images import TOOLS as LOOK
from tests.integration.test_images import write_rows
from tests.support.serving import Served

pytest.importorskip("openvino_genai")
KEY = "sk-very-secret-0123456789"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("openai")
    (path / "functions.py").write_text(FUNCTION)
    return path


def chat_words(served: Served, run_dir: Path, *more: str, tools: Path | None = None) -> list[str]:
    return words(
        run_dir,
        "actor_rollout_ref.rollout.name=openai",
        f"actor_rollout_ref.rollout.server_urls=[{served.url}]",
        "actor_rollout_ref.rollout.calculate_log_probs=false",
        "actor_rollout_ref.rollout.engine_kwargs={honours_seed: true}",
        *more,
        tools=tools,
    )


def check_row(row: dict[str, Any]) -> None:
    """A hosted model's: messages and lengths, and no ids."""
    assert (row["prompt_ids"], row["response_ids"], row["response_mask"]) == ([], [], [])
    assert row["response_logprobs"] is None
    extra = orjson.loads(row["extra"])
    assert extra["token_exact"] is False
    assert extra["usage"]["prompt_tokens"] > 0 and extra["usage"]["response_tokens"] > 0


def test_a_single_turn_is_as_good_as_the_engine_behind_it(
    folder: Path, served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run(chat_words(served, folder / "single"), folder)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "neither token ids nor log-probs" in done.stderr
    rows = rows_of(folder / "single")
    for row in rows:
        check_row(row)
    native = run(words(folder / "native"), folder)
    assert native.returncode == 0, native.stderr[-3000:]
    # The same seeds, prompts and weights: what is said is the same.
    exact = rows_of(folder / "native")
    said = [[orjson.loads(row["messages"])[-1]["content"] for row in each] for each in (rows, exact)]
    same = sum(one == other for one, other in zip(*said, strict=True))
    assert same > 0.9 * len(rows)
    assert abs(mean_reward(rows) - mean_reward(exact)) < 0.05
    assert validate_run(folder / "single").sound
    manifest = read_manifest(folder / "single")
    assert manifest is not None
    assert manifest.identity["engine.token_exact"] is False
    assert cli(["show", str(folder / "single"), "0", "0"]) == 0
    assert "a hosted model gives no token ids" in capsys.readouterr().out
    assert cli(["eval", str(folder / "single")]) == 0
    assert "mean" in capsys.readouterr().out


def test_tools_make_the_model_better_as_with_the_native_engine(folder: Path, served: Served) -> None:
    done = run(chat_words(served, folder / "tools", tools=folder / "functions.py"), folder)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = rows_of(folder / "tools")
    assert mean_reward(rows) > 0.85  # about 0.94 with the native engine, 0.60 without tools
    called = [row for row in rows if row["metrics"]["tool_calls"]]
    assert len(called) > 0.9 * len(rows)
    for row in called:
        check_row(row)
        roles = [message["role"] for message in orjson.loads(row["messages"])]
        assert roles[:3] == ["user", "assistant", "tool"]
    assert validate_run(folder / "tools").sound


def stub_words(stub: ChatStub, run_dir: Path, prompts: Path, **more: Any) -> list[str]:
    given = {
        "actor_rollout_ref.model.path": "stub",
        "actor_rollout_ref.model.tokenizer_path": "null",
        "actor_rollout_ref.rollout.name": "openai",
        "actor_rollout_ref.rollout.server_urls": f"[{stub.url}/v1]",
        "actor_rollout_ref.rollout.calculate_log_probs": "false",
        "actor_rollout_ref.rollout.response_length": 64,
        "data.train_files": prompts,
        "trainer.default_local_dir": run_dir,
        "generation.show_progress": "false",
        "generation.log_level": "debug",
        **more,
    }
    return [f"{key}={value}" for key, value in given.items()]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b"".join(orjson.dumps({"prompt": f"{one} + 1 ="}) + b"\n" for one in range(20)))
    return file


async def test_the_key_is_nowhere_in_a_run(
    tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("THE_KEY", KEY)
    async with ChatStub(lambda body: "two words", api_key=KEY) as stub:
        stub.faults += [
            ChatFault("status", 400, message=f"no {KEY}"),
            ChatFault("status", 500, message=f"odd {KEY}"),
            ChatFault("status", 429, "x", f"slow {KEY}", {"Retry-After": "0.2"}),
            ChatFault("error_event", message=f"odd {KEY}"),
            ChatFault("cut"),
        ]
        more = {"actor_rollout_ref.rollout.engine_kwargs": "{api_key_env: THE_KEY}"}
        result = await generate(as_config(stub_words(stub, tmp_path / "run", prompts, **more)))
    assert (result.completed, result.failed) == (19, 1)
    files = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert len(files) > 3
    for file in files:
        assert KEY.encode() not in file.read_bytes(), file
    told = capfd.readouterr()
    assert KEY not in told.out + told.err
    logs = b"".join(file.read_bytes() for file in (tmp_path / "run" / "logs").iterdir())
    assert b"THE_KEY" in logs
    assert b"429" in logs


async def test_an_outage_and_a_storm_cost_no_attempt(tmp_path: Path, prompts: Path) -> None:
    async with ChatStub(lambda body: "two words", limit=(15, 0.5), pause=0.02) as stub:

        async def go_away_for_a_while() -> None:
            while stub.answered < 5:
                await asyncio.sleep(0.005)
            await stub.stop()
            await asyncio.sleep(0.3)
            await stub.start()

        words = stub_words(stub, tmp_path / "run", prompts, **{"actor_rollout_ref.rollout.n": 3})
        async with asyncio.TaskGroup() as group:
            running = group.create_task(generate(as_config(words)))
            group.create_task(go_away_for_a_while())
    result = running.result()
    assert (result.completed, result.failed) == (60, 0)
    assert stub.refused > 0
    assert validate_run(tmp_path / "run").sound
    assert {row["metrics"]["engine_calls"] for row in rows_of(tmp_path / "run")} == {1.0}


async def test_images_of_rows_and_tools_are_sent_as_data_urls(tmp_path: Path) -> None:
    write_rows(tmp_path)
    (tmp_path / "tools.py").write_text(LOOK)

    def answer(body: dict[str, Any]) -> str | dict[str, Any]:
        if body["messages"][-1]["role"] == "tool":
            return "and that"
        call = {"function": {"name": "look", "arguments": {}}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    def sent(body: dict[str, Any]) -> list[str]:
        parts = [
            part for one in body["messages"] if isinstance(one["content"], list) for part in one["content"]
        ]
        return [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]

    more = {"actor_rollout_ref.rollout.multi_turn.function_tool_path": tmp_path / "tools.py"}
    async with ChatStub(answer) as stub:
        rows = tmp_path / "rows.jsonl"
        with pytest.raises(ConfigError, match="takes none"):
            await generate(as_config(stub_words(stub, tmp_path / "run", rows, **more)))
        more["actor_rollout_ref.rollout.engine_kwargs"] = "{takes_images: true}"
        result = await generate(as_config(stub_words(stub, tmp_path / "run", rows, **more)))
    assert (result.completed, result.failed) == (3, 0)
    # Rows with one, two and no image; the tool returns one more.
    assert sorted(len(sent(body)) for body in stub.requests) == [0, 1, 1, 2, 2, 3]
    assert all(url.startswith("data:image/png;base64,") for body in stub.requests for url in sent(body))


async def test_a_run_is_resumed_and_read(
    tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    more = {"actor_rollout_ref.rollout.max_model_len": 5000}
    async with ChatStub(lambda body: "two words") as stub:
        words = stub_words(stub, run_dir, prompts, **more)
        stub.faults += [None] * 5 + [ChatFault("status", 400)] * 15
        result = await generate(as_config(words))
        assert (result.completed, result.failed) == (5, 15)
        result = await generate(as_config([*words, "generation.retry_failed=true"]))  # resumed
        assert (result.completed, result.failed) == (20, 0)
    rows = rows_of(run_dir)
    assert len(rows) == 20
    for row in rows:
        check_row(row)
        assert orjson.loads(row["messages"])[-1] == {"role": "assistant", "content": "two words"}
        assert orjson.loads(row["extra"])["usage"] == {"prompt_tokens": 10, "response_tokens": 5}
    assert validate_run(run_dir).sound
    assert cli(["status", str(run_dir)]) == 0
    assert cli(["export", str(run_dir), "--format", "jsonl", "--output", str(tmp_path / "rows.jsonl")]) == 0
    capsys.readouterr()
    assert cli(["show", str(run_dir), "--tokens"]) == 0
    shown = capsys.readouterr().out
    assert "a hosted model gives no token ids" in shown
    assert "10 prompt tokens, 5 response tokens, as the endpoint counts them" in shown
    assert cli(["export", str(run_dir), "--format", "dataproto"]) != 0
    assert "without token ids" in capsys.readouterr().err


async def test_rows_that_name_a_built_in_loop_are_chat_agents(tmp_path: Path, folder: Path) -> None:
    call = {"function": {"name": "calculator", "arguments": {"expression": "1 + 1"}}}

    def answer(body: dict[str, Any]) -> str | dict[str, Any]:
        if body["messages"][-1]["role"] == "tool":
            return str(body["messages"][-1]["content"])
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    names = ("single_turn_agent", "tool_agent", "chat_agent", None)
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "1 + 1 =", **({"agent_name": name} if name else {})} for name in names]
    prompts.write_bytes(b"\n".join(map(orjson.dumps, rows)))
    more = {"actor_rollout_ref.rollout.multi_turn.function_tool_path": folder / "functions.py"}
    async with ChatStub(answer) as stub:
        result = await generate(as_config(stub_words(stub, tmp_path / "run", prompts, **more)))
    assert (result.completed, result.failed) == (4, 0)
    for row in rows_of(tmp_path / "run"):
        roles = [message["role"] for message in orjson.loads(row["messages"])]
        assert roles == ["user", "assistant", "tool", "assistant"]
        assert orjson.loads(row["messages"])[-1]["content"] == "2"
    assert validate_run(tmp_path / "run").sound


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"actor_rollout_ref.rollout.calculate_log_probs": "true"}, "calculate_log_probs=false"),
        ({"actor_rollout_ref.rollout.top_k": 5}, "top_k"),
        ({"actor_rollout_ref.rollout.ignore_eos": "true"}, "ignore_eos"),
        ({"actor_rollout_ref.rollout.stop_token_ids": "[3]"}, "stop_token_ids"),
        ({"generation.seed": 1}, "honours_seed"),
        ({"data.truncation": "left"}, "data.truncation=left: engine 'openai' is sent messages"),
        ({"data.filter_overlong_prompts": "true"}, "filter_overlong_prompts: engine"),
        ({"data.apply_chat_template_kwargs": "{a: 1}"}, "template_kwargs: engine"),
        ({"actor_rollout_ref.model.tokenizer_path": MODEL_PATH}, "tokenizer_path: engine"),
        ({"actor_rollout_ref.rollout.multi_turn.show_tools": "false"}, "show_tools=false: engine"),
        ({"generation.export": "[dataproto]"}, "dataproto needs token ids"),
        *(
            ({"actor_rollout_ref.rollout.agent.default_agent_loop": name, "gateway.command": "[x]"}, said)
            for name in ("context_agent", "command_agent")
            for said in [f"agent loop '{name}' works with token ids, and a hosted model has none: chat_agent"]
        ),
        ({"actor_rollout_ref.rollout.server_urls": "[]"}, "server_urls"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_what_cannot_be_had_is_an_error_at_start(
    tmp_path: Path, prompts: Path, more: dict[str, Any], said: str
) -> None:
    async with ChatStub(lambda body: "x") as stub:
        with pytest.raises(ConfigError, match=said):
            await generate(as_config(stub_words(stub, tmp_path / "run", prompts, **more)))
    assert not stub.requests
