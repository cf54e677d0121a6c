"""Trackers: who is told how a run goes. Each is what `rollstream.generation.trackers.Tracker` promises.

Their packages are imported when a tracker is checked, not before.
"""

import atexit
import contextlib
import errno
import importlib
import importlib.util
import inspect
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, ClassVar

import orjson

from rollstream.errors import ConfigError
from rollstream.generation.trackers import Staged, TrackedRun, Tracker

logger = logging.getLogger(__name__)


class JsonLinesTracker(Tracker):
    """Appends a line a report to `logs/metrics.jsonl` of the run directory: `step`, `time`, the figures.

    For scripts, and where no tracker is at hand. A line is written whole and at once; a kill leaves at most a
    torn last line, which the next process ends.
    """

    _TAIL_BYTES = 1 << 16
    """Read to find the last line: a line has some 2 KB."""

    _file: IO[bytes]

    def open(self, run: TrackedRun) -> int | None:
        path = run.run_dir / "logs" / "metrics.jsonl"
        path.parent.mkdir(exist_ok=True)
        self._file = path.open("ab+", buffering=0)
        self._file.seek(max(0, self._file.seek(0, os.SEEK_END) - self._TAIL_BYTES))
        lines = self._file.read().split(b"\n")
        if lines[-1]:
            self._file.write(b"\n")
        for line in reversed(lines):
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a torn line, or not ours
                return int(orjson.loads(line)["step"])
        return None

    def log(self, figures: Mapping[str, float], *, step: int) -> None:
        line = {"step": step, "time": round(time.time(), 3), **figures}
        data = orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n"
        if self._file.write(data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file.name)

    def close(self, *, succeeded: bool) -> None:
        self._file.close()


class PackageTracker(Tracker):
    """A tracker by a package, whose extra has its name; `_run` is what the package calls a run."""

    package: ClassVar[str]
    _run: Any = None

    def check(self) -> None:
        install = f"pip install 'rollstream[{self.package}]'"
        spec = importlib.util.find_spec(self.package)
        # A folder of that name, as W&B leaves one where it ran, is no package.
        if spec is None or spec.origin is None:
            raise ConfigError(
                f"tracker {self.package} is not installed here: {install}, or leave it out of trainer.logger"
            )
        try:
            importlib.import_module(self.package)
        except Exception as error:
            raise ConfigError(
                f"tracker {self.package} cannot be imported ({type(error).__name__}: {error}): {install} --upgrade"
            ) from error

    def log(self, figures: Mapping[str, float], *, step: int) -> None:
        self._run.log(dict(figures), step=step)


class TensorBoardTracker(PackageTracker):
    """Writes scalars into `logs/tensorboard` of the run directory: no torch, no TensorFlow.

    With `TENSORBOARD_DIR` in the environment, into `<project>/<name>-<run id>` below that, so that many runs
    are shown side by side.
    """

    package = "tensorboard"

    def open(self, run: TrackedRun) -> int | None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = run.run_dir / "logs" / "tensorboard"
        if shared := os.environ.get("TENSORBOARD_DIR"):
            folder = Path(shared) / run.project / f"{run.name}-{run.run_id[:8]}"
        self._run = EventFileWriter(str(folder))
        return None

    def log(self, figures: Mapping[str, float], *, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in figures.items()]
        self._run.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        # Its own thread writes now and then, and keeps quiet about a full disk: so it is asked each time.
        self._run.flush()

    def close(self, *, succeeded: bool) -> None:
        self._run.close()


class TrackioTracker(PackageTracker):
    """A run of the project `trainer.project_name`, named after the experiment and the run's id.

    It is kept in a database of one's own, by `TRACKIO_DIR`; or in a Space, as Trackio's environment says.
    """

    package = "trackio"

    def open(self, run: TrackedRun) -> int | None:
        import trackio

        self._run = trackio.init(
            project=run.project,
            name=f"{run.name}-{run.run_id[:8]}",
            config=dict(run.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        # That it goes on after the last step of a resumed run is known to it alone.
        following = getattr(self._run, "_next_step", None)
        return following - 1 if isinstance(following, int) and following > 0 else None

    def close(self, *, succeeded: bool) -> None:
        self._run.finish()


class MlflowTracker(PackageTracker):
    """A run of the MLflow experiment `trainer.project_name`, found again by a tag with the run's id.

    Where it is kept: as MLflow's environment says, by default `mlflow.db` in the working directory.
    """

    package = "mlflow"
    _TAG = "rollstream.run_id"
    _PARAMS_AT_ONCE, _PARAM_CHARACTERS = 100, 500
    """Limits of its servers, old ones included."""

    def open(self, run: TrackedRun) -> int | None:
        from mlflow import MlflowClient
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        client = self._client = MlflowClient()
        with contextlib.suppress(MlflowException):  # it is there, or another shard makes it
            client.create_experiment(run.project)
        experiments = [client.get_experiment_by_name(run.project).experiment_id]
        if known := client.search_runs(experiments, f"tags.`{self._TAG}` = '{run.run_id}'"):
            self._run = known[0].info.run_id
            client.update_run(self._run, "RUNNING")
            points = client.get_metric_history(self._run, "progress/done")
            return max((point.step for point in points), default=None)
        created = client.create_run(experiments[0], tags={self._TAG: run.run_id}, run_name=run.name)
        self._run = created.info.run_id
        leaves = _leaves(run.config)
        params = [Param(self._name(key), str(value)[: self._PARAM_CHARACTERS]) for key, value in leaves]
        for first in range(0, len(params), self._PARAMS_AT_ONCE):
            client.log_batch(self._run, params=params[first : first + self._PARAMS_AT_ONCE])
        return None

    def log(self, figures: Mapping[str, float], *, step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        points = [Metric(self._name(name), float(value), now, step) for name, value in figures.items()]
        self._client.log_batch(self._run, metrics=points)

    def close(self, *, succeeded: bool) -> None:
        self._client.set_terminated(self._run, "FINISHED" if succeeded else "FAILED")

    @staticmethod
    def _name(name: str) -> str:
        """The name in the characters that its stores take."""
        return re.sub(r"[^\w\-. /]", "_", name)


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


class SwanlabTracker(PackageTracker):
    """A SwanLab run whose id is the run's, so that a resume goes on; offline each process leaves a folder.

    Where its files lie: as SwanLab's environment says, or else `logs/swanlab` of the run directory.
    """

    package = "swanlab"

    def open(self, run: TrackedRun) -> int | None:
        import swanlab

        # It looks around in the process, and takes over the terminal, unless it is told not to.
        looks = swanlab.Settings.Probe.model_fields
        settings = swanlab.Settings(
            interactive=False,  # without a key it would ask for one
            terminal={"proxy_type": "none"},
            probe={name: False for name, about in looks.items() if about.annotation is bool},
        )
        has_folder = any(map(os.environ.get, ("SWANLAB_LOG_DIR", "SWANLAB_LOGDIR")))
        self._run = swanlab.init(
            project=re.sub(r"[^0-9a-zA-Z_\-+.]", "-", run.project),
            name=run.name,
            id=run.run_id,
            resume="allow",
            config=dict(run.config),
            log_dir=None if has_folder else run.run_dir / "logs" / "swanlab",
            settings=settings,
        )
        return None

    def close(self, *, succeeded: bool) -> None:
        if succeeded:
            self._run.finish("success")
        else:
            self._run.finish("crashed", "the run ended with an error")

    def abandon(self) -> None:
        """Keeps it from sending the rest when the interpreter ends: there is no public way to."""
        if (at_exit := getattr(self._run, "_handle_atexit", None)) is not None:
            atexit.unregister(at_exit)


class WandbTracker(PackageTracker):
    """A W&B run of its own, also where the process has one already; its id is the run's, so a resume goes on.

    Where its files lie: `WANDB_DIR`, or else `logs/` of the run directory.
    """

    package = "wandb"
    _WAIT_S = 3600
    """For W&B to have taken an artifact, after its bytes were sent; nothing is lost when it takes longer."""

    _NO_RECORDS_OF_THE_PROCESS: ClassVar = {
        "console": "off",  # the terminal is the run's
        "silent": True,
        "x_disable_meta": True,  # the command line, which may hold a key, and the environment
        "disable_git": True,  # a remote's URL may hold one, too
        "disable_code": True,
    }
    """Settings that keep W&B from looking around in the process."""

    def check_login(self) -> None:
        import wandb

        # Without a key it would ask for one, on a terminal that shows the run's progress.
        mode = os.environ.get("WANDB_MODE") or wandb.setup().settings.mode
        if mode == "online" and wandb.run is None and not _has_key():
            raise ConfigError(
                "nobody is logged in to W&B: `wandb login`, or a key in WANDB_API_KEY; or set "
                "WANDB_MODE=offline, and `wandb sync` later"
            )

    def open(self, run: TrackedRun) -> int | None:
        self.check_login()
        self._run = self._init(run, job_type="generation")
        # By default its charts are over what is done; its steps are seconds.
        self._run.define_metric("progress/done")
        self._run.define_metric("*", step_metric="progress/done")
        if not self._run.offline and self._run.url:  # to ask for it offline puts a warning on the terminal
            logger.info("W&B: %s", self._run.url)
        return int(self._run.step) - 1 if self._run.step > 0 else None

    def log(self, figures: Mapping[str, float], *, step: int) -> None:
        self._run.log(dict(figures), step=step, commit=True)

    def close(self, *, succeeded: bool) -> None:
        run, self._run = self._run, None
        run.finish(exit_code=0 if succeeded else 1)

    def abandon(self) -> None:
        """Keeps W&B from waiting, without an end, when the interpreter ends; a run of somebody else's may."""
        import wandb

        # There is no public way to end without a wait. Its process ends with this one.
        forget_exit = getattr(getattr(wandb.setup(), "_connection", None), "_cleanup", None)
        if wandb.run is None and forget_exit is not None:
            forget_exit()

    def upload(self, run: TrackedRun, file: Path, name: str) -> str:
        """Logs `file` as artifact `name` of type `trajectories`; returns where it is.

        To the run that is active in this process, else to this tracker's, else to one that is opened for it.
        The file is read from the disk, and not held in memory.

        Raises:
            Exception: whatever W&B raises.
        """
        import wandb

        active = wandb.run or self._run
        if active is None and (os.environ.get("WANDB_MODE") or wandb.setup().settings.mode) == "offline":
            # Offline a run's folder is named by the second: one that has just ended must not be written over.
            time.sleep(1.0 - time.time() % 1.0)
        target = active or self._init(run, job_type="upload")
        try:
            about = {"run_id": run.run_id, "name": run.name}
            artifact = wandb.Artifact(name, type="trajectories", metadata=about)
            # Offline, W&B keeps a copy until it is synced; else the file is read in place: it may be large.
            policy = "mutable" if target.offline else "immutable"
            artifact.add_file(str(file), name=file.name, policy=policy, skip_cache=True)
            logged = target.log_artifact(artifact, aliases=["latest", run.run_id[:8]])
            if target.offline:
                return Staged(f"staged offline; to upload it: wandb sync {Path(target.dir).parent}")
            logged.wait(timeout=self._WAIT_S)
            return str(logged.qualified_name)
        finally:
            if active is None:
                target.finish()

    def _init(self, run: TrackedRun, *, job_type: str) -> Any:
        import wandb

        known = wandb.Settings.model_fields
        settings = {key: value for key, value in self._NO_RECORDS_OF_THE_PROCESS.items() if key in known}
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
