"""How near asynchronous training comes to its ideal, and the simulator to what really happens.

    python -m bench.training [--quick] [--json FILE]

Simulated work in real threads: groups are asyncio sleeps in the generation thread, eight at a time, as long
as a seeded distribution says; training is a sleep of the trainer's thread; weights come in flight. Each line
is a training loop of its own; a step's time is the mean once the pipeline is filled. The ideal is
max(generation, training). `predicted` is the simulator told the durations that were asked for, `replayed`
told those that were measured (a sleep on a busy machine takes longer), `forecast` told the distribution only
(other draws).

Last the trainer's own part of a step: forward and backward of the demo model by one thread of torch, alone, and
beside an agent loop in Python that takes 30 ms of CPU a turn, in the trainer's process and in two others. The
answers are a stub server's; a step's figure is the median, without waits for a core. What processes do to each
other's caches shows beside two that have nothing to do with the trainer, and are as busy.
"""

import asyncio
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bench.report import parse_options, print_table, write_json
from rollstream.demo import MODEL_PATH
from rollstream.integrations.configured_groups import ConfiguredGroups
from rollstream.training import BatchesAhead, CallableGenerator, PlannedGroup, ShuffledPlan
from rollstream.training.schedule import Order
from rollstream.training.simulate import Duration, Setup, simulate

GROUPS = 8
"""In a batch, and at once in the engine."""

AHEAD = (0, 1, 2, 4)
RATIOS = ((1, 2), (1, 1), (2, 1))
SEED = 7


@dataclass(frozen=True, slots=True)
class Case:
    """Who does what for how long."""

    name: str
    generation: Duration
    order: Order = "plan"
    slack: int = 1
    """The staleness bound, as a multiple of the batches ahead."""


def cases(unit: float, *, quick: bool) -> list[Case]:
    """Distributions of a group's time; `first` lets long groups be overtaken for four times `ahead` steps."""
    pareto = Duration("pareto", unit, 2.5)
    plain = [Case("constant", Duration("constant", unit)), Case("pareto", pareto)]
    return plain if quick else [*plain, Case("pareto, first", pareto, "first", slack=4)]


@dataclass(frozen=True, slots=True)
class Measured(Duration):
    """Durations that were measured, group by group; those of others are drawn."""

    seconds: Mapping[int, float] = field(default_factory=dict)

    def draw(self, seed: int, position: int) -> float:
        return self.seconds.get(position) or Duration.draw(self, seed, position)


def run(setup: Setup) -> tuple[list[float], BatchesAhead, Setup]:
    """Trains for real; seconds of each step, from batch to batch, and the setup as it turned out to be."""
    took: dict[int, float] = {}

    async def generate(group: PlannedGroup) -> Sequence[Any]:
        began = time.perf_counter()
        await asyncio.sleep(setup.generation.draw(setup.seed, group.position))
        took[group.position] = time.perf_counter() - began
        return [group.index]

    at = []
    batches = BatchesAhead(
        ShuffledPlan(10_000),
        CallableGenerator(generate),
        groups_per_step=setup.groups_per_step,
        max_staleness=setup.max_staleness,
        ahead=setup.ahead,
        order=setup.order,
        max_groups_in_flight=setup.places,
        weights=setup.weights,
    )
    with batches:
        for _ in range(setup.steps + 1):
            batch = batches.next_batch()
            at.append(time.perf_counter())
            time.sleep(setup.training_s)
            batches.trained(batch.step)
            batches.update_weights()
    steps = batches.times.steps[setup.ahead + 1 :]
    generation = setup.generation
    measured = replace(
        setup,
        generation=Measured(generation.kind, generation.mean, generation.shape, took),
        training_s=fmean(step.train_s for step in steps),
        update_s=fmean(step.weights_s for step in steps),
    )
    return [after - before for before, after in itertools.pairwise(at)], batches, measured


def measure(case: Case, ratio: tuple[int, int], unit: float, ahead: int, steps: int) -> dict[str, Any]:
    """One line."""
    setup = Setup(
        generation=replace(case.generation, mean=unit * ratio[0]),
        training_s=unit * ratio[1],
        groups_per_step=GROUPS,
        max_staleness=case.slack * ahead,
        ahead=ahead,
        order=case.order,
        weights="in_flight",
        steps=steps,
        seed=SEED,
    )
    seconds, batches, measured = run(setup)
    settled = fmean(seconds[min(len(seconds) - 1, ahead + 1) :])
    predicted, replayed = simulate(setup).step_s, simulate(measured).step_s
    histogram = batches.staleness_histogram()
    return {
        "group time": case.name,
        "gen:train": f"{ratio[0]}:{ratio[1]}",
        "ahead": ahead,
        "ideal s": setup.ideal_s,
        "step s": settled,
        "of ideal": settled / setup.ideal_s,
        "predicted s": predicted,
        "error %": 100 * (predicted / settled - 1),
        "replayed s": replayed,
        "replay error %": 100 * (replayed / settled - 1),
        "forecast s": simulate(replace(setup, seed=SEED + 1, steps=1000)).step_s,
        "staleness": max(histogram),
        "bound": setup.max_staleness,
        "kept": max(histogram) <= setup.max_staleness,
    }


LOOP = """
import time
from rollstream.agent.base import AgentLoop
from rollstream.agent.conversation import Conversation

class BusyAgent(AgentLoop):
    async def run(self, sampling, *, raw_prompt, prompt_key, **row):
        conversation = Conversation(self, raw_prompt, await self.render(raw_prompt, prompt_key=prompt_key))
        await conversation.generate(sampling)
        until = time.thread_time() + 0.03
        while time.thread_time() < until:
            pass
        return conversation.trajectory("stop")
"""

STRANGER = """
import time
while True:
    until = time.thread_time() + 0.03
    while time.thread_time() < until:
        pass
    time.sleep(0.04)
"""

REWARD = """
def compute_score(**given):
    return 1.0
"""


def own_step(folder: Path, url: str, processes: int | None, steps: int) -> float:
    """Seconds of the trainer's own work in a step; `processes` have the rollouts, None: there are none."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float32)
    ids = torch.randint(1, 200, (16, 32))

    def clock() -> float:
        """Seconds, without those in which this thread waited for a core that other processes had."""
        waited = Path("/proc/thread-self/schedstat").read_text().split()[1]
        return time.perf_counter() - int(waited) / 1e9

    def step() -> float:
        began = clock()
        for _ in range(8):
            model(input_ids=ids, labels=ids).loss.backward()
        return clock() - began

    if processes is None:
        return median(step() for _ in range(steps))
    (folder / "reward.py").write_text(REWARD)
    (folder / "loop.py").write_text(LOOP)
    (folder / "loops.yaml").write_text(f"- name: busy_agent\n  _target_: {folder / 'loop.py'}:BusyAgent\n")
    (folder / "rows.jsonl").write_text("\n".join(f'{{"prompt": "{one} + 1 ="}}' for one in range(64)))
    rollout = "actor_rollout_ref.rollout"
    groups = ConfiguredGroups(
        [
            f"actor_rollout_ref.model.path={MODEL_PATH}",
            f"{rollout}.name=sglang",
            f"{rollout}.server_urls=[{url}]",
            f"{rollout}.n=4",
            f"{rollout}.response_length=32",
            f"{rollout}.agent.agent_loop_config_path={folder / 'loops.yaml'}",
            f"{rollout}.agent.default_agent_loop=busy_agent",
            f"custom_reward_function.path={folder / 'reward.py'}",
            f"data.train_files={folder / 'rows.jsonl'}",
            "generation.max_in_flight=3",
            f"generation.processes={processes}",
        ]
    )
    took = []
    with BatchesAhead(ShuffledPlan(64), groups, groups_per_step=4, weights="in_flight") as batches:
        for _ in range(steps):
            batch = batches.next_batch()
            took.append(step())
            batches.trained(batch.step)
            batches.update_weights("weights")
    return median(took)


def bench_beside(*, quick: bool) -> list[dict[str, Any]]:
    """The trainer's own part of a step, beside rollouts here and there."""
    command = [
        sys.executable,
        "-m",
        "rollstream.testing.stub_server",
        "--port",
        "0",
        "--latency",
        "fixed:0.06",
    ]
    kinds = {
        "alone": None,
        "beside two strangers": None,
        "loop in the trainer": 1,
        "loop in two processes": 2,
    }
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["url"]
        try:
            for name, processes in kinds.items():
                count = 2 if name.endswith("strangers") else 0
                strangers = [subprocess.Popen([sys.executable, "-c", STRANGER]) for _ in range(count)]
                seconds = own_step(Path(folder), url, processes, 8 if quick else 40)
                for stranger in strangers:
                    stranger.kill()
                    stranger.wait()
                alone = rows[0]["own step s"] if rows else seconds
                rows.append({"kind": name, "own step s": seconds, "of alone": seconds / alone})
        finally:
            server.terminate()
    return rows


def bench() -> None:
    """Runs the benchmark."""
    options = parse_options(__doc__.split("\n")[0])
    unit, steps = (0.1, 10) if options.quick else (0.2, 24)
    ratios = ((1, 1),) if options.quick else RATIOS
    rows = []
    for case in cases(unit, quick=options.quick):
        mine = [measure(case, ratio, unit, ahead, steps) for ratio, ahead in itertools.product(ratios, AHEAD)]
        print_table(f"{case.name}, {steps} steps, {GROUPS} groups a batch and at once", mine)
        sys.stdout.flush()
        rows += mine
    beside = bench_beside(quick=options.quick)
    print_table("the trainer's own part of a step", beside)
    aim = next(row for row in rows if (row["gen:train"], row["ahead"]) == ("1:1", 1))
    asked, measured = (max(abs(row[name]) for row in rows) for name in ("error %", "replay error %"))
    print(f"\n1:1, constant, ahead 1: {aim['of ideal']:.3f} of the ideal (aim: at most 1.08)")
    print(f"prediction off by at most {asked:.1f} % (aim: 5); told measured durations, {measured:.1f} %")
    print(f"staleness within the bound in {sum(row['kept'] for row in rows)} of {len(rows)} runs (aim: all)")
    others = beside[-1]["own step s"] / beside[1]["own step s"]
    print(f"beside a loop in processes: {others:.2f} of the step beside strangers (aim: at most 1.1)")
    write_json(options.json, "training", [*rows, *beside])


if __name__ == "__main__":
    bench()
