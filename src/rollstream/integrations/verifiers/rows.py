"""An environment's prompts as files that `rollstream generate` takes."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from omegaconf import OmegaConf

from rollstream.data.values import BadRow, to_jsonable
from rollstream.errors import ConfigError, DataError
from rollstream.integrations.verifiers.loading import digest, load

_LOOP = "rollstream.integrations.verifiers.VerifiersLoop"


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
    if rows is not None and rows < 1:
        raise ConfigError(f"rows is {rows}, want 1 or more")
    if split not in ("train", "eval"):
        raise ConfigError(f"split is {split!r}, want train or eval")
    where, colon, factory = environment.rpartition(":")
    if colon and where.endswith(".py"):
        environment = f"{Path(where).expanduser().resolve()}:{factory}"  # runs may start elsewhere
    loaded = load(environment, arguments or {})
    called = name or loaded.name
    target = Path(folder).expanduser()
    target.mkdir(parents=True, exist_ok=True)
    written = WrittenPrompts(target / "prompts.jsonl", target / "agents.yaml", 0)
    count = 0
    partial = written.prompts.with_name("prompts.jsonl.partial")
    with partial.open("wb") as file:
        for position, row in enumerate(loaded.rows(split, rows)):
            try:
                line = to_jsonable({"data_source": called, "agent_name": called, **row})
            except BadRow as error:
                raise DataError(f"environment {called!r}, row {position}: {error}") from error
            file.write(orjson.dumps(line) + b"\n")
            count += 1
    if not count:
        raise ConfigError(f"environment {called!r} has no rows")
    loop = {
        "name": called,
        "_target_": _LOOP,
        "environment": environment,
        "arguments": to_jsonable(dict(arguments or {})),
        "digest": digest(loaded),
    }
    partial.replace(written.prompts)
    written.agents.write_text(OmegaConf.to_yaml(OmegaConf.create([loop])))
    return WrittenPrompts(written.prompts, written.agents, count)
