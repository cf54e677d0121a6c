"""The faults and latencies of a stub server, chosen by seed, so that a run can be repeated."""

import random
from dataclasses import dataclass
from typing import Literal, get_args

from rollstream.errors import ConfigError

Fault = Literal[
    "error", "bad_request", "hang", "truncate", "short_logprobs", "bad_ids", "wrong_rid", "abort", "drop"
]
"""The shares of `Faults`, in the order in which they are drawn."""


@dataclass(frozen=True, slots=True)
class Faults:
    """Shares (0 to 1) of requests that go wrong, each in one way; and what is wrong with the whole server."""

    error: float = 0.0
    """HTTP `error_status`."""
    bad_request: float = 0.0
    """HTTP 400 with a message."""
    hang: float = 0.0
    """No reply, ever; the connection stays open."""
    truncate: float = 0.0
    """A whole HTTP reply with half of its JSON."""
    short_logprobs: float = 0.0
    """The reply has a log-prob fewer than ids."""
    bad_ids: float = 0.0
    """An id outside every vocabulary."""
    wrong_rid: float = 0.0
    """A reply that names another request."""
    abort: float = 0.0
    """Half an answer with finish reason `abort`, which the client did not ask for."""
    drop: float = 0.0
    """The connection is closed without a reply."""
    error_status: int = 500
    """Which 5xx (or 429)."""
    info_status: int = 200
    """The status of `/get_model_info` and `/get_server_info`."""
    die_after: int | None = None
    """The server dies when this many requests have been answered, with all that are in flight."""
    unhealthy: bool = False
    """`/health` answers 503."""
    unready: bool = False
    """`/readiness` answers 503, as that of a router without servers; else there is none, as in SGLang."""
    broken_http: bool = False
    """Every route answers with something that is not HTTP."""
    frozen: bool = False
    """Takes connections and answers nothing, as a process that is stopped."""
    no_metrics: bool = False
    """There is no `/metrics`; `/get_load` is always there, as in SGLang."""

    def choose(self, draw: float) -> Fault | None:
        """The fault of a request for a uniform draw in [0, 1)."""
        names: tuple[Fault, ...] = get_args(Fault)
        for name in names:
            if draw < (share := getattr(self, name)):
                return name
            draw -= share
        return None


@dataclass(frozen=True, slots=True)
class Latency:
    """How long an answer takes, in seconds; or another length that has a long tail.

    `fixed:T` is always T; `lognormal:MEDIAN,SIGMA` and `pareto:MINIMUM,ALPHA` have long tails.
    """

    kind: Literal["fixed", "lognormal", "pareto"] = "fixed"
    scale: float = 0.0
    """T, the median, or the minimum."""
    shape: float = 0.0
    """Sigma, or alpha."""
    maximum: float = float("inf")
    """A longer draw is cut here."""
    token_s: float = 0.0
    """Seconds for each token of the answer, besides."""

    @classmethod
    def parse(cls, text: str) -> "Latency":
        """Reads `kind:scale[,shape]`."""
        kind, _, numbers = text.partition(":")
        if kind not in ("fixed", "lognormal", "pareto"):
            raise ConfigError(
                f"latency {text!r} is none of fixed:T, lognormal:MEDIAN,SIGMA, pareto:MIN,ALPHA"
            )
        return cls(kind, *map(float, numbers.split(",")))  # type: ignore[arg-type]

    def draw(self, key: bytes, tokens: int = 0) -> float:
        """The latency of a request that `key` stands for, with so many tokens: always the same one."""
        value = self.scale
        if self.kind == "lognormal":
            value *= random.Random(key).lognormvariate(0.0, self.shape)
        elif self.kind == "pareto":
            value *= random.Random(key).paretovariate(self.shape)
        return min(value, self.maximum) + self.token_s * tokens
