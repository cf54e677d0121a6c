"""Extending: a run goes on with a dataset that grew, shrank or was reordered (`generation.resume=extend`).

What was done stays with its prompt row, found by content hash (prompt key). Where a row stands at another
position now, its rollouts are renumbered; rows with the same content are matched in order of position.
Rollouts of rows that are gone, or not selected any more, leave the run; their batches are kept in
`replaced/`.

When nothing moves (rows were only appended), only the manifest changes. Otherwise everything is written
anew beside the old, and one rename makes it count:

    extend.tmp/  --rename-->  extend.ready/  --finish_extend-->  batches/, failed/, run.json, config.yaml

A crash before the rename leaves the old run, a crash after it is finished by the next opening.
"""

import logging
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import orjson
import pyarrow as pa

from rollstream.errors import DamageError, StorageError
from rollstream.store.batch import DamagedFileError, read_tables, write_table_durably
from rollstream.store.journal import (
    ScanReport,
    encode_file_header,
    encode_frame,
    scan,
    sync_folder,
    write_file_durably,
)
from rollstream.store.manifest import Manifest, check_identity, read_manifest, write_manifest
from rollstream.store.paths import RunPaths, set_aside
from rollstream.store.records import RecordCodec
from rollstream.store.recovery import recover
from rollstream.store.sealing import batch_metadata, seal_journal
from rollstream.trajectory import Failure

logger = logging.getLogger(__name__)


def extend_run(
    root: Path, wanted: Manifest, prompt_keys: Callable[[], Iterable[str | None]], config_yaml: str
) -> None:
    """Gives the run in `root` the dataset of `wanted`. The lock must be held; nothing to do for a new run.

    Args:
        root: the run directory.
        wanted: the manifest asked for; may differ from the run's in its dataset rows only.
        prompt_keys: the new dataset's prompt keys by index; None for a row that is not to be visited.
        config_yaml: the resolved configuration.

    Raises:
        IdentityMismatchError: more than the dataset differs; nothing was touched.
        DamageError: a batch is damaged; it was kept aside, and the run is as it was otherwise.
        StorageError: the disk is full; the run is as it was.
    """
    manifest = read_manifest(root)
    if manifest is None or not RunPaths(root).has_data():
        return
    if not check_identity(root, manifest.identity, wanted.identity, extend=True):
        return
    new = msgspec.structs.replace(wanted, run_id=manifest.run_id, created=manifest.created)
    paths = RunPaths(root)
    try:
        state = recover(paths, manifest)
        open_journals = [] if state.open_journal is None else [state.open_journal]
        for number in [*state.unsealed, *open_journals]:
            seal_journal(paths.journal(number), paths.batch(number), manifest.run_id_bytes)
            paths.journal(number).unlink()
        sync_folder(paths.journals)
        moved = _match(_old_keys(paths, manifest), prompt_keys())
        if all(old == target for old, target in moved.items()):
            write_file_durably(root / "config.yaml", config_yaml.encode())
            write_manifest(root, new)
            return
        gone = sum(target is None for target in moved.values())
        if gone:
            logger.warning(
                "%d of %d prompt rows with finished rollouts are not in the dataset any more; their rollouts "
                "leave the run and are kept in %s",
                *(gone, len(moved), root / "replaced"),
            )
        _rewrite(paths, manifest, new, moved, config_yaml)
        finish_extend(root)
    except DamagedFileError as error:
        kept = set_aside(paths, error.path)
        raise DamageError(
            f"{error}. It was kept aside as {kept}; its rollouts are owed again: run the same command "
            "once more."
        ) from error
    except OSError as error:
        raise StorageError(
            f"cannot extend {root}: {error.strerror}; nothing was lost. Free space and run the same command "
            "again."
        ) from error


def finish_extend(root: Path) -> None:
    """Puts a rewritten run in place; resumes where a crash left it. The lock must be held."""
    ready, temporary = root / "extend.ready", root / "extend.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    if not ready.is_dir():
        return
    replaced = root / "replaced" / orjson.loads((ready / "name.json").read_bytes())["name"]
    replaced.mkdir(parents=True, exist_ok=True)
    for name in ("batches", "failed"):
        if (ready / name).is_dir():
            if (root / name).is_dir() and not (replaced / name).exists():
                (root / name).rename(replaced / name)
            (ready / name).rename(root / name)
    for name in ("config.yaml", "run.json"):
        if (ready / name).exists():
            (ready / name).rename(root / name)
    sync_folder(root)
    ready.rename(temporary)  # first: half deleted, it would look like one that is ready
    sync_folder(root)
    shutil.rmtree(temporary)


def _old_keys(paths: RunPaths, manifest: Manifest) -> dict[int, str]:
    """Prompt key of every row with a finished rollout, by index."""
    keys: dict[int, str] = {}
    for number in paths.batch_numbers():
        for table in read_tables(paths.batch(number), ["index", "prompt_key"]):
            keys.update(zip(table["index"].to_pylist(), table["prompt_key"].to_pylist(), strict=True))
    codec = RecordCodec()
    for path in paths.failure_files():
        for frame in scan(path, manifest.run_id_bytes, ScanReport()):
            keys.setdefault(frame.index, codec.decode_failure(frame.body).prompt_key)
    return keys


def _match(old: dict[int, str], new_keys: Iterable[str | None]) -> dict[int, int | None]:
    """New index of every old one, None for a row that is gone.

    A row that still stands at its position stays there; others go to the first free positions of their
    content.
    """
    wanted = set(old.values())
    places: dict[str, list[int]] = defaultdict(list)
    staying: set[int] = set()
    for index, key in enumerate(new_keys):
        if key is not None and key in wanted:
            if old.get(index) == key:
                staying.add(index)
            else:
                places[key].append(index)
    free = {key: iter(indices) for key, indices in places.items()}
    return {
        index: index if index in staying else next(free.get(old[index], iter(())), None)
        for index in sorted(old)
    }


def _rewrite(
    paths: RunPaths, manifest: Manifest, new: Manifest, moved: dict[int, int | None], config_yaml: str
) -> None:
    temporary = paths.root / "extend.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    target = RunPaths(temporary)
    target.batches.mkdir(parents=True)
    target.failures.mkdir()
    metadata = batch_metadata(manifest.run_id_bytes)
    for number in paths.batch_numbers():
        table = _renumber(pa.concat_tables(read_tables(paths.batch(number))), moved)
        if len(table):
            write_table_durably(target.batch(number), table, metadata)
    failures = b"".join(_moved_failures(paths, manifest, moved))
    if failures:
        write_file_durably(
            target.failures / "000000.rsj", encode_file_header(manifest.run_id_bytes) + failures
        )
    write_file_durably(temporary / "config.yaml", config_yaml.encode())
    write_manifest(temporary, new)
    taken = {path.name for path in (paths.root / "replaced").glob("*")}
    name = next(name for name in (f"{count:06d}" for count in range(len(taken) + 1)) if name not in taken)
    write_file_durably(temporary / "name.json", orjson.dumps({"name": name}))
    sync_folder(temporary)
    temporary.rename(paths.root / "extend.ready")
    sync_folder(paths.root)


def _renumber(table: pa.Table, moved: dict[int, int | None]) -> pa.Table:
    targets = [moved[index] for index in table["index"].to_pylist()]
    kept = table.filter(pa.array([target is not None for target in targets]))
    indices = pa.array([target for target in targets if target is not None], pa.int64())
    kept = kept.set_column(0, kept.schema.field(0), indices)
    order = np.lexsort([kept[name].to_numpy() for name in ("trajectory", "repeat", "index")])
    return kept.take(pa.array(order))


def _moved_failures(paths: RunPaths, manifest: Manifest, moved: dict[int, int | None]) -> Iterator[bytes]:
    codec = RecordCodec()
    for path in paths.failure_files():
        for frame in scan(path, manifest.run_id_bytes, ScanReport()):
            target = moved.get(frame.index)
            if target is not None:
                record = msgspec.structs.asdict(codec.decode_failure(frame.body))
                body = codec.encode_failure(Failure(**{**record, "index": target}))
                yield encode_frame(target, frame.repeat, 0, body)
