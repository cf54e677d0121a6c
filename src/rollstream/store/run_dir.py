"""The run directory, opened for writing: its lock, its manifest, its state."""

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from rollstream.errors import (
    ConfigError,
    DamageError,
    IdentityMismatchError,
    RunDirectoryError,
    StorageError,
)
from rollstream.store.batch import DamagedFileError, read_tables
from rollstream.store.journal import sync_folder, write_file_durably
from rollstream.store.keys import KeyStates, RunState
from rollstream.store.lock import RunLock, run_lock
from rollstream.store.manifest import Manifest, check_identity, check_reward, read_manifest, write_manifest
from rollstream.store.merge import Artifact, merge_batches
from rollstream.store.paths import RunPaths, forget_batches, missing_batches
from rollstream.store.recovery import copy_rollouts, quarantine_batch, recover
from rollstream.store.run import Run
from rollstream.trajectory import LogprobKind
from rollstream.untrusted import read_regular


class RunDirectory:
    """A run directory opened for writing: its lock is held until `close`."""

    def __init__(self, paths: RunPaths, manifest: Manifest, state: RunState, lock: RunLock) -> None:
        self.paths = paths
        self.manifest = manifest
        self.state = state
        self._lock = lock

    def note_logprobs(self, kind: LogprobKind | Literal["none"] | None) -> None:
        """Says in `run.json` what the log-probs are of that come from now on, if there are any.

        Raises:
            ConfigError: finished rollouts have the other kind: one dataset has one.
        """
        if kind in (None, "none") or kind == self.manifest.logprobs:
            return
        if self.manifest.logprobs is not None and (self.state.keys.done or self.state.turns):
            raise ConfigError(
                f"{self.paths.root} has {self.manifest.logprobs} log-probs, and its engine now gives {kind} ones "
                "(actor_rollout_ref.rollout.logprobs_mode; of servers, --logprobs-mode)"
            )
        self.manifest = msgspec.structs.replace(self.manifest, logprobs=kind)
        write_manifest(self.paths.root, self.manifest)

    def take_scores(self, name: str) -> None:
        """Makes scores the run's own rewards. Everything is in batches."""
        if name != self.manifest.scores:
            self.manifest = msgspec.structs.replace(self.manifest, scores=name)
            write_manifest(self.paths.root, self.manifest)
        self.state = recover(self.paths, self.manifest)

    def merge(self, *, keep_batches: bool = True, cancelled: Callable[[], bool] = lambda: False) -> int:
        """Merges the batches, in which everything is, into the artifact; returns its rows.

        Without `keep_batches` they are deleted then, and the artifact becomes the batch, by a hard link. A crash in
        between leaves the artifact, from which the next opening takes what has no batch.

        Raises:
            DamageError: a batch is damaged: it was moved away, and its rollouts are owed again.
            StorageError: the disk is full, or something is in no batch. What was done is safe.
            MergeCancelledError: `cancelled`, asked now and then, said so.
        """
        try:
            rows = merge_batches(self.paths, self.manifest.run_id_bytes, cancelled=cancelled)
        except DamagedFileError as error:
            kept, _ = quarantine_batch(self.paths, self.manifest, error.path)
            raise DamageError(f"{error}. It was moved to {kept}; run the same command once more.") from error
        if rows != self.state.rows:
            raise StorageError(
                f"{self.paths.root} has {self.state.rows} trajectories, but its batches {rows}: not everything "
                "could be sealed. What was counted as done is safe; run the same command again."
            )
        if not keep_batches:
            artifact, numbers = Artifact(self.paths, self.manifest.run_id), self.paths.batch_numbers()
            for number in artifact.holds(numbers) - artifact.links(numbers):
                self.paths.batch(number).unlink()
            sync_folder(self.paths.batches)
            forget_batches(self.paths, missing_batches(self.paths))
            self.state = recover(self.paths, self.manifest)
        return rows

    def forget(self, keys: KeyStates, aside: Path | None = None) -> None:
        """Takes the rollouts that are done in `keys` out of the batches, in which everything is: they are owed again.

        `aside` is a folder for the batches as they were. A crash in between leaves rollouts in two batches: those that
        were to be taken out are still there.
        """
        self.paths.artifact.unlink(missing_ok=True)
        numbers = list[int]()
        for number in self.paths.batch_numbers():
            path = self.paths.batch(number)
            if not any(keys.are_done(table).any() for table in read_tables(path, ["index", "repeat"])):
                continue
            numbers.append(number)
            copy_rollouts(self.paths, self.manifest, path, keys)
            if aside is None:
                path.unlink()
            else:
                aside.mkdir(exist_ok=True)
                path.rename(aside / f"{time.time_ns()}-{path.name}")
        forget_batches(self.paths, numbers)
        self.state = recover(self.paths, self.manifest)

    def close(self) -> None:
        """Gives the lock back. Idempotent."""
        self._lock.release()

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def lock_run(root: Path) -> RunLock:
    """Creates the folder if need be and takes its lock. Raises `RunDirectoryError`."""
    try:
        created = [folder for folder in (root, *root.parents) if not folder.exists()]
        root.mkdir(parents=True, exist_ok=True)
        for folder in created:
            sync_folder(folder.parent)
        lock = run_lock(root)
        lock.acquire()
    except (FileExistsError, NotADirectoryError) as error:
        blocking = next(path for path in (root, *root.parents) if path.exists() and not path.is_dir())
        raise RunDirectoryError(
            f"{blocking} is a file; trainer.default_local_dir ({root}) must be a folder"
        ) from error
    except OSError as error:
        raise RunDirectoryError(f"cannot write to {root}: {error.strerror}") from error
    return lock


def open_run(
    lock: RunLock,
    root: Path,
    wanted: Manifest,
    *,
    config_yaml: str,
    tokenizer: bytes | None = None,
) -> RunDirectory:
    """Opens a run for writing: a new one, or the one of the same identity that is there.

    Args:
        lock: held on `root`; owned by the result from here on, released if this raises.
        root: the run directory.
        wanted: manifest of the run asked for; its run id is used for a new run only.
        config_yaml: the resolved configuration, written to `config.yaml` of a new run.
        tokenizer: content of `tokenizer.json`, which the run keeps so that its texts can be read anywhere.

    Raises:
        IdentityMismatchError: the folder holds a run of another identity; nothing was touched.
        RunDirectoryError: not usable.
        StorageError: disk full.
    """
    paths = RunPaths(root)
    try:
        manifest = read_manifest(root)
        if manifest is None or not paths.has_data():
            # A run that never got to its first rollout (its engine refused, say) holds nothing to protect.
            refuse_foreign_data(paths)
            _create(paths, wanted, config_yaml)
            manifest = wanted
        else:
            check_identity(root, manifest.identity, wanted.identity, extend=False)
            check_reward(root, manifest, wanted)
        if tokenizer is not None and _read(paths.tokenizer, len(tokenizer)) != tokenizer:
            write_file_durably(paths.tokenizer, tokenizer)
        state = recover(paths, manifest)
    except OSError as error:
        lock.release()
        raise StorageError(f"cannot write to {root}: {error.strerror}") from error
    except BaseException:
        lock.release()
        raise
    return RunDirectory(paths, manifest, state, lock)


def _read(path: Path, most: int) -> bytes | None:
    with suppress(OSError):
        return read_regular(path, most)
    return None


def refuse_foreign_data(paths: RunPaths) -> None:
    """A folder with batches or journals but no manifest is never taken over."""
    if paths.journal_numbers() or paths.batch_numbers() or paths.artifact.exists():
        raise RunDirectoryError(
            f"{paths.root} holds batches or journals but no run.json. Restore run.json from a copy, "
            "or choose another --output (trainer.default_local_dir)."
        )


def _create(paths: RunPaths, manifest: Manifest, config_yaml: str) -> None:
    paths.make_folders()
    for kind in ("scores", "streams"):
        if (sidecars := paths.root / kind).is_dir():  # of a run that was here before
            sidecars.rename(paths.logs / f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    paths.tokenizer.unlink(missing_ok=True)
    write_file_durably(paths.root / "config.yaml", config_yaml.encode())
    write_manifest(paths.root, manifest)


def extend_run(
    root: Path, wanted: Manifest, prompt_keys: Callable[[], Iterable[str | None]], config_yaml: str
) -> None:
    """Gives the run in `root` the dataset and the `n` of `wanted`. The lock must be held; nothing to do for a new run.

    Nothing that is done is touched: only the manifest and the configuration change.

    Args:
        root: the run directory.
        wanted: the manifest asked for; may differ from the run's in its dataset rows and in a larger `n` only.
        prompt_keys: the new dataset's prompt keys by index; None for a row that is not to be visited.
        config_yaml: the resolved configuration.

    Raises:
        IdentityMismatchError: more than that differs, or a row with a finished or failed rollout stands elsewhere
            now; nothing was touched.
    """
    manifest = read_manifest(root)
    if manifest is None or not RunPaths(root).has_data():
        return
    if not check_identity(root, manifest.identity, wanted.identity, extend=True):
        return
    check_positions(root, manifest, prompt_keys())
    write_file_durably(root / "config.yaml", config_yaml.encode())
    extended = msgspec.structs.replace(
        wanted,
        run_id=manifest.run_id,
        created=manifest.created,
        logprobs=manifest.logprobs,
        scores=manifest.scores,
        tools={**manifest.tools, **wanted.tools},
    )
    write_manifest(root, extended)


def check_positions(root: Path, manifest: Manifest, prompt_keys: Iterable[str | None]) -> None:
    """Raises `IdentityMismatchError` unless each row with a finished or failed rollout stands where it stood.

    A row that has only failed may also be one that is not visited any more, as an overlong prompt.
    """
    keys, run = dict[int, str](), Run(root, manifest)
    for table in run.rows(["index", "prompt_key"]):
        keys.update(zip(table["index"].to_pylist(), table["prompt_key"].to_pylist(), strict=True))
    failed = {one.index: one.prompt_key for one in run.failures() if one.index not in keys}
    keys |= failed
    for index, key in enumerate(prompt_keys):
        if keys.get(index) == key or (key is None and index in failed):
            keys.pop(index, None)
    if keys:
        first = min(keys)
        raise IdentityMismatchError(
            f"{root}: prompt row {first} and {len(keys) - 1} others have rollouts and stand elsewhere in the dataset "
            "now, or not at all. A run is extended by rows that are appended; nothing was touched",
            [(f"prompt row {first}", keys[first], None)],
        )
