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
import weakref
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar
from urllib.parse import quote, unquote, urlencode, urlsplit

import aiohttp
import msgspec
import orjson

from rollstream.buffer.items import (
    TOKENS,
    Encoding,
    InstanceId,
    ItemError,
    dump_item,
    dump_list,
    load_item,
    with_uid,
)
from rollstream.errors import RollstreamError, TransientError

_LOG = logging.getLogger(__name__)

_REQUEST_ITEMS = 1000
_REQUEST_BYTES = 16 * 2**20  # a quarter of what servers take by default
_REQUEST_UIDS = 10_000  # what servers take
_SILENCE_S = 120.0  # a request that gets no byte for so long has failed
_WARN_EVERY_S = 30.0  # a hundred writers that wait for one buffer say it once
_NACK_S = 5.0  # for the nack of a lease left by an exception, which should be seen soon
_JOIN_S = 2.0  # for the thread of a sync client; it is a daemon and may be left behind
_BROKEN = "the connection broke during a read: its groups go back to the buffer, so none of them may count"
_UNREAD = "groups of this lease were not read: iterate over all of them, or insist with ack(unread=True)"
_NETWORK_ERRORS = (aiohttp.ClientError, ConnectionError, TimeoutError, asyncio.IncompleteReadError)

Items = Mapping[str, Any] | bytes | Sequence[Mapping[str, Any] | bytes]
Record = dict[str, Any]
T = TypeVar("T")
P = ParamSpec("P")


class BufferClientError(RollstreamError):
    """The buffer refused a request; trying again would not help. `where`: the field of an item."""

    def __init__(self, status: int, code: str, where: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.where = status, code, where

    def shifted(self, start: int) -> "BufferClientError":
        """The same, with the items of a request counted from `start`."""
        where, text = (
            re.sub(r"^items\[(\d+)", lambda at: f"items[{start + int(at[1])}", one)
            for one in (self.where, str(self))
        )
        return BufferClientError(self.status, self.code, where, text)


class BufferUnavailableError(TransientError):
    """The buffer was away, or had no room, for as long as the client tries; or a read broke."""


class LeaseUseError(RollstreamError):
    """A lease was acked with groups unread, iterated over twice, or has no id because nothing was read."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential, with jitter over the upper half; in seconds."""

    first: float = 0.2
    longest: float = 10.0
    give_up_after: float | None = 300.0
    """Since a request's first failure; None: never."""

    def pause(self, failures: int) -> float:
        return min(self.longest, self.first * 2.0 ** min(failures - 1, 30)) * random.uniform(0.5, 1.0)


_BACKOFF = Backoff()


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
    """

    def __init__(self, url: str, *, token: str | None = None, backoff: Backoff = _BACKOFF) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError(f"no buffer's address, want http://HOST:PORT: {parts.scheme}://{parts.hostname}")
        token = token or unquote(parts.password or "") or os.environ.get("ROLLSTREAM_BUFFER_TOKEN")
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}"
        self._backoff = backoff
        self._warned_at = -math.inf
        self._session: aiohttp.ClientSession | None = None

    async def write(self, items: Items) -> Written:
        """Writes items, or one: mappings, or bytes of JSON. They are durable when it returns.

        A large write is several requests; each is stored whole or not at all. An item without uid gets one
        before the first try, so that it is stored once.

        Raises:
            ItemError: An item has no form on the wire. Earlier requests are stored.
            BufferClientError: An item was refused. Earlier requests are stored.
        """
        results: list[bool] = []
        for body, encoding in _requests(items):
            try:
                answer = await self._call("/v1/items", body, f"application/{encoding}")
            except BufferClientError as error:
                raise error.shifted(len(results)) from None
            results += [one == "stored" for one in answer["results"]]
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
        consumer: str | None = None,
        lease_seconds: float | None = None,
        policy_version: int | None = None,
        max_staleness: int | None = None,
        drop_stale: bool | None = None,
    ) -> "AsyncLease":
        """Takes groups on a lease and streams them; the lease's `id` is None if there was nothing.

        At most `max_groups`; or exactly `batch_size` items, rounded down to whole groups, or nothing. Waits
        up to `timeout` seconds for them. `release(consumer)` gives back what that reader has not acked.
        Groups with an item older than `policy_version - max_staleness` are left to other readers, or dropped
        (`drop_stale`).
        """
        asked = {name: value for name, value in locals().items() if name != "self" and value is not None}
        asked["read_id"] = uuid.uuid4().hex  # sent again, it gives back what an answer that was lost took
        lease = await self._tried("/v1/read", orjson.dumps(asked), self._begin, silence=_SILENCE_S + timeout)
        if lease.id is None:
            await lease._peek()  # the end, with `meta_info`
        return lease

    async def ack(self, lease_id: str | None) -> Record:
        """The lease's groups are this reader's and leave the buffer. Again does no harm.

        A lease that ended before, so that its groups went back, is a `BufferClientError` with status 409.
        """
        return await self._lease(lease_id, "ack")

    async def nack(self, lease_id: str | None) -> Record:
        """The lease's groups go back, first in line."""
        return await self._lease(lease_id, "nack")

    async def extend(self, lease_id: str | None, seconds: float) -> Record:
        """The lease ends in `seconds` from now."""
        return await self._lease(lease_id, "extend", seconds=seconds)

    async def leases(self, consumer: str | None = None) -> list[Record]:
        return await self._list("leases", consumer=consumer)

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
        return await self._list("jobs")

    async def dropped(self, limit: int = 1000, after: int = 0) -> list[Record]:
        """Groups that left undelivered, oldest first, from the one behind `after`."""
        return await self._list("dropped", limit=limit, after=after)

    async def groups(
        self,
        *,
        state: str | None = None,
        task_type: str | None = None,
        job: str | None = None,
        limit: int = 1000,
        after: int = 0,
    ) -> list[Record]:
        """Groups without their items, from the one behind `after`; those that have left, too."""
        return await self._list("groups", state=state, task_type=task_type, job=job, limit=limit, after=after)

    async def group(self, id: int) -> Record:
        group = await self._call(f"/v1/groups/{id}")
        return {**group, "items": [_with_arrays(item) for item in group["items"]]}

    async def quarantine(self, limit: int = 1000, after: int = 0) -> list[Record]:
        """Groups that a hook could not judge or finish, each with its `traceback`."""
        return await self._list("quarantine", limit=limit, after=after)

    async def retry_quarantined(self, groups: Sequence[int] | None = None) -> Record:
        """Lets quarantined groups be read again, after their hook was mended. None: all of them."""
        return await self._call("/v1/quarantine/retry", {"groups": groups})

    async def drop_quarantined(self, groups: Sequence[int] | None = None) -> Record:
        return await self._call("/v1/quarantine/drop", {"groups": groups})

    async def stats(self) -> Record:
        return await self._call("/v1/stats")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _lease(self, lease_id: str | None, verb: str, **payload: float) -> Record:
        if not lease_id:
            raise LeaseUseError(f"a read that found nothing has no lease, so there is nothing to {verb}")
        return await self._call(f"/v1/leases/{quote(lease_id, '')}/{verb}", payload)

    async def _list(self, name: str, **query: object) -> list[Record]:
        given = urlencode({key: value for key, value in query.items() if value is not None})
        listed: list[Record]
        (listed,) = (await self._call(f"/v1/{name}?{given}")).values()
        return listed

    async def _call(self, path: str, payload: object = None, media_type: str = "application/json") -> Record:
        body = payload if payload is None or isinstance(payload, bytes) else orjson.dumps(payload)
        return await self._tried(path, body, _answer, media_type)

    async def _begin(self, response: aiohttp.ClientResponse) -> "AsyncLease":
        if response.content_type != "application/msgpack":
            raise BufferClientError(response.status, "", "", f"want groups, got {await _answer(response)}")
        return AsyncLease(self, response, (await _next_frame(response))["head"])

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
        give_up_after = math.inf if self._backoff.give_up_after is None else self._backoff.give_up_after
        failures, since = 0, 0.0
        while True:
            response: aiohttp.ClientResponse | None = None
            try:
                data = io.BytesIO(body) if body and len(body) > 2**20 else body  # in pieces
                response = await send(method, url, data=data, allow_redirects=False)
                return await finish(response)
            except BaseException as error:
                if response is not None:
                    response.close()
                status = error.status if isinstance(error, BufferClientError) else 0
                if not (isinstance(error, _NETWORK_ERRORS) or status == 429 or status >= 500):
                    raise
                now = time.monotonic()
                since = since if failures else now
                left = since + give_up_after - now
                text = f"{method} {url}: {type(error).__name__}: {error}"
                if left <= 0:
                    raise BufferUnavailableError(f"{text}; gave up after {now - since:.0f} s") from error
            failures += 1
            if failures == 1 and now - self._warned_at >= _WARN_EVERY_S:
                self._warned_at = now
                end = time.strftime("%X", time.localtime(time.time() + min(left, 1e9)))
                _LOG.warning("%s; trying again until %s", text, end if left < math.inf else "it works")
            await asyncio.sleep(min(left, self._backoff.pause(failures)))


class AsyncLease(AbstractAsyncContextManager["AsyncLease"]):
    """Groups that a read took, as they come in. Iterate over it once, then `ack` it.

    Left by an exception in a `with` statement, it is given back. Left without an ack, it stays until its time
    is over, for `client.ack(lease.id)` with the trainer's checkpoint. `failures` and `notices` say why there
    may be nothing; `meta_info` is known after the last group.
    """

    def __init__(self, client: AsyncBufferClient, response: aiohttp.ClientResponse, head: Record) -> None:
        self.id: str | None = head["lease"]
        self.failures: list[Record] = head["failures"]
        self.notices: list[str] = head["notices"]
        self.meta_info: Record = {}
        self._client = client
        self._response = response
        self._iterated = self._ended = False
        self._ahead: ReadGroup | None = None

    async def __aiter__(self) -> AsyncIterator[ReadGroup]:
        if self._iterated:
            raise LeaseUseError("this lease was iterated over before: keep its groups, or read again")
        self._iterated = True
        while (group := await self._peek()) is not None:
            self._ahead = None
            yield group

    async def ack(self, *, unread: bool = False) -> None:
        """See `AsyncBufferClient.ack`. `unread`: also with groups that were not iterated over."""
        while await self._peek() is not None:
            if not unread:
                raise LeaseUseError(_UNREAD)
            self._ahead = None
        if self.id is not None:
            await self._client.ack(self.id)

    async def nack(self) -> None:
        if self.id is not None:
            await self._client.nack(self.id)

    async def extend(self, seconds: float) -> None:
        if self.id is not None:
            await self._client.extend(self.id, seconds)

    async def __aexit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if not self._ended:
            self._response.close()
        if kind is not None:
            # The first error is the one to be seen. Without a nack, the lease's time gives the groups back.
            with suppress(BufferClientError, BufferUnavailableError, TimeoutError):
                async with asyncio.timeout(_NACK_S):
                    await self.nack()

    async def _peek(self) -> ReadGroup | None:
        """The next group, which stays the next one; None after the last."""
        if self._ahead is None and not self._ended:
            try:
                frame = await _next_frame(self._response)
            except BaseException as error:
                self._response.close()  # when cancelled, too: a part of the frame may be gone
                if isinstance(error, _NETWORK_ERRORS):
                    raise BufferUnavailableError(_BROKEN) from error
                raise
            if "end" in frame:
                self._ended, self.meta_info = True, frame["end"]["meta_info"]
                with suppress(*_NETWORK_ERRORS):
                    await self._response.read()  # to its end, or the server takes it for broken
            else:
                self._ahead = _read_group(**frame["group"])
        return self._ahead


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
    nack = _sync(AsyncLease.nack)
    extend = _sync(AsyncLease.extend)

    def __init__(self, client: "BufferClient", lease: AsyncLease) -> None:
        self.id, self.failures, self.notices = lease.id, lease.failures, lease.notices
        self._run = client._run
        self._inner = lease

    @property
    def meta_info(self) -> Record:
        return self._inner.meta_info

    def __iter__(self) -> Iterator[ReadGroup]:
        groups = aiter(self._inner)

        async def take() -> ReadGroup | None:
            return await anext(groups, None)

        while (group := self._run(take())) is not None:
            yield group

    def __exit__(self, *exc_info: Any) -> None:
        self._run(self._inner.__aexit__(*exc_info))


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
    dropped = _sync(AsyncBufferClient.dropped)
    groups = _sync(AsyncBufferClient.groups)
    group = _sync(AsyncBufferClient.group)
    quarantine = _sync(AsyncBufferClient.quarantine)
    retry_quarantined = _sync(AsyncBufferClient.retry_quarantined)
    drop_quarantined = _sync(AsyncBufferClient.drop_quarantined)
    stats = _sync(AsyncBufferClient.stats)

    def __init__(self, url: str, *, token: str | None = None, backoff: Backoff = _BACKOFF) -> None:
        self._inner = AsyncBufferClient(url, token=token, backoff=backoff)
        self._lock = threading.Lock()
        started: Future[tuple[asyncio.AbstractEventLoop, Callable[[], None]]] = Future()
        main = functools.partial(_serve, self._inner, started)
        self._thread = threading.Thread(target=lambda: asyncio.run(main()), name="buffer-client", daemon=True)
        self._thread.start()
        self._loop, stop = started.result()
        self._stop = weakref.finalize(self, self._loop.call_soon_threadsafe, stop)
        self._stop.atexit = False  # at exit the thread just ends

    def close(self) -> None:
        with self._lock:  # calls that were submitted are cancelled, and none comes after them
            self._stop()
        self._thread.join(_JOIN_S)

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future: Future[T] = Future()
        tasks: list[asyncio.Task[None]] = []

        async def call() -> None:
            try:
                future.set_result(await coroutine)
            except BaseException as error:
                future.set_exception(error)

        try:
            with self._lock:
                if not self._stop.alive or not self._thread.is_alive():
                    coroutine.close()
                    raise RuntimeError("this client was closed, or made before a fork: make a new one")
                self._loop.call_soon_threadsafe(lambda: tasks.append(asyncio.ensure_future(call())))
            return future.result()
        except asyncio.CancelledError:
            raise RuntimeError("this client was closed during the call") from None
        finally:
            if not future.done():  # Ctrl-C, at whatever line
                with suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])


async def _serve(client: AsyncBufferClient, started: Future[Any]) -> None:
    closed = asyncio.Event()
    started.set_result((asyncio.get_running_loop(), closed.set))
    await closed.wait()
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await client.close()


def _requests(items: Items) -> Iterator[tuple[bytes, Encoding]]:
    """The bodies of a write. JSON texts among the items make all of it JSON."""
    several: list[Any] = [items] if isinstance(items, Mapping | bytes) else list(items)
    if not all(isinstance(item, Mapping | bytes) for item in several):
        raise TypeError("want items, or one: mappings, or bytes of JSON")
    encoding: Encoding = "json" if any(isinstance(item, bytes) for item in several) else "msgpack"
    bodies: list[bytes] = []
    size = 0
    for index, item in enumerate(several):
        try:
            body = _item_body(item, encoding)
        except ItemError as error:
            raise ItemError(error.message, f"items[{index}].{error.where}".rstrip(".")) from None
        if len(bodies) == _REQUEST_ITEMS or (bodies and size + len(body) > _REQUEST_BYTES):
            yield _batch(bodies, encoding), encoding
            bodies, size = [], 0
        bodies.append(body)
        size += len(body)
    if bodies:
        yield _batch(bodies, encoding), encoding


def _batch(bodies: list[bytes], encoding: Encoding) -> bytes:
    listed = dump_list(bodies, encoding)
    return b'{"items":%b}' % listed if encoding == "json" else b"\x81\xa5items" + listed


def _item_body(item: Mapping[str, Any] | bytes, encoding: Encoding) -> bytes:
    """The item with a uid, so that it is stored once however often it is sent."""
    uid = uuid.uuid4().hex
    if not isinstance(item, bytes):
        return dump_item(item if item.get("uid") is not None else {**item, "uid": uid}, encoding)
    try:
        top = msgspec.json.decode(item, type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError as error:
        raise ItemError(f"not valid json: {error}") from None
    return item if "uid" in top else with_uid(item, uid, "json")


async def _answer(response: aiohttp.ClientResponse) -> Record:
    text = await response.read()
    with suppress(msgspec.MsgspecError, LookupError, TypeError):
        answer = msgspec.json.decode(text, type=Record)
        if response.status < 300:
            return answer
        error = answer["error"]
        raise BufferClientError(response.status, error["code"], error.get("where") or "", error["message"])
    said = f"HTTP {response.status}, not as a buffer answers: {text[:200].decode(errors='replace')}"
    raise BufferClientError(response.status, "", "", said)


async def _next_frame(response: aiohttp.ClientResponse) -> Record:
    size = int.from_bytes(await response.content.readexactly(4), "big")
    return msgspec.msgpack.decode(await response.content.readexactly(size), type=Record)


def _read_group(group: int, items: bytes, encoding: Encoding, **rest: Any) -> ReadGroup:
    decode = msgspec.json.decode if encoding == "json" else msgspec.msgpack.decode
    bodies = [bytes(body) for body in decode(items, type=list[msgspec.Raw])]
    return ReadGroup(id=group, items=[_with_arrays(load_item(body, encoding)) for body in bodies], **rest)


def _with_arrays(item: Record) -> Record:
    for name, (code, _) in TOKENS.items():
        if isinstance(value := item.get(name), list):
            with suppress(TypeError, OverflowError):  # a hook may have put anything there
                item[name] = array(code, value)
    return item
