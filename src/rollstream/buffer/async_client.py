"""The buffer's client for asyncio.

async with AsyncBufferClient("http://127.0.0.1:8889") as client:
    await client.write(items)
    async with await client.read(max_groups=8, timeout=60, consumer="trainer") as lease:
        async for group in lease:
            train(group.items)
        await lease.ack()
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Self
from urllib.parse import quote

import aiohttp
import orjson

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
    RetryNotice,
    Tries,
    Written,
    as_items,
    batches,
    encoding_of,
    read_body,
    read_group,
    read_written,
    refusal,
    retry_after,
)

__all__ = [
    "AsyncBufferClient",
    "AsyncLease",
    "Backoff",
    "BufferClientError",
    "BufferUnavailableError",
    "LeaseUseError",
    "Written",
]


class AsyncBufferClient:
    """Writes and reads; tries again when the buffer is away or has no room. See `BufferClient`.

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
        self._address = Address.parse(url, token)
        self._encoding: Encoding = encoding
        self._timeout = timeout
        self._backoff = backoff or Backoff()
        self._notice = RetryNotice(self._backoff)
        self._rng = random.Random()
        self._session: aiohttp.ClientSession | None = None

    async def write(self, items: Items) -> Written:
        """Writes items, or one; they are durable when it returns. See `BufferClient.write`."""
        listed = as_items(items)
        encoding = encoding_of(listed, self._encoding)
        total = Written(0, 0)
        for _, body in batches(listed, encoding):
            done = read_written(await self._call("POST", "/v1/items", body, MEDIA_TYPES[encoding]))
            total = Written(
                total.stored + done.stored, total.known + done.known, [*total.results, *done.results]
            )
        return total

    async def known(self, uids: Sequence[str]) -> list[bool]:
        """Which uids the buffer has, or had."""
        known: list[bool] = []
        for start in range(0, len(uids), 10_000):
            body = orjson.dumps({"uids": list(uids[start : start + 10_000])})
            known += orjson.loads(await self._call("POST", "/v1/uids/known", body))["known"]
        return known

    async def read(
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
    ) -> "AsyncLease":
        """Takes groups on a lease, and streams them. See `BufferClient.read`."""
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
        tries = self._tries("POST", "/v1/read")
        while True:
            response, _ = await self._open(
                "POST", "/v1/read", body, headers, stream_timeout=self._timeout + timeout, tries=tries
            )
            lease = AsyncLease(self, response, RecordReader(self._encoding))
            try:
                await lease.begin()
            except AnswerLostError as error:  # before it said what it has: the same read once more
                await asyncio.sleep(tries.failed(str(error), error))
            else:
                return lease

    async def ack(self, lease_id: str) -> dict[str, Any]:
        """The lease's groups are this reader's. See `BufferClient.ack`."""
        return await self._lease_call(lease_id, "ack")

    async def nack(self, lease_id: str) -> dict[str, Any]:
        """The lease's groups go back, first in line."""
        return await self._lease_call(lease_id, "nack")

    async def extend(self, lease_id: str, seconds: float) -> dict[str, Any]:
        """The lease ends in `seconds` from now."""
        return await self._lease_call(lease_id, "extend", {"seconds": seconds})

    async def release(self, consumer: str) -> int:
        """Gives back all that a reader has not acked; returns how many groups."""
        answer = await self._call("POST", f"/v1/consumers/{quote(consumer, safe='')}/release", b"")
        groups: int = orjson.loads(answer)["groups"]
        return groups

    async def leases(self, consumer: str | None = None) -> list[dict[str, Any]]:
        """What is handed out and not acked."""
        query = "" if consumer is None else f"?consumer={quote(consumer, safe='')}"
        leases: list[dict[str, Any]] = orjson.loads(await self._call("GET", f"/v1/leases{query}"))["leases"]
        return leases

    async def dropped(self, *, limit: int = 1000, after: int = 0) -> list[dict[str, Any]]:
        """What left undelivered, oldest first. See `BufferClient.dropped`."""
        answer = await self._call("GET", f"/v1/dropped?limit={limit}&after={after}")
        dropped: list[dict[str, Any]] = orjson.loads(answer)["dropped"]
        return dropped

    async def quarantine(self) -> list[dict[str, Any]]:
        """Groups that a hook could not judge or finish, each with its `traceback`."""
        answer = await self._call("GET", "/v1/quarantine")
        groups: list[dict[str, Any]] = orjson.loads(answer)["quarantined"]
        return groups

    async def retry_quarantined(self, groups: Sequence[int] | None = None) -> dict[str, Any]:
        """Lets quarantined groups be read again: those of these numbers, or all."""
        return await self._quarantine_call("retry", groups)

    async def drop_quarantined(self, groups: Sequence[int] | None = None) -> dict[str, Any]:
        """Gives quarantined groups up: those of these numbers, or all."""
        return await self._quarantine_call("drop", groups)

    async def stats(self) -> dict[str, Any]:
        """Counts."""
        stats: dict[str, Any] = orjson.loads(await self._call("GET", "/v1/stats"))
        return stats

    async def start_rollout(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Starts a generator, or finds it running."""
        answer = await self._call("POST", "/v1/rollouts", orjson.dumps(dict(payload)))
        record: dict[str, Any] = orjson.loads(answer)
        return record

    async def stop_rollout(self, rollout_id: str) -> dict[str, Any]:
        """Ends a rollout's generator; what it wrote stays."""
        answer = await self._call("POST", f"/v1/rollouts/{quote(rollout_id, safe='')}/stop", b"")
        record: dict[str, Any] = orjson.loads(answer)
        return record

    async def drop_rollout(self, rollout_id: str) -> dict[str, Any]:
        """Drops what a rollout that has ended left unread. See `BufferClient.drop_rollout`."""
        answer = await self._call("POST", f"/v1/rollouts/{quote(rollout_id, safe='')}/drop", b"")
        dropped: dict[str, Any] = orjson.loads(answer)
        return dropped

    async def close(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    # -- HTTP

    async def _lease_call(
        self, lease_id: str, verb: str, given: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        body = b"" if given is None else orjson.dumps(given)
        path = f"/v1/leases/{quote(lease_id, safe='')}/{verb}"
        answer: dict[str, Any] = orjson.loads(await self._call("POST", path, body))
        return answer

    async def _quarantine_call(self, verb: str, groups: Sequence[int] | None) -> dict[str, Any]:
        body = orjson.dumps({} if groups is None else {"groups": list(groups)})
        answer: dict[str, Any] = orjson.loads(await self._call("POST", f"/v1/quarantine/{verb}", body))
        return answer

    async def _call(
        self, method: str, path: str, body: bytes | None = None, media_type: str = "application/json"
    ) -> bytes:
        return (await self._open(method, path, body, {"content-type": media_type}))[1]

    async def _open(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: dict[str, str],
        *,
        stream_timeout: float | None = None,
        tries: Tries | None = None,
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        if self._session is None:
            # As many connections as there are writers: writes that come together are made durable together.
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=10.0, sock_read=stream_timeout or self._timeout
        )
        tries = tries or self._tries(method, path)
        while True:
            cause: Exception | None = None
            asked: float | None = None
            try:
                response = await self._session.request(
                    method,
                    self._address.url + path,
                    data=body,
                    headers={**self._address.headers, **headers},
                    timeout=timeout,
                )
                if response.status < 400 and stream_timeout is not None:
                    return response, b""
                text = await response.read()
            except (aiohttp.ClientError, TimeoutError) as error:
                cause, said = error, f"{type(error).__name__}: {error}"
            else:
                if response.status < 400:
                    return response, text
                asked = retry_after(response.headers.get("retry-after"))
                refused = refusal(response.status, text)
                if refused is not None:
                    raise refused
                said = f"HTTP {response.status}: {text[:200].decode(errors='replace')}"
            await asyncio.sleep(tries.failed(said, cause, asked))

    def _tries(self, method: str, path: str) -> Tries:
        return Tries(f"{method} {self._address.url}{path}", self._backoff, self._notice, self._rng)


class AsyncLease:
    """Groups that a read took, as they come in. See `client.Lease`.

    Attributes:
        id: None: there was nothing.
        groups_promised: how many groups there are, if no hook fails.
        failures: why nothing may come: generators that do not get on.
        notices: why there may be nothing although nothing fails: lines to be read.
        meta_info: of the read; known when all groups came.
    """

    def __init__(
        self, client: AsyncBufferClient, response: aiohttp.ClientResponse, reader: RecordReader
    ) -> None:
        self._client = client
        self._response = response
        self._records = self._read(reader)
        self._begun = self._done = False
        self._ahead: dict[str, Any] | None = None
        self.id: str | None = None
        self.groups_promised = 0
        self.failures: list[dict[str, Any]] = []
        self.notices: list[str] = []
        self.meta_info: dict[str, Any] = {}

    async def begin(self) -> None:
        """Reads the head; the client does it."""
        try:
            head = (await anext(self._records))["head"]
        except BaseException:
            self._response.close()
            raise
        self.id = head["lease"]
        self.groups_promised = head["groups"]
        self.failures = head["failures"]
        self.notices = head.get("notices", [])  # of a server that has them
        if self.id is None:
            await self._next()

    def __aiter__(self) -> AsyncIterator[ReadGroup]:
        """The groups. Raises `LeaseUseError` when they were iterated over before."""
        if self._begun:
            raise LeaseUseError(TWICE)
        self._begun = True
        return self._groups()

    async def ack(self, *, unread: bool = False) -> None:
        """The groups are this reader's. See `client.Lease.ack`."""
        if unread:
            while await self._next() is not None:
                self._ahead = None
        elif await self._next() is not None:
            raise LeaseUseError(UNREAD)
        if self.id is not None:
            await self._client.ack(self.id)

    async def nack(self) -> None:
        """The groups go back."""
        if self.id is not None:
            await self._client.nack(self.id)

    async def extend(self, seconds: float) -> None:
        """The lease ends in `seconds` from now."""
        if self.id is not None:
            await self._client.extend(self.id, seconds)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        if not self._done:
            self._response.close()
        if kind is not None:
            # The first error is the one to be seen.
            with contextlib.suppress(BufferClientError, BufferUnavailableError):
                await self.nack()

    async def _groups(self) -> AsyncIterator[ReadGroup]:
        while (record := await self._next()) is not None:
            self._ahead = None
            yield read_group(record)

    async def _next(self) -> dict[str, Any] | None:
        """The next group's record, which stays the next one; None: there is none any more."""
        if self._ahead is None and not self._done:
            record = await anext(self._records, None)
            if record is None:  # a generator that broke is over
                raise _broken()
            if "end" in record:
                self.meta_info = record["end"]["meta_info"]
                self._done = True
                async for _ in self._records:  # gives the connection back
                    pass
            else:
                self._ahead = record
        return self._ahead

    async def _read(self, reader: RecordReader) -> AsyncIterator[dict[str, Any]]:
        ended = False
        while not ended:
            try:
                part = await self._response.content.readany()
            except (aiohttp.ClientError, TimeoutError) as error:
                self._response.close()
                raise _broken() from error
            if not part:
                self._response.close()
                raise _broken()
            for record in reader.feed(part):
                ended = ended or "end" in record
                yield record
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            await self._response.read()


def _broken() -> AnswerLostError:
    return AnswerLostError(BROKEN)
