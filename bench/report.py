"""What every benchmark shares: options, a table, a JSON file, memory and CPU of this process."""

import argparse
import platform
import resource
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson


def parse_options(description: str, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads `--quick` and `--json FILE`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="smaller sizes; ends within 40 s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
    return parser.parse_args(arguments)


def print_table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows as an aligned table, columns in the order of the first row."""
    names = list(rows[0])
    cells = [names, *([_cell(row.get(name)) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    print(f"\n{title}")
    for number, line in enumerate(cells):
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
        if number == 0:
            print("  " + "  ".join("-" * width for width in widths))


def write_json(path: Path | None, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes the rows with date and machine, if a file is wanted."""
    if path is not None:
        report = {
            "bench": name,
            "date": time.strftime("%Y-%m-%d"),
            "python": platform.python_version(),
            "machine": platform.machine(),
            "rows": list(rows),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2) + b"\n")


def draw_curves(
    file: Path,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    label: str,
    *,
    level: tuple[str, float] | None = None,
) -> None:
    """Draws figures over steps, each second line dashed; `level` is a dotted line across, with its name."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 3.2))
    for at, (name, curve) in enumerate(curves.items()):
        axis.plot(*zip(*curve, strict=True), "--" if at % 2 else "-", label=name)
    if level is not None:
        axis.axhline(level[1], color="grey", linestyle=":", label=level[0])
    axis.set(xlabel="step", ylabel=label)
    axis.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=90)


def cpu_seconds() -> float:
    """CPU time of this process, all threads, and of its children that have ended; user and system."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def peak_rss_mb() -> float:
    """Highest resident memory of this process so far, MB: ru_maxrss would count its parent's, too."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def rss_mb() -> float:
    """Resident memory of this process now, MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3g}"
    if isinstance(value, int):
        return f"{value:,}"
    return "-" if value is None else str(value)
