"""Exports of real runs: at a run's end, by the command, with the rewards that count."""

import io
import zipfile
import zlib
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq
import pytest

from rollstream import plugins
from rollstream.cli import main as cli
from rollstream.errors import ConfigError
from rollstream.generation.run import run_generation
from rollstream.store.export.files import read_rows
from rollstream.store.export.format import file_name
from rollstream.store.summary import read_status
from tests.integration.test_generation import PAIRS, config, write_sums

pytest.importorskip("tensordict")

from rollstream.integrations.verl.dataproto import read_dataproto

REWARD = """
from zlib import crc32

def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(crc32(solution_str.encode()) % 1024)
"""


def lines(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def in_zip(path: Path, start: str) -> list[bytes]:
    with zipfile.ZipFile(path) as archive:
        return [archive.read(name) for name in archive.namelist() if name.startswith(start)]


def column(file: Any) -> list[float]:
    found: list[float] = pq.read_table(file, columns=["reward"])["reward"].to_pylist()
    return found


READERS: dict[str, Callable[[Path], list[float]]] = {
    "parquet": column,
    "jsonl": lambda path: [row["reward"] for row in lines(path)],
    "dataproto": lambda path: read_dataproto(path).batch["rm_scores"].sum(1).tolist(),
    "hf": lambda path: [one for file in path.glob("data/*.parquet") for one in column(file)],
    "zip": lambda path: column(io.BytesIO(in_zip(path, "trajectories.parquet")[0])),
    "sft": lambda path: [row["reward"] for row in lines(path)],
    "preference": lambda path: [
        row[f"score_{which}"] for row in lines(path) for which in ("chosen", "rejected")
    ],
    "atif": lambda path: [row["final_metrics"]["extra"]["reward"] for row in lines(path)],
    "inspect": lambda path: [
        orjson.loads(one)["scores"]["reward"]["value"] for one in in_zip(path, "samples/")
    ],
}
"""The rewards in an export of each format."""


def test_every_format_at_the_end_and_with_the_scores_that_are_named(tmp_path: Path) -> None:
    sums, run = write_sums(tmp_path / "sums.jsonl", PAIRS[:2]), tmp_path / "run"
    assert tuple(sorted(READERS)) == plugins.names("rollstream.exports")
    given = count()
    settings = config(
        run,
        sums,
        generation__export=[name for name in READERS if name != "parquet"],
        actor_rollout_ref__rollout__temperature=5.0,  # no two texts are the same
    )
    run_generation(settings, reward=lambda *args, **kwargs: float(next(given)))

    def check(folder: Path, wanted: list[float]) -> None:
        for name, rewards in READERS.items():
            assert sorted(rewards(folder / file_name(name))) == wanted, name

    check(run, [0.0, 1.0, 2.0, 3.0])
    assert read_status(run).stale == []
    assert len({*orjson.loads((run / "exports.json").read_bytes()).values()}) == 1

    (tmp_path / "reward.py").write_text(REWARD)
    assert cli(["score", str(run), "--reward", str(tmp_path / "reward.py"), "--name", "anew"]) == 0
    texts = [row["messages"][-1]["content"] for row in read_rows(run / "trajectories.parquet")]
    (tmp_path / "out").mkdir()
    for name in READERS:
        words = ["export", str(run), "--format", name, "--scores", "anew"]
        assert cli(words) == 2, "what is in the run directory has the run's own rewards"
        assert cli([*words, "--output", str(tmp_path / "out" / file_name(name))]) == 0
    check(tmp_path / "out", sorted(float(zlib.crc32(text.encode()) % 1024) for text in texts))


def test_a_run_exports_for_verl_at_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sums = write_sums(tmp_path / "sums.jsonl", PAIRS[:3])
    run = tmp_path / "run"
    run_generation(config(run, sums, generation__export=["dataproto"]))
    data = read_dataproto(run / "trajectories.pkl")
    assert len(data) == 6
    assert data.non_tensor_batch["raw_prompt"][0] == orjson.loads(sums.read_bytes().splitlines()[0])["prompt"]
    assert data.non_tensor_batch["level"].tolist() == [pair[0] % 3 for pair in PAIRS[:3] for _ in range(2)]
    # The tokenizer of the run says what pads: by the command line, too.
    before = (run / "trajectories.pkl").read_bytes()
    assert cli(["export", str(run), "--format", "dataproto"]) == 0
    assert f"wrote {run / 'trajectories.pkl'} (6 rows)" in capsys.readouterr().out
    assert (run / "trajectories.pkl").read_bytes() == before
    words = ["export", str(run), "--format", "dataproto", "--output", str(tmp_path / "x.pkl")]
    assert cli([*words, "--max-rows-per-file", "4", "--pad-token-id", "9", "--prompt-width", "50"]) == 0
    assert "x-00001-of-00002.pkl (6 rows)" in capsys.readouterr().out
    assert read_dataproto(tmp_path / "x-00000-of-00002.pkl").batch["prompts"][0, 0] == 9
    assert cli([*words, "--response-width", "1", "--force"]) == 2
    assert "--response-width 1 is too small" in capsys.readouterr().err


def test_rows_without_reward_stop_the_export_and_not_the_run(tmp_path: Path) -> None:
    sums = write_sums(tmp_path / "sums.jsonl", PAIRS[:2])
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        f"    return 1.0 if extra_info['a'] == {PAIRS[0][0]} else 1 / 0\n"
    )
    words = config(
        tmp_path / "run", sums, custom_reward_function__path=str(reward), generation__export=["dataproto"]
    )
    with pytest.raises(ConfigError, match=r"2 of 4 rows have no reward"):
        run_generation(words)
    assert len(list(read_rows(tmp_path / "run" / "trajectories.parquet"))) == 4
    assert cli(["export", str(tmp_path / "run"), "--format", "dataproto", "--unscored", "drop"]) == 0
