"""How much tools may do and say."""

from dataclasses import dataclass
from typing import Literal, get_args

from rollstream.errors import ConfigError

TruncateSide = Literal["left", "right", "middle"]
"""Which side of a text that is too long is cut off, as verl names it."""


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """Limits of `actor_rollout_ref.rollout.multi_turn`."""

    max_parallel_calls: int = 8
    """Calls at once in one rollout, > 0. All calls of a turn run, in the order of their texts."""
    max_response_length: int = 4096
    """Characters of one result that the model sees, > 0."""
    truncate_side: TruncateSide = "middle"
    """What a longer result loses."""
    timeout: float = 60.0
    """Seconds for one call, making the instance included, and for each `calc_reward` and `release`; > 0.
    Waiting for another call to end does not count."""

    def __post_init__(self) -> None:
        for key, value in [
            ("max_parallel_calls", self.max_parallel_calls),
            ("max_tool_response_length", self.max_response_length),
            ("tool_timeout", self.timeout),
        ]:
            if not value > 0:
                raise ConfigError(f"actor_rollout_ref.rollout.multi_turn.{key}: {value}, want more than 0")
        if self.truncate_side not in get_args(TruncateSide):
            raise ConfigError(
                "actor_rollout_ref.rollout.multi_turn.tool_response_truncate_side: "
                f"{self.truncate_side!r}, want one of {', '.join(get_args(TruncateSide))}"
            )
