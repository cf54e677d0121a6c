"""`rollstream score`: a run's rollouts scored anew."""

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollstream.errors import ConfigError, DamageError, RunDirectoryError

if TYPE_CHECKING:
    from rollstream.config.settings import RewardSettings
    from rollstream.rollout.stored_pass import ScoreReport
    from rollstream.store.scores import SidecarKind

EPILOG = """\
examples:
  rollstream score outputs/run --reward reward.py            into scores/reward-1f0c2a9b.parquet
  rollstream score outputs/run --list                        what there is

Nothing is generated, and what the run recorded stays: `eval`, `export`, `view` and `status` take --scores NAME. The
same command goes on where it was stopped, and scores what the run has finished since.

exit codes: 0 done; 1 the reward failed on every rollout, or damage was found; 2 wrong usage. docs/evaluate.md
"""

_EVERY_S = 2.0
_CAUSES_SHOWN = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `score`."""
    parser.add_argument("run_dir", type=Path, metavar="DIR")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--reward",
        metavar="FILE",
        help="Python file with the reward (default: the rules, if the run has no file)",
    )
    what.add_argument("--rules", action="store_true", help="the built-in rewards, by data source")
    what.add_argument("--list", action="store_true", help="the scores that there are")
    parser.add_argument("--function", metavar="NAME", help="in that file (default: compute_score)")
    parser.add_argument("--kwargs", metavar="JSON", help="further keyword arguments of the function")
    parser.add_argument("--name", help="of the scores (default: after the file and its content)")
    parser.add_argument("--processes", type=int, metavar="N", help="that score (default: CPUs, at most 4)")
    parser.add_argument("--max-concurrency", type=int, metavar="N", help="calls at once in each of them")
    parser.add_argument("--timeout", type=float, metavar="S", help="seconds for one call")
    parser.add_argument(
        "--snapshots",
        choices=["outcome", "own", "none", "keep"],
        help="reward of a snapshot (default: as in the run)",
    )
    parser.add_argument(
        "--retry-unscored", action="store_true", help="try those again on which the reward failed"
    )
    parser.add_argument("--json", action="store_true")


def run(options: argparse.Namespace) -> int:
    """Executes a parsed command line. Raises `ConfigError`."""
    import asyncio

    import orjson

    from rollstream.rollout.replay import score_run
    from rollstream.stderr_log import log_to_stderr
    from rollstream.stop_signals import ending_on_sigterm

    log_to_stderr(times=False)
    if options.list:
        return list_passes(options.run_dir, "scores", as_json=options.json)
    scoring = score_run(
        options.run_dir,
        _reward(options),
        name=options.name,
        snapshots=options.snapshots,
        processes=options.processes,
        retry_unscored=options.retry_unscored,
        say=Progress("scored"),
    )
    try:
        with ending_on_sigterm():
            report = asyncio.run(scoring)
    except (KeyboardInterrupt, SystemExit):
        sys.stderr.write("stopped; what was scored is on disk, the same command goes on\n")
        raise
    failed = report.rollouts == report.failed
    if options.json:
        sys.stdout.write(orjson.dumps(asdict(report), option=orjson.OPT_INDENT_2).decode() + "\n")
    else:
        sys.stdout.write(_summary(report))
        if not failed:
            sys.stdout.write(f"to read by them: --scores {report.name} at eval, export, view and status\n")
    for line in report.damage:
        sys.stderr.write(f"damaged: {line}\n")
    return 1 if failed or report.damage else 0


def _reward(options: argparse.Namespace) -> "RewardSettings":
    """The reward that the command line names, with the run's own limits. Raises `ConfigError`."""
    import msgspec

    from rollstream.config.settings import RewardSettings
    from rollstream.store.manifest import require_manifest

    manifest = require_manifest(options.run_dir)
    own = manifest.setting("custom_reward_function")
    if not options.rules and options.reward is None and own.get("path"):
        raise ConfigError(
            "--reward FILE or --rules: nothing that a run directory names is run by itself. The run's own reward: "
            f"--reward {own['path']} --function {own.get('name', 'compute_score')}"
        )
    sources = manifest.setting("data").get("sources") or ()
    if not options.rules and options.reward is None and any(source.get("reward") for source in sources):
        raise ConfigError(
            "--reward FILE or --rules: the run's own rewards are those of data.sources, which are not run by itself"
        )
    if options.reward is None and (options.function or options.kwargs):
        raise ConfigError("--function and --kwargs are for a --reward FILE")
    if options.processes is not None and options.processes < 1:
        raise ConfigError("--processes: numbers from 1")
    try:
        given = {
            "path": options.reward,
            "name": options.function or "compute_score",
            "reward_kwargs": msgspec.json.decode(options.kwargs or "{}"),
            "timeout": options.timeout or own.get("timeout", 60.0),
            "max_concurrency": options.max_concurrency or own.get("max_concurrency", 32),
        }
        return msgspec.convert(given, RewardSettings)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--kwargs, --timeout or --max-concurrency: {error}") from error


def list_passes(run_dir: Path, kind: "SidecarKind", *, as_json: bool) -> int:
    """Says which scores or streams there are; returns the exit code."""
    import orjson

    from rollstream.store.manifest import read_manifest, require_manifest
    from rollstream.store.scores import pass_folder, sidecar_names
    from rollstream.store.streams import Stream, stream_names

    require_manifest(run_dir)
    found: list[dict[str, Any]] = []
    by = {"scores": "reward", "streams": "model"}[kind]
    for name in sidecar_names(run_dir) if kind == "scores" else stream_names(run_dir):
        made: dict[str, Any] = {}
        try:
            if kind == "streams":
                made = Stream(run_dir, name).made
            elif (manifest := read_manifest(pass_folder(run_dir, name))) is not None:
                made = {**manifest.config, "created": manifest.created}
        except (RunDirectoryError, DamageError) as error:  # the others can be listed
            sys.stderr.write(f"damaged: {error}\n")
        maker, created = made.get(by, "unknown"), made.get("created", "-")
        found.append({"name": name, by: maker, "created": created})
        if not as_json:
            sys.stdout.write(f"{name:<24} {maker}, {created}\n")
    if as_json:
        sys.stdout.write(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode() + "\n")
    return 0


class Progress:
    """A line now and then."""

    def __init__(self, done: str) -> None:
        self._done = done
        self._began = self._said = time.monotonic()
        self._first: int | None = None

    def __call__(self, done: int, total: int, failed: int) -> None:
        now = time.monotonic()
        self._first = done if self._first is None else self._first
        if now - self._said >= _EVERY_S:
            self._said = now
            rate = (done - self._first) / (now - self._began)
            sys.stderr.write(f"{done}/{total} {self._done}, {failed} failed, {rate:.0f}/s\n")


def _summary(report: "ScoreReport") -> str:
    means = (report.mean_before, report.mean_reward)
    before, mean = ("none" if value is None else f"{value:.4f}" for value in means)
    if report.unscored:
        mean += f" over {report.rollouts - report.unscored} of {report.rollouts} scored"
    lines = [
        f"{report.rollouts} rollouts ({report.now} now), mean reward {mean} (the run's own: {before})",
        f"scores: {report.path}",
    ]
    for example, count in list(report.causes.items())[:_CAUSES_SHOWN]:
        lines.append(f"no reward for {count}: {example[:300]}")
    return "\n".join([*lines, ""])
