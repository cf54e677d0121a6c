"""A training loop with simulated work that is killed again and again: what `test_training_kill` looks at.

    python -m tests.faults.training_loop FOLDER ORDER STEPS KILLS SEED [store]

Forks the loop, kills it with SIGKILL at a random moment, forks it anew, which goes on from its checkpoint;
after so many kills it is left alone. A checkpoint is one file with "the weights" (all that was trained on, in
order) and the batches' state: both or neither, as a real one should be. With a store it is made every third step only;
`made.log` has each rollout once it was durable, `trained.log` each batch with what its rollouts are.
"""

import asyncio
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from rollstream.training import BatchesAhead, CallableGenerator, PlannedGroup, ShuffledPlan
from rollstream.training.schedule import Order
from rollstream.training.store import TrainingStore
from tests.support.training import StoredGroups

ROWS = 23
GROUPS = 4


def never_works(group: PlannedGroup) -> bool:
    return group.position % 11 == 5


async def generate(group: PlannedGroup) -> list[int]:
    if never_works(group):
        raise ValueError("this prompt never works")
    await asyncio.sleep(random.random() * 0.01)
    return [group.index]


async def taken(source: str, version: int) -> None:
    """An engine that takes any weights."""


def train(folder: Path, order: Order, steps: int, *, stored: bool) -> None:
    """Goes on from the checkpoint, if there is one, up to `steps`."""
    checkpoint = folder / "checkpoint.json"
    weights: list[list[list[int]]] = []
    batches = BatchesAhead(
        ShuffledPlan(ROWS, seed=3),
        StoredGroups(made=(folder / "made.log").open("a", buffering=1).write, fails=never_works)
        if stored
        else CallableGenerator(generate, update_weights=taken),
        groups_per_step=GROUPS,
        max_staleness=2,
        order=order,
        weights="in_flight",
        on_group_failure="drop_and_refill",
        store=TrainingStore(folder / "store", resume=not checkpoint.exists()) if stored else None,
    )
    log = (folder / "trained.log").open("a", buffering=1)
    if checkpoint.exists():
        saved = json.loads(checkpoint.read_text())
        weights = saved["weights"]
        batches.load_state_dict(saved["state"])
    batches.start(weights="those of the checkpoint" if weights else None)
    with batches:
        while batches.step < steps:
            batch = batches.next_batch(60)
            assert max(batch.staleness) <= 2
            weights.append([[group.position, group.epoch, group.index] for group in batch.groups])
            time.sleep(0.003)
            batches.trained(batch.step)
            if stored:
                content = [
                    [group.start, [one.final.response_ids for one in group.rollouts]]
                    for group in batch.groups
                ]
                log.write(json.dumps([batch.step, content]) + "\n")
            if stored and batches.step % 3 and batches.step < steps:
                batches.update_weights()
                continue
            half = folder / "checkpoint.half"
            half.write_text(json.dumps({"weights": weights, "state": batches.state_dict()}))
            half.replace(checkpoint)
            batches.update_weights()


def main(folder: Path, order: Order, steps: int, kills: int, seed: int, *, stored: bool) -> None:
    """The parent: it has no threads, so forking is safe."""
    rng = random.Random(seed)
    killed = 0
    while True:
        child = os.fork()
        if child == 0:
            random.seed(rng.random() + killed)
            train(folder, order, steps, stored=stored)
            os._exit(0)
        if killed < kills:
            time.sleep(rng.uniform(0.0, 0.4 if stored else 0.15))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            killed += 1
            continue
        assert status == 0, status
        if killed >= kills:
            break
        steps += 10  # it was done before it was killed
    print(json.dumps({"killed": killed, "steps": steps}))


if __name__ == "__main__":
    numbers = map(int, sys.argv[3:6])
    main(Path(sys.argv[1]), sys.argv[2], *numbers, stored=sys.argv[6:] == ["store"])  # type: ignore[arg-type]
