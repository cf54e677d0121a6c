"""Weights written into an export: in the right places, or not at all."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from rollstream.demo import MODEL_PATH
from rollstream.engine.openvino_weights import BIN, XML, find_places, lay_out_weights, read_safetensors
from rollstream.errors import EngineError


def save(folder: Path, tensors: dict[str, np.ndarray], dtype: str = "F32") -> Path:  # type: ignore[type-arg]
    """A safetensors file, by the letter of the format."""
    folder.mkdir(exist_ok=True)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, tensor in tensors.items():
        match dtype:
            case "BF16":
                piece = (tensor.astype("<f4").view(np.uint32) >> 16).astype("<u2").tobytes()
            case "F16":
                piece = tensor.astype("<f2").tobytes()
            case _:
                piece = tensor.astype("<f4").tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": tensor.shape,
            "data_offsets": (len(data), len(data) + len(piece)),
        }
        data += piece
    encoded = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    target = tmp_path / "target"
    target.mkdir()
    return target


def test_the_same_weights_make_the_same_model(tmp_path: Path, target: Path) -> None:
    lay_out_weights(MODEL_PATH, MODEL_PATH, target)  # it is an export as well as safetensors
    only = tmp_path / "only"
    only.mkdir()
    shutil.copyfile(MODEL_PATH / "model.safetensors", only / "model.safetensors")
    again = tmp_path / "again"
    again.mkdir()
    lay_out_weights(MODEL_PATH, only, again)
    for folder in (target, again):
        assert sorted(file.name for file in folder.iterdir()) == [
            *("config.json", "generation_config.json", BIN, XML)
        ]
        for file in folder.iterdir():
            assert file.read_bytes() == (MODEL_PATH / file.name).read_bytes()
            assert not file.is_symlink()


def test_every_weight_goes_to_its_place_and_nothing_else_changes(tmp_path: Path, target: Path) -> None:
    new = {name: tensor + 1 for name, tensor in read_safetensors(MODEL_PATH).items()}
    lay_out_weights(MODEL_PATH, save(tmp_path / "new", new), target)
    before, after = (MODEL_PATH / BIN).read_bytes(), bytearray((target / BIN).read_bytes())
    assert len(before) == len(after)
    for name, (shape, offsets) in find_places(MODEL_PATH).items():
        assert shape == new[name].shape
        for at in offsets:
            length = new[name].nbytes
            assert after[at : at + length] == new[name].tobytes()
            after[at : at + length] = before[at : at + length]
    assert bytes(after) == before


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_dtypes(tmp_path: Path, dtype: str) -> None:
    tensors = {"a": np.array([[1.0, -0.5], [2.0, 0.25]]), "b": np.array([3.0])}
    found = read_safetensors(save(tmp_path / "x", tensors, dtype))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == np.float32
        assert found[name].shape == tensor.shape
        assert found[name].tolist() == tensor.tolist()


def test_weights_of_another_model_are_refused(tmp_path: Path, target: Path) -> None:
    shipped = dict(read_safetensors(MODEL_PATH))
    norm = "model.norm.weight"
    wrong = [
        {name: t for name, t in shipped.items() if name != norm},
        shipped | {"lm_head.weight": np.zeros(3)},
        shipped | {norm: np.ones(64)},
    ]
    for tensors in wrong:
        with pytest.raises(EngineError, match="of another model"):
            lay_out_weights(MODEL_PATH, save(tmp_path / "new", tensors), target)
    with pytest.raises(EngineError, match="cannot load"):
        lay_out_weights(MODEL_PATH, tmp_path / "nothing", target)
    (tmp_path / "empty").mkdir()
    with pytest.raises(EngineError, match="neither"):
        lay_out_weights(MODEL_PATH, tmp_path / "empty", target)
    other = tmp_path / "other"
    shutil.copytree(MODEL_PATH, other)
    (other / "config.json").write_text('{"vocab_size": 1000}')
    with pytest.raises(EngineError, match="of another model"):
        lay_out_weights(MODEL_PATH, other, target)
    (other / BIN).unlink()
    (other / "config.json").unlink()
    with pytest.raises(EngineError, match="No such file"):
        lay_out_weights(MODEL_PATH, other, target)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_numbers_are_refused(value: float, tmp_path: Path, target: Path) -> None:
    broken = {name: tensor.copy() for name, tensor in read_safetensors(MODEL_PATH).items()}
    broken["model.norm.weight"][7] = value
    with pytest.raises(EngineError, match=r"model\.norm\.weight has values that are not numbers"):
        lay_out_weights(MODEL_PATH, save(tmp_path / "new", broken), target)


def test_an_export_without_clear_places_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL_PATH, model)
    shipped = dict(read_safetensors(MODEL_PATH))
    save(model, shipped | {"more": np.full(128, 0.125)})
    with pytest.raises(EngineError, match="does not hold 'more' of its safetensors"):
        find_places(model)
    save(model, shipped | {"twin": shipped["model.norm.weight"]})
    with pytest.raises(EngineError, match="twin"):
        find_places(model)
    (model / "model.safetensors").unlink()
    with pytest.raises(EngineError, match="has no safetensors"):
        find_places(model)


def test_a_file_that_is_not_whole_is_named(tmp_path: Path) -> None:
    path = save(tmp_path, {"a": np.arange(4.0)}) / "model.safetensors"
    content = path.read_bytes()
    for wrong in (content[:-1], content[:20], b"", content.replace(b"F32", b"I32")):
        path.write_bytes(wrong)
        with pytest.raises(EngineError, match=r"model\.safetensors cannot be read"):
            read_safetensors(tmp_path)
