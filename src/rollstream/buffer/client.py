"""The buffer's client for programs without an event loop. `async_client` is the same for those with one.

with BufferClient("http://127.0.0.1:8889") as client:
    client.write(items)
    with client.read(max_groups=8, timeout=60, consumer="trainer") as lease:
        for group in lease:
            train(group.items)
        lease.ack()
"""

import contextlib
import http.client
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self
from urllib.parse import quote

import orjson

from rollstream.buffer.client_http import Answer, Connections
from rollstream.buffer.client_wire import (
    BROKEN,
    MEDIA_TYPES,
    STREAM_TYPES,
    TWICE,
    UNREAD,
    Address,
    AnswerLostError,
    Backoff,
    BufferClientError,
    BufferUnavailableError,
    Encoding,
    Items,
    LeaseUseError,
    ReadGroup,
    RecordReader,
    Written,
    as_items,
    batches,
    encoding_of,
    read_body,
    read_group,
    read_written,
)

__all__ = [
    "Backoff",
    "BufferClient",
    "BufferClientError",
    "BufferUnavailableError",
    "Lease",
    "LeaseUseError",
    "ReadGroup",
    "Written",
]

_PART = 2**18
"""Bytes read at once from a stream."""


class BufferClient:
    """Writes and reads; tries again when the buffer is away or has no room. Threads may share one.

    Args:
        url: of the buffer; a token may stand in it as password.
        token: lets in.
        encoding: "msgpack" sends and gets tokens as binary; "json" is for other eyes.
        timeout: seconds without a byte from the buffer.
        backoff: when to try again.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        encoding: Encoding = "msgpack",
        timeout: float = 120.0,
        backoff: Backoff | None = None,
    ) -> None:
        self._encoding: Encoding = encoding
        self._timeout = timeout
        self._connections = Connections(
            Address.parse(url, token), timeout=timeout, backoff=backoff or Backoff()
        )

    def write(self, items: Items) -> Written:
        """Writes items, or one; durable when it returns. Of several batches, those before a failure stay.

        Args:
            items: as slime's wire has them, with exact tokens if there are any; or JSON texts of them.

        Raises:
            BufferClientError: an item is refused, or the token is; nothing of its batch is stored.
            TypeError: one is neither a mapping nor bytes; nothing is sent.
            BufferUnavailableError: the buffer stayed away, or full.
        """
        listed = as_items(items)
        encoding = encoding_of(listed, self._encoding)
        total = Written(0, 0)
        for _, body in batches(listed, encoding):
            done = read_written(self._call("POST", "/v1/items", body, MEDIA_TYPES[encoding]))
            total = Written(
                total.stored + done.stored, total.known + done.known, [*total.results, *done.results]
            )
        return total

    def known(self, uids: Sequence[str]) -> list[bool]:
        """Which uids the buffer has, or had: those need not be generated again."""
        known: list[bool] = []
        for start in range(0, len(uids), 10_000):
            body = orjson.dumps({"uids": list(uids[start : start + 10_000])})
            known += orjson.loads(self._call("POST", "/v1/uids/known", body))["known"]
        return known

    def read(
        self,
        *,
        max_groups: int | None = None,
        batch_size: int | None = None,
        timeout: float = 0.0,
        task_type: str | None = None,
        rollout_id: str | None = None,
        consumer: str | None = None,
        lease_seconds: float | None = None,
        policy_version: int | None = None,
        max_staleness: int | None = None,
    ) -> "Lease":
        """Takes groups on a lease, and streams them.

        Args:
            max_groups: at most.
            batch_size: items; exactly that many (rounded down to whole groups), or nothing.
            timeout: seconds to wait for something.
            task_type: of this task only.
            rollout_id: of this rollout only.
            consumer: a name for this reader, by which `release` gives back what it had not acked.
            lease_seconds: until the groups go back by themselves, if they are neither acked nor extended.
            policy_version: the reader's.
            max_staleness: how far behind it a group's oldest item may be; older groups are dropped.

        Returns:
            The lease; its `id` is None if there was nothing.
        """
        asked = {
            "max_groups": max_groups,
            "batch_size": batch_size,
            "timeout": timeout,
            "task_type": task_type,
            "rollout_id": rollout_id,
            "consumer": consumer,
            "lease_seconds": lease_seconds,
            "policy_version": policy_version,
            "max_staleness": max_staleness,
        }
        body = read_body(asked)
        headers = {"content-type": "application/json", "accept": STREAM_TYPES[self._encoding]}
        tries = self._connections.tries("POST", "/v1/read")
        while True:
            answer, _ = self._connections.open(
                "POST", "/v1/read", body, headers, stream_timeout=self._timeout + timeout, tries=tries
            )
            try:
                return Lease(self, answer, RecordReader(self._encoding))
            except AnswerLostError as error:  # before it said what it has: the same read once more
                time.sleep(tries.failed(str(error), error))

    def ack(self, lease_id: str) -> dict[str, Any]:
        """The lease's groups are this reader's; they leave the buffer. Again is no harm.

        Raises:
            BufferClientError: 409, they were handed to somebody else, or given back, before; 404.
        """
        return self._lease_call(lease_id, "ack")

    def nack(self, lease_id: str) -> dict[str, Any]:
        """The lease's groups go back, first in line."""
        return self._lease_call(lease_id, "nack")

    def extend(self, lease_id: str, seconds: float) -> dict[str, Any]:
        """The lease ends in `seconds` from now."""
        return self._lease_call(lease_id, "extend", {"seconds": seconds})

    def release(self, consumer: str) -> int:
        """Gives back all that a reader has not acked; returns how many groups. To be called after a crash."""
        answer = self._call("POST", f"/v1/consumers/{quote(consumer, safe='')}/release", b"")
        groups: int = orjson.loads(answer)["groups"]
        return groups

    def leases(self, consumer: str | None = None) -> list[dict[str, Any]]:
        """What is handed out and not acked."""
        query = "" if consumer is None else f"?consumer={quote(consumer, safe='')}"
        leases: list[dict[str, Any]] = orjson.loads(self._call("GET", f"/v1/leases{query}"))["leases"]
        return leases

    def dropped(self, *, limit: int = 1000, after: int = 0) -> list[dict[str, Any]]:
        """What left undelivered, oldest first: instance, uids, rewards, reason, `ticket`.

        Args:
            limit: entries at most, up to 10,000.
            after: the `ticket` of the last one seen; 0 begins with the oldest one that is remembered.
        """
        answer = self._call("GET", f"/v1/dropped?limit={limit}&after={after}")
        dropped: list[dict[str, Any]] = orjson.loads(answer)["dropped"]
        return dropped

    def quarantine(self) -> list[dict[str, Any]]:
        """Groups that a hook could not judge or finish, each with its `traceback`."""
        groups: list[dict[str, Any]] = orjson.loads(self._call("GET", "/v1/quarantine"))["quarantined"]
        return groups

    def retry_quarantined(self, groups: Sequence[int] | None = None) -> dict[str, Any]:
        """Lets quarantined groups be read again, after their hook was mended.

        Args:
            groups: their numbers; None: all of them.
        """
        return self._quarantine_call("retry", groups)

    def drop_quarantined(self, groups: Sequence[int] | None = None) -> dict[str, Any]:
        """Gives quarantined groups up: those of these numbers, or all."""
        return self._quarantine_call("drop", groups)

    def stats(self) -> dict[str, Any]:
        """Counts."""
        stats: dict[str, Any] = orjson.loads(self._call("GET", "/v1/stats"))
        return stats

    def start_rollout(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Starts a generator, or finds it running."""
        record: dict[str, Any] = orjson.loads(self._call("POST", "/v1/rollouts", orjson.dumps(dict(payload))))
        return record

    def stop_rollout(self, rollout_id: str) -> dict[str, Any]:
        """Ends a rollout's generator; what it wrote stays."""
        path = f"/v1/rollouts/{quote(rollout_id, safe='')}/stop"
        record: dict[str, Any] = orjson.loads(self._call("POST", path, b""))
        return record

    def drop_rollout(self, rollout_id: str) -> dict[str, Any]:
        """Drops what a rollout that has ended left unread.

        Raises:
            BufferClientError: 409, it runs; 404.
        """
        path = f"/v1/rollouts/{quote(rollout_id, safe='')}/drop"
        answer: dict[str, Any] = orjson.loads(self._call("POST", path, b""))
        return answer

    def close(self) -> None:
        """Closes the connections."""
        self._connections.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # -- HTTP

    def _lease_call(self, lease_id: str, verb: str, given: dict[str, Any] | None = None) -> dict[str, Any]:
        body = b"" if given is None else orjson.dumps(given)
        answer: dict[str, Any] = orjson.loads(
            self._call("POST", f"/v1/leases/{quote(lease_id, safe='')}/{verb}", body)
        )
        return answer

    def _quarantine_call(self, verb: str, groups: Sequence[int] | None) -> dict[str, Any]:
        body = orjson.dumps({} if groups is None else {"groups": list(groups)})
        answer: dict[str, Any] = orjson.loads(self._call("POST", f"/v1/quarantine/{verb}", body))
        return answer

    def _call(
        self, method: str, path: str, body: bytes | None = None, media_type: str = "application/json"
    ) -> bytes:
        # Read within the tries: every call here may be made again, if its answer is lost on the way.
        return self._connections.open(method, path, body, {"content-type": media_type})[1]


class Lease:
    """Groups that a read took, as they come in.

    Iterate over it, once; then `ack` it, at once or with the trainer's checkpoint (`client.ack(lease.id)`).
    Left by an exception in a `with` statement, it is given back. Left without a word, it stays until its time
    is over.

    Attributes:
        id: None: there was nothing.
        groups_promised: how many groups there are, if no hook fails.
        failures: why nothing may come: generators that do not get on.
        notices: why there may be nothing although nothing fails: lines to be read.
        meta_info: of the read; known when all groups came.
    """

    def __init__(self, client: BufferClient, answer: Answer, reader: RecordReader) -> None:
        self._client = client
        self._answer = answer
        self._records = self._read(reader)
        self._begun = self._done = False
        self._ahead: dict[str, Any] | None = None
        """A group that was received to see whether there is one, and not handed out."""
        try:
            head = next(self._records)["head"]
        except BaseException:
            answer.connection.close()
            raise
        self.id: str | None = head["lease"]
        self.groups_promised: int = head["groups"]
        self.failures: list[dict[str, Any]] = head["failures"]
        self.notices: list[str] = head.get("notices", [])  # of a server that has them
        self.meta_info: dict[str, Any] = {}
        if self.id is None:
            self._next()

    def __iter__(self) -> Iterator[ReadGroup]:
        """The groups.

        Raises:
            LeaseUseError: they were iterated over before.
        """
        if self._begun:
            raise LeaseUseError(TWICE)
        self._begun = True
        return self._groups()

    def ack(self, *, unread: bool = False) -> None:
        """The groups are this reader's.

        Args:
            unread: those that it has not iterated over, too: they leave the buffer, and nobody gets them.

        Raises:
            LeaseUseError: there are groups that it has not iterated over; they stay on the lease.
            BufferClientError: 409, the lease ended before and its groups were given to somebody else.
        """
        if unread:
            while self._next() is not None:
                self._ahead = None
        elif self._next() is not None:
            raise LeaseUseError(UNREAD)
        if self.id is not None:
            self._client.ack(self.id)

    def nack(self) -> None:
        """The groups go back."""
        if self.id is not None:
            self._client.nack(self.id)

    def extend(self, seconds: float) -> None:
        """The lease ends in `seconds` from now."""
        if self.id is not None:
            self._client.extend(self.id, seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        if kind is not None:
            self._answer.connection.close()
            # The first error is the one to be seen.
            with contextlib.suppress(BufferClientError, BufferUnavailableError):
                self.nack()
        elif not self._done:
            self._answer.connection.close()

    def _groups(self) -> Iterator[ReadGroup]:
        while (record := self._next()) is not None:
            self._ahead = None
            yield read_group(record)

    def _next(self) -> dict[str, Any] | None:
        """The next group's record, which stays the next one; None: there is none any more."""
        if self._ahead is None and not self._done:
            record = next(self._records, None)
            if record is None:  # a generator that broke is over
                raise self._broken()
            if "end" in record:
                self.meta_info = record["end"]["meta_info"]
                self._done = True
                for _ in self._records:  # gives the connection back
                    pass
            else:
                self._ahead = record
        return self._ahead

    def _read(self, reader: RecordReader) -> Iterator[dict[str, Any]]:
        ended = False
        while not ended:
            try:
                part = self._answer.response.read1(_PART)
            except (OSError, http.client.HTTPException) as error:
                raise self._broken() from error
            if not part:
                raise self._broken()
            for record in reader.feed(part):
                ended = ended or "end" in record
                yield record
        try:
            self._answer.response.read()
        except (OSError, http.client.HTTPException):
            self._answer.connection.close()
        else:
            self._client._connections.give_back(self._answer)

    def _broken(self) -> AnswerLostError:
        self._answer.connection.close()
        return AnswerLostError(BROKEN)
