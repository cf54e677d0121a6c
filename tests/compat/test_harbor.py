"""Harbor's own models accept our ATIF documents; our check of them refuses what they refuse.

Skipped where Harbor is not installed; `pip install --no-deps --ignore-requires-python harbor` is enough.
"""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from tests.support.atif import check_atif
from tests.unit.integrations.exports.test_interchange import documents_of, odd_trajectories

harbor = pytest.importorskip("harbor.models.trajectories", reason="Harbor needs Python 3.12")

BREAKS: list[tuple[tuple[Any, ...], Any]] = [
    (("session",), 1),
    (("schema_version",), "ATIF-v0"),
    (("agent", "name"), None),
    (("agent", "engine"), "x"),
    (("steps",), []),
    (("steps", 0, "step_id"), 2),
    (("steps", 0, "source"), "tool"),
    (("steps", 0, "metrics"), {"prompt_tokens": 1}),
    (("steps", 0, "reasoning_content"), "hm"),
    (("steps", 2, "message"), None),
    (("steps", 2, "tool_calls", 0, "arguments"), "{}"),
    (("steps", 2, "observation", "results", 0, "source_call_id"), "c9"),
    (("steps", 2, "observation", "results", 0, "name"), "add"),
    (("steps", 3, "metrics", "logprobs"), [None]),
    (("steps", 3, "metrics", "completion_token_ids"), ["a"]),
    (("final_metrics", "reward"), 1.0),
]


async def test_harbor_accepts_every_document_and_refuses_what_our_check_refuses(tmp_path: Path) -> None:
    documents = await documents_of(tmp_path, odd_trajectories())
    for document in documents:
        assert harbor.Trajectory.model_validate(document).to_json_dict()["steps"] == document["steps"]
    for (*path, last), value in BREAKS:
        broken = deepcopy(documents[1])
        node: Any = broken
        for key in path:
            node = node[key]
        node[last] = value
        for check in (harbor.Trajectory.model_validate, check_atif):
            with pytest.raises(ValueError):
                check(broken)
