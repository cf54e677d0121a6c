"""`rollstream eval` on runs: what it reads, what it says, and its exit code."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from rollstream.cli import build_parser, main
from rollstream.evaluate import read_runs, samples_of
from rollstream.evaluate.metrics import SOLVED_AT, summarize
from rollstream.store.export.run import export_run
from rollstream.trajectory import Failure, Rollout
from tests.support.view_runs import agent_run, failure, rollout, write_run

Report = dict[str, Any]


def judged(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> Report:
    assert main(["eval", *map(str, words), "--format", "json"]) == code
    found: Report = orjson.loads(capsys.readouterr().out)
    return found


def some(rewards: list[list[float | None]], **more: Any) -> list[Rollout | Failure]:
    return [
        rollout(index, at, reward=one, **more)
        for index, each in enumerate(rewards)
        for at, one in enumerate(each)
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of three checkpoints on the same 12 prompts; the first two are as good, the third is better."""
    folder = tmp_path_factory.mktemp("runs")
    for name, solved in (("step-2", 4), ("step-10", 4), ("step-30", 11)):
        rewards = [[1.0, 1.0] if index < solved else [0.0, 0.0] for index in range(12)]
        write_run(folder / name, some(rewards), n=2, prompts=12)
    return folder


def test_a_run_of_agents_is_judged_as_its_records_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Snapshots, failures, a group without rewards: from the disk as from memory."""
    root = agent_run(tmp_path / "run", prompts=17)
    (read,) = read_runs([root])
    (said,) = judged(capsys, root)["runs"]
    assert (said["rollouts"], said["failed"], said["unscored"]) == (68, 4, 4) and said["total"] == 68
    assert (said["prompts"], said["passes"][-1]["k"]) == (17, 4) and said["passes"][-1]["left_out"] == 5
    assert said["tool_calls"] == sum(read.rows["tool_calls"])  # snapshots have their own
    by = judged(capsys, root, "--by", "data_source")["by"]
    assert [one["value"] for one in by] == ["agent/0", "agent/1", "agent/2"]
    for name in ("rollouts", "failed", "tool_calls"):
        assert sum(one[name] for one in by) == said[name]


@pytest.mark.parametrize("seal", [True, False])
def test_the_disk_says_what_memory_says(tmp_path: Path, seal: bool) -> None:
    records = [*some([[1.0, 0.0, None], [0.5, 0.5, 1.0]], finish="length"), failure(2, 0), failure(3, 1)]
    write_run(tmp_path / "run", records, n=3, prompts=4, seal=seal)
    (read,) = read_runs([tmp_path / "run"])
    assert summarize(read.samples) == summarize(samples_of(records)) and read.unfinished


def test_shards_are_one_run_and_an_export_has_no_failures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [*some([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]), failure(3, 0)]
    for shard in (0, 1):
        part = [one for one in records if one.index % 2 == shard]
        write_run(tmp_path / f"shard-{shard}", part, n=2, prompts=2, **{"generation.shard": f"{shard}/2"})
    whole = summarize(samples_of(records))
    both = [*read_runs([tmp_path / "shard-0", tmp_path / "shard-1", tmp_path / "shard-0"])]
    assert [summarize(one.samples) for one in both] == [whole] and both[0].total == 8
    assert [summarize(one.samples) for one in read_runs([tmp_path])] == [whole]
    file = export_run(tmp_path / "shard-1", "parquet", tmp_path / "out.parquet").files[0]
    assert main(["eval", str(file)]) == 0
    assert "does not hold the rollouts that failed" in capsys.readouterr().out
    (exported,) = read_runs([file])
    assert summarize(exported.samples) == summarize(samples_of(one for one in records if one.index == 1))


def test_by_a_column_of_the_prompt_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records: list[Rollout | Failure] = []
    for index, level in enumerate([10, 9, 9, "hard", None]):
        extra = {} if level is None else {"extra_info": {"level": level}}
        records.append(rollout(index, 0, reward=float(index), extra=extra))
    records += [failure(1, 1), failure(9, 0)]  # of level 9; of a row of which nothing else is there
    root = write_run(tmp_path / "run", records, n=2, prompts=10)
    by = judged(capsys, root, "--by", "extra_info.level")["by"]
    assert [(one["value"], one["rollouts"], one["failed"]) for one in by] == [
        ("9", 3, 1),
        ("10", 1, 0),
        ("hard", 1, 0),
        (None, 2, 1),
    ]
    by = judged(capsys, root, "--by", "index")["by"]
    assert [one["value"] for one in by] == ["0", "1", "2", "3", "4", None]
    assert main(["eval", str(root), "--by", "levle"]) == 2
    assert "no rollout has a column 'levle'" in capsys.readouterr().err


def test_checkpoints_of_a_folder_are_compared_with_the_first(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = judged(capsys, runs, "--k", 2)
    assert [Path(one["run"]).name for one in said["runs"]] == ["step-2", "step-10", "step-30"]
    assert [one["passes"][0]["pass_hat"]["mean"] for one in said["runs"]] == pytest.approx(
        [4 / 12, 4 / 12, 11 / 12]
    )
    same, better = said["comparisons"]
    assert (same["difference"]["mean"], same["tied"], same["sign_p"]) == (0.0, 12, 1.0)
    assert (better["won"], better["lost"], better["sign_p"]) == (7, 0, pytest.approx(2 / 2**7))
    assert (better["prompts"], better["permutation_p"]) == (12, pytest.approx(2 / 2**7))


@pytest.mark.parametrize("form", ["text", "md"])
def test_tables_for_people(runs: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    assert main(["eval", str(runs), "--format", form, "--by", "finish_reason"]) == 0
    printed = capsys.readouterr().out
    tables = [block.splitlines() for block in printed.split("\n\n") if block.count("\n") > 1]
    assert len(tables) == 4 and {len(table) for table in tables[:1]} == {4 if form == "text" else 5}
    for table in tables:
        if form == "md":
            assert len({line.count(" | ") for line in table}) == 1 and set(table[1]) <= set("|-: ")
    row = next(line for line in tables[0] if "step-30" in line)
    assert "0.9167 [" in row and str(runs) not in row


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("step-30", "--min-mean", "0.9"), 0, []),
        (("step-30", "step-10", "--min-mean", "0.9"), 1, ["0.3333 is below 0.9"]),
        (("step-30", "--no-worse-than", "step-2"), 0, []),
        (("step-2", "--no-worse-than", "step-10"), 0, []),
        (
            ("step-2", "step-30", "--no-worse-than", "step-30"),
            1,
            ["step-2: the mean reward changed by -0.58"],
        ),
        (("step-2", "--no-worse-than", "step-10", "--margin", "0"), 0, []),
        (("step-2", "--no-worse-than", "step-30", "--margin", "0.5"), 1, ["may have lost more than 0.5"]),
        (("step-2", "--no-worse-than", "step-30", "--margin", "1"), 0, []),
        (("step-2", "--min-mean", "0.1", "--no-worse-than", "other"), 1, ["scored in both to compare: 0"]),
        (("step-30", "empty", "--min-mean", "0.5"), 1, ["empty: nothing is scored"]),
        (("step-30", "--no-worse-than", "empty"), 1, ["scored in both to compare: 0"]),
    ],
)
def test_bounds_set_the_exit_code(
    runs: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    code: int,
    said: list[str],
) -> None:
    monkeypatch.chdir(runs)
    if "other" in words:
        write_run(runs.parent / f"{runs.name}-other", [rollout(99, 0)], n=1, prompts=1)
        words = (*words[:-1], f"../{runs.name}-other")
    if "empty" in words:
        write_run(runs.parent / f"{runs.name}-empty", [], n=2, prompts=12)
        words = tuple(f"../{runs.name}-empty" if word == "empty" else word for word in words)
    missed = judged(capsys, *words, code=code)["missed"]
    assert len(missed) == len(said) and all(text in line for text, line in zip(said, missed, strict=True))


def test_what_is_no_run_is_refused(tmp_path: Path, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "empty", [], n=1, prompts=1)
    (tmp_path / "no.parquet").write_bytes(b"PAR1 this is none")
    for words, text in (
        ([tmp_path / "nothing"], "there is no such folder"),
        ([tmp_path / "empty"], "no rollout yet"),
        ([tmp_path / "no.parquet"], "no.parquet"),
        ([runs, "--margin", "1"], "--no-worse-than"),
        ([runs, "--k", "0"], "from 1"),
        ([runs, "--no-worse-than", runs], "names one run"),
        ([runs / "step-2", "--no-worse-than", runs / "step-2" / ".." / "step-2"], "no other run"),
    ):
        assert main(["eval", *map(str, words)]) == 2
        assert text in capsys.readouterr().err
    for name, value, text in (
        ("--min-mean", "nan", "--min-mean: must be a finite number, not nan"),
        ("--missing-as", "inf", "--missing-as: must be a finite number"),
        ("--margin", "-0.1", "--margin: must be 0 or more"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["eval", str(runs), name, value])
        assert text in capsys.readouterr().err


def test_a_run_is_judged_once_by_whatever_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("step-1", "step-2"):
        write_run(tmp_path / name, some([[1.0]]), n=1, prompts=1)
    (tmp_path / "latest").symlink_to("step-2")
    said = judged(capsys, tmp_path, tmp_path / "step-2" / ".." / "step-1", tmp_path / "latest")
    assert [Path(one["run"]).name for one in said["runs"]] == ["step-1", "step-2"]


def test_runs_without_a_common_prompt_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for at in range(2):
        write_run(tmp_path / f"run-{at}", [rollout(at, 0)], n=1, prompts=1)
    assert main(["eval", str(tmp_path)]) == 0
    assert "run-1 and run-0 have no prompt in common" in capsys.readouterr().out


def test_damage_is_said_and_what_is_left_is_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_run(tmp_path / "run", some([[1.0, 0.0]] * 8), n=2, prompts=8, rows=8)
    batch = root / "batches" / "batch_000000.parquet"
    batch.write_bytes(batch.read_bytes()[:-100])
    (said,) = judged(capsys, root, code=1)["runs"]
    assert said["rollouts"] == 8 and len(said["damage"]) == 1


def test_solved_is_one_rule_and_missing_rewards_are_what_one_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["eval", "x"], ["view", "x"]):
        assert build_parser().parse_args(words).solved_at == SOLVED_AT
    root = write_run(tmp_path / "run", [*some([[0.4, None], [1.0]]), failure(1, 1)], n=2, prompts=2)
    (said,) = judged(capsys, root, "--solved-at", 0.4, "--missing-as", 0)["runs"]
    assert said["reward"]["mean"] == pytest.approx(1.4 / 4)
    assert said["passes"][1]["pass_at"]["mean"] == 1.0 and said["passes"][1]["pass_hat"]["mean"] == 0.0
