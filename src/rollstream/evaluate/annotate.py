"""`rollstream annotate`: an engine's log-probs of the tokens that a run has stored."""

import argparse
import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rollstream.errors import ConfigError
from rollstream.evaluate.score import Progress, list_passes

if TYPE_CHECKING:
    from rollstream.rollout.annotate import Teacher
    from rollstream.rollout.stored_pass import ScoreReport

EPILOG = """\
examples:
  rollstream annotate outputs/run --same                                  the run's own model, into streams/same.parquet
  rollstream annotate outputs/run --name teacher --model Qwen/Qwen3-8B    a model that is loaded here
  rollstream annotate outputs/run --name teacher --server http://gpu:8000 SGLang, vLLM or `rollstream serve`
  rollstream annotate outputs/run --list                                  the stored streams

A stream is a number for each stored token. The run itself stays as it is. The same command continues a pass that was
stopped, also with rollouts finished since.

exit codes: 0 done; 1 all rollouts failed, the engine was lost, or damage was found; 2 wrong usage.
docs/audit.md
"""

_CAUSES_SHOWN = 10
_FACTS = ("name", "path", "rollouts", "now", "failed", "causes", "damage")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `annotate`."""
    parser.add_argument("run_dir", type=Path, metavar="DIR")
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument("--model", metavar="M", help="folder or hub name of a model to load here")
    who.add_argument(
        "--server", metavar="URL", action="append", help="URL of a server with the model; may be repeated"
    )
    who.add_argument(
        "--same", action="store_true", help="the run's own model (for a run by servers: --server)"
    )
    who.add_argument("--list", action="store_true", help="list the stored streams")
    parser.add_argument("--name", help="name of the stream: streams/NAME.parquet (default with --same: same)")
    parser.add_argument(
        "--engine", help="openvino or hf for --model, sglang or vllm for --server (default: found out)"
    )
    parser.add_argument(
        "--engine-kwargs",
        nargs="+",
        default=[],
        metavar="k=v",
        help="settings of the engine: docs/engines.md",
    )
    parser.add_argument(
        "--max-in-flight", type=int, default=128, metavar="N", help="rollouts at once (default: %(default)s)"
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="also store the K likeliest ids of each position (not with openvino)",
    )
    parser.add_argument("--retry-failed", action="store_true", help="try rollouts again that failed")
    parser.add_argument("--json", action="store_true")


def run(options: argparse.Namespace) -> int:
    """Executes a parsed command line. Raises `ConfigError`."""
    import orjson

    from rollstream.stderr_log import log_to_stderr
    from rollstream.stop_signals import ending_on_sigterm

    log_to_stderr(times=False)
    if options.list:
        return list_passes(options.run_dir, "streams", as_json=options.json)
    if options.name is None and not options.same:
        raise ConfigError("--name NAME: what the stream is called, such as teacher")
    if options.max_in_flight < 1 or options.top_k < 0:
        raise ConfigError("--max-in-flight: numbers from 1; --top-k: from 0")
    try:
        with ending_on_sigterm():
            report = asyncio.run(_annotate(options))
    except (KeyboardInterrupt, SystemExit):
        sys.stderr.write("stopped; what was done is on disk, the same command goes on\n")
        raise
    facts = {name: getattr(report, name) for name in _FACTS} | {"mean_logprob": report.mean_reward}
    if options.json:
        sys.stdout.write(orjson.dumps(facts, option=orjson.OPT_INDENT_2).decode() + "\n")
    else:
        sys.stdout.write(_summary(report))
    for line in report.damage:
        sys.stderr.write(f"damaged: {line}\n")
    return 1 if report.rollouts == report.failed or report.damage else 0


async def _annotate(options: argparse.Namespace) -> "ScoreReport":
    from rollstream.rollout.annotate import annotate_run

    return await annotate_run(
        options.run_dir,
        await _teacher(options),
        name=options.name or "same",
        max_in_flight=options.max_in_flight,
        retry_failed=options.retry_failed,
        top_k=options.top_k,
        say=Progress("annotated"),
    )


async def _teacher(options: argparse.Namespace) -> "Teacher":
    from rollstream.command_line import read_key_values
    from rollstream.rollout import annotate
    from rollstream.store.manifest import require_manifest

    manifest, kwargs = require_manifest(options.run_dir), read_key_values(options.engine_kwargs)
    if options.server:
        return await annotate.served_teacher(options.server, options.engine, kwargs)
    if options.model:
        return annotate.local_teacher(options.model, options.engine, kwargs)
    if options.engine or kwargs:
        raise ConfigError(
            "--engine and --engine-kwargs are for --model and --server: --same is the run's own"
        )
    return annotate.own_teacher(manifest)


def _summary(report: "ScoreReport") -> str:
    mean = "none" if report.mean_reward is None else f"{report.mean_reward:.4f}"
    lines = [
        f"{report.rollouts} rollouts ({report.now} now), {report.failed} failed, mean log-prob {mean}",
        f"stream: {report.path}",
    ]
    for example, count in list(report.causes.items())[:_CAUSES_SHOWN]:
        lines.append(f"no values for {count}: {example[:300]}")
    return "\n".join([*lines, ""])
