"""What every test gets."""

import asyncio
import logging
import signal
from collections.abc import Callable, Iterator, Mapping

import pytest
from hypothesis import HealthCheck, settings

from tests.support.virtual_time import VirtualTimeLoop

# How long an example takes is the machine's affair: a busy one must not make a property false.
settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# The same examples each time: a change fails for what it changed. `make test-soak` draws others.
settings.register_profile("rollstream", settings.get_profile("random"), derandomize=True)
settings.load_profile("rollstream")


def pytest_configure() -> None:
    """Programs that tests start hear signals, also where these tests were told not to.

    `nohup` ignores SIGHUP, a shell's `&` SIGINT and SIGQUIT, and whatever is ignored stays ignored in programs that are
    started. A handler does not: the tests themselves go on as they were told to, and their programs hear.
    """
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tests marked `virtual_time` have a loop whose clock jumps."""
    is_virtual = item.get_closest_marker("virtual_time") is not None
    return {"loop": VirtualTimeLoop if is_virtual else asyncio.new_event_loop}


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """The command line sets up logging for its process; in tests there are many in one."""
    logger = logging.getLogger("rollstream")
    before = (logger.handlers[:], logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])
