"""What durability and bookkeeping cost: rollstream against a bare HTTP client that writes nothing.

    python -m bench.overhead [--quick] [--json FILE]

A stub server (its own process, zero latency) answers 512-token prompts with 512 tokens and log-probs over
SGLang's /generate; 256 requests are in flight. The floor is a bare aiohttp + orjson loop that sends the same
requests with the ids ready made, parses the replies and throws them away. rollstream renders and tokenises
the prompts, decodes the answers, commits every rollout with fdatasync, seals batches and merges them.

Each measurement runs in a process of its own. CPU is of all threads; that of the start (imports, tokenizer,
dataset) is measured by itself, as a run of one rollout, and taken off. Peak memory is of the whole process.
"""

import asyncio
import contextlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from bench.report import cpu_seconds, parse_options, peak_rss_mb, print_table, write_json
from rollstream.chat.tokenizer import ChatTokenizer, load_tokenizer
from rollstream.demo import MODEL_PATH
from rollstream.generation import main
from rollstream.store.batch import file_rows

PROMPT_TOKENS = RESPONSE_TOKENS = 512
IN_FLIGHT = 256


def prompt_text(tokenizer: ChatTokenizer, number: int) -> str:
    """A text whose rendered prompt has exactly `PROMPT_TOKENS` tokens: words, filled up with digits."""
    frame = len(tokenizer.render([{"role": "user", "content": ""}]))
    rng = random.Random(number)
    words = ""
    while len(tokenizer.encode(words)) < PROMPT_TOKENS - frame - 30:
        words += " ".join(rng.sample(_WORDS, 8)) + " "
    missing = PROMPT_TOKENS - frame - len(tokenizer.encode(words))
    return words + "".join(str(rng.randrange(10)) for _ in range(missing))


_WORDS = [
    "state",
    "the",
    "final",
    "answer",
    "to",
    "following",
    "arithmetic",
    "problem",
    "and",
    "then",
    "explain",
    "what",
    "was",
    "done",
    "with",
    "it",
]


@contextlib.contextmanager
def stub_server() -> Iterator[str]:
    """A zero-latency stub server in its own process."""
    command = [sys.executable, "-m", "rollstream.testing.stub_server", "--port", "0"]
    command += ["--response-tokens", str(RESPONSE_TOKENS)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield orjson.loads(process.stdout.readline())["url"]
    finally:
        process.terminate()
        process.wait()


async def run_bare(url: str, requests: int) -> dict[str, Any]:
    """The floor: `requests` requests with ids ready made, replies parsed and dropped."""
    ids = [i % 500 for i in range(PROMPT_TOKENS)]
    body = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": RESPONSE_TOKENS, "temperature": 1.0, "sampling_seed": 1},
        "return_logprob": True,
    }
    numbers = iter(range(requests))

    async def slot(session: aiohttp.ClientSession) -> None:
        for number in numbers:
            data = orjson.dumps({**body, "rid": str(number)})
            headers = {"Content-Type": "application/json"}
            async with session.post(f"{url}/generate", data=data, headers=headers) as reply:
                answer = orjson.loads(await reply.read())
            assert len(answer["meta_info"]["output_token_logprobs"]) == RESPONSE_TOKENS

    cpu, started = cpu_seconds(), time.perf_counter()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(slot(session) for _ in range(IN_FLIGHT)))
    return _figures(requests, time.perf_counter() - started, cpu_seconds() - cpu)


def run_rollstream(url: str, prompts: Path, n: int, rollouts: int, folder: Path) -> dict[str, Any]:
    """A whole generation run by the command line's own entry point, durable and merged."""
    settings = {
        "actor_rollout_ref.model.path": MODEL_PATH,
        "actor_rollout_ref.rollout.name": "sglang",
        "actor_rollout_ref.rollout.n": n,
        "actor_rollout_ref.rollout.server_urls": f"[{url}]",
        "actor_rollout_ref.rollout.response_length": RESPONSE_TOKENS,
        "data.train_files": prompts,
        "data.max_prompt_length": PROMPT_TOKENS,
        "data.train_max_samples": max(1, rollouts // n),
        "trainer.default_local_dir": folder,
        "generation.max_in_flight": IN_FLIGHT,
        "generation.seed": 1,
        "generation.show_progress": "false",
        "generation.log_level": "error",
    }
    cpu, started = cpu_seconds(), time.perf_counter()
    code = main.main([f"{key}={value}" for key, value in settings.items()])
    figures = _figures(rollouts, time.perf_counter() - started, cpu_seconds() - cpu)
    assert code == 0
    assert file_rows(folder / "trajectories.parquet") == max(n, rollouts)
    return figures


def _figures(rollouts: int, seconds: float, cpu: float) -> dict[str, Any]:
    return {"rollouts": rollouts, "seconds": seconds, "cpu_s": cpu, "peak_mb": peak_rss_mb()}


def measure(*arguments: str) -> dict[str, Any]:
    """One measurement in a fresh process."""
    command = [sys.executable, "-m", "bench.overhead", "--measure", *arguments]
    done = subprocess.run(command, check=True, capture_output=True)
    result: dict[str, Any] = orjson.loads(done.stdout.splitlines()[-1])
    return result


def bench() -> None:
    """Runs the benchmark."""
    if len(sys.argv) > 1 and sys.argv[1] == "--measure":
        what, url, rollouts = sys.argv[2], sys.argv[3], int(sys.argv[4])
        if what == "bare":
            result = asyncio.run(run_bare(url, rollouts))
        else:
            with tempfile.TemporaryDirectory() as folder:
                folder_path = Path(folder) / "run"
                result = run_rollstream(url, Path(sys.argv[5]), int(sys.argv[6]), rollouts, folder_path)
        print(orjson.dumps(result).decode())
        return
    options = parse_options(__doc__.split("\n")[0])
    small, large = (1_000, 4_000) if options.quick else (10_000, 100_000)
    repeats = (8,) if options.quick else (1, 8)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, stub_server() as url:
        prompts = Path(folder) / "prompts.jsonl"
        tokenizer = load_tokenizer(str(MODEL_PATH))
        texts = [prompt_text(tokenizer, number) for number in range(1000)]
        with prompts.open("wb") as file:
            for number in range(large):
                file.write(orjson.dumps({"prompt": texts[number % len(texts)], "number": number}) + b"\n")
        measure("bare", url, "200")  # warms the server
        start = measure("rollstream", url, "1", str(prompts), "1")
        for rollouts in (small, large):
            bare = measure("bare", url, str(rollouts))
            rows.append(_row("bare client", 1, bare, None, bare))
            for n in repeats:
                figures = measure("rollstream", url, str(rollouts), str(prompts), str(n))
                rows.append(_row("rollstream", n, figures, start, bare))
    print_table(
        f"{PROMPT_TOKENS}-token prompts, {RESPONSE_TOKENS}-token responses, log-probs, {IN_FLIGHT} in flight"
        " (n: rollouts of a prompt; aim: at most 4x the bare client's CPU)",
        rows,
    )
    growth: list[dict[str, Any]] = []
    if not options.quick:  # below some 5,000 rollouts the merge's buffers still fill, whatever it is later
        for n in repeats:
            more = (_peak(rows, n, large) - _peak(rows, n, small)) * 2**20
            growth.append({"n": n, "bytes per finished rollout": more / (large - small)})
        print_table(f"growth of peak memory from {small:,} to {large:,} rollouts (aim: at most 200)", growth)
    print(f"\nstart-up, taken off: {start['cpu_s']:.2f} s CPU")
    write_json(options.json, "overhead", [*rows, *growth])


def _row(
    what: str, n: int, figures: dict[str, Any], start: dict[str, Any] | None, bare: dict[str, Any]
) -> dict[str, Any]:
    rollouts = figures["rollouts"]
    cpu = figures["cpu_s"] - (start["cpu_s"] if start else 0.0)
    seconds = figures["seconds"] - (start["seconds"] if start else 0.0)
    per_bare = bare["cpu_s"] / bare["rollouts"]
    return {
        "what": what,
        "n": n,
        "rollouts": rollouts,
        "rollouts/s": rollouts / seconds,
        "CPU us/rollout": cpu / rollouts * 1e6,
        "x bare": cpu / rollouts / per_bare,
        "peak MB": figures["peak_mb"],
    }


def _peak(rows: list[dict[str, Any]], n: int, rollouts: int) -> float:
    return next(
        float(row["peak MB"])
        for row in rows
        if row["what"] == "rollstream" and row["n"] == n and row["rollouts"] == rollouts
    )


if __name__ == "__main__":
    bench()
