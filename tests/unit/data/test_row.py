from typing import Any

import orjson
import pytest

from rollstream.data.row import parse_row
from rollstream.data.values import BadRow

from .files import verl_row


def test_a_verl_row() -> None:
    row = verl_row(3) | {
        "agent_name": "tool_agent",
        "extra_info": {"index": 3, "tools_kwargs": {"calc": {"create_kwargs": {"x": 1}}}},
    }
    prompt_row, digest = parse_row(dict(row), 3, "prompt")
    assert prompt_row.index == 3
    assert prompt_row.prompt_key == digest.hex() and len(prompt_row.prompt_key) == 32
    assert prompt_row.messages == row["prompt"]
    assert prompt_row.data_source == "openai/gsm8k"
    assert prompt_row.ground_truth == "4"
    assert prompt_row.extra_info == row["extra_info"]
    assert prompt_row.agent_name == "tool_agent"
    assert prompt_row.tools_kwargs == {"calc": {"create_kwargs": {"x": 1}}}
    assert prompt_row.columns == {"ability": "math", "reward_model": {"style": "rule"}}


def test_a_simple_row() -> None:
    prompt_row, _ = parse_row({"question": "hi", "answer": "4", "id": 7}, 0, "question")
    assert prompt_row.messages == [{"role": "user", "content": "hi"}]
    assert prompt_row.ground_truth == "4"
    assert prompt_row.data_source == "unknown"
    assert prompt_row.columns == {"id": 7}
    assert (prompt_row.agent_name, prompt_row.tools_kwargs, prompt_row.extra_info) == (None, {}, {})


def test_where_the_ground_truth_comes_from() -> None:
    row = {"prompt": "p", "answer": "a", "ground_truth": 0, "reward_model": {"ground_truth": [1]}}
    prompt_row, _ = parse_row(dict(row), 0, "prompt")
    assert (prompt_row.ground_truth, prompt_row.columns) == ([1], {"answer": "a", "ground_truth": 0})
    prompt_row, _ = parse_row(row | {"reward_model": None}, 0, "prompt")
    assert (prompt_row.ground_truth, prompt_row.columns) == (0, {"answer": "a"})
    prompt_row, _ = parse_row({"prompt": "p", "reward_model": {"style": "model"}, "answer": 1}, 0, "prompt")
    assert (prompt_row.ground_truth, prompt_row.columns) == (1, {"reward_model": {"style": "model"}})


@pytest.mark.parametrize(
    ("column", "rest"),
    [
        ({"label": "78"}, {}),
        ({"problem": "p", "solution": "It is \\boxed{78}."}, {"problem": "p"}),
        ({"reward_spec": {"method": "rule", "ground_truth": "78"}}, {"reward_spec": {"method": "rule"}}),
        ({"reward_spec": '{"ground_truth": "78"}'}, {}),
        ({"answer": "78", "solution": "By hand."}, {"solution": "By hand."}),
        ({"reward_model": {"style": "rule", "ground_truth": None}, "label": "78"}, None),
    ],
)
def test_the_ground_truth_of_other_projects_rows(column: dict[str, Any], rest: dict[str, Any] | None) -> None:
    prompt_row, _ = parse_row({"prompt": "What is 37 + 41?", **column}, 0, "prompt")
    assert prompt_row.ground_truth in ("78", "It is \\boxed{78}.")
    assert rest is None or prompt_row.columns == rest


@pytest.mark.parametrize("key", ["gold", "about.gold", "extra_info.gold"])
def test_the_ground_truth_of_a_column_that_is_named(key: str) -> None:
    row = {"prompt": "p", "answer": "a", "gold": 5, "about": {"gold": 5, "n": 1}, "extra_info": {"gold": 5}}
    prompt_row, digest = parse_row(dict(row), 0, "prompt", key)
    assert prompt_row.ground_truth == 5
    assert prompt_row.columns["answer"] == "a"
    assert prompt_row.extra_info == {"gold": 5}
    assert digest == parse_row(dict(row), 0, "prompt")[1]
    with pytest.raises(BadRow, match="gold"):
        parse_row({"prompt": "p", "answer": "a"}, 0, "prompt", key)


def test_messages_as_json_text_are_the_same_row() -> None:
    row = verl_row(1)
    text = row | {"prompt": orjson.dumps(row["prompt"]).decode()}
    assert parse_row(text, 1, "prompt") == parse_row(row, 1, "prompt")
    for plain in ("[1, 2]", "[]", "[{", '[{"text": "role"}]', '{"role": "user"}'):
        assert parse_row({"prompt": plain}, 0, "prompt")[0].messages == [{"role": "user", "content": plain}]


def test_mappings_as_json_text_are_the_same_row() -> None:
    row = verl_row(1)
    text = row | {
        "extra_info": '{"level": 1, "index": 1, "split": "train"}',
        "reward_model": '{"ground_truth": "2", "style": "rule"}',
        "tools_kwargs": "",
    }
    assert parse_row(text, 1, "prompt") == parse_row(row, 1, "prompt")


def test_messages_are_read_as_those_of_chat_apis() -> None:
    messages = [
        {"role": "developer", "content": "x", "name": None},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "context", "content": [{"type": "text", "text": "y", "image": None}]},
    ]
    prompt_row, _ = parse_row({"prompt": messages}, 0, "prompt")
    assert prompt_row.messages == [
        {"role": "system", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
        {"role": "context", "content": "y"},
    ]


@pytest.mark.parametrize(
    ("row", "where"),
    [
        ({"text": "x", "b": 1}, "data.prompt_key"),
        *(({"prompt": prompt}, "prompt") for prompt in (5, None, "", [], {"role": "user"})),
        ({"prompt": [{"from": "human", "value": "x"}]}, r"prompt\[0\]\.role"),
        ({"prompt": [{"role": "user"}]}, r"prompt\[0\]\.content"),
        *(
            ({"prompt": "x", "extra_info": value}, "extra_info")
            for value in ([1], "[1]", {"tools_kwargs": 1})
        ),
        ({"prompt": "x", "reward_model": "{"}, "reward_model"),
        ({"prompt": "x", "data_source": 3}, "data_source"),
        ({"prompt": "x", "videos": ["a.mp4"]}, "videos"),
        ({"prompt": [{"role": "user", "content": "<audio>x"}], "audios": [{"path": "a.wav"}]}, "audios"),
        ({"prompt": "x", "agent_name": ["a"]}, "agent_name"),
    ],
)
def test_a_row_that_cannot_be_used_says_where(row: dict[str, Any], where: str) -> None:
    with pytest.raises(BadRow, match=where):
        parse_row(row, 0, "prompt")
