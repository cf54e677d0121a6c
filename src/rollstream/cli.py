"""The command line: `rollstream COMMAND …`."""

import argparse
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

import rollstream
from rollstream import plugins
from rollstream.buffer import command as buffer
from rollstream.command_line import Command, add_commands, guarded, parse
from rollstream.errors import ConfigError, DataError, RollstreamError, RunDirectoryError
from rollstream.evaluate import annotate, audit
from rollstream.evaluate import command as evaluation
from rollstream.evaluate import score as scoring
from rollstream.evaluate import select as selection
from rollstream.stderr_log import at_work
from rollstream.store.export.format import ExportFormat
from rollstream.untrusted import printable

if TYPE_CHECKING:
    from rollstream.buffer.export import BufferRun
    from rollstream.generation.export_images import RunImages
    from rollstream.store.summary import FailureCause

_CAUSES_SHOWN = 10
"""Causes of failures that a person is shown."""
_ERROR_SHOWN = 300
"""Characters of an error that a person is shown."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return guarded(lambda: _main(arguments))


def _main(arguments: Sequence[str] | None) -> int:
    options = parse(build_parser(), arguments)
    command: Command = options.command
    assert command.run is not None
    try:
        with at_work(options.parser.prog) if command.is_silent else nullcontext():
            return command.run(options)
    except RollstreamError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | DataError | RunDirectoryError) else 1
    except BrokenPipeError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        # A file that may not be read, an I/O error; the latter is how pyarrow meets a damaged footer.
        if not hasattr(options, "run_dir"):
            raise
        reason = getattr(error, "strerror", None) or error
        print(f"error: {getattr(error, 'filename', None) or options.run_dir}: {reason}", file=sys.stderr)
        return 1


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = argparse.ArgumentParser(
        prog="rollstream", description="Turns prompts into durable, training-ready LLM trajectories."
    )
    parser.add_argument("--version", action="version", version=f"rollstream {rollstream.__version__}")
    found: Mapping[str, Command] = plugins.load_all("rollstream.commands")
    add_commands(parser, dict(sorted({**_RUN_COMMANDS, **found}.items())))
    return parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="DIR", help="run directory")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_scores(parser: argparse.ArgumentParser) -> None:
    text = "rewards of `rollstream score` (default: the run's own)"
    parser.add_argument("--scores", metavar="NAME", help=text)


def _add_status(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    _add_scores(parser)
    listed = parser.add_mutually_exclusive_group()
    text = "list all failed rollouts, a line each; with --json a JSON object each, with the traceback"
    listed.add_argument("--failed", action="store_true", help=text)
    text = "list all rollouts without a reward, a line each; with --json a JSON object each"
    listed.add_argument("--unscored", action="store_true", help=text)


def _add_validate(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument(
        "--repair",
        action="store_true",
        help="move damaged files to damaged/ and take their rollouts from intact copies",
    )


def _add_export(parser: argparse.ArgumentParser) -> None:
    text = "run directory, or a buffer: its folder or URL"
    parser.add_argument("run_dir", type=Path, metavar="DIR", help=text)
    formats: Mapping[str, ExportFormat] = plugins.load_all("rollstream.exports")
    parser.add_argument("--format", choices=formats, default="parquet", help="default: %(default)s")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="where to write (default: in the run directory, see docs/export.md); required if the run is unfinished, "
        "still written or read-only",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="overwrite FILE if it exists (an export in the run directory is always replaced)",
    )
    _add_scores(parser)
    buffer.add_selection(parser)
    for name, found in formats.items():
        group = parser.add_argument_group(name, found.text)
        for flag, argument in found.flags.items():
            group.add_argument(flag, default=argparse.SUPPRESS, **argument)


def _add_merge(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shards", type=Path, nargs="+", metavar="DIR")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="the run directory to make")
    parser.add_argument("--json", action="store_true")


def _add_show(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument(
        "index", type=int, nargs="?", help="prompt row (default: the first one that is there)"
    )
    parser.add_argument("repeat", type=int, nargs="?", default=0)
    parser.add_argument("--trajectory", type=int, help="one of several trajectories (default: the final one)")
    parser.add_argument("--tokens", action="store_true", help="every token with its mask and log-prob")
    _add_scores(parser)


def _add_eval(parser: argparse.ArgumentParser) -> None:
    evaluation.add_arguments(parser)
    buffer.add_selection(parser)


def _status(options: argparse.Namespace) -> int:
    from rollstream.store.run import Run
    from rollstream.store.summary import read_status, read_unscored, status_json

    if options.failed:
        failures = map(asdict, Run.open(options.run_dir).failures())
        _print_rollouts(failures, ("stage", "attempts", "error"), as_json=options.json)
        return 0
    if options.unscored:
        unscored = read_unscored(options.run_dir, options.scores)
        _print_rollouts(unscored, ("data_source", "cause"), as_json=options.json)
        return 0
    status = read_status(options.run_dir, options.scores)
    ledger = None
    if (options.run_dir / "training").is_dir():
        from rollstream.training.ledger import describe, read_ledger

        ledger = read_ledger(options.run_dir)
    run, sources = Run.open(options.run_dir, options.scores), {}
    if (run.manifest.config.get("data") or {}).get("sources"):
        from rollstream.evaluate.samples import figures_of_sources
        from rollstream.store.columns import RunColumns

        columns = RunColumns([run])
        columns.refresh()
        sources = figures_of_sources(columns)
    if options.json:
        more = {"training": None if ledger is None else asdict(ledger), "sources": sources}
        print(status_json(status, **{name: value for name, value in more.items() if value}).decode())
    else:
        done = str(status.completed)
        if ledger is None:  # nobody knows how many a training will have
            done += "/?" if status.total is None else f"/{status.total}"
        reward = "-" if status.mean_reward is None else f"{status.mean_reward:.4f}"
        print(f"run directory   {status.run_dir} (created {status.created})")
        print(f"rollouts        {done} done, {status.failed} failed, mean reward {reward}")
        for name, figures in sources.items():
            mean = "-" if figures["mean_reward"] is None else f"{figures['mean_reward']:.4f}"
            done = f"{figures['completed']} done, {figures['failed']} failed, mean reward {mean}"
            print(f"{'source':<16}{printable(name or 'not known')}: {done}")
        if status.half_done:
            print(f"half done       {status.half_done} rollouts, whose turns are kept")
        if status.all_scores:
            print(f"scores          {', '.join(status.all_scores)} (--scores NAME)")
        _print_causes("failed", status.failure_causes)
        if status.unscored:
            failed = (
                f", {status.reward_failed} of them as their reward failed" if status.reward_failed else ""
            )
            print(f"unscored        {status.unscored}{failed}")
        _print_causes("unscored", status.unscored_causes)
        where = f"{status.saved_batches} batches, {status.pending_rows} rows in the journal"
        print(f"trajectories    {status.rows} ({where})")
        if ledger is None:  # a training's store is not merged
            print(f"artifact        {'trajectories.parquet' if status.artifact else 'not merged yet'}")
        if status.artifact_rows:
            print(f"                {status.artifact_rows} trajectories in it are in no batch any more")
        for name in status.stale:
            print(f"stale           {name}: of an earlier state of the run")
        for number, line in enumerate(describe(ledger) if ledger is not None else ()):
            print(f"{'' if number else 'training':<16}{printable(line)}")
        print(f"written by      {status.writer or 'nobody right now'}")
        for line in status.damage:
            print(f"damaged         {line}")
        for name in status.quarantined:
            print(f"quarantined     damaged/{name}")
    return 1 if status.damage else 0


def _print_rollouts(rows: Iterable[Mapping[str, Any]], names: Sequence[str], *, as_json: bool) -> None:
    """A line for each rollout with some of its columns, the last one of any width; or all of it as JSON."""
    columns = ("index", "repeat", *names)
    for number, row in enumerate(rows):
        if as_json:
            print(orjson.dumps(row).decode())
            continue
        if number == 0:
            print("  ".join(f"{name:<10}" for name in columns).rstrip())
        cells = [printable(str(row[name]).partition("\n")[0][:_ERROR_SHOWN]) for name in columns]
        print("  ".join(f"{cell:<10}" for cell in cells).rstrip())


def _print_causes(what: str, causes: "Sequence[FailureCause]") -> None:
    for cause in causes[:_CAUSES_SHOWN]:
        error = printable(cause.example.partition("\n")[0][:_ERROR_SHOWN])
        print(f"{what:<16}{cause.count}: {error} (index {cause.index}, repeat {cause.repeat})")
    if (more := len(causes) - _CAUSES_SHOWN) > 0:
        print(f"{'':<16}and by {more} other causes: --{what}")


def _validate(options: argparse.Namespace) -> int:
    from rollstream.store.validate import repair_run, validate_run

    repaired = repair_run(options.run_dir) if options.repair else []
    result = validate_run(options.run_dir)
    if options.json:
        report = {**asdict(result), "sound": result.sound, "repaired": repaired}
        print(orjson.dumps(report, option=orjson.OPT_INDENT_2).decode())
        return 0 if result.sound else 1
    for line in repaired:
        print(f"repaired: {line}")
    for note in result.notes:
        print(f"note: {note}")
    for problem in result.problems:
        print(f"PROBLEM: {problem}")
    merged = "no artifact" if result.artifact_rows is None else f"artifact of {result.artifact_rows} rows"
    verdict = "sound" if result.sound else f"NOT sound ({len(result.problems)} problems)"
    print(
        f"{options.run_dir} is {verdict}: {result.rollouts} rollouts, {result.rows} trajectories in "
        f"{result.batches} batches and {result.journals} journals, {merged}"
    )
    if result.problems and not options.repair:
        where = shlex.quote(str(options.run_dir))
        print(f"to mend it: rollstream validate --repair {where}, then the run's own command again")
    if repaired:
        print("now the run's own command generates what is owed and merges anew")
    return 0 if result.sound else 1


def _export(options: argparse.Namespace) -> int:
    from rollstream.stderr_log import log_to_stderr
    from rollstream.store.export.run import export_run

    log_to_stderr(times=False)
    chosen: dict[str, Any] = {}
    formats: Mapping[str, ExportFormat] = plugins.load_all("rollstream.exports")
    for name, found in formats.items():
        flags = {flag: flag.lstrip("-").replace("-", "_") for flag in found.flags}
        given = {flag: key for flag, key in flags.items() if hasattr(options, key)}
        if given and options.format != name:
            raise ConfigError(f"{', '.join(given)}: for --format {name}, not {options.format}")
        chosen |= {key: getattr(options, key) for key in given.values()}
    upload, config = chosen.pop("upload", False), chosen.pop("config", None)
    if upload:
        from rollstream.generation.upload import check_upload

        check_upload(upload)
    address = buffer.buffer_address(options.run_dir)
    if address is None and (options.state or options.job):
        raise ConfigError(f"--state and --job choose from a buffer, which {options.run_dir} is not")
    if address is not None and upload:
        raise ConfigError("--upload takes the zip of a run")
    notes: list[str] = []
    damage: list[str] = []
    if address is None:
        done = export_run(
            *(options.run_dir, options.format, options.output),
            force=options.force,
            options=chosen,
            scores=options.scores,
            images=partial(_images, options.run_dir, config),
        )
    else:
        from rollstream.buffer.export import export_buffer

        which = {"state": options.state, "job": options.job}
        done, run = export_buffer(
            *(address, options.format, options.output, chosen), force=options.force, **which
        )
        notes, damage = run.notes, run.damage
    print(f"wrote {', '.join(str(path) for path in done.files)} ({done.rows} rows)")
    endless = (options.run_dir / "training").is_dir()  # nobody knows how many rollouts a training will have
    if (status := done.status) is not None and not status.finished and not endless:
        notes = [f"the run of {'?' if status.total is None else status.total} rollouts is unfinished"]
    for note in notes:
        print(note)
    if upload:
        from rollstream.generation.upload import upload_file

        print(f"uploaded: {upload_file(options.run_dir, done.target, upload)}")
    return _say_damage(damage)


def _say_damage(lines: Sequence[str]) -> int:
    """Returns the exit code."""
    for line in lines:
        print(f"damaged: {line}", file=sys.stderr)
    return 1 if lines else 0


def _eval(options: argparse.Namespace) -> int:
    runs: dict[str, BufferRun] = {}
    with ExitStack() as stack:

        def run_at(place: Path) -> Path:
            if (address := buffer.buffer_address(place)) is None:
                return place
            from rollstream.buffer.export import buffer_as_run

            if address not in runs:
                run = buffer_as_run(address, state=options.state, job=options.job)
                runs[address] = stack.enter_context(run)
            return runs[address].paths.root

        options.runs = [run_at(place) for place in options.runs]
        if options.no_worse_than is not None:
            options.no_worse_than = run_at(options.no_worse_than)
        if not runs and (options.state or options.job):
            raise ConfigError("--state and --job choose from a buffer, and there is none")
        code = evaluation.run(options, {str(run.paths.root): name for name, run in runs.items()})
        for note in (note for run in runs.values() for note in run.notes):
            print(f"note: {note}", file=sys.stderr)
        return max(code, _say_damage([line for run in runs.values() for line in run.damage]))


def _images(run_dir: Path, config: Path | None) -> "RunImages":
    """The reader of images for a DataProto. Raises `ConfigError`."""
    from rollstream.generation.export_images import run_images

    if config is None:
        raise ConfigError(
            "the conversations have images, and nothing that a run directory names is loaded by itself: --config "
            f"FILE says which model and prompt rows they are read with, such as {run_dir / 'config.yaml'} of a run "
            "of your own"
        )
    return run_images(config)


def _merge(options: argparse.Namespace) -> int:
    from rollstream.store.merge_shards import merge_shards

    merged = merge_shards(options.shards, options.output)
    if options.json:
        print(orjson.dumps({**asdict(merged), "output": str(merged.output)}).decode())
    else:
        print(
            f"merged {merged.shards} shards into {merged.output}: {merged.completed} rollouts "
            f"({merged.rows} trajectories), {merged.failed} failed"
        )
    return 0


def _show(options: argparse.Namespace) -> int:
    from rollstream.store.run import Run

    found = Run.open(options.run_dir, options.scores).find(options.index, options.repeat, options.trajectory)
    if options.json:
        print(orjson.dumps(found.row, option=orjson.OPT_INDENT_2).decode())
        return 0
    from rollstream.show import print_trajectory

    print_trajectory(found, tokens=options.tokens)
    return 0


_RUN_COMMANDS = {
    "status": Command(
        "say how far a run is: rollouts done and failed, causes, mean reward",
        _status,
        _add_status,
        is_silent=True,
    ),
    "validate": Command(
        "check every byte of a run directory; --repair mends it from intact copies",
        _validate,
        _add_validate,
        is_silent=True,
    ),
    "export": Command(
        "write the trajectories of a run or a buffer in another format", _export, _add_export, is_silent=True
    ),
    "merge": Command(
        "merge all shards of a run (generation.shard) into one run directory",
        _merge,
        _add_merge,
        is_silent=True,
    ),
    "show": Command("show one trajectory: messages, reward, masks", _show, _add_show, is_silent=True),
    "eval": Command(
        "judge runs: mean reward with its interval, pass@k, rates; compare them prompt by prompt",
        _eval,
        _add_eval,
        evaluation.EPILOG,
        is_silent=True,
    ),
    "score": Command(
        "score finished rollouts by another reward, without generating",
        scoring.run,
        scoring.add_arguments,
        scoring.EPILOG,
    ),
    "select": Command(
        "select prompts by the results of their rollouts (pass rate, …), for the next training",
        selection.run,
        selection.add_arguments,
        selection.EPILOG,
        is_silent=True,
    ),
    "annotate": Command(
        "store a model's log-probs of a run's tokens (a stream), without generating",
        annotate.run,
        annotate.add_arguments,
        annotate.EPILOG,
    ),
    "audit": Command(
        "compare a run's log-probs with those that annotate stored",
        audit.run,
        audit.add_arguments,
        audit.EPILOG,
        is_silent=True,
    ),
}


if __name__ == "__main__":
    sys.exit(main())
