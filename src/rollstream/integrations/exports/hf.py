"""The artifact as a Hugging Face dataset: a folder that `datasets.load_dataset` reads, with a card.

    README.md                          the card: YAML header, columns, counts, how it was made
    data/train-00000-of-00002.parquet  …

`push_folder` takes it to the Hugging Face hub.

Columns are those of the artifact. `messages` becomes a list of structs, and `ground_truth` text where every
row has text; what has no one type over all rows is JSON text, and the card says so.
"""

import logging
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rollstream.errors import ConfigError, StorageError
from rollstream.store.batch import SCHEMA, read_tables
from rollstream.store.export.files import load_json
from rollstream.store.manifest import Manifest
from rollstream.store.merge import until

logger = logging.getLogger(__name__)

MAX_ROWS_PER_FILE = 100_000
"""Some hundred MB for usual rows, as the hub likes its files."""

_SHOWN = ("engine", "agent.", "rollout.", "generation.seed", "model.digest")
"""Beginnings of the identity's keys that the card shows. No paths are among them."""

_TEXTS = {
    "index": "position of the prompt row in the data",
    "repeat": "which of the rollouts of the row",
    "trajectory": "counts within the rollout; the last one is final",
    "prompt_key": "content hash of the prompt row",
    "prompt_ids": "token ids, as sent to the engine for the first generation",
    "response_ids": "token ids after it",
    "response_mask": "1 = sampled by the model",
    "response_logprobs": "natural-log probability of each sampled token; 0.0 where the mask is 0",
    "policy_versions": "versions of the weights, run-length over the response",
    "messages": "the conversation, the model's answers included",
    "is_snapshot": "cut off by a context edit; another trajectory of the rollout follows",
    "num_turns": "1 for the prompt, 1 for each message after it",
    "finish_reason": "stop, length, max_turns, tool_overflow, aborted",
    "reward": "null = not scored",
    "reward_extra": "what else the reward said, JSON text",
    "metrics": "seconds and counts",
    "data_source": "where the prompt row comes from",
    "extra": "the prompt row's other columns, JSON text",
    "mean_logprob": "of the sampled tokens",
    "finished_at": "Unix time, seconds",
}
"""Of the columns whose names do not say it."""


@dataclass(slots=True)
class _Survey:
    """What is known of all rows before one is written."""

    rows: int = 0
    rollouts: int = 0
    tokens: int = 0
    reward_sum: float = 0.0
    scored: int = 0
    sources: Counter[str] = field(default_factory=Counter)
    text_truth: bool = True
    """Whether every ground truth is text."""
    keys: dict[str, bool] = field(default_factory=dict)
    """Keys of messages, and whether all their values are text."""


def export_hf(
    artifact: Path,
    target: Path,
    manifest: Manifest,
    cancelled: Callable[[], bool] = lambda: False,
    *,
    rows_per_file: int = MAX_ROWS_PER_FILE,
) -> int:
    """Writes the folder `target` by a temporary name, and returns its rows. An earlier export is replaced.

    Args:
        artifact: `trajectories.parquet`.
        target: must not exist, be empty, or hold an earlier export and nothing else.
        manifest: of the run, for the card.
        cancelled: asked now and then.
        rows_per_file: at most.

    Raises:
        ConfigError: `target` holds other things.
        DamageError: the artifact is damaged.
        StorageError: the disk is full, or `target` cannot be written.
        MergeCancelledError: `cancelled` said so. An older export stays.
    """
    check_replaceable(target)
    survey = _survey(artifact, cancelled)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        (temporary / "data").mkdir(parents=True)
        _write_rows(artifact, temporary / "data", survey, cancelled, rows_per_file)
        (temporary / "README.md").write_text(_card(manifest, survey))
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
    except OSError as error:
        raise StorageError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return survey.rows


def check_replaceable(target: Path) -> None:
    """Raises `ConfigError` unless `target` is free or an earlier export: nothing else is ever deleted."""
    if not target.exists():
        return
    if not target.is_dir() or target.is_symlink():
        raise ConfigError(f"{target} is no folder; a Hugging Face dataset is one")
    ours = {target / "README.md", *target.glob("data/train-*.parquet")}
    for path in sorted(target.rglob("*")):
        if path not in ours and not path.is_dir():
            raise ConfigError(f"{target} holds something else than an export ({path.relative_to(target)})")


def _survey(artifact: Path, cancelled: Callable[[], bool]) -> _Survey:
    survey = _Survey()
    columns = ["response_tokens", "messages", "ground_truth", "reward", "data_source", "is_snapshot"]
    for table in until(read_tables(artifact, columns), cancelled):
        survey.rows += len(table)
        survey.tokens += pc.sum(table["response_tokens"]).as_py()
        final = table.filter(pc.invert(table["is_snapshot"]))
        survey.rollouts += len(final)
        survey.sources.update(final["data_source"].to_pylist())
        survey.reward_sum += pc.sum(final["reward"]).as_py() or 0.0
        survey.scored += len(final) - final["reward"].null_count
        survey.text_truth &= bool(pc.all(pc.starts_with(table["ground_truth"], '"')).as_py())
        for text in table["messages"].to_pylist():
            for message in load_json(text, artifact):
                for key, value in message.items():
                    survey.keys[key] = survey.keys.get(key, True) and isinstance(value, str | None)
    return survey


def _write_rows(
    artifact: Path, folder: Path, survey: _Survey, cancelled: Callable[[], bool], rows_per_file: int
) -> None:
    messages = pa.list_(pa.struct([(key, pa.string()) for key in survey.keys]))
    schema = SCHEMA.set(SCHEMA.get_field_index("messages"), pa.field("messages", messages))
    files = max(1, -(-survey.rows // rows_per_file))
    tables = (
        _converted(table, survey, schema, artifact) for table in until(read_tables(artifact), cancelled)
    )
    rest = schema.empty_table()
    for number in range(files):
        name, room = f"train-{number:05}-of-{files:05}.parquet", rows_per_file
        with pq.ParquetWriter(folder / name, schema, compression="zstd") as writer:
            while room and len(rest := rest if len(rest) else next(tables, rest)):
                part = rest.slice(0, room)
                writer.write_table(part)
                room, rest = room - len(part), rest.slice(len(part))


def _converted(table: pa.Table, survey: _Survey, schema: pa.Schema, path: Path) -> pa.Table:
    messages = [
        [{key: _cell(message.get(key), text) for key, text in survey.keys.items()} for message in row]
        for row in (load_json(text, path) for text in table["messages"].to_pylist())
    ]
    columns = {name: table[name] for name in schema.names}
    columns["messages"] = pa.array(messages, schema.field("messages").type)
    if survey.text_truth:
        truths = [load_json(text, path) for text in table["ground_truth"].to_pylist()]
        columns["ground_truth"] = pa.array(truths, pa.string())
    return pa.table(columns, schema=schema)


def _cell(value: Any, is_text: bool) -> str | None:
    if value is None or is_text:
        return value  # type: ignore[no-any-return]
    return orjson.dumps(value).decode()


def _card(manifest: Manifest, survey: _Survey) -> str:
    mean = f"{survey.reward_sum / survey.scored:.4f}" if survey.scored else "not scored"
    counts = {
        "rows (trajectories)": f"{survey.rows:,}",
        "rollouts": f"{survey.rollouts:,}",
        "response tokens": f"{survey.tokens:,}",
        "mean reward": f"{mean} ({survey.scored:,} scored)",
        **{f"data source `{name}`": f"{count:,}" for name, count in survey.sources.most_common(20)},
    }
    json_keys = ", ".join(f"`{key}`" for key, text in survey.keys.items() if not text)
    texts = {**_TEXTS, "ground_truth": "text" if survey.text_truth else "JSON text"}
    texts["messages"] += f" ({json_keys} as JSON text)" if json_keys else ""
    settings = {
        key: f"`{orjson.dumps(value).decode()}`"
        for key, value in sorted(manifest.identity.items())
        if key.startswith(_SHOWN) and value is not None
    }
    settings |= {f"version of {name}": version for name, version in manifest.versions.items()}
    return (
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n"
        "    path: data/train-*.parquet\ntags:\n- rollstream\n- trajectories\n---\n"
        "# Trajectories\n\nRollouts of a language model, written by rollstream.\n\n"
        f"## Counts\n\n{_table('', '', counts)}\n"
        f"## Columns\n\n{_table('column', '', {f'`{name}`': texts.get(name, '') for name in SCHEMA.names})}\n"
        f"## How it was made\n\nRun `{manifest.run_id}` of {manifest.created}; {manifest.n} rollouts per "
        f"prompt row.\n\n{_table('setting', 'value', settings)}"
    )


def _table(left: str, right: str, rows: dict[str, str]) -> str:
    lines = [f"| {left} | {right} |", "|---|---|"]
    lines += [f"| {name} | {value.replace('|', '&#124;')} |" for name, value in rows.items()]
    return "\n".join(lines) + "\n"


@contextmanager
def _hub_errors(failed: str) -> Iterator[None]:
    """What the hub's client raises, as `ConfigError` where it refuses and as `StorageError` otherwise."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    try:
        yield
    except LocalTokenNotFoundError as error:
        raise ConfigError(
            "nobody is logged in to the Hugging Face hub: `hf auth login`, or a token in HF_TOKEN"
        ) from error
    except HFValidationError as error:
        raise ConfigError(f"{failed}: {error}") from error
    except Exception as error:  # what the HTTP library raises depends on the hub client's version
        if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403, 404):
            raise ConfigError(f"{failed}, the Hugging Face hub refuses it: {error}") from error
        raise StorageError(f"{failed}: {error}") from error


def check_login() -> None:
    """Raises `ConfigError` when nobody is logged in, `StorageError` when the hub cannot be reached."""
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise ConfigError("pushing needs huggingface_hub: pip install 'rollstream[hub]'") from error
    with _hub_errors("cannot log in to the Hugging Face hub"):
        HfApi().whoami()


def push_folder(folder: Path, repo: str, *, public: bool = False) -> str:
    """Uploads a dataset folder; returns its address. Data files of an earlier push go in the same commit.

    Args:
        folder: as `export_hf` has written it.
        repo: `name` or `owner/name`; made when it is not there.
        public: of a new repository; it is private otherwise. One that is there stays as it is.

    Raises:
        ConfigError: the hub refuses the name, or to write there.
        StorageError: it could not be uploaded; the folder is there.
    """
    from huggingface_hub import HfApi

    with _hub_errors(f"cannot push {folder} to {repo}"):
        made = HfApi().create_repo(repo, repo_type="dataset", private=not public, exist_ok=True)
        HfApi().upload_folder(
            repo_id=made.repo_id,
            repo_type="dataset",
            folder_path=folder,
            commit_message="Trajectories from rollstream",
            delete_patterns=["data/train-*.parquet"],
        )
    address = f"https://huggingface.co/datasets/{made.repo_id}"
    logger.info("pushed to %s", address)
    return address
