"""Spool files: temporary files without a name, where data lies in a form that gives random access.

Nothing is left of one when the process ends, however it ends.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import zstandard

from rollstream.errors import DataError

_ZST_CHUNK = 64 << 10
"""Compressed bytes fed at once. zstd can expand a thousandfold, so this stays small."""


@contextmanager
def spool_for(what: str, spool_dir: Path | None) -> Iterator[BinaryIO]:
    """Opens a spool file to be filled inside the `with`; it stays open after it, unless filling failed.

    Args:
        what: What goes into it, for messages.
        spool_dir: Folder of the spool file; None takes the system's temporary folder.

    Raises:
        DataError: The folder cannot be written, or is full: names it, and how to choose another.
    """
    spool: BinaryIO | None = None
    try:
        spool = tempfile.TemporaryFile(dir=spool_dir)  # noqa: SIM115  the caller closes it
        yield spool
        spool.flush()
    except BaseException as error:
        if spool is not None:
            spool.close()
        if isinstance(error, OSError) and error.errno is not None:  # Arrow's own complaints have no errno
            raise DataError(
                f"{what}: cannot be put into the temporary folder {spool_dir or tempfile.gettempdir()} "
                f"({error}); free space there, or set TMPDIR to a folder on a larger disk"
            ) from error
        raise


def decompress(path: Path, spool_dir: Path | None) -> BinaryIO:
    """Decompresses a zstd file into a spool file; several frames, as `pzstd` writes them, are one stream.

    Raises:
        DataError: The data is damaged or cut off, or does not fit the spool folder.
    """
    decompressor = zstandard.ZstdDecompressor(max_window_size=2**31)
    frame = None
    with spool_for(str(path), spool_dir) as spool, path.open("rb") as source:
        try:
            while chunk := source.read(_ZST_CHUNK):
                while chunk:
                    frame = frame or decompressor.decompressobj()
                    spool.write(frame.decompress(chunk))
                    chunk = frame.unused_data if frame.eof else b""
                    if frame.eof:
                        frame = None
        except zstandard.ZstdError as error:
            raise DataError(f"{path}: damaged zstd data ({error})") from error
    if frame is not None:
        spool.close()
        raise DataError(f"{path}: the zstd data is cut off; copy the file again")
    return spool
