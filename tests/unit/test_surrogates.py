import json
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.surrogates import decode_json, replace_in_value

TEXTS = st.text(st.sampled_from('a\\"/ud8\n\ud83d\ude00\udfff\U0001f600é'), max_size=12)


@given(st.recursive(TEXTS, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner)), st.booleans())
def test_json_of_any_texts_is_read_with_each_lone_surrogate_replaced(value: Any, ascii_only: bool) -> None:
    """What Python's json writes is read by a strict decoder, and is otherwise the same."""
    written = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    # In escapes two halves side by side are a pair; as UTF-8 they are not.
    meant = replace_in_value(json.loads(written) if ascii_only else value)
    for decode in (orjson.loads, msgspec.json.decode):
        read, count = decode_json(written, decode)
        assert read == meant
        assert (count > 0) == (
            read != json.loads(written) if ascii_only else replace_in_value(value) != value
        )


@pytest.mark.parametrize("text", [b'{"a": \\ud83d', b'"\\ud83d', b'{"a": NaN, "b": "\\ud83d"}', b'"\\ud8'])
def test_what_is_no_json_remains_an_error(text: bytes) -> None:
    with pytest.raises(ValueError):
        decode_json(text, orjson.loads)
