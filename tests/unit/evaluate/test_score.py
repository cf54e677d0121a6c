"""`rollstream score`: rewards computed anew, and what sees them."""

import asyncio
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson
import pyarrow.parquet as pq
import pytest

from rollstream.agent.registry import AgentLoops, LoopEntry
from rollstream.agent.single_turn import SingleTurnAgent
from rollstream.cli import main
from rollstream.config.settings import RewardSettings
from rollstream.errors import ConfigError, RunDirectoryError, StorageError
from rollstream.evaluate import read_runs
from rollstream.reward.base import FunctionReward
from rollstream.rollout.group_reward import score_group
from rollstream.rollout.replay import SnapshotRule, score_run, snapshot_rule
from rollstream.rollout.setup import load_configured_reward
from rollstream.rollout.stored_pass import ScoreReport
from rollstream.store import run_dir
from rollstream.store.export.run import export_run
from rollstream.store.keys import KeyStates
from rollstream.store.manifest import require_manifest, write_manifest
from rollstream.store.merge_shards import merge_shards
from rollstream.store.paths import RunPaths
from rollstream.store.run import Run
from rollstream.store.run_dir import lock_run, open_run
from rollstream.store.scores import pass_folder
from rollstream.store.summary import read_status
from rollstream.store.validate import validate_run
from rollstream.trajectory import Rollout, SamplingParams, Trajectory
from rollstream.view import reader
from rollstream.view.sources import RunSource, Sources
from tests.support.processes import full_disk
from tests.support.view_runs import agent_rollout, failure, manifest, opened, rollout, write_run
from tests.unit.agent.rollouts import completed, make_row, make_worker, resources, started

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


STEPS = """
def compute_score(data_source, solution_str, ground_truth, extra_info, trajectory):
    turns = [ids for _, ids in trajectory.generations()]
    wrong = len(solution_str) % 2
    return {"score": 1, "steps": [float(ids[0]) for ids in turns][wrong:], "tokens": list(trajectory.response_ids)}
"""


@pytest.mark.parametrize("seal", [False, True])
def test_step_and_token_rewards_are_streams(tmp_path: Path, seal: bool) -> None:
    root = run_of(tmp_path / "run", seal=seal)
    wrong = sum(len(text) % 2 for text in answers(root).values())
    report = scored(root, reward(tmp_path / "reward.py", STEPS), name="steps")
    assert 0 < report.failed == wrong < 12
    (cause,) = report.causes
    assert "1 steps for 2 turns of the model" in cause
    columns = ["response_ids", "response_mask", "is_snapshot", "reward"]
    found = 0
    for table in Run.open(root, "steps").rows(columns, streams=["step_rewards", "token_rewards"]):
        for row in table.to_pylist():
            steps, tokens = row["stream.step_rewards"], row["stream.token_rewards"]
            if row["is_snapshot"] or row["reward"] is None:
                assert steps is tokens is None
                continue
            found += 1
            pairs = [*zip(row["response_ids"], row["response_mask"], strict=True)]
            assert tokens == [token * sampled for token, sampled in pairs]
            second = row["response_mask"].index(0) + row["response_mask"][
                row["response_mask"].index(0) :
            ].index(1)
            firsts = [pairs[0 if at < second else second][0] for at in range(len(pairs))]
            assert steps == [first * sampled for first, (_, sampled) in zip(firsts, pairs, strict=True)]
    assert found == 12 - wrong
    with pytest.raises(RunDirectoryError, match="no complete stream 'steps'"):
        [*Run.open(root).rows(columns, streams=["steps"])]


JUDGE = """
import random
def compute_score(data_sources, solution_strs, ground_truths, extra_infos):
    assert len({one["group"] for one in extra_infos}) == 1
    drawn = random.random()
    return [{"score": drawn + at, "of": len(solution_strs)} for at, _ in enumerate(solution_strs)]
"""


def groups_of(root: Path, name: str) -> dict[int, list[float | None]]:
    found: dict[int, list[float | None]] = {}
    for table in Run.open(root, name).rows(["index", "repeat", "reward", "is_snapshot"]):
        for row in sorted(table.to_pylist(), key=lambda row: (row["index"], row["repeat"])):
            found.setdefault(row["index"], []).extend([] if row["is_snapshot"] else [row["reward"]])
    return found


def judged(index: int, repeat: int) -> Rollout:
    made = rollout(index, repeat, str(repeat))
    made.final.extra = {"extra_info": {"group": index}}
    return made


@pytest.mark.parametrize("has_batches", [True, False])
def test_a_reward_that_sees_groups_scores_whole_ones(tmp_path: Path, has_batches: bool) -> None:
    """What a stop left of a group is scored anew with the rest of it: rewards of two calls do not compare."""
    records = [
        judged(index, repeat) for repeat in range(3) for index in range(5) if (index, repeat) != (3, 1)
    ]
    root = write_run(tmp_path / "run", [*records, failure(2, 3), judged(4, 3)], n=4, prompts=5, rows=4)
    recipe = reward(tmp_path / "judge.py", JUDGE, max_concurrency=1)
    with pytest.raises(RunDirectoryError, match="no prompt yet of which no rollout is owed"):
        scored(write_run(tmp_path / "begun", [judged(0, 0)], n=2, prompts=1), recipe)
    if not has_batches:
        with opened(root, 4, 5) as run:
            run.merge()
        shutil.rmtree(RunPaths(root).batches)
    report = scored(root, recipe, name="judge")
    first = groups_of(root, "judge")
    # Of 0, 1 and 3 a rollout is owed; one of 2 has failed for good.
    assert [index for index, rewards in first.items() if rewards[0] is not None] == [2, 4]
    assert np.diff(first[2]) == pytest.approx([1, 1]) and np.diff(first[4]) == pytest.approx([1, 1, 1])
    assert (report.rollouts, report.failed) == (7, 0)
    assert scored(root, recipe, name="judge").now == 0 and groups_of(root, "judge") == first

    stopped, folder = KeyStates(4), pass_folder(root, "judge")
    stopped.mark_done(4, 1)
    lock, made = lock_run(folder), require_manifest(folder)
    with open_run(lock, folder, made, config_yaml="") as directory:
        directory.forget(stopped)
    assert scored(root, recipe, name="judge").now == 4
    second = groups_of(root, "judge")
    assert second[2] == first[2] and second[4] != first[4] and np.diff(second[4]) == pytest.approx([1, 1, 1])


class SaysItsReward(SingleTurnAgent):
    """The rollouts of row 1 have a reward of their own; snapshots have none."""

    snapshot_scoring = "none"

    async def run(self, sampling: SamplingParams, **row: Any) -> list[Trajectory]:  # type: ignore[override]
        final = await super().run(sampling, **row)
        snapshot = replace(final, is_snapshot=True)
        if row["index"] == 1:
            final.reward, final.reward_extra = 7.0, {"said": True}
        return [snapshot, final]


def test_what_an_agent_says_of_its_rollout_stands(tmp_path: Path) -> None:
    """As with a reward that sees one answer: in a training, where the group is in memory, and in a run's pass."""
    recipe = reward(tmp_path / "judge.py", JUDGE)
    loaded = load_configured_reward(recipe)
    assert isinstance(loaded, FunctionReward)

    async def made() -> list[Rollout]:
        loops = AgentLoops({"own": LoopEntry(SaysItsReward)})
        worker = make_worker(resources(await started()), loop="own", loops=loops, reward=loaded)
        rows = [make_row(index, extra_info={"group": 0}) for index in range(3)]
        return [completed(await worker.run(row, 0)) for row in rows]

    def said(rollouts: Iterable[Rollout]) -> list[tuple[float | None, ...]]:
        return [tuple(one.reward for one in rollout.trajectories) for rollout in rollouts]

    group = [replace(one, index=0, repeat=one.index) for one in asyncio.run(made())]
    assert said(group) == [(None, None), (None, 7.0), (None, None)]
    root = write_run(tmp_path / "run", group, n=3, prompts=1)
    asyncio.run(score_group(loaded, group, decode=str))
    loaded.close()
    scored(root, recipe, name="judge")
    for found in (group, [*Run.open(root, "judge").rollouts(np.array([0]))]):
        (_, first), own, (_, last) = said(sorted(found, key=lambda one: one.repeat))
        assert own == (None, 7.0) and first is not None and last == pytest.approx(first + 1)
        assert [one.trajectories[0].reward for one in found] == [None] * 3
        extras = {one.repeat: one.final.reward_extra for one in found}
        assert extras == {0: {"of": 2}, 1: {"said": True}, 2: {"of": 2}}


def test_a_group_that_has_grown_is_scored_anew_and_a_failure_is_that_of_all(tmp_path: Path) -> None:
    records = [judged(0, 0), judged(0, 1), failure(0, 2)]
    root = write_run(tmp_path / "run", records, n=3, prompts=1)
    scored(root, reward(tmp_path / "judge.py", JUDGE), name="judge")
    before = groups_of(root, "judge")
    write_run(root, [judged(0, 2)], n=3, prompts=1)
    report = scored(root, reward(tmp_path / "judge.py", JUDGE), name="judge")
    (after,) = groups_of(root, "judge").values()
    assert report.now == 3 and np.diff(after) == pytest.approx([1, 1]) and after[:2] != before[0]
    fails = JUDGE.replace("drawn = random.random()", "raise ValueError('no judge')")
    report = scored(root, reward(tmp_path / "fails.py", fails), name="fails")
    assert (report.failed, [*report.causes.values()]) == (3, [3]) and "no judge" in next(iter(report.causes))


def test_show_and_the_page_have_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = run_of(tmp_path / "run")
    plain = Run.open(root).find(0, 0).row
    scored(root, reward(tmp_path / "reward.py", STEPS.replace("% 2", "* 0")), name="steps")
    make_own(root, "steps")
    assert main(["show", str(root), "0", "0", "--tokens"]) == 0
    out = capsys.readouterr().out
    assert f'"tokens":"{len(plain["response_ids"])} numbers: --tokens"' in out and '"steps":[' in out
    first = plain["response_ids"][0]
    (line,) = [line for line in out.splitlines() if line.split()[:3] == ["0", str(first), "1"]]
    assert line.split()[4:6] == [f"{first:.4f}"] * 2
    source = Sources([str(root)]).all()[0]
    assert isinstance(source, RunSource)
    row = reader.read_rows(source.columns(), [2])[2]
    streams = source.streams_of(row)
    assert len(streams["step_rewards"]) == len(streams["token_rewards"]) == len(row["response_ids"])
    said = reader.trajectory(source.columns(), 2)["reward_extra"]
    assert said.keys() == {"steps"}


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
    assert main([*words, "--unscored", "--json"]) == 0
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
    assert "'other' are of several makers" in caplog.text
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
