"""Weights & Biases: figures of a run, and its trajectories as an artifact."""

import inspect
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollstream.errors import ConfigError
from rollstream.generation.tracking import Staged, TrackedRun
from rollstream.integrations.tracking.installed import check_installed

logger = logging.getLogger(__name__)

_WAIT_S = 3600
"""For W&B to have taken an artifact, after its bytes were sent; nothing is lost when it takes longer."""

_NO_RECORDS_OF_THE_PROCESS = {
    "console": "off",  # the terminal is the run's
    "silent": True,
    "x_disable_meta": True,  # the command line, which may hold a key, and the environment
    "disable_git": True,  # a remote's URL may hold one, too
    "disable_code": True,
}
"""W&B looks around in the process by itself; it is told what it is told."""


class WandbTracker:
    """A W&B run of its own, also where the process has one already; its id is the run's, so a resume goes on.

    Where its files lie: `WANDB_DIR`, or else `logs/` of the run directory.
    """

    def __init__(self) -> None:
        self._run: Any = None

    def check(self) -> None:
        """Raises `ConfigError` when W&B is not installed, or nobody is logged in and it is not offline."""
        check_installed("wandb", "trainer.logger=[wandb] or generation.upload_artifact")
        import wandb

        # Without a key it would ask for one, on a terminal that shows the run's progress.
        mode = os.environ.get("WANDB_MODE") or wandb.setup().settings.mode
        if mode == "online" and wandb.run is None and not _has_key():
            raise ConfigError(
                "nobody is logged in to W&B: `wandb login`, or a key in WANDB_API_KEY; or set "
                "WANDB_MODE=offline, and `wandb sync` later"
            )

    def open(self, run: TrackedRun) -> int | None:
        self._run = self._init(run, job_type="generation")
        # By default its charts are over what is done; its steps are seconds.
        self._run.define_metric("progress/done")
        self._run.define_metric("*", step_metric="progress/done")
        if not self._run.offline and self._run.url:  # to ask for it offline puts a warning on the terminal
            logger.info("W&B: %s", self._run.url)
        following = int(self._run.step)
        return following - 1 if following > 0 else None

    def log(self, figures: Mapping[str, float], *, step: int) -> None:
        self._run.log(dict(figures), step=step, commit=True)

    def close(self, *, succeeded: bool) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=0 if succeeded else 1)

    def abandon(self) -> None:
        """Keeps W&B from waiting, without an end, when the interpreter ends; a run of somebody else's may."""
        import wandb

        if wandb.run is not None:
            return
        # There is no public way to end without a wait. Its process ends with this one.
        connection = getattr(wandb.setup(), "_connection", None)
        forget_exit = getattr(connection, "_cleanup", None)
        if forget_exit is not None:
            forget_exit()

    def upload(self, run: TrackedRun, file: Path, name: str) -> str:
        """Logs `file` as artifact `name` of type `trajectories`; returns where it is.

        To the run that is active in this process, else to this tracker's, else to one that is opened for it.
        The file is read from the disk, and not held in memory.

        Raises:
            Exception: whatever W&B raises.
        """
        import wandb

        owned = None
        target = wandb.run or self._run
        if target is None:
            target = owned = self._init(run, job_type="upload")
        try:
            artifact = wandb.Artifact(
                name, type="trajectories", metadata={"run_id": run.run_id, "name": run.name}
            )
            # Offline, W&B keeps a copy until it is synced; else the file is read in place: it may be large.
            policy = "mutable" if target.offline else "immutable"
            artifact.add_file(str(file), name=file.name, policy=policy, skip_cache=True)
            logged = target.log_artifact(artifact, aliases=["latest", run.run_id[:8]])
            if target.offline:
                return Staged(f"staged offline; to upload it: wandb sync {Path(target.dir).parent}")
            logged.wait(timeout=_WAIT_S)
            return str(logged.qualified_name)
        finally:
            if owned is not None:
                owned.finish()

    def _init(self, run: TrackedRun, *, job_type: str) -> Any:
        import wandb

        known = wandb.Settings.model_fields
        settings = {key: value for key, value in _NO_RECORDS_OF_THE_PROCESS.items() if key in known}
        folder = run.run_dir / "logs"
        folder.mkdir(exist_ok=True)
        return wandb.init(
            project=run.project,
            name=run.name,
            id=run.run_id,
            resume="allow",
            reinit="create_new",
            job_type=job_type,
            config=dict(run.config),
            dir=None if os.environ.get("WANDB_DIR") else str(folder),
            settings=wandb.Settings(**settings),
        )


def _has_key() -> bool:
    """Whether there is a key, of the environment or a log-in. Asks nobody for one."""
    import wandb

    if os.environ.get("WANDB_API_KEY"):
        return True
    if "prompt" not in inspect.signature(wandb.login).parameters:  # before 0.31
        return wandb.api.api_key is not None
    try:
        return bool(wandb.login(prompt=False))
    except Exception:  # there is one, and nobody to say whether it is good: that shows when it is used
        return True
