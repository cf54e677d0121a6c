"""`rollstream verifiers`: an environment's prompts as files for a run."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from rollstream.errors import ConfigError

EPILOG = """It prints the settings that a run takes. For example:
  rollstream verifiers gsm8k --output outputs/gsm8k --rows 1000
  rollstream verifiers envs/guess.py:load_environment --arguments size=100 --output outputs/guess
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("environment", help="installed, or path/to/file.py:factory, package.module:factory")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="prompts.jsonl, agents.yaml"
    )
    parser.add_argument(
        "--arguments",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="of the environment; values are JSON or text, dots go into mappings: agent.max_turns=4",
    )
    parser.add_argument("--split", choices=["train", "eval"], default="train")
    parser.add_argument("--rows", type=int, metavar="N", help="at most (default: all)")
    parser.add_argument("--name", help="of the agent loop and the data source (default: the environment's)")


def run(options: argparse.Namespace) -> int:
    """Writes the files; returns the exit code."""
    from rollstream.integrations.verifiers.rows import write_prompts

    written = write_prompts(
        options.environment,
        options.output,
        arguments=read_arguments(options.arguments),
        split=options.split,
        rows=options.rows,
        name=options.name,
    )
    lines = (
        f"{written.rows} prompts; for a run:",
        f"  data.train_files={written.prompts}",
        f"  actor_rollout_ref.rollout.agent.agent_loop_config_path={written.agents}",
    )
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def read_arguments(words: Sequence[str]) -> dict[str, Any]:
    """Arguments from words such as `agent.max_turns=4`.

    `null` is text: a harness of verifiers has that name.

    Raises:
        ConfigError: a word has no `=`, or a name is a value and a mapping at once.
    """
    arguments: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not all(key.split(".")):
            raise ConfigError(f"--arguments: {word!r} is no KEY=VALUE")
        try:
            value = text if text == "null" else orjson.loads(text)
        except orjson.JSONDecodeError:
            value = text
        place = arguments
        *path, last = key.split(".")
        for part in path:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise ConfigError(f"--arguments: {part!r} of {key!r} is a value and a mapping at once")
        place[last] = value
    return arguments
