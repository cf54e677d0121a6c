"""`rollstream eval`: figures of runs, with intervals; comparisons; bounds for CI."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollstream.errors import ConfigError

if TYPE_CHECKING:
    from rollstream.evaluate.compare import Comparison
    from rollstream.evaluate.metrics import Estimate, Summary
    from rollstream.evaluate.samples import JudgedRun, Samples

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

Table = list[list[str]]


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

    from rollstream.evaluate.compare import compare_samples
    from rollstream.evaluate.metrics import summarize
    from rollstream.evaluate.samples import read_runs

    if options.margin is not None and options.no_worse_than is None:
        raise ConfigError("--margin is what --no-worse-than allows: name the run, too")
    if options.k is not None and min(options.k) < 1:
        raise ConfigError("--k: numbers from 1")
    runs, first = read_runs(options.runs), 0
    if options.no_worse_than is not None:
        baseline = read_runs([options.no_worse_than])
        if len(baseline) != 1:
            raise ConfigError(f"--no-worse-than names one run; {options.no_worse_than} holds {len(baseline)}")
        # The baseline is the first row of every table.
        runs, first = [*baseline, *(one for one in runs if one.name != baseline[0].name)], 1
    samples = [_counted(one, options.missing_as) for one in runs]
    ks = None if options.k is None else sorted(set(options.k))
    summaries = [summarize(one, options.solved_at, ks) for one in samples]
    by = [_by(*both, options, ks) for both in zip(runs, samples, strict=True)] if options.by else []
    compared = [compare_samples(samples[0], one) for one in samples[1:]]
    below = [_below(*one, options.min_mean) for one in list(zip(runs, summaries, strict=True))[first:]]
    worse = [_worse(*one, options) for one in zip(runs[1:], compared, strict=True)]
    missed = [line for line in [*below, *worse] if line is not None]
    damage = [line for one in runs for line in one.rows.damage]
    report = {
        "runs": [
            {"run": one.name, "n": one.n, "total": one.total, **_plain(said), "damage": one.rows.damage}
            for one, said in zip(runs, summaries, strict=True)
        ],
        "by": [
            {"run": one.name, options.by: value, **_plain(said)}
            for one, values in zip(runs, by, strict=False)
            for value, said in values.items()
        ],
        "comparisons": [
            {"run": one.name, "against": runs[0].name, **_plain(said)}
            for one, said in zip(runs[1:], compared, strict=True)
        ],
        "missed": missed,
    }
    if options.format == "json":
        out = orjson.dumps(report, option=orjson.OPT_INDENT_2).decode() + "\n"
    else:
        out = _written(runs, summaries, by, compared, options)
    sys.stdout.write(out)
    for line in missed:
        sys.stderr.write(f"NOT MET: {line}\n")
    for line in damage:
        sys.stderr.write(f"damaged: {line}\n")
    return 1 if missed or damage else 0


def _counted(run: "JudgedRun", missing_as: float | None) -> "Samples":
    if not len(run.samples):
        why = f": {run.rows.damage[0]}" if run.rows.damage else " yet"
        raise ConfigError(f"{run.name} holds no rollout{why}")
    return run.samples if missing_as is None else run.samples.with_missing(missing_as)


def _by(
    run: "JudgedRun", samples: "Samples", options: argparse.Namespace, ks: list[int] | None
) -> "dict[str | None, Summary]":
    """The figures for each value of a column; numbers in their order, then texts."""
    import numpy as np

    from rollstream.evaluate.metrics import summarize
    from rollstream.evaluate.samples import labels_of_run

    labels = labels_of_run(run.rows, options.by)
    values = sorted(set(labels), key=_in_order)
    if len(values) > _MOST_VALUES:
        raise ConfigError(
            f"--by {options.by}: it has {len(values)} values; {_MOST_VALUES} make a table at most"
        )
    codes = {value: code for code, value in enumerate(values)}
    which = np.array([codes[label] for label in labels])
    return {
        value: summarize(samples.take(which == code), options.solved_at, ks) for value, code in codes.items()
    }


def _in_order(value: str | None) -> tuple[int, float, str]:
    if value is None:
        return 2, 0.0, ""
    try:
        return 0, float(value), ""
    except ValueError:
        return 1, 0.0, value


def _plain(value: Any) -> Any:
    import msgspec

    return msgspec.to_builtins(value)


def _below(run: "JudgedRun", summary: "Summary", bound: float | None) -> str | None:
    if bound is None:
        return None
    if summary.reward is None:
        return f"{run.name}: nothing is scored, so there is no mean of {bound:g} (--min-mean)"
    if summary.reward.mean >= bound:
        return None
    return f"{run.name}: the mean reward {summary.reward.mean:.4f} is below {bound:g} (--min-mean)"


def _worse(run: "JudgedRun", compared: "Comparison", options: argparse.Namespace) -> str | None:
    """Why a run does not pass `--no-worse-than`.

    Without a margin it is worse if its whole interval is below 0. With a margin it has to be shown that it is
    not: its whole interval must be above -margin.
    """
    if options.no_worse_than is None:
        return None
    change = compared.difference
    if change is None or change.low is None or change.high is None:
        return f"{run.name}: {compared.prompts} prompts are scored in both runs: too few to compare (--no-worse-than)"
    if options.margin is not None and change.low < -options.margin:
        return (
            f"{run.name}: {_interval(change)} reaches below {-options.margin:g} (--no-worse-than, --margin)"
        )
    if options.margin is None and change.high < 0:
        return f"{run.name}: the mean reward changed by {_interval(change)} (--no-worse-than)"
    return None


# --- for people


def _written(
    runs: "list[JudgedRun]",
    summaries: "list[Summary]",
    by: "list[dict[str | None, Summary]]",
    compared: "list[Comparison]",
    options: argparse.Namespace,
) -> str:
    """The report as text or Markdown."""
    names = _short([one.name for one in runs])
    notes = [
        f"{one.name} is unfinished: {len(one.samples)} of {one.total} rollouts"
        for one in runs
        if one.unfinished
    ]
    if any(one.n is None for one in runs):
        notes.append("an exported file does not hold the rollouts that failed")
    if any(said.reward is not None and said.reward.clusters < 2 for said in summaries):
        notes.append("one prompt alone has no interval")
    partial, scored = sum(one.partial for one in summaries), sum(one.scored for one in summaries)
    if partial:
        notes.append(f"{partial} of {scored} rewards are neither 0, 1 nor -1: pass@k depends on --solved-at")
    if options.missing_as is not None:
        notes.append(f"rollouts that failed or were not scored count with the reward {options.missing_as:g}")
    elif any(one.failed or one.unscored for one in summaries):
        notes.append(
            "rollouts that failed or were not scored have no part in means and pass@k (--missing-as)"
        )
    passes = [
        [name, f"{one.k}", _interval(one.any), _interval(one.all), f"{_prompts(one.any)}", f"{one.left_out}"]
        for name, said in zip(names, summaries, strict=True)
        for one in said.passes
    ]
    blocks: list[str | Table] = [
        [["run", *_FIGURES], *([name, *_figures(said)] for name, said in zip(names, summaries, strict=True))],
        f"solved: reward >= {options.solved_at:g}",
        [["run", "k", "pass@k", "pass^k", "prompts", "left out"], *passes],
    ]
    if by:
        rows = [
            [name, "-" if value is None else value, *_figures(said)]
            for name, values in zip(names, by, strict=True)
            for value, said in values.items()
        ]
        blocks.append([["run", options.by, *_FIGURES], *rows])
    if compared:
        rows = [[name, *_compared(said)] for name, said in zip(names[1:], compared, strict=True)]
        blocks += [f"paired by prompt, against {names[0]}", [["run", *_COMPARED], *rows]]
    blocks.append("intervals: 95 %, rollouts of one prompt count as dependent")
    blocks += [f"note: {one}" for one in notes]
    write = _markdown if options.format == "md" else _aligned
    texts = [one if isinstance(one, str) else write(one) for one in blocks]
    gaps = ["\n" if one.startswith("note") and options.format == "text" else "\n\n" for one in texts[1:]]
    return "".join(text + gap for text, gap in zip(texts, [*gaps, "\n"], strict=True))


_FIGURES = (
    *("rollouts", "prompts", "mean reward", "unscored", "failed", "truncated", "tool errors"),
    *("tokens", "p95", "turns"),
)
_COMPARED = (
    "prompts",
    "difference",
    "won",
    "lost",
    "tied",
    "sign p",
    "permutation p",
    "not in both",
    "unscored",
)


def _short(names: list[str]) -> list[str]:
    """Names without the folder that all are in."""
    paths = [Path(name).absolute() for name in names]
    folder = os.path.commonpath([path.parent for path in paths])
    return [str(path.relative_to(folder)) for path in paths]


def _figures(summary: "Summary") -> list[str]:
    return [
        f"{summary.rollouts}",
        f"{summary.prompts}",
        _interval(summary.reward),
        f"{summary.unscored}",
        _share(summary.failure_rate),
        _share(summary.truncated),
        _share(summary.tool_error_rate),
        *(
            "-" if one is None else f"{one:.1f}"
            for one in (summary.tokens, summary.tokens_p95, summary.turns)
        ),
    ]


def _compared(said: "Comparison") -> list[str]:
    counts = f"{said.won}", f"{said.lost}", f"{said.tied}"
    tests = _p(said.sign_p), _p(said.permutation_p)
    return [
        f"{said.prompts}",
        _interval(said.difference, sign=True),
        *counts,
        *tests,
        f"{said.only_a + said.only_b}",
        f"{said.unscored}",
    ]


def _interval(one: "Estimate | None", *, sign: bool = False) -> str:
    if one is None:
        return "-"
    plus = "+" if sign else ""
    mean = f"{one.mean:{plus}.4f}"
    return mean if one.low is None else f"{mean} [{one.low:{plus}.4f}, {one.high:{plus}.4f}]"


def _prompts(one: "Estimate | None") -> int:
    return 0 if one is None else one.clusters


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _p(value: float) -> str:
    return f"{value:.4f}" if value >= 0.0001 else f"{value:.1g}"


def _aligned(table: Table) -> str:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    form = "  ".join(f"{{:{'<' if at == 0 else '>'}{width}}}" for at, width in enumerate(widths))
    return "\n".join(form.format(*row).rstrip() for row in table)


def _markdown(table: Table) -> str:
    header, *rows = ([cell.replace("|", "\\|") for cell in row] for row in table)
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *rows))
