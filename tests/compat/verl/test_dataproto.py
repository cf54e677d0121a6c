"""Our DataProto files in verl's hands, and verl's in ours.

Runs in an environment that has verl (`make test-verl`); skipped elsewhere.
"""

from pathlib import Path
from types import MethodType, SimpleNamespace

import numpy as np
import pytest

verl = pytest.importorskip("verl")

import torch  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from verl import DataProto  # noqa: E402

from rollstream.generation.export_images import RunImages  # noqa: E402
from rollstream.integrations.verl.dataproto import read_dataproto  # noqa: E402
from rollstream.store.export.dataproto import (  # noqa: E402
    DataProtoOptions,
    dataproto_files,
    export_dataproto,
)
from rollstream.trajectory import Trajectory  # noqa: E402
from tests.unit.chat.vision import load_model, picture, write_model  # noqa: E402
from tests.unit.store.export.artifacts import rollouts, trajectory, write_artifact  # noqa: E402

PAD = 151_643
ROWS, N = 12, 4


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    """Prompts and responses of many lengths; four rollouts a prompt."""
    rng = np.random.default_rng(0)

    def ids(length: int) -> list[int]:
        return [int(token) for token in rng.integers(0, 150_000, length)]

    run = rollouts(
        *(
            trajectory(
                ids(int(rng.integers(1, 9))),
                [ids(int(rng.integers(1, 4))) for _ in range(int(rng.integers(1, 6)))],
                reward=float(rng.integers(0, 2)),
                reward_extra={"acc": at % 2 == 0},
                extra={"ability": "math"},
            )
            for at in range(ROWS)
        ),
        n=N,
    )
    return write_artifact(tmp_path / "a.parquet", run)


def load(artifact: Path, **options: int) -> list[DataProto]:
    target = artifact.with_name("out.pkl")
    export_dataproto(artifact, target, options=DataProtoOptions(pad_token_id=PAD, **options))
    return [DataProto.load_from_disk(str(path)) for path in dataproto_files(target)]


def test_it_is_what_verl_would_have_made(artifact: Path) -> None:
    (data,) = load(artifact)
    data.check_consistency()
    assert len(data) == ROWS
    from verl.utils.model import compute_position_id_with_mask

    positions = compute_position_id_with_mask(data.batch["attention_mask"])
    assert torch.equal(data.batch["position_ids"], positions)
    # verl saves it again: consolidated tensors that are the same bytes.
    data.save_to_disk(str(artifact.with_name("again.pkl")))
    ours = read_dataproto(artifact.with_name("out.pkl"))
    theirs = read_dataproto(artifact.with_name("again.pkl"))
    assert ours.batch.keys() == theirs.batch.keys()
    assert all(torch.equal(ours.batch[name], theirs.batch[name]) for name in ours.batch)
    assert {name: values.tolist() for name, values in ours.non_tensor_batch.items()} == {
        name: values.tolist() for name, values in theirs.non_tensor_batch.items()
    }
    assert ours.meta_info == theirs.meta_info


def test_concat_chunk_and_repeat(artifact: Path) -> None:
    (whole,) = load(artifact)
    parts = load(artifact, max_rows_per_file=5)
    assert [len(part) for part in parts] == [5, 5, 2]
    joined = DataProto.concat(parts)
    for name, tensor in whole.batch.items():
        assert torch.equal(joined.batch[name], tensor)
    for name, values in whole.non_tensor_batch.items():
        assert joined.non_tensor_batch[name].tolist() == values.tolist()
    chunks = whole.chunk(N)
    assert [len(chunk) for chunk in chunks] == [ROWS // N] * N
    repeated = whole.repeat(2)
    assert repeated.non_tensor_batch["uid"][:2].tolist() == [whole.non_tensor_batch["uid"][0]] * 2
    assert len(repeated.to_tensordict()) == 2 * ROWS


def test_padding_is_taken_off_by_verl(artifact: Path) -> None:
    from verl.workers.utils.padding import left_right_2_no_padding

    (data,) = load(artifact)
    trajectories = list(read_dataproto(artifact.with_name("out.pkl")).trajectories())
    tensors = left_right_2_no_padding(data.to_tensordict())
    ids = tensors["input_ids"].unbind()
    assert [row.tolist() for row in ids] == [one.prompt_ids + one.response_ids for one in trajectories]


def test_grpo_advantages(artifact: Path) -> None:
    from verl.trainer.ppo.core_algos import AdvantageEstimator
    from verl.trainer.ppo.ray_trainer import compute_advantage

    (data,) = load(artifact)
    data.batch["token_level_rewards"] = data.batch["rm_scores"]
    data = compute_advantage(data, adv_estimator=AdvantageEstimator.GRPO, num_repeat=N)
    rewards = data.batch["rm_scores"].sum(1).reshape(-1, N)
    wanted = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
    mask = data.batch["response_mask"]
    assert torch.allclose(data.batch["advantages"], wanted.reshape(-1, 1) * mask, atol=1e-5)
    assert rewards.std(1).max() > 0


def test_what_verl_wrote_is_read(tmp_path: Path) -> None:
    """As its agent loop makes them: not consolidated, with metrics, objects and numpy scalars."""
    columns = {
        "prompts": torch.tensor([[0, 5, 6], [4, 5, 6]]),
        "responses": torch.tensor([[7, 8], [9, 0]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]]),
        "response_mask": torch.tensor([[1, 0], [1, 0]]),
        "rollout_log_probs": torch.tensor([[-0.5, 0.0], [-0.25, 0.0]]),
        "rm_scores": torch.tensor([[0.0, 1.0], [0.0, 0.0]]),
    }
    data = DataProto(
        batch=TensorDict(columns, batch_size=2),
        non_tensor_batch={
            "__num_turns__": np.array([2, 2], np.int32),
            "raw_prompt": np.array([[{"role": "user", "content": "q"}], []], object),
            "uid": np.array(["a", "b"], object),
            "acc": np.array([True, False]),
        },
        meta_info={"metrics": [{"generate_sequences": 0.5}, {}], "reward_extra_keys": ["acc"]},
    )
    data.save_to_disk(str(tmp_path / "x.pkl"))
    found = read_dataproto(tmp_path / "x.pkl")
    assert all(torch.equal(found.batch[name], tensor) for name, tensor in columns.items())
    assert found.meta_info == data.meta_info
    one, two = found.trajectories()
    assert (one.prompt_ids, one.response_ids, one.response_mask) == ([5, 6], [7, 8], [1, 0])
    assert (one.reward, two.reward, two.response_ids) == (1.0, 0.0, [9])
    assert one.messages == [{"role": "user", "content": "q"}]


def test_snapshots_are_left_out_by_their_flag(tmp_path: Path) -> None:
    run = rollouts(trajectory([1], is_snapshot=True), trajectory([2]), trajectory([3], is_snapshot=True))
    (data,) = load(write_artifact(tmp_path / "a.parquet", run))
    finals = data.select_idxs(~data.non_tensor_batch["is_snapshot"])
    assert finals.batch["prompts"].tolist() == [[2]]
    assert finals.non_tensor_batch["repeat"].tolist() == [1]


def test_images_are_as_verls_agent_loop_gives_them(tmp_path: Path) -> None:
    from transformers import AutoConfig
    from transformers.models.qwen2_vl import Qwen2VLModel
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
    from verl.utils.model import extract_multi_modal_inputs

    _, processor = load_model(write_model(tmp_path / "model"))
    pictures = [picture(56, 84), picture(112, 56, "blue")]
    for number, image in enumerate(pictures):
        image.save(tmp_path / f"{number}.png")

    def shown(*images: int) -> Trajectory:
        parts = [{"type": "image", "image": str(tmp_path / f"{number}.png")} for number in images]
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "look at this"}]}]
        one = trajectory(processor.render(messages, [pictures[number] for number in images]))
        one.messages = [*messages, *one.messages[2:]]
        return one

    run = [(0,), (0, 1), (), (1,)]
    artifact = write_artifact(tmp_path / "a.parquet", rollouts(*(shown(*images) for images in run), n=1))
    images = RunImages(processor, str(tmp_path / "model"), "there are none")
    export_dataproto(
        artifact, tmp_path / "out.pkl", options=DataProtoOptions(pad_token_id=0), images=lambda: images
    )
    data = DataProto.load_from_disk(str(tmp_path / "out.pkl"))

    theirs = processor._processor  # as verl's `hf_processor` binds it, which needs torchvision to load one
    theirs.config = AutoConfig.from_pretrained(tmp_path / "model")
    for name in ("get_rope_index", "get_vision_position_ids"):
        setattr(theirs, name, MethodType(getattr(Qwen2VLModel, name), theirs))
    worker = SimpleNamespace(
        processor=theirs, tokenizer=theirs.tokenizer, _get_mm_processor_kwargs=lambda audios: {}
    )
    for row, numbers in enumerate(run):
        ids, mask = data.batch["input_ids"][row : row + 1], data.batch["attention_mask"][row : row + 1]
        given = {"images": [pictures[number] for number in numbers]} if numbers else {}
        output = SimpleNamespace(multi_modal_data=given, mm_processor_kwargs=None)
        wanted = AgentLoopWorker._compute_multi_modal_inputs(worker, output, ids)
        positions = AgentLoopWorker._compute_position_ids(worker, ids, mask, wanted)
        assert torch.equal(data.batch["position_ids"][row], positions[0])
        found = data.non_tensor_batch["multi_modal_inputs"][row]
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    inputs = extract_multi_modal_inputs(list(data.non_tensor_batch["multi_modal_inputs"]))
    assert inputs["image_grid_thw"].tolist() == [[1, 6, 4], [1, 6, 4], [1, 4, 8], [1, 4, 8]]
    assert len(DataProto.concat(data.chunk(2))) == len(run)
