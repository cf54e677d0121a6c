import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
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
from rollstream.data.sources import Concatenated, JsonLines, data_files, decode_line, open_source
from rollstream.data.values import BadRow, content_digest
from rollstream.errors import DataError

from .files import all_rows, verl_row, write_folder, write_jsonl, write_parquet, write_stream

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
    assert all_rows(both) == ROWS * 5
    assert [both.row(i) for i in range(1490, 1510)] == (ROWS * 2)[1490:1510]
    assert both.location(1500) == f"{paths[1]}, row 0 (line 1)"
    assert both.location(4501) == f"{paths[3]}, row 1"
    assert both.folder(4501) == tmp_path


def test_keys_that_the_schema_invented_are_left_out(tmp_path: Path) -> None:
    source = open_source(write_parquet(tmp_path / "a.parquet", UNEVEN))
    assert [source.row(0), source.row(1)] == all_rows(source) == UNEVEN


def test_the_spool_file_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spool").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "spool"))
    source = open_source(write_parquet(tmp_path / "a.parquet", UNEVEN))
    assert list((tmp_path / "spool").iterdir()) == []
    assert source.row(0) == UNEVEN[0]
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(DataError, match=r"temporary folder .*missing.*TMPDIR"):
        open_source(tmp_path / "a.parquet")


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
    source = open_source(tmp_path / "a.parquet")
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
    assert source.row(0) == expected
    assert all_rows(source) == [expected]


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


def test_parquet_whose_rows_share_a_long_text_is_spooled_in_bounded_memory(tmp_path: Path) -> None:
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


def test_an_infinity_names_its_row_only(tmp_path: Path) -> None:
    source = open_source(write_parquet(tmp_path / "a.parquet", [{"x": 1.0}, {"x": float("inf")}]))
    first, second = all_rows(source)
    assert first == {"x": 1.0}
    assert "write it as text" in str(second)


def test_dataset_folder_with_stored_indices(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", ROWS[:5], _indices_data_files=[{"filename": "indices.arrow"}])
    write_stream(folder / "indices.arrow", pa.table({"indices": pa.array([4, 0, 4], pa.uint64())}))
    source = open_source(folder)
    assert all_rows(source) == [ROWS[4], ROWS[0], ROWS[4]]
    assert source.location(2) == f"{folder}, row 2"
    write_stream(folder / "indices.arrow", pa.table({"indices": pa.array([5], pa.uint64())}))
    with pytest.raises(DataError, match="outside its 5 rows"):
        open_source(folder)


def test_dataset_folder_written_by_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(ROWS[:6]).shuffle(seed=1).save_to_disk(tmp_path / "hf", num_shards=2)
    found = all_rows(open_source(tmp_path / "hf"))
    assert sorted(found, key=lambda row: row["extra_info"]["index"]) == ROWS[:6]  # type: ignore[index, call-overload]


def test_dataset_folder_that_is_not_whole(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", ROWS[:4], shards=2)
    data = next(folder.glob("*.arrow"))
    write_stream(data, pa.table({"other": [1]}))
    with pytest.raises(DataError, match="have different columns"):
        open_source(folder)
    data.write_bytes(data.read_bytes()[:50])
    with pytest.raises(DataError, match="cannot be read as an Arrow stream"):
        open_source(folder)
    data.unlink()
    with pytest.raises(DataError, match="which is not there"):
        open_source(folder)
    (folder / "state.json").write_text("{}")
    with pytest.raises(DataError, match=r"state\.json cannot be read"):
        open_source(folder)


def test_dataset_dict_takes_train_or_names_the_splits(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    for split in ("test", "validation"):
        write_folder(folder / split, ROWS[:3])
    (folder / "dataset_dict.json").write_text('{"splits": ["test", "validation"]}')
    with pytest.raises(DataError, match=r"splits test, validation, but no train; name .*hf/test"):
        open_source(folder)
    write_folder(folder / "train", ROWS[:2])
    assert len(open_source(folder)) == 2
    assert [file.parent.name for file in data_files(folder)] == ["train"]


def test_zstd_in_several_frames_and_large_windows(tmp_path: Path) -> None:
    halves = [b"".join(orjson.dumps(row) + b"\n" for row in rows) for rows in (ROWS[:3], ROWS[3:7])]
    wide = zstandard.ZstdCompressionParameters.from_level(3, window_log=30)
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(
        zstandard.compress(halves[0]) + zstandard.ZstdCompressor(compression_params=wide).compress(halves[1])
    )
    assert all_rows(open_source(path)) == ROWS[:7]
    whole = write_jsonl(path, ROWS[:7]).read_bytes()
    path.write_bytes(whole[:-5])
    with pytest.raises(DataError, match=r"a\.jsonl\.zst: the zstd data is cut off"):
        open_source(path)
    path.write_bytes(whole[:8] + b"\xff" * 30)
    with pytest.raises(DataError, match="damaged zstd data"):
        open_source(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", b"", r"empty\.jsonl: the file is empty"),
        ("blank.jsonl", b"\n \n", r"blank\.jsonl: holds no rows"),
        ("a.json", b'[\n{"a": 1}\n]', r"a\.json: holds a JSON array.*jq -c"),
        ("a.jsonl", b"PAR1....PAR1", "its name says JSON Lines, but its bytes are Parquet"),
        ("a.parquet", b'{"a": 1}', "its name says Parquet, but its bytes are text"),
        ("a.jsonl.zst", b'{"a": 1}', "its name says JSON Lines compressed with zstd"),
        ("d.csv", b"prompt\nhi\n", r"not a format that is read .*Read are: Parquet .*JSON Lines"),
        ("e.bin", b"PAR1....PAR1", "its bytes look like Parquet"),
        ("f.parquet", b"PAR1 and then nothing", r"f\.parquet: cannot be read as Parquet"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        open_source(tmp_path / name)


def test_parquet_that_is_damaged_or_without_rows(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"zero\.parquet: holds no rows"):
        open_source(write_parquet(tmp_path / "zero.parquet", []))
    path = write_parquet(tmp_path / "a.parquet", ROWS[:200], compression="snappy")
    data = bytearray(path.read_bytes())
    data[40:400] = bytes(360)
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read as Parquet"):
        open_source(path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing.jsonl", r"^nothing\.jsonl: no such file \(looked in .*\)$"),
        (
            "https://example.com/x.parquet",
            r"^https://example\.com/x\.parquet: .*local files\. Download it.*Hub",
        ),
        ("hdfs://there/x.parquet", r"^hdfs://there/x\.parquet: data are read from local files"),
        ("openai/gsm8k", r"no such file .*; a dataset of the Hugging Face Hub is loaded by train_tasks"),
    ],
)
def test_what_is_not_there(name: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_source(Path(name))


def test_a_folder_that_is_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no Hugging Face dataset folder"):
        open_source(tmp_path)


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
        source = JsonLines(file, "a")
        numbers = [number for number, line in enumerate(lines, 1) if line.strip()]
        assert [source.location(i) for i in range(len(source))] == [
            f"a, row {i} (line {number})" for i, number in enumerate(numbers)
        ]
        for i, number in enumerate(numbers):
            if not lines[number - 1].startswith(b"x"):
                assert source.row(i) == orjson.loads(lines[number - 1])


def test_a_bad_line_is_found_and_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a":1}\n{"a":\n"x"\n{"a":"\xff"}\n{"a":2}\n')
    rows = all_rows(open_source(path))
    assert rows[0] == {"a": 1} and rows[4] == {"a": 2}
    assert [re.sub(r" \(.*?\)(?=,|$)| \(.*;.*", "", str(row)) for row in rows[1:4]] == [
        "not JSON",
        "the line holds text, not a JSON object",
        "not UTF-8",
    ]


def test_a_file_that_changes_meanwhile(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"a": 1}] * 100)
    source = open_source(path)
    os.truncate(path, 20)
    with pytest.raises(BadRow, match="shorter"):
        source.row(50)
    assert isinstance(all_rows(source)[99], BadRow)
    assert source.location(50) == f"{path}, row 50 (line 51)"


def test_numbers_are_kept_exactly_or_refused() -> None:
    digits = "12345678901234567890123"
    assert decode_line(b'{"a":NaN,"b":"%s"}' % digits.encode()) == {"a": None, "b": digits}
    for number in (-(2**63), 2**63 - 1, 2**64 - 1):
        assert decode_line(b'{"a":%d}' % number) == {"a": number}
    for text in (b"18446744073709551616", b"-9223372036854775809", b"1e400", b"Infinity", b"-Infinity"):
        with pytest.raises(BadRow, match="write it as text"):
            parse_row(decode_line(b'{"prompt":"x","a":' + text + b"}"), 0, "prompt")


@given(st.dictionaries(st.text(st.characters(codec="utf-8")), st.integers(-(2**70), 2**70)))
def test_integers_never_change_silently(row: dict[str, Any]) -> None:
    found = decode_line(json.dumps(row).encode())
    assert found == row
    if not all(-(2**63) <= value < 2**64 for value in row.values()):
        with pytest.raises(BadRow, match="write it as text"):
            content_digest(found)
