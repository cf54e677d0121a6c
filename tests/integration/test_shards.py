"""One run over several drivers: shards, resumed and merged, are the run without shards."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from rollstream.cli import main as cli
from rollstream.errors import ConfigError, IdentityMismatchError
from rollstream.generation.runner import run_generation
from rollstream.store.export.files import read_rows
from rollstream.store.validate import validate_run
from tests.integration.test_generation import PAIRS, config, write_sums


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """Without what is measured."""
    rows = list(read_rows(run_dir / "trajectories.parquet"))
    return [
        {name: value for name, value in row.items() if name not in ("metrics", "finished_at")} for row in rows
    ]


def test_shards_are_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sums = write_sums(tmp_path / "sums.jsonl", PAIRS[:7])
    # With a shuffle and a cut, positions are not indices.
    changes = {"data__shuffle": True, "data__train_max_samples": 6}
    run_generation(config(tmp_path / "whole", sums, **changes))
    roots = [tmp_path / f"shard{number}" for number in range(2)]
    for number, root in enumerate(roots):
        words = config(root, sums, generation__shard=f"{number}/2", **changes)
        result = run_generation(words)
        assert (result.total, result.completed) == (6, 6)
        # A batch goes: the shard resumes with what it owed.
        next((root / "batches").glob("*.parquet")).unlink()
        assert run_generation(words).completed == 6
        with pytest.raises(IdentityMismatchError, match=r"generation\.shard"):
            run_generation(config(root, sums, generation__shard=f"{1 - number}/2", **changes))
    assert cli(["merge", *map(str, roots), "--output", str(tmp_path / "out"), "--json"]) == 0
    assert orjson.loads(capsys.readouterr().out) == {
        "output": str(tmp_path / "out"),
        **{"shards": 2, "completed": 12, "failed": 0, "rows": 12},
    }
    assert rows_of(tmp_path / "out") == rows_of(tmp_path / "whole")
    assert validate_run(tmp_path / "out").sound
    assert cli(["generate", "--config", str(tmp_path / "out" / "config.yaml")]) == 0
    assert "nothing left to do" in capsys.readouterr().out
    assert cli(["merge", *map(str, roots), "--output", str(tmp_path / "out")]) == 2
    assert "exists" in capsys.readouterr().err


@pytest.mark.parametrize("shard", ["2/2", "-1/2", "1", "0/0", "a/b", "0/2/3"])
def test_no_shard(tmp_path: Path, shard: str) -> None:
    sums = write_sums(tmp_path / "sums.jsonl", PAIRS[:2])
    with pytest.raises(ConfigError, match="must be i/k"):
        run_generation(config(tmp_path / "run", sums, generation__shard=shard))


def test_more_shards_than_rows(tmp_path: Path) -> None:
    sums = write_sums(tmp_path / "sums.jsonl", PAIRS[:2])
    with pytest.raises(ConfigError, match="only 2 prompt rows for 3 shards"):
        run_generation(config(tmp_path / "run", sums, generation__shard="0/3"))


def test_a_run_exports_for_verl_at_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensordict")
    from rollstream.integrations.verl.dataproto import read_dataproto

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
    pytest.importorskip("tensordict")
    sums = write_sums(tmp_path / "sums.jsonl", PAIRS[:2])
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        f"    return 1.0 if extra_info['a'] == {PAIRS[0][0]} else 1 / 0\n"
    )
    words = config(
        tmp_path / "run", sums, custom_reward_function__path=str(reward), generation__export=["dataproto"]
    )
    with pytest.raises(ConfigError, match=r"is there with 4 rows, but .*2 of 4 rows have no reward"):
        run_generation(words)
    assert len(rows_of(tmp_path / "run")) == 4
    assert cli(["export", str(tmp_path / "run"), "--format", "dataproto", "--unscored", "drop"]) == 0
