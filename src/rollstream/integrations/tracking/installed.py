"""Whether a package is installed, without importing it."""

import importlib.util

from rollstream.errors import ConfigError


def check_installed(package: str, wanted_by: str) -> None:
    """Raises `ConfigError` with the command that installs a package, when it is not there.

    Args:
        package: its name, which is that of the extra as well.
        wanted_by: the setting that asks for it.
    """
    spec = importlib.util.find_spec(package)
    # A folder of that name, as W&B leaves one where it ran, is no package.
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"{wanted_by} needs {package}, which is not installed here: pip install 'rollstream[{package}]'"
        )
