"""The file that `verl.DataProto.load_from_disk` reads, written without verl.

Format (verl 0.9.1, `verl/protocol.py`): a pickle of a `verl.protocol.DataProto` whose state is

    (bytes of torch.save(tensordict, consolidated), non_tensor_batch, meta_info)

The tensors' bytes are most of the file. They go straight from the tensors to the disk: the pickle around them
is put together by hand, since `pickle` would want them as one `bytes` object in memory first.
"""

import io
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from rollstream.store.merge import MergeCancelledError

_PROTO_4 = b"\x80\x04"
_STACK_GLOBAL = b"\x93"
_EMPTY_TUPLE = b")"
_NEWOBJ = b"\x81"
_BINBYTES8 = b"\x8e"
_TUPLE3 = b"\x87"
_BUILD = b"b"
_STOP = b"."


def write_dataproto(
    path: Path,
    tensors: Any,
    non_tensor_batch: dict[str, Any],
    meta_info: dict[str, Any],
    cancelled: Callable[[], bool] = lambda: False,
) -> None:
    """Writes one file, and waits until it is on the disk.

    Args:
        path: is overwritten.
        tensors: a consolidated TensorDict with a batch size of `(rows,)`.
        non_tensor_batch: numpy arrays of length rows.
        meta_info: plain Python values.
        cancelled: asked between the parts.

    Raises:
        OSError: the disk's.
        MergeCancelledError: `cancelled` said so.
    """
    import torch

    with path.open("wb") as file:
        file.write(_PROTO_4 + _text("verl.protocol") + _text("DataProto") + _STACK_GLOBAL)
        file.write(_EMPTY_TUPLE + _NEWOBJ + _BINBYTES8)
        length_at = file.tell()
        file.write(bytes(8))
        begin = file.tell()
        through = _Through(file, cancelled)
        try:
            torch.save(tensors, through)
        except Exception:
            # torch wraps what its file raises into errors of its own.
            if through.failure is not None:
                raise through.failure from None
            raise
        end = file.tell()
        # One pickler for both: its memo counts on, as that of the reader does.
        bodies = io.BytesIO()
        pickler = pickle.Pickler(bodies, protocol=4)
        for value in (non_tensor_batch, meta_info):
            bodies.seek(0)
            bodies.truncate()
            pickler.dump(value)
            body = bodies.getbuffer()
            file.write(body[len(_PROTO_4) : -len(_STOP)])
            body.release()
        file.write(_TUPLE3 + _BUILD + _STOP)
        file.seek(length_at)
        file.write(struct.pack("<Q", end - begin))
        file.flush()
        os.fsync(file.fileno())


def _text(value: str) -> bytes:
    """SHORT_BINUNICODE, which does not touch the memo."""
    data = value.encode()
    return b"\x8c" + bytes([len(data)]) + data


class _Through:
    """A file for torch.save that begins where the other one stands. It writes from front to back only."""

    def __init__(self, file: BinaryIO, cancelled: Callable[[], bool]) -> None:
        self._file = file
        self._cancelled = cancelled
        self.failure: Exception | None = None
        """The first error of a write."""

    def write(self, data: Any) -> int:
        try:
            if self._cancelled():
                raise MergeCancelledError
            return self._file.write(data)
        except Exception as error:
            self.failure = self.failure or error
            raise

    def flush(self) -> None:
        self._file.flush()
