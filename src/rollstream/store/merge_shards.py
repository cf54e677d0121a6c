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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from rollstream.store.batch import batch_metadata, read_keys, read_tables, write_tables_durably
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
    ScoreFacts,
    ScorePaths,
    copy_scores,
    read_facts,
    score_folder,
)
from rollstream.store.summary import RunStatus, read_status, write_checkpoint
from rollstream.store.validate import validate_run
from rollstream.trajectory import Failure
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


@dataclass(frozen=True, slots=True)
class _Shard:
    root: Path
    manifest: Manifest
    status: RunStatus
    scores: dict[str, ScoreFacts]
    """What it was scored anew by, by name."""


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
        for root in sorted(roots):
            locks.enter_context(locked(root))
        shards = _check_shards(roots)
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
            merged = _write(shards, folder, output, cancelled)
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


def _check_shards(roots: Sequence[Path]) -> list[_Shard]:
    """The shards by number. Raises when they are not one whole run."""
    manifests = {root: require_manifest(root) for root in roots}
    names = {root: one.identity.get(SHARD_IDENTITY) for root, one in manifests.items()}
    by_number = _by_number(names)
    first = by_number[0]
    for root in by_number[1:]:
        old, new = manifests[first], manifests[root]
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
                *(first, root, old.versions, new.versions),
            )
    shards = [_Shard(root, manifests[root], _finished(root), _scores(root)) for root in by_number]
    for shard in shards:
        if shard.status.artifact_rows:  # batches are gone: they are made anew of the artifact
            recover(RunPaths(shard.root), shard.manifest)
        result = validate_run(shard.root)
        if not result.sound:
            raise DamageError(
                f"{shard.root} is not sound: {result.problems[0]} (rollstream validate {shard.root})"
            )
    _check_disjoint(shards)
    return shards


def _scores(root: Path) -> dict[str, ScoreFacts]:
    folder = score_folder(root)
    found = {path.stem: read_facts(ScorePaths(folder, path.stem).facts) for path in folder.glob("*.rsj")}
    return {name: facts for name, facts in found.items() if facts is not None}


def _by_number(names: Mapping[Path, Any]) -> list[Path]:
    """The directories by the number of their shard; raises unless each of `k` is there once."""
    found: dict[str, Path] = {}
    for root, name in names.items():
        if name is None:
            raise ConfigError(f"{root} holds a whole run, not a shard of one (generation.shard=i/k)")
        if name in found:
            raise ConfigError(f"{found[name]} and {root} are both shard {name}")
        found[name] = root
    counts = {name.partition("/")[2] for name in found}
    if len(counts) != 1:
        raise ConfigError(
            "the directories are shards of runs cut differently: "
            + ", ".join(f"{root} is {name}" for root, name in names.items())
        )
    wanted = [f"{number}/{count}" for count in counts for number in range(int(count))]
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ConfigError(f"shards are missing: {', '.join(missing[:10])}{' …' * (len(missing) > 10)}")
    return [found[name] for name in wanted]


def _finished(root: Path) -> RunStatus:
    status = read_status(root)
    if status.damage:
        raise DamageError(f"{root}: {status.damage[0]} (rollstream validate {root})")
    if status.total is None or not status.finished:
        total = "?" if status.total is None else status.total
        raise RunDirectoryError(
            f"{root}: {status.completed} of {total} rollouts done; the shard is unfinished. Run its "
            "`rollstream generate` to its end"
        )
    return status


def _check_disjoint(shards: Sequence[_Shard]) -> None:
    """Raises when prompt rows stand in two shards."""
    seen: np.ndarray[Any, np.dtype[np.int64]] = np.zeros(0, np.int64)
    for shard in shards:
        paths = RunPaths(shard.root)
        batches = map(paths.batch, paths.batch_numbers())
        parts = [np.unique(read_keys(batch, shard.manifest.run_id)["index"]) for batch in batches]
        here = np.unique(np.concatenate(parts)) if parts else np.zeros(0, np.int64)
        both = np.intersect1d(seen, here, assume_unique=True)
        if len(both):
            raise DamageError(
                f"{len(both)} prompt rows of {shard.root} stand in another shard, too: {both[:5].tolist()} …"
            )
        seen = np.concatenate([seen, here])


def _write(
    shards: Sequence[_Shard],
    folder: Path,
    output: Path,
    cancelled: Callable[[], bool],
) -> MergedRun:
    paths = RunPaths(folder)
    for made in (paths.journals, paths.batches, paths.failures, paths.logs):
        made.mkdir()
    manifest = _merged_manifest(shards[0].manifest, output)
    metadata = batch_metadata(manifest.run_id_bytes, manifest.logprobs)
    number = 0
    for shard in shards:
        logger.info("reading %s: %d trajectories", shard.root, shard.status.rows)
        source, rewards = RunPaths(shard.root), Rewards(shard.root)
        for old in source.batch_numbers():
            tables = until(map(rewards.current, read_tables(source.batch(old))), cancelled)
            write_tables_durably(paths.batch(number), tables, metadata)
            number += 1
    if any(shard.status.failed for shard in shards):
        journal = JournalFile(paths.failures / "000000.rsj", manifest.run_id_bytes)
        try:
            for shard in shards:
                for frame in _failure_frames(shard.root):
                    journal.append(frame)
            journal.sync()
        finally:
            journal.close()
    write_file_durably(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(manifest.config)).encode())
    with suppress(FileNotFoundError):
        write_file_durably(paths.tokenizer, read_regular(RunPaths(shards[0].root).tokenizer))
    write_manifest(folder, manifest)
    _merge_scores(shards, folder, manifest)
    state = Run(folder, manifest).state()
    if state.rows:
        merge_batches(paths, manifest.run_id_bytes, cancelled=cancelled)
    total = sum(shard.status.total or 0 for shard in shards)
    write_checkpoint(paths, manifest, state, total=total)
    return MergedRun(output, len(shards), state.keys.done, state.keys.failed, state.rows)


def _merge_scores(shards: Sequence[_Shard], folder: Path, manifest: Manifest) -> None:
    """Scores go along, but for those of a name that stands for several rewards."""
    for name in sorted({name for shard in shards for name in shard.scores}):
        having = [shard for shard in shards if name in shard.scores]
        facts = having[0].scores[name]
        if any(shard.scores[name].digest != facts.digest for shard in having):
            logger.warning("the scores %r are of several rewards in the shards: they are left out", name)
            continue
        score_folder(folder).mkdir(exist_ok=True)
        copy_scores(
            [ScorePaths(score_folder(shard.root), name) for shard in having],
            ScorePaths(score_folder(folder), name),
            msgspec.structs.replace(facts, run_id=manifest.run_id),
        )


def _merged_manifest(shard: Manifest, output: Path) -> Manifest:
    config = copy.deepcopy(shard.config)
    config.setdefault("generation", {})["shard"] = None
    config.setdefault("trainer", {})["default_local_dir"] = str(output.absolute())
    return new_manifest(
        n=shard.n,
        identity={key: value for key, value in shard.identity.items() if key != SHARD_IDENTITY},
        dataset=shard.dataset,
        versions=shard.versions,
        config=config,
        tools=shard.tools,
        logprobs=shard.logprobs,
        pad_token_id=shard.pad_token_id,
        reward=shard.reward,
    )


def _failure_frames(root: Path) -> Iterator[bytes]:
    codec = RecordCodec()
    for record in Run.open(root).failures():
        body = codec.encode_failure(Failure(**msgspec.structs.asdict(record)))
        yield encode_frame(record.index, record.repeat, 0, body)
