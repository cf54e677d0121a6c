"""Trajectories in memory as padded tensors."""

import math

import pytest

from rollstream.errors import DataError
from rollstream.training import collate, emission_views, to_dataproto
from rollstream.trajectory import STREAMS, Trajectory
from tests.unit.store.export.artifacts import trajectory

torch = pytest.importorskip("torch")


def two() -> list[Trajectory]:
    return [
        trajectory([1, 2, 3], [[4, 5], [6], [7]], policy_versions=[(0, 3), (1, 4)]),
        trajectory([9], [[8]], reward=None),
    ]


def test_names_and_paddings_are_those_of_trls_grpo() -> None:
    batch = collate(two(), pad_token_id=50)
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == {
        **dict.fromkeys(("prompt_ids", "prompt_mask"), (2, 3)),
        **dict.fromkeys(
            ("completion_ids", "completion_mask", "tool_mask", "sampling_per_token_logps"), (2, 4)
        ),
        "rewards": (2,),
    }
    assert batch["prompt_ids"].tolist() == [[1, 2, 3], [50, 50, 9]]
    assert batch["prompt_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    assert batch["completion_ids"].tolist() == [[4, 5, 6, 7], [8, 50, 50, 50]]
    assert batch["completion_mask"].tolist() == [[1, 1, 1, 1], [1, 0, 0, 0]]
    assert batch["tool_mask"].tolist() == [[1, 1, 0, 1], [1, 0, 0, 0]]
    assert batch["sampling_per_token_logps"][0].tolist() == two()[0].response_logprobs
    assert batch["rewards"][0] == 0.5 and math.isnan(batch["rewards"][1])
    assert "sampling_per_token_logps" not in collate([*two(), trajectory(logprobs=False)])


def test_a_view_of_each_call_is_all_sampled() -> None:
    views = emission_views(two()[0])
    assert [(view.prompt_ids, view.response_ids) for view in views] == [
        ([1, 2, 3], [4, 5]),
        ([1, 2, 3, 4, 5, 6], [7]),
    ]
    assert [view.policy_versions for view in views] == [[(0, 3), (1, 4)], [(0, 4)]]
    logprobs = two()[0].response_logprobs
    assert logprobs is not None
    assert [view.response_logprobs for view in views] == [logprobs[:2], logprobs[3:]]
    batch = collate(views)
    assert bool((batch["tool_mask"] == batch["completion_mask"]).all())


def test_streams_come_by_their_names() -> None:
    """R8: what a row does not have is no number, and no zero either."""
    first, second = two()
    first.extra = {
        STREAMS: {"teacher": [-1.0, -2.0, 0.0, -3.0], "entropy": [0.1, 0.2, 0.0, 0.3]},
        "color": "red",
    }
    second.extra = {STREAMS: {"entropy": [0.4]}}
    batch = collate([first, second])
    assert batch["stream.teacher"].dtype == torch.float32
    assert batch["stream.teacher"].nan_to_num(nan=9.0).tolist() == [
        [-1.0, -2.0, 0.0, -3.0],
        [9.0, 0.0, 0.0, 0.0],
    ]
    assert batch["stream.entropy"][1].tolist() == [torch.tensor(0.4).item(), 0.0, 0.0, 0.0]
    views = emission_views(first)
    assert [view.streams["teacher"] for view in views] == [[-1.0, -2.0], [-3.0]]
    assert all(view.extra["color"] == "red" for view in views)
    assert not [name for name in collate(two()) if name.startswith("stream")]


def test_without_token_ids_there_is_nothing_to_pad() -> None:
    with pytest.raises(DataError, match="no trajectories"):
        collate([])
    with pytest.raises(DataError, match="no tokenizer"):
        collate([trajectory([])])


def test_verls_dataproto() -> None:
    pytest.importorskip("verl")
    scored = [trajectory([1, 2], [[4, 5], [6], [7]], reward_extra={"acc": 1}), trajectory([9], [[8]])]
    data = to_dataproto(scored, uids=["a", "a"], pad_token_id=50)
    assert data.batch["input_ids"].tolist() == [[1, 2, 4, 5, 6, 7], [50, 9, 8, 50, 50, 50]]
    assert data.batch["rm_scores"].sum(-1).tolist() == [0.5, 0.5]
    assert data.non_tensor_batch["uid"].tolist() == ["a", "a"]
    assert data.non_tensor_batch["emission_views"][0] == list(scored[0].generations())
    assert data.non_tensor_batch["acc"].tolist() == [1, None]
    assert len(data[:1]) == 1
    scored[0].extra = {STREAMS: {"teacher": [-1.0, -2.0, 0.0, -3.0]}, "color": "red"}
    data = to_dataproto(scored)
    found, wanted = (one["stream.teacher"].nan_to_num(nan=9.0) for one in (data.batch, collate(scored)))
    assert torch.equal(found, wanted)
    assert STREAMS not in data.non_tensor_batch and data.non_tensor_batch["color"].tolist() == ["red", None]
