"""Extending: a run goes on with a dataset that grew, shrank or was reordered (`generation.resume=extend`).

What was done stays with its prompt row, found by content hash (prompt key). Where a row stands at another
position now, its rollouts are renumbered; rows with the same content are matched in order of position.
Rollouts of rows that are gone, or not selected any more, leave the run for `removed/` (batches whose
`index` counts on from extension to extension); when their row comes back, so do they.

When nothing moves (rows were only appended), only the manifest changes. Otherwise everything is written
anew beside the old, and one rename makes it count:

    extend.tmp/  --rename-->  extend.ready/  --finish_extend-->  batches/, removed/, failed/, scores/, run.json …

A crash before the rename leaves the old run, a crash after it is finished by the next opening. The artifact
goes, since it has the old positions: all its rows are in the batches.
"""

import logging
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rollstream.errors import DamageError, StorageError
from rollstream.store.batch import (
    DamagedFileError,
    batch_metadata,
    column_values,
    read_tables,
    seal_journal,
    to_arrow,
    write_table_durably,
)
from rollstream.store.journal import (
    ScanReport,
    encode_file_header,
    encode_frame,
    scan,
    sync_folder,
    write_file_durably,
)
from rollstream.store.manifest import Manifest, check_identity, read_manifest, write_manifest
from rollstream.store.paths import RunPaths
from rollstream.store.records import RecordCodec
from rollstream.store.recovery import inspect, quarantine_batch, recover
from rollstream.store.scores import (
    ScorePaths,
    activate,
    active_name,
    copy_scores,
    read_facts,
    score_folder,
)
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
        DamageError: a batch is damaged; it was quarantined, and the run is as it was otherwise.
        StorageError: the disk is full; the run is as it was.
    """
    manifest = read_manifest(root)
    if manifest is None or not RunPaths(root).has_data():
        return
    if not check_identity(root, manifest.identity, wanted.identity, extend=True):
        return
    tools = {**manifest.tools, **wanted.tools}
    own = {name: getattr(manifest, name) for name in ("run_id", "created", "logprobs")}
    new = msgspec.structs.replace(wanted, **own, tools=tools)
    paths = RunPaths(root)
    try:
        state = recover(paths, manifest)
        open_journals = [] if state.open_journal is None else [state.open_journal]
        for number in [*state.unsealed, *open_journals]:
            seal_journal(paths.journal(number), paths.batch(number), manifest.run_id_bytes, manifest.logprobs)
            paths.journal(number).unlink()
        sync_folder(paths.journals)
        old = _old_keys(paths, manifest)
        moved = _match(old, prompt_keys())
        if all(target == (index if folder == _RUN else None) for (folder, index), target in moved.items()):
            write_file_durably(root / "config.yaml", config_yaml.encode())
            write_manifest(root, new)
            return
        gone = state.keys.count(_gone(moved))[0]
        back = sum(folder == _REMOVED and target is not None for (folder, _), target in moved.items())
        if gone or back:
            logger.warning(
                "%d finished rollouts are of prompt rows that are not in the dataset any more, and are kept in "
                "%s; those of %d rows come back from there",
                *(gone, paths.removed, back),
            )
        _rewrite(paths, manifest, new, moved, config_yaml)
        finish_extend(root)
    except DamagedFileError as error:
        kept, _ = quarantine_batch(paths, manifest, error.path)
        raise DamageError(f"{error}. It was moved to {kept}; run the same command once more.") from error
    except OSError as error:
        raise StorageError(
            f"cannot extend {root}: {error.strerror}; nothing was lost. Free space and run the same command "
            "again."
        ) from error


def rollouts_leaving(root: Path, prompt_keys: Iterable[str | None]) -> int:
    """How many finished rollouts `extend_run` would move to `removed/`. Changes nothing."""
    manifest, state = inspect(root)
    paths = RunPaths(root)
    old = _old_keys(paths, manifest)
    codec = RecordCodec()
    for number in paths.journal_numbers():
        for frame in scan(paths.journal(number), manifest.run_id_bytes, ScanReport()):
            old[_RUN, frame.index] = codec.decode(frame.body).prompt_key
    return state.keys.count(_gone(_match(old, prompt_keys)))[0]


def finish_extend(root: Path) -> None:
    """Puts a rewritten run in place; resumes where a crash left it. The lock must be held."""
    ready, temporary = root / "extend.ready", root / "extend.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    if not ready.is_dir():
        return
    for stale in ("trajectories.parquet", "trajectories.parquet.sha256", "checkpoint.json"):
        (root / stale).unlink(missing_ok=True)
    for name in ("batches", "removed", "failed", "scores"):
        if (ready / name).is_dir():
            shutil.rmtree(root / name, ignore_errors=True)
            (ready / name).rename(root / name)
    for name in ("config.yaml", "run.json"):
        if (ready / name).exists():
            (ready / name).rename(root / name)
    sync_folder(root)
    ready.rename(temporary)  # first: half deleted, it would look like one that is ready
    sync_folder(root)
    shutil.rmtree(temporary)


_PIECE_BYTES = 64 << 20
"""Of a file that is rewritten, decoded, held at once."""

_RUN, _REMOVED = 0, 1

_Row = tuple[int, int]
"""A prompt row with finished rollouts: `_RUN` or `_REMOVED`, and its index there."""


def _old_keys(paths: RunPaths, manifest: Manifest) -> dict[_Row, str]:
    """Prompt key of every row with a finished rollout."""
    keys: dict[_Row, str] = {}
    for folder, path in _files(paths):
        for table in read_tables(path, ["index", "prompt_key"]):
            rows = ((folder, index) for index in table["index"].to_pylist())
            keys.update(zip(rows, table["prompt_key"].to_pylist(), strict=True))
    codec = RecordCodec()
    for path in paths.failure_files():
        for frame in scan(path, manifest.run_id_bytes, ScanReport()):
            keys.setdefault((_RUN, frame.index), codec.decode_failure(frame.body).prompt_key)
    return keys


def _files(paths: RunPaths) -> Iterator[tuple[int, Path]]:
    yield from ((_RUN, paths.batch(number)) for number in paths.batch_numbers())
    yield from ((_REMOVED, path) for path in sorted(paths.removed.glob("*.parquet")))


def _match(old: dict[_Row, str], new_keys: Iterable[str | None]) -> dict[_Row, int | None]:
    """New index of every old row, None for one that is not in the dataset.

    A row that still stands at its position stays there; others go to the first free positions of their
    content, those of the run before those that had left it.
    """
    wanted = set(old.values())
    places: dict[str, list[int]] = defaultdict(list)
    staying: set[int] = set()
    for index, key in enumerate(new_keys):
        if key is not None and key in wanted:
            if old.get((_RUN, index)) == key:
                staying.add(index)
            else:
                places[key].append(index)
    free = {key: iter(indices) for key, indices in places.items()}
    return {
        row: row[1] if row[0] == _RUN and row[1] in staying else next(free.get(old[row], iter(())), None)
        for row in sorted(old)
    }


def _gone(moved: dict[_Row, int | None]) -> npt.NDArray[np.int64]:
    """Indices of the run's rows that are not in the dataset any more."""
    return np.array([row[1] for row, target in moved.items() if row[0] == _RUN and target is None], np.int64)


def _rewrite(
    paths: RunPaths, manifest: Manifest, new: Manifest, moved: dict[_Row, int | None], config_yaml: str
) -> None:
    temporary = paths.root / "extend.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    target = RunPaths(temporary)
    for made in (target.batches, target.removed, target.failures):
        made.mkdir(parents=True)
    left = {row: number for number, row in enumerate(row for row in moved if moved[row] is None)}
    metadata = batch_metadata(manifest.run_id_bytes, manifest.logprobs)
    pieces = ((folder, piece) for folder, path in _files(paths) for piece in _pieces(path))
    for number, (folder, table) in enumerate(pieces):
        rows = [(folder, index) for index in table["index"].to_pylist()]
        name = target.batch(number).name
        for part, numbers in (
            (target.batches, [moved[row] for row in rows]),
            (target.removed, [left.get(row) for row in rows]),
        ):
            kept = _renumber(table, numbers)
            if len(kept):
                write_table_durably(part / name, kept, metadata)
    failures = b"".join(_moved_failures(paths, manifest, moved))
    if failures:
        write_file_durably(
            target.failures / "000000.rsj", encode_file_header(manifest.run_id_bytes) + failures
        )
    _move_scores(paths, target, moved)
    write_file_durably(temporary / "config.yaml", config_yaml.encode())
    write_manifest(temporary, new)
    sync_folder(temporary)
    temporary.rename(paths.root / "extend.ready")
    sync_folder(paths.root)


def _pieces(path: Path) -> Iterator[pa.Table]:
    """The rows of a file in tables of some size, each rollout in one of them."""
    held: list[pa.Table] = []
    for table in read_tables(path):
        held.append(table)
        if sum(one.nbytes for one in held) > _PIECE_BYTES:
            whole = pa.concat_tables(held)
            same = (pc.equal(whole[name], whole[name][-1]) for name in ("index", "repeat"))
            cut = pc.index(pc.and_(*same), True).as_py()  # where its last rollout begins
            yield whole.slice(0, cut)
            held = [whole.slice(cut)]
    if held:
        yield pa.concat_tables(held)


def _renumber(table: pa.Table, numbers: list[int | None]) -> pa.Table:
    """The rows that have a number, under it, sorted by key."""
    kept = table.filter(to_arrow(np.array([number is not None for number in numbers], np.bool_)))
    indices = to_arrow(np.array([number for number in numbers if number is not None], np.int64))
    kept = kept.set_column(0, kept.schema.field(0), indices)
    order = np.lexsort([column_values(kept[name]) for name in ("trajectory", "repeat", "index")])
    return kept.take(to_arrow(order))


def _moved_failures(paths: RunPaths, manifest: Manifest, moved: dict[_Row, int | None]) -> Iterator[bytes]:
    codec = RecordCodec()
    for path in paths.failure_files():
        for frame in scan(path, manifest.run_id_bytes, ScanReport()):
            target = moved.get((_RUN, frame.index))
            if target is not None:
                record = msgspec.structs.asdict(codec.decode_failure(frame.body))
                body = codec.encode_failure(Failure(**{**record, "index": target}))
                yield encode_frame(target, frame.repeat, 0, body)


def _move_scores(paths: RunPaths, target: RunPaths, moved: dict[_Row, int | None]) -> None:
    """Scores go with their prompt rows. Those of rows that are gone are forgotten."""
    folder, new = score_folder(paths.root), score_folder(target.root)
    if not folder.is_dir():
        return
    new.mkdir()
    for journal in folder.glob("*.rsj"):
        old, there = ScorePaths(folder, journal.stem), ScorePaths(new, journal.stem)
        if (facts := read_facts(old.facts)) is not None:
            copy_scores([old], there, facts, lambda index: moved.get((_RUN, index)))
    if (active := active_name(paths.root)) is not None:
        activate(target.root, active)
