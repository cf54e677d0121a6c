"""`rollstream eval`: figures of runs, with intervals; comparisons; bounds for CI."""

import argparse
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollstream.errors import ConfigError

EPILOG = """\
examples:
  rollstream eval outputs/demo                          mean reward, pass@k, rates
  rollstream eval outputs/demo --by data_source         the same for each source
  rollstream eval outputs/before outputs/after          both, and paired by prompt
  rollstream eval outputs/checkpoints --format md       a table over all runs of a folder
  rollstream eval outputs/after --min-mean 0.6 --no-worse-than outputs/before

exit codes: 0 done; 1 a bound was not met, or damage was found; 2 wrong usage. docs/evaluate.md
"""

_MOST_VALUES = 200
"""Different values of a column by which there is a table."""

Report = dict[str, Any]
Table = list[list[str]]
Columns = dict[str, Callable[[Report], str]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `eval`."""
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="DIR", help="run, folder of runs, shards, exported Parquet file"
    )
    parser.add_argument(
        "--by",
        metavar="COLUMN",
        help="figures for each value of it: data_source, finish_reason, extra_info.level",
    )
    parser.add_argument(
        "--k", type=int, nargs="+", metavar="K", help="of pass@k and pass^k (default: 1, 2, 4, … and n)"
    )
    parser.add_argument(
        "--solved-at",
        type=float,
        default=0.5,
        metavar="X",
        help="a reward from here on counts as solved (default: %(default)s)",
    )
    parser.add_argument(
        "--missing-as",
        type=float,
        metavar="REWARD",
        help="rollouts that failed or were not scored count with this reward (default: they do not count)",
    )
    parser.add_argument("--min-mean", type=float, metavar="X", help="exit code 1 if a mean reward is below X")
    parser.add_argument(
        "--no-worse-than",
        type=Path,
        metavar="RUN",
        help="compare with this run; exit code 1 if one is worse than it by more than luck",
    )
    parser.add_argument(
        "--margin",
        type=float,
        metavar="M",
        help="with --no-worse-than: exit code 1 unless it is shown that at most M was lost",
    )
    parser.add_argument("--format", choices=["text", "md", "json"], default="text")


def run(options: argparse.Namespace) -> int:
    """Executes a parsed command line. Raises `ConfigError`."""
    import orjson

    report = _report(options)
    if options.format == "json":
        sys.stdout.write(orjson.dumps(report, option=orjson.OPT_INDENT_2).decode() + "\n")
    else:
        sys.stdout.write(_written(report, options))
    damage = [line for one in report["runs"] for line in one["damage"]]
    for kind, lines in (("NOT MET", report["missed"]), ("damaged", damage)):
        for line in lines:
            sys.stderr.write(f"{kind}: {line}\n")
    return 1 if report["missed"] or damage else 0


def _report(options: argparse.Namespace) -> Report:
    """All that is said, as JSON has it. Raises `ConfigError`."""
    import msgspec

    from rollstream.evaluate.compare import compare_samples
    from rollstream.evaluate.metrics import summarize, summarize_by
    from rollstream.evaluate.samples import Samples, labels_of_run, read_runs

    if options.margin is not None and options.no_worse_than is None:
        raise ConfigError("--margin is what --no-worse-than allows: name the run, too")
    if options.k is not None and min(options.k) < 1:
        raise ConfigError("--k: numbers from 1")
    runs, baseline = read_runs(options.runs), list[str]()
    if options.no_worse_than is not None:
        first, *more = read_runs([options.no_worse_than])
        if more:
            raise ConfigError(f"--no-worse-than names one run; {options.no_worse_than} holds {1 + len(more)}")
        baseline = [first.name]
        runs = itertools.chain([first], (one for one in runs if one.name not in baseline))
    how = options.solved_at, None if options.k is None else sorted(set(options.k))
    report: Report = {"runs": [], "by": [], "comparisons": [], "missed": []}
    against: tuple[str, Samples] | None = None
    for run in runs:
        samples, damage = run.samples, run.rows.damage
        if not len(samples):
            raise ConfigError(f"{run.name} holds no rollout{f': {damage[0]}' if damage else ' yet'}")
        if options.missing_as is not None:
            samples = samples.with_missing(options.missing_as)
        of_run = {"run": run.name, "n": run.n, "total": run.total}
        report["runs"].append({**of_run, **msgspec.to_builtins(summarize(samples, *how)), "damage": damage})
        if options.by:
            labels = labels_of_run(run.rows, options.by)
            if (count := len(set(labels))) > _MOST_VALUES:
                raise ConfigError(f"--by {options.by}: {count} values; at most {_MOST_VALUES} make a table")
            for value, summary in summarize_by(samples, labels, *how).items():
                of_value = {"run": run.name, "column": options.by, "value": value}
                report["by"].append({**of_value, **msgspec.to_builtins(summary)})
        against = against or (run.name, samples)
        if run.name != against[0]:
            of_two = {"run": run.name, "against": against[0]}
            compared = msgspec.to_builtins(compare_samples(against[1], samples))
            report["comparisons"].append({**of_two, **compared})
    report["missed"] = [
        *(line for one in report["runs"][len(baseline) :] for line in _below(one, options.min_mean)),
        *(line for one in report["comparisons"] if baseline for line in _worse(one, options.margin)),
    ]
    return report


def _below(run: Report, bound: float | None) -> list[str]:
    """Why a run does not pass `--min-mean`: the mean itself is below it."""
    mean = None if run["reward"] is None else run["reward"]["mean"]
    if bound is None or (mean is not None and mean >= bound):
        return []
    said = "nothing is scored" if mean is None else f"the mean reward {mean:.4f} is below {bound:g}"
    return [f"{run['run']}: {said} (--min-mean)"]


def _worse(compared: Report, margin: float | None) -> list[str]:
    """Why a run does not pass `--no-worse-than`.

    Without a margin it is worse if its whole interval is below 0. With a margin it has to be shown that it is
    not: its whole interval must be above -margin.
    """
    change = compared["difference"]
    if change is None or change["low"] is None:
        said = f"{compared['prompts']} prompts are scored in both: too few to compare"
    elif margin is not None and change["low"] < -margin:
        said = f"the mean reward changed by {_interval(change)}: it may have lost more than {margin:g}"
    elif margin is None and change["high"] < 0:
        said = f"the mean reward changed by {_interval(change)}"
    else:
        return []
    return [f"{compared['run']}: {said} (--no-worse-than)"]


# --- for people


_FIGURES: Columns = {
    "rollouts": lambda one: f"{one['rollouts']}",
    "prompts": lambda one: f"{one['prompts']}",
    "mean reward": lambda one: _interval(one["reward"]),
    "unscored": lambda one: f"{one['unscored']}",
    "failed": lambda one: _share(one["failure_rate"]),
    "truncated": lambda one: _share(one["truncated"]),
    "tool errors": lambda one: _share(one["tool_error_rate"]),
    "tokens": lambda one: _number(one["tokens"]),
    "p95": lambda one: _number(one["tokens_p95"]),
    "turns": lambda one: _number(one["turns"]),
}
_PASSES: Columns = {
    "k": lambda one: f"{one['k']}",
    "pass@k": lambda one: _interval(one["pass_at"]),
    "pass^k": lambda one: _interval(one["pass_hat"]),
    "prompts": lambda one: "0" if one["pass_at"] is None else f"{one['pass_at']['clusters']}",
    "left out": lambda one: f"{one['left_out']}",
}
_COMPARED: Columns = {
    "prompts": lambda one: f"{one['prompts']}",
    "difference": lambda one: _interval(one["difference"], "+"),
    "won": lambda one: f"{one['won']}",
    "lost": lambda one: f"{one['lost']}",
    "tied": lambda one: f"{one['tied']}",
    "sign p": lambda one: f"{one['sign_p']:.2g}",
    "permutation p": lambda one: f"{one['permutation_p']:.2g}",
    "not in both": lambda one: f"{one['only_a'] + one['only_b']}",
    "unscored": lambda one: f"{one['unscored']}",
}


def _written(report: Report, options: argparse.Namespace) -> str:
    """The report as text or Markdown."""
    runs, by, compared = report["runs"], report["by"], report["comparisons"]
    paths = [Path(one["run"]).absolute() for one in runs]
    folder = os.path.commonpath([path.parent for path in paths])
    names = {one["run"]: str(path.relative_to(folder)) for one, path in zip(runs, paths, strict=True)}

    def table(columns: Columns, entries: list[Report]) -> Table:
        return [
            ["run", *columns],
            *([names[one["run"]], *(form(one) for form in columns.values())] for one in entries),
        ]

    passes = [{"run": one["run"], **rate} for one in runs for rate in one["passes"]]
    blocks: list[str | Table] = [
        table(_FIGURES, runs),
        f"solved: reward >= {options.solved_at:g}",
        table(_PASSES, passes),
    ]
    if by:
        blocks.append(table({options.by: lambda one: one["value"] or "-", **_FIGURES}, by))
    if compared:
        blocks += [f"paired by prompt, against {names[runs[0]['run']]}", table(_COMPARED, compared)]
    blocks.append("\n".join(_notes(runs, options)))
    write = _markdown if options.format == "md" else _aligned
    return "\n\n".join(one if isinstance(one, str) else write(one) for one in blocks) + "\n"


def _notes(runs: list[Report], options: argparse.Namespace) -> list[str]:
    """What has to be known to read the figures, as a list."""
    notes = ["intervals are of 95 %; rollouts of one prompt count as dependent"]
    for one in runs:
        if one["total"] is not None and one["rollouts"] < one["total"]:
            notes.append(f"{one['run']} is unfinished: {one['rollouts']} of {one['total']} rollouts")
        if one["n"] is None:
            notes.append(f"{one['run']} is an exported file: it does not hold the rollouts that failed")
    if any(one["reward"] is not None and one["reward"]["low"] is None for one in runs):
        notes.append("one prompt alone has no interval")
    partial, scored = (sum(one[name] for one in runs) for name in ("partial", "scored"))
    if partial:
        notes.append(f"{partial} of {scored} rewards are neither 0, 1 nor -1: pass@k depends on --solved-at")
    missing = "rollouts that failed or were not scored"
    if options.missing_as is not None:
        notes.append(f"{missing} count with the reward {options.missing_as:g}")
    elif any(one["failed"] or one["unscored"] for one in runs):
        notes.append(f"{missing} have no part in means and pass@k (--missing-as)")
    return [f"- {one}" for one in notes]


def _interval(one: Report | None, sign: str = "") -> str:
    if one is None:
        return "-"
    mean, low, high = (
        "" if one[name] is None else f"{one[name]:{sign}.4f}" for name in ("mean", "low", "high")
    )
    return f"{mean} [{low}, {high}]" if low else mean


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _aligned(table: Table) -> str:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    form = "  ".join(f"{{:{'<' if at == 0 else '>'}{width}}}" for at, width in enumerate(widths))
    return "\n".join(form.format(*row).rstrip() for row in table)


def _markdown(table: Table) -> str:
    header, *rows = ([cell.replace("|", "\\|") for cell in row] for row in table)
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *rows))
