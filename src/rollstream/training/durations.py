"""How long the generation of a group takes, as a distribution that is named by its mean."""

import math
import random
from dataclasses import dataclass
from typing import Literal

from rollstream.errors import ConfigError

Kind = Literal["constant", "exponential", "lognormal", "pareto"]

_SHAPES = {"constant": 0.0, "exponential": 0.0, "lognormal": 0.8, "pareto": 2.5}
"""Where no shape is given: a log-normal as response lengths of chat models are spread; a Pareto whose longest
of a hundred is some four times the mean."""


@dataclass(frozen=True, slots=True)
class Duration:
    """A distribution of seconds."""

    kind: Kind
    mean: float
    """Seconds, > 0."""
    shape: float = 0.0
    """Log-normal: sigma of the logarithm. Pareto: alpha, > 1; the smaller, the heavier its tail."""

    def __post_init__(self) -> None:
        if self.kind not in _SHAPES:
            raise ConfigError(f"no distribution {self.kind!r}: {', '.join(_SHAPES)}")
        if not (self.mean > 0 and math.isfinite(self.mean)):
            raise ConfigError(f"a mean of {self.mean} s: more than 0")
        if self.kind == "pareto" and self.shape <= 1:
            raise ConfigError(f"pareto with alpha={self.shape}: more than 1, or it has no mean")
        if self.kind == "lognormal" and self.shape < 0:
            raise ConfigError(f"lognormal with sigma={self.shape}: not negative")

    def draw(self, seed: int, position: int) -> float:
        """Seconds of the group at a position: a function of both, whoever asks, in whatever order."""
        rng = random.Random(seed * 1_000_003 + position)
        match self.kind:
            case "constant":
                return self.mean
            case "exponential":
                return rng.expovariate(1 / self.mean)
            case "lognormal":
                return rng.lognormvariate(math.log(self.mean) - self.shape**2 / 2, self.shape)
            case "pareto":
                return rng.paretovariate(self.shape) * self.mean * (self.shape - 1) / self.shape


def parse_duration(text: str) -> Duration:
    """Reads `KIND:MEAN[:SHAPE]`, or a number for a constant.

    Raises:
        ConfigError: it is neither.
    """
    parts = text.split(":")
    if len(parts) == 1:
        parts = ["constant", *parts]
    kind, *numbers = parts
    if kind not in _SHAPES:
        raise ConfigError(f"no distribution {kind!r}: {', '.join(_SHAPES)}")
    try:
        mean, shape = (*map(float, numbers), _SHAPES[kind])[:2]
        if not 1 <= len(numbers) <= 2:
            raise ValueError
    except ValueError:
        raise ConfigError(f"{text!r} is not SECONDS or KIND:MEAN[:SHAPE], as in lognormal:30:0.8") from None
    return Duration(kind, mean, shape)  # type: ignore[arg-type]  # checked above
