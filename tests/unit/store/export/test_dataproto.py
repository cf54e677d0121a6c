"""DataProto exports: padded as verl pads, nothing lost, nothing made up, and refusals that say why."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollstream.errors import ConfigError, DamageError
from rollstream.integrations.verl.dataproto import DataProtoFile, read_dataproto
from rollstream.store.export.dataproto import (
    MEDIA,
    DataProtoOptions,
    dataproto_files,
    export_dataproto,
)
from rollstream.store.export.run import export_run
from rollstream.store.merge import MergeCancelledError
from rollstream.trajectory import Metrics, Rollout
from tests.unit.store.export.artifacts import conversation, rollouts, runs, trajectory, write_artifact
from tests.unit.store.fabric import commit_all

pytest.importorskip("tensordict")

PAD = 151_643


def export(folder: Path, run: list[Rollout], **options: Any) -> list[DataProtoFile]:
    artifact = write_artifact(folder / "a.parquet", run)
    export_dataproto(artifact, folder / "out.pkl", options=DataProtoOptions(pad_token_id=PAD, **options))
    return [read_dataproto(path) for path in dataproto_files(folder / "out.pkl")]


def padded(run: list[Rollout]) -> dict[str, list[list[float]]]:
    """verl's padding, a token at a time."""
    rows = [one for rollout in run for one in rollout.trajectories]
    prompt = max(1, *(len(row.prompt_ids) for row in rows))
    response = max(1, *(len(row.response_ids) for row in rows))
    wanted: dict[str, list[list[float]]] = {}
    for row in rows:
        left, right = prompt - len(row.prompt_ids), response - len(row.response_ids)
        seen = [0] * left + [1] * (len(row.prompt_ids) + len(row.response_ids)) + [0] * right
        values: dict[str, list[float]] = {
            "prompts": [PAD] * left + row.prompt_ids,
            "responses": row.response_ids + [PAD] * right,
            "response_mask": row.response_mask + [0] * right,
            "attention_mask": seen,
            "position_ids": [max(0, sum(seen[: at + 1]) - 1) for at in range(len(seen))],
        }
        values["input_ids"] = values["prompts"] + values["responses"]
        if row.response_logprobs is not None:
            values["rollout_log_probs"] = row.response_logprobs + [0.0] * right
        if row.reward is not None:
            values["rm_scores"] = [0.0] * response
            values["rm_scores"][max(0, len(row.response_ids) - 1)] = row.reward
        for name, line in values.items():
            wanted.setdefault(name, []).append(line)
    return wanted


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(run=runs(), per_file=st.one_of(st.none(), st.integers(1, 9)))
def test_padded_as_verl_pads(tmp_path: Path, run: list[Rollout], per_file: int | None) -> None:
    files = export(tmp_path, run, max_rows_per_file=per_file)
    wanted = padded(run)
    for file in files:
        assert file.batch.keys() == wanted.keys()
        assert file.meta_info == files[0].meta_info
        assert {name: (values.dtype, len(values)) for name, values in file.non_tensor_batch.items()} == {
            name: (values.dtype, len(file)) for name, values in files[0].non_tensor_batch.items()
        }
    for name, lines in wanted.items():
        found = [line for file in files for line in file.batch[name].tolist()]
        assert found == lines, name
    assert [len(file) for file in files[:-1]] == [per_file] * (len(files) - 1)
    for original, back in zip(
        (one for rollout in run for one in rollout.trajectories),
        (one for file in files for one in file.trajectories()),
        strict=True,
    ):
        assert (back.prompt_ids, back.response_ids, back.response_mask, back.response_logprobs) == (
            *(original.prompt_ids, original.response_ids, original.response_mask),
            original.response_logprobs,
        )
        assert (back.messages, back.num_turns, back.reward) == (
            *(original.messages, original.num_turns),
            original.reward,
        )


def test_what_is_no_tensor(tmp_path: Path) -> None:
    run = rollouts(
        trajectory(extra={"ability": "math", "index": 7}, reward_extra={"acc": True}, few_shot=1),
        trajectory(is_snapshot=True, reward_extra={"format": 0.5}),
        trajectory(),
    )
    (file,) = export(tmp_path, run)
    others = file.non_tensor_batch
    assert all(len(values) == 3 for values in others.values())
    assert others["__num_turns__"].dtype == np.int32
    assert others["__num_turns__"].tolist() == [4, 4, 4]
    assert others["raw_prompt"][0] == conversation(0, few_shot=1)
    assert others["raw_prompt"][1] == conversation(0)
    assert (others["index"].tolist(), others["repeat"].tolist()) == ([0, 0, 1], [0, 1, 0])
    assert others["uid"][0] == others["uid"][1] != others["uid"][2]
    assert others["ability"].tolist() == ["math", None, None]
    assert others["acc"].tolist() == [True, None, None]
    assert others["is_snapshot"].tolist() == [False, True, False]
    assert others["reward_model"][2] == {"style": "rule", "ground_truth": "2"}
    assert sorted(file.meta_info["reward_extra_keys"]) == ["acc", "format"]


def test_names_that_collide_are_left_out_aloud(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = rollouts(
        trajectory(extra={"responses": "x", "level": 1}, reward_extra={"level": 2, "uid": 3, "steps": [0.5]})
    )
    (file,) = export(tmp_path, run)
    assert file.non_tensor_batch["level"].tolist() == [2]
    assert "responses" not in file.non_tensor_batch
    assert file.non_tensor_batch["uid"].tolist() == [f"{0:032x}-0"]
    assert file.meta_info["reward_extra_keys"] == ["level"]
    assert "left out: responses, uid" in caplog.text


def test_a_prompt_that_cannot_be_told_is_none_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    best_of, stated = trajectory(), trajectory(extra={"prompt_messages": 1})
    best_of.metrics = Metrics(engine_calls=6)
    stated.metrics = Metrics(engine_calls=6)
    (file,) = export(tmp_path, rollouts(best_of, trajectory(), stated))
    assert file.non_tensor_batch["raw_prompt"][0] is None
    assert file.non_tensor_batch["raw_prompt"][1] == conversation(0)
    assert file.non_tensor_batch["raw_prompt"][2] == conversation(0)[:1]
    assert "prompt_messages" not in file.non_tensor_batch
    assert "1 of 3 rows have no raw_prompt" in caplog.text


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_rows_without_reward_are_never_a_silent_zero(tmp_path: Path, missing: float | None) -> None:
    run = rollouts(trajectory(reward=1.0), trajectory([9], reward=missing), trajectory(reward=-1.0))
    with pytest.raises(ConfigError, match=r"1 of 3 rows have no reward.*--unscored drop"):
        export(tmp_path, run)
    (kept,) = export(tmp_path, run, unscored="keep")
    assert len(kept) == 3
    assert "rm_scores" not in kept.batch
    assert kept.meta_info == {}
    (dropped,) = export(tmp_path, run, unscored="drop")
    assert dropped.batch["rm_scores"].sum(1).tolist() == [1.0, -1.0]
    assert dropped.non_tensor_batch["index"].tolist() == [0, 1]
    nobody = rollouts(trajectory(reward=missing))
    assert "rm_scores" not in export(tmp_path, nobody)[0].batch
    with pytest.raises(ConfigError, match="nothing would be left"):
        export(tmp_path, nobody, unscored="drop")


def test_side_calls_are_left_out(tmp_path: Path) -> None:
    title = trajectory(is_snapshot=True)
    title.extra = {"gateway": {"side_call": True}}
    text = trajectory(is_snapshot=True)
    text.extra = {"note": '"side_call":true'}
    (data,) = export(tmp_path, [Rollout(0, 0, "0" * 32, [title, text, trajectory()], "test")])
    assert data.non_tensor_batch["trajectory"].tolist() == [1, 2]


def test_images_are_refused_and_never_left_out(tmp_path: Path) -> None:
    shown = trajectory()
    shown.messages = [
        {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "what?"}]},
        *conversation(0)[1:],
    ]
    with pytest.raises(ConfigError, match=r"conversations with images, and nothing here reads them"):
        export(tmp_path, rollouts(trajectory(), shown))
    assert not dataproto_files(tmp_path / "out.pkl")
    shown.messages[0]["content"] = [{"type": "text", "text": "<image 7>", MEDIA: "image"}]  # not kept
    with pytest.raises(ConfigError, match="conversations with images"):
        export(tmp_path, rollouts(trajectory(), shown))
    spoken_of = trajectory()
    call = {"function": {"name": "draw", "arguments": {"type": "image"}}}
    spoken_of.messages = [
        {"role": "user", "content": '{"type":"image"}'},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    assert len(export(tmp_path, rollouts(trajectory(), spoken_of))[0]) == 2


def test_log_probs_only_where_every_row_has_them(tmp_path: Path) -> None:
    (file,) = export(tmp_path, rollouts(trajectory(), trajectory(logprobs=False)))
    assert "rollout_log_probs" not in file.batch


RUNS_OWN: dict[str, Any] = {"temperature": 0.7}
A_ROWS = {"sampling_params": {"top_k": 3, "max_tokens": 4}}
A_PROGRAMS = {"gateway": {"client_sampling": {"temperature": [1.0, 0.2], "seed": [3]}}}


@pytest.mark.parametrize(
    ("kind", "sampling", "extra", "warned"),
    [
        ("raw", {}, {}, ""),
        ("raw", {}, {"sampling_params": {"max_tokens": 3}}, ""),
        ("processed", RUNS_OWN, A_ROWS, ""),
        (None, RUNS_OWN, {}, ""),
        ("raw", RUNS_OWN, {}, "temperature 0.7"),
        ("raw", {}, A_ROWS, "top_k 3"),
        ("raw", {}, {"sampling_params": '{"min_p": 0.1}'}, "min_p 0.1"),
        ("raw", {}, A_PROGRAMS, "temperature 0.2"),
    ],
)
def test_log_probs_say_what_they_are(
    kind: Any,
    sampling: dict[str, Any],
    extra: dict[str, Any],
    warned: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = rollouts(trajectory(), trajectory(extra=extra))
    artifact = write_artifact(tmp_path / "a.parquet", run, logprobs=kind)
    export_dataproto(artifact, tmp_path / "out.pkl", sampling=sampling)
    assert read_dataproto(tmp_path / "out.pkl").meta_info.get("logprobs") == kind
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert [warned in message for message in warnings] == [True] * bool(warned)


def test_fixed_widths(tmp_path: Path) -> None:
    run = rollouts(trajectory([1, 2], [[3]]))
    (file,) = export(tmp_path, run, prompt_width=4, response_width=3)
    assert file.batch["input_ids"].tolist() == [[PAD, PAD, 1, 2, 3, PAD, PAD]]
    assert file.batch["position_ids"].tolist() == [[0, 0, 0, 1, 2, 2, 2]]
    for options, message in [
        ({"prompt_width": 1}, "--prompt-width 1 is too small: the longest prompt has 2"),
        ({"response_width": 0}, "--response-width must be at least 1"),
        ({"max_rows_per_file": 0}, "--max-rows-per-file must be at least 1"),
    ]:
        with pytest.raises(ConfigError, match=message):
            export(tmp_path, run, **options)


def test_a_relative_target_is_written_and_replaces_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = rollouts(*(trajectory() for _ in range(5)))
    (tmp_path / "there").mkdir()
    source = write_artifact(tmp_path / "a.parquet", run)
    monkeypatch.chdir(tmp_path)
    target = Path("there") / "out.pkl"
    Path("there/out-00000-of-00002.pkl.txt").touch()  # somebody's
    for per_file, count in [(2, 3), (5, 1), (1, 5), (4, 2), (None, 1)]:
        export_dataproto(
            source, target, options=DataProtoOptions(pad_token_id=PAD, max_rows_per_file=per_file)
        )
        assert len(dataproto_files(target)) == count
    assert len(read_dataproto(target).non_tensor_batch["uid"]) == 5
    assert len(list(Path("there").iterdir())) == 2


def test_a_rows_own_reward_model_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = {"style": "model", "ground_truth": "old", "weight": 2}
    run = rollouts(trajectory(extra={"reward_model": own}), trajectory())
    (file,) = export(tmp_path, run)
    truths = [one["ground_truth"] for one in file.non_tensor_batch["reward_model"]]
    assert file.non_tensor_batch["reward_model"][0] == {**own, "ground_truth": truths[0]}
    assert file.non_tensor_batch["reward_model"][1]["style"] == "rule"
    assert "left out" not in caplog.text


def test_cancelled_it_leaves_what_was_there(tmp_path: Path) -> None:
    export(tmp_path, rollouts(trajectory()))
    before = (tmp_path / "out.pkl").read_bytes()
    artifact = write_artifact(tmp_path / "a.parquet", rollouts(*(trajectory() for _ in range(4))))
    for patience in range(12):
        asked = iter([False] * patience + [True] * 1000)
        try:
            export_dataproto(artifact, tmp_path / "out.pkl", asked.__next__)
        except MergeCancelledError:
            assert (tmp_path / "out.pkl").read_bytes() == before
        else:
            break
    assert patience >= 3
    assert list(tmp_path.glob(".*")) == []


@pytest.mark.parametrize("at", [0.05, 0.3, 0.6, 0.8])
def test_a_damaged_artifact_is_named_and_nothing_is_written(tmp_path: Path, at: float) -> None:
    artifact = write_artifact(tmp_path / "a.parquet", rollouts(*(trajectory() for _ in range(300))))
    data = bytearray(artifact.read_bytes())
    for offset in range(int(len(data) * at), int(len(data) * at) + 40):
        data[offset] ^= 0x55
    artifact.write_bytes(data)
    with pytest.raises(DamageError, match=r"a\.parquet"):
        export_dataproto(artifact, tmp_path / "out.pkl")
    assert dataproto_files(tmp_path / "out.pkl") == []
    assert list(tmp_path.glob(".*")) == []


async def test_a_run_in_its_directory_and_beside_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    await commit_all(run, rollouts(*(trajectory() for _ in range(4))))
    (run / "checkpoint.json").write_text('{"total": 4}')
    (run / ".trajectories-00000-of-00002.pkl.999.tmp").touch()
    done = export_run(run, "dataproto", options={"pad_token_id": PAD, "max_rows_per_file": 2})
    assert [path.name for path in done.files] == [
        "trajectories-00000-of-00002.pkl",
        "trajectories-00001-of-00002.pkl",
    ]
    assert not list(run.glob(".*"))
    done = export_run(run, "dataproto", options={"pad_token_id": PAD})
    assert (done.files, done.rows) == ([run / "trajectories.pkl"], 4)
    target = tmp_path / "x.pkl"
    assert (
        export_run(run, "dataproto", target, options={"pad_token_id": PAD, "max_rows_per_file": 3}).rows == 4
    )
    with pytest.raises(ConfigError, match=r"x-00000-of-00002\.pkl exists; --force"):
        export_run(run, "dataproto", target, options={"pad_token_id": PAD})
    assert export_run(run, "dataproto", target, force=True, options={"pad_token_id": PAD}).files == [target]
    assert dataproto_files(target) == [target]


MEASURE = """
import sys
from pathlib import Path
from rollstream.store.export.dataproto import DataProtoOptions, export_dataproto

def memory(name):  # bytes of this process, resident now (VmRSS) or at most since it was asked to forget (VmHWM)
    return 1024 * int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0])

for rows in (100, 100, 1000):  # the first one also loads what is loaded once
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    options = DataProtoOptions(max_rows_per_file=rows)
    export_dataproto(Path(sys.argv[1]), Path(sys.argv[2]), options=options)
    print(memory("VmHWM") - before)
"""


def test_memory_is_that_of_the_output(tmp_path: Path) -> None:
    """A file of a tenth of the rows takes a tenth of the tensors' memory."""
    longest, short = trajectory(range(300), [range(700)]), trajectory([1], [[2]])
    run = rollouts(longest, *[short] * 999)  # all are padded to the longest
    artifact = write_artifact(tmp_path / "a.parquet", run)
    # In a process of its own: in this one other tests may have left room.
    command = [sys.executable, "-c", MEASURE, str(artifact), str(tmp_path / "out.pkl")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    added = [*map(int, done.stdout.split())]
    tensors = 1000 * (8 * (4 * 300 + 5 * 700) + 8 * 700)
    assert tensors / 2 < added[2] < 2.3 * tensors + (20 << 20)
    assert added[1] < tensors / 4 + (20 << 20)
