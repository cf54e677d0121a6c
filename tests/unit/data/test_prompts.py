import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollstream.config.settings import CustomClassSettings
from rollstream.data import prompts
from rollstream.data.prompts import KnownDataset, PromptDataset, filter_overlong, load_prompts
from rollstream.data.sources import Concatenated, ObjectRows, RowSource, open_source
from rollstream.data.values import Row
from rollstream.errors import ConfigError, DataError
from rollstream.trajectory import PromptRow

from .files import data_settings, verl_row, write_folder, write_jsonl, write_parquet

ROWS = [verl_row(i) for i in range(20)]


class Counting(Concatenated):
    def __init__(self, source: RowSource) -> None:
        super().__init__([source])
        self.read: list[int] = []

    def row(self, position: int) -> Row:
        self.read.append(position)
        return super().row(position)


def test_rows_by_index_over_several_files(tmp_path: Path) -> None:
    one, two = write_jsonl(tmp_path / "a.jsonl", ROWS[:5]), write_parquet(tmp_path / "b.parquet", ROWS[5:])
    dataset = load_prompts(data_settings(one, two))
    assert len(dataset) == 20
    assert dataset.order.tolist() == list(range(20)) and dataset.order.dtype == np.int64
    assert [dataset.row(i).ground_truth for i in range(20)] == [str(i + 1) for i in range(20)]
    assert [dataset.row(i).index for i in (0, 19)] == [0, 19]
    assert list(dataset.prompt_keys()) == [dataset.row(i).prompt_key for i in range(20)]


def test_the_fingerprint_is_of_the_rows_not_of_the_files(tmp_path: Path) -> None:
    shuffled_keys = [dict(random.Random(i).sample(list(row.items()), len(row))) for i, row in enumerate(ROWS)]
    datasets = [
        load_prompts(data_settings(write_jsonl(tmp_path / "a.jsonl", ROWS))),
        load_prompts(data_settings(write_jsonl(tmp_path / "k.jsonl", shuffled_keys))),
        load_prompts(data_settings(write_jsonl(tmp_path / "z.jsonl.zst", ROWS))),
        load_prompts(data_settings(write_parquet(tmp_path / "p.parquet", ROWS, compression="zstd"))),
        load_prompts(data_settings(write_folder(tmp_path / "hf", ROWS))),
        load_prompts(data_settings(tmp_path / "a.jsonl", shuffle=True, train_max_samples=3)),
    ]
    assert len({dataset.fingerprint for dataset in datasets}) == 1
    assert len(datasets[0].fingerprint) == 32
    other_order = load_prompts(data_settings(write_jsonl(tmp_path / "o.jsonl", ROWS[::-1])))
    assert other_order.fingerprint != datasets[0].fingerprint
    assert sorted(other_order.prompt_keys()) == sorted(datasets[0].prompt_keys())


def test_files_by_a_pattern_and_by_a_folder(tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    (shards / "more").mkdir(parents=True)
    for name, rows in (("b-1", ROWS[7:]), ("a-0", ROWS[:7])):
        write_parquet(shards / f"{name}.parquet", rows)
    for name in ("README.md", ".a.parquet.tmp", ".hidden.parquet"):
        (shards / name).write_text("no rows")
    write_folder(tmp_path / "saved", ROWS)
    expected = load_prompts(data_settings(write_jsonl(tmp_path / "all.jsonl", ROWS))).fingerprint
    for name in (shards, shards / "*.parquet", tmp_path / "**" / "?-*.parquet", tmp_path / "sha*"):
        dataset = load_prompts(data_settings(name))
        assert dataset.fingerprint == expected, name
        assert [file["name"] for file in dataset.file_digests or ()] == ["a-0.parquet", "b-1.parquet"]
    assert load_prompts(data_settings(tmp_path / "save*")).fingerprint == expected

    write_jsonl(shards / "c.jsonl", ROWS)
    with pytest.raises(DataError, match=r"c\.jsonl"):
        load_prompts(data_settings(shards))
    with pytest.raises(DataError, match="no such file"):
        load_prompts(data_settings(shards / "*.csv"))
    with pytest.raises(DataError, match=r"hdfs://there/a\.parquet: nothing is downloaded"):
        load_prompts(data_settings("hdfs://there/a.parquet"))
    (shards / "a-[0].jsonl").write_bytes((shards / "c.jsonl").read_bytes())
    assert len(load_prompts(data_settings(shards / "a-[0].jsonl"))) == len(ROWS)  # a name, not a pattern


def test_shuffle_is_seeded_and_cut_after(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    one = load_prompts(data_settings(path, shuffle=True, seed=7)).order.tolist()
    assert sorted(one) == list(range(20)) and one != list(range(20))
    # The order is part of a run's identity: it must be this one in any version of numpy.
    assert one[:6] == [1, 17, 2, 5, 11, 0]
    assert (
        load_prompts(data_settings(path, shuffle=True, seed=7, train_max_samples=6)).order.tolist() == one[:6]
    )
    assert load_prompts(data_settings(path, shuffle=True, seed=8)).order.tolist() != one
    assert load_prompts(data_settings(path, train_max_samples=3)).order.tolist() == [0, 1, 2]
    assert len(load_prompts(data_settings(path, train_max_samples=100)).order) == 20


def test_unchanged_files_are_not_read_again(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [row | {"agent_name": "judge"} for row in ROWS])
    first = load_prompts(data_settings(path))
    assert first.file_digests is not None
    known = KnownDataset(
        first.file_digests, first.fingerprint, frozenset({"kept"}), True, {"openai/gsm8k": 20}
    )
    assert [(file["name"], file["size"]) for file in known.file_digests] == [("a.jsonl", path.stat().st_size)]
    source = Counting(open_source(path))
    again = PromptDataset(source, known=known)
    assert again.fingerprint == first.fingerprint and source.read == [0]
    assert (again.agent_names(), again.has_images()) == ({"kept"}, True)
    assert again.data_sources() == {"openai/gsm8k": 20}
    path.write_bytes(path.read_bytes() + b"\n")  # other bytes, same rows
    again = load_prompts(data_settings(path), known=known)
    assert again.file_digests != known.file_digests
    assert again.fingerprint == first.fingerprint
    write_jsonl(path, ROWS[:-1])
    assert load_prompts(data_settings(path), known=known).fingerprint != first.fingerprint


def test_bad_rows_are_named_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    bad = b'{"prompt": 5}\n' * 4 + b"{oops\n" + b'{"text": "x"}\n' * 3
    path.write_bytes(b'{"prompt": "fine"}\n\n' + bad)
    dataset = load_prompts(data_settings(path))
    with pytest.raises(DataError) as caught:
        _ = dataset.fingerprint
    lines = str(caught.value).splitlines()
    assert lines[0] == "8 of 9 rows cannot be used:"
    assert lines[1].startswith(f"  {path}, row 1 (line 3): ") and len(lines) == 7
    with pytest.raises(DataError, match=r"row 8 \(line 10\)"):
        dataset.row(8)
    path.write_bytes(bad)
    with pytest.raises(DataError, match="8 of 8"):
        load_prompts(data_settings(path))


def test_a_row_that_changes_under_the_run_is_an_error(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    dataset = load_prompts(data_settings(path))
    _ = dataset.fingerprint
    with path.open("r+b") as file:
        data = path.read_bytes()
        file.seek(data.index(b"What is 3"))
        file.write(b"What is 9")
    assert dataset.row(2).ground_truth == "3"
    for content in (None, b"oops " * 2000):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(DataError, match=r"row 3 \(line 4\)"):
            dataset.row(3)


def test_what_all_rows_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["tool_agent", None, "judge", "tool_agent"]
    rows = [row | {"agent_name": name} for row, name in zip(ROWS, names, strict=False)] + ROWS[4:]
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x"}, *rows])
    dataset = load_prompts(data_settings(path, train_max_samples=2))
    assert dataset.agent_names() == {"tool_agent", "judge"}
    assert dataset.first_row_of("judge") == f"{path}, row 3 (line 4)"
    assert dataset.data_sources() == {"unknown": 1, "openai/gsm8k": 20}
    monkeypatch.setattr(prompts, "_KEPT_SOURCES", 1)
    assert load_prompts(data_settings(path)).data_sources() == {"unknown": 1, "(others)": 20}


def test_the_repeats_of_a_row_are_read_once_and_do_not_share_it(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    source = Counting(open_source(path))
    dataset = PromptDataset(source)
    for _ in range(8):
        row = dataset.row(3)
        assert (row.ground_truth, row.messages[-1]["content"]) == ("4", "What is 3 + 1?")
        row.messages[-1]["content"] = row.extra_info["level"] = "changed"
    assert source.read.count(3) == 1


def test_what_stops_at_once(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl, row 0 \(line 1\)"):
        load_prompts(data_settings(write_jsonl(tmp_path / "a.jsonl", [{"text": "x"}])))
    with pytest.raises(ConfigError, match=r"data\.train_files"):
        load_prompts(data_settings())
    with pytest.raises(ConfigError, match="train_max_samples"):
        load_prompts(data_settings(write_jsonl(tmp_path / "a.jsonl", ROWS), train_max_samples=0))


CUSTOM = """
import numpy as np

class Squares:
    def __init__(self, files, data):
        self.files, self.data = files, data

    def __len__(self):
        return 5

    def __getitem__(self, i):
        if i == 4:
            raise KeyError("four")
        extra_info = {"files": self.files}
        return {"prompt": f"{i} squared?", "ground_truth": np.int64(i * i), "extra_info": extra_info}

class Empty(Squares):
    def __len__(self):
        return 0

class Leaves(Squares):
    def __init__(self, files, data):
        raise SystemExit(3)

class LeavesLater(Squares):
    def __getitem__(self, i):
        raise SystemExit(3)

class Picky:
    def __init__(self, files):
        pass
"""


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("Empty", DataError),
        ("Picky", DataError),
        ("Leaves", DataError),
        ("LeavesLater", DataError),
        ("Square", ConfigError),
        (None, ConfigError),
    ],
)
def test_a_custom_class_that_cannot_be_used(tmp_path: Path, name: str | None, error: type[Exception]) -> None:
    path = tmp_path / "mine.py"
    path.write_text(CUSTOM)
    with pytest.raises(error):
        load_prompts(data_settings("some/file", custom_cls=CustomClassSettings(str(path), name)))


def test_custom_class(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(CUSTOM)
    dataset = load_prompts(data_settings("some/file", custom_cls=CustomClassSettings(str(path), "Squares")))
    assert dataset.row(3).ground_truth == 9
    assert dataset.row(3).extra_info == {"files": ["some/file"]}
    assert dataset.file_digests is None
    with pytest.raises(DataError, match=r"mine\.py\), row 4: .*four"):
        _ = dataset.fingerprint


@pytest.mark.parametrize("nested", ["a dict in itself", "lists", "in a prompt"])
def test_a_row_that_contains_itself_or_is_nested_too_deep_is_named(nested: str) -> None:
    ring: dict[str, Any] = {}
    ring["again"] = ring
    loop: list[Any] = []
    loop.append(loop)
    lists: list[Any] = []
    for _ in range(5000):
        lists = [lists]
    values = {"a dict in itself": ring, "lists": lists}
    row = (
        {"prompt": loop} if nested == "in a prompt" else {"prompt": "b", "extra_info": {"x": values[nested]}}
    )
    dataset = PromptDataset(ObjectRows([{"prompt": "a"}, row], "rows"))
    for read in (lambda: dataset.row(1), lambda: dataset.fingerprint):
        with pytest.raises(DataError, match="rows, row 1"):
            read()


def lengths(rows: list[PromptRow]) -> list[int]:
    return [len(row.messages[0]["content"]) for row in rows]


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x" * (1 + i % 10)} for i in range(50)])


@pytest.mark.parametrize("batch_size", [1, 7, 256])
def test_overlong_prompts_are_left_out(lines: Path, batch_size: int) -> None:
    dataset = load_prompts(data_settings(lines, shuffle=True))
    before = dataset.order.tolist()
    assert filter_overlong(dataset, lengths, 4, batch_size=batch_size) == (30, 50)
    assert dataset.order.tolist() == [index for index in before if index % 10 < 4]
    assert len(dataset) == 50


def test_the_cut_comes_after_the_filter(lines: Path) -> None:
    dataset = load_prompts(data_settings(lines, train_max_samples=6))
    count = filter_overlong(dataset, lengths, 4, batch_size=10)
    assert dataset.order.tolist() == [0, 1, 2, 3, 10, 11]
    assert count == (12, 20)


def test_no_prompt_fits(lines: Path) -> None:
    with pytest.raises(DataError, match="shortest has 1"):
        filter_overlong(load_prompts(data_settings(lines)), lengths, 0)
