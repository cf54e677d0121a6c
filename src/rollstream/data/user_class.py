"""Classes of the user's, loaded from a Python file by path and name."""

import difflib
import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from rollstream.errors import ConfigError


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
    file = Path(path).expanduser()
    module = _run_file(file, setting)
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, vars(module), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{setting}: {file} has no class {name}{hint}")
    loaded = getattr(module, name)
    if not isinstance(loaded, type):
        raise ConfigError(f"{setting}: {name} in {file} is not a class")
    return loaded


def _run_file(file: Path, setting: str) -> ModuleType:
    if not file.is_file():
        raise ConfigError(f"{setting}: no such file: {file} (looked in {file.absolute().parent})")
    if file.suffix != ".py":
        raise ConfigError(f"{setting}: {file} is not a Python file (.py)")
    tag = hashlib.blake2b(str(file.resolve()).encode(), digest_size=6).hexdigest()
    module_name = f"rollstream_user_{file.stem}_{tag}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{setting}: {file} cannot be loaded as a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look their module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException as error:  # sys.exit() in the file must not end the program without a word
        del sys.modules[module_name]
        if isinstance(error, KeyboardInterrupt):
            raise
        raise ConfigError(f"{setting}: {file} raised {type(error).__name__}: {error}") from error
    return module
