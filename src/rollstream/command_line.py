"""The words of the command line: a command, its options, how a line is parsed and how a command ends.

A room names its commands by entry points of `rollstream.commands`, each a `Command`. These modules are read for every
command line, so they import nothing that takes time.
"""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollstream.errors import ConfigError

HYDRA_HINT = (
    " (that is an option of Hydra's. Here --config FILE names a file, which may have defaults:, --show-config "
    "prints what a command resolves to, and one command is one run)"
)

_HYDRAS = re.compile(
    r"--(config-(dir|name|path)|experimental-rerun|hydra-help|info|multirun|package|run|shell-completion)|-[impr]"
)
"""Options of programs made with Hydra."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command, by its entry point's name. Either it runs, or there are commands below it."""

    text: str
    """One line, in lower case."""
    run: Callable[[argparse.Namespace], int] | None = None
    """Returns the exit code."""
    add_arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    epilog: str | None = None
    commands: Mapping[str, "Command"] | None = None
    is_silent: bool = False
    """Prints nothing until it is done."""


def add_commands(parser: argparse.ArgumentParser, commands: Mapping[str, Command]) -> None:
    """Adds commands, and those below them, to a parser; a parsed line has the chosen one as `command`."""
    doors = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in commands.items():
        added = doors.add_parser(
            name,
            help=command.text,
            description=command.text[0].upper() + command.text[1:] + ".",
            epilog=command.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if command.commands is not None:
            add_commands(added, command.commands)
            continue
        added.set_defaults(command=command, parser=added)
        command.add_arguments(added)


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses a command line whose `key=value` words may stand between options.

    (argparse gives a `*` argument only the first stretch of words, and its own way out of that,
    `parse_intermixed_args`, knows no subcommands.)
    """
    for word in sys.argv[1:] if arguments is None else arguments:
        try:
            word.encode()
        except UnicodeEncodeError:  # a name of other bytes, which neither JSON nor Parquet's library takes
            parser.error(f"{word!a} is not valid UTF-8; rename the file or folder")
    options, rest = parser.parse_known_args(arguments)
    if rest:
        unknown = [word for word in rest if word.startswith("-")]
        if unknown or not hasattr(options, "overrides"):
            hint = ""
            if any(_HYDRAS.fullmatch(word.partition("=")[0]) for word in unknown):
                hint = HYDRA_HINT
            parser = getattr(options, "parser", parser)
            known = re.findall(r"--[a-z][a-z-]+", parser.format_usage())
            for word in unknown:
                if not hint and (near := difflib.get_close_matches(word.partition("=")[0], known, n=1)):
                    hint = f"; did you mean {near[0]}?"
            parser.error(f"unrecognized arguments: {' '.join(unknown or rest)}{hint}")
        options.overrides = [*options.overrides, *rest]
    return options


def guarded(body: Callable[[], int]) -> int:
    """Runs a command; an interrupt or a reader that went away ends it without a traceback."""
    try:
        return body()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def read_key_values(words: Sequence[str]) -> dict[str, Any]:
    """The words of `--engine-kwargs`, dotted keys and YAML's values. Raises `ConfigError`."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError  # type: ignore[import-untyped]

    try:
        values = OmegaConf.to_container(OmegaConf.from_dotlist(list(words)))
    except (OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(f"--engine-kwargs cannot be read: {' '.join(str(error).split())}") from error
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}
