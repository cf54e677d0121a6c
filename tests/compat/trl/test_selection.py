"""Curriculum, filter, priority and token budget, by the trainer's settings."""

from pathlib import Path
from typing import Any

import orjson
import pytest

pytest.importorskip("trl")

from rollstream.errors import ConfigError
from rollstream.integrations.trl import groups
from rollstream.integrations.trl.environment import read_row
from rollstream.integrations.trl.plan import make_plan, make_policies
from rollstream.training import Curriculum, Group, PlannedGroup, TokenBudget
from tests.compat.trl.parts import Recording, environment, rows, settings, trainer
from tests.unit.integrations.trl.test_rows import rollout, trajectory


def weigh_rows(success: Any, trained: int) -> Any:
    return success


def longest(group: Group) -> float:
    return float(group.index)


class DropsSome:
    """Throws away the groups of rows with an even index."""

    name = "odd_rows"

    def drops(self, group: Group) -> str | None:
        return "its row is even" if group.index % 2 == 0 else None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def group(*rewards: float) -> Group:
    made = [rollout(repeat, trajectory(reward=reward)) for repeat, reward in enumerate(rewards)]
    return Group(planned=PlannedGroup(0, 0, 3), start=0, rollouts=made)


def test_names_and_ones_own(tmp_path: Path) -> None:
    def args(**changed: Any) -> Any:
        return settings(tmp_path, order="first", **changed)

    assert make_policies(args()) == {}
    policies = make_policies(args(group_filter="no_signal", group_priority="spread", batch_tokens=900))
    (drops_alike,) = policies["filters"]
    assert drops_alike.drops(group(1.0, 1.0)) and not drops_alike.drops(group(0.0, 1.0))
    assert policies["rank"].rank(group(0.0, 1.0)) < policies["rank"].rank(group(0.5, 1.0))
    assert policies["batch_size"] == TokenBudget(900, 4, 16)
    own = make_policies(args(group_filter=f"{__file__}:DropsSome", group_priority=f"{__name__}.longest"))
    assert own["filters"][0].name == "odd_rows"
    assert own["rank"].rank(group(1.0)) == -3.0
    for name in ("medium_first", "easy_to_hard", f"{__name__}.weigh_rows"):
        plan = make_plan(args(curriculum=name), 6, batches=2, shuffle=True)
        assert isinstance(plan, Curriculum) and plan.length == 8
    assert make_plan(args(group_filter="no_signal"), 6, batches=2, shuffle=True).length is None


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"group_priority": "spread"}, "needs order='first'"),
        ({"batch_tokens": 100, "num_steps_async": 0}, "num_steps_async=1"),
        ({"batch_groups_max": 8}, "is for batch_tokens"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    changed: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        settings(tmp_path, **changed)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"group_filter": "nosignal"}, "group_filter='nosignal': no_signal, or"),
        ({"curriculum": "medium"}, "curriculum='medium': medium_first, easy_to_hard, or"),
        ({"group_priority": "most", "order": "first"}, "group_priority='most': spread, or"),
    ],
)
def test_unknown_names_are_refused_at_start(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        trainer(tmp_path, rows(10), **changed)


@pytest.mark.parametrize(
    "changed",
    [
        {"group_filter": "no_signal"},
        {"curriculum": "easy_to_hard"},
        {"group_priority": "spread", "order": "first"},
    ],
)
def test_selection_by_a_part_of_the_reward_is_refused_at_start(
    changed: dict[str, Any], tmp_path: Path
) -> None:
    def length(completions: Any, **_: Any) -> list[float]:
        return [float(len(str(one))) for one in completions]

    with pytest.raises(ConfigError, match="reward_funcs"):
        trainer(tmp_path, rows(10), reward_funcs=[length], **changed)
    trainer(tmp_path, rows(10), reward_funcs=[length], reward_weights=[1.0, 0.0], **changed)


def test_a_filter_and_a_curriculum_that_are_resumed(tmp_path: Path) -> None:
    changed = {"curriculum": "medium_first", "group_filter": f"{__file__}:DropsSome", "max_steps": 3}
    made = trainer(tmp_path, rows(10), save_strategy="steps", save_steps=2, **changed)
    made.train()
    assert all(row % 2 == 1 for batch in made.trained_rows for row in batch)
    logged = [entry["rollstream/dropped"] for entry in made.state.log_history if "reward" in entry]
    assert len(logged) == 3 and 0 < sum(logged) <= made.batches.counters.dropped
    resumed = trainer(tmp_path, rows(10), **changed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert len(resumed.trained_rows) == 1 and resumed.state.global_step == 3


def test_batches_grow_to_their_tokens(tmp_path: Path) -> None:
    """Of 4 prompts at least, 8 at most: each has some 50 tokens, and 2 rollouts."""
    made: Recording = trainer(
        tmp_path,
        rows(40),
        env=environment(tmp_path),
        max_steps=2,
        per_device_train_batch_size=4,
        steps_per_generation=2,
        gradient_accumulation_steps=2,
        batch_tokens=5_000,
        batch_groups_max=7,
    )
    made.train()
    assert [len(batch) for batch in made.trained_rows] == [14, 14]
    assert [len(output["advantages"]) for output in made.outputs] == [14, 14]


def test_sources_have_their_shares_and_one_that_fails_is_paused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parts = []
    for name, text, more in (
        ("easy", "{at} + 1 =", "weight:2"),
        ("hard", "{at} + 99 =", "weight:1"),
        ("long", "{at} is too long for a prompt" * 60, "weight:1,max_failed_share:0.2"),
    ):
        lines = [orjson.dumps({"prompt": text.format(at=at), "answer": str(at)}) for at in range(10)]
        (tmp_path / f"{name}.jsonl").write_bytes(b"\n".join(lines))
        parts.append(f"{{name:{name},train_files:{tmp_path / name}.jsonl,{more}}}")
    env = environment(tmp_path, "hf", f"data.sources=[{','.join(parts)}]")
    made: Recording = trainer(tmp_path, None, env=env, max_steps=4)
    made.train()
    dataset = env.dataset()
    trained = [[read_row(dataset[row]).columns["source"] for row in batch] for batch in made.trained_rows]
    assert all(len(batch) == 8 and "long" not in batch for batch in trained)
    assert 18 <= sum(batch.count("easy") for batch in trained) <= 24  # of 32: two thirds
    assert "groups of long failed (max_failed_share=0.2)" in caplog.text
    logged = [entry for entry in made.state.log_history if "reward" in entry]
    assert len(logged) == 4 and all(0.5 <= entry["rollstream/easy/share"] <= 0.75 for entry in logged)
    assert "rollstream/hard/reward" in logged[0] and logged[0]["rollstream/easy/failed"] == 0
    with pytest.raises(ConfigError, match=r"curriculum='easy_to_hard' and data\.sources"):
        trainer(tmp_path, None, env=env, curriculum="easy_to_hard")


def test_a_mixture_that_is_resumed_has_the_batches_that_it_would_have_had(tmp_path: Path) -> None:
    parts = []
    for name, weight in (("easy", 0.7), ("hard", 0.3)):
        lines = [orjson.dumps({"prompt": f"{name} {at} + 1 =", "answer": str(at + 1)}) for at in range(10)]
        (tmp_path / f"{name}.jsonl").write_bytes(b"\n".join(lines))
        parts.append(f"{{name:{name},train_files:{tmp_path / name}.jsonl,weight:{weight}}}")
    words = ("hf", f"data.sources=[{','.join(parts)}]")
    changed = {"max_steps": 5, "save_strategy": "steps", "save_steps": 2}
    whole = trainer(tmp_path, None, env=environment(tmp_path, *words), **changed)
    whole.train()
    resumed = trainer(tmp_path, None, env=environment(tmp_path, *words), rollout_store=None, **changed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert len(whole.trained_rows) == 5 and resumed.trained_rows == whole.trained_rows[2:]


def test_a_rollout_that_waits_for_its_source_has_its_time_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [orjson.dumps({"prompt": f"{at} + 1 =", "answer": str(at + 1)}) for at in range(10)]
    (tmp_path / "few.jsonl").write_bytes(b"\n".join(lines))
    source = f"{{name:few,train_files:{tmp_path}/few.jsonl,max_in_flight:1}}"
    plain, timed, most = groups.within, list[Any](), list[int]()

    async def within(running: Any, *how: Any) -> Any:
        timed.append(running)
        most.append(len(timed))
        try:
            return await plain(running, *how)
        finally:
            timed.remove(running)

    monkeypatch.setattr(groups, "within", within)
    made = trainer(tmp_path, None, env=environment(tmp_path, "hf", f"data.sources=[{source}]"), max_steps=1)
    made.train()
    assert len(most) >= 8 and max(most) == 1
