"""What tests of whole runs share."""

import os
from collections.abc import Iterator

import pytest

from tests.without_torch import without_torch

_FOUND = os.environ.get("PYTHONPATH", "")


@pytest.fixture(scope="module", autouse=True)
def processes_start_sooner() -> Iterator[None]:
    """They do not find torch, which transformers would import and most of them have no use for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", without_torch()["PYTHONPATH"])
        yield


@pytest.fixture
def processes_find_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", _FOUND)
