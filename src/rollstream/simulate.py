"""`rollstream simulate` on the command line. Light: what computes is imported when it is needed."""

import argparse
import sys

import orjson

from rollstream.command_line import Command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `rollstream simulate`: each is a field of its `Setup`."""
    add = parser.add_argument
    add("--generation", required=True, metavar="SECONDS", help="of one group, when an engine works on it")
    add("--training", required=True, type=float, dest="training_s", metavar="SECONDS", help="of one step")
    add("--update", type=float, default=0.0, dest="update_s", metavar="SECONDS", help="of one weight update")
    add(
        "--groups",
        type=int,
        default=32,
        dest="groups_per_step",
        metavar="N",
        help="groups a step (default: 32)",
    )
    add("--slots", type=int, metavar="N", help="groups that all engines do at once (default: --groups)")
    add("--ahead", type=int, metavar="N", help="batches beyond the one trained (default: --max-staleness)")
    add("--max-staleness", type=int, default=1, metavar="N", help="steps at most (default: 1)")
    add("--order", choices=["plan", "first"], default="plan", help="of delivery (default: plan)")
    add(
        "--weights",
        choices=["drain", "in_flight", "pinned"],
        default="drain",
        help="whether weight updates wait for idle engines (default: drain); pinned is predicted as in_flight",
    )
    add(
        "--dropped",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="of groups, as without signal (default: 0)",
    )
    add("--steps", type=int, default=200, metavar="N", help="to simulate (default: 200)")
    add("--seed", type=int, default=0, metavar="N", help="of the durations (default: 0)")
    add("--json", action="store_true")


def run(options: argparse.Namespace) -> int:
    """Predicts, and prints what it predicts."""
    from rollstream.training.simulate import Setup, compare, format_comparison, parse_duration

    given = {name: value for name, value in vars(options).items() if name in Setup.__match_args__}
    given["generation"] = parse_duration(options.generation)
    if options.ahead is None:
        given["ahead"] = options.max_staleness
    setup = Setup(**given)
    compared = compare(setup)
    if options.json:
        written = orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS
        sys.stdout.write(orjson.dumps(compared, option=written).decode() + "\n")
    else:
        sys.stdout.write(format_comparison(setup, compared) + "\n")
    return 0


COMMAND = Command(
    "predict what asynchronous training would bring: step time, idle shares, staleness",
    run,
    add_arguments,
    "SECONDS is a number, or a distribution by its mean: lognormal:30:0.8 (sigma), pareto:30:2.5\n"
    "(alpha), exponential:30. For example, batches of 64 groups on engines that do 128 at once:\n"
    "  rollstream simulate --generation lognormal:40:0.8 --training 60 --groups 64 --slots 128\n",
)
