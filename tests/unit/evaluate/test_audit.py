"""The sums of an audit, against a plain loop over tokens."""

import math
import random
from typing import Any

import pyarrow as pa
import pytest

from rollstream.evaluate.audit import Audit
from rollstream.store.batch import SCHEMA

NAMES = ("index", "repeat", "trajectory", "response_ids", "response_mask", "response_logprobs")
NAMES = (*NAMES, "policy_versions", "finish_reason", "data_source")
TYPES = pa.schema([*map(SCHEMA.field, NAMES), pa.field("stream.s", pa.list_(pa.float32()))])


def made(rng: random.Random, index: int) -> dict[str, Any]:
    length = rng.choice([0, 1, 5, 40])
    values = [[-rng.choice([0.25, 0.5, 1.0, 3.0]) for _ in range(length)] for _ in range(2)]
    starts = sorted({0, *(rng.randrange(length + 1) for _ in range(2))}) if rng.random() < 0.9 else []
    return {
        **{"index": index, "repeat": 0, "trajectory": 0},
        "response_ids": [rng.randrange(100) for _ in range(length)],
        "response_mask": [rng.randrange(2) for _ in range(length)],
        "response_logprobs": values[0] if rng.random() < 0.8 else None,
        "policy_versions": [{"start": start, "version": 7 + at} for at, start in enumerate(starts)],
        **{"finish_reason": rng.choice(["stop", "length"]), "data_source": rng.choice("abc")},
        "stream.s": values[1] if rng.random() < 0.8 else None,
    }


def plain(rows: list[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Count, k1, k3 and mean difference."""
    tokens: dict[str, dict[str, list[tuple[float, ...]]]] = {}
    for row in rows:
        if row["response_logprobs"] is None or row["stream.s"] is None:
            continue
        turn = 0
        for at, sampled in enumerate(row["response_mask"]):
            if not sampled:
                continue
            turn += at == 0 or not row["response_mask"][at - 1]
            apart = row["stream.s"][at] - row["response_logprobs"][at]
            version = [-1, *(one["version"] for one in row["policy_versions"] if one["start"] <= at)][-1]
            keys = {
                "all": "0",
                "position": "0-" if at < 16 else "16-",
                **{"turn": str(turn), "version": str(version)},
                **{name: row[name] for name in ("finish_reason", "data_source")},
            }
            for name, key in keys.items():
                numbers = (1.0, -apart, math.exp(apart) - 1 - apart, abs(apart))
                tokens.setdefault(name, {}).setdefault(key, []).append(numbers)
    return {
        name: {
            key: [len(found), *(sum(column) / len(found) for column in list(zip(*found, strict=True))[1:])]
            for key, found in groups.items()
        }
        for name, groups in tokens.items()
    }


@pytest.mark.parametrize("seed", range(20))
def test_sums(seed: int) -> None:
    rng, audit = random.Random(seed), Audit()
    rows = [made(rng, index) for index in range(30)]
    for begin in range(0, 30, 7):
        audit.add(pa.Table.from_pylist(rows[begin : begin + 7], schema=TYPES).slice(1), "stream.s")
    rows = [row for at, row in enumerate(rows) if at % 7]
    for name, groups in plain(rows).items():
        found = audit.by(name)
        assert {key: [*one.values()][:4] for key, one in found.items()} == {
            key: pytest.approx(numbers, abs=1e-6) for key, numbers in groups.items()
        }
    compared = [row for row in rows if None not in (row["response_logprobs"], row["stream.s"])]
    assert (audit.trajectories, audit.left_out) == (len(compared), len(rows) - len(compared))
    for one in audit.worst:
        row = next(row for row in rows if row["index"] == one["index"])
        assert row["response_ids"][one["position"]] == one["id"] and row["response_mask"][one["position"]]
    apart = sorted(
        (
            abs(a - b)
            for row in compared
            for a, b, sampled in zip(
                row["stream.s"], row["response_logprobs"], row["response_mask"], strict=True
            )
            if sampled
        ),
        reverse=True,
    )
    assert [abs(one["stream"] - one["sampler"]) for one in audit.worst] == apart[:10]
    assert audit.largest == apart[0]


@pytest.mark.parametrize("name", ["response_ids", "response_mask"])
def test_a_damaged_row_is_left_out(name: str) -> None:
    """R5: another program may have written the run."""
    audit, rows = Audit(), [made(random.Random(8), index) for index in range(6)]
    for row in rows:
        row |= {"response_logprobs": [-1.0] * 40, "stream.s": [-1.0] * 40}
        row |= {"response_ids": [1] * 40, "response_mask": [1] * 40}
    rows[2][name] = [1] * 39
    audit.add(pa.Table.from_pylist(rows, schema=TYPES), "stream.s")
    assert (audit.trajectories, audit.left_out) == (5, 1)
