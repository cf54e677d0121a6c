"""The exports of a run: what they need besides the run directory."""

import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path

from rollstream.chat.tokenizer import load_tokenizer
from rollstream.config.settings import GenerationSettings
from rollstream.errors import ConfigError, StorageError
from rollstream.store.batch import file_rows
from rollstream.store.export.dataproto import (
    NO_IMAGES,
    DataProtoOptions,
    check_packages,
    export_dataproto,
)
from rollstream.store.export.files import FILE_NAMES, export_jsonl
from rollstream.store.manifest import require_manifest
from rollstream.store.paths import RunPaths

logger = logging.getLogger(__name__)

Exporter = Callable[[Path, Path, Callable[[], bool]], int]
"""Of the artifact, to a file, asking whether it was cancelled; returns rows."""


def check_exports(names: Iterable[str], *, shows_images: bool = False, has_ids: bool = True) -> None:
    """Raises `ConfigError` when an export of `generation.export` could not be written at the end.

    Args:
        names: the formats.
        shows_images: whether prompt rows have images, as far as that is known.
        has_ids: whether the run has a tokenizer.
    """
    if "dataproto" in names:
        check_packages()
        if shows_images:
            raise ConfigError(f"generation.export=dataproto: the prompt rows have images, and {NO_IMAGES}")
        if not has_ids:
            raise ConfigError(
                "generation.export=dataproto needs token ids, and without a tokenizer there are none: set "
                "actor_rollout_ref.model.tokenizer_path"
            )


async def export_artifact(
    paths: RunPaths,
    settings: GenerationSettings,
    *,
    pad_id: int | None,
    work: Callable[[Callable[[Callable[[], bool]], int]], Awaitable[int]],
) -> ConfigError | StorageError | None:
    """Writes the formats of `generation.export`; one that cannot be written is in no other's way.

    Args:
        paths: of the run, which is merged.
        settings: of the run.
        pad_id: the tokenizer's.
        work: runs one export, which asks whether it was cancelled; may raise to end them all.

    Returns:
        the first error; further ones are logged.

    Raises:
        DamageError: the artifact is damaged.
    """
    first: ConfigError | StorageError | None = None
    for name in settings.export:
        export = partial(_exporter(name, settings, pad_id), paths.artifact, paths.root / FILE_NAMES[name])
        try:
            await work(export)
        except (ConfigError, StorageError) as error:
            said = error if isinstance(error, StorageError) else _explained(paths.artifact, name, error)
            if first is None:
                first = said
            else:
                logger.error("%s", said)
    return first


def _explained(artifact: Path, name: str, error: ConfigError) -> ConfigError:
    key = "generation.export_unscored, " if name == "dataproto" else ""
    explained = ConfigError(
        f"{artifact} is there with {file_rows(artifact)} rows, but generation.export={name} of it "
        f"failed: {error}. Options: {key}rollstream export --format {name} (docs/export.md)"
    )
    explained.__cause__ = error
    return explained


def _exporter(name: str, settings: GenerationSettings, pad_id: int | None) -> Exporter:
    if name == "dataproto":
        options = DataProtoOptions(pad_token_id=pad_id or 0, unscored=settings.export_unscored)
        return partial(export_dataproto, options=options)
    return export_jsonl


def run_pad_id(run_dir: Path) -> int:
    """The padding token of the tokenizer that a run used; 0 where it has none.

    Raises:
        RunDirectoryError: no run directory.
        ConfigError: the tokenizer cannot be loaded.
    """
    manifest = require_manifest(run_dir)
    if manifest.identity.get("model.tokenizer", "") is None:
        return 0
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
