"""What an endpoint's rate limits allow now: a state machine that owns no task and no clock.

    free   --(a window of a minute is full)-----------> full    --(enough has left the window)--> free
    free   --(refused, or told that nothing is left)--> held    --(the time is over)------------> paced
    paced  --(answers: sends come closer together)----> free    --(refused again)---------------> held

Limits come from three sides: the user's own (per minute, counted here before a request is sent), what answers
say in their headers (`x-ratelimit-*`), and refusals (429, or 503 with `Retry-After`). All hold together.
"""

import math
import random
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

WINDOW_S = 61.0
"""A minute, and a second: a request reaches the endpoint's own clock some time after it was sent."""

LONGEST_WAIT_S = 60.0
"""Nobody is told to wait longer before asking again: what holds now may have changed by then."""

_HOLD_S_MAX = 3600.0
"""An endpoint that asks for more is asked once an hour whether it meant it."""
_BACKOFF_S = 1.0
"""After a refusal that does not say how long; doubles with each that follows."""
_BACKOFF_S_MAX = 60.0
"""The longest useful one: limits are per minute."""
_LEAST_HOLD_S = 0.1
"""`Retry-After: 0.001` is no licence for a hot loop."""

_SPACING_S = 0.05
"""Between two sends after a first refusal; doubles with each further one. Everybody who waited would else
send at the same moment, and endpoints count what they refuse."""
_LEVELS = 7.0
"""Refusals that double these two: the last back-off is the longest."""
_EASED = 0.2
"""Of a level goes with each answer: one is no end of a limit of one a minute."""


@dataclass(slots=True, eq=False)
class Sent:
    """A request that was sent."""

    at: float
    """When, by the caller's clock."""
    tokens: int
    """It counts for so many."""


@dataclass(frozen=True, slots=True)
class LimitHeaders:
    """What an answer's headers say of limits; None where they don't."""

    retry_after: float | None = None
    """Seconds."""
    remaining_requests: int | None = None
    reset_requests: float | None = None
    """Seconds until all of them are there again."""
    remaining_tokens: int | None = None
    reset_tokens: float | None = None


class RateLimit:
    """The limits of one endpoint.

    Times are seconds of any clock that never goes back; it is read by the caller.

    Args:
        requests_per_minute: at most so many in any minute; 0 is no limit.
        tokens_per_minute: the same for tokens. A request of more than that goes alone.
        rng: spreads back-offs.
    """

    def __init__(
        self, *, requests_per_minute: int = 0, tokens_per_minute: int = 0, rng: random.Random | None = None
    ) -> None:
        self._requests = requests_per_minute
        self._tokens = tokens_per_minute
        self._rng = rng or random.Random()
        self._window: deque[Sent] = deque()
        self._used = 0
        """Tokens of the window: a window may hold tens of thousands of requests."""
        self._held_until = -math.inf
        self._refused_at = -math.inf
        self._level = 0.0
        """Refusals of requests that were sent after the one before was known, less answers since."""
        self._last = -math.inf

    def held_for(self, now: float) -> float:
        """Seconds for which the endpoint takes nothing, as it said or as a back-off has it."""
        return max(0.0, self._held_until - now)

    def wait(self, now: float, tokens: int) -> float:
        """Seconds until it is worth asking again whether a request may be sent; 0 if it may be sent now.

        Args:
            now: the time.
            tokens: what the request counts for.
        """
        spacing = _SPACING_S * 2.0 ** (self._level - 1) if self._level > 0 else 0.0
        wait = max(self._held_until, self._last + spacing, self._window_allows(now, tokens)) - now
        return min(max(0.0, wait), LONGEST_WAIT_S)

    def send(self, now: float, tokens: int) -> Sent:
        """Counts a request that is sent now; `wait` has just said 0."""
        sent = Sent(now, tokens)
        self._last = now
        if self._requests or self._tokens:
            self._window.append(sent)
            self._used += tokens
        return sent

    def answered(self, now: float, sent: Sent, headers: LimitHeaders, *, tokens: int | None = None) -> None:
        """Learns from an answer. `tokens`: what it really used, where that is known."""
        self._expire(now)
        if tokens is not None:
            if self._window and sent.at >= self._window[0].at:
                self._used += tokens - sent.tokens
            sent.tokens = tokens
        if sent.at > self._refused_at:
            self._level = max(0.0, self._level - _EASED)
        for remaining, needed, reset in (
            (headers.remaining_requests, 1, headers.reset_requests),
            (headers.remaining_tokens, max(1, sent.tokens), headers.reset_tokens),
        ):
            if remaining is not None and reset is not None and remaining < needed:
                self._hold(now, reset)

    def refused(self, now: float, sent: Sent, retry_after: float | None) -> float:
        """Learns from a refusal; what is sent next waits.

        Returns:
            the seconds for which nothing is sent now; 0.0 if an earlier refusal has said so already.
        """
        before = self._held_until
        if sent.at > self._refused_at:
            self._level = min(self._level + 1, _LEVELS)
            if not retry_after:
                backoff = min(_BACKOFF_S * 2.0 ** (self._level - 1), _BACKOFF_S_MAX)
                retry_after = backoff * self._rng.uniform(0.5, 1.0)
        self._refused_at = now
        if retry_after:
            self._hold(now, max(retry_after, _LEAST_HOLD_S))
        return self.held_for(now) if self._held_until > max(before, now) else 0.0

    def _hold(self, now: float, seconds: float) -> None:
        self._held_until = max(self._held_until, now + min(seconds, _HOLD_S_MAX))

    def _expire(self, now: float) -> None:
        while self._window and self._window[0].at + WINDOW_S <= now:
            self._used -= self._window.popleft().tokens

    def _window_allows(self, now: float, tokens: int) -> float:
        """When the user's own limits let a request through."""
        self._expire(now)
        window = self._window
        at = now
        if self._requests and len(window) >= self._requests:
            at = window[len(window) - self._requests].at + WINDOW_S
        if self._tokens:
            room = self._tokens - self._used
            for sent in window:
                if tokens <= room:
                    break
                room += sent.tokens
                at = max(at, sent.at + WINDOW_S)
        return at


def read_limit_headers(headers: Mapping[str, str], wall_time: float) -> LimitHeaders:
    """What headers say of limits; what cannot be read counts as not there.

    Source: RFC 9110 for `Retry-After`; https://platform.openai.com/docs/guides/rate-limits for the others,
    and `retry-after-ms`, which OpenAI's own clients read first.

    Args:
        headers: of an answer; names in any case if the mapping takes any.
        wall_time: Unix time, seconds: `Retry-After` may be a date. That is counted from the answer's own
            `Date`, and from this time only where there is none: clocks differ.
    """
    milliseconds = _seconds(headers.get("retry-after-ms"))
    retry_after = None if milliseconds is None else milliseconds / 1000
    if retry_after is None and (text := headers.get("Retry-After")) is not None:
        retry_after = _seconds(text)
        if retry_after is None:
            until, sent = _unix_time(text), _unix_time(headers.get("Date"))
            if until is not None:
                retry_after = max(0.0, until - (wall_time if sent is None else sent))
    return LimitHeaders(
        retry_after=retry_after,
        remaining_requests=_count(headers.get("x-ratelimit-remaining-requests")),
        reset_requests=_duration(headers.get("x-ratelimit-reset-requests")),
        remaining_tokens=_count(headers.get("x-ratelimit-remaining-tokens")),
        reset_tokens=_duration(headers.get("x-ratelimit-reset-tokens")),
    )


_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


def _duration(text: str | None) -> float | None:
    """Seconds of `6m0s`, `120ms`, `1.5s` or `12`."""
    parts = _PART.findall(text or "")
    if parts and _PART.sub("", text or "").strip() == "":
        return sum(float(number) * _UNITS[unit] for number, unit in parts)
    return _seconds(text)


def _seconds(text: str | None) -> float | None:
    try:
        value = float(text) if text is not None else math.nan
    except ValueError:
        return None
    return max(0.0, value) if math.isfinite(value) else None


def _unix_time(date: str | None) -> float | None:
    try:
        return None if date is None else parsedate_to_datetime(date).timestamp()
    except (ValueError, OverflowError):
        return None


def _count(text: str | None) -> int | None:
    value = _seconds(text)
    return None if value is None else int(value)
