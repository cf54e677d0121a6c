"""The buffer's clients: `AsyncBufferClient`, and `BufferClient`, the same without `async` and `await`."""

import asyncio
import functools
import io
import logging
import math
import os
import random
import re
import threading
import time
import uuid
from array import array
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, cast
from urllib.parse import quote, unquote, urlencode, urlsplit

import aiohttp
import msgspec
import orjson

from rollstream.buffer.items import TOKENS, Encoding, InstanceId, ItemError, dump_item, load_item
from rollstream.errors import RollstreamError, TransientError
from rollstream.rollout.retry import RetryPolicy

_LOG = logging.getLogger(__name__)

_REQUEST_ITEMS = 1000
_REQUEST_BYTES = 16 * 2**20  # a quarter of what servers take by default
_REQUEST_UIDS = 10_000  # what servers take
_RETRY = RetryPolicy(max_attempts=1, delay=0.2, delay_max=5.0)  # tries are limited by time, not by number
_SILENCE_S = 120.0  # a request that gets no byte for so long has failed
_WARN_EVERY_S = 30.0  # a hundred writers that wait for one buffer say it once
_NACK_S = 5.0  # for the nack of a lease left by an exception, which should be seen soon
_JOIN_S = 2.0  # for the thread of a sync client; it is a daemon and may be left behind
_NETWORK_ERRORS = (aiohttp.ClientError, OSError, EOFError)

Items = Mapping[str, Any] | Sequence[Mapping[str, Any]]
Record = dict[str, Any]
T = TypeVar("T")
P = ParamSpec("P")


class BufferClientError(RollstreamError):
    """The buffer refused a request; trying again would not help. `where`: the field of an item."""

    def __init__(self, status: int, code: str, where: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.where = status, code, where


class BufferUnavailableError(TransientError):
    """The buffer was away, or had no room, for as long as the client tries."""


class Written(NamedTuple):
    """`results`: for each item, whether it was stored now; else it was known, and is not stored again."""

    stored: int
    known: int
    results: list[bool]


@dataclass(frozen=True, slots=True)
class ReadGroup:
    """As the hooks left it. `policy_version` is its oldest item's; tokens are `array.array`s."""

    id: int
    task_type: str
    job: str | None
    instance_id: InstanceId
    timed_out: bool
    policy_version: int | None
    items: list[Record]


class AsyncBufferClient(AbstractAsyncContextManager["AsyncBufferClient"]):
    """Writes and reads, and tries again while the buffer is away or has no room.

    `token`: None takes the password in the URL, or else the environment's ROLLSTREAM_BUFFER_TOKEN.
    `give_up_after`: seconds since a request's first failure; `math.inf` for never.
    """

    def __init__(self, url: str, *, token: str | None = None, give_up_after: float = 300.0) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError(f"no buffer's address, want http://HOST:PORT: {parts.scheme}://{parts.hostname}")
        token = token or unquote(parts.password or "") or os.environ.get("ROLLSTREAM_BUFFER_TOKEN")
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}"
        self._give_up_after = give_up_after
        self._warned_at = -math.inf
        self._session: aiohttp.ClientSession | None = None

    async def write(self, items: Items) -> Written:
        """Writes items, or one. They are durable when it returns.

        A large write is several requests; each is stored whole or not at all. An item without uid gets one
        before the first try, so that it is stored once.

        Raises:
            ItemError: An item has no form on the wire. Earlier requests are stored.
            BufferClientError: An item was refused. Earlier requests are stored.
        """
        results: list[bool] = []
        for body in _requests(items):
            try:
                answer = await self._tried("/v1/items", body, _answer, media_type="application/msgpack")
            except BufferClientError as error:
                raise _shifted(error, len(results)) from None
            results += [result == "stored" for result in answer["results"]]
        return Written(results.count(True), results.count(False), results)

    async def known(self, uids: Sequence[str]) -> list[bool]:
        """Which uids the buffer has, or had: those need not be generated again."""
        known: list[bool] = []
        for start in range(0, len(uids), _REQUEST_UIDS):
            part = list(uids[start : start + _REQUEST_UIDS])
            known += (await self._call("/v1/uids/known", {"uids": part}))["known"]
        return known

    async def read(
        self,
        *,
        max_groups: int | None = None,
        batch_size: int | None = None,
        timeout: float = 0.0,
        task_type: str | None = None,
        job: str | None = None,
        distinct: bool | None = None,
        consumer: str | None = None,
        lease_seconds: float | None = None,
        policy_version: int | None = None,
        max_staleness: int | None = None,
        drop_stale: bool | None = None,
    ) -> "AsyncLease":
        """Takes groups on a lease; its `id` is None if there was nothing.

        At most `max_groups`; or exactly `batch_size` items, rounded down to whole groups, or nothing. Waits
        up to `timeout` seconds for them. `distinct`: no instance twice. Groups with an item older than
        `policy_version - max_staleness` are left to other readers, or dropped (`drop_stale`).
        `release(consumer)` gives back what that reader has not acked.
        """
        asked = {name: value for name, value in locals().items() if name != "self" and value is not None}
        asked["read_id"] = uuid.uuid4().hex  # sent again, it gives back what an answer that was lost took
        return await self._tried("/v1/read", orjson.dumps(asked), self._take, silence=_SILENCE_S + timeout)

    async def ack(self, lease_id: str | None) -> Record:
        """The lease's groups are this reader's and leave the buffer. Again does no harm.

        A lease that ended before, so that its groups went back, is a `BufferClientError` with status 409.
        """
        return await self._lease(lease_id, "ack")

    async def nack(self, lease_id: str | None) -> Record:
        """The lease's groups go back to their places in line."""
        return await self._lease(lease_id, "nack")

    async def extend(self, lease_id: str | None, seconds: float) -> Record:
        """The lease ends in `seconds` from now."""
        return await self._lease(lease_id, "extend", seconds=seconds)

    async def leases(self) -> list[Record]:
        return await self._list("leases")

    async def release(self, consumer: str) -> int:
        """Gives back what this reader has not acked, such as after a crash; returns how many groups."""
        return int((await self._call(f"/v1/consumers/{quote(consumer, '')}/release", {}))["groups"])

    async def start_job(self, payload: Mapping[str, Any]) -> Record:
        """Starts a generator, or finds it running; returns the job's record, with `warnings`."""
        return await self._call("/v1/jobs", dict(payload))

    async def stop_job(self, id: str) -> Record:
        """Ends a job's generator; what it wrote stays."""
        return await self._call(f"/v1/jobs/{quote(id, '')}/stop", {})

    async def expect_items(self, id: str, items: int) -> None:
        """Says how many items a job will write, for the progress that the buffer shows."""
        await self._call(f"/v1/jobs/{quote(id, '')}/expected", {"items": items})

    async def drop_job(self, id: str) -> int:
        """Drops what a job that has ended left unread; returns how many groups."""
        return int((await self._call(f"/v1/jobs/{quote(id, '')}/drop", {}))["groups"])

    async def jobs(self) -> list[Record]:
        """Jobs without their payloads, oldest first."""
        return await self._list("jobs")

    async def groups(self, /, *, limit: int = 1000, after: int = 0, **which: str | None) -> list[Record]:
        """Groups without their items, from the one behind `after`; those that have left, too.

        `which`: only those of a `state`, a `task_type`, a `job`. A quarantined group has a `traceback`.
        """
        return await self._list("groups", limit=limit, after=after, **which)

    async def group(self, id: int) -> Record:
        return await self._call(f"/v1/groups/{id}")

    async def retry_quarantined(self) -> int:
        """Lets quarantined groups be read again, after their hook was mended; returns how many."""
        return int((await self._call("/v1/quarantine/retry", {}))["groups"])

    async def drop_quarantined(self) -> int:
        """Drops quarantined groups; returns how many."""
        return int((await self._call("/v1/quarantine/drop", {}))["groups"])

    async def stats(self) -> Record:
        return await self._call("/v1/stats")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _lease(self, lease_id: str | None, verb: str, **payload: float) -> Record:
        if not lease_id:
            raise ValueError(f"a read that found nothing has no lease, so there is nothing to {verb}")
        return await self._call(f"/v1/leases/{quote(lease_id, '')}/{verb}", payload)

    async def _list(self, name: str, **query: object) -> list[Record]:
        which = urlencode({key: value for key, value in query.items() if value is not None})
        records: list[Record]
        (records,) = (await self._call(f"/v1/{name}?{which}")).values()
        return records

    async def _call(self, path: str, payload: object = None) -> Record:
        return await self._tried(path, None if payload is None else orjson.dumps(payload), _answer)

    async def _take(self, response: aiohttp.ClientResponse) -> "AsyncLease":
        if response.content_type != "application/msgpack":
            raise BufferClientError(response.status, "", "", f"want groups, got {await _answer(response)}")
        head = (await _next_frame(response))["head"]
        groups = []
        while "end" not in (frame := await _next_frame(response)):
            groups.append(_read_group(**frame["group"]))
        await response.read()  # to its end, or the server takes it for broken, and the groups go back
        meta_info = frame["end"]["meta_info"]
        return AsyncLease(self, head["lease"], groups, head["failures"], head["notices"], meta_info)

    async def _tried(
        self,
        path: str,
        body: bytes | None,
        finish: Callable[[aiohttp.ClientResponse], Awaitable[T]],
        media_type: str = "application/json",
        silence: float = _SILENCE_S,
    ) -> T:
        """Sends a request, a GET if it has no body, until `finish` could read its answer."""
        if self._session is None:
            # As many connections as there are writers: writes that come together share a transaction.
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        method, url = "GET" if body is None else "POST", self._url + path
        accept = "application/msgpack" if path == "/v1/read" else "application/json"
        headers = {**self._headers, "accept": accept, "content-type": media_type}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=silence)
        send = functools.partial(self._session.request, headers=headers, timeout=timeout)
        failures, since = 0, 0.0
        while True:
            try:
                data = body and io.BytesIO(body)  # which is sent in pieces
                async with send(method, url, data=data, allow_redirects=False) as response:
                    return await finish(response)
            except (BufferClientError, *_NETWORK_ERRORS) as error:
                if isinstance(error, BufferClientError) and error.status != 429 and error.status < 500:
                    raise
                now = time.monotonic()
                failures, since = failures + 1, since if failures else now
                left = since + self._give_up_after - now
                text = f"{method} {url}: {type(error).__name__}: {error}"
                if left <= 0:
                    raise BufferUnavailableError(f"{text}; gave up after {now - since:.0f} s") from error
            if failures == 1 and now - self._warned_at >= _WARN_EVERY_S:
                self._warned_at = now
                _LOG.warning("%s; trying again for %g s", text, left)
            await asyncio.sleep(min(left, _RETRY.wait(failures, random.Random())))


@dataclass(frozen=True, slots=True)
class AsyncLease(AbstractAsyncContextManager["AsyncLease"]):
    """Groups that a read took. They are the reader's with its `ack`.

    Left by an exception in a `with` statement, it is given back. Left without an ack, it stays until its time
    is over, for `client.ack(lease.id)` with the trainer's checkpoint.
    """

    _client: AsyncBufferClient
    id: str | None
    groups: list[ReadGroup]
    failures: list[Record]
    """Generators and hooks that fail, and why: they explain an empty read."""
    notices: list[str]
    meta_info: Record

    async def ack(self) -> None:
        """See `AsyncBufferClient.ack`. It does nothing if the read found nothing."""
        if self.id is not None:
            await self._client.ack(self.id)

    async def __aexit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if kind is not None and self.id is not None:
            # The first error is the one to be seen. Without a nack, the lease's time gives the groups back.
            with suppress(BufferClientError, BufferUnavailableError, TimeoutError):
                async with asyncio.timeout(_NACK_S):
                    await self._client.nack(self.id)


def _sync(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """An async method of `self._inner` as a plain one."""

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = self._run(method(self._inner, *args, **kwargs))
        return result

    return call


class Lease(AbstractContextManager["Lease"]):
    """See `AsyncLease`."""

    ack = _sync(AsyncLease.ack)
    __exit__ = _sync(AsyncLease.__aexit__)

    def __init__(self, client: "BufferClient", lease: AsyncLease) -> None:
        self._run, self._inner = client._run, lease
        self.id, self.groups, self.meta_info = lease.id, lease.groups, lease.meta_info
        self.failures, self.notices = lease.failures, lease.notices


def _leased(read: Callable[Concatenate[Any, P], AsyncLease]) -> Callable[Concatenate[Any, P], Lease]:
    @functools.wraps(read)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Lease:
        return Lease(self, read(self, *args, **kwargs))

    return call


class BufferClient(AbstractContextManager["BufferClient"]):
    """`AsyncBufferClient` in a thread of its own. Threads may share it; a forked process needs a new one."""

    write = _sync(AsyncBufferClient.write)
    known = _sync(AsyncBufferClient.known)
    read = _leased(_sync(AsyncBufferClient.read))
    ack = _sync(AsyncBufferClient.ack)
    nack = _sync(AsyncBufferClient.nack)
    extend = _sync(AsyncBufferClient.extend)
    leases = _sync(AsyncBufferClient.leases)
    release = _sync(AsyncBufferClient.release)
    start_job = _sync(AsyncBufferClient.start_job)
    stop_job = _sync(AsyncBufferClient.stop_job)
    expect_items = _sync(AsyncBufferClient.expect_items)
    drop_job = _sync(AsyncBufferClient.drop_job)
    jobs = _sync(AsyncBufferClient.jobs)
    groups = _sync(AsyncBufferClient.groups)
    group = _sync(AsyncBufferClient.group)
    retry_quarantined = _sync(AsyncBufferClient.retry_quarantined)
    drop_quarantined = _sync(AsyncBufferClient.drop_quarantined)
    stats = _sync(AsyncBufferClient.stats)

    def __init__(self, url: str, *, token: str | None = None, give_up_after: float = 300.0) -> None:
        self._inner = AsyncBufferClient(url, token=token, give_up_after=give_up_after)
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="buffer-client", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the calls of other threads, too."""
        with self._lock:  # no call may be submitted behind the stop: nobody would answer it
            if not self._closed:
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._closed = True
        self._thread.join(_JOIN_S)

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        interrupted, call = Future[None](), None

        async def answered() -> T:
            cancel = cast("asyncio.Task[T]", asyncio.current_task()).cancel
            interrupted.add_done_callback(lambda _: self._loop.call_soon_threadsafe(cancel))
            return await coroutine

        try:
            with self._lock:
                if self._closed or not self._thread.is_alive():
                    coroutine.close()
                    raise RuntimeError("this client was closed, or made before a fork: make a new one")
                call = asyncio.run_coroutine_threadsafe(answered(), self._loop)
            return call.result()
        except CancelledError:
            raise RuntimeError("this client was closed during the call") from None
        finally:
            if call is None or not call.done():  # Ctrl-C, perhaps before `call` was there
                interrupted.set_result(None)

    def _serve(self) -> None:
        async def end() -> None:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await self._inner.close()

        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()
            runner.run(end())


def _requests(items: Items) -> Iterator[bytes]:
    """The bodies of a write."""
    bodies: list[bytes] = []
    size = 0
    for index, item in enumerate([items] if isinstance(items, Mapping) else items):
        if not isinstance(item, Mapping):
            raise TypeError(f"want items, which are mappings, or one of them: got {type(item).__name__}")
        if item.get("uid") is None:  # every try sends the same one, so that the item is stored once
            item = {**item, "uid": uuid.uuid4().hex}
        try:
            body = dump_item(item, "msgpack")
        except ItemError as error:
            raise error.within(index) from None
        if len(bodies) == _REQUEST_ITEMS or (bodies and size + len(body) > _REQUEST_BYTES):
            yield _batch(bodies)
            bodies, size = [], 0
        bodies.append(body)
        size += len(body)
    if bodies:
        yield _batch(bodies)


def _batch(bodies: list[bytes]) -> bytes:
    return msgspec.msgpack.encode({"items": [msgspec.Raw(body) for body in bodies]})


def _shifted(error: BufferClientError, start: int) -> BufferClientError:
    """The same error, with the items of a request counted from `start`."""
    where = re.sub(r"\d+", lambda at: str(start + int(at[0])), error.where, count=1)
    text = str(error).replace(error.where, where, 1) if error.where else str(error)
    return BufferClientError(error.status, error.code, where, text)


async def _answer(response: aiohttp.ClientResponse) -> Record:
    text = await response.read()
    with suppress(msgspec.MsgspecError, LookupError, TypeError):
        answer = msgspec.json.decode(text, type=Record)
        if response.status < 300:
            return answer
        error = answer["error"]
        raise BufferClientError(response.status, error["code"], error.get("where") or "", error["message"])
    shown = text[:200].decode(errors="replace")
    raise BufferClientError(
        response.status, "", "", f"HTTP {response.status}, not as a buffer answers: {shown}"
    )


async def _next_frame(response: aiohttp.ClientResponse) -> Record:
    size = int.from_bytes(await response.content.readexactly(4), "big")
    return msgspec.msgpack.decode(await response.content.readexactly(size), type=Record)


def _read_group(items: bytes, encoding: Encoding, **rest: Any) -> ReadGroup:
    decode = msgspec.json.decode if encoding == "json" else msgspec.msgpack.decode
    loaded = [load_item(bytes(body), encoding) for body in decode(items, type=list[msgspec.Raw])]
    for item in loaded:
        for name, (code, _) in TOKENS.items():
            if isinstance(value := item.get(name), list):
                with suppress(TypeError, OverflowError):  # a hook may have put anything there
                    item[name] = array(code, value)
    return ReadGroup(items=loaded, **rest)
