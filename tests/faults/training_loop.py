"""A training loop with simulated work that is killed again and again: what `test_training_kill` looks at.

    python -m tests.faults.training_loop FOLDER ORDER STEPS KILLS SEED

Forks the loop, kills it with SIGKILL at a random moment, forks it anew, which goes on from its checkpoint;
after so many kills it is left alone. A checkpoint is one file with "the weights" (all that was trained on, in
order) and the batches' state: both or neither, as a real one should be.
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

ROWS = 23
GROUPS = 4


async def generate(group: PlannedGroup) -> list[int]:
    if group.position % 11 == 5:
        raise ValueError("this prompt never works")
    await asyncio.sleep(random.random() * 0.01)
    return [group.index]


def train(folder: Path, order: Order, steps: int) -> None:
    """Goes on from the checkpoint, if there is one, up to `steps`."""
    checkpoint = folder / "checkpoint.json"
    weights: list[list[list[int]]] = []
    batches = BatchesAhead(
        ShuffledPlan(ROWS, seed=3),
        CallableGenerator(generate),
        groups_per_step=GROUPS,
        max_staleness=2,
        order=order,
        weights="in_flight",
        on_group_failure="drop_and_refill",
    )
    if checkpoint.exists():
        saved = json.loads(checkpoint.read_text())
        weights = saved["weights"]
        batches.load_state_dict(saved["state"])
    with batches:
        while batches.step < steps:
            batch = batches.next_batch(60)
            assert max(batch.staleness) <= 2
            weights.append([[group.position, group.epoch, group.index] for group in batch.groups])
            time.sleep(0.003)
            batches.trained(batch.step)
            half = folder / "checkpoint.half"
            half.write_text(json.dumps({"weights": weights, "state": batches.state_dict()}))
            half.replace(checkpoint)
            batches.update_weights()


def main(folder: Path, order: Order, steps: int, kills: int, seed: int) -> None:
    """The parent: it has no threads, so forking is safe."""
    rng = random.Random(seed)
    killed = 0
    while True:
        child = os.fork()
        if child == 0:
            random.seed(rng.random() + killed)
            train(folder, order, steps)
            os._exit(0)
        if killed < kills:
            time.sleep(rng.uniform(0.0, 0.15))
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
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))  # type: ignore[arg-type]
