"""`rollstream simulate` on the command line. Light: what computes is imported when it is needed."""

import argparse
import math
import sys

import orjson

from rollstream.command_line import Command
from rollstream.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `rollstream simulate`."""
    parser.add_argument(
        "--generation", required=True, metavar="SECONDS", help="of one group, when an engine works on it"
    )
    parser.add_argument("--training", required=True, type=float, metavar="SECONDS", help="of one step")
    parser.add_argument(
        "--update", type=float, default=0.0, metavar="SECONDS", help="of one weight update (default: 0)"
    )
    parser.add_argument("--groups", type=int, default=32, metavar="N", help="groups a step (default: 32)")
    parser.add_argument(
        "--slots", type=int, metavar="N", help="groups that all engines do at once (default: --groups)"
    )
    parser.add_argument(
        "--ahead",
        type=int,
        metavar="N",
        help="batches beyond the one being trained (default: --max-staleness)",
    )
    parser.add_argument(
        "--max-staleness", type=int, default=1, metavar="N", help="steps at most (default: 1)"
    )
    parser.add_argument(
        "--order", choices=["plan", "first"], default="plan", help="of delivery (default: plan)"
    )
    parser.add_argument(
        "--weights",
        choices=["drain", "in_flight"],
        default="drain",
        help="whether weight updates wait for idle engines (default: drain)",
    )
    parser.add_argument(
        "--dropped",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="of groups, as without signal (default: 0)",
    )
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="to simulate (default: 200)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the durations (default: 0)")
    parser.add_argument("--json", action="store_true")


def run(options: argparse.Namespace) -> int:
    """Predicts, and prints what it predicts."""
    from rollstream.training.simulate import Comparison, Setup, parse_duration

    # What `Setup` would refuse by another name, or not at all.
    if options.groups < 1:
        raise ConfigError(f"--groups {options.groups}: at least 1")
    for name in ("training", "update"):
        if not 0 <= (given := getattr(options, name)) < math.inf:
            raise ConfigError(f"--{name} {given:g}: seconds, at least 0")
    compared = Comparison(
        Setup(
            generation=parse_duration(options.generation),
            training_s=options.training,
            update_s=options.update,
            groups_per_step=options.groups,
            slots=options.slots,
            max_staleness=options.max_staleness,
            ahead=options.max_staleness if options.ahead is None else options.ahead,
            order=options.order,
            weights=options.weights,
            dropped=options.dropped,
            steps=options.steps,
            seed=options.seed,
        )
    )
    if options.json:
        written = orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS
        sys.stdout.write(orjson.dumps(compared.to_json(), option=written).decode() + "\n")
    else:
        sys.stdout.write(compared.table() + "\n")
    return 0


COMMAND = Command(
    "predict what asynchronous training would bring: step time, idle shares, staleness",
    run,
    add_arguments,
    "SECONDS is a number, or a distribution by its mean: lognormal:30:0.8 (sigma), pareto:30:2.5\n"
    "(alpha), exponential:30. For example, batches of 64 groups on engines that do 128 at once:\n"
    "  rollstream simulate --generation lognormal:40:0.8 --training 60 --groups 64 --slots 128\n",
)
