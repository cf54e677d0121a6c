import subprocess
import sys

import orjson
from hypothesis import given
from hypothesis import strategies as st

from rollstream.testing.answers import AnswerBook

BOOK = AnswerBook(vocab_size=1000)


@given(
    st.lists(st.integers(0, 999), min_size=1, max_size=50),
    st.none() | st.integers(0, 2**31 - 1),
    st.integers(0, 1200),
)
def test_the_json_form_is_the_same_answer(prompt: list[int], seed: int | None, length: int) -> None:
    ids, logprobs = BOOK.answer(prompt, seed, length)
    ids_json, entries_json = BOOK.answer_json(BOOK.digest(prompt, seed), length)
    assert orjson.loads(ids_json) == ids
    assert orjson.loads(entries_json) == [[lp, i, None] for lp, i in zip(logprobs, ids, strict=True)]
    assert len(ids) == length
    assert all(0 <= i < 1000 for i in ids)
    assert all(lp <= 0 for lp in logprobs)


def test_a_longer_answer_begins_with_the_shorter_one() -> None:
    assert BOOK.answer([5], 1, 900)[0][:13] == BOOK.answer([5], 1, 13)[0]


def test_prompt_and_seed_both_matter() -> None:
    answers = {tuple(BOOK.answer([p], s, 16)[0]) for p in range(10) for s in (None, 0, 1)}
    assert len(answers) == 30


def test_another_process_gives_the_same_answer() -> None:
    code = (
        "from rollstream.testing.answers import AnswerBook; print(AnswerBook(1000).answer([1, 2], 3, 20)[0])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == str(BOOK.answer([1, 2], 3, 20)[0])
