import orjson
import pytest

from rollstream.chat.parsers.json_call import UnreadableError, decode_value


def test_a_value_and_its_end() -> None:
    assert decode_value('x \n{"a": [1, 2.5, null]} tail', 1) == ({"a": [1, 2.5, None]}, 24)


@pytest.mark.parametrize("number", [2**64 - 1, -(2**63), 0])
def test_integers_of_64_bits(number: int) -> None:
    value, _ = decode_value(str(number), 0)
    assert orjson.loads(orjson.dumps(value)) == number


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (str(2**64), "64 bits"),
        (str(-(2**63) - 1), "64 bits"),
        ("9" * 100_000, "64 bits"),
        ("NaN", "JSON knows no NaN"),
        ("[-Infinity]", "JSON knows no -Infinity"),
        ("1e400", "too large"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("", "Expecting value: line 1 column 1"),
        ('{"a": 1\n "b"}', "Expecting ',' delimiter: line 2 column 2"),
        ('{"a": "\n"}', "Invalid control character at: line 1 column 8"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(UnreadableError) as caught:
        decode_value(text, 0)
    assert message in str(caught.value)


def test_the_place_is_counted_from_the_start_of_the_value() -> None:
    with pytest.raises(UnreadableError, match="Expecting ',' delimiter: line 1 column 9"):
        decode_value('first\nline\n  {"a": 1 2}', 11)


@pytest.mark.parametrize(
    ("text", "open_string"), [('{"a": "b', True), ('{"a": "b"', False), ('"\\u12', False)]
)
def test_it_tells_whether_a_string_was_cut(text: str, open_string: bool) -> None:
    with pytest.raises(UnreadableError) as caught:
        decode_value(text, 0)
    assert caught.value.open_string is open_string
