"""The server does what its own document says: schemathesis makes requests from it, good and bad ones."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .served import served

schemathesis = pytest.importorskip("schemathesis")
hypothesis = pytest.importorskip("hypothesis")
checks = pytest.importorskip("schemathesis.specs.openapi.checks")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A buffer that is served from a thread of its own."""
    folder: Path = tmp_path_factory.mktemp("buffer")
    ready, over = threading.Event(), threading.Event()
    found: list[str] = []

    async def serve() -> None:
        async with served(folder) as buffer:
            found.append(buffer.url)
            ready.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(30)
    yield found[0]
    over.set()
    thread.join(30)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
def test_the_server_does_what_its_document_says(url: str, mode: str) -> None:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    tested = []
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path == "/start_rollout":  # it pauses before it refuses; /v1/rollouts is the same
            continue
        strategy = operation.as_strategy(generation_mode=schemathesis.GenerationMode[mode])

        @hypothesis.given(case=strategy)
        @hypothesis.settings(
            max_examples=15,
            deadline=None,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
            phases=[hypothesis.Phase.generate],
        )
        def check(case: Any) -> None:
            if isinstance(case.body, dict) and isinstance(case.body.get("timeout"), int | float):
                case.body["timeout"] = min(case.body["timeout"], 0.01)
            # Not everything that makes a request right or wrong can be said in a schema (tokens that fit
            # together, parameters that exclude each other): these two checks take the schema for the whole.
            case.call_and_validate(
                timeout=30,
                excluded_checks=[checks.positive_data_acceptance, checks.negative_data_rejection],
            )

        try:
            check()
        except hypothesis.errors.Unsatisfiable:  # nothing about it can be wrong
            continue
        tested.append(operation.path)
    assert len(tested) > 10, tested
