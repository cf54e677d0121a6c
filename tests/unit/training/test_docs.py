"""The loops of docs/training.md, run as they stand there."""

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from rollstream.demo import MODEL_PATH
from rollstream.training import (
    BatchesAhead,
    BatchRequest,
    BatchResult,
    CallableGenerator,
    GroupBatch,
    PlannedGroup,
    ShuffledPlan,
)
from tests.support.training import StoredGroups
from tests.support.until import PATIENCE_S

PAGE = Path(__file__).parents[3] / "docs" / "training.md"


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def block(containing: str) -> str:
    (found,) = [one for one in blocks() if containing in one]
    return found


def as_here(code: str) -> str:
    """The example with the demo model, and fewer groups."""
    code = code.replace("path/to/model", str(MODEL_PATH)).replace("path/to/weights", str(MODEL_PATH))
    few = '"actor_rollout_ref.rollout.response_length=4", "data.max_prompt_length=64", "data.train_files'
    return code.replace('"data.train_files', few).replace("groups_per_step=32", "groups_per_step=4")


def test_the_loop_and_its_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{number} + 1 =", "answer": str(number + 1)} for number in range(40)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("reward.py").write_text("def compute_score(solution_str, **others):\n    return len(solution_str)\n")
    trained: list[GroupBatch] = []
    saved: list[str] = []
    names: dict[str, Any] = {
        "steps": 2,
        "model": None,
        "train_on": trained.append,
        "save": lambda model, state: saved.append(json.dumps(state)),
    }
    loop = as_here(block("batches.times.table()"))
    exec(loop, names)
    assert [batch.step for batch in trained] == [0, 1]
    assert [len(batch.rollouts) for batch in trained] == [32, 32]
    assert all(rollout.final.reward is not None for rollout in trained[0].rollouts)
    assert names["batches"].engine_version == 2

    exec(loop.partition("with BatchesAhead")[0], names)  # as in another process
    names["state"] = json.loads(saved[-1])
    first: list[GroupBatch] = []
    names["train_on"] = first.append
    resume = as_here(block("load_state_dict(state)"))
    exec(resume.replace("...  # as above", "train_on(batches.next_batch())"), names)
    assert isinstance(names["batches"], BatchesAhead)
    assert {version for one in first[0].rollouts for _, version in one.final.policy_versions} == {2}
    assert first[0].step == 2
    assert [group.position for group in first[0].groups] == list(range(8, 12))
    assert first[0].staleness == [0] * 4


def test_the_loop_over_a_plan_that_ends() -> None:
    seen: list[Any] = []

    async def generate(group: PlannedGroup) -> list[int]:
        return [group.index]

    async def update(source: str, version: int) -> None:
        seen.append(version)

    plan = ShuffledPlan(8, epochs=2)
    with BatchesAhead(plan, CallableGenerator(generate, update_weights=update), groups_per_step=4) as batches:
        exec(block("for batch in batches:"), {"batches": batches, "train_on": lambda one: seen.append(one)})
    assert [one if isinstance(one, int) else f"batch {one.step}" for one in seen] == [
        *("batch 0", 1, "batch 1", 2),
        *("batch 2", 3, "batch 3", 4),
    ]


@pytest.mark.parametrize("settings", ["num_steps_async=1", "num_steps_async=2", "num_steps_async=0"])
def test_the_loop_over_batches_by_number_generates_while_it_trains(settings: str) -> None:
    steps = 6
    begun = [threading.Event() for _ in range(steps)]
    trained: list[BatchResult] = []
    ahead = int(settings[-1])

    async def generate(request: BatchRequest) -> Any:
        begun[request.batch_id].set()
        return request.inputs

    def train_on(result: BatchResult) -> None:
        coming = begun[result.batch_id + 1 : result.batch_id + 1 + ahead]
        assert all(one.wait(PATIENCE_S) for one in coming)  # those ahead are begun while this one is trained
        assert not any(one.is_set() for one in begun[result.batch_id + 1 + ahead :])
        trained.append(result)

    names = {
        "dataloader": ["a", "b", "c"],
        "epochs": 2,
        "steps": steps,
        "generate": generate,
        "train_on": train_on,
    }
    exec(block("AsyncDataLoaderWrapper(dataloader)").replace("num_steps_async=1,", f"{settings},"), names)
    assert [result.batch_id for result in trained] == list(range(steps))
    assert [result.results for result in trained] == ["a", "b", "c"] * 2
    assert all(result.batch_id - result.version <= ahead for result in trained)


def test_every_loop_is_run() -> None:
    assert len(blocks()) == 5


def test_a_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan, seen = ShuffledPlan(9, epochs=1), list[GroupBatch]()
    with BatchesAhead(plan, StoredGroups(), groups_per_step=3, store="outputs/rollouts") as batches:
        trained = []
        for batch in batches:
            trained.append([group.index for group in batch.groups])
            batches.trained(batch.step)
            batches.update_weights()
    exec(block("ReplayGroups("), {"train_on": seen.append})
    assert [[group.index for group in batch.groups] for batch in seen] == trained
