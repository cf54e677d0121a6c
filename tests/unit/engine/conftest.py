"""Tests marked `virtual_time` have a loop whose clock jumps."""

import asyncio
from collections.abc import Callable, Mapping

import pytest

from tests.support.virtual_time import VirtualTimeLoop


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    is_virtual = item.get_closest_marker("virtual_time") is not None
    return {"loop": VirtualTimeLoop if is_virtual else asyncio.new_event_loop}
