"""The exports of a run: what they need besides the run directory."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from rollstream.chat.tokenizer import load_tokenizer
from rollstream.errors import ConfigError, RunDirectoryError
from rollstream.store.export.dataproto import DataProtoOptions, check_packages, export_dataproto
from rollstream.store.export.jsonl import export_jsonl
from rollstream.store.manifest import read_manifest

Exporter = Callable[[Path, Path, Callable[[], bool]], int]
"""Of the artifact, to a file, asking whether it was cancelled; returns rows."""


def check_exports(names: Iterable[str]) -> None:
    """Raises `ConfigError` when an export of `generation.export` could not be written at the end."""
    if "dataproto" in names:
        check_packages()


def exporter(name: str, *, pad_id: int | None) -> Exporter:
    """What writes a format of `generation.export`; `pad_id` is the tokenizer's."""
    if name == "dataproto":
        return partial(export_dataproto, options=DataProtoOptions(pad_token_id=pad_id or 0))
    return export_jsonl


def run_pad_id(run_dir: Path) -> int:
    """The padding token of the tokenizer that a run used; 0 where it has none.

    Raises:
        RunDirectoryError: no run directory.
        ConfigError: the tokenizer cannot be loaded.
    """
    manifest = read_manifest(run_dir)
    if manifest is None:
        raise RunDirectoryError(f"{run_dir} is not a run directory: it has no run.json")
    model = manifest.config.get("actor_rollout_ref", {}).get("model", {})
    source = model.get("tokenizer_path") or model.get("path")
    try:
        if source is None:
            raise ConfigError("its configuration names none")
        tokenizer = load_tokenizer(
            source,
            custom_chat_template=model.get("custom_chat_template"),
            trust_remote_code=bool(model.get("trust_remote_code")),
        )
    except ConfigError as error:
        raise ConfigError(
            f"cannot load the tokenizer of {run_dir}, which says what pads ({error}); say it by "
            "--pad-token-id"
        ) from error
    return tokenizer.pad_id or 0
