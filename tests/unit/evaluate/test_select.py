"""`rollstream select`: which prompt rows it takes, how it leaves them, and what it refuses."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollstream.cli import main
from rollstream.config.load import compose, to_settings
from rollstream.data.prompts import load_prompts
from rollstream.trajectory import Failure
from tests.support.view_runs import failure, rollout, write_run

ROWS: list[dict[str, Any]] = [
    {
        "prompt": f"{word}: how many letters has the word after this one, please?",
        "answer": n,
        "level": {"n": n},
    }
    for n, word in enumerate(("zero", "one", "two", "three", "four", "five"))
]
REWARDS: list[list[float | None]] = [[0, 0], [0, 1], [1, 1], [0.4, 0.6], [None, None]]
"""Of the first rows; the last row failed."""


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return path


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """A run and its rows."""
    prompts = write_rows(tmp_path / "prompts.jsonl", ROWS)
    keys = [
        *load_prompts(
            to_settings(compose(layers=[{"data": {"train_files": [str(prompts)]}}])).data
        ).prompt_keys()
    ]
    records: list[Any] = [
        replace(rollout(index, at, reward=reward), prompt_key=keys[index])
        for index, rewards in enumerate(REWARDS)
        for at, reward in enumerate(rewards)
    ]
    last: list[Failure] = [replace(failure(5, at), prompt_key=keys[5]) for at in range(2)]
    return write_run(tmp_path / "run", [*records, *last], n=2, prompts=6), prompts


def select(places: tuple[Path, Path], where: str, *more: object) -> int:
    run, prompts = places
    words = ["--prompts", prompts, "--where", where, "--output", run.parent / "next.jsonl", *more]
    return main(["select", str(run), *map(str, words)])


def read(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


@pytest.mark.parametrize(
    ("where", "chosen", "rates"),
    [
        ("pass_rate between 0.2 and 0.8", [1, 3], [0.5, 0.5]),
        ("std_reward > 0.2", [1], [0.5]),
        ("mean_reward = null", [4, 5], [None, None]),
        ("failed > 0 or unscored = 2", [4, 5], [None, None]),
        ("pass_rate = 1 and data_source = sums and tokens = 4", [2], [1.0]),
    ],
)
def test_rows_are_chosen_and_stay_as_they_are(
    places: tuple[Path, Path], where: str, chosen: list[int], rates: list[float | None]
) -> None:
    assert select(places, where) == 0
    wanted = [{**ROWS[at], "pass_rate": rate} for at, rate in zip(chosen, rates, strict=True)]
    assert read(places[0].parent / "next.jsonl") == wanted


def test_what_solves_is_said_by_solved_at(places: tuple[Path, Path]) -> None:
    assert select(places, "pass_rate between 0.2 and 0.8", "--solved-at", 0.7) == 0
    assert [row["answer"] for row in read(places[0].parent / "next.jsonl")] == [1]


def test_a_control_is_as_large_and_by_chance(places: tuple[Path, Path]) -> None:
    control = places[0].parent / "control.jsonl"
    seen = set[tuple[int, ...]]()
    for seed in range(8):
        assert select(places, "pass_rate >= 0.5", "--control", control, "--seed", seed, "--force") == 0
        seen.add(tuple(row["answer"] for row in read(control)))
    assert {len(each) for each in seen} == {3} and len(seen) > 1


def test_rows_that_a_test_set_has_are_left_out(places: tuple[Path, Path]) -> None:
    same = {"prompt": "As I said: TWO - how many letters has the word after this one, please"}
    tests = write_rows(places[0].parent / "test.jsonl", [same])
    assert select(places, "rollouts = 2", "--not-in", tests, "--ngram", 5) == 1  # all share five words
    assert select(places, "rollouts = 2", "--not-in", tests, "--ngram", 11) == 0
    assert [row["answer"] for row in read(places[0].parent / "next.jsonl")] == [0, 1, 3, 4, 5]


def test_prompts_without_words_are_not_all_the_same(tmp_path: Path) -> None:
    rows = [{"prompt": "1 + 1"}, {"prompt": "+ + +"}]
    prompts, tests = (
        write_rows(tmp_path / "prompts.jsonl", rows),
        write_rows(tmp_path / "tests.jsonl", [{"prompt": "?"}]),
    )
    settings = to_settings(compose(layers=[{"data": {"train_files": [str(prompts)]}}]))
    keys = load_prompts(settings.data).prompt_keys()
    records = [replace(rollout(index, 0), prompt_key=key) for index, key in enumerate(keys)]
    places = write_run(tmp_path / "run", records, n=1, prompts=2), prompts
    assert select(places, "rollouts = 1", "--not-in", tests) == 0
    assert len(read(tmp_path / "next.jsonl")) == 2


@pytest.mark.parametrize(
    ("where", "more", "said"),
    [
        ("pass_rat > 0", [], "there are pass_rate, mean_reward"),
        ("pass_rate > 0", ["--ngram", 0], "--ngram"),
        ("pass_rate > 0", ["--not-in", "missing.jsonl"], "missing.jsonl"),
        ("pass_rate > 0", ["--prompt-key", "question"], "question"),
        ("pass_rate > 0", ["--force", "--control", "{next}"], "written already"),
        ("pass_rate > 0", ["--force", "--output", "{prompts}"], "is read"),
    ],
)
def test_wrong_usage_is_said(
    places: tuple[Path, Path], where: str, more: list[object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"next": places[0].parent / "next.jsonl", "prompts": places[1]}
    assert select(places, where, *(str(word).format(**files) for word in more)) == 2
    assert said in capsys.readouterr().err


def test_other_rows_and_files_that_exist_are_refused(
    places: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run, prompts = places
    changed = write_rows(run.parent / "changed.jsonl", [{**row, "new": 1} for row in ROWS])
    assert select((run, changed), "rollouts > 0") == 2
    assert "none of the 6 rows has rollouts" in capsys.readouterr().err
    assert select((run, prompts), "rollouts > 0") == 0
    assert select((run, prompts), "rollouts > 0") == 2
    assert "--force" in capsys.readouterr().err
