"""What the adaptive cap on in-flight work wins, and what it costs where there is nothing to win.

    python -m bench.concurrency [--quick] [--json FILE]

A simulated server (`bench.simulated_engine`: an 8 B model on one GPU in round numbers, a KV cache of 200,000
tokens, preemption by computing anew) in simulated time; answers of log-normal length. Each line is a whole
run: with a fixed number in flight, and with the adaptive cap that begins at 256 and is told the server's
load every two seconds ("adaptive") or nothing ("adaptive, mute server").

Then a real run: the demo model through the openvino engine, whose KV cache is made so small that some 10
requests run and the others wait; adaptive and not, in turns.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import orjson

from bench.report import parse_options, print_table, write_json
from bench.runs import generate
from bench.simulated_engine import Lengths, Machine, SimulatedEngine, lognormal, simulate
from rollstream.demo import MODEL_PATH
from rollstream.rollout.concurrency import ConcurrencyPolicy

MAXIMUM = 256
FIXED = (32, 64, 128, MAXIMUM)


@dataclass(frozen=True, slots=True)
class Case:
    """A server and the work for it."""

    what: str
    machine: Callable[[], Machine]
    lengths: Lengths
    timeout_s: float = float("inf")


CASES = (
    Case("room for all", lambda: Machine(kv_tokens=10**9), lognormal(1500, 0.8)),
    Case("KV cache full, prefill cheap", Machine, lognormal(1500, 0.8)),
    Case("KV cache full, prefill dear", lambda: Machine(prefill_s=0.0002), lognormal(1500, 0.8)),
    Case("time limit of 60 s", Machine, lognormal(1000, 0.5), timeout_s=60.0),
    Case("429 beyond 64 requests", lambda: Machine(queue_limit=64), lognormal(1000, 0.5)),
)


def simulated(rollouts: int) -> list[dict[str, Any]]:
    """A line for each case and each way to choose the number in flight."""
    rows = []
    for case in CASES:
        ways: list[tuple[str, ConcurrencyPolicy | int, bool]] = [(f"fixed {cap}", cap, True) for cap in FIXED]
        ways.append(("adaptive", ConcurrencyPolicy(MAXIMUM), True))
        ways.append(("adaptive, mute server", ConcurrencyPolicy(MAXIMUM), False))
        for name, cap, says_load in ways:
            engine = SimulatedEngine(case.machine())
            limit = 10 * rollouts  # a run that throws most of its work away may take for ever
            outcome = simulate(
                engine,
                cap,
                lengths=case.lengths,
                rollouts=rollouts,
                timeout_s=case.timeout_s,
                attempts=3,
                says_load=says_load,
                until=limit,
            )
            settled = outcome.settled()
            rows.append(
                {
                    "server": case.what,
                    "in flight": name,
                    "makespan s": round(outcome.seconds) if outcome.rollouts == rollouts else None,
                    "tokens/s": outcome.rate,
                    "preemptions": outcome.preemptions,
                    "refused": outcome.rejected,
                    "timed out": outcome.timeouts,
                    "failed": outcome.failed,
                    "cap later": f"{min(settled)}-{max(settled)}",
                }
            )
    return rows


def real(rollouts: int, pairs: int) -> list[dict[str, Any]]:
    """Wall time of whole runs with and without the cap, in turns: noise of the machine hits both."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        with prompts.open("wb") as file:
            for number in range(rollouts):
                a, b = 10 + number % 90, 10 + number // 90 % 90
                file.write(orjson.dumps({"prompt": f"{a} + {b} =", "number": number}) + b"\n")
        for pair in range(pairs):
            for adaptive in (True, False) if pair % 2 else (False, True):
                settings = {
                    "actor_rollout_ref.model.path": MODEL_PATH,
                    "actor_rollout_ref.rollout.name": "openvino",
                    "actor_rollout_ref.rollout.response_length": 96,
                    "actor_rollout_ref.rollout.ignore_eos": "true",
                    # Room for some 10 requests of a prompt and 96 response tokens.
                    "actor_rollout_ref.rollout.engine_kwargs.num_kv_blocks": 64,
                    "data.train_files": prompts,
                    "trainer.default_local_dir": Path(folder) / f"run_{pair}_{adaptive}",
                    "generation.max_in_flight": MAXIMUM,
                    "generation.adaptive_in_flight": str(adaptive).lower(),
                }
                started = time.perf_counter()
                generate(settings)
                seconds[adaptive].append(time.perf_counter() - started)
    fixed, adaptive_s = median(seconds[False]), median(seconds[True])
    return [
        {"in flight": f"fixed {MAXIMUM}", "runs": pairs, "seconds": fixed, "ratio": 1.0},
        {"in flight": "adaptive", "runs": pairs, "seconds": adaptive_s, "ratio": adaptive_s / fixed},
    ]


def bench() -> None:
    """Runs the benchmark."""
    options = parse_options(__doc__.split("\n")[0])
    rollouts = 600 if options.quick else 3000
    rows = simulated(rollouts)
    print_table(
        f"simulated server, {rollouts:,} rollouts (makespan '-': not done after 10 s a rollout)", rows
    )
    sys.stdout.flush()
    real_rows = real(1000 if options.quick else 3000, 1 if options.quick else 4)
    print_table(
        "demo model through openvino, KV cache for some 10 requests (aim: ratio at most 1.05)", real_rows
    )
    write_json(options.json, "concurrency", [*rows, *real_rows])


if __name__ == "__main__":
    bench()
