"""The reader of DataProtos: what was written comes back, and what a pickle would run is not run."""

import contextlib
import io
import os
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollstream.errors import DataError
from rollstream.integrations.verl.dataproto import read_dataproto

torch = pytest.importorskip("torch")
tensordict = pytest.importorskip("tensordict")

from rollstream.store.export.dataproto import save_dataproto  # noqa: E402 (needs both)


def tensors(**more: Any) -> Any:
    columns = {"prompts": torch.arange(6).reshape(2, 3), "responses": torch.tensor([[7, 8], [9, 0]]), **more}
    return tensordict.TensorDict(columns, batch_size=[2]).consolidate()


SEEN = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]])


def test_every_type_comes_back(tmp_path: Path) -> None:
    columns = {
        "half": torch.ones(2, 1, dtype=torch.bfloat16),
        "flag": torch.tensor([True, False]),
        "deep": torch.rand(2, 3, 5),
        "empty": torch.zeros(2, 0, dtype=torch.int8),
    }
    others = {
        "object": np.array([{"a": [1]}, None], object),
        "text": np.array(["x", "yz"]),
        "number": np.array([1, 2], np.int32),
        "scalars": np.array([np.float64(1.5), np.int64(2)], object),
    }
    save_dataproto(tmp_path / "x.pkl", tensors(**columns), others, {"a": [1, {"b": 2.0}]})
    found = read_dataproto(tmp_path / "x.pkl")
    assert len(found) == 2
    for name, wanted in columns.items():
        assert found.batch[name].dtype == wanted.dtype
        assert torch.equal(found.batch[name], wanted)
    for name, array in others.items():
        assert found.non_tensor_batch[name].dtype == array.dtype
        assert found.non_tensor_batch[name].tolist() == array.tolist()
    assert found.meta_info == {"a": [1, {"b": 2.0}]}
    with pytest.raises(DataError, match="without attention_mask"):
        next(found.trajectories())


def test_trajectories_of_a_file_that_has_only_the_least(tmp_path: Path) -> None:
    save_dataproto(tmp_path / "x.pkl", tensors(attention_mask=SEEN), {}, {})
    one, two = read_dataproto(tmp_path / "x.pkl").trajectories()
    assert (one.prompt_ids, one.response_ids, one.response_mask) == ([1, 2], [7, 8], [1, 1])
    assert (two.prompt_ids, two.response_ids, two.reward) == ([3, 4, 5], [9], None)
    assert two.response_logprobs is None


HEAD = b"\x80\x04\x8c\x0dverl.protocol\x8c\x09DataProto\x93)\x81"
"""A pickle's begin: a DataProto without a state."""


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_code_in_a_pickle_is_refused(tmp_path: Path) -> None:
    evil = Evil(tmp_path / "made")
    save_dataproto(tmp_path / "a.pkl", tensors(), {"x": np.array([evil, None], object)}, {})
    save_dataproto(tmp_path / "b.pkl", tensors(), {}, {"x": evil})
    (tmp_path / "c.pkl").write_bytes(pickle.dumps(evil))
    # In the tensors' own pickle, inside.
    inside = io.BytesIO()
    torch.save({"prompts": evil}, inside)
    bytes_of_tensors = b"B" + len(inside.getvalue()).to_bytes(4, "little") + inside.getvalue()
    (tmp_path / "d.pkl").write_bytes(HEAD + bytes_of_tensors + b"}}\x87b.")
    dotted = b"\x80\x04\x8c\x05numpy\x8c\x0fdtype.__class__\x93."
    (tmp_path / "e.pkl").write_bytes(dotted)
    for name in "abcde":
        with pytest.raises(DataError, match=rf"{name}\.pkl"):
            read_dataproto(tmp_path / f"{name}.pkl")
    assert not (tmp_path / "made").exists()


def test_other_files_and_damage_are_errors(tmp_path: Path) -> None:
    whole = tmp_path / "whole.pkl"
    save_dataproto(whole, tensors(), {"x": np.array([1, 2])}, {})
    data = whole.read_bytes()
    (tmp_path / "list.pkl").write_bytes(pickle.dumps([1]))
    with pytest.raises(DataError, match="pickle of list"):
        read_dataproto(tmp_path / "list.pkl")
    rng = random.Random(0)
    path = tmp_path / "x.pkl"
    for _ in range(60):
        path.write_bytes(data[: rng.randrange(len(data))])
        with pytest.raises(DataError, match=r"x\.pkl"):
            read_dataproto(path)
        changed = bytearray(data)
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        with contextlib.suppress(DataError):
            read_dataproto(path)  # pickles have no checksum: a number may just be another one


def test_numpy_serialisation_of_verl_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.pkl").write_bytes(HEAD + b"N}}\x87b.")
    with pytest.raises(DataError, match="SERIALIZATION_METHOD=numpy"):
        read_dataproto(tmp_path / "x.pkl")
