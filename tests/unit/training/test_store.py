"""A training's store: what comes back after a restart, what is set aside, and what the ledger says."""

import asyncio
import errno
import itertools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest

from rollstream.agent.tools.session import ToolLimits
from rollstream.agent.tools.toolbox import ToolBox
from rollstream.cli import main
from rollstream.errors import ConfigError, GenerationFailedError, RunDirectoryError, StorageError
from rollstream.rollout.group_reward import give_reward
from rollstream.rollout.worker import make_failure
from rollstream.store.journal import JournalFile, ScanReport, encode_file_header, encode_frame, scan
from rollstream.store.lock import LockHeldError
from rollstream.store.manifest import require_manifest
from rollstream.store.run import Run
from rollstream.store.run_dir import RunDirectory
from rollstream.store.scores import notes_path
from rollstream.store.turns import read_places
from rollstream.store.validate import validate_run
from rollstream.testing.scripted import ScriptedEngine, ScriptedRequest
from rollstream.training import (
    BatchesAhead,
    CallableGenerator,
    Group,
    PlannedGroup,
    ReplayGroups,
    RolloutGroups,
    ShuffledPlan,
)
from rollstream.training.ledger import Ledger, describe, read_ledger
from rollstream.training.store import Note, Resume, TrainingStore, Whole, plain_facts
from rollstream.trajectory import Failure, Rollout, RolloutKey, Trajectory
from rollstream.view import sources
from rollstream.view.sources import RunSource
from tests.support.training import LONG_S, QUICK, StoredGroups, eventually
from tests.unit.agent.rollouts import demo_tokenizer, make_row, make_worker, resources
from tests.unit.agent.test_turns import COUNTS, by_context
from tests.unit.agent.tools.tools import functions

Content = list[tuple[int, int, list[list[int]]]]


def batches_in(
    store: Path | TrainingStore, generator: Any = None, state: dict[str, Any] | None = None, **options: Any
) -> BatchesAhead:
    """Four groups a batch, two batches ahead; started, from a state where there is one."""
    replay = options.pop("replay", True)
    options = {"groups_per_step": 4, "max_staleness": 2, "retry": QUICK, **options}
    plan = ShuffledPlan(7, seed=2)
    batches = BatchesAhead(plan, generator or StoredGroups(), weights="in_flight", store=store, **options)
    if state is not None:
        batches.load_state_dict(state, replay=replay)
    batches.start(weights=None if state is None else "w")
    return batches


def content_of(groups: Sequence[Group]) -> Content:
    return [(one.position, one.start, [r.final.response_ids for r in one.rollouts]) for one in groups]


def train(batches: BatchesAhead, steps: int) -> list[Content]:
    trained = []
    for _ in range(steps):
        batch = batches.next_batch(LONG_S)
        assert all(0 <= staleness <= 2 for staleness in batch.staleness)
        trained.append(content_of(batch.groups))
        batches.trained(batch.step)
        batches.update_weights()
    return trained


def ledger_of(root: Path) -> Ledger:
    """Checks that it closes."""
    ledger = read_ledger(root)
    assert ledger is not None
    parts = (ledger.trained, ledger.waiting, ledger.in_flight, ledger.filtered, ledger.in_failed_groups)
    rest = (*ledger.failed.values(), *ledger.set_aside.values(), ledger.not_needed, ledger.cut_off)
    assert ledger.begun == sum(parts) + sum(rest) and min((*parts, *rest)) >= 0
    assert (ledger.groups_skipped, ledger.groups_doubled) == (0, 0)
    assert describe(ledger)[0] == f"{ledger.begun} rollouts begun"
    return ledger


def crashed(
    store: Path, made: list[str] | None = None, **options: Any
) -> tuple[Path, dict[str, Any], list[Content]]:
    """A copy of the store in the middle of a training, the state of its second step, and what was trained on.

    Position 24 has two of its three rollouts there.
    """
    made = [] if made is None else made
    generator = StoredGroups(made.append, stopped=lambda position, place: position >= 24 and place == 1)
    batches = batches_in(store, generator, **options)
    trained = train(batches, 2)
    state = batches.state_dict()
    trained += train(batches, 3)
    eventually(lambda: {"24 0\n", "24 2\n"} <= {*made})
    copy = store.with_name("copy")
    eventually(lambda: _copied(store, copy))
    batches.stop()
    return copy, state, trained


def _copied(store: Path, copy: Path) -> bool:
    """Not while a journal becomes a batch."""
    shutil.rmtree(copy, ignore_errors=True)
    try:
        shutil.copytree(store, copy)
    except shutil.Error:
        return False
    return True


@pytest.mark.parametrize("order", ["plan", "first"])
def test_after_a_crash_batches_are_trained_again_and_only_what_is_missing_is_made(
    tmp_path: Path, order: str
) -> None:
    copy, state, trained = crashed(tmp_path / "store", order=order)
    finished = {f"{one.index} {one.repeat}\n" for one in _rollouts(copy)}
    again: list[str] = []
    batches = batches_in(copy, StoredGroups(again.append), state, order=order)
    assert train(batches, 3) == trained[2:]
    further = train(batches, 4)
    batches.stop()
    assert {"24 0\n", "24 2\n"} <= finished and not finished & {*again} and "24 1\n" in again
    positions = [position for batch in trained + further for position, _, _ in batch]
    assert len(set(positions)) == len(positions)
    ledger = ledger_of(copy)
    assert (ledger.batches, ledger.batches_trained_again, ledger.set_aside) == (9, 3, {})


def _rollouts(root: Path) -> list[Rollout]:
    import numpy as np

    return list(Run.open(root).rollouts(np.arange(1000)))


def test_a_stored_rollout_is_what_was_made(tmp_path: Path) -> None:
    copy, _, trained = crashed(tmp_path / "store")
    rollouts = {(one.index, one.repeat): one for one in _rollouts(copy)}
    position, start, ids = trained[0][0]
    stored = rollouts[position, 0].final
    assert stored.response_ids == ids[0]
    assert stored.extra["training_store"]["start"] == start and stored.policy_versions == [(0, start)]


@pytest.mark.parametrize(
    ("generator", "options", "reason"),
    [
        (StoredGroups(facts={"identity": {"tools": "others"}}), {}, "made with another tools"),
        (StoredGroups(facts={"reward": "another"}), {}, "made with another reward"),
        (StoredGroups(), {"replay": False}, "went back to a checkpoint before it"),
    ],
)
def test_what_is_not_used_is_set_aside_with_the_reason(
    tmp_path: Path, generator: Any, options: dict[str, Any], reason: str
) -> None:
    copy, state, trained = crashed(tmp_path / "store")
    batches = batches_in(copy, generator, state, **options)
    again = train(batches, 3)
    batches.stop()
    assert [[one[0] for one in batch] for batch in again] == [
        [one[0] for one in batch] for batch in trained[2:]
    ]
    for mine, theirs in zip(chain(*again), chain(*trained[2:]), strict=True):
        assert mine[2] != theirs[2]
    ledger = ledger_of(copy)
    assert sum(count for why, count in ledger.set_aside.items() if reason in why) >= 3 * 12
    assert any((copy / "set_aside").iterdir()) and ledger.tokens_made_again >= 6 * 36
    resumed = batches_in(copy, generator, batches.state_dict())  # and now it goes on as it is
    assert train(resumed, 1)[0]
    resumed.stop()
    assert ledger_of(copy).set_aside == ledger.set_aside


def test_waiting_groups_of_a_row_that_has_changed_are_made_again(tmp_path: Path) -> None:
    copy, state, trained = crashed(tmp_path / "store")
    batches = batches_in(copy, StoredGroups(key="f"), state)
    assert train(batches, 3) == trained[2:]  # what was trained stays
    batches.stop()
    assert "its prompt row has changed" in ledger_of(copy).set_aside


def test_a_stricter_bound_sets_the_oldest_aside(tmp_path: Path) -> None:
    copy, state, trained = crashed(tmp_path / "store")
    batches = batches_in(copy, None, state, max_staleness=0)
    assert train(batches, 3) == trained[2:]
    after = batches.next_batch(LONG_S)
    assert after.staleness == [0] * 4
    batches.stop()
    assert any(reason.startswith("begun with version") for reason in ledger_of(copy).set_aside)


def test_a_new_training_moves_an_old_store_away(tmp_path: Path) -> None:
    copy, state, _ = crashed(tmp_path / "store")
    batches_in(copy).stop()
    [old] = copy.parent.glob("copy-*")
    assert Run.open(old).state().keys.done > 36
    assert not Run.open(copy).state().keys.done or Run.open(copy).manifest.run_id != state["store"]


def test_without_a_checkpoint_it_goes_on_when_it_is_told_to(tmp_path: Path) -> None:
    copy, _, trained = crashed(tmp_path / "store")
    batches = batches_in(TrainingStore(copy, resume=True))
    assert train(batches, 5) == trained
    batches.stop()
    assert ledger_of(copy).batches_trained_again == 5


def test_old_batches_are_deleted(tmp_path: Path) -> None:
    batches = batches_in(TrainingStore(tmp_path / "store", keep_steps=1))
    for _ in range(8):
        train(batches, 1)
        state = batches.state_dict()
    batches.stop()
    ledger = ledger_of(tmp_path / "store")
    assert ledger.trained == 8 * 12
    assert Run.open(tmp_path / "store").state().keys.done < ledger.trained
    batches = batches_in(tmp_path / "store", None, state)
    train(batches, 2)
    batches.stop()
    assert ledger_of(tmp_path / "store").trained == 10 * 12


def test_a_bound_in_bytes_takes_what_was_set_aside_first_and_nothing_that_a_checkpoint_needs(
    tmp_path: Path,
) -> None:
    copy, state, trained = crashed(tmp_path / "store")
    batches = batches_in(TrainingStore(copy), StoredGroups(facts={"reward": "another"}), state)
    train(batches, 3)
    state = batches.state_dict()
    batches.stop()
    assert any((copy / "set_aside").iterdir())
    store = TrainingStore(copy, keep_steps=10**6, max_bytes=0)  # a batch for each step
    batches = batches_in(store, StoredGroups(facts={"reward": "another"}), state)
    states, content = [state], list[Content]()
    for _ in range(6):
        content += train(batches, 1)
        states.append(batches.state_dict())
    batches.stop()
    assert not any((copy / "set_aside").iterdir())
    done = Run.open(copy).state().keys
    assert not any(done.is_done(position, 0) for batch in trained[:2] for position, _, _ in batch)
    batches = batches_in(store.root, StoredGroups(facts={"reward": "another"}), states[-2])
    assert train(batches, 1) == content[-1:]
    batches.stop()
    ledger_of(copy)


class _Odd:
    name = "odd"

    def drops(self, group: Group) -> str | None:
        return "its position is odd" if group.position % 2 else None


def test_dropped_and_failed_groups_stay_so_and_are_counted(tmp_path: Path) -> None:
    def fails(group: PlannedGroup) -> bool:
        return group.position % 6 == 4

    options: dict[str, Any] = {"filters": [_Odd()], "on_group_failure": "drop_and_refill"}
    batches = batches_in(tmp_path / "store", StoredGroups(fails=fails), **options)
    trained = train(batches, 2)
    state = batches.state_dict()
    trained += train(batches, 2)
    batches.stop()
    before = ledger_of(tmp_path / "store")
    assert before.filtered >= 12
    batches = batches_in(tmp_path / "store", StoredGroups(fails=fails), state, **options)
    assert train(batches, 2) == trained[2:]
    batches.stop()
    assert ledger_of(tmp_path / "store").filtered >= before.filtered


def test_who_learns_is_told_again_of_groups_that_were_dropped_since(tmp_path: Path) -> None:
    class Learning(_Odd):
        def __init__(self) -> None:
            self.dropped: dict[int, list[float | None]] = {}

        def observe_dropped(self, group: Group) -> None:
            self.dropped[group.position] = group.rewards

    options: dict[str, Any] = {"max_staleness": 0, "groups_per_step": 2}
    before, after = Learning(), Learning()
    batches = batches_in(tmp_path / "store", filters=[before], **options)
    train(batches, 2)
    state = batches.state_dict()
    known = {*before.dropped}
    train(batches, 2)
    batches.stop()
    batches = batches_in(tmp_path / "store", None, state, filters=[after], **options)
    assert after.dropped == {at: one for at, one in before.dropped.items() if at not in known} != {}
    batches.stop()


def test_groups_that_come_whole_are_kept_whole(tmp_path: Path) -> None:
    calls: list[int] = []

    async def generate(group: PlannedGroup) -> list[Any]:
        calls.append(group.position)
        one = Trajectory([1], [group.position], [1], [-0.5], [], "stop", [])
        return [Rollout(group.index, group.epoch, f"{group.index:032x}", [one], "sums")]

    async def update(source: str, version: int) -> None: ...

    generator = CallableGenerator(generate, update_weights=update, group_size=1)
    batches = batches_in(tmp_path / "store", generator)
    train(batches, 1)
    state = batches.state_dict()
    trained = train(batches, 2)
    batches.stop()
    batches = batches_in(tmp_path / "store", generator, state)
    assert train(batches, 2) == trained
    batches.stop()
    assert len(set(calls)) == len(calls)


@pytest.mark.parametrize(
    ("generator", "message"),
    [
        (object(), "CallableGenerator"),
        (CallableGenerator(StoredGroups().generate), "group_size"),
        (CallableGenerator(lambda group: _numbers(), group_size=1), "the generator gave 1"),
    ],
)
def test_a_store_needs_rollouts(tmp_path: Path, generator: Any, message: str) -> None:
    with pytest.raises((ConfigError, GenerationFailedError), match=message):
        batches_in(tmp_path / "store", generator).next_batch(LONG_S)


async def _numbers() -> list[int]:
    return [1]


@pytest.mark.parametrize("durable", [False, True])
def test_a_full_disk_ends_it_with_the_cause_and_it_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    """`durable`: it is full when a batch has been trained; else when a rollout is finished."""
    batches = batches_in(tmp_path / "store")
    train(batches, 2)
    state = batches.state_dict()
    append: Callable[..., None] = JournalFile.append

    def full(self: JournalFile, data: bytes = b"", *, durably: bool = True) -> None:
        if durably:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(self, data, durably=False)

    monkeypatch.setattr(JournalFile, "sync" if durable else "append", full)
    with pytest.raises((StorageError, GenerationFailedError), match="No space left on device"):
        train(batches, 9)
    batches.stop()
    monkeypatch.undo()
    batches = batches_in(tmp_path / "store", None, state)
    train(batches, 3)
    batches.stop()
    assert ledger_of(tmp_path / "store").batches == 5


def test_a_rollout_goes_on_behind_its_finished_turns(tmp_path: Path) -> None:
    """In the first life no rollout gets beyond its second turn; the second one asks for what is missing alone."""
    tools = functions(tmp_path, COUNTS)

    def groups_of(rule: Any) -> tuple[RolloutGroups, ScriptedEngine]:
        engine = ScriptedEngine(rule)

        async def make_worker_() -> Any:
            box = ToolBox(tools, ToolLimits())
            await box.describe()
            return make_worker(resources(engine, tools=box))

        groups = RolloutGroups(make_worker_, make_row, 2, engine=engine)
        groups.keep_turns = True
        return groups, engine

    async def stuck(request: ScriptedRequest) -> list[int]:
        if turn_of(request) == 2:
            await asyncio.Event().wait()
        return by_context(request)

    groups, engine = groups_of(stuck)
    options: dict[str, Any] = {"max_staleness": 0, "groups_per_step": 2}
    batches = batches_in(tmp_path / "store", groups, **options)
    eventually(lambda: sum(turn_of(request) == 2 for request in engine.requests) == 4)
    eventually(lambda: _copied(tmp_path / "store", tmp_path / "copy") and _turns(tmp_path / "copy") == 8)
    batches.stop()
    assert len(engine.requests) == 12
    groups, engine = groups_of(by_context)
    batches = batches_in(TrainingStore(tmp_path / "copy", resume=True), groups, **options)
    [batch] = [batches.next_batch(LONG_S)]
    assert sorted(map(turn_of, engine.requests)) == [2] * 4 + [3] * 4
    whole, _ = groups_of(by_context)
    expected = batches_in(tmp_path / "whole", whole, **options).next_batch(LONG_S)
    assert content_of(batch.groups) == content_of(expected.groups)
    batches.trained(0)
    batches.stop()
    assert _turns(tmp_path / "copy") == 0


def _turns(root: Path) -> int:
    """Turns of rollouts that are not finished; a copy that misses some is made again."""
    run = Run.open(root)
    places = read_places(run.paths, run.manifest.run_id_bytes, run.state().keys.is_done, [])
    turns = sum(len(places.of(RolloutKey(row, place))) for row in places.rows() for place in range(2))
    if turns not in (0, 8):
        shutil.rmtree(root)
    return turns


def turn_of(request: ScriptedRequest) -> int:
    text = demo_tokenizer().decode(request.prompt_ids, skip_special_tokens=False)
    return text.count("assistant\n") - 1


# --- what goes wrong at a restart


def test_a_crash_while_rollouts_are_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are of another reward: none of them may be trained, whenever it crashes."""
    copy, state, trained = crashed(tmp_path / "store")
    other = {"reward": "another"}
    forget = RunDirectory.forget
    for fails_before in (True, False):

        def full(self: RunDirectory, keys: Any, aside: Any = None, before: bool = fails_before) -> None:
            if not before:
                forget(self, keys, aside)
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as broken, pytest.raises(OSError, match="No space"):
            broken.setattr(RunDirectory, "forget", full)
            batches_in(copy, StoredGroups(facts=other), state)
    batches = batches_in(copy, StoredGroups(facts=other), state)
    again = train(batches, 3)
    batches.stop()
    for mine, theirs in zip(chain(*again), chain(*trained[2:]), strict=True):
        assert mine[0] == theirs[0] and mine[2] != theirs[2]
    assert [*ledger_of(copy).set_aside] == ["it was made with another reward"]


def test_a_second_trainer_leaves_the_store_of_the_first_alone(tmp_path: Path) -> None:
    batches = batches_in(tmp_path / "store")
    train(batches, 1)
    with pytest.raises(LockHeldError):
        batches_in(tmp_path / "store")
    train(batches, 1)
    batches.stop()
    assert ledger_of(tmp_path / "store").batches == 2


def test_a_store_that_was_begun_from_the_same_checkpoint_goes_on(tmp_path: Path) -> None:
    """Its folder was deleted, or the checkpoint is older than the store."""
    batches = batches_in(tmp_path / "store")
    train(batches, 2)
    state = batches.state_dict()
    batches.stop()
    shutil.rmtree(tmp_path / "store")
    batches = batches_in(tmp_path / "store", None, state)
    trained = train(batches, 2)
    batches.stop()
    batches = batches_in(tmp_path / "store", None, state)
    assert train(batches, 2) == trained
    batches.stop()


def test_a_crash_after_going_back_costs_no_more_than_another(tmp_path: Path) -> None:
    copy, state, _ = crashed(tmp_path / "store")
    batches = batches_in(copy, None, state, replay=False)
    trained = train(batches, 2)
    batches.stop()
    batches = batches_in(copy, None, state, replay=False)
    assert train(batches, 2) == trained
    batches.stop()


@pytest.mark.parametrize("lost", [30, 1, None])
def test_notes_that_are_lost_cost_no_rollout(tmp_path: Path, lost: int | None) -> None:
    """All but the first ones (a power failure), the last one is damaged, or the file is gone."""
    made: list[str] = []
    batches = batches_in(tmp_path / "store", StoredGroups(made.append), max_staleness=1)
    eventually(lambda: len(batches.waiting) == 8)
    batches.stop()
    path = notes_path(tmp_path / "store")
    if lost is None:
        path.unlink()
    elif lost == 1:
        data = path.read_bytes()
        path.write_bytes(data[:-100] + bytes([data[-100] ^ 1]) + data[-99:])
    else:
        path.write_bytes(path.read_bytes()[:200])
    again: list[str] = []
    store = TrainingStore(tmp_path / "store", resume=True)
    batches = batches_in(store, StoredGroups(again.append), max_staleness=1)
    train(batches, 2)
    batches.stop()
    assert len(made) == 24 and not {*made} & {*again}


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_is_no_store(tmp_path: Path, resume: bool) -> None:
    copy, _, _ = crashed(tmp_path / "store")
    shutil.rmtree(copy / "training")
    before = (copy / "run.json").read_bytes()
    with pytest.raises(RunDirectoryError, match="no store of a training"):
        batches_in(TrainingStore(copy, resume=resume))
    assert (copy / "run.json").read_bytes() == before


def test_what_was_not_waited_for_does_not_come_back(tmp_path: Path) -> None:
    """A rollout beyond the first two was stored, and is in no batch: in the batch that is trained again neither."""

    class FirstTwo(StoredGroups):
        async def generate(self, group: PlannedGroup) -> list[Rollout]:
            return (await super().generate(group))[1:]

    batches = batches_in(tmp_path / "store", FirstTwo())
    trained = train(batches, 1)
    batches.stop()
    batches = batches_in(TrainingStore(tmp_path / "store", resume=True))
    assert train(batches, 1) == trained
    batches.stop()


def test_what_was_in_flight_keeps_its_place_in_the_plan(tmp_path: Path) -> None:
    stuck = StoredGroups(stopped=lambda position, place: position == 20)
    batches = batches_in(tmp_path / "store", stuck)
    trained = train(batches, 2)
    state = batches.state_dict()
    trained += train(batches, 3)
    eventually(lambda: len(batches.waiting) == 11)
    eventually(lambda: _copied(tmp_path / "store", tmp_path / "copy"))
    batches.stop()
    batches = batches_in(tmp_path / "copy", None, state)
    again = train(batches, 5)
    batches.stop()
    assert again[:3] == trained[2:]
    assert [[one[0] for one in batch] for batch in again[3:]] == [[20, 21, 22, 23], [24, 25, 26, 27]]


def test_who_trains_on_when_generation_has_ended_is_told_why(tmp_path: Path) -> None:
    broken = list[bool]()

    def is_stopped(position: int, place: int) -> bool:
        if position >= 8 and broken:
            raise ValueError("it broke")
        return position >= 8

    batches = batches_in(tmp_path / "store", StoredGroups(stopped=is_stopped))
    batch = batches.next_batch(LONG_S)
    broken.append(True)
    eventually(lambda: not batches.alive)  # and the store is closed
    with pytest.raises(GenerationFailedError, match="it broke"):
        batches.trained(batch.step)
    batches.stop()


def test_a_groups_reward_is_made_of_what_is_stored_and_once(tmp_path: Path) -> None:
    """A crash before it costs no rollout, and one after it no reward."""

    def groups_of(calls: list[list[str]], *, stuck: bool = False) -> tuple[RolloutGroups, ScriptedEngine]:
        engine = ScriptedEngine(by_context)

        async def judge(rollouts: Sequence[Rollout]) -> None:
            calls.append([str(one.repeat) for one in rollouts])
            if stuck:
                await asyncio.Event().wait()
            for number, one in enumerate(rollouts):
                give_reward(one, 10.0 * len(calls) + number, {"call": len(calls)})

        worker = make_worker(resources(engine), loop="single_turn_agent")
        return RolloutGroups(worker, make_row, 2, engine=engine, judge=judge), engine

    def rewards(batch: Any) -> dict[int, list[float | None]]:
        return {group.position: group.rewards for group in batch.groups}

    options: dict[str, Any] = {"max_staleness": 0, "groups_per_step": 2}
    calls: list[list[str]] = []
    groups, engine = groups_of(calls, stuck=True)
    batches = batches_in(tmp_path / "store", groups, **options)
    eventually(lambda: len(calls) == 2)
    eventually(
        lambda: _copied(tmp_path / "store", tmp_path / "copy") and len(_rollouts(tmp_path / "copy")) == 4
    )
    batches.stop()
    assert len(engine.requests) == 4

    calls.clear()
    groups, engine = groups_of(calls)
    batches = batches_in(TrainingStore(tmp_path / "copy", resume=True), groups, **options)
    first = rewards(batches.next_batch(LONG_S))
    assert engine.requests == [] and len(calls) == 2
    assert sorted(reward for group in first.values() for reward in group if reward) == [10, 11, 20, 21]
    # Judged and durable, and not whole yet, as far as its notes say.
    _copied(tmp_path / "copy", tmp_path / "later")
    batches.stop()
    _without_notes(tmp_path / "later", Whole)

    calls.clear()
    groups, engine = groups_of(calls)
    batches = batches_in(TrainingStore(tmp_path / "later", resume=True), groups, **options)
    batch = batches.next_batch(LONG_S)
    assert (rewards(batch), engine.requests, calls) == (first, [], [])
    assert {one.final.reward_extra["call"] for group in batch.groups for one in group.rollouts} == {1, 2}
    batches.trained(batch.step)
    batches.stop()
    read: dict[int, list[float]] = {}
    for table in Run.open(tmp_path / "later").rows(["index", "reward", "reward_extra"]):
        for row in table.to_pylist():
            read.setdefault(row["index"], []).append(row["reward"])
            assert orjson.loads(row["reward_extra"])["call"] in (1, 2)
    assert {position: sorted(found) for position, found in read.items()} == {
        position: sorted(one for one in found if one is not None) for position, found in first.items()
    }
    assert Run.open(tmp_path / "later").state().rewards.mean == 15.5
    replayed = ReplayGroups(tmp_path / "later")
    with BatchesAhead(replayed.plan, replayed, groups_per_step=2) as again:
        assert [*rewards(again.next_batch(LONG_S)).values()] == [first[one] for one in sorted(first)]


def test_a_failure_is_part_of_the_group_that_was_judged(tmp_path: Path) -> None:
    """Else it is tried again after a crash, and the others are compared anew: their snapshots had the old reward."""
    planned, key = PlannedGroup(0, 0, 0), "0" * 32
    failed = make_failure(0, 1, key, 1, "agent", RuntimeError("it broke"))

    async def opened(resume: Resume) -> TrainingStore:
        store = TrainingStore(tmp_path / "store")
        facts = plain_facts(2)
        await store.open(
            facts, resume, rows=2, whole_groups=False, keep_turns=False, prompt_key=lambda index: None
        )
        store.begin(Group(planned, 0))
        return store

    async def run() -> None:
        plan = ShuffledPlan(7, shuffle=False)
        store = await opened(Resume(plan, 0, lambda position: False, None))
        await store.kept(planned)
        final = Trajectory([1], [2], [1], [-0.5], [], "stop", [(0, 0)])
        parts = [replace(final, is_snapshot=True), final]
        made = await store.keep(planned, 0, Rollout(0, 0, key, parts, "test"))
        await store.keep(planned, 1, failed)
        assert isinstance(made, Rollout)
        give_reward(made, 0.5, {})
        await store.keep_rewards(planned, {0: made})
        again = Resume(plan, 0, lambda position: False, store.run_id)
        await store.close()
        store = await opened(again)
        kept = await store.kept(planned)
        assert kept.is_judged and [type(kept.results.get(at)) for at in range(2)] == [Rollout, Failure]
        await store.close()

    asyncio.run(run())


def test_readers_see_what_a_group_was_given_since_they_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that is open goes on reading the notes; the page, which reads a run anew for them, does so seldom."""
    root, plan, clock = tmp_path / "store", ShuffledPlan(7, shuffle=False), itertools.count(1000)
    monkeypatch.setattr(sources, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))

    def rewards(run: Run) -> list[float | None]:
        return [one for table in run.rows(["reward"]) for one in table["reward"].to_pylist()]

    async def write() -> None:
        store = TrainingStore(root)
        facts = {"rows": 2, "whole_groups": False, "keep_turns": False}
        resume = Resume(plan, 0, lambda position: False, None)
        await store.open(plain_facts(1), resume, prompt_key=lambda index: None, **facts)
        made = []
        for position in range(3):
            planned = PlannedGroup(position, 0, position)
            store.begin(Group(planned, 0))
            await store.kept(planned)
            final = Trajectory([1], [2], [1], [-0.5], [], "stop", [(0, 0)])
            made.append(await store.keep(planned, 0, Rollout(position, 0, "0" * 32, [final], "test")))
        await judge(store, made, 0)
        run, page = Run.open(root), RunSource("store", [Run.open(root)], 1.0)
        assert sorted(rewards(run), key=str) == [0.5, None, None]
        assert np.isnan(page.columns()["reward"]).sum() == 2
        for position in (1, 2):
            await judge(store, made, position)
            assert rewards(run).count(None) == 2 - position
        looks = [page.columns() for _ in range(40)]
        missing = [int(np.isnan(one["reward"]).sum()) for one in looks]
        assert missing[0] == 2 and missing[-1] == 0 and 2 <= missing.index(0) <= 10
        await store.close()

    async def judge(store: TrainingStore, made: list[Any], position: int) -> None:
        give_reward(made[position], 0.5 + position, {"rank": position})
        await store.keep_rewards(PlannedGroup(position, 0, position), {0: made[position]})

    asyncio.run(write())
    assert validate_run(root).sound
    # What lies in a damaged note is not simply gone.
    path, run_id = notes_path(root), require_manifest(root).run_id_bytes
    content = bytearray(path.read_bytes())
    frames = [*scan(path, run_id, ScanReport())]
    content[next(one.offset for one in frames if b"judged" in one.body) + 40] ^= 255
    path.write_bytes(content)
    assert Run.open(root).state().rewards.scored == 2
    for words in (["status", str(root)], ["eval", str(root)], ["validate", str(root)]):
        assert main(words) == 1
        told = capsys.readouterr()
        assert "training/000000.rsj" in told.out + told.err
    assert main(["validate", str(root), "--repair"]) == 0 and main(["status", str(root)]) == 0


def _without_notes(root: Path, kind: type[Any]) -> None:
    run_id, path = require_manifest(root).run_id_bytes, notes_path(root)
    decoder = msgspec.msgpack.Decoder(Note)
    kept = [
        encode_frame(0, 0, 0, frame.body)
        for frame in scan(path, run_id, ScanReport())
        if not isinstance(decoder.decode(frame.body), kind)
    ]
    path.write_bytes(b"".join([encode_file_header(run_id), *kept]))
