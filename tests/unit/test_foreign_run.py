"""A run directory that somebody else made names code wherever it can: no command that reads it runs any of it."""

import asyncio
import gc
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollstream import plugins
from rollstream.cli import build_parser, main
from rollstream.untrusted import printable
from tests.support.view_runs import HOSTILE, hostile_run, rollout, write_run
from tests.unit.view.test_app import page

TRAP = "from pathlib import Path\nPath({marker!r}).write_text(__file__)\n"

MODEL_CODE = (
    "from transformers import PretrainedConfig, PreTrainedTokenizer\n"
    "class C(PretrainedConfig): model_type = 'evil'\n"
    "class Evil(PreTrainedTokenizer): pass\n"
)

MODEL = {
    "config.json": {
        "model_type": "evil",
        "auto_map": {"AutoConfig": "evil.C", "AutoTokenizer": ["evil.Evil", None]},
    },
    "tokenizer_config.json": {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}},
}

READING: dict[str, Sequence[Sequence[str]]] = {
    "status": ([], ["--failed"], ["--unscored"], ["--json"]),
    "show": ([], ["0", "1", "--tokens"]),
    "validate": ([], ["--repair"]),
    "export": [["--format", name, "--force"] for name in plugins.names("rollstream.exports")]
    + [["--format", "dataproto", "--unscored", "keep"]],
    "score": (
        [],
        ["--list"],
        ["--rules", "--processes", "1"],
        ["--reward", "mine.py", "--processes", "1"],
    ),
    "eval": ([], ["--by", "data_source"]),
    "annotate": (["--list"], ["--same"]),
    "audit": ([], ["--stream", "same"]),
    "select": (["--where", "pass_rate > 0", "--prompts", "prompts.jsonl", "--output", "next.jsonl"],),
    "merge": (["--output", "merged"],),
}
"""The commands that read a run directory, each with the ways to call it. `view` is asked over HTTP."""

OTHERS = {"generate", "init", "demo", "serve", "gateway", "buffer", "verifiers", "simulate", "weights"}
"""Commands that take no run directory to read; a `--config` names its file on the command line."""

PAGES = ("", "/rows", "/groups", "/groups/0", "/tools", "/failures", "/trajectories/0", "/search?text=boots")


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose answers have no text, so that whoever scores them wants the tokenizer."""
    monkeypatch.chdir(tmp_path)
    asked: list[dict[str, Any]] = [{"role": "user", "content": "which boots?"}]
    root = write_run(
        tmp_path / "foreign",
        [rollout(0, at, messages=asked, reward=at % 2, source="openai/gsm8k") for at in range(2)],
        n=2,
        prompts=1,
    )
    (tmp_path / "prompts.jsonl").write_bytes(orjson.dumps({"prompt": asked}))
    trap = TRAP.format(marker=str(tmp_path / "MARKER"))
    (root / "model").mkdir()
    for name, content in MODEL.items():
        (root / "model" / name).write_bytes(orjson.dumps(content))
    (root / "model" / "evil.py").write_text(trap + MODEL_CODE)
    for name in ("reward.py", "sitecustomize.py", "tools.py", "rollstream.py"):
        (root / name).write_text(trap + "def compute_score(**_): return 1.0\n")
    (tmp_path / "mine.py").write_text("def compute_score(**_): return 0.5\n")
    said = orjson.loads((root / "run.json").read_bytes())
    code = str(root / "tools.py")
    said["pad_token_id"] = None
    said["identity"]["model.tokenizer"] = "digest"
    said["config"] = {
        "actor_rollout_ref": {
            "model": {"path": str(root / "model"), "trust_remote_code": True},
            "rollout": {
                "name": "hf",
                "multi_turn": {"tool_config_path": code, "function_tool_path": code},
                "agent": {"agent_loop_config_path": code},
            },
        },
        "custom_reward_function": {"path": str(root / "reward.py"), "name": "compute_score"},
        "gateway": {"function": f"{code}:compute_score", "command": ["python", code]},
        "trainer": {"logger": ["sitecustomize"]},
    }
    (root / "run.json").write_bytes(orjson.dumps(said))
    return root


def commands() -> set[str]:
    return set(re.findall(r"^    (\w+)", build_parser().format_help(), re.MULTILINE))


def test_every_command_is_tried() -> None:
    assert commands() == {*READING, "view"} | OTHERS


@pytest.mark.parametrize("command", READING)
def test_no_command_runs_what_a_run_names(
    foreign: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in READING[command]:
        code = main([command, str(foreign), *words])
        assert not (tmp_path / "MARKER").exists(), words
        assert "Traceback" not in capsys.readouterr().err
        if command == "score" and not words:
            assert code == 2


async def test_the_page_runs_nothing_that_a_run_names(foreign: Path, tmp_path: Path) -> None:
    async with page(foreign) as one:
        run = await one.run("foreign")
        for path in PAGES:
            assert (await one.raw(run + path))[0] == 200
        tokens = (await one.raw(f"{run}/trajectories/0/tokens"))[1]
    assert b'"has_text":true' in tokens  # by the run's own tokenizer.json
    assert not (tmp_path / "MARKER").exists()


def test_answers_without_text_are_read_by_the_tokenizer_that_the_run_keeps(
    foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "def compute_score(solution_str, **_): return {'score': float(bool(solution_str)), 'text': solution_str}\n"
    )
    assert main(["score", str(foreign), "--reward", "mine.py", "--processes", "1", "--json"]) == 0
    report = orjson.loads(capsys.readouterr().out)
    assert (report["mean_reward"], report["failed"]) == (1.0, 0)
    (foreign / "tokenizer.json").unlink()
    assert main(["score", str(foreign), "--reward", "mine.py", "--name", "no", "--json"]) == 2
    assert "tokenizer.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name",
    [
        *("run.json", "checkpoint.json", "exports.json", "tokenizer.json", "run.lock"),
        *("batches/batch_000000.parquet", "batches/_SHA256SUMS", "trajectories.parquet", "failed/000000.rsj"),
    ],
)
async def test_only_regular_files_are_opened(
    foreign: Path,
    tmp_path: Path,
    name: str,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whoever opens a FIFO waits for a writer, for ever."""
    (foreign / name).parent.mkdir(exist_ok=True)
    (foreign / name).unlink(missing_ok=True)
    os.mkfifo(foreign / name)
    for words in (["status"], ["show"], ["validate"], ["eval"], ["export", "--output", "rows.jsonl"]):
        command, *more = words
        formats = ["--format", "jsonl", "--force"] if command == "export" else []
        await asyncio.to_thread(main, [command, str(foreign), *more, *formats])
        assert "Traceback" not in capsys.readouterr().err, words
    async with page(tmp_path) as one:
        (source,) = (await one.get("/api/sources"))["sources"]
        for path in (*PAGES, "/trajectories/0/tokens"):
            await one.raw(f"/api/runs/{source['id']}{path}")
    del one
    gc.collect()
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize("change", [{"x": "[" * 100_000 + "]" * 100_000}, {"n": "0"}, {"run_id": '"a\\n"'}])
async def test_a_damaged_manifest_is_one_damaged_run(
    foreign: Path, tmp_path: Path, change: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(foreign, tmp_path / "damaged")
    said = orjson.loads((foreign / "run.json").read_bytes())
    ((key, value),) = change.items()
    text = orjson.dumps({**said, key: "VALUE"}).replace(b'"VALUE"', value.encode())
    (tmp_path / "damaged" / "run.json").write_bytes(text)
    assert main(["status", str(tmp_path / "damaged")]) == 2
    assert "Traceback" not in capsys.readouterr().err
    async with page(tmp_path) as one:
        states = {run["name"]: run["state"] for run in (await one.get("/api/sources"))["sources"]}
    assert states == {"damaged": "damaged", "foreign": "finished"}


async def test_a_small_file_that_holds_very_much_is_not_read(foreign: Path, tmp_path: Path) -> None:
    (batch,) = (foreign / "batches").glob("*.parquet")
    table = pq.read_table(batch)
    at, metadata = table.schema.get_field_index("messages"), table.schema.metadata

    def say(size: int) -> None:
        text = f'[{{"role":"user","content":"{"A" * size}"}}]'
        cells = pa.array([text] * len(table), pa.string())
        changed = table.set_column(at, table.schema.field(at), cells).replace_schema_metadata(metadata)
        pq.write_table(changed, batch, compression="zstd", use_dictionary=False)

    say(20_000_000)
    async with page(foreign) as one:
        run = await one.run("foreign")
        assert len((await one.raw(run + "/trajectories/0"))[1]) < 21_000_000
        (first, second) = (await one.get(run + "/groups/0"))["rollouts"]
        sizes = [
            len(found["messages"][0]["content"]) if found["messages"] else 0 for found in (first, second)
        ]
        assert max(sizes) < 21_000_000 and min(sizes) < 20_000
    say(140_000_000)
    assert batch.stat().st_size < 100_000
    async with page(foreign) as one:
        run = await one.run("foreign")
        assert (await one.get("/api/sources"))["sources"][0]["state"] == "damaged"
        assert (await one.raw(run + "/trajectories/0"))[0] == 404
        assert (await one.raw(run + "/groups"))[0] == 200


def test_a_link_of_a_temporary_name_leads_nowhere(foreign: Path, tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("mine")
    for name in (
        "checkpoint.json.tmp",
        "exports.json.tmp",
        "trajectories.parquet.tmp",
        "scores/mine.parquet.tmp",
    ):
        (foreign / name).parent.mkdir(exist_ok=True)
        (foreign / name).symlink_to(tmp_path / "profile")
    assert main(["export", str(foreign), "--format", "jsonl"]) == 0
    score = ["score", str(foreign), "--reward", "mine.py", "--name", "mine", "--processes", "1"]
    assert main(score) == 0
    assert (tmp_path / "profile").read_text() == "mine"


def test_a_folder_that_leads_to_another_run_is_not_repaired(foreign: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    (mine / "batches").mkdir(parents=True)
    (mine / "batches" / "batch_000000.parquet").write_text("of another run")
    shutil.rmtree(foreign / "batches")
    (foreign / "batches").symlink_to(mine / "batches")
    for words in (
        ["validate", "--repair"],
        ["export", "--format", "jsonl"],
        ["score", "--reward", "mine.py"],
    ):
        assert main([words[0], str(foreign), *words[1:]]) in (1, 2)
    assert [path.name for path in (mine / "batches").iterdir()] == ["batch_000000.parquet"]


def test_what_a_terminal_would_obey_is_shown_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = hostile_run(tmp_path / "run")
    for index in range(len(HOSTILE)):
        for words in (["show", str(root), str(index), "--tokens"], ["status", str(root)]):
            assert main(words) == 0
            shown = capsys.readouterr().out
            assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", shown)
    assert r"\x1b[31mred\x1b[0m \x07" in printable(HOSTILE[1])
    assert printable("line\n\tcaf\u00e9 \U0001f600") == "line\n\tcaf\u00e9 \U0001f600"
