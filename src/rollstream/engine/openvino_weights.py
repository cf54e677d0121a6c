"""New weights for an OpenVINO model: of another export, or written into the places of the old ones."""

import hashlib
import shutil
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy
import safetensors

from rollstream.engine.checks import read_model_limits
from rollstream.errors import ConfigError, EngineError

XML, BIN = "openvino_model.xml", "openvino_model.bin"

_CONFIGS = ("config.json", "generation_config.json")
"""What a pipeline reads beside the model: the second one has the end token."""

_EXPORT = "export the new weights as well, and name the export's folder"

Places = Mapping[str, tuple[tuple[int, ...], list[int]]]
Tensors = Mapping[str, numpy.ndarray[Any, Any]]


def lay_out_weights(model: Path, source: Path, target: Path) -> None:
    """Makes `target` a folder of `model` with the weights of `source`. Nothing in it points elsewhere.

    Args:
        model: folder of an OpenVINO model.
        source: another export of the same model; or a folder of safetensors, as trainers save them. Those
            take the places of the tensors in `model`'s own safetensors, which the `.bin` has to hold byte for
            byte as float32.
        target: an empty folder.

    Raises:
        EngineError: `source` has no weights, or those of another model; or the places cannot be told, because
            the export has folded, merged or rounded weights.
    """
    try:
        exported = (source / XML).is_file()
        if exported:
            _check_limits(model, source)
            shutil.copyfile(source / BIN, target / BIN)
        else:
            new = read_safetensors(source)
            if not new:
                raise EngineError(f"cannot load weights: {source} has neither {XML} nor safetensors")
            content = bytearray((model / BIN).read_bytes())
            _write_tensors(content, find_places(model), new, source)
            (target / BIN).write_bytes(content)
        shutil.copyfile((source if exported else model) / XML, target / XML)
        for name in _CONFIGS:
            if (model / name).is_file():
                shutil.copyfile(model / name, target / name)
    except OSError as error:
        raise EngineError(f"cannot load the weights in {source}: {error}") from error


def read_safetensors(folder: Path) -> Tensors:
    """All tensors of a folder, by name, as float32.

    Raises:
        EngineError: a file is not of this format, or has tensors of other types than F32, F16 and BF16, or has
            values that are not numbers (openvino-genai would sample from all tokens alike).
    """
    tensors: dict[str, numpy.ndarray[Any, Any]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            entries = safetensors.deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
            for name, entry in sorted(entries, key=lambda one: one[0]):  # they come in any order
                tensors[name] = _as_float32(entry["data"], entry["dtype"]).reshape(entry["shape"])
                if not numpy.isfinite(tensors[name]).all():
                    raise ValueError(f"{name} has values that are not numbers")
        except (safetensors.SafetensorError, ValueError) as error:
            raise EngineError(f"{path} cannot be read: {error}") from error
    return tensors


@lru_cache(maxsize=1)
def find_places(model: Path) -> Places:
    """Where in the `.bin` each tensor of the folder's safetensors is: its shape, and the offsets in bytes.

    A process looks once: the second update of a run's model reads none of the old weights.

    Raises:
        EngineError: one is not there, or two are in the same place.
        OSError: a file cannot be read.
    """
    content = memoryview((model / BIN).read_bytes())
    offsets: dict[int, set[int]] = defaultdict(set)
    for layer in ElementTree.parse(model / XML).getroot().iter("layer"):
        data = layer.find("data")
        if layer.get("type") == "Const" and data is not None and data.get("element_type") == "f32":
            offsets[int(data.get("size", 0))].add(int(data.get("offset", 0)))
    tensors = read_safetensors(model)
    # Each constant is read once: comparing each tensor with all of its size takes the square of the layers.
    by_content: dict[bytes, list[int]] = defaultdict(list)
    for size in {tensor.nbytes for tensor in tensors.values()}:
        for at in offsets[size]:
            by_content[_digest(content[at : at + size])].append(at)
    places = {name: (one.shape, by_content[_digest(one.tobytes())]) for name, one in tensors.items()}
    taken: dict[int, str] = {}
    for name, (_, found) in places.items():
        if not found:
            raise EngineError(
                f"{model / BIN} does not hold {name!r} of its safetensors as float32: {_EXPORT}"
            )
        if found[0] in taken:
            raise EngineError(f"{model / BIN} holds {name!r} and {taken[found[0]]!r} as one: {_EXPORT}")
        taken[found[0]] = name
    if not places:
        raise EngineError(
            f"{model} has no safetensors, which tell where its export holds which weights: {_EXPORT}"
        )
    return places


def _digest(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()


def _write_tensors(content: bytearray, places: Places, new: Tensors, source: Path) -> None:
    for name in sorted(places.keys() | new.keys()):
        shapes = (places[name][0] if name in places else None, new[name].shape if name in new else None)
        if shapes[0] != shapes[1]:
            raise EngineError(
                f"the weights in {source} are of another model: the shape of {name} is {shapes[1]}, "
                f"not {shapes[0]}"
            )
        data = new[name].tobytes()
        for at in places[name][1]:
            content[at : at + len(data)] = data


def _as_float32(data: bytes, dtype: str) -> numpy.ndarray[Any, Any]:
    if dtype == "F32":
        return numpy.frombuffer(data, numpy.dtype("<f4"))
    if dtype == "F16":
        return numpy.frombuffer(data, numpy.dtype("<f2")).astype(numpy.float32)
    if dtype == "BF16":  # the upper half of a float32
        return (numpy.frombuffer(data, numpy.dtype("<u2")).astype(numpy.uint32) << 16).view(numpy.float32)
    raise ValueError(f"dtype {dtype!r}, want F32, F16 or BF16")


def _check_limits(model: Path, source: Path) -> None:
    """An export of another model would load, and then answer for this one."""
    try:
        own, other = read_model_limits(model), read_model_limits(source)
    except ConfigError as error:
        raise EngineError(f"cannot load weights: {error}") from error
    for before, after in (
        (own.vocab_size, other.vocab_size),
        (own.max_model_len, other.max_model_len),
    ):
        if after not in (None, before):
            raise EngineError(
                f"the weights in {source} are of another model: its limit is {after}, not {before}"
            )
