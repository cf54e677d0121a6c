import datetime
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from rollstream.data.row import parse_row
from rollstream.data.sources import Concatenated, JsonLines, decode_line, open_source
from rollstream.data.values import BadRow, content_digest
from rollstream.errors import DataError

from .files import all_rows, verl_row, write_folder, write_jsonl, write_parquet

ROWS = [verl_row(i) for i in range(1500)]
UNEVEN: list[dict[str, Any]] = [
    {
        "prompt": [{"role": "user", "content": "hi"}],
        "extra_info": {"index": 0, "tools": {"calculator": {"x": 1}}},
        "note": None,
    },
    {
        "prompt": [
            {"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]},
            {"role": "tool", "content": "b"},
        ],
        "extra_info": {"index": 1, "hint": "h", "tools": {"search": {"k": [1, None]}}},
        "note": "n",
    },
]


def test_every_format_gives_the_same_rows_in_any_order(tmp_path: Path) -> None:
    paths = [
        write_jsonl(tmp_path / "a.jsonl", ROWS),
        write_jsonl(tmp_path / "a.json", ROWS),
        write_jsonl(tmp_path / "a.jsonl.zst", ROWS),
        write_parquet(tmp_path / "a.parquet", ROWS, row_group_size=700),
        write_folder(tmp_path / "hf", ROWS, shards=3),
    ]
    order = np.random.default_rng(0).permutation(len(ROWS)).tolist()
    for path in paths:
        source = open_source(path)
        assert all_rows(source) == ROWS, path
        assert [source.row(i) for i in order] == [ROWS[i] for i in order], path
    both = Concatenated([open_source(path) for path in paths])
    assert len(both) == 7500
    assert [both.row(i) for i in range(1490, 1510)] == (ROWS * 2)[1490:1510]
    assert both.location(1500) == f"{paths[1]}, row 0 (line 1)"
    assert both.location(4501) == f"{paths[3]}, row 1"
    assert both.folder(4501) == tmp_path


@pytest.mark.parametrize("name", ["a.parquet", "hf"])
def test_keys_that_the_schema_invented_are_left_out(tmp_path: Path, name: str) -> None:
    write = write_folder if name == "hf" else write_parquet
    assert all_rows(open_source(write(tmp_path / name, UNEVEN))) == UNEVEN


def test_arrow_types_become_json(tmp_path: Path) -> None:
    table = pa.table(
        {
            "image": pa.array([{"bytes": b"\x00", "path": None}]),
            "when": pa.array([datetime.datetime(2024, 1, 1)], pa.timestamp("us")),
            "map": pa.array([[("a", 1.5), ("b", float("nan"))]], pa.map_(pa.string(), pa.float64())),
            "label": pa.array(["x"]).dictionary_encode(),
            "floats": pa.array([[1.0, float("nan")]]),
            "decimal": pa.array(["1.50"]).cast(pa.decimal128(5, 2)),
            "json": pa.array(['{"a": [1, null]}'], pa.json_()),
            "nested_json": pa.ListArray.from_arrays(
                [0, 1], pa.StructArray.from_arrays([pa.array(['{"x": 1}'], pa.json_())], names=["args"])
            ),
            "__index_level_0__": pa.array([17]),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    expected = {
        "image": {"bytes": "AA=="},
        "when": "2024-01-01T00:00:00",
        "map": {"a": 1.5},
        "label": "x",
        "floats": [1.0, None],
        "decimal": "1.50",
        "json": {"a": [1, None]},
        "nested_json": [{"args": {"x": 1}}],
    }
    assert all_rows(open_source(tmp_path / "a.parquet")) == [expected]


def test_parquet_whose_dictionaries_differ_between_its_parts(tmp_path: Path) -> None:
    def part(subject: str, role: str) -> pa.Table:
        contents = pa.array([f"{subject} {i}" for i in range(300)])
        turn = pa.StructArray.from_arrays(
            [pa.array([role] * 300).dictionary_encode(), contents], ["role", "content"]
        )
        prompts = pa.ListArray.from_arrays(pa.array(range(301), pa.int32()), turn)
        return pa.table({"prompt": prompts, "subject": pa.array([subject] * 300).dictionary_encode()})

    parts = [part("algebra", "user"), part("geometry", "system")]
    with pq.ParquetWriter(tmp_path / "parts.parquet", parts[0].schema) as writer:
        for table in parts:
            writer.write_table(table)
    pq.write_table(pa.concat_tables(parts), tmp_path / "one.parquet")
    expected = [row for table in parts for row in table.to_pylist()]
    for name in ("parts.parquet", "one.parquet"):
        assert all_rows(open_source(tmp_path / name)) == expected, name


def test_parquet_whose_rows_share_a_long_text_is_unpacked_in_bounded_memory(tmp_path: Path) -> None:
    rows = 4096
    texts = pa.array(["A manual of many pages. " * 4000, *(f"Question {i}?" for i in range(rows))])
    contents = texts.take(pa.array([at for i in range(rows) for at in (0, i + 1)]))
    turns = pa.StructArray.from_arrays([pa.array(["system", "user"] * rows), contents], ["role", "content"])
    prompts = pa.ListArray.from_arrays(pa.array(range(0, 2 * rows + 1, 2), pa.int32()), turns)
    pq.write_table(pa.table({"prompt": prompts}), tmp_path / "a.parquet")
    del contents, turns, prompts
    code = (
        "import sys, pyarrow as pa; from pathlib import Path; from rollstream.data.sources import open_source\n"
        "source = open_source(Path(sys.argv[1]))\n"
        "print(source.row(4095)['prompt'][1]['content'], pa.default_memory_pool().max_memory() >> 20)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a.parquet")], capture_output=True, text=True, check=True
    ).stdout.split()
    assert out[:2] == ["Question", "4095?"]
    assert int(out[2]) < 150  # MB; its texts are 390


def test_an_infinity_spoils_its_row_only(tmp_path: Path) -> None:
    first, second = all_rows(
        open_source(write_parquet(tmp_path / "a.parquet", [{"x": 1.0}, {"x": float("inf")}]))
    )
    assert first == {"x": 1.0} and isinstance(second, BadRow)


def test_dataset_folders_that_datasets_wrote(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(ROWS[:6])
    rows.shuffle(seed=1).save_to_disk(tmp_path / "hf", num_shards=2)
    source = open_source(tmp_path / "hf")
    found = all_rows(source)
    assert found != ROWS[:6]
    assert sorted(found, key=lambda row: row["extra_info"]["index"]) == ROWS[:6]  # type: ignore[index, call-overload]
    assert [file.parent for file in source.files or ()] == [tmp_path / "hf"] * 2
    datasets.DatasetDict({"train": rows, "test": rows.select([0])}).save_to_disk(tmp_path / "splits")
    assert len(open_source(tmp_path / "splits")) == 6
    assert len(open_source(tmp_path / "splits" / "test")) == 1
    datasets.DatasetDict({"test": rows}).save_to_disk(tmp_path / "test")
    with pytest.raises(DataError, match="test"):
        open_source(tmp_path / "test")


def test_zstd_in_several_frames(tmp_path: Path) -> None:
    halves = [b"".join(orjson.dumps(row) + b"\n" for row in rows) for rows in (ROWS[:3], ROWS[3:7])]
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(b"".join(map(zstandard.compress, halves)))
    assert all_rows(open_source(path)) == ROWS[:7]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("empty.jsonl", b""),
        ("blank.jsonl", b"\n \n"),
        ("a.json", b'[\n{"a": 1}\n]'),
        ("a.parquet", b'{"a": 1}'),
        ("f.parquet", b"PAR1 and then nothing"),
        ("a.jsonl.zst", b'{"a": 1}'),
        ("cut.jsonl.zst", zstandard.compress(b'{"a": 1}\n' * 99)[:-5]),
        ("d.csv", b"prompt\nhi\n"),
        ("missing.jsonl", None),
        ("folder", None),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str, content: bytes | None) -> None:
    (tmp_path / "folder").mkdir()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=name):
        open_source(tmp_path / name)


def test_parquet_that_is_damaged_or_without_rows(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"zero\.parquet"):
        open_source(write_parquet(tmp_path / "zero.parquet", []))
    path = write_parquet(tmp_path / "a.parquet", ROWS[:200], compression="snappy")
    data = bytearray(path.read_bytes())
    data[40:400] = bytes(360)
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"a\.parquet"):
        open_source(path)


@given(
    st.lists(st.sampled_from([b"{}", b'{"a":1}', b"", b" ", b"\r", b"\t{}", b"  {} \r", b"x" * 40])),
    st.booleans(),
    st.booleans(),
)
def test_lines_that_are_not_blank_are_rows(lines: list[bytes], newline_at_end: bool, bom: bool) -> None:
    data = (b"\xef\xbb\xbf" if bom else b"") + b"\n".join(lines) + (b"\n" if newline_at_end else b"")
    with os.fdopen(os.memfd_create("lines"), "r+b") as file:
        file.write(data)
        file.seek(0)
        source = JsonLines(file, Path("a"))
        numbers = [number for number, line in enumerate(lines, 1) if line.strip()]
        assert [source.location(i) for i in range(len(source))] == [
            f"a, row {i} (line {number})" for i, number in enumerate(numbers)
        ]
        for i, number in enumerate(numbers):
            if not lines[number - 1].startswith(b"x"):
                assert source.row(i) == orjson.loads(lines[number - 1])


def test_a_bad_line_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a":1}\n{"a":\n"x"\n{"a":"\xff"}\n{"a":2}\n')
    rows = all_rows(open_source(path))
    assert rows[0] == {"a": 1} and rows[4] == {"a": 2}
    assert all(isinstance(row, BadRow) for row in rows[1:4])


def test_a_file_that_is_cut_meanwhile(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"a": 1}] * 100)
    source = open_source(path)
    os.truncate(path, 20)
    assert isinstance(all_rows(source)[50], BadRow)
    assert source.location(50) == f"{path}, row 50 (line 51)"


def test_numbers_are_kept_exactly_or_refused() -> None:
    digits = "12345678901234567890123"
    assert decode_line(b'{"a":NaN,"b":"%s"}' % digits.encode()) == {"a": None, "b": digits}
    for number in (-(2**63), 2**63 - 1, 2**64 - 1):
        assert decode_line(b'{"a":%d}' % number) == {"a": number}
    for text in (b"18446744073709551616", b"-9223372036854775809", b"1e400", b"Infinity", b"-Infinity"):
        with pytest.raises(BadRow):
            parse_row(decode_line(b'{"prompt":"x","a":' + text + b"}"), 0, "prompt")


@given(st.dictionaries(st.text(st.characters(codec="utf-8")), st.integers(-(2**70), 2**70)))
def test_integers_never_change_silently(row: dict[str, Any]) -> None:
    assert decode_line(json.dumps(row).encode()) == row
    if not all(-(2**63) <= value < 2**64 for value in row.values()):
        with pytest.raises(BadRow):
            content_digest(row)
