"""What an environment gives, whichever version of verifiers it is of."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol

from rollstream.integrations.verifiers.endpoint import Endpoint
from rollstream.integrations.verifiers.recorder import Recorder
from rollstream.trajectory import SamplingParams


@dataclass(frozen=True, slots=True)
class Played:
    """One agent's part in a rollout."""

    recorder: Recorder
    reward: float | None
    """None: the environment did not score it."""
    stop_condition: str | None
    """Why it ended, in the environment's words."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    kept: Collection[str] | None = None
    """Names of the answers that belong to it; None: all."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What else the environment says; JSON values."""


OpenSession = Callable[[str], Recorder]
"""Makes requests with a session name those of a new recorder, for the rest of the attempt."""


class Environment(Protocol):
    """An environment of verifiers that was loaded."""

    name: str
    """What it is called, as the `data_source` of its rows."""
    source: Any
    """The object that it is, of verifiers."""
    home: ModuleType
    """The module that made it."""

    def rows(self, split: str, count: int | None) -> Iterator[dict[str, Any]]:
        """Its prompt rows: `prompt`, `ground_truth`, and what `run` needs in the column `verifiers`.

        Args:
            split: `train` or `eval`.
            count: at most; None: all of them.

        Raises:
            ConfigError: there is no such split, or no end to the rows.
        """
        ...

    def serving(self, endpoint: Endpoint) -> AbstractAsyncContextManager[None]:
        """What its rollouts share, while some are under way."""
        ...

    async def run(
        self,
        row: Mapping[str, Any],
        messages: list[dict[str, Any]],
        *,
        open_session: OpenSession,
        sampling: SamplingParams,
    ) -> list[Played]:
        """Executes one rollout, its rubric included.

        Args:
            row: the column `verifiers` of the prompt row.
            messages: of the prompt row.
            open_session: called before an agent's first request.
            sampling: how the run samples.

        Returns:
            The agents whose tokens train the model, the last one to end last.

        Raises:
            EnvironmentFailedError: it ended with an error of its own.
            DataError: the row is none of this environment.
        """
        ...
