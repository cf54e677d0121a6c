"""What tests of whole runs share."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.faults.runs import stub_in_thread
from tests.support.serving import Served, serve
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


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One for all tests that leave it as it was."""
    with serve(log=tmp_path_factory.mktemp("serve") / "log", env=without_torch()) as served:
        yield served
        assert "Traceback" not in served.log.read_text()


@pytest.fixture(scope="session")
def stub() -> Iterator[dict[str, Any]]:
    """What `test_generation.config` takes for a run that needs no model, and starts sooner without one."""
    with stub_in_thread(response_tokens=16) as server:
        yield {
            "actor_rollout_ref__rollout__name": "sglang",
            "actor_rollout_ref__rollout__server_urls": [server.url],
        }
