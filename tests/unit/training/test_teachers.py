"""A training asks teachers about each finished rollout once; what they say is in its store, whatever is restarted."""

import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollstream.cli import main
from rollstream.rollout.teachers import ERROR, NAME, Teachers
from rollstream.store.run import Run
from rollstream.store.streams import Stream, note_streams, own_stream, stream_names
from rollstream.store.validate import validate_run
from rollstream.testing.stub_faults import Faults
from rollstream.testing.stub_server import StubModel
from rollstream.training import BatchesAhead, CallableGenerator, PlannedGroup, ReplayGroups, ShuffledPlan
from rollstream.trajectory import Rollout, Trajectory
from tests.faults.runs import stub_in_thread
from tests.support.training import LONG_S, StoredGroups
from tests.unit.training.test_store import batches_in, crashed, train

MODEL = StubModel(vocab_size=2000)


@pytest.fixture
def asked() -> Any:
    """A teacher, and how often it was asked about which ids."""
    count: Counter[tuple[int, ...]] = Counter()

    async def note(ids: list[int]) -> None:
        count[tuple(ids)] += 1

    with stub_in_thread(model=MODEL) as server:
        server.before_scores = note
        yield server, count


def test_a_restart_does_not_ask_again(tmp_path: Path, asked: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server, count = asked
    copy, state, _ = crashed(tmp_path / "store", teachers=Teachers(server.url))
    rollouts = list(Run.open(copy).rollouts(np.arange(1000)))
    there = {(1, *one.final.response_ids): one.final.streams[NAME] for one in rollouts}
    assert len(there) > 60 and all(count[ids] == 1 and len(there[ids]) == 5 for ids in there)
    before = count.total()
    batches = batches_in(copy, StoredGroups(), state, teachers=Teachers(server.url))
    delivered = [batches.next_batch(LONG_S)]
    assert all(one.final.streams[NAME] == there[1, *one.final.response_ids] for one in delivered[0].rollouts)
    batches.trained(delivered[0].step)
    batches.update_weights()
    train(batches, 5)
    batches.stop()
    assert count.total() > before and all(count[ids] == 1 for ids in there)
    # It is read as any stream is, and the store is whole.
    assert stream_names(copy) == [NAME] and Stream(copy, NAME).made["engine"] == "sglang"
    tables = [*Run.open(copy).rows(["response_ids"], [NAME])]
    stored = {(1, *row["response_ids"]): row["stream.teacher"] for one in tables for row in one.to_pylist()}
    assert {ids: stored[ids] for ids in there} == {ids: pytest.approx(there[ids]) for ids in there}
    assert validate_run(copy).sound
    assert main(["audit", str(copy)]) == 0
    printed = capsys.readouterr().out
    assert (
        printed.startswith("teacher: ") and "KL(sampler || stream)" in printed and " 0 more have" in printed
    )
    assert main(["annotate", str(copy), "--list"]) == 0 and NAME in capsys.readouterr().out
    assert main(["annotate", str(copy), "--name", NAME, "--server", server.url]) == 2
    assert "of its training" in capsys.readouterr().err


def test_groups_that_come_whole_are_taught_and_replayed(tmp_path: Path, asked: Any) -> None:
    server, count = asked
    threads = set[str]()

    async def generate(group: PlannedGroup) -> Sequence[Rollout]:
        threads.add(threading.current_thread().name)
        ids = [[group.position, place + 5] for place in range(2)]
        made = [Trajectory([1], one, [1, 1], [-1.0, -1.0], [], "stop") for one in ids]
        return [Rollout(group.index, place, "p" * 32, [one], "x") for place, one in enumerate(made)]

    store = tmp_path / "store"
    generator = CallableGenerator(generate, group_size=2)
    plan = ShuffledPlan(8, seed=1)
    with BatchesAhead(
        plan,
        generator,
        groups_per_step=4,
        store=store,
        token_versions="ignore",
        teachers=Teachers(server.url),
    ) as batches:
        for _ in range(2):
            batch = batches.next_batch(LONG_S)
            assert all(len(one.final.streams[NAME]) == 2 for one in batch.rollouts)
            batches.trained(batch.step)
            batches.update_weights()
    assert threading.current_thread().name not in threads
    before = count.total()
    groups = ReplayGroups(store)
    with BatchesAhead(groups.plan, groups, groups_per_step=4, teachers=Teachers(server.url)) as batches:
        assert all(len(one.final.streams[NAME]) == 2 for one in batches.next_batch(LONG_S).rollouts)
    assert count.total() == before


def test_rows_without_a_teacher_and_a_teacher_that_died(tmp_path: Path, asked: Any) -> None:
    server, _ = asked
    batches = batches_in(tmp_path / "a", teachers=Teachers({"a": server.url}))
    assert not any(one.final.streams for one in batches.next_batch(LONG_S).rollouts)  # no row names one
    batches.stop()
    batches = batches_in(tmp_path / "b", teachers=Teachers(server.url, patience=0.2), max_staleness=0)
    batches.next_batch(LONG_S)
    server.faults = Faults(broken_http=True)
    batches.trained(0)
    batches.update_weights()
    rollouts = batches.next_batch(LONG_S).rollouts
    assert any(ERROR in one.final.extra for one in rollouts)
    assert all((NAME in one.final.streams) != (ERROR in one.final.extra) for one in rollouts)
    batches.stop()


def test_who_asks_nobody_pays_nothing(tmp_path: Path) -> None:
    generator = StoredGroups()
    batches = batches_in(tmp_path / "store", generator)
    assert generator.keeper is batches._store
    batch = batches.next_batch(LONG_S)
    assert not any(one.final.extra for one in batch.rollouts)
    batches.stop()
    assert not (tmp_path / "store" / "streams").exists()


def test_a_store_names_all_its_teachers(tmp_path: Path) -> None:
    for model in ("a", "b", "b", "a"):
        note_streams(tmp_path, {NAME: {"model": model, "engine": "hf"}})
    assert Stream(tmp_path, NAME).made == {"model": "a; b", "engine": "hf"}
    for damaged in ("", "{}"):  # it keeps no training from going on
        own_stream(tmp_path, NAME).write_text(damaged)
        note_streams(tmp_path, {NAME: {"model": "b", "engine": "hf"}})
        assert Stream(tmp_path, NAME).made["model"] == "b"
