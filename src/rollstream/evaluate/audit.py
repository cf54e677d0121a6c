"""`rollstream audit`: how far the sampler's log-probs and a stream's are apart."""

import argparse
import sys
from collections import defaultdict
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollstream.errors import ConfigError
from rollstream.mismatch import BOUND, FIGURES, token_figures

if TYPE_CHECKING:
    import pyarrow as pa

    from rollstream.store.manifest import Manifest

EPILOG = """\
examples:
  rollstream annotate outputs/run --same && rollstream audit outputs/run --max-kl 0.001

exit codes: 0 done; 1 the KL is more than --max-kl, or damage was found; 2 wrong usage. docs/audit.md
"""

_COLUMNS = [
    *("index", "repeat", "trajectory", "response_ids", "response_mask", "response_logprobs"),
    *("policy_versions", "finish_reason", "data_source"),
]
_EDGES = (0, 16, 64, 256, 1024, 4096, 16384)
_WORST = 10
_GROUPS_SHOWN = 5
_TOKENS_AROUND = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `audit`."""
    parser.add_argument("run_dir", type=Path, metavar="DIR")
    parser.add_argument("--stream", metavar="NAME", help="of `rollstream annotate` (default: the only one)")
    parser.add_argument("--max-kl", type=float, metavar="X", help="exit code 1 where k3 is more than this")
    parser.add_argument("--json", action="store_true")


class Audit:
    """Sums over the sampled tokens that have a log-prob of the sampler and of a stream; see `mismatch`."""

    def __init__(self) -> None:
        self.trajectories = self.left_out = 0
        self.largest = 0.0
        self.worst: list[dict[str, Any]] = []
        self._sums: dict[str, dict[Any, Any]] = defaultdict(dict)

    def add(self, table: "pa.Table", stream: str) -> None:
        """Adds rows with `_COLUMNS` and `stream`."""
        import numpy as np
        import pyarrow.compute as pc

        from rollstream.store.arrow import column_values

        a, b = table["response_logprobs"], table[stream]
        lengths = [pc.list_value_length(one) for one in (a, b, table["response_mask"], table["response_ids"])]
        kept = pc.fill_null(reduce(pc.and_, (pc.equal(lengths[0], one) for one in lengths[1:])), False)
        rows = table.filter(kept).combine_chunks()
        self.left_out += len(table) - len(rows)
        self.trajectories += len(rows)

        def flat(name: str) -> Any:
            return column_values(pc.list_flatten(rows[name]))

        mask, ids = flat("response_mask") == 1, flat("response_ids")
        lengths = column_values(pc.list_value_length(rows["response_mask"]))
        starts = np.cumsum(lengths) - lengths
        row = np.repeat(np.arange(len(rows)), lengths)
        sampler, other = flat("response_logprobs").astype(float), flat(stream).astype(float)
        at = np.flatnonzero(mask & np.isfinite(sampler) & np.isfinite(other))
        if not len(at):
            return
        values = [np.ones(len(at)), *token_figures(sampler[at], other[at])]
        far, position, row_at = np.abs(other[at] - sampler[at]), at - starts[row[at]], row[at]
        begins = mask & ((np.arange(len(mask)) == starts[row]) | ~np.roll(mask, 1))
        turns = np.cumsum(begins)
        before = np.concatenate([[0], turns])[starts]
        runs = pc.list_flatten(rows["policy_versions"])
        run_row = np.repeat(
            np.arange(len(rows)), column_values(pc.list_value_length(rows["policy_versions"]))
        )
        run_start = (run_row << 32) + column_values(pc.struct_field(runs, "start"))
        run = np.searchsorted(run_start, (row_at << 32) + position, side="right") - 1
        versions = np.append(column_values(pc.struct_field(runs, "version")), -1)[run]
        versions[np.append(run_row, -1)[run] != row_at] = -1  # none is said
        groups = {
            "all": np.zeros(len(at), int),
            "position": np.array(_EDGES)[np.searchsorted(_EDGES, position, side="right") - 1],
            "turn": turns[at] - before[row_at],
            "version": versions,
            "finish_reason": np.array(rows["finish_reason"].to_pylist(), object)[row_at],
            "data_source": np.array(rows["data_source"].to_pylist(), object)[row_at],
        }
        for name, keys in groups.items():
            present, which = np.unique(keys, return_inverse=True)
            sums = np.stack([np.bincount(which, one, len(present)) for one in values], axis=1)
            for key, one in zip(present.tolist(), sums, strict=True):
                self._sums[name][key] = self._sums[name].get(key, 0) + one
        self.largest = max(self.largest, float(far.max()))
        for one in np.argpartition(far, -min(_WORST, len(far)))[-_WORST:].tolist():
            place, token = int(row_at[one]), int(at[one])
            first, end = int(starts[place]), int(starts[place] + lengths[place])
            self.worst.append(
                {name: rows[name][place].as_py() for name in ("index", "repeat", "trajectory")}
                | {"position": token - first, "sampler": float(sampler[token]), "stream": float(other[token])}
                | {"ids": ids[max(first, token - _TOKENS_AROUND) : token].tolist()}
                | {"id": int(ids[token]), "next": ids[token + 1 : min(end, token + 5)].tolist()}
            )
        self.worst = sorted(self.worst, key=lambda one: -abs(one["stream"] - one["sampler"]))[:_WORST]

    def by(self, name: str) -> dict[str, dict[str, float]]:
        """Figures by position, turn, version, finish_reason or data_source."""
        figures = {}
        for key, (tokens, *sums) in sorted(self._sums[name].items()):
            label = f"{key}-" if name == "position" else str(key)
            means = [int(tokens), *(float(one / tokens) for one in sums)]
            figures[label] = dict(zip(("tokens", *FIGURES), means, strict=True))
        return figures

    def figures(self) -> dict[str, Any]:
        """All of it; no `k3` where there is nothing to compare."""
        whole: dict[str, Any] = {**self.by("all").get("0", {"tokens": 0})}
        whole |= {"trajectories": self.trajectories, "left_out": self.left_out, "largest": self.largest}
        names = [name for name in self._sums if name != "all"]
        return whole | {"by": {name: self.by(name) for name in names}, "worst": self.worst}


def run(options: argparse.Namespace) -> int:
    """Executes a parsed command line. Raises `ConfigError`."""
    import orjson

    from rollstream.chat.token_text import read_token_text
    from rollstream.store.run import Run
    from rollstream.store.streams import Stream, stream_names

    run, known = Run.open(options.run_dir), stream_names(options.run_dir)
    if options.stream is None and len(known) != 1:
        if not known:
            same = f"rollstream annotate {options.run_dir} --same"
            raise ConfigError(f"there is no stream to compare with; the run's own model makes one: {same}")
        raise ConfigError(f"there are several streams, choose one by --stream: {', '.join(known)}")
    name = options.stream or known[0]
    made, audit = Stream(run.root, name).made, Audit()
    for table in run.rows(_COLUMNS, [name]):
        audit.add(table, f"stream.{name}")
    found = {"stream": name, "made": made, "notes": notes(run.manifest), **audit.figures()}
    try:
        text = read_token_text(run.root)
        for one in found["worst"]:
            parts = one["ids"], [one["id"]], one["next"]
            one["text"] = "{}⟦{}⟧{}".format(*map(text.decode, parts))
    except ConfigError as error:
        found["notes"].append(f"no texts of tokens: {error}")
    if options.json:
        sys.stdout.write(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode() + "\n")
    else:
        sys.stdout.write(_summary(found))
    for line in run.damage:
        sys.stderr.write(f"damaged: {line}\n")
    too_far = options.max_kl is not None and not found.get("k3", float("inf")) <= options.max_kl
    if too_far:
        sys.stderr.write(f"k3 is {found.get('k3')}: --max-kl {options.max_kl:g} is not met\n")
    return 1 if too_far or run.damage else 0


def notes(manifest: "Manifest") -> list[str]:
    """Says where the sampler's log-probs and a stream's, the model's own, are of two distributions."""
    values = manifest.sampling_changes
    changes = ", ".join(f"{name} {value}" for name, value in values.items())
    if not changes or manifest.logprobs is None:
        return []
    if manifest.logprobs == "raw" or values.get("temperature") == 0:  # of greedy answers they are raw anyway
        return [
            f"log-probs are the model's own on both sides, and tokens were drawn with {changes}: the differences "
            "are exact, k1 and k3 are no KL of what was drawn from"
        ]
    return [
        f"the sampler's log-probs are those after {changes}, the stream's the model's own: the figures have this "
        "difference in them, which a trainer meets that does not do the same"
    ]


def _summary(found: dict[str, Any]) -> str:
    from rollstream.untrusted import printable_line

    made = found["made"]
    lines = [f"{found['stream']}: {made.get('model')} by {made.get('engine')}, {made.get('created')}"]
    lines += [f"note: {note}" for note in found["notes"]]
    lines.append(
        f"{found['tokens']} tokens of {found['trajectories']} trajectories; {found['left_out']} more have no "
        "log-probs on one side"
    )
    if found["tokens"]:
        lines += [
            f"KL(sampler || stream): k1 {found['k1']:.3g}, k3 {found['k3']:.3g}",
            f"difference: mean {found['mean_difference']:.3g}, largest {found['largest']:.3g}, "
            f"more than {BOUND} at {found['beyond_bound']:.2%} of tokens",
            f"importance ratio beyond [0.5, 2] at {found['ratio_beyond']:.2%} of tokens",
        ]
    for name, groups in found["by"].items():
        for key in sorted(groups, key=lambda key: -groups[key]["k3"])[:_GROUPS_SHOWN] * (len(groups) > 1):
            one = groups[key]
            lines.append(
                f"  {name} {key}: k1 {one['k1']:.3g}, k3 {one['k3']:.3g}, mean {one['mean_difference']:.3g}, "
                f"{one['tokens']} tokens"
            )
    for one in found["worst"][: _GROUPS_SHOWN * (found.get("largest", 0.0) > BOUND)]:
        where = f"({one['index']}, {one['repeat']}, {one['trajectory']}) at {one['position']}"
        text = repr(one["text"]) if "text" in one else f"id {one['id']}"
        lines.append(f"  {where}: sampler {one['sampler']:.3f}, stream {one['stream']:.3f} {text}")
    return "\n".join([*map(printable_line, lines), ""])
