"""Arithmetic problems in the wording of reasoning-gym's ``chain_sum``, and which of them are held out."""

import hashlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

QUESTION = "State the final answer to the following arithmetic problem: {} ="
"""The one wording of ``reasoning_gym.arithmetic.chain_sum`` (0.1.25)."""


class Split(Enum):
    """What a problem may be used for. Decided by its text alone, so every seed and every run agrees."""

    TRAIN = "train"
    VALIDATION = "validation"
    """Stops a training run and chooses between seeds."""
    TEST = "test"
    """Only reported on."""


@dataclass(frozen=True)
class Problem:
    """Numbers joined by plus and minus signs."""

    expression: str
    """As it stands in the question, such as ``37 - 41``."""
    answer: str
    """The value as a plain integer, such as ``-4``: what a reply has to be, character for character."""

    @property
    def question(self) -> str:
        """What the user says."""
        return QUESTION.format(self.expression)

    @property
    def split(self) -> Split:
        """Where the problem belongs: a tenth each is held out for validation and for test.

        There are only 16,200 problems of two terms and two digits, so a held-out set drawn by
        another random seed would overlap the training set; a hash of the text cannot.
        """
        bucket = hashlib.sha256(self.question.encode()).digest()[0] % 10
        return {0: Split.VALIDATION, 1: Split.TEST}.get(bucket, Split.TRAIN)


def build_problem(numbers: list[int], signs: list[str]) -> Problem:
    """Join numbers by signs, one sign fewer than numbers.

    Raises:
        ValueError: if the counts do not fit.
    """
    first, *rest = numbers
    expression, value = str(first), first
    for sign, number in zip(signs, rest, strict=True):
        expression += f" {sign} {number}"
        value += number if sign == "+" else -number
    return Problem(expression, str(value))


def enumerate_pairs(digits: int, split: Split) -> Iterator[Problem]:
    """Yield a split's problems of two terms of that many digits: all of them, in a fixed order."""
    numbers = _numbers(digits)
    for left, sign, right in itertools.product(numbers, "+-", numbers):
        problem = build_problem([left, right], [sign])
        if problem.split is split:
            yield problem


def draw_problem(rng: random.Random, terms: int, digits: int, split: Split) -> Problem:
    """Draw a random problem that belongs to the split."""
    numbers = _numbers(digits)
    while True:
        problem = build_problem([rng.choice(numbers) for _ in range(terms)], rng.choices("+-", k=terms - 1))
        if problem.split is split:
            return problem


def _numbers(digits: int) -> range:
    """The numbers of that many digits; like ``chain_sum``, 0 counts as a number of one digit."""
    return range(0 if digits == 1 else 10 ** (digits - 1), 10**digits)
