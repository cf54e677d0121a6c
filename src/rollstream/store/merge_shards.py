"""Several shards of one run become one run directory: that of the run without shards.

    shard 0 of 2 ─┐   checked: same run, all there, finished, sound, nothing twice
    shard 1 of 2 ─┴─> .OUTPUT.merge.tmp/ (batches, failures, artifact) ──rename──> OUTPUT/

Scores of one name and reward are put together. The result has the rewards that are each shard's own.

The shards are locked and only read. Before the rename there is no OUTPUT; a merge that was killed leaves the
temporary folder, which the next one clears away. The result has an identity without `generation.shard`: the
run's own command, without it, continues there (with `generation.retry_failed`, say).
"""

import copy
import logging
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
from omegaconf import OmegaConf

from rollstream.errors import (
    ConfigError,
    DamageError,
    IdentityMismatchError,
    RunDirectoryError,
    StorageError,
)
from rollstream.store.arrow import column_values
from rollstream.store.batch import SCHEMA, batch_metadata, read_tables, write_tables_durably
from rollstream.store.journal import JournalFile, encode_frame, sync_folder, write_file_durably
from rollstream.store.lock import locked
from rollstream.store.manifest import (
    SHARD_IDENTITY,
    Manifest,
    check_reward,
    identity_differences,
    new_manifest,
    require_manifest,
    write_manifest,
)
from rollstream.store.merge import merge_batches, until
from rollstream.store.paths import RunPaths
from rollstream.store.records import RecordCodec
from rollstream.store.recovery import recover
from rollstream.store.run import Run
from rollstream.store.scores import (
    Rewards,
    SidecarKind,
    pass_folder,
    publish_sidecar,
    sidecar_names,
    sidecar_table,
)
from rollstream.store.streams import publish_stream
from rollstream.store.summary import read_status, write_checkpoint
from rollstream.store.validate import validate_run
from rollstream.untrusted import read_regular

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MergedRun:
    """What was merged."""

    output: Path
    shards: int
    completed: int
    """Rollouts."""
    failed: int
    """Rollouts."""
    rows: int
    """Trajectories."""


def merge_shards(
    roots: Sequence[Path],
    output: Path,
    *,
    cancelled: Callable[[], bool] = lambda: False,
) -> MergedRun:
    """Writes `output`, in bounded memory (some bytes a rollout).

    Args:
        roots: the shards' run directories, in any order.
        output: the run directory to make; must not exist, or be an empty folder.
        cancelled: asked between row groups.

    Raises:
        ConfigError: `output` is taken, or the directories are not the shards of one run, each once.
        IdentityMismatchError: they are shards of different runs.
        RunDirectoryError: no run directory, not finished, or a run is writing there.
        DamageError: a shard is not sound.
        StorageError: the disk is full.
        MergeCancelledError: `cancelled` said so.
    """
    _check_output(roots, output)
    with ExitStack() as locks:
        manifests = {root: require_manifest(root) for root in roots}
        for root in sorted(roots):
            locks.enter_context(locked(root))
        shards = _check_identities(manifests)
        total = sum(map(_check_finished, shards))
        _check_disjoint(shards)
        folder = output.absolute().with_name(f".{output.name}.merge.tmp")
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise StorageError(f"cannot write beside {output}: {error.strerror}") from error
        locks.enter_context(locked(folder))
        try:
            for left in folder.iterdir():
                if left.name != "run.lock":
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
            merged = _write(shards, folder, output, total, cancelled)
            sync_folder(folder)
            folder.rename(output)
            sync_folder(output.absolute().parent)
        except OSError as error:
            raise StorageError(f"cannot write {output}: {error.strerror or error}") from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return merged


def _check_output(roots: Sequence[Path], output: Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output {output} exists; name a folder that does not, or an empty one")
    if not output.absolute().parent.is_dir():
        raise ConfigError(f"--output {output}: there is no folder {output.absolute().parent}")
    places = [root.resolve() for root in roots]
    for place in places:
        if output.resolve().is_relative_to(place):
            raise ConfigError(f"--output {output} is inside the run directory {place}")
        if places.count(place) > 1:
            raise ConfigError(f"{place} is named twice")


def _check_identities(manifests: dict[Path, Manifest]) -> list[Run]:
    """The shards by number. Raises when they are not those of one run, each once."""
    by_name: dict[str, Path] = {}
    for root, manifest in manifests.items():
        name = manifest.identity.get(SHARD_IDENTITY)
        if name is None:
            raise ConfigError(f"{root} holds a whole run, not a shard of one (generation.shard=i/k)")
        if name in by_name:
            raise ConfigError(f"{by_name[name]} and {root} are both shard {name}")
        by_name[name] = root
    counts = {name.partition("/")[2] for name in by_name}
    if len(counts) != 1:
        raise ConfigError(f"the directories are shards of runs cut differently: {', '.join(sorted(by_name))}")
    wanted = [f"{number}/{count}" for count in counts for number in range(int(count))]
    missing = [name for name in wanted if name not in by_name]
    if missing:
        raise ConfigError(f"shards are missing: {', '.join(missing[:10])}{' …' * (len(missing) > 10)}")
    first, *others = roots = [by_name[name] for name in wanted]
    old = manifests[first]
    for root in others:
        new = manifests[root]
        differences = identity_differences(
            {**old.identity, SHARD_IDENTITY: None}, {**new.identity, SHARD_IDENTITY: None}
        )
        if differences:
            lines = "\n".join(f"  {key}: {before!r} and {after!r}" for key, before, after in differences)
            raise IdentityMismatchError(
                f"{first} and {root} are not shards of one run. What differs:\n{lines}", differences
            )
        check_reward(root, old, new)
        if new.versions != old.versions:
            logger.warning(
                "%s and %s were generated with different versions: %s and %s",
                first,
                root,
                old.versions,
                new.versions,
            )
    return [Run(root, manifests[root]) for root in roots]


def _check_finished(shard: Run) -> int:
    """The rollouts that a shard was to have; raises unless all are there, or have failed, and it is sound."""
    root, status = shard.root, read_status(shard.root)
    if not status.damage and not status.finished:
        total = "?" if status.total is None else status.total
        raise RunDirectoryError(
            f"{root}: {status.completed} of {total} rollouts done; the shard is unfinished. Run its "
            "`rollstream generate` to its end"
        )
    if status.artifact_rows and not status.damage:  # batches are gone: they are made anew of the artifact
        recover(shard.paths, shard.manifest)
    if problems := status.damage or validate_run(root).problems:
        raise DamageError(f"{root} is not sound: {problems[0]} (rollstream validate {root})")
    logger.info("%s: %d trajectories", root, status.rows)
    return status.total or 0


def _check_disjoint(shards: Sequence[Run]) -> None:
    """Raises when prompt rows stand in two shards."""
    seen = np.zeros(0, np.int64)
    for shard in shards:
        parts = [np.unique(column_values(table["index"])) for table in shard.rows(["index"])]
        here = np.unique(np.concatenate([np.zeros(0, np.int64), *parts]))
        both = np.intersect1d(seen, here, assume_unique=True)
        if len(both):
            raise DamageError(
                f"{len(both)} prompt rows of {shard.root} stand in another shard, too: {both[:5].tolist()} …"
            )
        seen = np.concatenate([seen, here])


def _write(
    shards: Sequence[Run], folder: Path, output: Path, total: int, cancelled: Callable[[], bool]
) -> MergedRun:
    paths = RunPaths(folder)
    paths.make_folders()
    manifest = _merged_manifest(shards[0].manifest, output)
    metadata = batch_metadata(manifest.run_id_bytes, manifest.logprobs)
    batches = [(shard, number) for shard in shards for number in shard.paths.batch_numbers()]
    for number, (shard, old) in enumerate(batches):
        tables = map(Rewards(shard.root).current, read_tables(shard.paths.batch(old)))
        write_tables_durably(paths.batch(number), until(tables, cancelled), metadata)
    codec, failures = RecordCodec(), list[bytes]()
    for shard in shards:
        for record in shard.failures():
            body = codec.encode_failure(record)
            failures.append(encode_frame(record.index, record.repeat, 0, body))
    if failures:
        journal = JournalFile(paths.failures / "000000.rsj", manifest.run_id_bytes)
        try:
            journal.append(b"".join(failures))
        finally:
            journal.close()
    write_file_durably(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(manifest.config)).encode())
    with suppress(FileNotFoundError):
        write_file_durably(paths.tokenizer, read_regular(shards[0].paths.tokenizer))
    write_manifest(folder, manifest)
    for kind in get_args(SidecarKind):
        _merge_sidecars(shards, folder, manifest, kind)
    state = Run(folder, manifest).state()
    if state.rows:
        merge_batches(paths, manifest.run_id_bytes, cancelled=cancelled)
    write_checkpoint(paths, manifest, state, total=total)
    return MergedRun(output, len(shards), state.keys.done, state.keys.failed, state.rows)


def _merge_sidecars(shards: Sequence[Run], folder: Path, manifest: Manifest, kind: SidecarKind) -> None:
    """Scores and streams go along, but for those of a name that stands for several rewards or models."""
    by_name: dict[str, list[Run]] = {}
    for shard in shards:
        for name in sidecar_names(shard.root, kind):
            by_name.setdefault(name, []).append(Run.open(pass_folder(shard.root, name, kind)))
    for name, passes in by_name.items():
        first, of_run = passes[0].manifest, {f"{kind}.run": manifest.run_id}
        identity = {**first.identity, **of_run}
        if any({**one.manifest.identity, **of_run} != identity for one in passes):
            logger.warning("the %s %r are of several makers in the shards: they are left out", kind, name)
            continue
        paths = RunPaths(pass_folder(folder, name, kind))
        paths.root.mkdir(parents=True)
        paths.make_folders()
        write_manifest(paths.root, msgspec.structs.replace(first, identity=identity))
        for number, one in enumerate(passes):
            metadata = batch_metadata(first.run_id_bytes)
            write_tables_durably(paths.batch(number), one.rows(SCHEMA.names), metadata)
        merge_batches(paths, first.run_id_bytes)
        table = sidecar_table(folder, name, kind)
        if kind == "scores":
            publish_sidecar(paths.artifact, table)
        else:
            publish_stream(paths.artifact, table, first)


def _merged_manifest(shard: Manifest, output: Path) -> Manifest:
    """The manifest of a shard's whole run, as a new run's."""
    config = copy.deepcopy(shard.config)
    config.setdefault("generation", {})["shard"] = None
    config.setdefault("trainer", {})["default_local_dir"] = str(output.absolute())
    identity = {key: value for key, value in shard.identity.items() if key != SHARD_IDENTITY}
    kept = {name: getattr(shard, name) for name in ("n", "dataset", "versions", "tools", "logprobs")}
    kept |= {"reward": shard.reward, "pad_token_id": shard.pad_token_id}
    return new_manifest(identity=identity, config=config, **kept)
