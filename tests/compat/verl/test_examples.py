"""`sft` and `preference` exports in verl's dataset classes, by the lines of docs/export.md.

Runs in an environment that has verl (`make test-verl`); skipped elsewhere.
"""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

import pandas
from transformers import AutoTokenizer

from rollstream.demo import MODEL_PATH
from rollstream.integrations.exports.examples import SftOptions, export_preference, export_sft
from tests.support.chats import chat_artifact


def rows(path: Path) -> Any:
    return pandas.read_json(path, lines=True, dtype=False)


def test_the_sft_dataset_reads_messages(tmp_path: Path) -> None:
    from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

    export_sft(chat_artifact(tmp_path / "a"), tmp_path / "x.jsonl", SftOptions(best=1))
    rows(tmp_path / "x.jsonl").to_parquet(tmp_path / "x.parquet")
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    data = MultiTurnSFTDataset(str(tmp_path / "x.parquet"), tokenizer, {"max_length": 256})
    assert len(data) == 3
    for number, answer in enumerate(["3", "8"]):
        learned = data[number]["input_ids"][data[number]["loss_mask"].bool()]
        assert tokenizer.decode(learned, skip_special_tokens=True).strip() == answer
    called = data[2]["input_ids"][data[2]["loss_mask"].bool()]
    assert "calculator" in tokenizer.decode(called)


@pytest.mark.parametrize("writer", ["pandas", "datasets"])
def test_calls_keep_their_own_arguments(tmp_path: Path, writer: str) -> None:
    """Parquet has one type for all calls: as structs they would get each other's arguments."""
    from verl.utils.import_utils import load_extern_object

    def call(name: str, **arguments: Any) -> dict[str, Any]:
        return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}

    calls = [
        call("search", query="x", k=3),
        call("search", k="three"),
        call("calculator", expression="1 + 1"),
    ]
    schema = {"type": "function", "function": {"name": "search", "description": ".", "parameters": {}}}
    lines = [
        {
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
            ],
            **({"tools": json.dumps([schema])} if number else {}),
        }
        for number, call in enumerate(calls)
    ]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, lines)))
    if writer == "pandas":
        frame = rows(tmp_path / "x.jsonl")
        frame["messages"] = frame["messages"].map(json.dumps)
        frame.to_parquet(tmp_path / "x.parquet")
    else:
        datasets = pytest.importorskip("datasets", "4.8")
        datasets.load_dataset(
            "json", data_files=str(tmp_path / "x.jsonl"), split="train", cache_dir=str(tmp_path)
        ).to_parquet(tmp_path / "x.parquet")
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    kind = load_extern_object("pkg://rollstream.integrations.verl.sft", "TextColumnsDataset")
    data = kind(str(tmp_path / "x.parquet"), tokenizer, {"max_length": 2048})
    for number, line in enumerate(lines):
        shown = tokenizer.decode(data[number]["input_ids"], skip_special_tokens=True)
        assert json.dumps(line["messages"][1]["tool_calls"][0]["function"]["arguments"]) in shown
        assert "null" not in shown and ("# Tools" in shown) == bool(number)


def test_the_reward_model_dataset_reads_texts(tmp_path: Path) -> None:
    from verl.utils.dataset.rm_dataset import RMDataset

    export_preference(chat_artifact(tmp_path / "a"), tmp_path / "x.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)

    def texts(row: dict[str, Any]) -> dict[str, str]:
        chat = tokenizer.apply_chat_template
        prompt = chat(row["prompt"], tokenize=False, add_generation_prompt=True)
        whole = {name: chat(row["prompt"] + row[name], tokenize=False) for name in ("chosen", "rejected")}
        return {"prompt": prompt} | {name: text.removeprefix(prompt) for name, text in whole.items()}

    pairs = rows(tmp_path / "x.jsonl")
    pairs.apply(texts, axis=1, result_type="expand").to_parquet(tmp_path / "x.parquet")
    data = RMDataset(str(tmp_path / "x.parquet"), tokenizer, max_length=256, cache_dir=str(tmp_path / "rm"))
    assert len(data) == 3
    chosen, rejected = (
        tokenizer.decode(ids[seen.bool()])
        for ids, seen in zip(data[0]["input_ids"], data[0]["attention_mask"], strict=True)
    )
    start = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1 + 2 ="}], tokenize=False, add_generation_prompt=True
    )
    assert chosen.startswith(start + "3") and rejected.startswith(start + "9")
