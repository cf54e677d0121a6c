"""Engines for a block."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from rollstream.engine.base import Engine

E = TypeVar("E", bound=Engine)


@asynccontextmanager
async def started(engine: E) -> AsyncIterator[E]:
    """Starts an engine, and closes it at the end of the block."""
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()
