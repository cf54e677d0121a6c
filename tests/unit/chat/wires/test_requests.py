import pytest

from rollstream.chat.wires.requests import RequestError, read_object


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"a"', b"\xff", b'{"a": "\\ud800"}', b"[" * 5000])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError):
        read_object(body)
