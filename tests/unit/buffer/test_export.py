"""Exports and evaluations of a buffer: each item once, with a run's columns, and what is missing is said."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq
import pytest

from rollstream.buffer.rollouts import rollout_item
from rollstream.buffer.store.sqlite import FILE
from rollstream.cli import main
from rollstream.store.batch import SCHEMA, build_table
from rollstream.store.records import RecordCodec
from rollstream.trajectory import Metrics, PromptRow, Rollout, Trajectory
from tests.support.buffer import BufferProcess, group, item, serve_buffer
from tests.support.until import wait_until

Capture = pytest.CaptureFixture[str]

TOKENS = {
    "prompt_ids": [1, 2],
    "response_ids": [3, 4],
    "response_mask": [1, 0],
    "response_logprobs": [-0.5, 0.0],
    "policy_version": 6,
}


KEY = "0123456789abcdef" * 2


def trajectory(answer: str, **more: Any) -> Trajectory:
    messages = [{"role": "user", "content": "6*7?"}, {"role": "assistant", "content": answer}]
    return Trajectory([1, 2], [3, 4], [1, 0], [-0.5, 0.0], messages, "length", [(0, 6), (1, 7)], **more)


ROW = PromptRow(0, KEY, [{"role": "user", "content": "6*7?"}], "sums", "42", {"level": 3})
ROLLOUT = Rollout(
    *(
        0,
        0,
        KEY,
        [trajectory("?", is_snapshot=True), trajectory("42", num_turns=2, reward=1.0)],
        "sums",
        "42",
    ),
    attempts=2,
)
ROLLOUT.final.metrics = Metrics(0.5, 1.0, engine_calls=1.0, tool_calls=3.0)
ROLLOUT.final.reward_extra = {"exact": True}


def failed(stage: str) -> dict[str, Any]:
    return {"extra_info": {"failure": {"stage": stage, "error": "it broke", "attempts": 3}}}


def items() -> list[dict[str, Any]]:
    """Groups 1 to 6: delivered, dropped, dropped, ready, open, open."""
    return [
        *group("a", (0, 1), **TOKENS, policy_versions=[[0, 6], [1, 7]]),
        *group("b", (1, 1), **TOKENS),
        *(item("c", -1, f"c{stage}", **failed(stage), **TOKENS) for stage in ("agent", "reward")),
        *(
            item("d", reward, f"d{reward}", messages=[
                {"role": "user", "content": "5-4?"}, {"role": "assistant", "content": str(reward)}
            ], extra_info={"label": "1", "data_source": "sums", "level": 3, "timestamp": "1e20"}, note={"by": "hand"})
            for reward in (0, 1)
        ),
        item("e", 1, "e", **{name: value for name, value in TOKENS.items() if name.endswith("ids")}),
        rollout_item(ROLLOUT, ROW, uid="f", instance_id="f", info={"epoch": 0}),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BufferProcess]:
    with serve_buffer(tmp_path_factory.mktemp("buffer") / "b", "--group-size", "2") as server:
        assert server.post("/v1/items", {"items": items()})[0] == 200
        lease = server.post("/v1/read", {"max_groups": 1})[1]["head"]["lease"]
        assert server.post(f"/v1/leases/{lease}/ack", {})[0] == 200
        yield server


def export(where: str, target: Path, *words: str, code: int = 0) -> list[dict[str, Any]]:
    assert main(["export", where, "--format", "jsonl", "--output", str(target), "--force", *words]) == code
    return [orjson.loads(line) for line in target.read_bytes().splitlines()]


def test_each_item_once_by_folder_and_by_url(server: BufferProcess, tmp_path: Path, capsys: Capture) -> None:
    rows = export(str(server.folder), tmp_path / "rows")
    said = capsys.readouterr().out
    assert "1 of 10 items are of rollouts that failed" in said
    assert "1 items have response_ids and no response_mask" in said
    assert rows == export(server.url, tmp_path / "rows")
    keys = [(row["index"], row["repeat"], row["trajectory"]) for row in rows]
    assert keys == [(1, 0, 0), (1, 1, 0), (2, 0, 0), (2, 1, 0), (3, 1, 0), (4, 0, 0), (4, 1, 0), (5, 0, 0),
                    (6, 0, 0), (6, 0, 1)]  # fmt: skip
    first, by_key = rows[0], dict(zip(keys, rows, strict=True))
    assert [*first] == SCHEMA.names
    assert {name: first[name] for name in TOKENS if name in first} == {
        name: value for name, value in TOKENS.items() if name in first
    }
    assert first["policy_versions"] == [{"start": 0, "version": 6}, {"start": 1, "version": 7}]
    known = {"uid": "'a'-0", "instance_id": "a", "task_type": "", "job": None}
    assert first["extra"]["buffer"] == known | {"state": "delivered", "reason": None}
    assert by_key[2, 0, 0]["extra"]["buffer"]["reason"] == "equal_rewards"
    unscored = by_key[3, 1, 0]
    assert (unscored["reward"], unscored["reward_extra"], unscored["attempts"]) == (
        None,
        {"error": "it broke"},
        3,
    )
    stranger = by_key[4, 1, 0]
    assert (stranger["data_source"], stranger["ground_truth"], stranger["reward"]) == ("sums", "1", 1.0)
    assert stranger["extra"]["note"] == {"by": "hand"} and stranger["extra"]["extra_info"]["level"] == 3
    assert by_key[5, 0, 0]["prompt_ids"] == by_key[5, 0, 0]["response_ids"] == []
    assert first["prompt_key"] == by_key[2, 0, 0]["prompt_key"] != stranger["prompt_key"]


def test_a_rollout_has_the_columns_that_its_run_would_give(server: BufferProcess, tmp_path: Path) -> None:
    rows = export(str(server.folder), tmp_path / "rows")[-2:]
    codec = RecordCodec()
    records = [codec.decode_rollout(codec.encode(ROLLOUT).body)]
    for row, wanted in zip(rows, build_table(records).to_pylist(), strict=True):
        assert row["is_snapshot"] or row["reward_extra"] == {"exact": True}
        for name in ("index", "finished_at", "messages", "reward_extra", "ground_truth", "extra"):
            del row[name], wanted[name]
        assert row == wanted


@pytest.mark.parametrize(
    "kind", ["parquet", "sft", "preference", "dataproto", "hf", "atif", "inspect", "zip"]
)
def test_every_format_that_the_items_have_columns_for(
    server: BufferProcess, tmp_path: Path, kind: str
) -> None:
    words = ["export", str(server.folder), "--format", kind, "--output", str(tmp_path / "out")]
    if kind == "dataproto":
        pytest.importorskip("tensordict")
        assert main([*words, "--state", "ready"]) == 2, "its items have no tokens"
        words += ["--state", "delivered"]
    assert main(words) == 0
    assert (tmp_path / "out").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"], "nothing is left beside it"


def test_groups_of_a_state_or_a_job_alone(server: BufferProcess, tmp_path: Path, capsys: Capture) -> None:
    where = str(server.folder)
    for state, indices in (("delivered", [1, 1]), ("dropped", [2, 2, 3]), ("ready", [4, 4])):
        assert [row["index"] for row in export(where, tmp_path / "rows", "--state", state)] == indices
    for words in (["--state", "quarantined"], ["--job", "none"]):
        assert main(["export", where, "--output", str(tmp_path / "none"), *words]) == 2
        assert not (tmp_path / "none").exists()
    capsys.readouterr()
    assert main(["export", where]) == 0
    table = pq.read_table(server.folder / "trajectories.parquet")
    assert table.schema.names == SCHEMA.names and len(table) == 10
    assert main(["export", where, "--output", str(server.folder / "mine")]) == 2
    assert main(["export", server.url]) == 2, "it has no folder of its own"
    assert main(["export", str(tmp_path / "rows"), "--state", "ready"]) == 2
    assert "which" in capsys.readouterr().err


def test_eval_counts_failed_items_and_pairs_buffers_by_prompt(
    server: BufferProcess, tmp_path: Path, capsys: Capture
) -> None:
    def judged(*words: str) -> Any:
        capsys.readouterr()
        assert main(["eval", *words, "--format", "json"]) == 0
        return orjson.loads(capsys.readouterr().out)

    for where in (str(server.folder), server.url):
        (run,) = judged(where)["runs"]
        assert run["run"] == where
        assert [run[name] for name in ("rollouts", "failed", "unscored", "scored", "n")] == [10, 1, 1, 8, 2]
    by = judged(str(server.folder), "--state", "dropped", "--by", "buffer.reason")["by"]
    assert {one["value"]: one["rollouts"] for one in by} == {"equal_rewards": 2, "failed": 2}
    export(str(server.folder), tmp_path / "rows")
    assert main(["export", server.url, "--output", str(tmp_path / "rows.parquet")]) == 0
    compared = judged(str(tmp_path / "rows.parquet"), "--no-worse-than", str(server.folder))
    assert compared["comparisons"][0]["prompts"] == 3 and compared["runs"][1]["failed"] == 0


def test_an_ended_server_a_full_archive_and_a_damaged_item(tmp_path: Path, capsys: Capture) -> None:
    with serve_buffer(tmp_path / "b", "--group-size", "2", "--archive-bytes", "0") as server:
        assert server.post("/v1/items", {"items": [*group("a"), *group("b", (0, 1))]})[0] == 200
        lease = server.post("/v1/read", {"max_groups": 1})[1]["head"]["lease"]
        assert server.post(f"/v1/leases/{lease}/ack", {})[0] == 200
        wait_until(lambda: server.get("/v1/stats")["store"]["archive_bytes"] == 0)
    rows = export(str(server.folder), tmp_path / "rows")
    assert [row["index"] for row in rows] == [2, 2, 3, 3] and "1 groups have left" in capsys.readouterr().out
    with sqlite3.connect(server.folder / FILE) as database:
        database.execute("UPDATE items SET crc = crc + 1 WHERE grp = 2 AND seq = 3")
    rows = export(str(server.folder), tmp_path / "rows", code=1)
    assert [row["index"] for row in rows] == [3, 3] and "damaged: group 2: " in capsys.readouterr().err
    assert main(["eval", str(server.folder)]) == 1
    assert "damaged: group 2: " in capsys.readouterr().err


def test_the_folder_of_a_buffer_whose_items_are_elsewhere(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "buffer.lock").touch()
    for command in ("export", "eval"):
        assert main([command, str(tmp_path)]) == 2
        assert "server's URL" in capsys.readouterr().err
