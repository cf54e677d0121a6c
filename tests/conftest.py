"""What every test gets."""

import logging
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes is the machine's affair: a busy one must not make a property false.
settings.register_profile("rollstream", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rollstream")


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """The command line sets up logging for its process; in tests there are many in one."""
    logger = logging.getLogger("rollstream")
    before = (logger.handlers[:], logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])
