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
  rollstream eval outputs/before outputs/after          both, compared prompt by prompt
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
Columns = dict[str, tuple[str, Callable[[Any], str]]]
"""By title: the key of an entry, and how its value is written."""


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
        help="figures for each value of a column, such as data_source, finish_reason, extra_info.level",
    )
    parser.add_argument(
        "--k",
        type=int,
        nargs="+",
        metavar="K",
        help="values of k for pass@k and pass^k (default: 1, 2, 4, … and n)",
    )
    add_reading(parser)
    parser.add_argument(
        "--missing-as",
        type=_finite,
        metavar="REWARD",
        help="count failed and unscored rollouts with this reward (default: leave them out)",
    )
    parser.add_argument(
        "--min-mean", type=_finite, metavar="X", help="exit code 1 if a mean reward is below X"
    )
    parser.add_argument(
        "--no-worse-than",
        type=Path,
        metavar="RUN",
        help="compare with this run; exit code 1 if a run is worse by more than luck (whole 95 %% interval below 0)",
    )
    parser.add_argument(
        "--margin",
        type=_margin,
        metavar="M",
        help="with --no-worse-than: exit code 1 unless the whole interval is above -M",
    )
    parser.add_argument("--format", choices=["text", "md", "json"], default="text")
    parser.add_argument("--json", action="store_const", const="json", dest="format", help="as --format json")


def add_reading(parser: argparse.ArgumentParser) -> None:
    """The options that say how rewards are read."""
    parser.add_argument(
        "--scores", metavar="NAME", help="rewards of `rollstream score` (default: the run's own)"
    )
    parser.add_argument(
        "--solved-at",
        type=_finite,
        default=0.5,
        metavar="X",
        help="a reward of X or more counts as solved (default: %(default)s)",
    )


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
        text = orjson.dumps(report, option=orjson.OPT_INDENT_2).decode() + "\n"
    else:
        text = _written(report, options)
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough; the exit code still says what was found
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    damage = [line for run in report["runs"] for line in run["damage"]]
    for kind, lines in (("NOT MET", report["missed"]), ("damaged", damage)):
        for line in lines:
            sys.stderr.write(f"{kind}: {printable_line(line)}\n")
    return 1 if report["missed"] or damage else 0


def _report(options: argparse.Namespace, names: Mapping[str, str]) -> Report:
    """All figures, as `--format json` has them. Raises `ConfigError`."""
    from msgspec import to_builtins

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
    first: tuple[str, Samples] | None = None
    for run in read_runs(places, names, options.scores):
        samples, damage, name = run.samples, run.rows.damage, {"run": run.name}
        if options.missing_as is not None:
            samples = samples.with_missing(options.missing_as)
        figures = to_builtins(summarize(samples, *how))
        report["runs"].append({**name, "n": run.n, "total": run.total, **figures, "damage": damage})
        if options.by and len(samples):
            labels = labels_of_run(run.rows, options.by)
            if (count := len(set(labels))) > _MOST_VALUES:
                raise ConfigError(f"--by {options.by}: {count} values; at most {_MOST_VALUES} make a table")
            for value, summary in summarize_by(samples, labels, *how).items():
                report["by"].append({**name, "column": options.by, "value": value, **to_builtins(summary)})
        first = first or (run.name, samples)
        if run.name != first[0]:
            comparison = to_builtins(compare_samples(first[1], samples))
            report["comparisons"].append({**name, "against": first[0], **comparison})
    runs = report["runs"]
    if not any(run["rollouts"] for run in runs):
        lines = [line for run in runs for line in run["damage"]]
        raise ConfigError(f"{runs[0]['run']} holds no rollout{f': {lines[0]}' if lines else ' yet'}")
    for run in runs if baseline is None else runs[1:]:
        report["missed"] += _below(run, options.min_mean)
    if baseline is not None:
        for comparison in report["comparisons"]:
            report["missed"] += _worse(comparison, options.margin)
    return report


def _below(run: Report, bound: float | None) -> list[str]:
    """Why a run does not pass `--min-mean`: the mean itself is below it."""
    mean = None if run["reward"] is None else run["reward"]["mean"]
    if bound is None or (mean is not None and mean >= bound):
        return []
    why = "nothing is scored" if mean is None else f"the mean reward {mean:.4f} is below {bound:g}"
    return [f"{run['run']}: {why} (--min-mean)"]


def _worse(comparison: Report, margin: float | None) -> list[str]:
    """Why a run does not pass `--no-worse-than`.

    Without a margin it is worse if its whole interval is below 0. With a margin it has to be shown that it is
    not: its whole interval must be above -margin.
    """
    change = comparison["difference"]
    if change is None or change["low"] is None:
        why = f"too few prompts are scored in both to compare: {comparison['prompts']}"
    elif change["high"] >= 0 if margin is None else change["low"] >= -margin:  # not true of NaN
        return []
    else:
        lost = "" if margin is None else f": it may have lost more than {margin:g}"
        why = f"the mean reward changed by {_interval(change)}{lost}"
    return [f"{comparison['run']}: {why} (--no-worse-than)"]


# --- for people


def _interval(estimate: Report | None, sign: str = "") -> str:
    if estimate is None:
        return "-"
    numbers = (estimate[name] for name in ("mean", "low", "high"))
    mean, low, high = ("" if number is None else f"{number:{sign}.4f}" for number in numbers)
    return f"{mean} [{low}, {high}]" if low else mean


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


_FIGURES: Columns = {
    "rollouts": ("rollouts", str),
    "prompts": ("prompts", str),
    "mean reward": ("reward", _interval),
    "unscored": ("unscored", str),
    "failed": ("failure_rate", _share),
    "truncated": ("truncated", _share),
    "tool errors": ("tool_error_rate", _share),
    "tokens": ("tokens", _number),
    "p95": ("tokens_p95", _number),
    "turns": ("turns", _number),
}
_PASSES: Columns = {
    "k": ("k", str),
    "pass@k": ("pass_at", _interval),
    "pass^k": ("pass_hat", _interval),
    "prompts": ("pass_at", lambda rate: "0" if rate is None else str(rate["clusters"])),
    "left out": ("left_out", str),
}
_COMPARED: Columns = {
    "prompts": ("prompts", str),
    "difference": ("difference", lambda change: _interval(change, "+")),
    "won": ("won", str),
    "lost": ("lost", str),
    "tied": ("tied", str),
    "sign p": ("sign_p", "{:.2g}".format),
    "permutation p": ("permutation_p", "{:.2g}".format),
    "not in both": ("alone", str),
    "unscored": ("unscored", str),
}


def _written(report: Report, options: argparse.Namespace) -> str:
    """The report as text or Markdown."""
    runs, by = report["runs"], report["by"]
    paths = [Path(run["run"]).absolute() for run in runs]
    folder = os.path.commonpath([path.parent for path in paths])
    label, write = (_label_in_markdown, _markdown) if options.format == "md" else (_label, _aligned)
    names = {run["run"]: label(str(path.relative_to(folder))) for run, path in zip(runs, paths, strict=True)}

    def table(columns: Columns, entries: list[Report]) -> str:
        cells = [[form(entry[key]) for key, form in columns.values()] for entry in entries]
        rows = [[names[entry["run"]], *row] for entry, row in zip(entries, cells, strict=True)]
        return write([["run", *columns], *rows])

    passes = [{"run": run["run"], **rate} for run in runs for rate in run["passes"]]
    compared = [{**one, "alone": one["only_a"] + one["only_b"]} for one in report["comparisons"]]
    blocks = [
        table(_FIGURES, runs),
        f"solved: reward >= {options.solved_at:g}",
        table(_PASSES, passes),
    ]
    if by:
        value: Columns = {label(options.by): ("value", lambda value: label(value or "-"))}
        blocks.append(table({**value, **_FIGURES}, by))
    if compared:
        blocks += [f"paired by prompt, against {names[runs[0]['run']]}", table(_COMPARED, compared)]
    return "\n\n".join([*blocks, "\n".join(_notes(report, names, options))]) + "\n"


def _notes(report: Report, names: dict[str, str], options: argparse.Namespace) -> list[str]:
    """What has to be known to read the figures, as a list."""
    runs = report["runs"]
    notes = ["intervals are of 95 %; rollouts of one prompt count as dependent"]
    for run in runs:
        name = names[run["run"]]
        if run["total"] is not None and run["rollouts"] < run["total"]:
            notes.append(f"{name} is unfinished: {run['rollouts']} of {run['total']} rollouts")
        if run["n"] is None:
            notes.append(f"{name} is an exported file: it does not hold the rollouts that failed")
    for pair in report["comparisons"]:
        if pair["only_a"] and pair["only_b"] and not pair["prompts"] + pair["unscored"]:
            both = f"{names[pair['run']]} and {names[pair['against']]}"
            notes.append(f"{both} have no prompt in common: rows are compared whole, data_source included")
    if any(run["reward"] is not None and run["reward"]["low"] is None for run in runs):
        notes.append("one prompt alone has no interval")
    partial, scored = (sum(run[name] for run in runs) for name in ("partial", "scored"))
    if partial:
        notes.append(f"{partial} of {scored} rewards are neither 0, 1 nor -1: pass@k depends on --solved-at")
    missing = "rollouts that failed or were not scored"
    if options.missing_as is not None:
        notes.append(f"{missing} count with the reward {options.missing_as:g}")
    elif any(run["failed"] or run["unscored"] for run in runs):
        notes.append(f"{missing} have no part in means and pass@k (--missing-as)")
    return [f"- {note}" for note in notes]


def _label(text: str) -> str:
    """A run's name or a column's value, as data has it, for a table."""
    line = printable_line(text)
    return line if len(line) <= _LONGEST_NAME else line[: _LONGEST_NAME - 1] + "…"


def _label_in_markdown(text: str) -> str:
    return _MARKDOWN.sub(r"\\\g<0>", _label(text))


def _aligned(table: Table) -> str:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    form = "  ".join(f"{{:{'<' if at == 0 else '>'}{width}}}" for at, width in enumerate(widths))
    return "\n".join(form.format(*row).rstrip() for row in table)


def _markdown(table: Table) -> str:
    header, *rows = table
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *rows))
