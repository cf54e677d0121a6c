"""Classes of the user's, loaded from a Python file by path and name."""

import difflib

from rollstream.errors import ConfigError
from rollstream.user_code import run_file


def load_class(path: str | None, name: str | None, setting: str) -> type:
    """Loads a class from a Python file. The file runs each time, as a module of its own.

    Args:
        path: The file.
        name: The class in it.
        setting: The configuration key, for messages, as in `data.custom_cls`.

    Raises:
        ConfigError: Not set whole, no such file or class, or the file raises when it runs.
    """
    if not path or not name:
        raise ConfigError(f"{setting}: needs both path (a Python file) and name (a class in it)")
    module = run_file(path, key=setting)
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, vars(module), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{setting}: {path} has no class {name}{hint}")
    loaded = getattr(module, name)
    if not isinstance(loaded, type):
        raise ConfigError(f"{setting}: {name} in {path} is not a class")
    return loaded
