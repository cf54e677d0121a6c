import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.buffer.builtin.math_generator import as_number, compute_score, final_answer, same_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so it is \\boxed{42}.", "42"),
        ("\\boxed{1} no, \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{7", "7"),
        ("12 + 34 = 46", "46"),
        ("it costs $1,234.50 in all", "1,234.50"),
        ("Paris ", "Paris"),
        ("", ""),
    ],
)
def test_final_answers(text: str, answer: str) -> None:
    assert final_answer(text) == answer


def test_scores() -> None:
    assert compute_score("unknown", "I say 46.0", "46") == 1.0
    assert compute_score("unknown", "I say 1,000", 1000) == 1.0
    assert compute_score("unknown", "I say 45", "46") == 0.0
    assert compute_score("exact_match", "46 ", "46") == 1.0  # a rule of rollstream's
    assert same_answer("Paris", " Paris ") and not same_answer("Paris", "London")
    with pytest.raises(ValueError, match="no label"):
        compute_score("unknown", "46", None)


@given(text=st.text(max_size=300) | st.from_regex(r"-?[0-9,]{1,300}(\.[0-9]*)?(e[0-9]+)?(/[0-9]+)?"))
def test_any_text_is_scored_at_once(text: str) -> None:
    assert same_answer(final_answer(text), "1") in (True, False)
    assert as_number("1e999999999") is None and as_number("1/0") is None
