from pathlib import Path

import pytest

from rollstream.data.overlong import OverlongCount, filter_overlong
from rollstream.data.prompts import load_prompts
from rollstream.errors import DataError
from rollstream.trajectory import PromptRow

from .files import data_settings, write_jsonl


def lengths(rows: list[PromptRow]) -> list[int]:
    return [len(row.messages[0]["content"]) for row in rows]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x" * (1 + i % 10)} for i in range(50)])


@pytest.mark.parametrize("batch_size", [1, 7, 256])
def test_overlong_prompts_are_left_out(path: Path, batch_size: int) -> None:
    dataset = load_prompts(data_settings(path, shuffle=True))
    before = dataset.order.tolist()
    assert filter_overlong(dataset, lengths, 4, batch_size=batch_size) == OverlongCount(
        removed=30, checked=50
    )
    assert dataset.order.tolist() == [index for index in before if index % 10 < 4]
    assert len(dataset) == 50


def test_the_cut_comes_after_the_filter(path: Path) -> None:
    dataset = load_prompts(data_settings(path, train_max_samples=6))
    count = filter_overlong(dataset, lengths, 4, batch_size=10)
    assert dataset.order.tolist() == [0, 1, 2, 3, 10, 11]
    assert count == OverlongCount(removed=12, checked=20)


def test_nothing_fits(path: Path) -> None:
    dataset = load_prompts(data_settings(path))
    with pytest.raises(
        DataError, match=r"all 50 prompts are longer than data.max_prompt_length=0 .*shortest has 1"
    ):
        filter_overlong(dataset, lengths, 0)


def test_a_wrong_render_function(path: Path) -> None:
    with pytest.raises(ValueError, match="render gave"):
        filter_overlong(load_prompts(data_settings(path)), lambda rows: [1], 5)
