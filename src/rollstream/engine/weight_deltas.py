"""The trainer's weights on their way to servers of another cluster: files of what changed, and nothing else shared.

    channel = DeltaChannel("/bucket/run7")        beside the servers: rollstream weights /bucket/run7 /scratch/copies
    batches.update_weights(channel.put(model))

A step of RL changes few elements of a bfloat16 model, but some of nearly every tensor. A delta has, for each tensor
that changed, the XOR of its bytes with those before, compressed: nothing is added up, and nothing drifts.
"""

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollstream.engine.weight_channel import DTYPES, checkpoint_state
from rollstream.engine.weight_copy import (
    COPIES,
    DELTA,
    WHOLE,
    checksum,
    checksum_of_all,
    newest_version,
    sync,
)
from rollstream.errors import WeightUpdateError

_NAMES = {f"torch.{name}": own for own, name in DTYPES.items()}


class CopiedWeights(str):
    """A folder beside the servers, for `update_weights`: a path of theirs, and not of this machine."""

    logprobs: list[float] | None
    """Of the trainer's own model, see `weight_probe`."""


class DeltaChannel:
    """Writes weights into a folder, and waits until a copy of them is beside the servers.

    A delta is the compressed XOR of the changed tensors' bytes; each tensor and the whole have checksums. A whole
    version is written first, after a gap, and whenever the deltas since the last one are as large; what is older than
    the whole version before that goes then, so the folder has about four models at most.

    Args:
        folder: of this training alone, where `rollstream weights` sees it.
        dtype: floats are rounded to it, as servers round what they load: "bfloat16", say. None: they are left alone.
        timeout: seconds for a copy to be made.
    """

    def __init__(self, folder: str | Path, *, dtype: str | None = None, timeout: float = 600.0) -> None:
        self._folder, self._dtype, self._timeout = Path(folder), dtype, timeout
        self._version = ""
        """The last one; what follows is of it."""
        self._tensors: dict[str, Any] = {}
        self._listed: dict[str, tuple[str, list[int]]] = {}
        self._checksums: dict[str, str] = {}
        self._since = 0
        """Bytes of deltas since the last whole version."""

    def put(
        self, model: Any, state: Mapping[str, Any] | None = None, *, logprobs: Sequence[float] | None = None
    ) -> CopiedWeights:
        """Writes weights, and returns when a copy of them is there. What is being generated goes on meanwhile.

        The arguments are those of `WeightChannel.put`.

        Raises:
            WeightUpdateError: they cannot be written, or no copy was made in time.
        """
        state, logprobs = checkpoint_state(model, state, logprobs)
        try:
            if not self._version:
                (self._folder / COPIES).mkdir(parents=True, exist_ok=True)
                # A training before may have left them; whoever makes copies says again what it has.
                for path in (*self._folder.glob("*.part"), *(self._folder / COPIES).iterdir()):
                    path.unlink(missing_ok=True)
            self._write({name: _copy(tensor, self._dtype) for name, tensor in state.items()})
            copy = CopiedWeights(self._wait())
        except OSError as error:
            raise WeightUpdateError(f"weights cannot be written to {self._folder}: {error}") from error
        copy.logprobs = [*logprobs] if logprobs else None
        return copy

    def _write(self, tensors: dict[str, Any]) -> None:
        import torch
        import zstandard

        listed = {name: (_NAMES[str(one.dtype)], [*one.shape]) for name, one in tensors.items()}
        before = self._tensors if listed == self._listed else {}

        def change(name: str) -> tuple[bytes, str] | None:
            now = _bytes(tensors[name])
            if not before:
                return b"", checksum(now)
            changed = now ^ _bytes(before[name])
            return (zstandard.compress(changed, 1), checksum(now)) if changed.any() else None

        with ThreadPoolExecutor() as threads:
            found = zip(tensors, threads.map(change, tensors), strict=True)
            changes = {name: one for name, one in found if one is not None}
        changed = {name: one for name, (_, one) in changes.items()}
        checksums = self._checksums | changed if before else changed
        number = int((newest_version(self._folder) or "-1-").rpartition("-")[0]) + 1
        version = f"{number:08}-{checksum_of_all(listed, checksums)}"
        since = self._since + sum(len(patch) for patch, _ in changes.values())
        if before:
            notes = {"base": self._version, "checksums": json.dumps(changed)}
            # torch makes a tensor of what may be written to.
            patches = {
                name: torch.frombuffer(bytearray(one), dtype=torch.uint8)
                for name, (one, _) in changes.items()
            }
            self._save(f"{version}{DELTA}", patches, notes)
        if not before or since > sum(one.nbytes for one in tensors.values()):
            self._save(f"{version}{WHOLE}", tensors, {"format": "pt"})
            since = 0
            kept = sorted(path.name for path in self._folder.glob(f"*{WHOLE}"))[-2:]
            for path in self._folder.glob("*.safetensors"):
                if path.name < kept[0]:
                    path.unlink(missing_ok=True)
        self._version, self._tensors, self._listed = version, tensors, listed
        self._checksums, self._since = checksums, since

    def _save(self, name: str, tensors: dict[str, Any], notes: dict[str, str]) -> None:
        """A file has its name when all of it is on the disk."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        part = self._folder / f"{name}.part"
        try:
            save_file(tensors, part, notes)
        except SafetensorError as error:  # the disk is full, say
            raise OSError(str(error)) from error
        sync(part)
        part.rename(self._folder / name)
        sync(self._folder)

    def _wait(self) -> str:
        """The path of a copy, the same beside all servers. Those that are known get as long again as the first."""
        began = time.monotonic()
        first: float | None = None
        while True:
            said = list[str]()
            for path in (self._folder / COPIES).glob("[!.]*"):
                with suppress(OSError, ValueError):  # one that just goes, or is half there
                    said.append(path.read_text())
            arrived = [path for path in said if path.endswith(f"/{self._version}")]
            now = time.monotonic()
            if arrived:
                first = now if first is None else first
                if len(arrived) == len(said) or now > 2 * first - began + 1:
                    return arrived[0]
            if now > began + self._timeout:
                raise WeightUpdateError(
                    f"no copy of {self._version} was made within {self._timeout:g} s: does `rollstream weights "
                    f"{self._folder} COPIES` run beside the servers?"
                )
            time.sleep(0.05)


def _copy(tensor: Any, dtype: str | None) -> Any:
    import torch

    if dtype is not None and tensor.is_floating_point():
        tensor = tensor.to(getattr(torch, dtype))
    return tensor.detach().to("cpu", copy=True).contiguous()


def _bytes(tensor: Any) -> Any:
    import torch

    return tensor.reshape(-1).view(torch.uint8).numpy()
