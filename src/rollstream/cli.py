"""The command line: `rollstream COMMAND …`."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import orjson

import rollstream
from rollstream.errors import ConfigError, DataError, RollstreamError, RunDirectoryError


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    options = build_parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except RollstreamError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | DataError | RunDirectoryError) else 1
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    from rollstream.generation import main as generation

    parser = argparse.ArgumentParser(
        prog="rollstream", description="Prompts in, durable, training-ready LLM trajectories out."
    )
    parser.add_argument("--version", action="version", version=f"rollstream {rollstream.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(
        name: str, command: Callable[[argparse.Namespace], int], text: str, **kwargs: object
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **kwargs,  # type: ignore[arg-type]
        )
        added.set_defaults(command=command)
        return added

    generate = add(
        "generate",
        generation.run,
        "generate trajectories for every prompt of a dataset",
        epilog=generation.EPILOG,
    )
    generation.add_arguments(generate)

    demo = add(
        "demo",
        _demo,
        "generate with the shipped model, task and reward: 256 rollouts into outputs/demo",
        epilog="Takes the same settings as `rollstream generate`, for example:\n"
        "  rollstream demo train_tasks.0.size=1000 trainer.default_local_dir=outputs/big\n",
    )
    generation.add_arguments(demo)

    status = add("status", _status, "show what a run directory holds, also while it is written")
    status.add_argument("run_dir", type=Path)
    status.add_argument("--failed", action="store_true", help="the failed rollouts as JSON Lines")
    status.add_argument("--json", action="store_true")

    validate = add("validate", _validate, "read every byte of a run directory and say whether it is sound")
    validate.add_argument("run_dir", type=Path)
    validate.add_argument("--json", action="store_true")

    export = add("export", _export, "write a run's trajectories in another format")
    export.add_argument("run_dir", type=Path)
    export.add_argument("--format", choices=["parquet", "jsonl"], default="parquet")
    export.add_argument("--output", type=Path, help="default: trajectories.FORMAT in the run directory")

    show = add("show", _show, "show one trajectory: messages, reward, masks")
    show.add_argument("run_dir", type=Path)
    show.add_argument("index", type=int, nargs="?", help="prompt row (default: the first one that is there)")
    show.add_argument("repeat", type=int, nargs="?", default=0)
    show.add_argument("--trajectory", type=int, help="one of several trajectories (default: the final one)")
    show.add_argument("--tokens", action="store_true", help="every token with its mask and log-prob")
    show.add_argument("--json", action="store_true")
    return parser


def _demo(options: argparse.Namespace) -> int:
    from rollstream import config
    from rollstream.demo import MODEL_PATH
    from rollstream.generation import main as generation

    demo = Path(config.__file__).with_name("demo.yaml")
    return generation.run(options, [demo, {"actor_rollout_ref": {"model": {"path": str(MODEL_PATH)}}}])


def _status(options: argparse.Namespace) -> int:
    from rollstream.store.summary import read_failures, read_status, status_json

    if options.failed:
        import msgspec

        for failure in read_failures(options.run_dir):
            print(msgspec.json.encode(failure).decode())
        return 0
    status = read_status(options.run_dir)
    if options.json:
        print(status_json(status).decode())
    else:
        total = "?" if status.total is None else status.total
        reward = "-" if status.mean_reward is None else f"{status.mean_reward:.4f}"
        print(f"run directory   {status.run_dir} (created {status.created})")
        print(
            f"rollouts        {status.completed}/{total} done, {status.failed} failed, mean reward {reward}"
        )
        if status.unscored:
            print(f"unscored        {status.unscored}")
        where = f"{status.saved_batches} batches, {status.pending_rows} rows in the journal"
        print(f"trajectories    {status.rows} ({where})")
        print(f"artifact        {'trajectories.parquet' if status.artifact else 'not merged yet'}")
        print(f"written by      {status.writer or 'nobody right now'}")
        for line in status.damage:
            print(f"damaged         {line}")
        for name in status.kept_aside:
            print(f"kept aside      damaged/{name}")
    return 1 if status.damage else 0


def _validate(options: argparse.Namespace) -> int:
    from rollstream.store.validate import validate_run

    result = validate_run(options.run_dir)
    if options.json:
        report = {**asdict(result), "sound": result.sound}
        print(orjson.dumps(report, option=orjson.OPT_INDENT_2).decode())
        return 0 if result.sound else 1
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
    return 0 if result.sound else 1


def _export(options: argparse.Namespace) -> int:
    from rollstream.store.export.run import export_run

    target, rows = export_run(options.run_dir, options.format, options.output)
    print(f"wrote {target} ({rows} rows)")
    return 0


def _show(options: argparse.Namespace) -> int:
    from rollstream.store.find import find_trajectory

    found = find_trajectory(options.run_dir, options.index, options.repeat, options.trajectory)
    if options.json:
        print(orjson.dumps(found.row, option=orjson.OPT_INDENT_2).decode())
        return 0
    from rollstream.show import print_trajectory

    print_trajectory(found, tokens=options.tokens)
    return 0


if __name__ == "__main__":
    sys.exit(main())
