"""`rollstream generate key=value …`, the same as `python -m rollstream.generation.main key=value …`."""

import argparse
import asyncio
import gc
import logging
import os
import shlex
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from rollstream.config.load import compose, to_settings, to_yaml
from rollstream.errors import ConfigError, DataError, RollstreamError, RunDirectoryError
from rollstream.generation.logs import log_to_console
from rollstream.generation.progress import format_duration, progress_console
from rollstream.generation.runner import GenerationResult, generate
from rollstream.generation.setup import peek_manifest, prepare
from rollstream.generation.stopping import StoppedEarly, StopSignals
from rollstream.store.manifest import identity_differences

logger = logging.getLogger(__name__)

EPILOG = """\
examples:
  rollstream generate actor_rollout_ref.model.path=MODEL data.train_files=prompts.parquet \\
      actor_rollout_ref.rollout.n=4 trainer.default_local_dir=outputs/run1
  rollstream generate --config outputs/run1/config.yaml          the same run again: it resumes
  rollstream generate --config outputs/run1/config.yaml --dry-run

exit codes: 0 done; 1 finished, with more failed rollouts than generation.max_failed_share, or damage found;
2 wrong usage or configuration; 130/143 stopped by a signal: the same command continues.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options and words of `generate`."""
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, in Hydra's grammar")
    parser.add_argument("--config", type=Path, metavar="FILE", help="a YAML file laid over the defaults")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="resolve everything (data, tokenizer, engine, identity) without generating",
    )
    parser.add_argument(
        "--show-config", action="store_true", help="print the resolved configuration and exit"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `python -m rollstream.generation.main`; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="rollstream generate",
        description="Generate trajectories for every prompt of a dataset; the same command resumes.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    return run(parser.parse_args(arguments))


def run(options: argparse.Namespace, layers: Sequence[Mapping[str, Any] | Path] = ()) -> int:
    """Executes a parsed `generate` command line; `layers` are laid under its `--config`."""
    out = Console(soft_wrap=True, highlight=False, markup=False)
    err = progress_console()
    try:
        files = [options.config] if options.config is not None else []
        config = compose(options.overrides, layers=[*layers, *files])
        if options.show_config:
            out.print(to_yaml(config), end="")
            return 0
        log_to_console(err, to_settings(config).generation.log_level)
        if options.dry_run:
            asyncio.run(_dry_run(config, out, as_json=options.json))
            return 0
        return _generate(config, out, err, as_json=options.json)
    except RollstreamError as error:
        err.print(f"error: {error}", style="bold red", markup=False, soft_wrap=True)
        logger.debug("%s", traceback.format_exc())
        return 2 if isinstance(error, ConfigError | DataError | RunDirectoryError) else 1


def _generate(config: DictConfig, out: Console, err: Console, *, as_json: bool) -> int:
    resume = f"resume with: {shlex.join(_command())}"

    def stop_at_once(number: int) -> None:
        err.print(f"stopped at once; what was counted as done is on disk\n{resume}", markup=False)
        _leave(128 + number)

    async def run_until_stopped() -> GenerationResult:
        stop = StopSignals(on_second=stop_at_once)
        stop.install()
        try:
            return await generate(config, stop=stop, console=err, on_ready=_freeze_garbage)
        except StoppedEarly:
            assert stop.signal is not None
            err.print(f"stopped before anything was generated\n{resume}", markup=False, soft_wrap=True)
            _leave(128 + stop.signal)
            raise

    result = asyncio.run(run_until_stopped())
    if as_json:
        report = {**asdict(result), "exit_code": result.exit_code, "complete": result.complete}
        out.print(orjson.dumps(report, option=orjson.OPT_INDENT_2, default=str).decode())
    else:
        out.print(summarise(result))
        if result.signal is not None:
            out.print(resume)
    if result.signal is not None:
        _leave(result.exit_code)
    return result.exit_code


def summarise(result: GenerationResult) -> str:
    """How a run ended, for people."""
    reward = "" if result.mean_reward is None else f", mean reward {result.mean_reward:.4f}"
    counts = f"{result.completed}/{result.total} rollouts done, {result.failed} failed{reward}"
    if result.signal is not None:
        first = f"stopped: {counts}, in {format_duration(result.elapsed_s)}"
    elif result.generated == 0 and result.complete:
        first = f"nothing left to do: {counts}"
    else:
        first = f"done: {counts}, {result.generated} generated in {format_duration(result.elapsed_s)}"
    lines = [first, f"run directory: {result.run_dir}"]
    if result.artifact is not None:
        lines.append(f"artifact: {result.artifact} ({result.artifact_rows} rows)")
    if result.failed:
        lines.append(
            f"why they failed: rollstream status --failed {result.run_dir}; "
            "try them again with generation.retry_failed=true"
        )
    if result.unscored:
        lines.append(
            f"{result.unscored} rollouts could not be scored: their reward is null, see reward_extra"
        )
    if result.damage:
        lines.append(
            f"{len(result.damage)} damaged places were found and redone, see {result.run_dir}/damaged"
        )
    if result.exit_code == 1:
        lines.append(f"that is more than generation.max_failed_share={result.max_failed_share:g} allows")
    return "\n".join(lines)


async def _dry_run(config: DictConfig, out: Console, *, as_json: bool) -> None:
    manifest = peek_manifest(config)
    prepared = await prepare(config, manifest)
    with tempfile.TemporaryDirectory(prefix="rollstream-dry-run-") as folder:
        engine = prepared.create_engine(Path(folder))
        try:
            await engine.start()
            prepared.check_engine(engine)
            capabilities = asdict(engine.capabilities)
        finally:
            await engine.close()
    row = prepared.dataset.row(int(prepared.dataset.order[0]))
    report: dict[str, Any] = {
        "run_dir": str(prepared.run_dir),
        "holds": "nothing yet" if manifest is None else f"a run created {manifest.created}",
        "would_differ": []
        if manifest is None
        else identity_differences(manifest.identity, prepared.manifest.identity),
        "prompt_rows": len(prepared.dataset.order),
        "rows_in_files": len(prepared.dataset),
        "overlong_left_out": None if prepared.overlong is None else prepared.overlong.removed,
        "rollouts": prepared.total,
        "first_prompt_tokens": prepared.prompts.length(row.messages),
        "first_prompt": row.messages,
        "engine": capabilities,
        "identity": prepared.manifest.identity,
    }
    if as_json:
        out.print(orjson.dumps(report, option=orjson.OPT_INDENT_2, default=str).decode())
    else:
        out.print(
            OmegaConf.to_yaml(OmegaConf.create(orjson.loads(orjson.dumps(report, default=str)))), end=""
        )
        out.print("dry run: everything resolves, nothing was generated")


def _freeze_garbage() -> None:
    """Takes what the start made (a million objects of imported modules) out of the garbage collector's way.

    Walking them again and again costs a tenth of a run's CPU. Only the command line does this: a process
    that embeds rollstream is not ours to tune.
    """
    gc.collect()
    gc.freeze()


def _command() -> list[str]:
    """The command line of this process, as a person would type it again."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py" or program.suffix == ".py":
        return ["python", "-m", "rollstream.generation.main", *sys.argv[1:]]
    return [program.name, *sys.argv[1:]]


def _leave(code: int) -> None:
    """Ends the process without waiting for threads: everything that counts is on disk."""
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
