"""slime's wire, both of its generations, answered as slime's own server answers.

Source: slime_plugins/rollout_buffer of THUDM/slime: `buffer.py` and its client `rollout_buffer_example.py` of
today, and their earlier form, which had `/buffer/read`, `/buffer/peek`, `/buffer/stats` and `batch_size`.

Differences on purpose: a write is answered when it is durable; the groups of a read go back when its client
goes away before it has them; bad input is a 4xx.
"""

import asyncio
from contextlib import aclosing
from typing import Annotated, Any, Final

import msgspec
from aiohttp import web
from msgspec import Meta

from rollstream.buffer.items import InstanceId, plain_item
from rollstream.buffer.reads import HookStoppedError
from rollstream.buffer.routes_native import JSON, MAX_PAYLOAD, MOST_GROUPS, cut_off, read_json
from rollstream.buffer.service import Service
from rollstream.buffer.store.base import Group, Taken, Wanted
from rollstream.web import HTTPError, Request, Route, json_response, render_json_error

CONSUMER: Final = "slime"
"""Whose leases these reads are, while they are being answered."""

_START_ERROR_S: Final = 1.0
"""An error of /start_rollout comes after so long: the stock client asks again at once and for ever."""

_PART: Final = 2**20
"""Bytes of an item that are sent at once."""

_PATHS: Final = ("/start_rollout", "/get_rollout_data")


class SlimeRead(msgspec.Struct, kw_only=True):
    """Other keys are passed over, as by slime."""

    batch_size: int | Annotated[str, Meta(pattern=r"^-?[0-9]{1,18}$")] | None = None
    """Items."""
    timeout: float | None = None
    wait: bool = True


class SlimeRoutes:
    """The routes of a service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._store = service.store

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/buffer/write", self.write, limited=True, summary="slime: writes one item"),
            Route("POST", "/start_rollout", self.start_rollout, summary="slime: starts a job"),
            Route(
                "POST",
                "/get_rollout_data",
                self.get_rollout_data,
                body=SlimeRead,
                summary="slime: takes groups",
            ),
            Route("POST", "/buffer/read", self.read, body=SlimeRead, summary="slime, earlier: takes groups"),
            Route("GET", "/buffer/peek", self.peek, summary="slime, earlier: items that are ready"),
            Route("GET", "/buffer/stats", self.stats, summary="slime, earlier: counts"),
            Route("GET", "/", self.root, summary="slime: a sign of life"),
        ]

    async def write(self, request: Request) -> web.StreamResponse:
        item = await self._service.parse_one(await request.body())
        await self._service.write((item,), hold=lambda: request.gone)
        head = b'{"success":true,"message":"Data has been successfully written to buffer","data":{"data":['
        tail = b'],"meta_info":"write to buffer"}}'
        if len(item.body) <= _PART:
            return web.Response(body=head + item.body + tail, content_type=JSON)
        response = web.StreamResponse(headers={"content-type": JSON})
        await response.prepare(request.raw)
        await response.write(head)
        for at in range(0, len(item.body), _PART):  # all at once would hold the loop
            await response.write(item.body[at : at + _PART])
        await response.write(tail)
        return response

    async def start_rollout(self, request: Request) -> web.Response:
        try:
            payload = await read_json(request, dict, MAX_PAYLOAD)
            record, warnings = await self._service.jobs.start(payload, request.shown_token)
        except Exception:
            await asyncio.sleep(_START_ERROR_S)
            raise
        # The words are slime's, also where nothing had to be started: `state` tells.
        answer: dict[str, Any] = {
            "message": "Rollout started",
            "rollout_id": record.id,
            "state": record.state,
        }
        return json_response(answer | ({"warnings": warnings} if warnings else {}))

    async def get_rollout_data(self, request: Request) -> web.StreamResponse:
        """All groups that are ready; --max-groups-per-read of them or none; as many as asked for or none."""
        asked = await read_json(request, SlimeRead)
        items = int(asked.batch_size or 0)
        most = self._service.options.max_groups_per_read
        if items > 0:
            groups = self._groups_of(items)
            return await self._answer(
                request, groups, exact=True, distinct=False,
                nothing="Not enough data. Requested {} items but only {} available.", asked=items,
            )  # fmt: skip
        return await self._answer(
            request,
            most,
            exact=most is not None,
            distinct=most is not None,
            nothing="No data available to read",
        )

    async def read(self, request: Request) -> web.StreamResponse:
        """Up to as much as asked for; waits for the first group."""
        asked = await read_json(request, SlimeRead)
        items = int(asked.batch_size or 0)
        seconds = min(max(asked.timeout or 0.0, 0.0), 3600.0) if asked.wait else 0.0
        groups = self._groups_of(items) if items > 0 else self._service.options.max_groups_per_read
        nothing = "Timeout waiting, no data available to read" if asked.wait else "Successfully read 0 items"
        return await self._answer(
            request,
            groups,
            exact=False,
            distinct=False,
            nothing=nothing,
            seconds=seconds,
            fine=not asked.wait,
        )

    async def peek(self, request: Request) -> web.Response:
        count = request.query.get("batch_size", "1")
        wanted = max(1, int(count)) if count.isascii() and count.isdigit() and len(count) < 6 else 1
        task, jobs = self._service.scope()
        groups = await self._store.look(Wanted(groups=min(wanted, 64), task=task, jobs=jobs))
        items: list[dict[str, Any]] = []
        for group in groups:
            stored = (await self._store.load([group.id]))[group.id]
            if len(items) < wanted and not isinstance(stored, str):
                items += [plain_item(one.body, one.encoding) for one in stored]
        return _reply(f"Successfully previewed {len(items[:wanted])} items", items[:wanted])

    async def stats(self, request: Request) -> web.Response:
        stats = await self._store.stats()
        counts = {
            "current_size": stats.items_ready,
            "max_size": self._service.options.limits.items,
            "total_written": stats.items_written,
            "total_read": stats.items_delivered,
        }
        return _reply("Buffer stats retrieved successfully", [counts])

    async def root(self, request: Request) -> web.Response:
        return json_response({"message": "Rollout Buffer Server is running"})

    def _groups_of(self, items: int) -> int:
        size = self._service.group_size(self._service.scope()[0])
        if items < size:
            raise HTTPError(400, f"{items} items are less than a group, which has {size}", where="batch_size")
        return items // size

    async def _answer(
        self,
        request: Request,
        most: int | None,
        *,
        exact: bool,
        distinct: bool,
        nothing: str,
        asked: int = 0,
        seconds: float = 0.0,
        fine: bool = False,
    ) -> web.StreamResponse:
        """Hands out groups. They leave when all but the last bytes are on their way, else they go back.

        Args:
            request: To be answered.
            most: Groups; None: all that are ready.
            exact: That many or none. For a group that its hooks spoil another is taken.
            distinct: No instance twice.
            nothing: The message where there is nothing.
            asked: Items that were asked for, for that message.
            seconds: To wait for the first group.
            fine: Whether having nothing is a success.
        """
        service, reads = self._service, self._service.reads
        leases: list[str] = []
        given: list[Group] = []
        had: set[InstanceId] = set()
        items = 0
        response = web.StreamResponse(headers={"content-type": JSON})

        def wanted() -> Wanted:
            task, jobs = service.scope()  # another job may have begun
            return Wanted(
                groups=MOST_GROUPS if most is None else most - len(given),
                exact=exact,
                distinct=distinct,
                without=frozenset(had),
                task=task,
                jobs=jobs,
                size=service.group_size(task) if asked else None,
                consumer=CONSUMER,
                seconds=service.options.lease_seconds,
            )

        def gone() -> bool:
            return request.gone or service.closing

        taken = await reads.take(
            wanted, seconds, gone=gone, blocked=lambda: service.is_blocked(*service.scope())
        )
        try:
            while taken.lease is not None:
                leases.append(taken.lease.id)
                async with aclosing(reads.parts(taken, "json")) as parts:
                    async for part in parts:
                        if not response.prepared:
                            await response.prepare(request.raw)
                            await response.write(b'{"data":{"data":[')
                        rows = b",".join(ready.items[1:-1] for ready in part)
                        await response.write(b"," + rows if given else rows)
                        given += [ready.group for ready in part]
                        items += sum(ready.n for ready in part)
                if request.gone:
                    raise ConnectionResetError
                if (most is None and len(taken.groups) < MOST_GROUPS) or len(given) == most:
                    break
                had |= {group.instance_id for group in given}
                taken = await reads.take(wanted)
            whole = len(given) == most if exact else bool(given)
            task, jobs = service.scope()
            if not given:
                return await self._nothing(
                    nothing.format(asked, taken.available * service.group_size(task)), taken, fine
                )
            meta, told = await reads.meta_info(given, (task, jobs))
            if last := self._store.last_job:
                stats = await self._store.stats()
                meta["progress"] = {"job": last.id, "written": stats.items_of_job, "expected": last.expected}
                meta["open_groups"] = stats.groups["open"]
            message = (
                f"Successfully read {items} items" if whole else "some groups were spoiled by their hooks"
            )
            end = msgspec.json.encode({"meta_info": meta})[1:] + b',"success":%b,"message":%b' % (
                msgspec.json.encode(whole),
                msgspec.json.encode(message),
            )
            await response.write(b"]," + end)
            if whole:
                await self._store.ack(leases, told=told)
                leases.clear()
                service.note_read(given, CONSUMER)
            await response.write(b"}")
            await response.write_eof()
            return response
        except HookStoppedError as error:
            if response.prepared:
                raise cut_off(request) from error
            return await self._nothing(nothing.format(asked, 0), taken, False)
        finally:
            for lease in leases:
                await asyncio.shield(self._store.nack(lease))

    async def _nothing(self, message: str, taken: Taken, success: bool) -> web.Response:
        service = self._service
        task, jobs = service.scope()
        causes = [one["message"] for one in await service.failures(task, jobs)]
        causes += await service.notices(taken, task, jobs)
        most = service.options.max_groups_per_read
        if most is not None and 0 < taken.available < most and service.is_job_over():
            causes.append(
                f"the last {taken.available} groups are less than --max-groups-per-read {most}: POST /v1/read "
                'takes them, or {"batch_size": …} here'
            )
        return _reply(f"{message} ({'; '.join(causes)})" if causes else message, [], success=success)


def _reply(message: str, items: list[Any], *, success: bool = True) -> web.Response:
    data = {"data": items, "meta_info": {}}
    return json_response({"success": success, "message": message, "data": data})


def render_slime_error(request: web.BaseRequest, error: HTTPError) -> web.Response:
    """Errors in slime's shape on its routes, in ours on the others."""
    if not request.path.startswith("/buffer/") and request.path not in _PATHS:
        return render_json_error(request, error)
    detail = {"message": str(error), "code": error.code, "where": error.where}
    body = {"success": False, "message": str(error), "detail": str(error), "error": detail}
    return json_response(body, error.status, error.headers)
