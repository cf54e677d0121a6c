"""`rollstream weights`: keeps a copy of a trainer's weights beside servers of another cluster, by files alone.

    trainer --FOLDER/00000012-9f….delta.safetensors--> (a mounted bucket, rsync) --> rollstream weights FOLDER COPIES
            <--FOLDER/copies/HOST: "COPIES/00000012-9f…"--                           --> a server loads that folder

A version's name ends with the checksum of all of its tensors: a folder of that name has that version, whoever made it.
A delta has what changed since the version that it names; a whole version is a checkpoint's file.
"""

import argparse
import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollstream.command_line import Command
from rollstream.errors import DamageError
from rollstream.scratch import ScratchFolder

_LOG = logging.getLogger(__name__)

COPIES = "copies"
DELTA, WHOLE = ".delta.safetensors", ".whole.safetensors"

_MODEL = "model.safetensors"
_VERSION = re.compile(r"\d{8}-[0-9a-f]{32}")
_LOOK_S = 0.5
"""Between two looks at a folder, which may be a mounted bucket."""


def checksum(data: Any) -> str:
    """Of the bytes of a tensor, say."""
    return hashlib.sha256(data).hexdigest()[:32]


def checksum_of_all(tensors: Mapping[str, tuple[str, Sequence[int]]], checksums: Mapping[str, str]) -> str:
    """Of tensors, by their dtypes, shapes and checksums."""
    return checksum(
        json.dumps([[name, *tensors[name], checksums[name]] for name in sorted(tensors)]).encode()
    )


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, str], int]:
    """The tensors of a safetensors file, in its order, the notes beside them, and where the tensors' bytes begin.

    Raises `ValueError` where it has no such header.
    """
    with path.open("rb") as file:
        size, all_bytes = int.from_bytes(file.read(8), "little"), path.stat().st_size
        if size > all_bytes:
            raise ValueError(f"a header of {size} bytes")
        header = json.loads(file.read(size))
    notes = header.pop("__metadata__", {})
    tensors = dict(sorted(header.items(), key=lambda one: one[1]["data_offsets"]))
    edges = [at for one in tensors.values() for at in one["data_offsets"]]
    if [0, *edges[1::2]] != [*edges[::2], all_bytes - 8 - size]:
        raise ValueError("tensors do not fill it")
    return tensors, notes, 8 + size


def sync(path: Path) -> None:
    """Returns when a file, or what a folder lists, is on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def newest_version(folder: Path) -> str | None:
    """The name of the newest version in a trainer's folder."""
    names = (path.name.partition(".")[0] for path in folder.glob("*.safetensors"))
    return max(filter(_VERSION.fullmatch, names), default=None)


def bring_up_to_date(source: Path, copies: Path) -> Path | None:
    """Makes a copy of the newest version; returns its folder, or None where there is no version yet.

    A copy is made aside and gets its name when each tensor has been compared. The one before stays, for a server
    may be loading it.

    Raises:
        DamageError: the newest version cannot be made of what is there, or not yet: a file is missing or torn.
        OSError: a file cannot be read or written.
    """
    if (newest := newest_version(source)) is None:
        return None
    if ((folder := copies / newest) / _MODEL).exists():  # without it one is being removed, or was
        return folder
    names = [newest]
    while not (copies / names[-1] / _MODEL).exists() and (delta := source / f"{names[-1]}{DELTA}").exists():
        with _reading(delta):
            base_name = read_header(delta)[1]["base"]
            if not _VERSION.fullmatch(base_name) or base_name >= names[-1]:
                raise ValueError(f"no earlier version: {base_name!r:.80}")
            names.append(base_name)
    base = copies / names[-1] / _MODEL
    if not base.exists():  # there is a gap: it begins with the newest whole version
        whole = (at for at, name in enumerate(names) if (source / f"{name}{WHOLE}").exists())
        if (at := next(whole, None)) is None:
            raise DamageError(f"{source}: {newest} lacks {names[-1]}, which is neither there nor in {copies}")
        names, base = names[: at + 1], source / f"{names[at]}{WHOLE}"
    deltas = [source / f"{name}{DELTA}" for name in reversed(names[:-1])]
    copies.mkdir(parents=True, exist_ok=True)
    with ScratchFolder("weights", copies) as scratch:
        (made := scratch.path / newest).mkdir()
        with (made / _MODEL).open("wb") as file:
            file.writelines(_apply(base, deltas, newest))
        sync(made / _MODEL)
        sync(made)
        made.rename(folder)
    sync(copies)
    older = [path for path in copies.iterdir() if _VERSION.fullmatch(path.name) and path != folder]
    for path in sorted(older, key=lambda path: path.stat().st_mtime)[:-1]:
        shutil.rmtree(path, ignore_errors=True)
    return folder


def _apply(base: Path, deltas: Sequence[Path], newest: str) -> Iterator[Any]:
    """A version's file, piece by piece. Raises `DamageError` before its end where a tensor is wrong."""
    import numpy
    import zstandard

    patches, right, found = list[tuple[Path, dict[str, bytes]]](), dict[str, str](), dict[str, str]()
    for path in deltas:
        with _reading(path):
            changed, notes, start = read_header(path)
            data = path.read_bytes()[start:]
            patches.append((path, {name: data[slice(*one["data_offsets"])] for name, one in changed.items()}))
            right |= json.loads(notes["checksums"])
    with _reading(base), base.open("rb") as file:
        tensors, _, start = read_header(base)
        head = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
        head += b" " * (-len(head) % 8)  # tensors are aligned
        yield len(head).to_bytes(8, "little") + head
        file.seek(start)
        for name, one in tensors.items():
            begin, end = one["data_offsets"]
            tensor = numpy.frombuffer(file.read(end - begin), numpy.uint8)
            for path, patch in patches:
                if name in patch:
                    with _reading(path):
                        if (said := zstandard.frame_content_size(patch[name])) != end - begin:
                            raise ValueError(f"{name} changes {said} bytes, and has {end - begin}")
                        change = zstandard.decompress(patch[name])
                        tensor = tensor ^ numpy.frombuffer(change, numpy.uint8)
            found[name] = checksum(tensor)
            if found[name] != right.get(name, found[name]):
                raise DamageError(f"{name} of {newest} is not the trainer's: {base} or a delta is damaged")
            yield tensor
        listed = {name: (one["dtype"], one["shape"]) for name, one in tensors.items()}
        if not newest.endswith(f"-{checksum_of_all(listed, found)}"):
            raise DamageError(f"{newest} does not come of {base} and {len(deltas)} deltas: one is damaged")


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    import zstandard

    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, MemoryError, zstandard.ZstdError) as error:
        raise DamageError(f"{path} is torn, or no file of a trainer's weights: {error!r}") from error


def say_arrived(source: Path, copy: Path) -> None:
    """Tells the trainer, in its folder, which copy this machine has."""
    said = source / COPIES / f"{socket.gethostname()}-{checksum(str(copy.parent).encode())[:8]}"
    if not said.exists() or said.read_bytes() != os.fsencode(copy):
        said.parent.mkdir(exist_ok=True)
        part = said.with_name(f".{said.name}")
        part.write_bytes(os.fsencode(copy))
        part.rename(said)


def _run(options: argparse.Namespace) -> int:
    from rollstream.stderr_log import log_to_stderr

    log_to_stderr()
    last = ""
    while True:
        level, pause = logging.INFO, _LOOK_S
        try:
            copy = bring_up_to_date(options.source, options.copies.absolute())
            there = "nothing in" if options.source.is_dir() else "there is no folder"
            said = f"no weights yet: {there} {options.source}" if copy is None else f"has {copy}"
            if copy is not None:
                say_arrived(options.source, copy)
        except (DamageError, OSError) as error:  # the rest of a file may be on its way
            level, pause, said = logging.WARNING, 10 * _LOOK_S, f"{error} (it is tried again)"
        if said != last:
            _LOG.log(level, "%s", said)
        last = said
        time.sleep(pause)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", type=Path, metavar="FOLDER", help="the trainer's, as it is seen here")
    add("copies", type=Path, metavar="COPIES", help="a folder of this machine, from which servers load")


COMMAND = Command(
    "copy a trainer's weight updates to servers of another cluster, by files", _run, _add_arguments
)
