import msgspec
import pytest

from rollstream.chat.wires.requests import RequestError, read_object, read_parameters


class Asked(msgspec.Struct):
    temperature: float = 1.0
    top_k: int = -1
    stop: str | list[str] = []
    stream: bool = False


def read(given: dict[str, object]) -> Asked:
    return read_parameters(given, Asked, harmless=["user"], neutral={"logit_bias": {}, "penalty": 0})


def test_known_parameters_are_typed_and_null_is_not_given() -> None:
    asked = read(
        {"temperature": 1, "top_k": None, "stop": ["a"], "user": 7, "logit_bias": {}, "penalty": 0.0}
    )
    assert (asked.temperature, asked.top_k, asked.stop, asked.stream) == (1.0, -1, ["a"], False)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"guided_json": {}}, "guided_json"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_k": 1.5}, "top_k"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_others_are_refused_by_name(given: dict[str, object], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(given)
    assert (caught.value.param, caught.value.status) == (param, 400)
    assert param in str(caught.value)


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"a"', b"\xff", b'{"a": "\\ud800"}', b"[" * 5000])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError):
        read_object(body)
