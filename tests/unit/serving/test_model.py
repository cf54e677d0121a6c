from hypothesis import given
from hypothesis import strategies as st

from rollstream.trajectory import Completion, FinishReason, SamplingParams
from tests.unit.serving.served import END, served_model, tokenizer

END_ID = tokenizer().token_id(END)
assert END_ID is not None
READER = served_model()


def completion(text: str, reason: FinishReason = "stop") -> Completion:
    return Completion(tokenizer().encode(text), None, reason)


def test_the_end_token_is_not_text() -> None:
    answer = READER.read(completion("78" + END), SamplingParams(9))
    assert (answer.text, answer.matched, answer.stop_reason) == ("78", END_ID, None)


def test_an_end_token_that_ended_nothing_is_kept_as_special() -> None:
    free = SamplingParams(9, ignore_eos=True)
    assert READER.read(completion(f"7{END}8", "length"), free).text == "78"
    shown = READER.read(completion(f"7{END}8{END}", "length"), free, skip_special_tokens=False)
    assert (shown.text, shown.matched) == (f"7{END}8{END}", None)


def test_a_stop_id_is_not_text_and_is_named() -> None:
    ids = tokenizer().encode("12")
    answer = READER.read(Completion(ids, None, "stop"), SamplingParams(9, stop_token_ids=(ids[-1],)))
    assert (answer.text, answer.matched, answer.stop_reason) == ("1", ids[-1], ids[-1])


def test_text_ends_before_the_stop_string() -> None:
    answer = READER.read(completion("the answer"), SamplingParams(40, stop=("zzz", "er", "swer")))
    assert (answer.text, answer.matched) == ("the an", "swer")


def test_a_stop_string_that_was_not_completed_last_is_text() -> None:
    """It was there before the last token only in the text without special tokens."""
    answer = READER.read(completion(f"1<|im_start|>2 and more{END}"), SamplingParams(40, stop=("12",)))
    assert answer.text == "12 and more"
    assert answer.matched == END_ID


def test_a_stop_string_of_special_tokens() -> None:
    how = SamplingParams(9, stop=(f"8{END}",), ignore_eos=True)
    assert READER.read(completion(f"78{END}"), how).text == "7"
    assert READER.read(completion(f"78{END}"), how).matched == f"8{END}"


def test_other_ends_leave_the_text_whole() -> None:
    for reason in ("length", "abort"):
        answer = READER.read(completion("a stop", reason), SamplingParams(9, stop=("stop",)))
        assert (answer.text, answer.matched) == ("a stop", None)
    assert READER.read(Completion([], [], "abort"), SamplingParams(9)).text == ""


@given(st.text(max_size=40))
def test_texts_of_tokens_are_the_text(text: str) -> None:
    ids = tokenizer().encode(text)
    texts = READER.token_texts(ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == tokenizer().decode(ids, skip_special_tokens=False)


@given(st.lists(st.integers(0, 511), max_size=30))
def test_texts_of_any_tokens_are_the_text(ids: list[int]) -> None:
    assert "".join(READER.token_texts(ids)) == tokenizer().decode(ids, skip_special_tokens=False)


def test_a_character_belongs_to_the_token_that_completes_it() -> None:
    ids = tokenizer().encode("1é€2")
    texts = READER.token_texts(ids)
    assert [text for text in texts if text] == ["1", "é", "€", "2"]
    assert len(texts) > 4
