"""Which handler answers a request."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rollstream.buffer.exchange import Exchange, RefusalError

Handler = Callable[[Exchange], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Route:
    """One path.

    Attributes:
        path: parts in braces take any one part: `/v1/leases/{lease}/ack`.
        handlers: by method of HTTP.
    """

    path: str
    handlers: dict[str, Handler]


class Router:
    """Paths and what answers them."""

    def __init__(self) -> None:
        self._exact: dict[str, Route] = {}
        self._patterns: dict[int, list[tuple[list[str], Route]]] = {}

    def add(self, method: str, path: str, handler: Handler) -> None:
        """One more route."""
        route = self._exact.get(path)
        if route is None:
            route = self._exact[path] = Route(path, {})
            if "{" in path:
                parts = path.split("/")
                self._patterns.setdefault(len(parts), []).append((parts, route))
        route.handlers[method] = handler

    def find(self, exchange: Exchange) -> tuple[Route, Handler]:
        """The handler of a request; fills in `params`.

        Raises:
            RefusalError: 404, or 405 with the methods that the path takes.
        """
        route = self._match(exchange)
        method = "GET" if exchange.method == "HEAD" else exchange.method
        handler = route.handlers.get(method)
        if handler is None:
            allowed = ", ".join(sorted(route.handlers))
            raise RefusalError(
                f"{route.path} takes {allowed}, not {exchange.method}",
                status=405,
                code="method_not_allowed",
                headers={"allow": allowed},
            )
        return route, handler

    def routes(self) -> list[tuple[str, str]]:
        """Method and path of every route."""
        return [(method, route.path) for route in self._exact.values() for method in route.handlers]

    def _match(self, exchange: Exchange) -> Route:
        route = self._exact.get(exchange.path)
        if route is not None and "{" not in exchange.path:
            return route
        parts = exchange.path.split("/")
        for wanted, candidate in self._patterns.get(len(parts), ()):
            params = {}
            for want, part in zip(wanted, parts, strict=True):
                if want.startswith("{") and part:
                    params[want[1:-1]] = part
                elif want != part:
                    break
            else:
                exchange.params = params
                return candidate
        raise RefusalError(f"there is no {exchange.path}", status=404, code="not_found")
