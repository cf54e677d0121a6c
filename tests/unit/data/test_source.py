from pathlib import Path

import orjson
import pytest
import zstandard

from rollstream.data.source import Concatenated, data_files, open_source
from rollstream.errors import DataError

from .files import verl_row, write_jsonl, write_parquet
from .test_arrow_rows import write_folder

ROWS = [verl_row(i) for i in range(7)]


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    paths = [
        write_jsonl(tmp_path / "a.jsonl", ROWS),
        write_jsonl(tmp_path / "a.json", ROWS),
        write_jsonl(tmp_path / "a.jsonl.zst", ROWS),
        write_parquet(tmp_path / "a.parquet", ROWS),
        write_folder(tmp_path / "hf", ROWS),
    ]
    for path in paths:
        assert list(open_source(path).scan()) == ROWS, path
    both = Concatenated([open_source(path) for path in paths])
    assert len(both) == 35
    assert list(both.scan()) == ROWS * 5
    assert [both.row(i) for i in range(35)] == ROWS * 5
    assert both.location(7) == f"{paths[1]}, row 0 (line 1)"
    assert both.location(22) == f"{paths[3]}, row 1"


def test_zstd_in_several_frames_and_large_windows(tmp_path: Path) -> None:
    halves = [b"".join(orjson.dumps(row) + b"\n" for row in rows) for rows in (ROWS[:3], ROWS[3:])]
    wide = zstandard.ZstdCompressionParameters.from_level(3, window_log=30)
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(
        zstandard.compress(halves[0]) + zstandard.ZstdCompressor(compression_params=wide).compress(halves[1])
    )
    assert list(open_source(path).scan()) == ROWS


def test_zstd_that_is_damaged_or_cut_off(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl.zst", ROWS)
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    with pytest.raises(DataError, match=r"a\.jsonl\.zst: the zstd data is cut off"):
        open_source(path)
    path.write_bytes(whole[:8] + b"\xff" * 30)
    with pytest.raises(DataError, match="damaged zstd data"):
        open_source(path)


def test_dataset_dict_takes_train_or_names_the_splits(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    for split in ("test", "validation"):
        write_folder(folder / split, ROWS)
    (folder / "dataset_dict.json").write_text('{"splits": ["test", "validation"]}')
    with pytest.raises(
        DataError, match=r"splits test, validation, but no train; name the one to use.*hf/test"
    ):
        open_source(folder)
    write_folder(folder / "train", ROWS[:2])
    assert len(open_source(folder)) == 2
    assert [file.parent.name for file in data_files(folder)] == ["train"]


def test_what_is_missing_or_empty(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing\.jsonl: no such file"):
        open_source(tmp_path / "nothing.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError, match=r"empty\.jsonl: the file is empty"):
        open_source(tmp_path / "empty.jsonl")
    (tmp_path / "blank.jsonl").write_text("\n \n")
    with pytest.raises(DataError, match=r"blank\.jsonl: holds no rows"):
        open_source(tmp_path / "blank.jsonl")
    with pytest.raises(DataError, match=r"zero\.parquet: holds no rows"):
        open_source(write_parquet(tmp_path / "zero.parquet", ROWS[:0]))
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="folder: a folder, but no Hugging Face dataset folder"):
        open_source(tmp_path / "folder")


def test_a_file_of_another_format(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", ROWS).rename(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=r"its name says JSON Lines, but its bytes are Parquet"):
        open_source(tmp_path / "a.jsonl")
    write_jsonl(tmp_path / "b.jsonl", ROWS).rename(tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"its name says Parquet, but its bytes are text"):
        open_source(tmp_path / "b.parquet")
    write_jsonl(tmp_path / "c.jsonl", ROWS).rename(tmp_path / "c.jsonl.zst")
    with pytest.raises(DataError, match=r"its name says JSON Lines compressed with zstd"):
        open_source(tmp_path / "c.jsonl.zst")
    (tmp_path / "d.csv").write_text("prompt\nhi\n")
    with pytest.raises(DataError, match=r"not a format that is read\. Read are: Parquet .*JSON Lines"):
        open_source(tmp_path / "d.csv")
    (tmp_path / "e.bin").write_bytes(b"PAR1....PAR1")
    with pytest.raises(DataError, match="its bytes look like Parquet"):
        open_source(tmp_path / "e.bin")
    (tmp_path / "f.parquet").write_bytes(b"PAR1 and then nothing of the kind")
    with pytest.raises(DataError, match=r"f\.parquet: cannot be read as Parquet"):
        open_source(tmp_path / "f.parquet")
