import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from rollstream.testing.answers import AnswerBook

BOOK = AnswerBook(vocab_size=1000)


@given(
    st.lists(st.integers(0, 999), min_size=1, max_size=50),
    st.none() | st.integers(0, 2**31 - 1),
    st.integers(0, 1200),
    st.integers(0, 1200),
)
def test_a_longer_answer_begins_with_the_shorter_one(
    prompt: list[int], seed: int | None, length: int, other: int
) -> None:
    ids, logprobs = BOOK.answer(prompt, seed, length)
    assert len(ids) == len(logprobs) == length
    assert all(0 <= i < 1000 for i in ids) and all(lp <= 0 for lp in logprobs)
    least = min(length, other)
    assert BOOK.answer(prompt, seed, other)[0][:least] == ids[:least]


def test_prompt_and_seed_both_matter() -> None:
    answers = {tuple(BOOK.answer([p], s, 16)[0]) for p in range(10) for s in (None, 0, 1)}
    assert len(answers) == 30


def test_another_process_gives_the_same_answer() -> None:
    code = (
        "from rollstream.testing.answers import AnswerBook; print(AnswerBook(1000).answer([1, 2], 3, 20)[0])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == str(BOOK.answer([1, 2], 3, 20)[0])
