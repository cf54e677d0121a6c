"""The exports of a run: what they need besides the run directory."""

import logging
from collections.abc import Callable, Collection
from typing import Any

from rollstream.config.settings import GenerationSettings
from rollstream.errors import ConfigError
from rollstream.store.batch import file_rows
from rollstream.store.export.dataproto import ImageInputs, check_packages
from rollstream.store.export.format import export_format, file_name
from rollstream.store.export.run import write_export
from rollstream.store.manifest import Manifest
from rollstream.store.paths import RunPaths

logger = logging.getLogger(__name__)


def check_exports(names: Collection[str], *, has_ids: bool = True) -> None:
    """Raises `ConfigError` when an export of `generation.export` could not be written at the end.

    Args:
        names: the formats.
        has_ids: whether the run has a tokenizer.
    """
    for name in names:
        export_format(name)
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
    target = paths.root / file_name(name)
    options: dict[str, Any] = {}
    if name == "dataproto":
        options = {"pad_token_id": pad_id or 0, "unscored": settings.export_unscored}

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
