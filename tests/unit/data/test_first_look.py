import json
from pathlib import Path
from typing import Any

import pytest

from rollstream.chat.tokenizer import ChatTokenizer, load_tokenizer
from rollstream.data.first_look import first_look
from rollstream.data.row import parse_row
from rollstream.demo import MODEL_PATH


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return load_tokenizer(str(MODEL_PATH))


def look(tokenizer: ChatTokenizer | None, *rows: dict[str, Any], scored: bool = True) -> list[str]:
    parsed = [parse_row(dict(row), i, "prompt")[0] for i, row in enumerate(rows)]
    return first_look(parsed, tokenizer, scored=scored, prompts=[row["prompt"] for row in rows])


def test_plain_rows_are_as_they_were_meant(tokenizer: ChatTokenizer) -> None:
    rows = [{"prompt": "What is <b>2</b> + [2]?", "answer": "4"}, {"prompt": "Say hello."}]
    assert look(tokenizer, *rows) == []
    assert first_look([], tokenizer, scored=True) == []


def test_rows_without_any_truth(tokenizer: ChatTokenizer) -> None:
    rows = [{"prompt": "What is 2 + 2?", "gold": "4"}, {"prompt": "What is 3 + 3?", "gold": "6"}]
    (line,) = look(tokenizer, *rows)
    assert "ground truth" in line and "data.ground_truth_key" in line and "gold" in line
    assert look(tokenizer, *rows, scored=False) == []


def test_a_template_in_the_text(tokenizer: ChatTokenizer) -> None:
    text = "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": text}]
    for prompt in (text, [{"role": "user", "content": text}], [{"role": "user", "content": parts}]):
        (line,) = look(tokenizer, {"prompt": prompt, "answer": "4"}, {"prompt": "Hi.", "answer": "4"})
        assert line.startswith("1 of the first 2 prompts") and "<|im_end|>, <|im_start|>" in line
    assert look(None, {"prompt": text, "answer": "4"}) == []


def test_messages_as_json_text_are_said_once(tokenizer: ChatTokenizer) -> None:
    text = json.dumps([{"role": "user", "content": "What is 2 + 2?"}])
    (line,) = look(tokenizer, *[{"prompt": text, "answer": "4"}] * 3)
    assert line.startswith("3 of the first 3 prompts") and "JSON text" in line


def test_tools_that_are_no_schemas(tokenizer: ChatTokenizer) -> None:
    row = {"prompt": "Rain in Lyon?", "answer": "no"}
    assert look(tokenizer, row | {"tools": [{"name": "rain_in"}]}, row | {"tools": []}) == []
    (line,) = look(tokenizer, row | {"tools": ["rain_in"]}, row)
    assert "tools of 1 of the first 2" in line


def test_tools_that_the_template_does_not_show(tmp_path: Path) -> None:
    template = tmp_path / "plain.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    plain = load_tokenizer(str(MODEL_PATH), custom_chat_template=str(template))
    row = {"prompt": "Rain in Lyon?", "answer": "no"}
    (line,) = look(plain, row, row | {"tools": [{"name": "rain_in"}]})
    assert "shows no tools" in line
    assert look(plain, row) == []
