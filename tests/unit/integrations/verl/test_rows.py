"""Rows of verl's dataset: what of them is rollstream's, and what a loop gets."""

from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from rollstream.config.load import compose, to_settings
from rollstream.data.prompts import PromptDataset, load_prompts
from rollstream.data.sources import ObjectRows
from rollstream.errors import DataError
from rollstream.integrations.verl.rows import VerlDataset, VerlRows, sample_row, shows_media


class Rows(list[Any]):
    """Rows as `RLHFDataset` gives them: the file's, and what verl adds."""


def row(i: int, **others: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"question {i}"}]
    return {
        "prompt": messages,
        "data_source": "s",
        "reward_model": {"style": "rule", "ground_truth": str(i)},
        "extra_info": {"split": "train", "index": i},
        "raw_prompt": messages,
        "dummy_tensor": np.zeros(1),
        "index": 0,
        "tools_kwargs": {},
        "interaction_kwargs": {},
        **others,
    }


def dataset(*rows: Any) -> VerlDataset:
    return VerlDataset(VerlRows(Rows(rows), "prompt"), shuffle_seed=None)


def test_a_row_has_the_key_it_has_without_verl(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    plain = [
        {key: row(i)[key] for key in ("prompt", "data_source", "reward_model", "extra_info")}
        for i in range(3)
    ]
    file.write_bytes(b"\n".join(map(orjson.dumps, plain)))
    ours = load_prompts(to_settings(compose([f"data.train_files={file}"])).data)
    theirs = dataset(*(row(i) for i in range(3)))
    given = PromptDataset(ObjectRows(Rows(row(i) for i in range(3)), "rows"))  # to `run_generation`
    for other in (theirs, given):
        assert list(other.prompt_keys()) == list(ours.prompt_keys())
        assert other.fingerprint == ours.fingerprint


def test_the_loop_gets_the_row_as_verl_has_it() -> None:
    found = dataset(row(0), row(1, agent_name="mine", level=np.int64(4))).row(1)
    assert (found.index, found.ground_truth, found.agent_name) == (1, "1", "mine")
    assert found.columns["level"] == 4
    assert set(found.sample) == {*row(0), "agent_name", "level"} - {"dummy_tensor"}
    assert isinstance(found.sample["level"], np.int64)
    assert found.sample["raw_prompt"] == found.messages


def test_an_edit_changes_the_fingerprint() -> None:
    before = dataset(row(0), row(1)).fingerprint
    assert dataset(row(0), row(1)).fingerprint == before
    assert dataset(row(0), row(1, level=1)).fingerprint != before
    assert dataset(row(1), row(0)).fingerprint != before


class Picture:
    """As Pillow's, as far as it matters here."""

    def __init__(self, pixels: bytes) -> None:
        self.pixels = pixels

    def tobytes(self) -> bytes:
        return self.pixels


def test_pictures_are_told_apart_and_not_stored() -> None:
    def shown(pixels: bytes) -> VerlDataset:
        parts = [{"type": "image", "image": Picture(pixels)}, {"type": "text", "text": "what is it?"}]
        return dataset(row(0, raw_prompt=[{"role": "user", "content": parts}], prompt="<image>what is it?"))

    one, other = shown(b"cat"), shown(b"dog")
    assert one.fingerprint != other.fingerprint == shown(b"dog").fingerprint
    found = one.row(0)
    assert found.sample["raw_prompt"][0]["content"][0]["image"].pixels == b"cat"
    assert found.messages[0]["content"][1] == {"type": "text", "text": "what is it?"}
    assert not found.images
    assert shows_media(found) and not shows_media(dataset(row(0)).row(0))


def test_what_cannot_be_used() -> None:
    with pytest.raises(DataError, match="holds no rows"):
        VerlRows([], "prompt")
    with pytest.raises(DataError, match=r"prompt is text.*verl wants a list of messages"):
        dataset(row(0, raw_prompt="2 + 2"))

    class Broken(Rows):
        def __getitem__(self, at: Any) -> Any:
            raise KeyError("gone")

    with pytest.raises(DataError, match="verl's dataset raised KeyError"):
        VerlDataset(VerlRows(Broken([1]), "prompt"), shuffle_seed=None)


def test_a_row_is_read_once_for_all_its_repeats() -> None:
    """verl's dataset opens images, in the process that everything else waits for."""
    read: list[int] = []

    class Counted(Rows):
        def __getitem__(self, position: Any) -> Any:
            read.append(position)
            return super().__getitem__(position)

    rows = VerlDataset(VerlRows(Counted([row(i) for i in range(40)]), "prompt"), shuffle_seed=None)
    read.clear()
    for index in (7, 3, 7, 3):
        for _ in range(8):
            found = rows.row(index)
            assert (found.index, found.sample["reward_model"]["ground_truth"]) == (index, str(index))
    assert read == [7, 3]
    for index in range(40):
        rows.row(index)
    rows.row(7)
    assert read.count(7) == 2, "not all are kept"


@pytest.mark.parametrize(
    "sample", [{}, {"raw_prompt": None}, {"raw_prompt": ["text"]}, {"raw_prompt": "text"}]
)
def test_a_sample_without_messages(sample: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"sample 3: raw_prompt .* list of messages"):
        sample_row(3, {"index": 3, **sample})


def test_a_sample_by_itself() -> None:
    messages = [{"role": "user", "content": "q"}]
    for given in (messages, tuple(messages), np.array(messages, dtype=object)):
        made = sample_row(3, {"index": 3, "raw_prompt": given, "x": 1})
        assert (made.index, made.messages, made.sample["x"]) == (3, messages, 1)
