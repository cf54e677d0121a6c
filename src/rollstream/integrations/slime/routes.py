"""slime's wire, both of its generations, answered as slime's own server answers.

Source: slime_plugins/rollout_buffer of THUDM/slime: `buffer.py` and its client `rollout_buffer_example.py` of
today, and their earlier form, which had `/buffer/read`, `/buffer/peek`, `/buffer/stats` and `batch_size`.

Differences on purpose: a write is answered when it is durable; the groups of a read go back when its client
goes away before it has them; bad input is a 4xx.
"""

import asyncio
from typing import Annotated, Any, Final

import msgspec
from aiohttp import web
from msgspec import Meta

from rollstream.buffer.items import ItemError, plain_item
from rollstream.buffer.reads import Form
from rollstream.buffer.routes_native import JSON, MAX_ASKED, MAX_PAYLOAD, MOST_GROUPS, groups_of
from rollstream.buffer.service import Service
from rollstream.buffer.store.base import Taken, Wanted
from rollstream.web import HTTPError, Request, Route, json_response, render_json_error

CONSUMER: Final = "slime"
"""Whose leases these reads are, while they are being answered."""

_START_ERROR_S: Final = 1.0
"""An error of /start_rollout comes after so long: the stock client asks again at once and for ever."""

_REASON_CHARS: Final = 500

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

    async def write(self, request: Request) -> web.Response:
        items, replaced = await self._service.parse(await request.body(), "json")
        request.count_surrogates(replaced)
        if len(items) != 1:
            raise ItemError("must be one item, is a batch", "items")
        await self._service.write(items, hold=lambda: request.gone)
        head = b'{"success":true,"message":"Data has been successfully written to buffer","data":{"data":['
        tail = b'],"meta_info":"write to buffer"}}'
        return web.Response(body=head + items[0].body + tail, content_type=JSON)

    async def start_rollout(self, request: Request) -> Any:
        try:
            payload = await request.json(dict, MAX_PAYLOAD)
            record, warnings = await self._service.jobs.start(payload, request.shown_token)
        except Exception:
            await asyncio.sleep(_START_ERROR_S)
            raise
        # The words are slime's, also where nothing had to be started: `state` tells.
        answer = {"message": "Rollout started", "rollout_id": record.id, "state": record.state}
        return {**answer, "warnings": warnings} if warnings else answer

    async def get_rollout_data(self, request: Request) -> web.StreamResponse:
        """All groups that are ready; --max-groups-per-read of them or none; as many as asked for or none."""
        asked = await request.json(SlimeRead, MAX_ASKED)
        items = int(asked.batch_size or 0)
        if items > 0:
            nothing = "Not enough data. Requested {} items but only {} available."
            return await self._answer(
                request, self._groups_of(items), exact=True, nothing=nothing, asked=items
            )
        most, nothing = self._service.options.max_groups_per_read, "No data available to read"
        whole = most is not None
        return await self._answer(request, most, exact=whole, distinct=whole, nothing=nothing)

    async def read(self, request: Request) -> web.StreamResponse:
        """Up to as much as asked for; waits for the first group."""
        asked = await request.json(SlimeRead, MAX_ASKED)
        items = int(asked.batch_size or 0)
        groups = self._groups_of(items) if items > 0 else self._service.options.max_groups_per_read
        if not asked.wait:
            return await self._answer(request, groups, nothing="Successfully read 0 items", fine=True)
        nothing = "Timeout waiting, no data available to read"
        seconds = min(asked.timeout or 0.0, 3600.0)
        return await self._answer(request, groups, nothing=nothing, seconds=seconds)

    async def peek(self, request: Request) -> Any:
        count = request.query.get("batch_size", "1")
        wanted = max(1, int(count)) if count.isascii() and count.isdigit() and len(count) < 6 else 1
        task, jobs = self._service.scope()
        groups = await self._store.peek(Wanted(groups=min(wanted, 64), task=task, jobs=jobs))
        items: list[dict[str, Any]] = []
        for group in groups:
            stored = (await self._store.load([group.id]))[group.id]
            if len(items) < wanted and not isinstance(stored, str):
                items += [plain_item(one.body, one.encoding) for one in stored]
        return _reply(f"Successfully previewed {len(items[:wanted])} items", items[:wanted])

    async def stats(self, request: Request) -> Any:
        stats = await self._store.stats()
        counts = {
            "current_size": stats.items_ready,
            "max_size": self._service.options.limits.items,
            "total_written": stats.items_written,
            "total_read": stats.items_delivered,
        }
        return _reply("Buffer stats retrieved successfully", [counts])

    async def root(self, request: Request) -> Any:
        return {"message": "Rollout Buffer Server is running"}

    def _groups_of(self, items: int) -> int:
        return groups_of(items, self._service.group_size(self._service.scope().task))

    async def _answer(
        self,
        request: Request,
        most: int | None,
        *,
        nothing: str,
        exact: bool = False,
        distinct: bool = False,
        asked: int = 0,
        seconds: float = 0.0,
        fine: bool = False,
    ) -> web.StreamResponse:
        """Hands out groups. They leave when all but the last bytes are on their way, else they go back.

        Args:
            request: To be answered.
            most: Groups; None: all that are ready.
            nothing: The message where there is nothing.
            exact: That many or none. For a group that its hooks spoil another is taken.
            distinct: No instance twice.
            asked: Items that were asked for, for that message.
            seconds: To wait for the first group.
            fine: Whether having nothing is a success.
        """
        service, reads = self._service, self._service.reads
        async with reads.answering(request, _ROWS) as answer:
            given = answer.groups

            def wanted() -> Wanted:
                task, jobs = service.scope()  # another job may have begun
                return Wanted(
                    groups=MOST_GROUPS if most is None else most - len(given),
                    exact=exact,
                    distinct=distinct,
                    without=frozenset(group.instance_id for group in given) if distinct else frozenset(),
                    task=task,
                    jobs=jobs,
                    size=service.group_size(task) if asked else None,
                    consumer=CONSUMER,
                    seconds=service.options.lease_seconds,
                )

            taken = await reads.take(
                wanted,
                seconds,
                gone=lambda: request.gone or service.closing,
                blocked=lambda: service.is_blocked(service.scope()),
            )
            while taken.lease is not None:
                await answer.send(taken, {})
                if (most is None and len(taken.groups) < MOST_GROUPS) or len(given) == most:
                    break
                taken = await reads.take(wanted)
            scope = service.scope()
            if not given:
                available = taken.available * service.group_size(scope.task)
                return await self._nothing(nothing.format(asked, available), taken, fine)
            meta, reported = await reads.meta_info(given, scope)
            if last := self._store.last_job:
                stats = await self._store.stats()
                meta["progress"] = {"job": last.id, "written": stats.items_of_job, "expected": last.expected}
                meta["open_groups"] = stats.groups["open"]
            if exact and len(given) != most:
                message = "some groups were spoiled by their hooks"
                return await answer.end({"success": False, "message": message, "meta_info": meta})

            async def deliver() -> None:
                await self._store.ack(answer.leases, reported_up_to=reported)
                answer.leases.clear()
                service.note_read(given, CONSUMER)

            message = f"Successfully read {answer.items} items"
            return await answer.end({"success": True, "message": message, "meta_info": meta}, deliver)

    async def _nothing(self, message: str, taken: Taken, success: bool) -> web.Response:
        service = self._service
        scope = service.scope()
        causes = [one["message"] for one in await service.failures(scope)]
        causes += await service.notices(taken, scope)
        return _reply(f"{message} ({'; '.join(causes)})" if causes else message, [], success=success)


def _end(end: dict[str, Any]) -> bytes:
    meta = msgspec.json.encode({"meta_info": end.pop("meta_info")})
    return b"]," + meta[1:] + b"," + msgspec.json.encode(end)[1:]


_ROWS = Form(
    media_type=JSON,
    encoding="json",
    head=lambda _: b'{"data":{"data":[',
    group=lambda ready: ready.items[1:-1],
    between=b",",
    end=_end,
)


def _reply(message: str, items: list[Any], *, success: bool = True) -> web.Response:
    data = {"data": items, "meta_info": {}}
    return json_response({"success": success, "message": message, "data": data})


def render_slime_error(request: web.BaseRequest, error: HTTPError) -> web.Response:
    """Errors in slime's shape on its routes, in ours on the others."""
    if not request.path.startswith("/buffer/") and request.path not in _PATHS:
        return render_json_error(request, error)
    detail = {"message": str(error), "code": error.code, "where": error.where}
    body = {"success": False, "message": str(error), "detail": str(error), "error": detail}
    response = json_response(body, error.status, error.headers)
    response.set_status(error.status, _reason(str(error)))
    return response


def _reason(message: str) -> str:
    """The message as HTTP's reason phrase. slime's client prints that, and never the body."""
    line = " ".join(message.split())[:_REASON_CHARS]
    return "".join(char if " " <= char <= "~" else "?" for char in line)
