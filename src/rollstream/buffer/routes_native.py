"""The native API, below /v1."""

import asyncio
import time
from typing import Annotated, Any, Final

import msgspec
from aiohttp import web
from msgspec import Meta

from rollstream.buffer.items import MAX_ITEMS, MAX_TEXT, Encoding
from rollstream.buffer.reads import Form, Ready, Scope
from rollstream.buffer.service import Service
from rollstream.buffer.store.base import GroupState, JobRecord, Stats, Wanted, described, listed
from rollstream.web import Handler, HTTPError, Request, Route, json_response

MOST_GROUPS: Final = 1024
"""A lease has at most so many."""

JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"

MAX_ASKED: Final = 2**20
"""Bytes of a body that is no item: it is parsed in the event loop."""

MAX_PAYLOAD: Final = 16 * 2**20
"""Bytes of a job's payload: slime's trainer names every instance that it had in `skip_instance_ids`."""

_MAX_UIDS: Final = MAX_ITEMS * (MAX_TEXT + 4)

_Text = Annotated[str, Meta(min_length=1, max_length=MAX_TEXT)]
_Count = Annotated[int, Meta(ge=1)]
_Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Seconds = Annotated[float, Meta(gt=0, le=10_000_000)]


class _Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    pass


class WrittenItems(msgspec.Struct):
    stored: int
    known: int
    results: list[str]


class Uids(_Body):
    uids: Annotated[list[_Text], Meta(max_length=MAX_ITEMS)]


class ReadRequest(_Body):
    max_groups: _Count | None = None
    batch_size: _Count | None = None
    """Items: that many, in whole groups, or nothing."""
    timeout: Annotated[float, Meta(ge=0, le=3600)] = 0.0
    task_type: _Text | None = None
    job: _Text | None = None
    distinct: bool = False
    """No instance twice."""
    consumer: _Text | None = None
    read_id: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{8,64}$(?!\n)")] | None = None
    lease_seconds: _Seconds | None = None
    policy_version: _Number | None = None
    max_staleness: _Number | None = None
    drop_stale: bool = False


class Extend(_Body):
    seconds: _Seconds


class Expected(_Body):
    items: Annotated[int, Meta(ge=0, le=2**53)]


class GroupQuery(_Body):
    after: _Number = 0
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 1000
    state: GroupState | None = None
    task_type: str | None = None
    job: str | None = None


class StatsAnswer(msgspec.Struct, kw_only=True):
    store: Stats
    job: dict[str, Any] | None
    failures: list[dict[str, Any]]
    held_writes: int
    waiting_reads: int


class NativeRoutes:
    """The routes of a service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._store = service.store
        self._whole_group = asyncio.Lock()
        """Groups may be large: one at a time is in memory as objects, others as answers, which have a budget."""

    def routes(self) -> list[Route]:
        def get(path: str, handler: Handler, summary: str, **more: Any) -> Route:
            return Route("GET", path, handler, summary=summary, **more)

        def post(path: str, handler: Handler, summary: str, **more: Any) -> Route:
            return Route("POST", path, handler, summary=summary, **more)

        record, job = {"answer": JobRecord}, "/v1/jobs/{job}"
        return [
            post("/v1/items", self.write, "Writes items: all or none", answer=WrittenItems, limited=True),
            post("/v1/uids/known", self.known, "Which uids the buffer knows", body=Uids, limited=True),
            post("/v1/read", self.read, "Leases groups", body=ReadRequest),
            get("/v1/leases", self.leases, "What is handed out"),
            post("/v1/leases/{lease}/ack", self.ack, "The groups are the reader's"),
            post("/v1/leases/{lease}/nack", self.nack, "The groups go back"),
            post("/v1/leases/{lease}/extend", self.extend, "More time", body=Extend),
            post("/v1/consumers/{consumer}/release", self.release, "Gives back all leases of a reader"),
            post("/v1/jobs", self.start_job, "Starts a job, or goes on with it"),
            get("/v1/jobs", self.list_jobs, "Jobs without their payloads, oldest first"),
            get(job, self.one_job, "One job", **record),
            post(f"{job}/stop", self.stop_job, "Ends its generator", **record),
            post(f"{job}/drop", self.drop_job, "Drops what nobody has read of it"),
            post(
                f"{job}/expected", self.expected, "How many items it will write", body=Expected, limited=True
            ),
            get("/v1/groups", self.groups, "Groups, without their items", query=GroupQuery),
            get("/v1/groups/{group}", self.one_group, "A group with its items, as they were written"),
            post("/v1/quarantine/retry", self.retry, "Tries the hooks of quarantined groups again"),
            post("/v1/quarantine/drop", self.drop_quarantined, "Drops quarantined groups"),
            get("/v1/stats", self.stats, "Counts", answer=StatsAnswer),
        ]

    # -- writing

    async def write(self, request: Request) -> WrittenItems:
        encoding: Encoding = "msgpack" if request.media_type == MSGPACK else "json"
        items, replaced = await self._service.parse(await request.body(), encoding)
        request.count_surrogates(replaced)
        stored = await self._service.write(items)
        results = ["stored" if one else "known" for one in stored]
        return WrittenItems(sum(stored), len(stored) - sum(stored), results)

    async def known(self, request: Request) -> Any:
        asked = await request.json(Uids, _MAX_UIDS)
        return {"known": await self._store.known(asked.uids)}

    # -- reading

    async def read(self, request: Request) -> web.StreamResponse:
        asked = await request.json(ReadRequest, MAX_ASKED)
        if asked.read_id is not None:  # its answer was lost: what it took goes back, and is taken again
            await self._store.return_read(asked.read_id)
        service, reads = self._service, self._service.reads
        wanted = self._wanted(asked)
        scope = Scope(wanted.task, wanted.jobs)
        packed = MSGPACK in request.headers.get("accept", "")
        head: dict[str, Any] = {"lease": None, "groups": 0, "failures": [], "notices": []}
        ends = time.monotonic() + asked.timeout
        async with reads.answering(request, _FRAMES if packed else _DOCUMENT) as answer:
            while not answer.groups:
                taken = await reads.take(
                    lambda: wanted,
                    ends - time.monotonic(),
                    gone=lambda: request.gone or service.closing,
                    blocked=lambda: service.is_blocked(scope),
                )
                if taken.lease is None:
                    head["failures"] = await service.failures(scope)
                    head["notices"] = await service.notices(taken, scope)
                    await answer.begin(head)
                    break
                more = {"lease": taken.lease, "lease_seconds": wanted.seconds, "groups": len(taken.groups)}
                await answer.send(taken, head | more | {"notices": service.drop_notices()})
                if not answer.groups:  # its hooks left nothing of them: the next ones
                    await reads.give_back(answer.leases.pop())
            meta, _ = await reads.meta_info(answer.groups)
            end = {"groups": len(answer.groups), "items": answer.items, "meta_info": meta}
            response = await answer.end(end)
            answer.leases.clear()
        service.note_read(answer.groups, wanted.consumer)
        return response

    def _wanted(self, asked: ReadRequest) -> Wanted:
        options = self._service.options
        if asked.max_groups is not None and asked.batch_size is not None:
            text = "max_groups and batch_size say the same: give one of them"
            raise HTTPError(400, text, where="batch_size")
        if (asked.max_staleness is None) != (asked.policy_version is None):
            raise HTTPError(400, "policy_version and max_staleness belong together", where="max_staleness")
        groups, size = min(asked.max_groups or options.max_groups_per_read or MOST_GROUPS, MOST_GROUPS), None
        if asked.batch_size is not None:
            size = self._service.group_size(asked.task_type, asked.job)
            groups = groups_of(asked.batch_size, size)
        oldest = None
        if asked.policy_version is not None and asked.max_staleness is not None:
            oldest = asked.policy_version - asked.max_staleness
        return Wanted(
            groups=groups,
            exact=asked.batch_size is not None,
            task=asked.task_type,
            jobs=None if asked.job is None else (asked.job,),
            size=size,
            distinct=asked.distinct,
            min_version=oldest,
            drop_stale=asked.drop_stale,
            consumer=asked.consumer,
            read_id=asked.read_id,
            seconds=asked.lease_seconds or options.lease_seconds,
        )

    # -- leases

    async def leases(self, request: Request) -> Any:
        return {"leases": await self._store.leases()}

    async def ack(self, request: Request) -> Any:
        done = await self._store.ack([request.params["lease"]])
        return {"lease": request.params["lease"], **done._asdict()}

    async def nack(self, request: Request) -> Any:
        await self._store.nack(request.params["lease"])
        return {"lease": request.params["lease"], "returned": True}

    async def extend(self, request: Request) -> Any:
        seconds = (await request.json(Extend, MAX_ASKED)).seconds
        await self._store.extend(request.params["lease"], seconds)
        return {"lease": request.params["lease"], "lease_seconds": seconds}

    async def release(self, request: Request) -> Any:
        consumer = request.params["consumer"]
        return {"consumer": consumer, "groups": await self._store.release(consumer)}

    # -- jobs

    async def start_job(self, request: Request) -> Any:
        payload = await request.json(dict, MAX_PAYLOAD)
        record, warnings = await self._service.jobs.start(payload, request.shown_token)
        return {**msgspec.to_builtins(record), "warnings": warnings}

    async def list_jobs(self, request: Request) -> Any:
        return {"jobs": list(map(listed, await self._store.jobs()))}

    async def one_job(self, request: Request) -> JobRecord:
        for record in await self._store.jobs():
            if record.id == request.params["job"]:
                return record
        raise HTTPError(404, f"there is no job {request.params['job']!r:.100}", "not_found")

    async def stop_job(self, request: Request) -> JobRecord:
        record: JobRecord = await self._service.jobs.stop(request.params["job"])
        return record

    async def drop_job(self, request: Request) -> Any:
        job = request.params["job"]
        if not await self._store.has_groups(job):  # a record may be gone, and its groups still here
            await self.one_job(request)
        if any(one.id == job and one.state == "running" for one in await self._store.jobs()):
            raise HTTPError(409, f"job {job} runs: POST /v1/jobs/{job}/stop first", "running")
        return {"job": job, "groups": await self._store.drop_job(job, "replaced")}

    async def expected(self, request: Request) -> Any:
        job = (await self.one_job(request)).id
        if request.token_of not in (None, job):
            raise HTTPError(403, "this token is another job's", "forbidden")
        items = (await request.json(Expected, MAX_ASKED)).items
        await self._store.expect(job, items)
        return {"job": job, "expected": items}

    # -- inspecting

    async def groups(self, request: Request) -> Any:
        asked = request.arguments(GroupQuery)
        found = await self._store.groups(
            state=asked.state,
            task=asked.task_type,
            jobs=None if asked.job is None else (asked.job,),
            after=asked.after,
            limit=asked.limit,
        )
        return {"groups": list(map(described, found))}

    async def one_group(self, request: Request) -> Any:
        number = request.params["group"]
        whole = number.isascii() and number.isdigit() and len(number) < 19
        async with self._whole_group:
            found = await self._store.group_with_items(int(number)) if whole else None
            if found is None:
                raise HTTPError(404, f"there is no group {number!r:.50}", "not_found")
            return json_response(found)

    async def retry(self, request: Request) -> Any:
        await self._service.hooks.refresh(again=True)
        self._service.reads.try_again()
        return {"groups": await self._store.retry()}

    async def drop_quarantined(self, request: Request) -> Any:
        return {"groups": await self._store.drop_quarantined()}

    async def stats(self, request: Request) -> StatsAnswer:
        last = self._store.last_job
        return StatsAnswer(
            store=await self._store.stats(),
            job=listed(last) if last is not None else None,
            failures=await self._service.failures(Scope(None, None)),
            held_writes=self._service.held_writes,
            waiting_reads=self._service.reads.waiting,
        )


def groups_of(items: int, size: int) -> int:
    """Groups that so many items are. Raises `HTTPError`."""
    if items < size:
        raise HTTPError(400, f"{items} items are less than a group, which has {size}", where="batch_size")
    return items // size


def _head(ready: Ready) -> dict[str, Any]:
    """A group that is handed out, but for its items."""
    group = ready.group
    return {
        "id": group.id,
        "task_type": group.task,
        "job": group.job or None,
        "instance_id": group.instance_id,
        "timed_out": group.timed_out,
        "policy_version": group.version,
    }


def _in_document(ready: Ready) -> bytes:
    return b"".join((msgspec.json.encode(_head(ready))[:-1], b',"items":', ready.items, b"}"))


def _frame(document: dict[str, Any]) -> bytes:
    body = msgspec.msgpack.encode(document)
    return len(body).to_bytes(4, "big") + body


_DOCUMENT = Form(
    media_type=JSON,
    encoding="json",
    head=lambda head: b'{"head":' + msgspec.json.encode(head) + b',"groups":[',
    group=_in_document,
    between=b",",
    end=lambda end: b'],"end":' + msgspec.json.encode(end) + b"}",
)

_FRAMES = Form(
    media_type=MSGPACK,
    encoding=None,
    head=lambda head: _frame({"head": head}),
    group=lambda one: _frame({"group": {**_head(one), "encoding": one.encoding, "items": one.items}}),
    between=b"",
    end=lambda end: _frame({"end": end}),
)
"""Msgpack documents, each after its length (4 bytes, big-endian). Items are in the encoding they came in."""
