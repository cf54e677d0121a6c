"""The worker for `AsyncGRPOTrainer`: its protocol, its samples, new weights, and how it ends."""

import queue
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("trl")

from datasets import Dataset
from trl.experimental.async_grpo.async_grpo_trainer import RolloutQueueDataset
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from rollstream.errors import ConfigError, GenerationFailedError
from rollstream.integrations.trl import EngineWeights, EnvRolloutWorker
from rollstream.integrations.trl.environment import EnvironmentGroups
from rollstream.rollout.worker import RolloutWorker
from rollstream.training.plan import ShuffledPlan
from rollstream.trajectory import Failure
from tests.compat.trl.parts import MODEL, environment, load, rows

N = 4


AHEAD = 3


def make(
    folder: Path, weights: EngineWeights, *, engine: str = "openvino", dataset: Any = None, **changed: Any
) -> EnvRolloutWorker:
    return EnvRolloutWorker(
        environment(folder, engine),
        rows(20) if dataset is None else dataset,
        model_path=str(MODEL),
        num_generations=N,
        max_completion_length=8,
        weights=weights,
        **{"groups_ahead": AHEAD, **changed},
    )


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[tuple[EnvRolloutWorker, EngineWeights]]:
    weights = EngineWeights()
    made = make(tmp_path, weights)
    yield made, weights
    made.stop()
    weights.destroy()


def take(worker: EnvRolloutWorker, count: int) -> list[RolloutSample]:
    taken = []
    for _ in range(count):
        try:
            taken.append(worker.rollout_buffer.get(timeout=60))
        except queue.Empty:
            worker.check_health(1e9)
            raise
    return taken


def test_samples_and_versions(worker: tuple[EnvRolloutWorker, EngineWeights]) -> None:
    made, weights = worker
    model, _ = load()
    weights.init_weight_transfer()
    weights.send_weights(model.named_parameters())
    made.update_model_version(1)
    made.start()
    samples = take(made, 2 * N)
    for sample in samples:
        assert len(sample.input_ids) == len(sample.completion_mask) == len(sample.old_log_probs)
        assert 0 < sample.completion_mask.sum() <= 8
        assert not sample.old_log_probs[sample.completion_mask == 0].any()
        assert sample.model_version == 1
        assert sample.completion[0]["role"] == "assistant"
    by_group: dict[int, list[float]] = {}
    for sample in samples:
        by_group.setdefault(sample.group_id, []).append(sample.advantage)
    assert {len(advantages) for advantages in by_group.values()} == {N}
    assert all(abs(sum(advantages)) < 1e-6 for advantages in by_group.values())

    weights.pause()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    weights.send_weights(model.named_parameters())
    weights.resume()
    made.update_model_version(2)
    newest = take(made, 8 * N)[-1]
    assert newest.model_version == 2
    sampled = newest.old_log_probs[newest.completion_mask == 1]
    assert np.allclose(sampled, -np.log(model.config.vocab_size), atol=1e-3)  # weights of zero know nothing
    assert made.metrics_queue.get_nowait()["rollstream/generation_s"] > 0
    made.check_health(60.0)


def test_the_trainers_own_dataset_takes_them(worker: tuple[EnvRolloutWorker, EngineWeights]) -> None:
    from collections import defaultdict

    made, _ = worker
    made.start()
    metrics: dict[str, list[float]] = defaultdict(list)
    dataset = RolloutQueueDataset(made.rollout_buffer, lambda: 0, made.check_health, 60.0, metrics)
    rows_taken = [row for row, _ in zip(dataset, range(N), strict=False)]
    assert {"input_ids", "completion_mask", "old_log_probs", "advantage"} <= rows_taken[0].keys()
    assert metrics["sample/staleness_max"] == [0.0] * len(metrics["sample/staleness_max"])


def test_groups_on_their_way_or_in_the_queue_are_bounded(
    worker: tuple[EnvRolloutWorker, EngineWeights],
) -> None:
    made, _ = worker
    made.start()
    counters = made._batches.counters
    for taken in range(4):
        until = time.monotonic() + 60
        while counters.begun - taken < AHEAD:  # it does generate as far ahead
            assert time.monotonic() < until
            made.check_health(1e9)
            time.sleep(0.01)
        for _ in range(25):
            assert counters.begun - taken == AHEAD
            time.sleep(0.02)
        take(made, N)


def test_a_rollout_that_failed_brings_no_sample_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = rows(8).to_list()
    listed[3]["prompt"][0]["content"] = "1 + " * 400  # too long
    single = RolloutWorker.run

    async def run(self: RolloutWorker, row: Any, repeat: int) -> Any:
        result = await single(self, row, repeat)
        if row.index != 5 or repeat % N:
            return result
        return Failure(row.index, repeat, row.prompt_key, 1, "agent", "the tool shop is closed", "", 0.0)

    monkeypatch.setattr(RolloutWorker, "run", run)
    weights = EngineWeights()
    made = make(tmp_path, weights, dataset=Dataset.from_list(listed))
    try:
        made.start()
        samples = take(made, 2 * (6 * N + N - 1))  # two epochs
    finally:
        made.stop()
        weights.destroy()
    plan = ShuffledPlan(8, seed=0)
    of_row: dict[int, list[float]] = {}
    for sample in samples:
        of_row.setdefault(plan.at(sample.group_id).index, []).append(sample.advantage)
    assert 3 not in of_row
    assert {row: len(given) for row, given in of_row.items() if row != 3} == {
        row: 2 * (N - 1 if row == 5 else N) for row in range(8) if row != 3
    }
    assert abs(sum(of_row[5])) < 1e-6
    assert made._groups.stamps.keys() <= set(range(16, 16 + 2 * AHEAD))  # of failed groups none is kept


def test_too_many_groups_that_failed_in_a_row_end_it(tmp_path: Path) -> None:
    listed = rows(8).to_list()
    for row in listed:
        row["prompt"][0]["content"] = "1 + " * 400
    weights = EngineWeights()
    made = make(tmp_path, weights, dataset=Dataset.from_list(listed), max_failed_groups=2)
    until = time.monotonic() + 60
    try:
        made.start()
        with pytest.raises(
            GenerationFailedError, match=r"(?s)3 groups failed.*all 4 rollouts of row.*tokens"
        ):
            while time.monotonic() < until:
                made.check_health(1e9)
                time.sleep(0.02)
    finally:
        made.stop()
        weights.destroy()


def test_a_failure_reaches_the_trainers_health_check(
    worker: tuple[EnvRolloutWorker, EngineWeights], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def generate(self: EnvironmentGroups, group: Any) -> Any:
        raise ValueError("the tool shop is closed")

    monkeypatch.setattr(EnvironmentGroups, "generate", generate)
    made, _ = worker
    made.start()
    until = time.monotonic() + 60
    with pytest.raises(GenerationFailedError, match="the tool shop is closed"):
        while time.monotonic() < until:
            made.check_health(60.0)
            time.sleep(0.05)


def test_shared_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="shares the trainer's weights"):
        make(tmp_path, EngineWeights(), engine="hf")
    with pytest.raises(ConfigError, match="groups_ahead=1"):
        make(tmp_path, EngineWeights(), groups_ahead=1)
