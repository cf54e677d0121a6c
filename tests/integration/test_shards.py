"""One run over several drivers: shards, resumed and merged, are the run without shards."""

from pathlib import Path

import orjson
import pytest

from rollstream.cli import main as cli
from rollstream.errors import ConfigError, IdentityMismatchError
from rollstream.generation.run import run_generation
from rollstream.store.validate import validate_run
from tests.faults.runs import check_same_rows
from tests.integration.test_generation import PAIRS, config, write_sums


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
    check_same_rows(tmp_path / "out", tmp_path / "whole")
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
