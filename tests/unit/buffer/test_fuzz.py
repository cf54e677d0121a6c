"""Requests that nobody would send: none is a 500, none makes the server grow."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from tests.support.buffer import BufferProcess, generator, serve_buffer

FINE = {*range(200, 300), *range(400, 500), 503, 507}
"""Of a 5xx, only "busy" and "the disk is full" are answers."""

SLOW = ("/start_rollout",)
"""An error there comes after a second."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BufferProcess]:
    folder = tmp_path_factory.mktemp("fuzz")
    files = generator(folder / "files", hooks="\ndef filter_item(item, task_type):\n    return True\n")
    with serve_buffer(
        folder / "buffer", "--group-size", "2", "--generators", files, "--lease-seconds", "2"
    ) as server:
        yield server


SOAK = [pytest.mark.soak, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("examples", [8, pytest.param(1_000, marks=SOAK)])
def test_requests_by_the_schema(server: BufferProcess, examples: int) -> None:
    schema = schemathesis.openapi.from_dict(server.get("/openapi.json"))
    schema.config.update(base_url=server.url)
    for result in schema.get_all_operations():
        operation: Any = result.ok()  # type: ignore[union-attr]
        if operation.path in SLOW:
            continue

        cases = operation.as_strategy() | operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)

        @given(case=cases)
        @settings(
            max_examples=examples, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck), derandomize=True,
        )  # fmt: skip
        def send(case: schemathesis.Case[Any]) -> None:
            if isinstance(case.body, dict):
                case.body.pop("timeout", None)
            response = case.call()
            assert response.status_code in FINE, (case.as_curl_command(), response.text)

        send()
