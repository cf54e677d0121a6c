"""The embedded engine: sampled tokens a second of the pipeline alone, and of whole runs on it.

    python -m bench.embedded [--quick] [--json FILE]

The demo model on this machine's CPU, 64-token prompts, answers of 128 and of 8 tokens (ignore_eos), at 32 and at
128 sequences in a step. "alone" is openvino-genai's pipeline in one process that steps it and does nothing else;
it always has twice as many requests as it works on. "run" is a whole generation with as many in flight: rendered,
scored, durable, sealed and merged; its start and that of the pipeline are taken off. Each measurement is a process
of its own; both take turns, and of three rounds the median counts.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import orjson

from bench.report import parse_options, print_table, write_json
from bench.runs import generate
from rollstream.demo import MODEL_PATH

PROMPT_IDS = [(7 * i) % 400 + 10 for i in range(64)]


def run_alone(at_once: int, tokens: int, requests: int) -> float:
    """Tokens a second of the pipeline by itself."""
    import openvino
    import openvino_genai
    from openvino_genai import py_openvino_genai

    running = py_openvino_genai.GenerationStatus.RUNNING.value  # comparing enums takes longer than asking
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs = at_once
    scheduler.cache_size = 1
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(MODEL_PATH), scheduler, "CPU", {})

    def add(number: int) -> Any:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, True
        config.logprobs, config.rng_seed = 1, number
        return pipeline.add_request(number, openvino.Tensor([PROMPT_IDS]), config)

    def work(first: int, count: int) -> None:
        numbers = iter(range(first, first + count))
        handles: list[Any] = []
        while True:
            while len(handles) < 2 * at_once and (number := next(numbers, None)) is not None:
                handles.append(add(number))
            if not handles:
                return
            pipeline.step()
            going = []
            for handle in handles:
                if handle.get_status().value == running:
                    going.append(handle)
                else:
                    (output,) = handle.read_all()
                    assert len(output.generated_ids) == tokens
            handles = going

    work(0, at_once)
    started = time.perf_counter()
    work(at_once, requests)
    return requests * tokens / (time.perf_counter() - started)


def run_generation(at_once: int, tokens: int, requests: int, folder: Path) -> float:
    """Seconds of a run by the command line's own entry point."""
    prompts = folder / "prompts.jsonl"
    texts = (
        f"What is {i} + {i * 7 % 91} + {i * 13 % 87} - {i % 17}? Think." for i in range(max(1, requests // 8))
    )
    prompts.write_bytes(b"".join(orjson.dumps({"prompt": text}) + b"\n" for text in texts))
    settings = {
        "actor_rollout_ref.model.path": MODEL_PATH,
        "actor_rollout_ref.rollout.n": min(8, requests),
        "actor_rollout_ref.rollout.response_length": tokens,
        "actor_rollout_ref.rollout.ignore_eos": "true",
        "+actor_rollout_ref.rollout.engine_kwargs.max_num_seqs": at_once,
        "data.train_files": prompts,
        "data.max_prompt_length": 128,
        "trainer.default_local_dir": folder / "run",
        "generation.max_in_flight": 2 * at_once,
        "generation.seed": 1,
    }
    started = time.perf_counter()
    generate(settings)
    return time.perf_counter() - started


def measure(*arguments: object) -> float:
    """One measurement in a fresh process."""
    command = [sys.executable, "-m", "bench.embedded", "--measure", *map(str, arguments)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    return float(done.stdout.splitlines()[-1])


def bench() -> None:
    """Runs the benchmark."""
    if len(sys.argv) > 1 and sys.argv[1] == "--measure":
        what, (at_once, tokens, requests) = sys.argv[2], map(int, sys.argv[3:])
        if what == "alone":
            print(run_alone(at_once, tokens, requests))
        else:
            with tempfile.TemporaryDirectory() as folder:
                print(run_generation(at_once, tokens, requests, Path(folder)))
        return
    options = parse_options(__doc__.split("\n")[0])
    rounds, sampled = (1, 100_000) if options.quick else (3, 200_000)
    rows: list[dict[str, Any]] = []
    for tokens in (128, 8):
        for at_once in (32, 128):
            requests = sampled // 4 // tokens // 8 * 8 if tokens == 8 else sampled // tokens // 8 * 8
            start = measure("run", at_once, tokens, 1)
            alone, run = [], []
            for _ in range(rounds):
                alone.append(measure("alone", at_once, tokens, requests))
                run.append(requests * tokens / (measure("run", at_once, tokens, requests) - start))
            rows.append(
                {
                    "answer tokens": tokens,
                    "sequences in a step": at_once,
                    "alone tokens/s": statistics.median(alone),
                    "run tokens/s": statistics.median(run),
                    "run of alone": statistics.median(run) / statistics.median(alone),
                }
            )
    print_table("openvino, demo model (aim: 0.95 at 128 tokens, 0.8 at 8)", rows)
    write_json(options.json, "embedded", rows)


if __name__ == "__main__":
    bench()
