"""Whole runs by the Python entry point and by the command line, with the shipped model."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow.parquet as pq
import pytest

from rollstream.cli import main as cli
from rollstream.demo import MODEL_PATH
from rollstream.errors import ConfigError, DataError, IdentityMismatchError, RunDirectoryError
from rollstream.generation.command import summarise
from rollstream.generation.run import run_generation
from rollstream.store.paths import RunPaths
from rollstream.store.summary import read_status
from rollstream.store.validate import validate_run
from tests.faults.runs import rows_of
from tests.support.forward import demo_module, logprobs_under


def config(run_dir: Path, files: Path, **changes: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "actor_rollout_ref": {
            "model": {"path": str(MODEL_PATH)},
            "rollout": {"n": 2, "response_length": 24},
        },
        "data": {"train_files": str(files), "max_prompt_length": 64},
        "trainer": {"default_local_dir": str(run_dir)},
        "generation": {"seed": 5, "show_progress": False, "save_batch_size": 7},
    }
    for key, value in changes.items():
        node = tree
        *parents, last = key.split("__")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree


def write_sums(path: Path, pairs: list[tuple[int, int]]) -> Path:
    wording = "State the final answer to the following arithmetic problem: {} + {} ="
    rows = [
        {
            "prompt": [{"role": "user", "content": wording.format(a, b)}],
            "data_source": "sums",
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"index": i, "a": a},
            "level": a % 3,
        }
        for i, (a, b) in enumerate(pairs)
    ]
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return path


PAIRS = [(11 + 7 * i % 80, 12 + 13 * i % 70) for i in range(12)]


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    return write_sums(tmp_path / "sums.jsonl", PAIRS)


@pytest.fixture
def reward_file(tmp_path: Path) -> Path:
    path = tmp_path / "reward.py"
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    if extra_info['a'] == 18:\n"
        "        raise ValueError('no score for 18')\n"
        "    return {'score': float(solution_str.strip() == ground_truth), 'answer': solution_str}\n"
    )
    return path


def test_a_run_stores_what_the_model_sampled(tmp_path: Path, sums: Path, reward_file: Path) -> None:
    result = run_generation(config(tmp_path / "run", sums, custom_reward_function__path=str(reward_file)))
    assert (result.total, result.completed, result.failed, result.artifact_rows) == (24, 24, 0, 24)
    # The row with a == 18: beyond max_failed_share 0.
    assert (result.unscored, result.reward_failed, result.exit_code) == (2, 2, 1)
    assert validate_run(tmp_path / "run").sound
    rows = rows_of(tmp_path / "run")
    assert [(row["index"], row["repeat"]) for row in rows] == [(i, r) for i in range(12) for r in range(2)]
    worst = 0.0
    for row in rows:
        assert row["response_mask"] == [1] * len(row["response_ids"])
        forward = logprobs_under(demo_module(), row["prompt_ids"], row["response_ids"])
        worst = max(worst, float(np.abs(forward - np.array(row["response_logprobs"])).max()))
        messages = orjson.loads(row["messages"])
        assert [message["role"] for message in messages] == ["user", "assistant"]
        extra = orjson.loads(row["reward_extra"])
        if PAIRS[row["index"]][0] == 18:
            assert row["reward"] is None
            assert "no score for 18" in extra["error"]
        else:
            assert extra["answer"] == messages[-1]["content"]
            assert row["reward"] == float(extra["answer"] == orjson.loads(row["ground_truth"]))
        assert orjson.loads(row["extra"])["level"] == PAIRS[row["index"]][0] % 3
        assert row["metrics"]["engine_calls"] == 1.0
    assert worst < 1e-4


def test_status_counts_failed_unscored_and_scored(
    tmp_path: Path, sums: Path, stub: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """One row fails, those of a source without a rule are not scored, and one has a rule that cannot judge it."""
    add_long_prompt(sums)
    rows = [orjson.loads(line) for line in sums.read_bytes().splitlines()]
    rows[0] |= {"data_source": "exact_match", "reward_model": {"ground_truth": "29"}}
    rows[1] |= {"data_source": "reasoning_gym/none", "reward_model": {"ground_truth": "29"}}
    sums.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    run_dir = tmp_path / "run"
    result = run_generation(config(run_dir, sums, **stub))
    status = read_status(run_dir)
    counts = (result.completed, result.failed, result.unscored, result.reward_failed)
    assert counts == (24, 2, 22, 2)
    assert (status.completed, status.failed, status.unscored, status.reward_failed) == counts
    assert cli(["status", str(run_dir)]) == 0
    assert "unscored        22, 2 of them as their reward failed" in capsys.readouterr().out
    checkpoint = orjson.loads((run_dir / "checkpoint.json").read_bytes())
    assert (checkpoint["unscored"], checkpoint["reward_failed"]) == (22, 2)
    (run_dir / "checkpoint.json").write_bytes(orjson.dumps({**checkpoint, "total": 3}))  # as rows came later
    assert (read_status(run_dir).total, read_status(run_dir).owed) == (26, 0)


def test_the_same_seed_gives_the_same_tokens_and_again_does_nothing(tmp_path: Path, sums: Path) -> None:
    runs = [run_generation(config(tmp_path / name, sums)) for name in ("one", "two")]
    tables = [pq.read_table(result.artifact, columns=["response_ids"]) for result in runs]
    assert tables[0].equals(tables[1])
    again = run_generation(config(tmp_path / "one", sums))
    assert (again.generated, again.completed, again.exit_code) == (0, 24, 0)


def test_resume_modes(tmp_path: Path, sums: Path, stub: dict[str, Any]) -> None:
    run_dir = tmp_path / "run"
    run_generation(config(run_dir, sums, **stub))
    with pytest.raises(RunDirectoryError, match="resume=never"):
        run_generation(config(run_dir, sums, generation__resume="never", **stub))
    with pytest.raises(IdentityMismatchError, match=r"rollout\.temperature: 1\.0 -> 0\.5"):
        run_generation(config(run_dir, sums, actor_rollout_ref__rollout__temperature=0.5, **stub))
    before = rows_of(run_dir)

    write_sums(sums, [*PAIRS, (5, 6)])
    with pytest.raises(IdentityMismatchError, match="resume=extend"):
        run_generation(config(run_dir, sums, **stub))
    more: dict[str, Any] = {"generation__resume": "extend", "actor_rollout_ref__rollout__n": 3} | stub
    extended = run_generation(config(run_dir, sums, **more))
    assert (extended.total, extended.completed, extended.generated) == (39, 39, 15)
    after = {(row["index"], row["repeat"]): row["response_ids"] for row in rows_of(run_dir)}
    assert len(after) == 39
    assert all(after[row["index"], row["repeat"]] == row["response_ids"] for row in before)
    assert validate_run(run_dir).sound
    assert run_generation(config(run_dir, sums, **more)).generated == 0
    write_sums(sums, [*reversed(PAIRS), (5, 6)])
    with pytest.raises(IdentityMismatchError):
        run_generation(config(run_dir, sums, **more))


def test_shuffle_and_max_samples_choose_rows_by_seed(
    tmp_path: Path, sums: Path, stub: dict[str, Any]
) -> None:
    changes: dict[str, Any] = {"data__shuffle": True, "data__seed": 3, "data__train_max_samples": 4}
    one = run_generation(config(tmp_path / "one", sums, **changes, **stub))
    two = run_generation(config(tmp_path / "two", sums, **changes, **stub))
    chosen = [sorted(set(pq.read_table(result.artifact)["index"].to_pylist())) for result in (one, two)]
    assert len(chosen[0]) == 4
    assert chosen[0] == chosen[1] != [0, 1, 2, 3]


def test_overlong_prompts_are_counted_and_left_out(tmp_path: Path, sums: Path, stub: dict[str, Any]) -> None:
    add_long_prompt(sums)
    result = run_generation(config(tmp_path / "kept", sums, data__filter_overlong_prompts=True, **stub))
    assert (result.total, result.failed) == (24, 0)
    failing = run_generation(config(tmp_path / "failing", sums, **stub))
    assert (failing.total, failing.failed, failing.exit_code) == (26, 2, 1)
    truncated = run_generation(config(tmp_path / "cut", sums, data__truncation="left", **stub))
    assert (truncated.total, truncated.failed) == (26, 0)
    lengths = [len(ids) for ids in pq.read_table(truncated.artifact)["prompt_ids"].to_pylist()]
    assert max(lengths) == 64


def test_damage_is_redone(tmp_path: Path, sums: Path, stub: dict[str, Any]) -> None:
    run_dir = tmp_path / "run"
    run_generation(config(run_dir, sums, **stub))
    whole = pq.read_table(run_dir / "trajectories.parquet", columns=["response_ids"])
    batch = RunPaths(run_dir).batch(1)
    data = bytearray(batch.read_bytes())
    data[-40] ^= 0xFF  # in the footer: found when the run is opened
    batch.write_bytes(data)
    result = run_generation(config(run_dir, sums, **stub))
    assert (result.completed, result.exit_code) == (24, 0)
    assert "batch_000001.parquet" in result.damage[0]
    assert read_status(run_dir).quarantined == ["batch_000001.parquet"]
    assert pq.read_table(run_dir / "trajectories.parquet", columns=["response_ids"]).equals(whole)
    assert validate_run(run_dir).sound


def add_long_prompt(sums: Path) -> None:
    long = orjson.dumps({"prompt": "7" * 200, "data_source": "sums", "ground_truth": "1"})
    sums.write_bytes(sums.read_bytes() + long + b"\n")


@pytest.mark.parametrize("changes", [{"data__max_prompt_length": 400}, {"data__truncation": "left"}])
def test_the_advice_for_long_prompts_works_in_the_run_they_failed_in(
    tmp_path: Path, sums: Path, stub: dict[str, Any], changes: dict[str, Any]
) -> None:
    add_long_prompt(sums)
    run_dir = tmp_path / "run"
    assert run_generation(config(run_dir, sums, **stub)).failed == 2
    before = pq.read_table(run_dir / "trajectories.parquet").slice(0, 24)
    again = run_generation(config(run_dir, sums, generation__retry_failed=True, **changes, **stub))
    assert (again.completed, again.generated, again.failed) == (26, 2, 0)
    assert pq.read_table(run_dir / "trajectories.parquet").slice(0, 24).equals(before)
    assert validate_run(run_dir).sound
    assert run_generation(config(run_dir, sums, **changes, **stub)).generated == 0
    with pytest.raises(IdentityMismatchError, match=r"data\.(max_prompt_length|truncation): "):
        run_generation(config(run_dir, sums, **stub))  # 2 rollouts are done that this would not make


LOOP = """
from rollstream.agent.single_turn import SingleTurnAgent
class Mine(SingleTurnAgent):
    async def run(self, *given, **row):
        {}
"""


def with_loop(run_dir: Path, files: Path, body: str, **changes: Any) -> dict[str, Any]:
    code = run_dir.parent / f"loop_{run_dir.name}_{len(body)}.py"
    code.write_text(LOOP.format(body))
    loops = run_dir.parent / "loops.yaml"
    loops.write_text(f"- name: mine\n  _target_: {code}:Mine\n")
    agent = {"agent_loop_config_path": str(loops), "default_agent_loop": "mine"}
    return config(run_dir, files, actor_rollout_ref__rollout__agent=agent, **changes)


MENDED = "return await super().run(*given, **row)"


@pytest.mark.parametrize("in_flight", [1, 24])
def test_a_loop_that_always_raises_stops_the_run_and_is_mended_in_place(
    tmp_path: Path, sums: Path, stub: dict[str, Any], in_flight: int
) -> None:
    run_dir = tmp_path / "run"
    broken = with_loop(
        run_dir, sums, "raise ValueError(f'no {id(self)}')", generation__stop_after_failures=10, **stub
    )
    broken["generation"]["max_in_flight"] = in_flight
    result = run_generation(broken)
    assert (result.exit_code, result.failed, result.complete) == (1, 15, False)  # the 15th is of the 8th row
    assert result.gave_up is not None and "ValueError: no " in result.gave_up
    (cause,) = result.failure_causes
    assert (cause.count, cause.example[:15]) == (15, "ValueError: no ")
    assert "stopped: 0/24" in summarise(result)
    assert "15 failed: ValueError: no " in summarise(result)
    (seen,) = read_status(run_dir).failure_causes
    assert (seen.count, seen.example) == (cause.count, cause.example)
    mended = run_generation(with_loop(run_dir, sums, MENDED, **stub))
    assert (mended.completed, mended.failed, mended.exit_code) == (24, 0, 0)
    assert len(list((run_dir / "logs").glob("failed-*/*.rsj"))) == 1
    assert validate_run(run_dir).sound
    with pytest.raises(IdentityMismatchError, match="agent loop mine"):
        run_generation(with_loop(run_dir, sums, MENDED + "  # otherwise", **stub))


def test_what_differs_is_named_by_file_and_setting(tmp_path: Path, sums: Path, stub: dict[str, Any]) -> None:
    given = config(tmp_path / "run", sums, **stub)
    run_generation(given)
    given["data"]["max_prompt_length"] = 30
    write_sums(sums, PAIRS[:-1])
    with pytest.raises(IdentityMismatchError) as caught:
        run_generation(given)
    said = str(caught.value)
    assert "data.max_prompt_length: 64 -> 30" in said
    assert "prompt rows: sums.jsonl has another content" in said
    assert "digest" not in said


@pytest.mark.parametrize("words", [["data.max_prompt_length=4"], ["trainer.default_local_dir=/dev/null/x"]])
def test_a_dry_run_refuses_what_the_run_refuses(
    tmp_path: Path, sums: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = [
        f"actor_rollout_ref.model.path={MODEL_PATH}",
        f"data.train_files={sums}",
        f"trainer.default_local_dir={tmp_path / 'run'}",
        *words,
    ]
    said = []
    for dry in ([], ["--dry-run"]):
        assert cli(["generate", *given, *dry]) == 2
        said.append(capsys.readouterr().err.rstrip().splitlines()[-1])
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"data__train_files": "none.jsonl"}, DataError, "none.jsonl"),
        ({"actor_rollout_ref__model__path": "./nowhere"}, ConfigError, "nowhere"),
        ({"actor_rollout_ref__rollout__response_length": 5000}, ConfigError, "4096"),
        ({"custom_reward_function__path": "none.py"}, ConfigError, "none.py"),
        ({"trainer__default_local_dir": "/proc/nothing/here"}, RunDirectoryError, "/proc/nothing"),
    ],
)
def test_bad_input_is_named(
    tmp_path: Path, sums: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run_generation(config(tmp_path / "run", sums, **changes))


def test_a_bad_row_is_named_before_anything_is_generated(tmp_path: Path, sums: Path) -> None:
    sums.write_bytes(sums.read_bytes() + b'{"prompt": 17}\n{"question": "?"}\n')
    with pytest.raises(DataError, match=r"2 of 14 rows(.|\n)*sums\.jsonl, row 12") as caught:
        run_generation(config(tmp_path / "run", sums))
    assert "row 13" in str(caught.value)


def test_command_line_from_generate_to_export(
    tmp_path: Path, sums: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    words = [
        f"actor_rollout_ref.model.path={MODEL_PATH}",
        f"data.train_files={sums}",
        f"trainer.default_local_dir={run_dir}",
        "actor_rollout_ref.rollout.response_length=24",
        "generation.export=[jsonl]",
    ]
    command = [sys.executable, "-m", "rollstream.generation.main", "--json", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert orjson.loads(done.stdout)["completed"] == 12
    assert "| 12/12 [" in done.stderr
    assert len((run_dir / "trajectories.jsonl").read_bytes().splitlines()) == 12
    logs = [path.read_text() for path in (run_dir / "logs").glob("attempt-*.log")]
    assert "12 rollouts: 0 done, 0 failed, 12 owed" in logs[0]

    assert cli(["status", str(run_dir), "--json"]) == 0
    assert orjson.loads(capsys.readouterr().out)["completed"] == 12
    assert cli(["validate", str(run_dir)]) == 0
    assert "is sound: 12 rollouts" in capsys.readouterr().out
    assert cli(["show", str(run_dir), "3", "--tokens"]) == 0
    shown = capsys.readouterr().out
    assert "assistant" in shown
    assert "<|im_end|>" in shown
    assert cli(["export", str(run_dir), "--output", str(tmp_path / "x.parquet")]) == 0
    assert cli(["show", str(run_dir), "99"]) == 2
    assert "not in" in capsys.readouterr().err
    assert cli(["status", str(tmp_path / "nothing")]) == 2
    assert cli(["generate", *words, "--dry-run"]) == 0
    assert "dry run: everything resolves" in capsys.readouterr().out
    assert cli(["generate", "--config", str(run_dir / "config.yaml")]) == 0
    assert "nothing left to do" in capsys.readouterr().out
    batch = next((run_dir / "batches").glob("*.parquet"))
    data = bytearray(batch.read_bytes())
    data[100:300] = bytes(200)  # a single bit may hit what nobody reads, and all rows be taken from it
    batch.write_bytes(data)
    assert cli(["validate", str(run_dir)]) == 1
    assert "rollstream validate --repair" in capsys.readouterr().out
    cli(["validate", "--repair", str(run_dir)])
    assert "taken from trajectories.parquet" in capsys.readouterr().out
    assert cli(["generate", "--config", str(run_dir / "config.yaml")]) == 0
    assert "12/12 rollouts done" in capsys.readouterr().out
    assert cli(["validate", str(run_dir)]) == 0


def test_a_run_of_stored_conversations_is_resumed_with_the_rows_it_began_with(
    tmp_path: Path, sums: Path, reward_file: Path
) -> None:
    source = config(tmp_path / "source", sums, data__train_max_samples=2)
    run_generation(source)
    rows = f"run:{tmp_path / 'source'}?at=end&ask=Are you sure?&where=finish_reason = stop"
    wanted = run_generation(config(tmp_path / "run", Path(rows))).total
    source["generation"]["resume"] = "extend"
    source["actor_rollout_ref"]["rollout"]["n"] = 3
    run_generation(source)
    assert run_generation(config(tmp_path / "run", Path(rows))).total == wanted
    assert run_generation(config(tmp_path / "other", Path(rows))).total > wanted
