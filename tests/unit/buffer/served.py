"""A buffer that is served in the event loop of a test, and what a test needs to talk to it."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

from rollstream.buffer.groups import GroupSettings
from rollstream.buffer.ledger import LedgerSettings
from rollstream.buffer.service import BufferService, ServiceOptions

SMALL = LedgerSettings(groups=GroupSettings(group_size=4))


class Served:
    """A service and a session with it."""

    def __init__(self, service: BufferService, session: aiohttp.ClientSession) -> None:
        self.service = service
        self.session = session
        self.url = service.url

    async def post(self, path: str, value: Any = None, **kwargs: Any) -> tuple[int, Any]:
        """Status and JSON of a POST."""
        if value is not None:
            kwargs["json"] = value
        async with self.session.post(self.url + path, **kwargs) as response:
            return response.status, await response.json()

    async def get(self, path: str, **kwargs: Any) -> tuple[int, Any]:
        """Status and JSON of a GET."""
        async with self.session.get(self.url + path, **kwargs) as response:
            return response.status, await response.json()

    async def write_group(self, instance_id: int | str, rewards: tuple[float, ...] = (0, 1, 0, 1)) -> None:
        """One group, by slime's route."""
        for number, reward in enumerate(rewards):
            status, answer = await self.post(
                "/buffer/write", item(instance_id, reward, f"{instance_id!r}-{number}")
            )
            assert (status, answer["success"]) == (200, True)


def item(instance_id: Any, reward: Any = 1.0, uid: str | None = None, **more: Any) -> dict[str, Any]:
    """An item as slime's generators send it."""
    made = {
        "instance_id": instance_id,
        "messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}],
        "reward": reward,
        "extra_info": {"timestamp": "1.5", "finish_reason": "stop"},
        **more,
    }
    return made if uid is None else {"uid": uid, **made}


@contextlib.asynccontextmanager
async def served(directory: Path, settings: LedgerSettings = SMALL, **options: Any) -> AsyncIterator[Served]:
    """Serves `directory` on a free port."""
    service = BufferService(directory, settings, replace(ServiceOptions(port=0), **options))
    async with service, aiohttp.ClientSession() as session:
        yield Served(service, session)
