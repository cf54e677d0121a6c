"""Prompts, a reward and a callback that are in memory, and the rollouts of a run as an iterator."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest

import rollstream
from rollstream.errors import ConfigError, DataError, IdentityMismatchError
from rollstream.store.summary import read_status
from rollstream.trajectory import Rollout
from tests.faults.runs import rows_of
from tests.integration.test_generation import config
from tests.support.until import wait_until

ROWS = [
    {
        "prompt": [{"role": "user", "content": f"{at} ="}],
        "data_source": "s",
        "reward_model": {"ground_truth": at},
    }
    for at in range(5)
]


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> dict[str, Any]:
    return {"score": float(ground_truth), "of": data_source}


def another(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    return 0.0


class Indexed:
    """A dataset of the user's: a length and positions."""

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, at: int) -> dict[str, Any]:
        return ROWS[at]


def tree(root: Path, stub: dict[str, Any], **changes: Any) -> dict[str, Any]:
    given = config(root, Path("unused"), **stub)
    del given["data"]["train_files"]
    for key, value in changes.items():
        room, _, name = key.partition("__")
        given.setdefault(room, {})[name] = value
    return given


def of_dataset() -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_list(ROWS)


def of_frame() -> Any:
    return pytest.importorskip("pandas").DataFrame(ROWS)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ROWS,
        Indexed,
        of_dataset,
        of_frame,
    ],
)
def test_a_run_of_rows_and_a_reward_in_memory(tmp_path: Path, stub: dict[str, Any], make: Any) -> None:
    seen: list[Rollout] = []
    given = tree(tmp_path, stub)
    result = rollstream.run_generation(given, prompts=make(), reward=compute_score, on_rollout=seen.append)
    assert (result.total, result.completed, result.generated, result.mean_reward) == (10, 10, 10, 2.0)
    stored = {(row["index"], row["repeat"]): row for row in rows_of(tmp_path)}
    assert sorted((one.index, one.repeat) for one in seen) == sorted(stored)
    for one in seen:
        row = stored[one.index, one.repeat]
        assert one.final.response_ids == row["response_ids"]
        assert one.final.reward == row["reward"] == one.index
        assert orjson.loads(row["reward_extra"]) == one.final.reward_extra == {"of": "s"}
    again = rollstream.run_generation(given, prompts=list(ROWS), reward=compute_score, on_rollout=seen.append)
    assert (again.completed, again.generated, len(seen)) == (10, 0, 10)  # the same rows continue it
    for other, reward in ((ROWS[1:], compute_score), (ROWS, another)):
        with pytest.raises(IdentityMismatchError):
            rollstream.run_generation(given, prompts=other, reward=reward)


def test_texts_are_prompts_and_worker_processes_hand_their_rollouts_back(
    tmp_path: Path, stub: dict[str, Any]
) -> None:
    seen: list[Rollout] = []
    given = tree(tmp_path, stub, generation__processes=2)
    rollstream.run_generation(given, prompts=["a", "b"], on_rollout=seen.append)
    assert len(seen) == 4
    for one in seen:
        assert one.final.messages[0] == {"role": "user", "content": "ab"[one.index]}
        assert len(one.final.response_ids) == len(one.final.response_mask) > 0


@pytest.mark.parametrize(
    ("changes", "given", "error", "why"),
    [
        ({"data__train_files": "x.jsonl"}, {"prompts": ROWS}, ConfigError, "train_files"),
        ({}, {"prompts": "one text"}, ConfigError, "not the text"),
        ({}, {"prompts": {"train": ROWS}}, DataError, "name a split"),
        (
            {"generation__processes": 2},
            {"prompts": ROWS, "reward": another},
            ConfigError,
            "this process only",
        ),
        (
            {"custom_reward_function__path": "r.py"},
            {"prompts": ROWS, "reward": another},
            ConfigError,
            "custom_reward_function",
        ),
        ({}, {"prompts": ROWS, "reward": lambda text: 1.0}, ConfigError, "cannot be called with"),
    ],
)
def test_what_cannot_be_taken_says_so(
    tmp_path: Path,
    stub: dict[str, Any],
    changes: dict[str, Any],
    given: dict[str, Any],
    error: type[Exception],
    why: str,
) -> None:
    with pytest.raises(error, match=why):
        rollstream.run_generation(tree(tmp_path / "run", stub, **changes), **given)
    assert not (tmp_path / "run").exists()


def test_an_exception_of_the_callback_ends_the_run_and_what_is_durable_stays(
    tmp_path: Path, stub: dict[str, Any]
) -> None:
    def on_rollout(rollout: Rollout) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        rollstream.run_generation(tree(tmp_path, stub), prompts=ROWS, on_rollout=on_rollout)
    assert read_status(tmp_path).completed > 0
    assert rollstream.run_generation(tree(tmp_path, stub), prompts=ROWS).completed == 10


@pytest.mark.parametrize("named", [True, False])
def test_rollouts_are_iterated_over(tmp_path: Path, stub: dict[str, Any], named: bool) -> None:
    given = tree(tmp_path / "run", stub)
    if not named:
        del given["trainer"]
    found = list(rollstream.generate(given, prompts=ROWS, reward=compute_score))
    assert sorted((one.index, one.repeat) for one in found) == [(at, n) for at in range(5) for n in range(2)]
    assert all(one.final.reward == one.index for one in found)
    assert (tmp_path / "run" / "trajectories.parquet").exists() == named


def test_a_closed_iterator_ends_its_run_and_the_same_call_continues(
    tmp_path: Path, stub: dict[str, Any]
) -> None:
    given = tree(tmp_path, stub, generation__max_in_flight=1)
    called, may_go_on = threading.Event(), threading.Event()

    def blocks_after_the_first(**row: Any) -> float:
        if called.is_set():
            may_go_on.wait(60)
        called.set()
        return 1.0

    rollouts = rollstream.generate(given, prompts=ROWS, reward=blocks_after_the_first)
    first = next(rollouts)
    rollouts.close()
    assert "rollstream-generate" not in [thread.name for thread in threading.enumerate()]
    assert read_status(tmp_path).completed == 1
    may_go_on.set()
    rest = list(rollstream.generate(given, prompts=ROWS, reward=blocks_after_the_first))
    assert len(rest) == 9
    assert first.key not in [one.key for one in rest]


@pytest.mark.parametrize(("processes", "in_flight"), [(1, 3), (2, 2)])
def test_a_slow_iteration_holds_the_run_back(
    tmp_path: Path, stub: dict[str, Any], processes: int, in_flight: int
) -> None:
    """A rollout begins only while fewer than `ahead` wait, so no more than these and those in flight are scored."""
    scored, ahead = tmp_path / "scored", 3
    scored.touch()
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        f"    with open({str(scored)!r}, 'ab', buffering=0) as file:\n"
        "        file.write(b'.')\n"
        "    return 1.0\n"
    )
    given = tree(
        tmp_path / "run",
        stub,
        generation__processes=processes,
        generation__max_in_flight=in_flight,
        custom_reward_function__path=str(tmp_path / "reward.py"),
    )
    rollouts = rollstream.generate(given, prompts=ROWS, ahead=ahead)
    for taken in range(1, 11):
        next(rollouts)
        wait_until(lambda: scored.stat().st_size >= min(taken + ahead, 10))  # noqa: B023
        assert scored.stat().st_size <= taken + ahead - 1 + in_flight
    assert list(rollouts) == []
    with pytest.raises(ConfigError, match="ahead must be at least 1"):
        rollstream.generate(given, ahead=0)


def test_leaving_the_loop_ends_the_engine(tmp_path: Path) -> None:
    pytest.importorskip("openvino_genai")
    given = config(tmp_path, Path("unused"))
    del given["data"]["train_files"]
    given["generation"]["max_in_flight"] = 2  # so that the run is not over before its first rollout is taken
    before, during = psutil.Process().children(recursive=True), []
    for one in rollstream.generate(given, prompts=ROWS, reward=compute_score, ahead=1):
        during = [child for child in psutil.Process().children(recursive=True) if child not in before]
        assert one.final.response_ids
        break
    assert during  # the engine is a process of its own
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in during)


def test_an_iterator_that_is_left_open_lets_the_program_end(tmp_path: Path) -> None:
    program = (
        "import rollstream\n"
        f"rollouts = rollstream.generate({config(tmp_path, Path('unused'))!r} | "
        "{'data': {'max_prompt_length': 64}}, prompts=['1 + 2 ='] * 50)\n"
        "print(next(rollouts).index)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.strip().isdigit()
    assert "Traceback" not in done.stderr
