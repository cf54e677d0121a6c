"""Parts that are found by their entry points, those of rollstream and those of other packages alike.

A package names its own in its pyproject.toml:

    [project.entry-points."rollstream.exports"]
    tsv = "my_package.tsv:FORMAT"

Groups: `rollstream.engines`, `.executors`, `.trackers`, `.exports`, `.sandboxes`, `.commands`. docs/plugins.md says
what each kind is. Nothing is imported before its name is asked for.
"""

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from rollstream.errors import ConfigError, unknown_name


@cache
def _points(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}


def names(group: str) -> tuple[str, ...]:
    """All names of a group, sorted."""
    return tuple(sorted(_points(group)))


def load(group: str, name: str) -> Any:
    """The object of a name. Raises `ConfigError`: no such name, or a package that it needs is missing."""
    points = _points(group)
    if name not in points:
        raise unknown_name(group.rpartition(".")[2].removesuffix("s"), name, points)
    try:
        return points[name].load()
    except ModuleNotFoundError as error:
        raise ConfigError(f"{name!r} needs the package {error.name}, which is not installed") from error
