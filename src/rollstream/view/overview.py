"""A run at a glance: what is counted over all of its rows; two runs against each other.

Every figure has a filter that finds its rows.
"""

import contextlib
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

import msgspec
import numpy as np

from rollstream.evaluate.compare import pair_prompts
from rollstream.evaluate.metrics import SOLVED_AT, SUMS_MAY_OVERFLOW, Estimate, mean_of_sums
from rollstream.evaluate.samples import samples_of_run
from rollstream.store.arrow import to_arrow
from rollstream.store.columns import Array, RunColumns
from rollstream.trajectory import Failure, failure_cause
from rollstream.view.reader import read_json

_BINS: Final = 24
_STRIP: Final = 2000
"""Groups that are drawn: about the pixels of a line."""
_NAMED: Final = 12
"""Data sources that are drawn by themselves."""
_TEXTS: Final = 1000
"""Sources, and ends, that are counted by name."""
_STEPS: Final = 300
"""Of the timeline."""
_CAUSES: Final = 100
_UNSCORED: Final = 1000
"""Rollouts whose rewards are asked why there is none."""


Groups = dict[str, Array]
"""Figures of each prompt row, by name. Shape (groups,); NaN where nothing is scored."""


@SUMS_MAY_OVERFLOW
def group_figures(rows: RunColumns, solved_at: float = SOLVED_AT) -> Groups:
    """The groups of a run, by prompt row, of its final trajectories.

    Besides what the list of groups shows, `first` is a row of each and `total` the sum of its rewards.
    """
    order, starts = rows.groups()
    final, reward = ~rows["is_snapshot"][order], rows["reward"][order]
    scored = final & np.isfinite(reward)

    def over(function: np.ufunc, values: Array) -> Array:
        values = values.astype(np.int64) if values.dtype == bool else values
        found: Array = function.reduceat(values, starts) if len(starts) else values[:0]
        return found

    known = np.where(scored, reward, np.nan)
    size, count, low, high = (
        over(function, values)
        for function, values in ((np.add, final), (np.add, scored), (np.fmin, known), (np.fmax, known))
    )
    sums = over(np.add, np.where(scored, reward, 0.0))
    return {
        "index": rows["index"][order[starts]],
        "first": order[starts].astype(np.int64),
        "size": size,
        "scored": count,
        "solved": over(np.add, scored & (reward >= solved_at)),
        "total": sums,
        "mean": sums / count,
        "min": low,
        "max": high,
        "spread": np.where(count > 1, high - low, np.nan),
        "mean_tokens": over(np.add, np.where(final, rows["tokens"][order], 0)) / size,
        "truncated": over(np.add, final & rows.equals("finish_reason", "length")[order]),
    }


@SUMS_MAY_OVERFLOW
def mean_interval(rows: RunColumns, groups: Groups) -> tuple[float | None, list[float] | None]:
    """The mean reward of all rollouts and its 95 % interval; those of one prompt depend on each other.

    A training has several groups of a prompt.
    """
    keys, which = np.unique(rows["prompt_key"][groups["first"]], return_inverse=True)
    sums, counts = (np.bincount(which, groups[name], len(keys)) for name in ("total", "scored"))
    estimate = mean_of_sums(sums, counts)
    return (None, None) if estimate is None else (estimate.mean, _interval(estimate))


def _interval(estimate: Estimate | None) -> list[float] | None:
    if estimate is None or estimate.low is None or estimate.high is None:
        return None
    return [estimate.low, estimate.high]


def compare(a: RunColumns, b: RunColumns) -> tuple[dict[str, Any], dict[str, Array]]:
    """Two runs against each other, and columns over the prompts that are scored in both.

    Prompts are the same when their keys are. `difference` is b's mean reward less a's; `interval` is its.
    """
    (keys, means), (others, theirs) = ((one.keys, one.prompt_means()) for one in map(samples_of_run, (a, b)))
    comparison, pairs = pair_prompts(keys, means, others, theirs)
    change, shared = comparison.difference, [key.decode() for key in keys[pairs.at_a].tolist()]
    columns = {
        "prompt_key": np.array(shared),
        "index_a": np.array(a.prompts(shared)),
        "index_b": np.array(b.prompts(shared)),
        "mean_a": means[pairs.at_a],
        "mean_b": theirs[pairs.at_b],
        "difference": pairs.difference,
    }
    mean = None if change is None else change.mean
    return {**asdict(comparison), "difference": mean, "interval": _interval(change)}, columns


def overview(rows: RunColumns, groups: Groups, solved_at: float) -> dict[str, Any]:
    """What `GET /api/runs/ID` has beside what the list of runs says."""
    final, reward = ~rows["is_snapshot"], rows["reward"]
    index, scored, solved = (groups[name] for name in ("index", "scored", "solved"))
    drawn = np.unique(np.linspace(0, len(index) - 1, _STRIP).astype(int)) if len(index) else np.zeros(0, int)
    return {
        "solved_at": solved_at,
        "base_filter": "" if final.all() else "is_snapshot = false",
        "columns": rows.columns(),
        "histograms": {
            "reward": _histogram(rows, reward, final & np.isfinite(reward)),
            "tokens": _histogram(rows, rows["tokens"], final),
            "turns": _histogram(rows, rows["num_turns"], final),
        },
        "groups": {
            "all_wrong": int(((scored > 0) & (solved == 0)).sum()),
            "mixed": int(((solved > 0) & (solved < scored)).sum()),
            "all_right": int(((scored > 0) & (solved == scored)).sum()),
            "unscored": int((scored == 0).sum()),
            "no_signal": int((groups["spread"] == 0).sum()),
            "total": len(index),
        },
        "solve_strip": np.stack([index, solved, scored, groups["size"]], 1)[drawn].tolist(),
        "finish_reasons": {name: count for _, name, count, _ in _by_text(rows, "finish_reason", final)},
        "sources": {
            name: {"count": count, "reward_mean": mean}
            for _, name, count, mean in _by_text(rows, "data_source", final)
        },
        "failures": _failures(rows),
        "reward_failures": _unscored(rows, final),
        "tool_calls": int(np.nansum(rows["tool_calls"], dtype=np.float64)),
        "time": {name: _mean(rows[name][final]) for name in ("queue_s", "generate_s", "tool_s", "reward_s")},
        "timeline": _timeline(rows, final),
        "damage": rows.damage[:100],
    }


def tools(rows: RunColumns, check: Callable[[], None] = lambda: None) -> list[dict[str, Any]]:
    """Calls and errors by tool, the most called first; `name` None: of tools whose names were not noted.

    `check` is called now and then, and may raise.
    """
    called = np.flatnonzero(rows["tool_calls"] > 0)
    counts: dict[str | None, Array] = defaultdict(lambda: np.zeros(2, np.int64))
    counts[None] += [int(rows[name][called].sum(dtype=np.float64)) for name in ("tool_calls", "tool_errors")]
    for numbers, table in rows.read(called, ["extra"]):
        check()
        coded = table["extra"].combine_chunks().filter(to_arrow(numbers >= 0)).value_counts()
        for text, times in zip(
            coded.field("values").to_pylist(), coded.field("counts").to_pylist(), strict=True
        ):
            with contextlib.suppress(msgspec.MsgspecError, RecursionError):  # something else of this name
                for name, both in msgspec.json.decode(text, type=_Noted).tool_counts.items():
                    counts[name] += np.array(both) * times
                    counts[None] -= np.array(both) * times
    order = sorted(counts.items(), key=lambda one: -int(one[1][0]))
    return [{"name": name, "calls": int(one[0]), "errors": int(one[1])} for name, one in order if one[0] > 0]


class _Noted(msgspec.Struct):
    """What is read of a trajectory's `extra`."""

    tool_counts: dict[str, tuple[int, int]] = {}


def _mean(values: Array) -> float | None:
    values = values[np.isfinite(values)]
    return float(values.mean(dtype=np.float64)) if len(values) else None


@SUMS_MAY_OVERFLOW
def edges(low: float, high: float, *, whole: bool) -> Array:
    """Round numbers around values from `low` to `high`; the last is above all of them."""
    raw, scale = high / _BINS - low / _BINS, max(abs(low), abs(high))
    if raw <= 1e-9 * scale or raw < 1e-30:  # nothing to tell apart
        raw = max(0.1, 0.01 * scale)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * (1 - 1e-9))
    step = max(1.0, math.ceil(step)) if whole else step
    bounds = np.arange(math.floor(low / step) - 1, math.floor(high / step) + 3) * step
    bounds = np.round(bounds, max(0, 2 - math.floor(math.log10(step))))
    most = sys.float_info.max  # infinite where there is no larger number
    bounds = np.clip(bounds, -most, most)
    # Rounding may have moved them to either side of the values.
    first, end = np.searchsorted(bounds, [low, high], side="right")
    return np.asarray(bounds[first - 1 : end + 1])


def _histogram(rows: RunColumns, values: Array, which: Array) -> dict[str, Any] | None:
    """Counts, those of them that were cut off, and by data source where there are several."""
    chosen = values[which].astype(np.float64)
    if not len(chosen):
        return None
    bounds = edges(float(chosen.min()), float(chosen.max()), whole=values.dtype.kind == "i")
    width, codes = len(bounds) - 1, rows["data_source"][which]
    bins = np.clip(np.searchsorted(bounds, chosen, side="right") - 1, 0, width - 1)

    def count(some: Array) -> list[int]:
        return np.bincount(bins[some], minlength=width).tolist()  # type: ignore[no-any-return]

    named = {text: count(codes == code) for code, text, *_ in _by_text(rows, "data_source", which)[:_NAMED]}
    return {
        "edges": bounds.tolist(),
        "counts": count(np.ones(len(bins), bool)),
        "truncated": count(rows.equals("finish_reason", "length")[which]),
        "by_source": named if len(named) > 1 else None,
    }


def _by_text(rows: RunColumns, name: str, which: Array) -> list[tuple[int, str, int, float | None]]:
    """Each text by its code, with its number of rows and their mean reward, the most frequent first."""
    texts, codes = rows.texts(name).to_pylist(), rows[name][which]
    reward = rows["reward"][which]
    scored = np.isfinite(reward)
    counts, scores = (np.bincount(some, minlength=len(texts)) for some in (codes, codes[scored]))
    sums = np.bincount(codes[scored], weights=reward[scored], minlength=len(texts))
    order = [code for code in np.argsort(-counts, kind="stable")[:_TEXTS].tolist() if counts[code]]
    return [
        (code, texts[code], int(counts[code]), float(sums[code] / scores[code]) if scores[code] else None)
        for code in order
    ]


def _failures(rows: RunColumns) -> list[dict[str, Any]]:
    """Failures by cause, the most frequent first, with the first of each whose traceback is known."""
    by_cause = defaultdict[str, list[Failure]](list)
    for failure in rows.failures():
        by_cause[failure_cause(failure.error)].append(failure)
    order = sorted(by_cause.items(), key=lambda item: -len(item[1]))[:_CAUSES]
    return [
        {"cause": cause, "count": len(some), "example": max(some, key=lambda one: bool(one.traceback))}
        for cause, some in order
    ]


def _unscored(rows: RunColumns, final: Array) -> dict[str, int]:
    """Why rewards failed, by cause, of the first rollouts that have none."""
    causes = Counter[str]()
    which = np.flatnonzero(final & np.isnan(rows["reward"]))[:_UNSCORED]
    for numbers, table in rows.read(which, ["reward_extra"]):
        for text in table["reward_extra"].filter(to_arrow(numbers >= 0)).to_pylist():
            extra = read_json(text)
            if isinstance(extra, dict) and "error" in extra:
                causes[failure_cause(str(extra["error"]))] += 1
    return dict(causes.most_common(_CAUSES))


def _timeline(rows: RunColumns, final: Array) -> dict[str, Any] | None:
    """What was in flight and what was finished, over time; None where files do not say when (older ones)."""
    known = final & np.isfinite(rows["finished_at"])
    ends = rows["finished_at"][known]
    if not len(ends):
        return None
    begins = ends - np.maximum(np.nan_to_num(rows["total_s"][known]), 0)
    start = float(begins.min())
    step = max((float(ends.max()) - start) / _STEPS, 1e-3)

    def count(times: Array, weights: Array | None = None) -> Array:
        at = np.clip((times - start) / step, 0, _STEPS - 1).astype(np.int64)
        return np.bincount(at, weights=weights, minlength=_STEPS)

    finished, tokens = count(ends), count(ends, rows["sampled"][known])
    in_flight = np.cumsum(count(begins)) - np.cumsum(finished)  # at the end of each step
    curves = {"in_flight": in_flight, "finished": finished, "tokens": tokens}
    return {"start": start, "step_s": step, **{name: values.tolist() for name, values in curves.items()}}
