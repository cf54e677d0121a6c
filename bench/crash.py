"""What kill -9 costs a training: rollouts generated again, with a store of its rollouts and without one.

    python -m bench.crash [--quick] [--kills N] [--doors NAME …] [--json FILE]
    python -m bench.crash --curves FILE.png [--steps N] [--kills N]

A training is forked, killed at a random instant after it is up, and forked anew, N times, until it has made three more
steps. It saves a checkpoint every five steps; batches of 8 prompts with 4 rollouts each, in the plan's order;
agents take log-normal seconds. Who makes a rollout logs when it begins and when it has ended, a trainer each step with
its prompts and a digest of its weights. Of that, for a crash: rollouts that were generated again, those that had ended
apart from those in flight, with their seconds, and the response tokens of those that had ended; steps that were trained
again, and the share of them with the same prompts and weights, bit for bit; prompts skipped and doubled in all; the
median of the time from a fork to its first step (torch and TRL are imported by then).

"loop" is `BatchesAhead` with agents on a server that has no model and speaks SGLang's routes; "loop, server" kills that
server in place of the trainer, "loop, both" both at once, as when their machine dies. A server's death cuts off
requests, whose agents begin again. "env" is `GRPOEnvTrainer` with the demo model and engine hf, "TRL" TRL's own
GRPOTrainer, whose batch ends with its slowest agent. slime's buffer server is not there: no index has it.

`--curves` trains the demo (`make demo-train`, smaller) twice, left alone and killed N times, and draws both.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.report import print_table, write_json
from rollstream.agent.base import AgentLoop
from rollstream.agent.conversation import Conversation
from rollstream.agent.registry import register
from rollstream.integrations.configured_groups import ConfiguredGroups
from rollstream.training import BatchesAhead, ShuffledPlan
from rollstream.training.store import TrainingStore
from rollstream.trajectory import SamplingParams, Trajectory
from tests.compat.trl.parts import MODEL

GROUPS, N, SAVE_STEPS = 8, 4, 5
MEAN_S = 0.25
"""Of an agent's work, and of a simulated step."""
PATIENCE_S = 300.0
VICTIMS = {"loop, server": "server", "loop, both": "both"}
DOORS = ("loop", *VICTIMS, "loop, no store", "env", "env, no store", "TRL")


class Log:
    """What became of rollouts and steps, line by line, by all processes of a training."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, what: str, **more: Any) -> None:
        """One line, which a kill does not take back."""
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, json.dumps({"what": what, "at": time.time(), **more}).encode() + b"\n")
        os.close(file)

    def read(self) -> list[dict[str, Any]]:
        """Its lines, but for one that is being written."""
        text = self.path.read_text() if self.path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


Train = Callable[[Log, int], None]
"""Goes on from the checkpoint, up to a step."""


def agent_seconds(key: str, mean: float) -> float:
    """How long the agent of a rollout works, log-normal: the same each time."""
    return mean * random.Random(key).lognormvariate(-0.32, 0.8)


class Server:
    """A server without a model in a process of its own."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        """Comes back when it serves."""
        options = f"--port={self.port} --latency=lognormal:{MEAN_S},0.8 --response-tokens=40".split()
        command = [sys.executable, "-m", "rollstream.testing.stub_server", *options]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None and self._process.stdout.readline()

    def kill(self) -> int:
        """Returns how many requests it cut off."""
        with urllib.request.urlopen(f"{self.url}/stub/stats") as reply:
            stats = json.load(reply)
        self._process.kill()
        self._process.wait()
        return int(stats["in_flight"])


def play(
    train: Train,
    log: Log,
    kills: Sequence[tuple[int, float]],
    *,
    end: int = 0,
    server: Server | None = None,
    victim: str = "trainer",
) -> None:
    """Runs a training, kills it (or its server, or both), runs it anew, and ends it when it was killed often enough.

    `kills`: a step, and the seconds from when the process has trained it, or is up if it is 0. `end`: the step that
    ends it; 0: three more than there were.
    """
    child = 0
    for kill in (*kills, None):
        done = max((one["step"] for one in log.read() if one["what"] == "step"), default=0)
        if not child:
            log.add("fork")
            child = os.fork()
        if child == 0:
            os.dup2(os.open(log.path.with_suffix(".err"), os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
            try:
                train(log, end or 1_000_000)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        lives = _waits(child, log, *(kill or (end or done + 3, 0.0)))
        cut = server.kill() if server is not None and lives and kill and victim != "trainer" else 0
        if not lives or kill is None or victim != "server":
            os.kill(child, signal.SIGKILL)  # one that has ended is not there to be hurt
            _, status = os.waitpid(child, 0)
            assert os.WIFSIGNALED(status) or status == 0, log.path.with_suffix(".err").read_text()[-3000:]
            child = 0
        if not lives or kill is None:
            return  # perhaps before it was killed as often
        log.add("kill", agents=child == 0, cut=cut)
        if server is not None and victim != "trainer":
            server.start()


def _waits(child: int, log: Log, step: int, seconds: float) -> bool:
    """Waits for an instant; False: the training has ended before."""
    until, is_set = time.monotonic() + PATIENCE_S, False
    while time.monotonic() < until:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return False
        if not is_set:
            lines = log.read()
            begins = [
                at for at, one in enumerate(lines) if one["what"] == "fork" or not one.get("agents", True)
            ]
            alive = [one for one in lines[begins[-1] :] if one["what"] in ("up", "step", "kill")]
            reached = [one.get("step", 0) for one in alive]
            is_set = max(reached, default=-1) >= step
            until = time.monotonic() + seconds if is_set else until
        time.sleep(0.02)
    return True


def measure(lines: Sequence[dict[str, Any]], expected: Sequence[int]) -> dict[str, Any]:
    """A row, of what a log says; `expected`: the prompts in the plan's order."""
    begun, cut, done = dict[str, float](), dict[str, float](), dict[str, tuple[float, int]]()
    kills = finished = in_flight = tokens = repeated = same = requests = 0
    seconds = forked = 0.0
    first_steps, steps = list[float](), dict[int, dict[str, Any]]()
    for line in lines:
        key, at = line.get("id", ""), line["at"]
        match line["what"]:
            case "fork":
                forked = at if kills else 0.0
            case "kill":
                kills += 1
                requests += line["cut"]
                if line["agents"]:
                    cut |= {one: at - since for one, since in begun.items()}
                    begun.clear()
                else:
                    forked = at
            case "begin":
                if key in done:
                    finished, seconds, tokens = finished + 1, seconds + done[key][0], tokens + done[key][1]
                elif key in begun:  # tried again
                    in_flight, seconds = in_flight + 1, seconds + at - begun[key]
                elif key in cut:
                    in_flight, seconds = in_flight + 1, seconds + cut.pop(key)
                begun[key] = at
            case "end":
                done[key] = (at - begun.pop(key), line["tokens"])
            case "step":
                if forked:
                    first_steps.append(at - forked)
                forked = 0.0
                if (before := steps.get(line["step"])) is not None:
                    repeated += 1
                    same += before["rows"] == line["rows"] and before["weights"] == line["weights"]
                steps[line["step"]] = line
    trained = [row for step in sorted(steps) for row in steps[step]["rows"]]
    names = ("finished, again", "in flight, again", "seconds", "tokens", "requests", "steps again")
    totals = (finished, in_flight, seconds, tokens, requests, repeated)
    return {
        "kills": kills,
        **{name: total / max(1, kills) for name, total in zip(names, totals, strict=True)},
        "the same": same / repeated if repeated else None,
        "skipped": len(set(expected[: len(trained)]) - set(trained)),
        "doubled": len(trained) - len(set(trained)),
        "first step s": statistics.median(first_steps) if first_steps else None,
        "steps": len(steps),
        "rollouts": len(done),
    }


@register("crash")
class Agent(AgentLoop):
    """One turn, and then as long as the agent works."""

    log: Log
    mean = 0.0

    async def run(self, sampling: SamplingParams, **row: Any) -> Trajectory:
        key = f"{row['index']}.{sampling.seed}"
        self.log.add("begin", id=key)
        ids = await self.render(row["raw_prompt"], prompt_key=row["prompt_key"])
        chat = Conversation(self, row["raw_prompt"], ids, logprobs=sampling.logprobs)
        await chat.generate(sampling)
        await asyncio.sleep(agent_seconds(key, self.mean))
        made = chat.trajectory("stop")
        made.reward = random.Random(key).random()
        self.log.add("end", id=key, tokens=len(made.response_ids))
        return made


def served_agents(folder: Path, log: Log, url: str) -> ConfiguredGroups:
    """`Agent` on a server."""
    Agent.log, rows = log, folder / "rows.jsonl"
    lines = [
        json.dumps({"prompt": [{"role": "user", "content": f"{number} + 1 ="}]}) for number in range(4000)
    ]
    rows.write_text("\n".join(lines))
    rollout = "actor_rollout_ref.rollout"
    return ConfiguredGroups(
        [
            *(
                f"actor_rollout_ref.model.path={MODEL}",
                f"{rollout}.name=sglang",
                f"{rollout}.server_urls=[{url}]",
            ),
            *(
                f"{rollout}.n={N}",
                f"{rollout}.agent.default_agent_loop=crash",
                f"data.train_files={rows}",
                "generation.seed=1",
            ),
        ]
    )


def loop(folder: Path, ahead: int, url: str, *, stored: bool) -> Train:
    """`BatchesAhead` in a loop of one's own."""

    def train(log: Log, end: int) -> None:
        saved, agents = folder / "checkpoint.json", served_agents(folder, log, url)
        batches = BatchesAhead(
            ShuffledPlan(len(agents.rows), seed=3),
            agents,
            groups_per_step=GROUPS,
            max_staleness=ahead,
            weights="in_flight",
            store=TrainingStore(folder / "store", resume=not saved.exists()) if stored else None,
        )
        if saved.exists():
            batches.load_state_dict(json.loads(saved.read_text()))
        batches.start(weights=str(MODEL) if batches.step else None)
        log.add("up")
        with batches:
            while batches.step < end:
                batch = batches.next_batch(PATIENCE_S)
                time.sleep(MEAN_S)
                batches.trained(batch.step)
                rows = [group.position for group in batch.groups]
                log.add("step", step=batches.step, rows=rows, weights=None)
                if batches.step % SAVE_STEPS == 0:
                    half = saved.with_suffix(".half")
                    half.write_text(json.dumps(batches.state_dict()))
                    half.replace(saved)
                batches.update_weights(str(MODEL))

    return train


def bench_door(door: str, ahead: int, kills: int) -> dict[str, Any]:
    """A row."""
    with tempfile.TemporaryDirectory() as name:
        log, stored = Log(Path(name) / "log.jsonl"), not door.endswith("no store")
        server = Server() if door.startswith("loop") else None
        if server is not None:
            train, span = loop(Path(name), ahead, server.url, stored=stored), 10.0
        else:
            from bench.crash_trl import trl_door

            train, span = trl_door(Path(name), door.partition(",")[0], ahead, MEAN_S, stored=stored), 16.0
        chance = random.Random(ahead)
        instants = [(0, chance.uniform(0, span)) for _ in range(kills)]
        play(train, log, instants, server=server, victim=VICTIMS.get(door, "trainer"))
        if server is not None:
            server.kill()
        lines = log.read()
        plans = [line["rows"] for line in lines if line["what"] == "plan"]
        return {"door": door, "ahead": ahead, **measure(lines, plans[0] if plans else range(10_000_000))}


def bench() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two kills of each training")
    parser.add_argument("--kills", type=int, help="of each training (40, with TRL 6)")
    parser.add_argument("--doors", nargs="+", choices=DOORS, default=DOORS, help="default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
    parser.add_argument("--curves", type=Path, metavar="FILE.png", help="the demo's training, killed and not")
    parser.add_argument("--steps", type=int, default=100, help="--curves: of each training (default: 100)")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    if options.curves is not None:
        from bench.crash_trl import compare_curves

        compare_curves(options.curves, options.steps, 40 if options.kills is None else options.kills)
        return
    rows = []
    for door in options.doors:
        usual = 2 if options.quick else 40 if door.startswith("loop") else 6
        for ahead in (0,) if door == "TRL" else (1, 2):
            rows.append(bench_door(door, ahead, usual if options.kills is None else options.kills))
            print_table(f"{door}, {ahead} ahead", rows[-1:])
    print_table(f"a crash; {GROUPS * N} rollouts a batch, a checkpoint every {SAVE_STEPS} steps", rows)
    write_json(options.json, "crash", rows)


if __name__ == "__main__":
    bench()
