"""`rollstream score`: rewards computed anew, and what sees them."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson
import pyarrow.parquet as pq
import pytest

from rollstream.agent.registry import LoopEntry
from rollstream.agent.single_turn import SingleTurnAgent
from rollstream.cli import main
from rollstream.config.settings import RewardSettings
from rollstream.errors import ConfigError, RunDirectoryError, StorageError
from rollstream.evaluate import read_runs
from rollstream.rollout.replay import ScoreReport, SnapshotRule, score_run, snapshot_rule
from rollstream.store import run_dir
from rollstream.store.export.run import export_run
from rollstream.store.manifest import require_manifest, write_manifest
from rollstream.store.merge_shards import merge_shards
from rollstream.store.paths import RunPaths
from rollstream.store.run import Run
from rollstream.store.scores import pass_folder
from rollstream.store.summary import read_status
from rollstream.store.validate import validate_run
from rollstream.view.sources import RunSource, Sources
from tests.support.processes import full_disk
from tests.support.view_runs import agent_rollout, failure, manifest, rollout, write_run

PROMPTS, N = 6, 2

LENGTHS = """
def compute_score(data_source, solution_str, ground_truth, extra_info, tolerance=0):
    return {"score": float(len(solution_str)), "turns": extra_info["num_turns"], "snapshot": extra_info["is_snapshot"]}
"""
HALF = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if "boots" in solution_str:
        raise ValueError("no boots")
    return 0.5
"""


def reward(path: Path, source: str, **more: Any) -> RewardSettings:
    path.write_text(source)
    given = {"name": "compute_score", "reward_kwargs": {}, "timeout": 60.0, "max_concurrency": 4, **more}
    return RewardSettings(str(path), **given)


def run_of(root: Path, **how: Any) -> Path:
    records = [
        agent_rollout(index, repeat, snapshots=2 if index == 0 else 0)
        for index in range(PROMPTS)
        for repeat in range(N)
    ]
    return write_run(root, records, n=N, prompts=PROMPTS, rows=5, **how)


def scored(root: Path, recipe: RewardSettings, **more: Any) -> ScoreReport:
    return asyncio.run(score_run(root, recipe, processes=1, **more))


def answers(root: Path) -> dict[tuple[int, int], str]:
    found = {}
    for index in range(PROMPTS):
        for repeat in range(N):
            found[index, repeat] = Run.open(root).find(index, repeat).row["messages"][-1]["content"]
    return found


def everywhere(root: Path, tmp_path: Path, scores: str | None = None) -> dict[str, list[float]]:
    """The rewards of final trajectories, by who reads them."""
    target = tmp_path / "export.jsonl"
    export_run(root, "jsonl", target, force=True, scores=scores)
    lines = [orjson.loads(line) for line in target.read_bytes().splitlines()]
    (read,) = read_runs([root], scores=scores)
    source = Sources([str(root)], scores=scores).all()[0]
    assert isinstance(source, RunSource)
    columns = source.columns()
    finals = [columns[name][~columns["is_snapshot"]].tolist() for name in ("index", "repeat", "reward")]
    found = {
        "export": [line["reward"] for line in lines if not line["is_snapshot"]],
        "eval": read.samples.reward.tolist(),
        "view": [reward for *_, reward in sorted(zip(*finals, strict=True))],
        "show": [
            Run.open(root, scores).find(line["index"], line["repeat"]).row["reward"]
            for line in lines
            if not line["is_snapshot"]
        ],
    }
    assert read_status(root, scores).mean_reward == pytest.approx(np.mean(found["eval"]))
    return found


def make_own(root: Path, name: str) -> None:
    """Makes scores the run's own rewards, as a run does whose reward was changed."""
    write_manifest(root, msgspec.structs.replace(require_manifest(root), scores=name))


def merged(root: Path) -> None:
    export_run(root, "parquet")


def without_batches(root: Path) -> None:
    merged(root)
    shutil.rmtree(RunPaths(root).batches)


@pytest.mark.parametrize("made", [None, without_batches])
def test_readers_see_the_scores_that_they_name(tmp_path: Path, made: Callable[[Path], None] | None) -> None:
    root = run_of(tmp_path / "run", seal=made is not None)
    before, texts = everywhere(root, tmp_path), answers(root)
    if made is not None:
        made(root)
    report = scored(root, reward(tmp_path / "reward.py", LENGTHS), name="lengths")
    wanted = [float(len(text)) for text in texts.values()]
    assert (report.rollouts, report.now, report.unscored) == (12, 12, 0)
    assert report.mean_reward == pytest.approx(sum(wanted) / 12)
    assert everywhere(root, tmp_path) == before
    assert everywhere(root, tmp_path, "lengths") == dict.fromkeys(before, wanted)
    assert read_status(root).all_scores == ["lengths"]

    make_own(root, "lengths")
    assert everywhere(root, tmp_path) == dict.fromkeys(before, wanted)
    snapshot, final = (Run.open(root).find(0, 0, number).row for number in (0, 2))
    assert snapshot["reward"] == final["reward"] and snapshot["reward_extra"] == {}
    assert final["reward_extra"] == {"turns": 4, "snapshot": False}
    if made is not None:
        merged(root)
        artifact = pq.read_table(root / "trajectories.parquet")
        rows = artifact.filter(~artifact["is_snapshot"].combine_chunks().to_numpy(False))
        assert rows["reward"].to_pylist() == wanted
        assert not read_status(root).stale and validate_run(root).sound


def test_a_reward_that_fails_on_one_rollout_hurts_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = run_of(tmp_path / "run")
    boots = sum("boots" in text for text in answers(root).values())
    assert 0 < boots < 12
    file = tmp_path / "reward.py"
    recipe = reward(file, HALF)

    def stop(done: int, total: int, failed: int) -> None:
        if failed:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        scored(root, recipe, say=stop)
    assert not read_status(root).all_scores
    report = scored(root, recipe, retry_unscored=True)
    assert report.now >= boots, "what failed before it was stopped is scored again"
    assert (report.rollouts, report.failed, report.mean_reward) == (12, boots, 0.5)
    assert list(report.causes.values()) == [boots] and "no boots" in next(iter(report.causes))
    again = scored(root, recipe)
    assert (again.now, again.failed) == (0, boots) and again.path == report.path
    assert scored(root, recipe, retry_unscored=True).now == boots
    status = read_status(root, report.name)
    assert (status.unscored, status.reward_failed) == (boots, boots)
    (cause,) = status.unscored_causes
    assert cause.count == boots and "no boots" in cause.example and cause.index is not None
    words = ["status", str(root), "--scores", report.name]
    assert main(words) == 0 and f"unscored        {boots}: RewardError" in capsys.readouterr().out
    assert main([*words, "--unscored"]) == 0
    lines = [orjson.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == boots and {"index", "repeat", "data_source", "cause"} == set(lines[0])


@pytest.mark.parametrize(
    ("rule", "wanted"), [("outcome", [40.0] * 3), ("own", None), ("none", [None] * 2), ("keep", [0.1, 0.2])]
)
def test_snapshots_are_scored_as_the_rule_says(
    tmp_path: Path, rule: SnapshotRule, wanted: list[float] | None
) -> None:
    one = agent_rollout(0, 0, snapshots=2)
    texts = ["a", "bb", "c" * 40]
    for trajectory, text in zip(one.trajectories, texts, strict=True):
        trajectory.messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]
    one.trajectories[0].reward, one.trajectories[1].reward = 0.1, 0.2
    root = write_run(tmp_path / "run", [one], n=1, prompts=1)
    report = scored(root, reward(tmp_path / "reward.py", LENGTHS), snapshots=rule, name="s")
    rewards = pq.read_table(report.path)["reward"].to_pylist()
    assert rewards[2] == 40.0 and rewards[:2] == ([1.0, 2.0] if wanted is None else wanted[:2])


def test_the_rule_for_snapshots_is_that_of_the_runs_agent_loops() -> None:
    def rule(**options: str) -> str:
        found: dict[str, Any] = {
            f"agent.loops.{name}": f"rollstream.agent.context ContextAgent {one}"
            for name, one in options.items()
        }
        return snapshot_rule(manifest(**found))

    assert rule() == rule(a="{}") == "outcome"
    assert rule(a='{"snapshot_scoring":"own"}') == "own"
    assert rule(a='{"snapshot_scoring":"own","context_penalty":0.1}') == "keep"
    with pytest.raises(ConfigError):
        rule(a='{"snapshot_scoring":"own"}', b="{}")


@pytest.mark.parametrize(("options", "wanted"), [({}, "own"), ({"snapshot_scoring": "none"}, "none")])
def test_the_rule_may_be_of_a_loops_class(options: dict[str, Any], wanted: str) -> None:
    class Own(SingleTurnAgent):
        snapshot_scoring = "own"

    plain, own = LoopEntry(SingleTurnAgent), LoopEntry(Own, options)
    assert snapshot_rule(manifest(**{"agent.loops.own": own.digest})) == wanted
    assert snapshot_rule(manifest(**{"agent.loops.plain": plain.digest})) == "outcome"


def test_the_answer_of_an_agent_program_is_scored_and_its_folder_is_gone(tmp_path: Path) -> None:
    by_program, by_loop = rollout(0, 0, "four"), rollout(0, 1, "four")
    by_program.final.extra["gateway"] = {"answer": "five5"}
    root = write_run(tmp_path / "run", [by_program, by_loop], n=2, prompts=1)
    folder = LENGTHS.replace("return", 'open(extra_info["workdir"] + "/test.txt")\n    return')
    report = scored(root, reward(tmp_path / "reward.py", folder))
    assert report.failed == 2 and all("workdir" in cause for cause in report.causes)
    by_answer = scored(root, reward(tmp_path / "reward.py", LENGTHS))
    assert pq.read_table(by_answer.path)["reward"].to_pylist() == [5.0, 4.0]


def test_what_is_finished_later_has_the_reward_that_it_was_recorded_with(tmp_path: Path) -> None:
    root = write_run(tmp_path / "run", [rollout(0, 0, "four")], n=2, prompts=1, seal=False)
    recipe = reward(tmp_path / "reward.py", LENGTHS)
    name = scored(root, recipe).name
    make_own(root, name)
    write_run(root, [rollout(0, 1, "seven77", reward=0.25)], n=2, prompts=1)
    assert [Run.open(root).find(0, repeat).row["reward"] for repeat in (0, 1)] == [4.0, 0.25]
    status = read_status(root, name)
    assert (status.unscored, status.mean_reward) == (1, 4.0), "these scores do not have it"
    merged(root)
    assert scored(root, recipe).now == 1
    assert read_status(root).stale == ["trajectories.parquet"] and read_status(root).mean_reward == 5.5


def test_a_run_that_has_more_rollouts_of_each_prompt_now_is_scored_on(tmp_path: Path) -> None:
    root = write_run(tmp_path / "run", [rollout(0, 0, "four"), rollout(1, 0, "four")], n=1, prompts=2)
    recipe = reward(tmp_path / "reward.py", LENGTHS)
    scored(root, recipe)
    write_manifest(root, msgspec.structs.replace(require_manifest(root), n=3))
    write_run(root, [rollout(0, 1, "seven77"), rollout(1, 2, "seven77")], n=3, prompts=2)
    report = scored(root, recipe)
    assert (report.now, report.rollouts, report.mean_reward) == (2, 4, 5.5)


def test_shards_take_their_scores_along(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    roots = [tmp_path / "shard0", tmp_path / "shard1"]
    for at, root in enumerate(roots):
        records = [agent_rollout(index, repeat) for index in range(at, PROMPTS, 2) for repeat in range(N)]
        write_run(root, records, n=N, prompts=PROMPTS // 2, rows=5, **{"generation.shard": f"{at}/2"})
    lengths, half = (reward(tmp_path / f"{at}.py", text) for at, text in enumerate((LENGTHS, HALF)))
    for root in roots:
        scored(root, lengths, name="lengths")
        scored(root, lengths if root is roots[0] else half, name="other")
        make_own(root, "lengths")
    merge_shards(roots, out := tmp_path / "out")
    assert "'other' are of several rewards" in caplog.text
    wanted = [float(len(text)) for text in answers(out).values()]
    for scores in (None, "lengths"):
        assert set(map(tuple, everywhere(out, tmp_path, scores).values())) == {tuple(wanted)}
    assert validate_run(out).sound and scored(out, lengths, name="lengths").now == 0


def test_a_rollout_that_is_generated_again_has_no_score_of_the_one_before(tmp_path: Path) -> None:
    root = write_run(tmp_path / "run", [rollout(0, 0, "four"), rollout(0, 1, "four")], n=2, prompts=1, rows=1)
    recipe = reward(tmp_path / "reward.py", LENGTHS)
    name = scored(root, recipe).name
    RunPaths(root).batch(1).write_bytes(b"damaged")
    write_run(root, [rollout(0, 1, "seven77", reward=0.25)], n=2, prompts=1)
    (read,) = read_runs([root], scores=name)
    assert read.samples.reward[0] == 4.0 and np.isnan(read.samples.reward[1])
    report = scored(root, recipe)
    assert (report.now, report.rollouts, report.mean_reward) == (1, 2, 5.5)
    assert read_status(root, name).mean_reward == 5.5
    assert scored(root, recipe).now == 0, "of two scores under one key the newest is known"


@pytest.mark.parametrize("step", ["copy_rollouts", "forget_batches"])
def test_a_kill_while_what_is_retried_is_taken_out_costs_nothing(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, recipe = run_of(tmp_path / "run"), reward(tmp_path / "reward.py", HALF)
    first, done = scored(root, recipe), getattr(run_dir, step)

    def killed(*given: object) -> None:
        done(*given)
        raise SystemExit

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(run_dir, step, killed)
        scored(root, recipe, retry_unscored=True)
    report = scored(root, recipe, retry_unscored=True)
    assert (report.now, report.rollouts, report.failed) == (first.failed, 12, first.failed)
    assert validate_run(pass_folder(root, report.name)).sound


def test_a_new_run_in_the_folder_of_an_old_one_has_none_of_its_scores(tmp_path: Path) -> None:
    root = write_run(tmp_path / "run", [rollout(0, 0, "four")], n=1, prompts=1)
    scored(root, reward(tmp_path / "reward.py", LENGTHS))
    for folder in (RunPaths(root).batches, RunPaths(root).journals):
        shutil.rmtree(folder)
    write_run(root, [rollout(0, 0, "seven77", reward=0.25)], n=1, prompts=1)
    assert read_status(root).all_scores == []
    assert list(RunPaths(root).logs.glob("scores-*/*.parquet")), "they are kept"


def test_a_name_is_of_one_reward(tmp_path: Path) -> None:
    root = write_run(tmp_path / "run", [rollout(0, 0)], n=1, prompts=1)
    file = tmp_path / "reward.py"
    first = scored(root, reward(file, LENGTHS), name="mine")
    with pytest.raises(ConfigError):
        scored(root, reward(file, HALF), name="mine")
    by_content = {scored(root, reward(file, source)).name for source in (LENGTHS, HALF)}
    assert len(by_content) == 2 and Path(first.path).exists()
    with pytest.raises(RunDirectoryError):
        read_status(root, "other")


def test_rules_and_answers_that_are_token_ids_only(tmp_path: Path) -> None:
    """By data source; an answer that is in no message is decoded."""
    plain = rollout(0, 0, "4", source="exact_match")
    silent = rollout(
        1, 0, source="exact_match", response_ids=[20, 2], response_mask=[1, 1], response_logprobs=[0, 0]
    )
    silent.final.messages = [{"role": "user", "content": "2 + 2"}]
    unknown = rollout(2, 0, source="elsewhere")
    root = write_run(tmp_path / "run", [plain, silent, unknown, failure(3, 0)], n=1, prompts=4)
    recipe = RewardSettings(None, "compute_score", {}, 60.0, 4)
    report = scored(root, recipe, name="rules")
    rows = {row["index"]: row for row in pq.read_table(report.path).to_pylist()}
    assert rows[0]["reward"] == 1.0 and rows[2]["reward"] is None and rows[2]["reward_extra"] == "{}"
    assert rows[1]["reward"] is not None
    assert (report.rollouts, report.unscored, report.failed) == (3, 1, 0)


def test_a_damaged_file_of_scores_is_no_damage_of_batches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, recipe = run_of(tmp_path / "run"), reward(tmp_path / "reward.py", LENGTHS)
    merged(root)
    table = Path(scored(root, recipe, name="lengths").path)
    table.write_bytes(table.read_bytes()[:100])
    for words in (["status", "--scores", "lengths"], ["validate"]):
        assert main([words[0], str(root), *words[1:]]) in (1, 2)
        assert "lengths.parquet" in "".join(capsys.readouterr()), words
    assert scored(root, recipe, name="lengths").now == 0
    assert read_status(root, "lengths").unscored == 0 and validate_run(root).sound


def test_a_full_disk_is_an_error_and_the_scores_are_safe(tmp_path: Path) -> None:
    root, recipe = run_of(tmp_path / "run"), reward(tmp_path / "reward.py", LENGTHS)
    report = scored(root, recipe, name="lengths")
    Path(report.path).unlink()
    with full_disk(500), pytest.raises(StorageError):
        scored(root, recipe, name="lengths")
    assert scored(root, recipe, name="lengths").now == 0


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, file = run_of(tmp_path / "run"), tmp_path / "reward.py"
    file.write_text(LENGTHS)
    words = ["score", str(root), "--processes", "1", "--reward", str(file)]
    assert main([*words, "--kwargs", '{"tolerance": 1}', "--json"]) == 0
    report = orjson.loads(capsys.readouterr().out)
    assert report["rollouts"] == 12 and read_status(root).all_scores == [report["name"]]
    assert main(["score", str(root), "--list"]) == 0
    assert report["name"] in capsys.readouterr().out
    file.write_text("def compute_score(**_):\n    raise KeyError('all')\n")
    assert main(words) == 1
    assert "no reward for 12" in capsys.readouterr().out
    for wrong in (["--kwargs", "[]"], ["--name", "../x"], ["--reward", "none.py"]):
        assert main([*words, *wrong]) == 2, wrong
