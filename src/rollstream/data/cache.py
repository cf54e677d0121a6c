"""rollstream's cache folder: what was built once and can be built again. It may be deleted at any time."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

CACHE_VARIABLE = "ROLLSTREAM_CACHE"
"""Environment variable that names the cache folder."""


def cache_folder(kind: str) -> Path:
    """The folder for one kind of things; maybe not there yet."""
    if root := os.environ.get(CACHE_VARIABLE):
        return Path(root).expanduser() / kind
    user_cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(user_cache).expanduser() / "rollstream" / kind


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """Opens a file that is at `path` whole or not at all. Of processes that write it at once the first counts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        try:
            path.hardlink_to(temporary)
        except FileExistsError:
            return  # someone may read that one already
        except OSError:  # a file system without hard links
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
