"""`rollstream init`: a configuration, prompts and a reward that run as they are written."""

import argparse
import shlex
from pathlib import Path

from rollstream.command_line import Command
from rollstream.demo import MODEL_PATH
from rollstream.errors import ConfigError

FILES = ("run.yaml", "prompts.jsonl", "reward.py")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `rollstream init`."""
    parser.add_argument("folder", type=Path, nargs="?", default=Path(), metavar="DIR", help="default: here")


def run(options: argparse.Namespace) -> int:
    """Writes the files and says what to do with them; nothing that is there is overwritten."""
    folder: Path = options.folder
    write_files(folder)
    names = ", ".join(str(folder / name) for name in FILES)
    there = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
    print(f"wrote {names}. Now:\n  {there}rollstream generate --config run.yaml")
    return 0


def write_files(folder: Path) -> None:
    """Writes `FILES` into a folder. Raises `ConfigError`: one of them is there, or it cannot be."""
    if there := [str(folder / name) for name in FILES if (folder / name).exists()]:
        raise ConfigError(f"{', '.join(there)}: there already; nothing was written. Name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            text = (MODEL_PATH.parent / "start" / name).read_text(encoding="utf-8")
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write into {folder}: {error.strerror}") from error


COMMAND = Command("write an example: a configuration, prompts and a reward", run, add_arguments)
