"""Hugging Face datasets: `datasets` reads back what the artifact holds, and nothing foreign is deleted."""

import socket
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollstream.errors import ConfigError
from rollstream.integrations.exports.hf import export_hf
from rollstream.store.export.files import read_rows
from rollstream.store.export.run import export_run
from rollstream.store.manifest import new_manifest
from rollstream.store.merge import MergeCancelledError
from rollstream.trajectory import Rollout
from tests.unit.store.export.artifacts import rollouts, runs, trajectory, write_artifact
from tests.unit.store.fabric import commit_all

datasets = pytest.importorskip("datasets")

MANIFEST = new_manifest(
    n=2,
    identity={
        "engine": "openvino",
        "rollout.temperature": 0.7,
        "data.prompt_key": "p",
        "rollout.stop": ["|"],
    },
    dataset={},
    versions={"rollstream": "0.1"},
    config={"path": "/private"},
)


def load(folder: Path) -> list[dict[str, Any]]:
    cache = str(folder.parent / "cache")
    return list(datasets.load_dataset(str(folder), split="train", cache_dir=cache))


def wanted(artifact: Path) -> list[dict[str, Any]]:
    rows = list(read_rows(artifact))
    keys = list(dict.fromkeys(key for row in rows for message in row["messages"] for key in message))
    for row in rows:
        row["messages"] = [{key: message.get(key) for key in keys} for message in row["messages"]]
        for name in ("extra", "reward_extra"):
            row[name] = orjson.dumps(row[name]).decode()
    return rows


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(run=runs(), per_file=st.integers(1, 9))
def test_it_is_the_artifact(tmp_path: Path, run: list[Rollout], per_file: int) -> None:
    artifact = write_artifact(tmp_path / "a.parquet", run)
    assert export_hf(artifact, tmp_path / "out", MANIFEST, rows_per_file=per_file) == len(run)
    files = -(-len(run) // per_file)
    names = [path.name for path in sorted((tmp_path / "out" / "data").iterdir())]
    assert names == [f"train-{number:05}-of-{files:05}.parquet" for number in range(files)]
    tables = [pq.read_table(tmp_path / "out" / "data" / name) for name in names]
    assert [len(table) for table in tables[:-1]] == [per_file] * (files - 1)
    assert pa.concat_tables(tables).to_pylist() == wanted(artifact)


def test_datasets_reads_it(tmp_path: Path) -> None:
    run = rollouts(*(trajectory([at], reward=at / 3, few_shot=at % 2) for at in range(5)))
    artifact = write_artifact(tmp_path / "a.parquet", run)
    export_hf(artifact, tmp_path / "out", MANIFEST, rows_per_file=2)
    assert load(tmp_path / "out") == wanted(artifact)


def test_what_has_no_one_type_is_json_and_the_card_says_so(tmp_path: Path) -> None:
    one, two = rollouts(trajectory(reward=1.0), trajectory(reward=None))
    two.ground_truth = {"answer": 2}
    two.final.messages[-1]["tool_calls"] = [{"function": {"name": "f", "arguments": {"a": 1}}}]
    two.final.messages[0]["content"] = None
    artifact = write_artifact(tmp_path / "a.parquet", [one, two])
    export_hf(artifact, tmp_path / "out", MANIFEST)
    rows = load(tmp_path / "out")
    assert [orjson.loads(row["ground_truth"]) for row in rows] == ["0", {"answer": 2}]
    calls = rows[1]["messages"][-1]["tool_calls"]
    assert orjson.loads(calls) == two.final.messages[-1]["tool_calls"]
    assert rows[0]["messages"][-1]["tool_calls"] is None
    assert rows[1]["messages"][0] == {"role": "system", "content": None, "tool_calls": None}
    card = (tmp_path / "out" / "README.md").read_text()
    assert "(`tool_calls` as JSON text)" in card
    assert "| `ground_truth` | JSON text |" in card
    assert "| mean reward | 1.0000 (1 scored) |" in card
    assert "| rows (trajectories) | 2 |" in card
    assert '| rollout.stop | `["&#124;"]` |' in card
    assert "/private" not in card
    assert card.startswith("---\nconfigs:\n")


def test_only_an_earlier_export_is_replaced(tmp_path: Path) -> None:
    artifact = write_artifact(tmp_path / "a.parquet", rollouts(*(trajectory() for _ in range(4))))
    out = tmp_path / "out"
    export_hf(artifact, out, MANIFEST, rows_per_file=1)
    export_hf(artifact, out, MANIFEST)
    assert len(load(out)) == 4
    (out / "notes.txt").write_text("mine")
    before = sorted(out.rglob("*"))
    with pytest.raises(ConfigError, match=r"something else than an export \(notes\.txt\)"):
        export_hf(artifact, out, MANIFEST)
    with pytest.raises(ConfigError, match="is no folder"):
        export_hf(artifact, artifact, MANIFEST)
    (out / "notes.txt").rename(tmp_path / "notes.txt")
    with pytest.raises(MergeCancelledError):
        export_hf(artifact, out, MANIFEST, lambda: True)
    assert sorted([*out.rglob("*"), out / "notes.txt"]) == before
    assert not list(tmp_path.glob(".*"))


async def test_a_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    await commit_all(run, rollouts(*(trajectory() for _ in range(4))))
    with pytest.raises(ConfigError, match="something else"):
        export_run(run, "hf", tmp_path, force=True)
    (run / "checkpoint.json").write_text('{"total": 4}')
    done = export_run(run, "hf")
    assert (done.files, done.rows) == ([run / "trajectories_hf"], 4)
    assert export_run(run, "hf").rows == 4
    assert export_run(run, "hf", tmp_path / "out").rows == 4
    with pytest.raises(ConfigError, match="out exists; --force"):
        export_run(run, "hf", tmp_path / "out")
    assert export_run(run, "hf", tmp_path / "out", force=True).rows == 4
    assert len(load(tmp_path / "out")) == 4


def test_nothing_is_fetched_to_write_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    artifact = write_artifact(tmp_path / "a.parquet", rollouts(trajectory()))
    assert export_hf(artifact, tmp_path / "out", MANIFEST) == 1
