"""The exports of a run: what they need besides the run directory."""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from rollstream.config.settings import GenerationSettings
from rollstream.errors import ConfigError
from rollstream.store.batch import file_rows
from rollstream.store.export.dataproto import DataProtoOptions, ImageInputs, check_packages
from rollstream.store.export.files import FILE_NAMES
from rollstream.store.export.run import ExportOptions, write_export
from rollstream.store.manifest import Manifest, require_manifest
from rollstream.store.paths import RunPaths

logger = logging.getLogger(__name__)


def check_exports(names: Iterable[str], *, has_ids: bool = True) -> None:
    """Raises `ConfigError` when an export of `generation.export` could not be written at the end.

    Args:
        names: the formats.
        has_ids: whether the run has a tokenizer.
    """
    if "dataproto" in names:
        check_packages()
        if not has_ids:
            raise ConfigError(
                "generation.export=dataproto needs token ids, and without a tokenizer there are none: set "
                "actor_rollout_ref.model.tokenizer_path"
            )


def exporter(
    name: str,
    paths: RunPaths,
    manifest: Manifest,
    settings: GenerationSettings,
    pad_id: int | None,
    images: Callable[[], ImageInputs],
) -> Callable[[Callable[[], bool]], int]:
    """Writes one format of `generation.export` from the artifact; asks whether it was cancelled, returns rows.

    Raises:
        ConfigError: the rows cannot be written so; says what else there is.
        StorageError: there is no room.
        DamageError: the artifact is damaged.
    """
    target = paths.root / FILE_NAMES[name]
    options = ExportOptions(DataProtoOptions(pad_token_id=pad_id or 0, unscored=settings.export_unscored))

    def export(cancelled: Callable[[], bool]) -> int:
        try:
            return write_export(
                *(paths.artifact, name, target, manifest),
                root=paths.root,
                options=options,
                images=images,
                cancelled=cancelled,
            )
        except ConfigError as error:
            key = "generation.export_unscored, " if name == "dataproto" else ""
            raise ConfigError(
                f"{paths.artifact} is there with {file_rows(paths.artifact)} rows, but generation.export={name} "
                f"of it failed: {error}. Options: {key}rollstream export --format {name} (docs/export.md)"
            ) from error

    return export


def run_pad_id(run_dir: Path) -> int:
    """The padding token of the tokenizer that a run used; 0 where it has none.

    Raises:
        RunDirectoryError: no run directory.
        ConfigError: the run does not say it.
    """
    manifest = require_manifest(run_dir)
    if manifest.pad_token_id is None and manifest.identity.get("model.tokenizer", "") is not None:
        raise ConfigError(f"{run_dir / 'run.json'} has no pad_token_id, which pads: say it by --pad-token-id")
    return manifest.pad_token_id or 0
