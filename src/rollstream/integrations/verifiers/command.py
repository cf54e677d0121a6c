"""`rollstream verifiers`: an environment's prompts as files that `rollstream generate` takes."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from rollstream.command_line import Command
from rollstream.errors import ConfigError, DataError

EPILOG = """It prints the settings that a run takes. For example:
  rollstream verifiers gsm8k --output outputs/gsm8k --rows 1000
  rollstream verifiers envs/guess.py:load_environment --arguments size=100 --output outputs/guess
"""

_LOOP = "rollstream.integrations.verifiers.VerifiersLoop"


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
    written = write_prompts(
        options.environment,
        options.output,
        arguments=read_arguments(options.arguments),
        split=options.split,
        rows=options.rows,
        name=options.name,
    )
    sys.stdout.write(
        f"{written.rows} prompts; for a run:\n"
        f"  data.train_files={written.prompts}\n"
        f"  actor_rollout_ref.rollout.agent.agent_loop_config_path={written.agents}\n"
    )
    return 0


@dataclass(frozen=True, slots=True)
class WrittenPrompts:
    """Files for a run."""

    prompts: Path
    """For `data.train_files`."""
    agents: Path
    """For `actor_rollout_ref.rollout.agent.agent_loop_config_path`."""
    rows: int


def write_prompts(
    environment: str,
    folder: str | Path,
    *,
    arguments: Mapping[str, Any] | None = None,
    split: str = "train",
    rows: int | None = None,
    name: str | None = None,
) -> WrittenPrompts:
    """Writes `prompts.jsonl` and `agents.yaml` into a folder; files of these names are replaced.

    Args:
        environment: an installed environment, or `path/to/file.py:factory`, `package.module:factory`.
        folder: made if it is not there.
        arguments: of the environment.
        split: `train` or `eval`; environments of verifiers 0.3 and later have no splits.
        rows: how many at most; None takes all.
        name: of the agent loop, and the rows' `data_source`; None takes the environment's.

    Raises:
        ConfigError: the environment cannot be loaded, or has no such rows.
        DataError: a row holds what no file can.
    """
    from omegaconf import OmegaConf

    from rollstream.data.values import BadRow, to_jsonable
    from rollstream.integrations.verifiers.loading import digest, load

    if rows is not None and rows < 1:
        raise ConfigError(f"rows is {rows}, want 1 or more")
    if split not in ("train", "eval"):
        raise ConfigError(f"split is {split!r}, want train or eval")
    where, _, factory = environment.rpartition(":")
    if where.endswith(".py"):
        environment = f"{Path(where).expanduser().resolve()}:{factory}"  # runs may start elsewhere
    loaded = load(environment, arguments or {})
    called = name or loaded.name
    lines = []
    for position, row in enumerate(loaded.rows(split, rows)):
        try:
            line = to_jsonable({"data_source": called, "agent_name": called, **row})
        except BadRow as error:
            raise DataError(f"environment {called!r}, row {position}: {error}") from error
        lines.append(orjson.dumps(line) + b"\n")
    if not lines:
        raise ConfigError(f"environment {called!r} has no rows")
    loop = {
        "name": called,
        "_target_": _LOOP,
        "environment": environment,
        "arguments": to_jsonable(dict(arguments or {})),
        "digest": digest(loaded),
    }
    target = Path(folder).expanduser()
    target.mkdir(parents=True, exist_ok=True)
    written = WrittenPrompts(target / "prompts.jsonl", target / "agents.yaml", len(lines))
    written.prompts.write_bytes(b"".join(lines))
    written.agents.write_text(OmegaConf.to_yaml(OmegaConf.create([loop])))
    return written


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


COMMAND = Command(
    "write an environment of the verifiers package as prompts for a run", run, add_arguments, EPILOG
)
