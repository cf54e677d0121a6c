"""Parts that are found by their entry points, those of rollstream and those of other packages alike.

A package names its own in its pyproject.toml:

    [project.entry-points."rollstream.exports"]
    tsv = "my_package.tsv:FORMAT"

Groups: `rollstream.engines`, `.executors`, `.trackers`, `.exports`, `.sandboxes`, `.commands`, `.keys`,
`.generators`. docs/plugins.md says what each kind is.
"""

import logging
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from rollstream.errors import ConfigError, unknown_name

logger = logging.getLogger(__name__)


@cache
def _points(group: str) -> Mapping[str, list[EntryPoint]]:
    points: dict[str, list[EntryPoint]] = defaultdict(list)
    for point in entry_points(group=group):
        points[point.name].append(point)
    return dict(points)


def names(group: str) -> tuple[str, ...]:
    """All names of a group, sorted."""
    return tuple(sorted(_points(group)))


def load(group: str, name: str) -> Any:
    """The object of a name.

    Raises:
        ConfigError: no such name, a package that it needs is missing, its module raises, or two packages have the
            name.
    """
    points, kind = _points(group), group.rpartition(".")[2].removesuffix("s")
    if name not in points:
        raise unknown_name(kind, name, points)
    if len(points[name]) > 1:
        raise ConfigError(f"{kind} {name!r} is in several packages: {', '.join(map(_package, points[name]))}")
    point = points[name][0]
    try:
        return point.load()
    except ModuleNotFoundError as error:
        raise ConfigError(f"{name!r} needs the package {error.name}, which is not installed") from error
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{kind} {name!r} of {_package(point)} cannot be loaded: {problem}") from error


@cache
def load_all(group: str) -> Mapping[str, Any]:
    """All objects of a group by name. One that cannot be loaded is left out, with a warning."""
    found = {}
    for name in names(group):
        try:
            found[name] = load(group, name)
        except ConfigError as error:
            logger.warning("%s", error)
    return found


def _package(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else point.value
