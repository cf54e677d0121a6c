"""Tokens as the page gets them, whatever the lists in a file are."""

import json
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from rollstream.chat.token_text import read_token_text
from rollstream.demo import MODEL_PATH
from rollstream.view.tokens import encode_tokens

_IDS = st.lists(st.integers(-5, 2**31 - 1), max_size=12)
_TEXT = read_token_text(MODEL_PATH)


def decoded(data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
    length = int.from_bytes(data[:4], "little")
    header = json.loads(data[4 : 4 + length])
    start = 4 + length + -length % 4
    assert start % 4 == 0
    columns = {
        one["name"]: np.frombuffer(
            data, f"<{np.dtype(one['dtype']).str[1:]}", one["length"], start + one["offset"]
        )
        for one in header["columns"]
    }
    return header, columns


@given(
    prompt=_IDS,
    response=_IDS,
    mask=st.lists(st.integers(-1, 2), max_size=12),
    logprobs=st.none() | st.lists(st.none() | st.floats(-50, 0, width=32), max_size=12),
    versions=st.lists(
        st.tuples(st.none() | st.integers(0, 20), st.integers(-(2**63), 2**63 - 1)), max_size=3
    ),
    extra=st.dictionaries(
        st.sampled_from(["entropy", "id", "text", "x"]), st.lists(st.floats() | st.text(), max_size=12)
    ),
    roles=st.lists(st.sampled_from(["user", "assistant", "tool", None]), max_size=5),
)
def test_any_lists_are_encoded(
    prompt: list[int],
    response: list[int],
    mask: list[int],
    logprobs: list[float | None] | None,
    versions: list[tuple[int | None, int]],
    extra: dict[str, Any],
    roles: list[str | None],
) -> None:
    runs = [{"start": start, "version": version} for start, version in versions]
    kind = pa.list_(pa.struct([("start", pa.int32()), ("version", pa.int64())]))
    row = {
        "prompt_ids": pa.scalar(prompt, pa.list_(pa.int32())),
        "response_ids": pa.scalar(response, pa.list_(pa.int32())),
        "response_mask": pa.scalar(mask, pa.list_(pa.int8())),
        "response_logprobs": pa.scalar(logprobs, pa.list_(pa.float32())),
        "policy_versions": pa.scalar(runs, kind),
        "extra": extra,
        "messages": [{"role": role} for role in roles],
    }
    header, columns = decoded(encode_tokens(row, _TEXT, ""))
    count = len(prompt) + len(response)
    assert (header["prompt"], header["count"]) == (len(prompt), count)
    assert columns["id"].tolist() == prompt + response
    assert len(columns["text_start"]) == count + 1 and columns["text_start"][-1] == len(columns["text"])
    for name in ("mask", "logprob", "version"):
        assert len(columns[name]) == count
    assert np.isnan(columns["logprob"][columns["mask"] != 1]).all()
    assert (columns["mask"][: len(prompt)] == 0).all()
    places = [turn["at"] for turn in header["turns"]]
    assert places == sorted(places) and all(0 <= at < max(1, count) for at in places)
    plain, without = decoded(encode_tokens(row, None, "nothing says which"))
    assert (plain["has_text"], plain["reason"], "text" in without) == (False, "nothing says which", False)


def test_the_bytes_of_tokens_are_the_text() -> None:
    row = {
        "prompt_ids": pa.scalar([1], pa.list_(pa.int32())),
        "response_ids": pa.scalar([19, 24, 21, 2, 999_999], pa.list_(pa.int32())),
        "response_mask": pa.scalar([1, 1, 1, 1, 0], pa.list_(pa.int8())),
        "response_logprobs": pa.scalar(None, pa.list_(pa.float32())),
        "policy_versions": pa.scalar(
            [], pa.list_(pa.struct([("start", pa.int32()), ("version", pa.int64())]))
        ),
        "extra": None,
        "messages": [{"role": "user"}, {"role": "assistant"}],
    }
    header, columns = decoded(encode_tokens(row, _TEXT, ""))
    pieces = [
        bytes(columns["text"][start:end])
        for start, end in zip(columns["text_start"], columns["text_start"][1:], strict=False)
    ]
    assert b"".join(pieces[1:4]) == b"163" and pieces[5] == b""
    assert header["turns"] == [
        {"at": 0, "role": "prompt"},
        {"at": 1, "role": "assistant"},
        {"at": 5, "role": "template"},
    ]
