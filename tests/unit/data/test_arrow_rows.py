import datetime
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollstream.data import arrow_rows
from rollstream.data.arrow_rows import open_dataset_folder, open_parquet
from rollstream.errors import DataError

from .files import verl_row, write_parquet

ROWS: list[dict[str, Any]] = [
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


def write_stream(path: Path, table: pa.Table, batch_rows: int = 1000) -> None:
    with path.open("wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch_rows)


def write_folder(folder: Path, rows: list[dict[str, Any]], shards: int = 1, **state: Any) -> Path:
    folder.mkdir(parents=True)
    table = pa.Table.from_pylist(rows)
    names = [f"data-{i:05}-of-{shards:05}.arrow" for i in range(shards)]
    step = -(-len(rows) // shards)
    for i, name in enumerate(names):
        write_stream(folder / name, table.slice(i * step, step), batch_rows=2)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "x", **state}
    (folder / "state.json").write_bytes(orjson.dumps(state))
    return folder


def test_keys_that_the_schema_invented_are_left_out(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", ROWS)
    source = open_parquet(path, "a", None)
    assert source.row(1) == ROWS[1]
    assert [source.row(0), source.row(1)] == list(source.scan()) == ROWS


@pytest.mark.parametrize("batch_rows", [1, 7, 16_384])
def test_random_access_equals_a_scan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_rows: int
) -> None:
    monkeypatch.setattr(arrow_rows, "_SPOOL_BATCH_ROWS", batch_rows)
    monkeypatch.setattr(arrow_rows, "_SCAN_ROWS", 5)
    rows = [verl_row(i) for i in range(40)]
    source = open_parquet(write_parquet(tmp_path / "a.parquet", rows, row_group_size=11), "a", None)
    assert list(source.scan()) == rows
    order = np.random.default_rng(0).permutation(40).tolist()
    assert [source.row(i) for i in order] == [rows[i] for i in order]


def test_the_spool_file_has_no_name(tmp_path: Path) -> None:
    spool_dir = tmp_path / "spool"
    spool_dir.mkdir()
    source = open_parquet(write_parquet(tmp_path / "a.parquet", ROWS), "a", spool_dir)
    assert list(spool_dir.iterdir()) == []
    assert source.row(0) == ROWS[0]


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
    source = open_parquet(tmp_path / "a.parquet", "a", None)
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
    assert list(source.scan()) == [expected]


def test_an_infinity_names_its_row_only(tmp_path: Path) -> None:
    source = open_parquet(write_parquet(tmp_path / "a.parquet", [{"x": 1.0}, {"x": float("inf")}]), "a", None)
    first, second = source.scan()
    assert first == {"x": 1.0}
    assert "write it as text" in str(second)


def test_damaged_parquet_is_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", [verl_row(i) for i in range(200)], compression="snappy")
    data = bytearray(path.read_bytes())
    data[40:400] = bytes(360)
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read as Parquet"):
        open_parquet(path, str(path), None)


def test_a_spool_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", ROWS)
    with pytest.raises(DataError, match=r"temporary folder .*missing.*TMPDIR"):
        open_parquet(path, "a", tmp_path / "missing")


def test_dataset_folder(tmp_path: Path) -> None:
    rows = [verl_row(i) for i in range(11)]
    source = open_dataset_folder(write_folder(tmp_path / "hf", rows, shards=3), "hf")
    assert list(source.scan()) == rows
    assert [source.row(i) for i in range(10, -1, -1)] == rows[::-1]
    assert source.location(4) == "hf, row 4"


def test_dataset_folder_with_stored_indices(tmp_path: Path) -> None:
    rows = [verl_row(i) for i in range(5)]
    folder = write_folder(tmp_path / "hf", rows, _indices_data_files=[{"filename": "indices.arrow"}])
    write_stream(folder / "indices.arrow", pa.table({"indices": pa.array([4, 0, 4], pa.uint64())}))
    source = open_dataset_folder(folder, "hf")
    assert list(source.scan()) == [rows[4], rows[0], rows[4]]
    write_stream(folder / "indices.arrow", pa.table({"indices": pa.array([5], pa.uint64())}))
    with pytest.raises(DataError, match="outside its 5 rows"):
        open_dataset_folder(folder, "hf")


def test_dataset_folder_written_by_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [verl_row(i) for i in range(6)]
    datasets.Dataset.from_list(rows).shuffle(seed=1).save_to_disk(tmp_path / "hf", num_shards=2)
    source = open_dataset_folder(tmp_path / "hf", "hf")
    assert sorted(source.scan(), key=lambda row: row["extra_info"]["index"]) == rows


def test_dataset_folder_that_is_not_whole(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", [verl_row(0)])
    data = next(folder.glob("*.arrow"))
    data.write_bytes(data.read_bytes()[:50])
    with pytest.raises(DataError, match="cannot be read as an Arrow stream"):
        open_dataset_folder(folder, "hf")
    data.unlink()
    with pytest.raises(DataError, match="which is not there"):
        open_dataset_folder(folder, "hf")
    (folder / "state.json").write_text("{}")
    with pytest.raises(DataError, match=r"state\.json cannot be read"):
        open_dataset_folder(folder, "hf")
