"""The annotation pass: which rollouts get values, which fail, and who is refused."""

import asyncio
import json
from pathlib import Path
from typing import Any
from zlib import crc32

import pyarrow.parquet as pq
import pytest

from rollstream.demo import MODEL_PATH
from rollstream.errors import ConfigError, DamageError, RunDirectoryError
from rollstream.rollout.annotate import Teacher, annotate_run, served_teacher
from rollstream.rollout.stored_pass import ScoreReport
from rollstream.store.keys import KeyStates
from rollstream.store.merge_shards import merge_shards
from rollstream.store.run import Run
from rollstream.store.scores import pass_folder, sidecar_table
from rollstream.store.streams import STREAM_SCHEMA, Stream
from rollstream.store.validate import validate_run
from rollstream.testing import stub_server
from rollstream.testing.stub_server import StubModel, StubServer
from rollstream.trajectory import Rollout, RolloutKey, Trajectory
from tests.support.view_runs import opened, rollout, write_run

PROMPT = 10
"""Tokens of the prompts that `rollout` makes."""


def value(at: int) -> float:
    """The stub's log-prob of the token at a position."""
    return -((crc32(b"default") + 31 * at) % 97) / 9


def annotated(root: Path, name: str = "teacher", *, length: int = 4096, **more: Any) -> ScoreReport:
    """Annotates a run by a stub of SGLang that takes so many tokens."""

    async def ask() -> ScoreReport:
        async with StubServer(model=StubModel(str(MODEL_PATH), context_length=length)) as server:
            return await annotate_run(root, await served_teacher([server.url]), name=name, **more)

    return asyncio.run(ask())


def streams_of(root: Path, name: str = "teacher") -> dict[tuple[int, int], list[float] | None]:
    rows = [row for table in Run.open(root).rows(["index", "repeat"], [name]) for row in table.to_pylist()]
    return {(row["index"], row["repeat"]): row[f"stream.{name}"] for row in rows}


def test_values_stand_at_sampled_tokens_of_all_trajectories(tmp_path: Path) -> None:
    last = rollout(1, 0, length=6, response_mask=[1, 1, 0, 0, 1, 0])
    snapshot = rollout(1, 1, length=5).trajectories[0]
    snapshot.is_snapshot = True
    records = [rollout(0, 0), Rollout(1, 0, last.prompt_key, [snapshot, *last.trajectories], "sums")]
    root = write_run(tmp_path / "run", records, n=1, prompts=2)
    report = annotated(root)
    assert (report.rollouts, report.now, report.failed) == (2, 2, 0)
    stored = pq.read_table(sidecar_table(root, "teacher", "streams"))
    wanted = [
        [value(PROMPT + at) for at in range(4)],
        [value(PROMPT + at) for at in range(5)],
        [value(PROMPT + at) if at in (0, 1, 4) else 0.0 for at in range(6)],
    ]
    for found, expected in zip(stored["values"].to_pylist(), wanted, strict=True):
        assert found == pytest.approx(expected)
    made = Stream(root, "teacher").made
    assert (made["engine"], made["mode"], made["temperature"]) == ("sglang", "raw", 1.0)
    assert validate_run(root).sound
    assert validate_run(pass_folder(root, "teacher", "streams")).sound
    data = sidecar_table(root, "teacher", "streams").read_bytes()
    sidecar_table(root, "teacher", "streams").write_bytes(data[:-20] + bytes(20))
    assert [problem for problem in validate_run(root).problems if "streams/teacher.parquet" in problem]


def test_the_likeliest_ids_are_lists_of_the_stream(tmp_path: Path) -> None:
    records = [rollout(0, 0, length=4, response_mask=[1, 0, 1, 0]), rollout(1, 0, prompt_ids=[])]
    root = write_run(tmp_path / "run", records, n=1, prompts=2)
    report = annotated(root, top_k=3)
    assert (report.rollouts, report.failed) == (2, 1)
    names = ["teacher", "teacher.top_ids", "teacher.top_logprobs"]
    (table,) = Run.open(root).rows(["index"], names)
    first, second = table.to_pylist()
    assert first["stream.teacher"] == pytest.approx([value(PROMPT), 0.0, value(PROMPT + 2), 0.0])
    assert first["stream.teacher.top_ids"] == [[0, 1, 2], [], [0, 1, 2], []]
    assert first["stream.teacher.top_logprobs"] == [[-1, -2, -3], [], [-1, -2, -3], []]
    assert [second[f"stream.{name}"] for name in names] == [None] * 3
    assert Stream(root, "teacher").made["top_k"] == 3 and validate_run(root).sound
    with pytest.raises(ConfigError, match="choose another name"):
        annotated(root, top_k=2)
    annotated(root, "plain")
    with pytest.raises(RunDirectoryError, match="'plain' was made without --top-k"):
        Stream(root, "plain.top_ids")
    with pytest.raises(RunDirectoryError, match=r"no complete stream 'none\.top_ids'"):
        Stream(root, "none.top_ids")
    with pytest.raises(ConfigError, match="--top-k 100: this sglang gives 64"):
        annotated(root, "many", top_k=100)


@pytest.mark.parametrize("made", [b"[]", b"5", b"{"])
def test_a_stream_that_says_anything_of_itself_is_damaged(tmp_path: Path, made: bytes) -> None:
    root = write_run(tmp_path / "run", [rollout(0, 0)], n=1, prompts=1)
    annotated(root)
    path = sidecar_table(root, "teacher", "streams")
    table = pq.read_table(path).cast(STREAM_SCHEMA)
    pq.write_table(table.replace_schema_metadata({b"rollstream.stream": made}), path)
    with pytest.raises(DamageError, match=r"teacher\.parquet"):
        Stream(root, "teacher")


def test_a_rollout_that_cannot_be_asked_for_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = {"role": "user", "content": [{"type": "image", "image": "x.png"}]}
    records = [
        rollout(0, 0),
        rollout(1, 0, length=60),
        rollout(2, 0, messages=[image]),
        rollout(3, 0, prompt_ids=[]),
        rollout(4, 0, length=9),
    ]
    root = write_run(tmp_path / "run", records, n=1, prompts=5)
    write_scores = stub_server.write_scores

    def one_less(ids: list[int], *more: Any) -> bytes:
        return write_scores(ids[:-2] if len(ids) == PROMPT + 9 else ids, *more)

    monkeypatch.setattr(stub_server, "write_scores", one_less)
    report = annotated(root, length=50)
    assert (report.rollouts, report.failed) == (5, 4)
    causes = " ".join(report.causes)
    for cause in ("max_model_len 50", "images", "no token ids", "9 ids do not match 7"):
        assert cause in causes
    assert [key for key, values in streams_of(root).items() if values is not None] == [(0, 0)]
    monkeypatch.undo()
    assert annotated(root).now == 0
    assert annotated(root, retry_failed=True).now == 4
    assert len([values for values in streams_of(root).values() if values is not None]) == 3


def test_what_was_generated_again_has_no_values_until_it_is_asked_for(tmp_path: Path) -> None:
    root = write_run(tmp_path / "run", [rollout(at, 0) for at in range(3)], n=1, prompts=4, rows=1)
    annotated(root)
    with opened(root, n=1, prompts=4) as run:
        again = KeyStates(1)
        again.mark_done(1, 0)
        run.forget(again)
    write_run(root, [rollout(1, 0, length=7), rollout(3, 0)], n=1, prompts=4)
    assert [values is None for _, values in sorted(streams_of(root).items())] == [False, True, False, True]
    assert annotated(root).now == 2
    assert [len(values or ()) for _, values in sorted(streams_of(root).items())] == [4, 7, 4, 4]


def test_a_name_is_of_one_model(tmp_path: Path) -> None:
    root = write_run(tmp_path / "run", [rollout(0, 0)], n=1, prompts=1)
    annotated(root)
    with pytest.raises(ConfigError):
        asyncio.run(annotate_run(root, Teacher("hf", str(MODEL_PATH)), name="teacher"))
    with pytest.raises(RunDirectoryError, match="teacher"):
        list(Run.open(root).rows(["index"], ["another"]))


def test_a_pass_that_is_refused_leaves_nothing_behind(tmp_path: Path) -> None:
    root = write_run(tmp_path / "run", [rollout(0, 0)], n=1, prompts=1)
    with pytest.raises(ConfigError, match="top-k"):
        annotated(root, top_k=10**6)
    assert not pass_folder(root, "teacher", "streams").exists()
    assert annotated(root).now == 1


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    root, other = write_run(tmp_path / "run", [rollout(0, 0)], n=1, prompts=1), tmp_path / "other"
    other.mkdir()
    content = json.loads((MODEL_PATH / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    first, second, *_ = (token for token, number in vocabulary.items() if number > 300)
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="vocabulary"):
        asyncio.run(annotate_run(root, Teacher("hf", str(MODEL_PATH), tokenizer=str(other)), name="t"))
    assert not pass_folder(root, "t", "streams").exists()


def test_rows_out_of_order_are_joined_from_several_row_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollstream.store.batch._ROW_GROUP_ROWS", 3)
    monkeypatch.setattr("rollstream.store.streams._HELD_BYTES", 1)

    def made(index: int) -> Rollout:
        whole = rollout(index, 0, length=2 + index)
        parts: list[Trajectory] = [
            rollout(index, 0, length=2 + number).trajectories[0] for number in range(index % 4)
        ]
        for one in parts:
            one.is_snapshot = True
        return Rollout(index, 0, whole.prompt_key, [*parts, whole.final], "sums")

    order = [7, 0, 19, 3, 11, 1, 18, 2, *[at for at in range(20) if at not in {7, 0, 19, 3, 11, 1, 18, 2}]]
    root = write_run(tmp_path / "run", map(made, order), n=1, prompts=20, rows=8)
    annotated(root)
    seen = set[tuple[RolloutKey, int]]()
    for table in Run.open(root).rows(["index", "repeat", "trajectory", "response_ids"], ["teacher"]):
        for row in table.to_pylist():
            seen.add((RolloutKey(row["index"], row["repeat"]), row["trajectory"]))
            count = len(row["response_ids"])
            assert row["stream.teacher"] == pytest.approx([value(PROMPT + at) for at in range(count)])
    assert len(seen) == sum(1 + index % 4 for index in range(20))


def test_shards_take_their_streams_along(tmp_path: Path) -> None:
    roots = [tmp_path / "shard0", tmp_path / "shard1"]
    for at, root in enumerate(roots):
        records = [rollout(index, 0) for index in range(at, 6, 2)]
        annotated(write_run(root, records, n=1, prompts=3, **{"generation.shard": f"{at}/2"}))
    merge_shards(roots, out := tmp_path / "out")
    assert streams_of(out) == streams_of(roots[0]) | streams_of(roots[1])
    assert Stream(out, "teacher").made["engine"] == "sglang"
    assert annotated(out).now == 0
