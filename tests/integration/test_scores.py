"""A run that is generated, scored anew, exported, extended and generated further: which rewards count where."""

import zipfile
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow.parquet as pq
import pytest

from rollstream.cli import main
from rollstream.generation.command import summarise
from rollstream.generation.runner import run_generation
from rollstream.store.export.files import FILE_NAMES
from rollstream.store.merge import is_current
from rollstream.store.paths import RunPaths
from rollstream.store.scores import RECORDED
from rollstream.view.sources import RunSource, Sources
from tests.integration.test_generation import PAIRS, config, write_sums

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return 100.0 * extra_info["a"] + len(solution_str)
"""


def lines(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def of_zip(path: Path) -> list[float | None]:
    with zipfile.ZipFile(path) as archive:
        return rewards_of(BytesIO(archive.read("trajectories.parquet")))


def of_inspect(path: Path) -> Iterator[float | None]:
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.startswith("samples/"):
                yield orjson.loads(archive.read(name))["scores"].get("reward", {}).get("value")


def of_dataproto(path: Path) -> Any:
    from rollstream.integrations.verl.dataproto import read_dataproto

    return read_dataproto(path).batch["rm_scores"].sum(-1).tolist()


def of_hf(path: Path) -> list[float | None]:
    return [reward for file in sorted(path.rglob("*.parquet")) for reward in rewards_of(file)]


def rewards_of(file: Any) -> list[float | None]:
    return pq.read_table(file, columns=["reward"])["reward"].to_pylist()  # type: ignore[no-any-return]


READERS: dict[str, Callable[[Path], Any]] = {
    "parquet": rewards_of,
    "jsonl": lambda path: [line["reward"] for line in lines(path)],
    "dataproto": of_dataproto,
    "hf": of_hf,
    "zip": of_zip,
    "sft": lambda path: [line["reward"] for line in lines(path)],
    "preference": lambda path: [
        line[name] for line in lines(path) for name in ("score_chosen", "score_rejected")
    ],
    "atif": lambda path: [line["final_metrics"]["extra"]["reward"] for line in lines(path)],
    "inspect": of_inspect,
}


def test_what_counts_is_the_same_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensordict")
    assert READERS.keys() == FILE_NAMES.keys(), "a new format is to be read here, too"
    rows, root, file = tmp_path / "sums.jsonl", tmp_path / "run", tmp_path / "anew.py"
    file.write_text(REWARD)
    write_sums(rows, PAIRS[:4])
    given = config(root, rows, actor_rollout_ref__rollout__temperature=3.0)
    first = run_generation(given)
    assert (first.scores, first.unscored) == (RECORDED, 8) and "count here" not in summarise(first)
    score = ["score", str(root), "--reward", str(file), "--name", "anew", "--processes", "1", "--activate"]

    def said(*words: str) -> str:
        capsys.readouterr()
        assert main([*words]) == 0
        return capsys.readouterr().out

    def check(known: int, total: int) -> None:
        """Of so many rollouts the first ones are scored."""
        texts = [
            row["messages"][-1]["content"]
            for row in map(decoded, pq.read_table(root / "trajectories.parquet").to_pylist())
        ]
        scores = [100.0 * PAIRS[at // 2][0] + len(text) for at, text in enumerate(texts)]
        wanted: list[float | None] = [*scores[:known], *[None] * (total - known)]
        for name in FILE_NAMES:
            options = ["--unscored", "drop"] if name == "dataproto" else []
            said("export", str(root), "--format", name, *options)
            found = list(READERS[name](root / FILE_NAMES[name]))
            if name in ("parquet", "jsonl", "hf", "zip", "atif"):
                assert found == wanted, name
            else:
                assert found and set(found) <= set(wanted), name
        status = orjson.loads(said("status", str(root), "--json"))
        mean = pytest.approx(np.mean(scores[:known]))
        assert (status["scores"], status["unscored"], status["stale"]) == ("anew", total - known, [])
        assert status["mean_reward"] == mean
        checkpoint = orjson.loads((root / "checkpoint.json").read_bytes())
        assert (checkpoint["mean_reward"], checkpoint["unscored"]) == (mean, total - known)
        assert is_current(RunPaths(root), checkpoint["run_id"])
        (judged,) = orjson.loads(said("eval", str(root), "--format", "json"))["runs"]
        assert judged["reward"]["mean"] == mean
        (source,) = Sources([str(root)]).all()
        assert isinstance(source, RunSource)
        shown = source.columns()["reward"]
        assert [None if np.isnan(one) else one for one in shown.tolist()] == wanted
        assert source.describe()["reward_mean"] == mean
        for at in (0, total - 1):
            one = orjson.loads(said("show", str(root), str(at // 2), str(at % 2), "--json"))
            assert one["reward"] == wanted[at]

    said(*score)
    check(8, 8)
    write_sums(rows, PAIRS[:6])
    given["generation"]["resume"] = "extend"
    more = run_generation(given)
    assert (more.scores, more.generated, more.mean_reward) == ("anew", 4, None)
    assert "the rewards of 'anew' count here" in summarise(more) and "this call (4)" in summarise(more)
    check(8, 12)
    assert "not scored by 'anew' yet" in said("status", str(root))
    said(*score)
    stale = orjson.loads(said("status", str(root), "--json"))["stale"]
    assert set(stale) == set(FILE_NAMES.values()) - {"trajectories.parquet"}
    check(12, 12)
    said("score", str(root), "--activate", RECORDED)
    assert orjson.loads(said("status", str(root), "--json"))["unscored"] == 12


def decoded(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "messages": orjson.loads(row["messages"])}
