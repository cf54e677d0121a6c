"""The rollout buffer end to end, on this machine, with the demo model: `make demo-buffer`.

    rollstream serve  <--- prompts, answers ---  math generator
                                                      | items
                                                      v
                       reading loop  <--- groups --- rollstream buffer serve

What a trainer has to do with a buffer is in `read_all`: take groups on a lease, use them, acknowledge them.
What is not acknowledged comes again, after a crash of the reader, too.

It writes prompts of reasoning-gym's chain_sum into a file, as the generator wants them, starts both servers,
starts a job, reads until it is finished, and prints what came of it. Exit code 0: every item that was
generated was read, or is accounted for by a reason. With `--store postgres` (`make demo-buffer STORE=postgres`)
the items are in a PostgreSQL server that the demo makes and ends; Debian's postgresql has its programs.

To do the same by hand:

    rollstream serve
    rollstream buffer serve --dir outputs/buffer --generators builtin
    curl http://127.0.0.1:8889/v1/jobs -d '{"task_type": "math", "num_repeat_per_sample": 8, …}'
"""

import argparse
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from rollstream.buffer.client import BufferClient
from rollstream.data.task_cache import make_task

GROUPS_A_STEP = 8  # what the reading loop asks for at once, as a trainer would for one step
MARK = "made-by-demo.txt"  # in the demo's folder: says that it may be deleted
PATIENCE_S = 300.0  # for the job to end: a machine that is busy needs a while to load the model


@dataclass
class Summary:
    """What was read."""

    groups: int = 0
    items: int = 0
    raw_rewards: list[float] = field(default_factory=list)
    leases: int = 0
    first_after: float = 0.0
    """Seconds from the start of the job to the first groups: the generator has to start."""
    last_after: float = 0.0


def main() -> int:
    """Runs the demo; the exit code."""
    parser = argparse.ArgumentParser(description="The rollout buffer, end to end, with the demo model.")
    parser.add_argument("--dir", type=Path, default=Path("outputs/demo-buffer"), help="made anew each time")
    parser.add_argument("--prompts", type=int, default=64, help="prompts (default: %(default)s)")
    parser.add_argument(
        "--repeats", type=int, default=8, help="answers to each, a group (default: %(default)s)"
    )
    parser.add_argument("--store", choices=["sqlite", "postgres"], default="sqlite")
    options = parser.parse_args()
    folder: Path = options.dir
    if folder.exists() and not (folder / MARK).exists():
        sys.exit(f"--dir {folder} was made by no demo: choose another one, or delete it yourself")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / MARK).write_text(
        "Made by examples/buffer/demo.py, which deletes this folder at its next run.\n"
    )
    prompts = write_prompts(folder / "prompts.jsonl", options.prompts)
    with contextlib.ExitStack() as stack:
        store = ["--store", stack.enter_context(postgres())] if options.store == "postgres" else []
        words = ["--dir", f"{folder}/buffer", "--generators", "builtin", "--inputs", str(folder), *store]
        engine_url = stack.enter_context(server(folder / "serve.log", "serve", "--log-dir", str(folder)))
        buffer_url = stack.enter_context(server(folder / "buffer.log", "buffer", "serve", *words))
        print(
            f"engine at {engine_url}, buffer at {buffer_url} on {options.store}, folder {folder}", flush=True
        )
        payload = {
            "task_type": "math",
            "input_file": str(prompts.absolute()),
            "remote_engine_url": engine_url,
            "num_repeat_per_sample": options.repeats,
            "num_process": 64,
            "sampling_params": {"max_tokens": 64, "temperature": 1.0, "seed": 1},
        }
        with BufferClient(buffer_url) as client:
            client.start_job(payload)
            summary = read_all(client)
            stats = client.stats()["store"]
    return report(summary, stats, wanted=options.prompts * options.repeats)


def read_all(client: BufferClient) -> Summary:
    """Reads until the job is finished and all is read."""
    summary = Summary()
    began = time.monotonic()
    while True:
        late = time.monotonic() - began > PATIENCE_S
        finished = client.stats()["job"]["state"] != "running"
        with client.read(max_groups=GROUPS_A_STEP, timeout=2.0, consumer="demo") as lease:
            if lease.failures:
                sys.exit("\n".join(one["message"] for one in lease.failures))
            if lease.id is None:
                if finished or late:
                    return summary
                continue
            for group in lease.groups:
                summary.items += len(group.items)
                summary.raw_rewards += [item["raw_reward"] for item in group.items]
            # Here a trainer would take its step, and then say that it has it.
            lease.ack()
        summary.groups += len(lease.groups)
        summary.leases += 1
        summary.last_after = time.monotonic() - began
        summary.first_after = summary.first_after or summary.last_after


def write_prompts(path: Path, rows: int) -> Path:
    """Writes sums of two numbers of two digits: a third of what the model answers is wrong."""
    task = make_task(
        {
            "name": "reasoning_gym",
            "dataset": "chain_sum",
            "size": rows,
            "seed": 7,
            "config": {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2},
        }
    )
    lines = [orjson.dumps({"instance_id": i, **row}) for i, row in enumerate(task.rows())]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


@contextlib.contextmanager
def server(log: Path, *command: str) -> Iterator[str]:
    """A rollstream server in a process of its own; its URL."""
    full = [sys.executable, "-m", "rollstream.cli", *command, "--port", "0", "--json"]
    with log.open("wb") as errors:
        process = subprocess.Popen(full, stdout=subprocess.PIPE, stderr=errors)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            sys.exit(f"{' '.join(command)} did not start:\n{log.read_text()}")
        yield orjson.loads(line)["url"]
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """A PostgreSQL server in a temporary folder; the URL of its database."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin")) or [
        Path(shutil.which("initdb") or "").parent
    ]
    if not (programs[-1] / "initdb").exists():
        sys.exit("no PostgreSQL is installed: on Debian, apt-get install postgresql")
    owner: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="demo-postgres-") as name, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        if os.getuid() == 0:  # PostgreSQL refuses to run as root
            shutil.chown(name, "postgres", "postgres")
            owner = {"user": "postgres", "group": "postgres", "extra_groups": [], "cwd": name}
        data = f"{name}/data"
        subprocess.run(
            [programs[-1] / "initdb", "-D", data, "-U", "demo", "-A", "trust"],
            check=True,
            stdout=subprocess.DEVNULL,
            **owner,
        )
        free.close()
        settings = f"-c listen_addresses=127.0.0.1 -c port={port} -c unix_socket_directories=''"
        control = [programs[-1] / "pg_ctl", "-D", data, "-l", f"{name}/log", "-w"]
        subprocess.run([*control, "-o", settings, "start"], check=True, stdout=subprocess.DEVNULL, **owner)
        try:
            yield f"postgresql://demo@127.0.0.1:{port}/postgres"
        finally:
            subprocess.run([*control, "-m", "fast", "stop"], check=True, stdout=subprocess.DEVNULL, **owner)


def report(summary: Summary, stats: dict[str, Any], *, wanted: int) -> int:
    """Prints what came of it; the exit code."""
    dropped = {reason: items for reason, items in stats["items_dropped"].items() if items}
    mean = sum(summary.raw_rewards) / max(1, len(summary.raw_rewards))
    print(f"groups read        {summary.groups} in {summary.leases} leases, {summary.items} items")
    print(f"mean raw reward    {mean:.3f} (of the groups that were read)")
    print(f"items generated    {stats['items_written']} of {wanted}")
    print(f"first, last group  after {summary.first_after:.1f} and {summary.last_after:.1f} s")
    for reason, count in dropped.items() or [("nothing", 0)]:
        print(f"items dropped      {count} {WHY.get(reason, reason)}")
    accounted = stats["items_delivered"] + sum(dropped.values())
    complete = stats["items_written"] == wanted == accounted and summary.groups > 0
    print("every item is accounted for" if complete else f"MISSING: {wanted - accounted} items")
    return 0 if complete else 1


WHY = {
    "equal_rewards": "in groups that teach nothing: all answers right, or all wrong",
    "timed_out": "in groups that stayed incomplete",
    "filtered": "without a valid reward",
}

if __name__ == "__main__":
    sys.exit(main())
