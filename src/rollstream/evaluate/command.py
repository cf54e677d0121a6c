"""`rollstream eval`: figures of runs, with intervals; comparisons; bounds for CI."""

import argparse
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rollstream.errors import ConfigError
from rollstream.untrusted import printable_line

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
_LONGEST_NAME = 100
"""Characters of a run's name or a column's value in a table."""
_MARKDOWN = re.compile(r"[\\`*\[\]<>|&]")
"""What Markdown, or HTML in it, would take for more than a character."""

Report = dict[str, Any]
Table = list[list[str]]
Columns = dict[str, Callable[[Report], str]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `eval`."""
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="DIR",
        help="run, folder of runs, shards, exported Parquet file, buffer",
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
        "--scores", metavar="NAME", help="rewards of `rollstream score` (default: the run's own)"
    )
    parser.add_argument(
        "--solved-at",
        type=_finite,
        default=0.5,
        metavar="X",
        help="a reward from here on counts as solved (default: %(default)s)",
    )
    parser.add_argument(
        "--missing-as",
        type=_finite,
        metavar="REWARD",
        help="rollouts that failed or were not scored count with this reward (default: they do not count)",
    )
    parser.add_argument(
        "--min-mean", type=_finite, metavar="X", help="exit code 1 if a mean reward is below X"
    )
    parser.add_argument(
        "--no-worse-than",
        type=Path,
        metavar="RUN",
        help="compare with this run; exit code 1 if one is worse than it by more than luck",
    )
    parser.add_argument(
        "--margin",
        type=_margin,
        metavar="M",
        help="with --no-worse-than: exit code 1 unless it is shown that at most M was lost",
    )
    parser.add_argument("--format", choices=["text", "md", "json"], default="text")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise argparse.ArgumentTypeError(f"must be a finite number, not {text}")
    return value


def _margin(text: str) -> float:
    if (value := _finite(text)) < 0:
        raise argparse.ArgumentTypeError(f"must be 0 or more, not {text}")
    return value


def run(options: argparse.Namespace, names: Mapping[str, str] = MappingProxyType({})) -> int:
    """Executes a parsed command line; `names`: what to call runs, by their folders. Raises `ConfigError`."""
    import orjson

    report = _report(options, names)
    if options.format == "json":
        said = orjson.dumps(report, option=orjson.OPT_INDENT_2).decode() + "\n"
    else:
        said = _written(report, options)
    try:
        sys.stdout.write(said)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough; the exit code still says what was found
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    damage = [line for one in report["runs"] for line in one["damage"]]
    for kind, lines in (("NOT MET", report["missed"]), ("damaged", damage)):
        for line in lines:
            sys.stderr.write(f"{kind}: {printable_line(line)}\n")
    return 1 if report["missed"] or damage else 0


def _report(options: argparse.Namespace, names: Mapping[str, str]) -> Report:
    """All that is said, as JSON has it. Raises `ConfigError`."""
    import msgspec

    from rollstream.evaluate.compare import compare_samples
    from rollstream.evaluate.metrics import summarize, summarize_by
    from rollstream.evaluate.samples import Samples, find_runs, labels_of_run, read_runs

    if options.margin is not None and options.no_worse_than is None:
        raise ConfigError("--margin is what --no-worse-than allows: name the run, too")
    if options.k is not None and min(options.k) < 1:
        raise ConfigError("--k: numbers from 1")
    places, baseline = options.runs, options.no_worse_than
    if baseline is not None:
        places = [baseline, *places]
        if (count := len(find_runs([baseline]))) > 1:
            raise ConfigError(f"--no-worse-than names one run; {baseline} holds {count}")
        if len(find_runs(places)) == 1:
            raise ConfigError(f"--no-worse-than {baseline}: there is no other run to compare with it")
    how = options.solved_at, None if options.k is None else sorted(set(options.k))
    report: Report = {"runs": [], "by": [], "comparisons": [], "missed": []}
    against: tuple[str, Samples] | None = None
    for run in read_runs(places, names, options.scores):
        samples, damage = run.samples, run.rows.damage
        if options.missing_as is not None:
            samples = samples.with_missing(options.missing_as)
        of_run = {"run": run.name, "n": run.n, "total": run.total}
        report["runs"].append({**of_run, **msgspec.to_builtins(summarize(samples, *how)), "damage": damage})
        if options.by and len(samples):
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
    if not any(one["rollouts"] for one in report["runs"]):
        lines = [line for one in report["runs"] for line in one["damage"]]
        raise ConfigError(
            f"{report['runs'][0]['run']} holds no rollout{f': {lines[0]}' if lines else ' yet'}"
        )
    judged = report["runs"] if baseline is None else report["runs"][1:]
    report["missed"] = [line for one in judged for line in _below(one, options.min_mean)]
    if baseline is not None:
        report["missed"] += [line for one in report["comparisons"] for line in _worse(one, options.margin)]
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
        said = f"too few prompts are scored in both to compare: {compared['prompts']}"
    elif change["high"] >= 0 if margin is None else change["low"] >= -margin:  # not true of NaN
        return []
    else:
        said = f"the mean reward changed by {_interval(change)}"
        said += "" if margin is None else f": it may have lost more than {margin:g}"
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
    name = _label_in_markdown if options.format == "md" else _label
    names = {one["run"]: name(str(path.relative_to(folder))) for one, path in zip(runs, paths, strict=True)}

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
        blocks.append(table({name(options.by): lambda one: name(one["value"] or "-"), **_FIGURES}, by))
    if compared:
        blocks += [f"paired by prompt, against {names[runs[0]['run']]}", table(_COMPARED, compared)]
    blocks.append("\n".join(_notes(report, names, options)))
    write = _markdown if options.format == "md" else _aligned
    return "\n\n".join(one if isinstance(one, str) else write(one) for one in blocks) + "\n"


def _notes(report: Report, names: dict[str, str], options: argparse.Namespace) -> list[str]:
    """What has to be known to read the figures, as a list."""
    runs = report["runs"]
    notes = ["intervals are of 95 %; rollouts of one prompt count as dependent"]
    for one in runs:
        if one["total"] is not None and one["rollouts"] < one["total"]:
            notes.append(f"{names[one['run']]} is unfinished: {one['rollouts']} of {one['total']} rollouts")
        if one["n"] is None:
            notes.append(
                f"{names[one['run']]} is an exported file: it does not hold the rollouts that failed"
            )
    for one in report["comparisons"]:
        if one["only_a"] and one["only_b"] and not one["prompts"] + one["unscored"]:
            two = f"{names[one['run']]} and {names[one['against']]}"
            notes.append(f"{two} have no prompt in common: prompts are the same when their content is")
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


def _label(text: str) -> str:
    """A run's name or a column's value, as data has it, for a table."""
    line = printable_line(text)
    return line if len(line) <= _LONGEST_NAME else line[: _LONGEST_NAME - 1] + "…"


def _label_in_markdown(text: str) -> str:
    return _MARKDOWN.sub(r"\\\g<0>", _label(text))


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
    header, *rows = table
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *rows))
