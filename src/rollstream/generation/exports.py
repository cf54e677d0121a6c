"""The exports of a run: what they need besides the run directory."""

import logging
from collections.abc import Collection

from rollstream.errors import ConfigError
from rollstream.store.export.dataproto import check_packages
from rollstream.store.export.format import export_format

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
