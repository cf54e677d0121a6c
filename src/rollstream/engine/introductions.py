"""Replicas that were away, at the start or later, say what they are before they get work.

    known --(away)--> owed --(describes itself, and is what the run began with)--> known
                        owed --(is something else)--> owed: it counts as away, and the log says why, once

A server that comes back may be another: restarted with other options, or with another model.
"""

import logging
from collections.abc import Callable

from rollstream.engine.base import Capabilities
from rollstream.engine.replica import Replica, ReplicaAwayError
from rollstream.errors import EngineError, TransientEngineError

logger = logging.getLogger(__name__)


class Introductions:
    """Knows which replicas owe an introduction.

    Args:
        expected: what the run began with.
    """

    def __init__(self, expected: Callable[[], Capabilities]) -> None:
        self._expected = expected
        self._owed: set[str] = set()
        self._told: dict[str, str] = {}

    def owe(self, name: str) -> None:
        """The replica must say what it is before it gets work."""
        self._owed.add(name)

    def is_owed(self, name: str) -> bool:
        """Whether it must."""
        return name in self._owed

    def forget(self, name: str) -> None:
        """The replica is no more."""
        self._owed.discard(name)
        self._told.pop(name, None)

    async def ask(self, replica: Replica) -> None:
        """Asks a replica what it is. Returns when it can do what the run needs, and owes nothing any more.

        Raises:
            ReplicaAwayError: it does not answer, or it is something else.
        """
        try:
            missing = missing_capabilities(await replica.describe(), self._expected())
            problem = f"{replica.name} is not what the run began with: it has {missing}" if missing else ""
        except ReplicaAwayError:
            raise
        except TransientEngineError as error:
            raise ReplicaAwayError(str(error)) from error
        except EngineError as error:  # not a request's fault
            problem = str(error)
        if not problem:
            self._owed.discard(replica.name)
            self._told.pop(replica.name, None)
            return
        if self._told.get(replica.name) != problem:
            self._told[replica.name] = problem
            logger.error("a server gets no work: %s", problem)
        raise ReplicaAwayError(problem)


def missing_capabilities(found: Capabilities, expected: Capabilities) -> str:
    """What a run that began with `expected` would miss in another server; empty if nothing."""
    missing = []
    if found.logprobs != expected.logprobs:
        missing.append(f"log-probs of another kind ({found.logprobs}, not {expected.logprobs})")
    for name, what in _WANTED.items():
        if getattr(expected, name) and not getattr(found, name):
            missing.append(f"no {what}")
    if lost := ", ".join(sorted({*expected.extra_sampling} - {*found.extra_sampling})):
        missing.append(f"no sampling parameter {lost}")
    if found.max_model_len is not None and (
        expected.max_model_len is None or found.max_model_len < expected.max_model_len
    ):
        missing.append(f"sequences of {found.max_model_len} tokens at most")
    if found.vocab_size is not None and found.vocab_size < (expected.vocab_size or 2**31):
        missing.append(f"a vocabulary of {found.vocab_size} ids, not {expected.vocab_size}")
    return ", ".join(missing)


_WANTED = {
    "token_ids": "exact token ids",
    "seeds": "seeds",
    "stop_strings": "stop strings",
    "stop_token_ids": "stop token ids",
    "images": "images",
    "update_weights": "weight updates",
    "stop_token_ids_with_ignore_eos": "stop token ids that hold with ignore_eos",
}
