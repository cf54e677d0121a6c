"""Extending: a run goes on with rows that were appended to its dataset, or with a larger `n`.

Nothing that is done is touched: only the manifest and the configuration change.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from rollstream.errors import IdentityMismatchError
from rollstream.store.journal import ScanReport, scan, write_file_durably
from rollstream.store.manifest import Manifest, check_identity, read_manifest, write_manifest
from rollstream.store.paths import RunPaths
from rollstream.store.records import RecordCodec
from rollstream.store.run import Run


def extend_run(
    root: Path, wanted: Manifest, prompt_keys: Callable[[], Iterable[str | None]], config_yaml: str
) -> None:
    """Gives the run in `root` the dataset and the `n` of `wanted`. The lock must be held; nothing to do for a new run.

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
    own = {name: getattr(manifest, name) for name in ("run_id", "created", "logprobs", "scores")}
    write_file_durably(root / "config.yaml", config_yaml.encode())
    write_manifest(root, msgspec.structs.replace(wanted, **own, tools={**manifest.tools, **wanted.tools}))


def check_positions(root: Path, manifest: Manifest, prompt_keys: Iterable[str | None]) -> None:
    """Raises `IdentityMismatchError` unless each row with a finished or failed rollout stands where it stood.

    A row that has only failed may also be one that is not visited any more, as an overlong prompt.
    """
    keys: dict[int, str] = {}
    failed: dict[int, str] = {}
    for table in Run(root, manifest).rows(["index", "prompt_key"]):
        keys.update(zip(table["index"].to_pylist(), table["prompt_key"].to_pylist(), strict=True))
    codec = RecordCodec()
    for path in RunPaths(root).failure_files():
        for frame in scan(path, manifest.run_id_bytes, ScanReport()):
            if frame.index not in keys:
                failed[frame.index] = codec.decode_failure(frame.body).prompt_key
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
