"""Reads a saved `verl.DataProto` without verl, and without running what a pickle may hold.

A pickle is a program: `pickle.load`, and so `DataProto.load_from_disk`, runs whatever its author liked. Here
only the names below may be called. They build numpy arrays, tensors and plain values; a file that wants
anything else is refused before it is run. Still: load files from people you trust, and a file made to use up
memory will do so.
"""

import io
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollstream.errors import ConfigError, DataError
from rollstream.trajectory import Trajectory

_ALLOWED = frozenset(
    {
        "numpy.ndarray",
        "numpy.dtype",
        *(f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")),
        *(f"numpy.{core}.multiarray.scalar" for core in ("core", "_core")),
        *(f"numpy.{core}.numeric._frombuffer" for core in ("core", "_core")),
        "collections.OrderedDict",
        "_codecs.encode",
        "torch._utils._rebuild_tensor_v2",  # a view of a storage, which is within it or refused
    }
)
"""Names that the parts beside the tensors may call: arrays and scalars of numpy 1 and 2, tensors (of images, in
`multi_modal_inputs`), and plain values."""

_REBUILD = "tensordict._reductions._rebuild_tensordict_files_consolidated"
"""How a consolidated TensorDict is put together again; ours does it in its place."""


@dataclass(slots=True)
class DataProtoFile:
    """A DataProto as it was saved."""

    batch: dict[str, Any]
    """Tensors by name, shape (rows, …)."""
    non_tensor_batch: dict[str, np.ndarray[Any, np.dtype[Any]]]
    """Arrays by name, shape (rows, …)."""
    meta_info: dict[str, Any]

    def __len__(self) -> int:
        for value in (*self.batch.values(), *self.non_tensor_batch.values()):
            return len(value)
        return 0

    def trajectories(self) -> Iterator[Trajectory]:
        """Its rows without padding.

        Prompt and response are what the attention mask shows of `prompts` and `responses`; the response mask,
        `rollout_log_probs`, `rm_scores`, `__num_turns__`, `messages` (else `raw_prompt`), `is_snapshot` and
        `finish_reason` are taken where they are there. Other columns go into `extra`.

        Raises:
            DataError: it has no prompts and responses.
        """
        missing = {"prompts", "responses", "attention_mask"} - self.batch.keys()
        if missing:
            raise DataError(f"a DataProto without {', '.join(sorted(missing))} has no trajectories")
        for row in range(len(self)):
            yield self._trajectory(row)

    def _trajectory(self, row: int) -> Trajectory:
        tensors = {name: tensor[row].numpy() for name, tensor in self.batch.items() if tensor.ndim == 2}
        others = {name: values[row] for name, values in self.non_tensor_batch.items()}
        width = len(tensors["prompts"])
        seen = tensors["attention_mask"].astype(bool)

        def response(name: str) -> list[Any] | None:
            return tensors[name][seen[width:]].tolist() if name in tensors else None

        response_ids = response("responses") or []
        messages = others.pop("messages", None)
        return Trajectory(
            prompt_ids=tensors["prompts"][seen[:width]].tolist(),
            response_ids=response_ids,
            response_mask=response("response_mask") or [1] * len(response_ids),
            response_logprobs=response("rollout_log_probs"),
            messages=list(messages if messages is not None else others.get("raw_prompt") or []),
            finish_reason=str(others.pop("finish_reason", "stop")),
            is_snapshot=bool(others.pop("is_snapshot", False)),
            num_turns=int(others.pop("__num_turns__", 0)),
            reward=float(tensors["rm_scores"].sum()) if "rm_scores" in tensors else None,
            policy_versions=others.pop("policy_versions", [(0, 0)]),
            extra=others,
        )


def read_dataproto(path: Path | str) -> DataProtoFile:
    """Reads what `DataProto.save_to_disk`, or `rollstream export --format dataproto`, has written.

    The file is held in memory about twice while it is read.

    Raises:
        ConfigError: torch is not installed.
        DataError: it is no such file, is damaged, or wants to call something that no DataProto of tensors and
            plain values needs.
        OSError: it cannot be read.
    """
    try:
        import torch
    except ImportError as error:
        raise ConfigError("reading a DataProto needs torch: pip install 'rollstream[dataproto]'") from error
    with Path(path).open("rb") as file:
        try:
            state = _Unpickler(file).load()
            if not isinstance(state, _PickledDataProto):
                raise DataError(f"a pickle of {type(state).__name__}, not of a DataProto")
            tensors, non_tensor_batch, meta_info = state.parts
            if not isinstance(tensors, bytes):
                raise DataError("saved with VERL_DATAPROTO_SERIALIZATION_METHOD=numpy; save it without")
            # With `weights_only`, torch has an unpickler of its own with a list of what is allowed.
            with torch.serialization.safe_globals([(_rebuild, _REBUILD)]):
                batch = dict(torch.load(io.BytesIO(tensors), map_location="cpu", weights_only=True))
        except DataError as error:
            raise DataError(f"{path}: {error}") from error
        except Exception as error:  # a damaged pickle may raise anything
            reason = str(error).strip().partition("\n")[0]
            raise DataError(f"{path} is no DataProto of plain tensors, or is damaged: {reason}") from error
    return DataProtoFile(batch, non_tensor_batch, meta_info)


class _PickledDataProto:
    """Stands for `verl.protocol.DataProto` while it is unpickled."""

    parts: tuple[Any, dict[str, Any], dict[str, Any]]

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) != 3 or not all(isinstance(p, dict) for p in state[1:]):
            raise DataError("the state of its DataProto is not that of verl 0.9")
        self.parts = state


class _Unpickler(pickle.Unpickler):
    """Finds only what is allowed."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("verl.protocol", "DataProto"):
            return _PickledDataProto
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _load_storage
        if "." in name or f"{module}.{name}" not in _ALLOWED:
            raise DataError(f"it wants to call {module}.{name}, which is not allowed here")
        return super().find_class(module, name)


def _load_storage(data: bytes) -> Any:
    """The memory of a tensor among the non-tensors. torch's own function would run what a pickle in it holds."""
    import torch

    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _rebuild(metadata: dict[str, Any], storage: Any) -> dict[str, Any]:
    """The tensors of a consolidated TensorDict (tensordict 0.10), as views of its one storage."""
    import torch

    tensors = {}
    for name, (dtype, shape, start, stop, pad) in metadata["leaves"].items():
        kind = getattr(torch, dtype.removeprefix("torch."))
        if not isinstance(kind, torch.dtype):
            raise ValueError(f"{dtype} is no type of tensors")
        values = storage[start:stop].view(kind)
        if pad:
            values = values[: torch.Size(shape).numel()]
        tensors[name] = values.view(*shape)
    return tensors
