"""The manifest `run.json`: which run this directory holds, and what decides its data."""

import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import orjson

from rollstream.errors import IdentityMismatchError, RunDirectoryError
from rollstream.sampling import changes_of_distribution
from rollstream.store.journal import write_file_durably
from rollstream.trajectory import LogprobKind
from rollstream.untrusted import read_regular

FORMAT = "rollstream.run/2"

DATASET_IDENTITY = "data.rows"
"""Identity keys below this one describe the dataset's rows."""

LOOP_IDENTITY = "agent.loops."
"""Before the name of an agent loop: the identity key of its code and options."""

SHARD_IDENTITY = "generation.shard"
"""Identity key that says which part of a run a directory holds: `i/k`. A whole run does not have it."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `run.json`."""

    format: str = FORMAT
    run_id: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
    """32 hexadecimal digits; stands in every journal and batch of the run."""
    created: str
    """UTC, ISO 8601."""
    n: Annotated[int, msgspec.Meta(ge=1)]
    """Rollouts of a prompt row."""
    identity: dict[str, Any]
    """All that decides the data, as a flat mapping of dotted keys to JSON values."""
    dataset: dict[str, Any]
    """Fingerprint and files of the dataset, to recognise unchanged files without reading their rows."""
    versions: dict[str, str]
    """Versions of what matters: rollstream, the engine, the tokenizer library."""
    config: dict[str, Any]
    """The resolved configuration."""
    tools: dict[str, Any] = msgspec.field(default_factory=dict)
    """Schemas of the tools that prompts may show, by digest; `extra` of a trajectory names its own in `shown_tools`."""

    logprobs: LogprobKind | None = None
    """The kind of log-probs, which a started engine says. None: there are none, or none yet."""
    reward: str | None = None
    """The `source_digest` of the reward that scores the rollouts; no part of the identity."""
    scores: str | None = None
    """Scores whose rewards are the run's own for the rollouts in them; see `rollstream.store.scores`."""
    pad_token_id: int | None = None
    """The id that fills batches up. None: there is no tokenizer, or the version before wrote the run."""

    def setting(self, *keys: str) -> dict[str, Any]:
        """A group of the configuration by its keys; empty where there is none."""
        found: Any = self.config
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        return found if isinstance(found, dict) else {}

    @property
    def sampling_changes(self) -> dict[str, Any]:
        """Sampling parameters of the run by which tokens are not drawn from the model's own distribution."""
        rollout = self.setting("actor_rollout_ref", "rollout")
        return changes_of_distribution({**rollout, **(rollout.get("extra_sampling") or {})})

    @property
    def logprobs_text(self) -> str:
        """`logprobs` for people; "" where there are none."""
        if self.logprobs == "raw" and (changes := self.sampling_changes):
            return (
                f"raw: of the model, before {', '.join(f'{name} {value}' for name, value in changes.items())}"
            )
        return self.logprobs or ""

    @property
    def run_id_bytes(self) -> bytes:
        """The run id as 16 bytes."""
        return bytes.fromhex(self.run_id)


def new_manifest(**fields: Any) -> Manifest:
    """A manifest for a new run, by the fields of `Manifest`."""
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    tools = fields.pop("tools", None) or {}
    return Manifest(run_id=secrets.token_hex(16), created=created, tools=tools, **fields)


def read_manifest(run_dir: Path) -> Manifest | None:
    """The manifest of a run directory, None when there is none. Raises `RunDirectoryError`."""
    path = run_dir / "run.json"
    try:
        str(path).encode()
    except UnicodeEncodeError as error:  # neither JSON nor Parquet's library takes it
        raise RunDirectoryError(f"{str(run_dir)!a} is not valid UTF-8; rename the folder") from error
    try:
        data = read_regular(path)
    except FileNotFoundError:
        return None
    except NotADirectoryError as error:
        raise RunDirectoryError(no_run(run_dir)) from error
    except OSError as error:
        raise RunDirectoryError(f"cannot read {path}: {error.strerror}") from error
    try:
        found = msgspec.json.decode(data)
        if isinstance(found, dict) and found.get("format") not in (FORMAT, None):
            raise RunDirectoryError(
                f"{path} has format {found['format']!r}; this version of rollstream reads {FORMAT!r}"
            )
        manifest = msgspec.convert(found, Manifest)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RunDirectoryError(f"{path} is damaged ({error}); restore it from a copy") from error
    if "reward" in manifest.identity:  # of version 0.2
        manifest = msgspec.structs.replace(manifest, reward=manifest.identity.pop("reward"))
    return manifest


def require_manifest(run_dir: Path) -> Manifest:
    """The manifest of a run directory. Raises `RunDirectoryError` when there is none."""
    manifest = read_manifest(run_dir)
    if manifest is None:
        raise RunDirectoryError(no_run(run_dir))
    return manifest


def no_run(path: Path) -> str:
    """What a path is that is no run directory."""
    inner = path / "rollouts"  # where a training keeps them
    what = (
        f"it has no run.json, but {inner} has"
        if (inner / "run.json").exists()
        else "it has no run.json"
        if path.is_dir()
        else "it is a file"
        if path.exists()
        else "there is no such folder"
    )
    return f"{path} is not a run directory: {what}"


def write_manifest(run_dir: Path, manifest: Manifest) -> None:
    """Writes `run.json` atomically and durably."""
    data = orjson.dumps(msgspec.to_builtins(manifest), option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS)
    write_file_durably(run_dir / "run.json", data + b"\n")


def shard_group(manifest: Manifest) -> bytes | None:
    """The same for all shards of a run; None for a whole run."""
    if SHARD_IDENTITY not in manifest.identity:
        return None
    return orjson.dumps({**manifest.identity, SHARD_IDENTITY: None})


def identity_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, object, object]]:
    """`(key, old value, new value)` of all that differs, sorted by key."""
    return [
        (key, old.get(key), new.get(key))
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def check_reward(run_dir: Path, old: Manifest, wanted: Manifest) -> None:
    """Raises `IdentityMismatchError` where finished rollouts were scored by another reward than the one asked for."""
    if old.reward != wanted.reward:
        raise IdentityMismatchError(
            f"{run_dir} was scored by another reward: generation.rescore=true scores what is finished by this one, "
            "and goes on; nothing was touched",
            [("reward", old.reward, wanted.reward)],
        )


def extends(difference: tuple[str, Any, Any]) -> bool:
    """Whether `resume=extend` allows a difference: other dataset rows, or more rollouts of each."""
    key, before, after = difference
    return key.startswith(DATASET_IDENTITY) or (key == "rollout.n" and after > before)


def check_identity(run_dir: Path, old: Mapping[str, Any], new: Mapping[str, Any], *, extend: bool) -> bool:
    """Whether anything differs; raises `IdentityMismatchError` for what may not.

    Args:
        run_dir: for the message.
        old: identity in the run directory.
        new: identity asked for.
        extend: whether differences that extend the run are allowed.
    """
    differences = identity_differences(old, new)
    refused = [one for one in differences if not (extend and extends(one))]
    if not refused:
        return bool(differences)
    lines = "\n".join(f"  {key}: {before!r} -> {after!r}" for key, before, after in refused)
    hint = (
        "If rows were appended, or n grew, generation.resume=extend goes on with them."
        if all(map(extends, refused))
        else "Use another --output (trainer.default_local_dir) for the new run, or the old settings to continue."
    )
    raise IdentityMismatchError(
        f"{run_dir} holds a run of another identity; nothing was touched. What differs (old -> new):\n"
        f"{lines}\n{hint}",
        refused,
    )
