"""The limits as a state machine: a clock of the test's, no waiting."""

import math
import random
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.engine.rate_limit import (
    LONGEST_WAIT_S,
    LimitHeaders,
    RateLimit,
    Sent,
    read_limit_headers,
)

NOTHING = LimitHeaders()


def limits(requests: int = 0, tokens: int = 0, seed: int = 0) -> RateLimit:
    return RateLimit(requests_per_minute=requests, tokens_per_minute=tokens, rng=random.Random(seed))


def send_when_allowed(limit: RateLimit, now: float, tokens: int) -> tuple[float, Sent]:
    """When it was sent, and the request; fails if it never may be."""
    for _ in range(1000):
        wait = limit.wait(now, tokens)
        assert 0 <= wait <= LONGEST_WAIT_S
        if wait == 0:
            return now, limit.send(now, tokens)
        now += wait
    raise AssertionError("it waits for ever")


@given(
    requests=st.integers(0, 5),
    tokens=st.integers(0, 300),
    sizes=st.lists(st.tuples(st.floats(0, 40), st.integers(0, 200)), min_size=1, max_size=40),
)
@settings(max_examples=200, deadline=None)
def test_no_minute_has_more_than_the_limit(
    requests: int, tokens: int, sizes: list[tuple[float, int]]
) -> None:
    limit, now = limits(requests, tokens), 0.0
    sent: list[tuple[float, int]] = []
    for pause, size in sizes:
        now, _ = send_when_allowed(limit, now + pause, size)
        sent.append((now, size))
    for start, _ in sent:
        inside = [size for at, size in sent if start <= at < start + 60.0]
        if requests:
            assert len(inside) <= requests
        if tokens:
            assert sum(inside) <= tokens or len([size for size in inside if size]) == 1  # alone is too large


@given(st.integers(1, 5), st.integers(1, 30))
def test_a_limit_is_used_up_and_not_wasted(requests: int, count: int) -> None:
    limit, now = limits(requests), 0.0
    for _ in range(count):
        now, _ = send_when_allowed(limit, now, 1)
    assert now <= 61.0 * ((count - 1) // requests) + 1e-6


def test_what_an_answer_really_used_makes_room() -> None:
    limit = limits(tokens=100)
    sent = limit.send(0.0, 90)
    assert limit.wait(1.0, 50) > 0
    limit.answered(1.0, sent, NOTHING, tokens=10)
    assert limit.wait(1.0, 50) == 0


def test_a_request_of_more_than_the_limit_goes_alone() -> None:
    limit = limits(tokens=100)
    limit.send(0.0, 10)
    assert limit.wait(30.0, 500) == 31.0
    assert limit.wait(61.0, 500) == 0
    limit.send(61.0, 500)
    assert limit.wait(100.0, 1) == pytest.approx(22.0)


def test_retry_after_holds_everything_until_then() -> None:
    limit = limits()
    first, second = limit.send(0.0, 1), limit.send(0.0, 1)
    assert limit.refused(1.0, first, 30.0) == 30.0
    assert limit.refused(1.5, second, 29.5) == 0.0  # nothing new
    assert limit.wait(2.0, 1) == 29.0
    assert limit.held_for(2.0) == 29.0
    assert limit.wait(31.0, 1) == 0


@pytest.mark.parametrize("retry_after", [None, 0.0])
def test_without_retry_after_pauses_grow_and_answers_end_them(retry_after: float | None) -> None:
    limit, now, pauses = limits(), 0.0, []
    for _ in range(9):
        now, sent = send_when_allowed(limit, now, 1)
        pauses.append(limit.refused(now, sent, retry_after))
    for level, pause in enumerate(pauses):
        assert min(2.0**level, 60.0) / 2 <= pause <= min(2.0**level, 60.0)
    for _ in range(40):
        now, sent = send_when_allowed(limit, now, 1)
        limit.answered(now, sent, NOTHING)
    now, sent = send_when_allowed(limit, now, 1)
    assert limit.refused(now, sent, retry_after) <= 1.0


def test_a_burst_that_is_refused_together_counts_once() -> None:
    limit = limits()
    burst = [limit.send(0.0, 1) for _ in range(200)]
    held = [limit.refused(0.5, sent, None) for sent in burst]
    assert 0 < held[0] <= 1.0
    assert not any(held[1:])


def test_after_a_refusal_sends_are_spread_and_come_closer_again() -> None:
    limit, now = limits(), 0.0
    now, sent = send_when_allowed(limit, now, 1)
    limit.refused(now, sent, 1.0)
    times = []
    for _ in range(60):
        now, sent = send_when_allowed(limit, now, 1)
        times.append(now)
        limit.answered(now, sent, NOTHING)
    gaps = [after - before for before, after in pairwise(times)]
    assert gaps[0] == pytest.approx(0.05 * 2**-0.2)
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] == 0.0


@pytest.mark.parametrize(
    ("headers", "wait"),
    [
        (LimitHeaders(remaining_requests=0, reset_requests=12.0), 12.0),
        (LimitHeaders(remaining_requests=1, reset_requests=12.0), 0.0),
        (LimitHeaders(remaining_tokens=5, reset_tokens=7.0), 7.0),
        (LimitHeaders(remaining_tokens=50, reset_tokens=7.0), 0.0),
        (LimitHeaders(remaining_requests=0), 0.0),
        (LimitHeaders(remaining_requests=0, reset_requests=1e9), LONGEST_WAIT_S),
    ],
)
def test_what_headers_say_is_believed(headers: LimitHeaders, wait: float) -> None:
    limit = limits()
    limit.answered(1.0, limit.send(0.0, 20), headers)
    assert limit.wait(1.0, 20) == wait
    assert limit.held_for(1.0) <= 3600.0


events = st.one_of(
    st.tuples(st.just("refused"), st.one_of(st.none(), st.floats(0, 1e9))),
    st.tuples(st.just("answered"), st.integers(0, 500)),
    st.tuples(st.just("told"), st.floats(0, 1e9)),
    st.tuples(st.just("sent"), st.integers(0, 500)),
)


@given(st.integers(0, 3), st.integers(0, 200), st.lists(events, max_size=30))
@settings(max_examples=200, deadline=None)
def test_nobody_waits_for_ever_whatever_happens(
    requests: int, tokens: int, history: list[tuple[str, float]]
) -> None:
    limit, now = limits(requests, tokens), 0.0
    sent = limit.send(now, 1)
    for what, value in history:
        now += 0.25
        if what == "refused":
            limit.refused(now, sent, value)
        elif what == "answered":
            limit.answered(now, sent, NOTHING, tokens=int(value))
        elif what == "told":
            limit.answered(now, sent, LimitHeaders(remaining_requests=0, reset_requests=value))
        else:
            sent = limit.send(now, int(value))
    done, _ = send_when_allowed(limit, now, 100)
    assert done - now <= 3600.0 + 2 * 61.0


@dataclass
class Endpoint:
    """Takes so many requests in any minute; refuses the others, and counts those as well, as OpenAI does."""

    most: int
    says_when: bool
    taken: list[float] = field(default_factory=list)

    def ask(self, now: float) -> float | str | None:
        self.taken = [at for at in self.taken if at + 60.0 > now]
        if len(self.taken) < self.most:
            self.taken.append(now)
            return "ok"
        return self.taken[0] + 60.0 - now if self.says_when else None


@given(st.integers(1, 20), st.booleans(), st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_a_storm_of_refusals_is_lived_through(most: int, says_when: bool, seed: int) -> None:
    endpoint, limit, now = Endpoint(most, says_when), limits(seed=seed), 0.0
    answered = refused = 0
    waiting = 100
    while answered < waiting:
        now, sent = send_when_allowed(limit, now, 1)
        verdict = endpoint.ask(now)
        if verdict == "ok":
            answered += 1
            limit.answered(now, sent, NOTHING)
        else:
            refused += 1
            assert verdict is None or isinstance(verdict, float)
            limit.refused(now, sent, verdict)
    ideal = 60.0 * (waiting / most)
    assert now <= 3 * ideal + 120
    assert refused <= (2 if says_when else 4) * waiting / most + 20


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, NOTHING),
        ({"Retry-After": "20"}, LimitHeaders(retry_after=20.0)),
        ({"Retry-After": " 1.5 "}, LimitHeaders(retry_after=1.5)),
        ({"Retry-After": "-3"}, LimitHeaders(retry_after=0.0)),
        ({"Retry-After": "nan"}, NOTHING),
        ({"Retry-After": "inf"}, NOTHING),
        ({"Retry-After": "soon"}, NOTHING),
        ({"Retry-After": "Thu, 01 Jan 1970 00:01:40 GMT"}, LimitHeaders(retry_after=40.0)),
        ({"Retry-After": "Thu, 01 Jan 1970 00:00:10 GMT"}, LimitHeaders(retry_after=0.0)),
        (
            {"Retry-After": "Thu, 01 Jan 1970 00:30:10 GMT", "Date": "Thu, 01 Jan 1970 00:30:00 GMT"},
            LimitHeaders(retry_after=10.0),  # by the server's clock, however far it is from ours
        ),
        (
            {"Retry-After": "Thu, 01 Jan 1970 00:01:40 GMT", "Date": "today"},
            LimitHeaders(retry_after=40.0),
        ),
        ({"Retry-After": "2", "retry-after-ms": "250"}, LimitHeaders(retry_after=0.25)),
        (
            {"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "6m0s"},
            LimitHeaders(remaining_requests=0, reset_requests=360.0),
        ),
        (
            {"x-ratelimit-remaining-tokens": "149", "x-ratelimit-reset-tokens": "120ms"},
            LimitHeaders(remaining_tokens=149, reset_tokens=0.12),
        ),
        (
            {"x-ratelimit-remaining-requests": "many", "x-ratelimit-reset-requests": "1h2m3.5s"},
            LimitHeaders(reset_requests=3723.5),
        ),
        ({"x-ratelimit-reset-tokens": "7"}, LimitHeaders(reset_tokens=7.0)),
    ],
)
def test_headers_are_read(headers: dict[str, str], expected: LimitHeaders) -> None:
    assert read_limit_headers(headers, wall_time=60.0) == expected


@given(
    st.dictionaries(
        st.sampled_from(
            ["Retry-After", "retry-after-ms", "x-ratelimit-remaining-requests", "x-ratelimit-reset-tokens"]
        ),
        st.text(max_size=20),
    )
)
def test_no_header_breaks_anything(headers: dict[str, str]) -> None:
    found = read_limit_headers(headers, wall_time=0.0)
    for value in (found.retry_after, found.reset_tokens):
        assert value is None or (value >= 0 and math.isfinite(value))
