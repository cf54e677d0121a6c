"""Data files and settings for the tests of this folder."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from rollstream.config.settings import CustomClassSettings, DataSettings
from rollstream.data.sources import RowSource
from rollstream.data.values import BadRow, Row


def data_settings(*files: Path | str, **changes: Any) -> DataSettings:
    values: dict[str, Any] = {
        "train_files": [str(file) for file in files],
        "sources": None,
        "prompt_key": "prompt",
        "ground_truth_key": None,
        "max_prompt_length": 1024,
        "truncation": "error",
        "filter_overlong_prompts": False,
        "train_max_samples": -1,
        "shuffle": False,
        "seed": 0,
        "apply_chat_template_kwargs": {},
        "tool_config_path": None,
        "fetch_images": False,
        "custom_cls": CustomClassSettings(None, None),
    }
    return DataSettings(**(values | changes))


def verl_row(i: int) -> dict[str, Any]:
    return {
        "data_source": "openai/gsm8k",
        "prompt": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": f"What is {i} + 1?"},
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
        "extra_info": {"split": "train", "index": i, "level": i % 3},
    }


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    data = b"".join(orjson.dumps(row) + b"\n" for row in rows)
    path.write_bytes(zstandard.compress(data) if path.suffix == ".zst" else data)
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return path


def write_folder(folder: Path, rows: list[dict[str, Any]], shards: int = 1) -> Path:
    import datasets

    datasets.Dataset(pa.Table.from_pylist(rows)).save_to_disk(folder, num_shards=shards)
    return folder


def all_rows(source: RowSource) -> list[Row | BadRow]:
    """Every row, or why it cannot be read."""
    found: list[Row | BadRow] = []
    for position in range(len(source)):
        try:
            found.append(source.row(position))
        except BadRow as error:
            found.append(error)
    return found
