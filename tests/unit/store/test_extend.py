"""`generation.resume=extend`: rows are appended and `n` grows; what is done stays as it is."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from rollstream.errors import IdentityMismatchError
from rollstream.store.manifest import DATASET_IDENTITY, require_manifest
from rollstream.store.run_dir import extend_run, lock_run
from tests.unit.store.fabric import commit_all, failure, keys_on_disk, manifest, rollout

ROWS = f"{DATASET_IDENTITY}.fingerprint"


async def begin(root: Path) -> None:
    """Both rollouts of rows a and b, and a failure of row c; half of it is sealed."""
    done = [rollout(index, repeat, key=key) for index, key in enumerate("ab") for repeat in (0, 1)]
    await commit_all(root, [*done, failure(2, key="c")], size=3, seal=False, **{ROWS: "abc"})


def extend(root: Path, keys: Sequence[str | None], *, n: int = 2, **identity: object) -> None:
    lock = lock_run(root)
    try:
        wanted = manifest(**{ROWS: repr(keys), "rollout.n": n, **identity})
        extend_run(root, msgspec.structs.replace(wanted, n=n), lambda: keys, "a: 2\n")
    finally:
        lock.release()


@pytest.mark.parametrize("keys", ["abcd", ["a", "b", None, "c", "a"]])
@pytest.mark.parametrize("n", [2, 5])
async def test_appended_rows_and_a_larger_n_rewrite_nothing(
    tmp_path: Path, keys: Sequence[str | None], n: int
) -> None:
    await begin(tmp_path)
    before, run_id = keys_on_disk(tmp_path), require_manifest(tmp_path).run_id
    extend(tmp_path, keys, n=n)
    after = require_manifest(tmp_path)
    assert (after.run_id, after.n, after.identity[ROWS]) == (run_id, n, repr(keys))
    assert keys_on_disk(tmp_path) == before


@pytest.mark.parametrize("keys", ["bac", "ab", "xbc", "a", [None, "b", "c"]])
async def test_rows_that_moved_or_are_gone_are_refused(tmp_path: Path, keys: Sequence[str | None]) -> None:
    await begin(tmp_path)
    before = (tmp_path / "run.json").read_bytes()
    with pytest.raises(IdentityMismatchError):
        extend(tmp_path, keys)
    assert (tmp_path / "run.json").read_bytes() == before


@pytest.mark.parametrize("other", [{"temperature": 2.0}, {"n": 1}])
async def test_another_difference_is_refused(tmp_path: Path, other: dict[str, int]) -> None:
    await begin(tmp_path)
    with pytest.raises(IdentityMismatchError):
        extend(tmp_path, "abcd", **other)  # type: ignore[arg-type]
