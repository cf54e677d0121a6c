"""The page's server: its files, and what they ask for below `/api`. It reads; it never writes."""

import asyncio
import importlib.resources
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar
from urllib.parse import unquote

import msgspec
import numpy as np
from aiohttp import web

from rollstream.buffer.command import opened
from rollstream.errors import ConfigError, DamageError, NotFoundError, RunDirectoryError, StorageError
from rollstream.evaluate.metrics import SOLVED_AT
from rollstream.evaluate.samples import figures_of_sources
from rollstream.store.columns import Array, RunColumns
from rollstream.store.filter import Filter, FilterError, sort_rows
from rollstream.trajectory import failure_cause
from rollstream.user_calls import in_daemon_thread
from rollstream.view import reader
from rollstream.view.overview import compare, overview, tools
from rollstream.view.sources import BufferSource, RunSource, Sources, TrainingSource, ViewSource
from rollstream.view.tokens import encode_tokens
from rollstream.web import Access, HTTPError, Request, Route, WebServer, json_response, render_json_error

GRACE_S: Final = 0.2
"""Answers that are being sent have so long when the server ends."""

_HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store, no-transform",
}
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
}
_THREADS: Final = 4
_EVERY_S: Final = 0.5
"""Between two looks at a run that is followed."""
_REST: Final = 8
"""Times as long as a look took, until the next one: a large run that is written has the processor for itself."""
_EVERY_OTHER_S: Final = 2.0
"""... at one that nobody writes now: it may be resumed."""
_ALIVE_S: Final = 15.0
"""Without a change, after which a stream says something: proxies close what is silent for long."""
_KEPT: Final = 4
"""Results of filters and sorts that are kept: paging through a list asks for the same again and again."""
_PATIENCE_S: Final = 10.0
"""A look at all rows that takes longer is given up; a comparison of a million cells takes some milliseconds."""
_MOST_TEXTS: Final = 200
"""Rows whose texts are read at once: a screen has fewer."""
_DROPPED: Final = 100
_SIGNS: Final = {"won": 1, "tied": 0, "lost": -1}
"""Of b's mean reward less a's."""

_T = TypeVar("_T")
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**31)]


class _Query(msgspec.Struct, kw_only=True):
    """What lists are asked with."""

    filter: str = ""
    sort: str = ""
    columns: str = ""
    rows: Annotated[str, msgspec.Meta(pattern=r"^(\d{1,9}(,\d{1,9})*)?$")] = ""
    text: str = ""
    cause: str | None = None
    state: str | None = None
    cursor: str = ""
    a: str = ""
    b: str = ""
    outcome: Literal["won", "lost", "tied"] | None = None
    after: _Count = 0
    step: _Count = 2**31
    offset: _Count = 0
    limit: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 100

    def names(self, value: str) -> list[str]:
        """Names with commas between them; a comma in a name is written %2C."""
        return [unquote(name.strip()) for name in value.split(",") if name.strip()]

    def page(self, values: Any) -> Any:
        return values[self.offset : self.offset + self.limit]


class ViewServer:
    """Serves the page and its API.

    Args:
        places: run directories, folders of them, Parquet files, folders or URLs of buffers.
        access: who may send requests. The page's own files need no token: they hold nothing.
        solved_at: a reward from here on counts as solved.
        scores: whose rewards are shown of runs that have them; None: each run's own.
    """

    def __init__(
        self, places: Sequence[str], access: Access, solved_at: float = SOLVED_AT, scores: str | None = None
    ) -> None:
        self._sources = Sources(places, solved_at, scores)
        self._solved_at = solved_at
        self._threads = asyncio.Semaphore(_THREADS)
        self._static = static_files()
        run, row = "/api/runs/{id}", "/api/runs/{id}/trajectories/{row}"
        routes: dict[str, Callable[[Request], Any]] = {
            "/api/sources": lambda _: {"sources": [_described(source) for source in self._sources.all()]},
            run: self._overview,
            f"{run}/rows": self._rows,
            f"{run}/texts": self._texts,
            f"{run}/groups": self._groups,
            f"{run}/sources": lambda one: figures_of_sources(self._run(one).columns()),
            f"{run}/tools": lambda one: {"tools": tools(self._run(one).columns(), _patience(one))},
            f"{run}/groups/{{index}}": lambda one: reader.group(
                self._run(one).columns(), _whole(one, "index")
            ),
            f"{run}/failures": self._failures,
            row: lambda one: reader.trajectory(self._run(one).columns(), _whole(one, "row")),
            f"{row}/tokens": self._tokens,
            "/api/compare": self._compare,
            "/api/training/{id}": lambda one: self._training(one).read(),
            "/api/training/{id}/groups": self._training_groups,
        }
        self._web = WebServer(
            [
                *(
                    Route("GET", path, self._handler(answer), cancel_when_gone=True)
                    for path, answer in routes.items()
                ),
                Route("GET", f"{run}/search", self._search, cancel_when_gone=True),
                Route("GET", f"{run}/follow", self._follow, cancel_when_gone=True),
                Route("GET", "/api/buffers/{id}", self._buffer),
                Route("GET", "/api/buffers/{id}/items", self._buffer_items),
                Route("GET", "/", self._file, open=True),
                Route("GET", "/{name...}", self._file, open=True),
            ],
            access=access,
            translate=_translate,
            render_error=_refuse,
        )

    async def start(self, host: str, port: int) -> str:
        """Listens; returns the URL. Raises `ConfigError`."""
        url = await self._web.start(host, port)
        self._reading_ahead = asyncio.ensure_future(self._in_thread(self._sources.read_ahead))
        self._reading_ahead.add_done_callback(_take_error)  # the page says it, too
        return url

    async def stop(self) -> None:
        """Ends all answers."""
        await self._web.stop(GRACE_S)

    async def _in_thread(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """Reads in a thread: others are answered meanwhile, and a read that hangs does not keep the process."""
        await self._threads.acquire()
        running = asyncio.ensure_future(in_daemon_thread(work, *arguments))
        running.add_done_callback(lambda _: self._threads.release())  # also where nobody waits any more
        running.add_done_callback(_take_error)
        return await asyncio.shield(running)

    def _handler(self, answer: Callable[[Request], Any]) -> Callable[[Request], Awaitable[web.Response]]:
        """Answers by what a function reads, in a thread."""

        def work(request: Request) -> web.Response:
            value = answer(request)
            return value if isinstance(value, web.Response) else json_response(value, headers=_HEADERS)

        return partial(self._in_thread, work)

    async def _file(self, request: Request) -> web.Response:
        found = self._static.get(request.params.get("name", "index.html"))
        if found is None:
            raise HTTPError(404, f"there is no {request.path}", "not_found")
        return _response(*found)

    # -- runs

    def _run(self, request: Request) -> RunSource:
        return self._sources.get(request.params["id"], RunSource)

    def _overview(self, request: Request) -> dict[str, Any]:
        run = self._run(request)
        columns = run.columns()
        figures = overview(columns, run.groups(columns), self._solved_at)
        return {**run.describe(whole=True), "settings": run.settings, **figures}

    def _select(self, request: Request, columns: RunColumns, query: _Query, sort: str = "") -> Array:
        """Rows that a filter lets through, in order. Raises `FilterError`."""
        kept = columns.selections
        found = kept.get((query.filter, sort))
        if found is None:
            passing = Filter(query.filter, columns).rows(columns, _patience(request))
            numbers = np.flatnonzero(passing).astype(np.int32)
            kept[query.filter, sort] = found = sort_rows(columns, numbers, query.names(sort))
            while len(kept) > _KEPT:
                kept.popitem(last=False)
        return found

    def _rows(self, request: Request) -> dict[str, Any]:
        columns, query = self._run(request).columns(), request.arguments(_Query)
        known = [column["name"] for column in columns.columns()]
        names = query.names(query.columns) or known
        if unknown := set(names).difference(known):
            raise HTTPError(400, f"there is no column {', '.join(sorted(unknown))}", where="columns")
        selected = self._select(request, columns, query, query.sort)
        shown = query.page(selected)
        cells = [shown.tolist(), *(columns.values(name, shown) for name in names)]
        rows = [list(row) for row in zip(*cells, strict=True)]
        return {"total": len(selected), "all": columns.rows, "columns": names, "rows": rows}

    def _texts(self, request: Request) -> dict[str, Any]:
        columns, query = self._run(request).columns(), request.arguments(_Query)
        rows = [row for row in map(int, query.names(query.rows)) if row < columns.rows]
        chosen = np.array(rows[:_MOST_TEXTS], np.int64)
        return {"texts": dict(zip(chosen.tolist(), reader.texts(columns, chosen), strict=True))}

    def _groups(self, request: Request) -> dict[str, Any]:
        run, query = self._run(request), request.arguments(_Query)
        columns = run.columns()
        groups = run.groups(columns)
        order = _sorted(groups, query.sort or "index")
        if query.filter.strip():
            chosen = np.unique(columns["index"][self._select(request, columns, query)])
            order = order[np.isin(groups["index"][order], chosen)]
        shown = query.page(order)
        first = groups["first"][shown]
        cells = _cells({name: groups[name] for name in groups if name not in ("first", "total")}, shown)
        cells |= {name: columns.values(name, first) for name in ("prompt_key", "data_source")}
        return {"total": len(order), "groups": _records({**cells, "prompt": reader.prompts(columns, first)})}

    def _failures(self, request: Request) -> dict[str, Any]:
        query = request.arguments(_Query)
        failures = self._run(request).columns().failures()
        found = [one for one in failures if query.cause in (None, failure_cause(one.error))]
        return {"total": len(found), "failures": msgspec.to_builtins(query.page(found))}

    def _tokens(self, request: Request) -> web.Response:
        run, row = self._run(request), _whole(request, "row")
        found = reader.find_rollout(run.columns(), row)[row]
        if isinstance(found["extra"], dict):
            found["extra"] = {**run.streams_of(found), **found["extra"]}
        return _response(encode_tokens(found, *run.token_text), "application/octet-stream")

    def _compare(self, request: Request) -> dict[str, Any]:
        query = request.arguments(_Query)
        runs = [self._sources.get(id, RunSource) for id in (query.a, query.b)]
        a, b = (run.columns() for run in runs)
        own, other = (run.settings for run in runs)
        differs = [
            [name, own.get(name), other.get(name)] for name in own | other if own.get(name) != other.get(name)
        ]
        comparison, columns = compare(a, b)
        order = _sorted(columns, query.sort or "-difference")
        if query.outcome is not None:
            order = order[np.sign(columns["difference"][order]) == _SIGNS[query.outcome]]
        cells = _cells(columns, query.page(order))
        first = np.array([int(a.rollout_rows(index)[0]) for index in cells["index_a"]], np.int64)
        rows = _records({**cells, "prompt": reader.prompts(a, first)})
        return {**comparison, "differs": differs, "total": len(order), "rows": rows}

    # -- trainings

    def _training(self, request: Request) -> TrainingSource:
        return self._sources.get(request.params["id"], TrainingSource)

    def _training_groups(self, request: Request) -> dict[str, Any]:
        query = request.arguments(_Query)
        training = self._training(request)
        found = training.groups(query.after, query.step)
        shown = query.page(found)
        self._sources.link(training, shown)
        return {"total": len(found), "groups": shown}

    # -- streams

    async def _search(self, request: Request) -> web.StreamResponse:
        query = request.arguments(_Query)
        if not query.text:
            raise HTTPError(400, "text is empty: what is to be searched for?", where="text")
        columns = await self._in_thread(lambda: self._run(request).columns())
        rows = await self._in_thread(self._select, request, columns, query)
        steps = reader.search(columns, query.text, rows)

        async def events() -> AsyncIterator[bytes]:
            while (found := await self._in_thread(next, steps, None)) is not None:
                yield b"".join(_event(name, data) for name, data in found)

        return await _stream(request, events())

    async def _follow(self, request: Request) -> web.StreamResponse:
        query, loop = request.arguments(_Query), asyncio.get_running_loop()
        await self._in_thread(self._run, request)  # 404 before the stream begins

        async def events() -> AsyncIterator[bytes]:
            said, silent_since = query.cursor, loop.time()
            while True:
                began = loop.time()
                state = await self._in_thread(
                    lambda: self._run(request).state()
                )  # another may have begun there
                if state["cursor"] != said:
                    said, silent_since = state["cursor"], began
                    yield _event("change", state, said)
                elif began - silent_since > _ALIVE_S:
                    silent_since = began
                    yield b": alive\n\n"
                rest = _EVERY_S if state["state"] == "running" else _EVERY_OTHER_S
                await asyncio.sleep(max(rest, _REST * (loop.time() - began)))

        return await _stream(request, events())

    # -- buffers

    def _open_buffer(self, request: Request) -> Any:
        return opened(self._sources.get(request.params["id"], BufferSource).address)

    async def _buffer(self, request: Request) -> web.Response:
        async with self._open_buffer(request) as buffer:
            stats = await buffer.stats()
            leases = await buffer.leases() if hasattr(buffer, "leases") else []
            dropped = await buffer.groups(state="dropped", limit=_DROPPED)
        return json_response({"status": stats, "leases": leases, "dropped": dropped}, headers=_HEADERS)

    async def _buffer_items(self, request: Request) -> web.Response:
        query = request.arguments(_Query)
        which = {} if query.state is None else {"state": query.state}
        async with self._open_buffer(request) as buffer:
            groups = await buffer.groups(**which, after=query.offset, limit=min(query.limit, 100))
            contents = [await buffer.group(group["id"]) for group in groups]
        return json_response({"groups": contents}, headers=_HEADERS)


def _take_error(ended: "asyncio.Future[Any]") -> None:
    """No warning where nobody waits for a result."""
    if not ended.cancelled():
        ended.exception()


def _patience(request: Request) -> Callable[[], None]:
    """What long work calls now and then: raises where nobody waits for it any more, or not that long."""
    deadline = time.monotonic() + _PATIENCE_S

    def check() -> None:
        if request.gone:
            raise ConnectionResetError
        if time.monotonic() > deadline:
            raise HTTPError(400, f"this takes longer than {_PATIENCE_S:g} s", "too_long")

    return check


def static_files() -> dict[str, tuple[bytes, str]]:
    """The page's files, read once: no path of a client's ever reaches the disk."""
    root = Path(str(importlib.resources.files("rollstream.view") / "static"))
    kinds = {path: _TYPES.get(path.suffix, "text/plain; charset=utf-8") for path in root.rglob("*.*")}
    return {path.relative_to(root).as_posix(): (path.read_bytes(), kind) for path, kind in kinds.items()}


def _described(source: ViewSource) -> dict[str, Any]:
    try:
        return source.describe()
    except Exception as error:  # a run.json may say anything: the others are listed all the same
        return ViewSource.describe(source) | {"state": "damaged", "error": f"{type(error).__name__}: {error}"}


def _sorted(columns: Mapping[str, Array], sort: str) -> Array:
    """The order of columns by one of them; NaN comes last."""
    name = sort.partition(",")[0].strip()
    if (values := columns.get(name.removeprefix("-"))) is None:
        raise HTTPError(400, f"sort by {', '.join(columns)}, not {name!r}", where="sort")
    down = name.startswith("-") and values.dtype.kind != "U"
    return np.argsort(-values if down else values, kind="stable")


def _cells(columns: Mapping[str, Array], rows: Array) -> dict[str, list[Any]]:
    return {name: values[rows].tolist() for name, values in columns.items()}


def _records(cells: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(cells, row, strict=True)) for row in zip(*cells.values(), strict=True)]


def _whole(request: Request, name: str) -> int:
    text = request.params[name]
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise HTTPError(404, f"{text!r:.40} is no {name}", "not_found")
    return int(text)


def _response(body: bytes, kind: str) -> web.Response:
    return web.Response(body=body, headers={**_HEADERS, "content-type": kind})


def _refuse(request: web.BaseRequest, error: HTTPError) -> web.Response:
    response = render_json_error(request, error)
    response.headers.update(_HEADERS)
    return response


def _event(name: str, data: Mapping[str, Any], id: str = "") -> bytes:
    """One event of a stream; JSON has no line breaks."""
    return (
        (f"id: {id}\n" if id else "").encode()
        + f"event: {name}\ndata: ".encode()
        + msgspec.json.encode(data)
        + b"\n\n"
    )


async def _stream(request: Request, events: AsyncIterator[bytes]) -> web.StreamResponse:
    response = web.StreamResponse(headers={**_HEADERS, "content-type": "text/event-stream"})
    await response.prepare(request.raw)
    async for event in events:
        await response.write(event)
    await response.write_eof()
    return response


def _translate(error: Exception) -> HTTPError | None:
    if isinstance(error, FilterError):
        return HTTPError(400, str(error), "bad_filter", str(error.position))
    statuses: dict[type[Exception], tuple[int, str]] = {
        NotFoundError: (404, "not_found"),
        DamageError: (422, "damaged"),
        RunDirectoryError: (422, "not_a_run"),
        UnicodeDecodeError: (422, "damaged"),
        StorageError: (503, "storage"),
        ConfigError: (400, "bad_request"),
    }
    for kind, (status, code) in statuses.items():
        if isinstance(error, kind):
            return HTTPError(status, str(error), code)
    return None
