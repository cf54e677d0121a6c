"""Code of the user's: Python files that are run, names that are imported, and which source it was."""

import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from rollstream.errors import ConfigError, unknown_name

T = TypeVar("T")

_SOURCE = "__rollstream_source__"
"""The name under which a module that was run keeps the digest of the bytes that ran."""


def run_file(path: str | Path, *, key: str, source: bytes | None = None) -> ModuleType:
    """Runs a Python file, each time anew, as a module under a private name.

    Its folder is put at the end of `sys.path`, so that it can import its neighbours. Nothing is written for the
    file itself, and no cached bytecode of it is used, so what runs is what it says now.

    Args:
        path: The file.
        key: The configuration key, for messages.
        source: What the file said when it was read, which is run in place of what it says now.

    Raises:
        ConfigError: No such file, not a Python file, or it raises when it runs; names its line. SystemExit
            is an error like others; KeyboardInterrupt passes through.
    """
    file = Path(path).expanduser()
    if source is None and not file.is_file():
        raise ConfigError(f"{key}: no such file: {file} (looked in {file.absolute().parent})")
    if file.suffix != ".py":
        raise ConfigError(f"{key}: {file} is not a Python file (.py)")
    source = file.read_bytes() if source is None else source
    digest = hashlib.blake2b(source, digest_size=16).hexdigest()
    # Another path or content has another name: classes of an edited file are not taken for those before it.
    tag = hashlib.blake2b(f"{file.resolve()}\0{digest}".encode(), digest_size=6).hexdigest()
    spec = importlib.util.spec_from_file_location(f"rollstream_user_{file.stem}_{tag}", file.absolute())
    assert spec is not None and spec.loader is not None  # given for every name that ends with .py
    module = importlib.util.module_from_spec(spec)
    setattr(module, _SOURCE, digest)
    before = sys.modules.get(module.__name__)
    sys.modules[module.__name__] = module  # dataclasses and pickle look their module up by name
    if (folder := str(file.absolute().parent)) not in sys.path:
        sys.path.append(folder)
    try:
        exec(compile(source, str(file.absolute()), "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:  # sys.exit() in the file must not end the program without a word
        if before is None:
            del sys.modules[module.__name__]
        else:
            sys.modules[module.__name__] = before
        if isinstance(error, KeyboardInterrupt):
            raise
        raise ConfigError(
            f"{key}: {file} raised {type(error).__name__}: {error}{_line_of(error, file)}"
        ) from error
    return module


def import_name(dotted: str, *, key: str, beside: Path | None = None) -> Any:
    """What a name stands for: `package.module.Class`, or `path/to/file.py:Class`.

    Args:
        dotted: The name. A file is run by `run_file`, a package imported.
        key: The configuration key, for messages.
        beside: The file that has the name in it: a relative path is looked for in its folder first, then in
            the working directory.

    Raises:
        ConfigError: There is no such module or name, with the nearest one, or importing it raises.
    """
    path, colon, name = dotted.rpartition(":")
    if colon:
        if not path or not name.isidentifier():
            raise ConfigError(f"{key}: {dotted!r} is not a name; write path/to/file.py:Name")
        if beside is not None and (neighbour := beside.parent / path).is_file():
            path = str(neighbour)
        return _attribute(run_file(path, key=key), name, str(path), key)
    module_name, dot, name = dotted.rpartition(".")
    if not dot or name == "py" or not all(part.isidentifier() for part in dotted.split(".")):
        raise ConfigError(
            f"{key}: {dotted!r} is not a name; write package.module.Name or path/to/file.py:Name"
        )
    try:
        module = importlib.import_module(module_name)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise ConfigError(
            f"{key}: {module_name} cannot be imported ({type(error).__name__}: {error}){_way_out(error, dotted)}"
        ) from error
    return _attribute(module, name, module_name, key)


def _way_out(error: BaseException, dotted: str) -> str:
    missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
    module, _, name = dotted.rpartition(".")
    if missing is not None and missing.partition(".")[0] == "verl":
        return (
            "; tools written for verl work without it when they import Tool (as BaseTool) from "
            "rollstream.agent.tools.base: docs/tools.md, Differences from verl"
        )
    if missing == module and (file := Path(f"{module.replace('.', '/')}.py")).is_file():
        return f"; write {file}:{name}"
    return ""


def read_yaml(path: str | Path, *, key: str) -> Any:
    """Reads a YAML file, interpolations resolved. `key` is the configuration key, for messages.

    Raises:
        ConfigError: no such file, or not YAML.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"{key}: no such file: {file}")
    try:
        return OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{key}: {file} cannot be read as YAML ({error})") from error


def construct(make: Callable[[], T], where: str) -> T:
    """What `make` returns. Raises `ConfigError`, whatever the user's code raises: SystemExit, too."""
    try:
        return make()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise ConfigError(f"{where} cannot be made ({type(error).__name__}: {error})") from error


def source_digest(code: Any) -> str:
    """Names by content the source of a module, class, function, or of an object's class.

    It is of the file that defines it (and the files of a class' bases), not of what that imports. What
    belongs to Python or to rollstream is not looked at: a new version may go on with an old run.

    Returns:
        32 hexadecimal digits.
    """
    parts = sorted({source for module in _modules_of(code) if (source := _source_of(module))})
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def _modules_of(code: Any) -> list[ModuleType]:
    while isinstance(code, functools.partial):
        code = code.func
    if isinstance(code, ModuleType):
        return [code]
    if inspect.isroutine(code):
        code = inspect.unwrap(code)
        classes = []
        names = [code.__module__]
    else:
        classes = list(inspect.getmro(code if isinstance(code, type) else type(code)))
        names = [cls.__module__ for cls in classes]
    return [sys.modules[name] for name in names if name in sys.modules]


def _source_of(module: ModuleType) -> str:
    package = module.__name__.partition(".")[0]
    if package == "rollstream" or package in sys.stdlib_module_names:
        return ""
    if ran := getattr(module, _SOURCE, None):
        return str(ran)
    if file := getattr(module, "__file__", None):
        return hashlib.blake2b(Path(file).read_bytes(), digest_size=16).hexdigest()
    return module.__name__


def _attribute(module: ModuleType, name: str, where: str, key: str) -> Any:
    if not hasattr(module, name):
        code = {known: value for known, value in vars(module).items() if callable(value) and known[0] != "_"}
        own = [known for known, value in code.items() if value.__module__ == module.__name__]
        raise ConfigError(f"{key}: {unknown_name(f'name in {where}:', name, own)}")
    return getattr(module, name)


def _line_of(error: BaseException, file: Path) -> str:
    """The innermost line of the file that took part in an error, for a message."""
    if isinstance(error, SyntaxError):
        return ""  # says it itself
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file.absolute())
    ]
    return f" (line {frames[-1].lineno}: {frames[-1].line})" if frames else ""
