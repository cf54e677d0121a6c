"""Whether a server serves the model that is meant."""

import logging
from collections.abc import Iterable
from pathlib import PurePath

from rollstream.errors import EngineError

logger = logging.getLogger(__name__)

_HUB_FOLDER = "models--"
"""Begins a model's folder in Hugging Face's cache: `models--Qwen--Qwen2.5/snapshots/HASH`."""


def model_names(path: str) -> set[str]:
    """What somebody who has a model elsewhere may call it: its folder's name, its name on the hub."""
    parts = PurePath(path).parts
    hub = {part.rpartition("--")[2] for part in parts if part.startswith(_HUB_FOLDER)}
    return {*parts[-1:], *hub}


def check_served_model(server: str, served: Iterable[object], wanted: str | None, *, strict: bool) -> None:
    """Refuses a server of another model.

    Only names are compared: the same folder may lie elsewhere on another machine.

    Args:
        server: named in the error.
        served: paths or names under which the server knows its model; empty ones say nothing.
        wanted: `actor_rollout_ref.model.path`; None takes any.
        strict: whether it is an error, or only a warning.

    Raises:
        EngineError: none of the names is the one that is wanted.
    """
    said = [str(one) for one in served if one]
    if not wanted or not said or any(model_names(one) & model_names(wanted) for one in said):
        return
    text = f"{server} serves {said[0]!r}, but actor_rollout_ref.model.path is {wanted!r}"
    if strict:
        raise EngineError(
            f"{text}: its tokens would be another model's. If it is the same one under another name, "
            "set actor_rollout_ref.rollout.engine_kwargs.check_model=false"
        )
    logger.warning("%s", text)
