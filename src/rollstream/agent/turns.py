"""The finished turns of one rollout, as its agent loop sees them."""

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rollstream.store.records import EncodedTurn, RecordCodec, TurnRecord, json_text, pack
from rollstream.trajectory import Completion, Message, Metrics, RolloutKey

logger = logging.getLogger(__name__)


class Turns:
    """The turns that are kept of a rollout, and the way for new ones to get there.

    A loop goes on behind all of them (`resume`), or makes its calls again and is given the answers that it got
    (`take`).

    Attributes:
        earlier: times and counts of the rollout up to here, in processes that have ended.
        bodies: of the turns, oldest first, for a worker elsewhere, whose turns `relay` takes.
    """

    def __init__(
        self,
        key: RolloutKey,
        prompt_key: str,
        bodies: Sequence[bytes],
        keep: Callable[[EncodedTurn], object],
        codec: RecordCodec,
    ) -> None:
        """Args:
        key: of the rollout.
        prompt_key: of its prompt row as it is now: turns of another content are none.
        bodies: of its turns so far, oldest first, see `TurnStore`.
        keep: takes a turn to where it becomes durable.
        codec: of the thread that the loop runs in.
        """
        self._key, self._prompt_key, self._keep, self._codec = key, prompt_key, keep, codec
        self.bodies = list(bodies)
        self._kept: list[TurnRecord] = []
        self._after = b""
        for body in bodies:
            turn = codec.decode_turn(body)
            if turn.prompt_key != prompt_key or turn.after != self._after:
                break  # the turn before it was damaged, and another one stands there
            self._kept.append(turn)
            self._after = _digest(body)
        self.earlier = self._kept[-1].metrics if self._kept else Metrics()
        self._began = time.monotonic()
        self.begin()

    def begin(self) -> None:
        """An attempt begins: nothing was taken yet."""
        self._untaken = list(self._kept)

    def forget(self) -> None:
        """The next attempt begins anew."""
        self._kept, self._after = [], b""

    def relay(self, turn: EncodedTurn) -> None:
        """Keeps a turn that a worker elsewhere has added."""
        self.bodies[turn.number :] = [turn.body]
        self._keep(replace(turn, key=self._key))

    def resume(self, asked: bytes) -> list[TurnRecord]:
        """The turns to go on behind, if the conversation began with the same."""
        if any(turn.asked != asked for turn in self._kept):
            logger.warning("rollout %s: its prompt is another one now: it begins anew", self._key)
            self.forget()
        return list(self._kept)

    def take(self, asked: bytes) -> Completion | None:
        """The answer to what was asked before; each is given once in an attempt."""
        for at, turn in enumerate(self._untaken):
            if turn.asked == asked:
                del self._untaken[at]
                return turn.completion
        return None

    def add(
        self,
        asked: bytes,
        completion: Completion,
        metrics: Metrics,
        given_ids: Sequence[int],
        given_messages: Sequence[Message],
        state: Any,
    ) -> None:
        """Keeps a turn behind those that there are. Returns at once. For the arguments see `TurnRecord`."""
        metrics = replace(metrics, total_s=self.earlier.total_s + time.monotonic() - self._began)
        turn = TurnRecord(
            self._prompt_key,
            self._after,
            asked,
            list(given_ids),
            list(given_messages),
            completion,
            state,
            metrics,
        )
        body = self._codec.encode_turn(turn)
        self._keep(EncodedTurn(self._key, len(self._kept), body))
        self._kept.append(turn)
        self._after = _digest(body)


def asked_digest(ids: Sequence[int], *more: Any) -> bytes:
    """Names what an engine is asked."""
    return _digest(pack("i", ids) + json_text(more).encode())


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
