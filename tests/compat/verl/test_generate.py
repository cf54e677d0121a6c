"""`generate_sequences` of rollstream's loops: verl's DataProto in and out, by the demo model."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

pytest.importorskip("verl")

import torch
from verl import DataProto
from verl.trainer.ppo.core_algos import AdvantageEstimator
from verl.trainer.ppo.ray_trainer import compute_advantage

from rollstream.agent.registry import AgentLoops
from rollstream.demo import MODEL_PATH
from rollstream.errors import DataError, GenerationStoppedError, GroupFailedError
from rollstream.integrations.verl import SequenceGenerator
from rollstream.rollout.worker import RolloutWorker

ROWS, N = 3, 2


def batch(questions: list[str]) -> DataProto:
    prompts = np.empty(len(questions), object)
    prompts[:] = [[{"role": "user", "content": question}] for question in questions]
    truths = [{"style": "rule", "ground_truth": str(21 + 2 * i)} for i in range(len(questions))]
    return DataProto.from_single_dict(
        {
            "dummy_tensor": torch.zeros(len(questions), 1),
            "raw_prompt": prompts,
            "data_source": np.array(["exact_match"] * len(questions), object),
            "reward_model": np.array(truths, object),
            "uid": np.array([f"u{i}" for i in range(len(questions))], object),
        }
    ).repeat(N, interleave=True)


def sums() -> DataProto:
    return batch(
        [
            f"State the final answer to the following arithmetic problem: {10 + i} + {11 + i} ="
            for i in range(ROWS)
        ]
    )


def generator(*words: str) -> SequenceGenerator:
    return SequenceGenerator(
        [
            f"actor_rollout_ref.model.path={MODEL_PATH}",
            "actor_rollout_ref.rollout.name=openvino",
            "actor_rollout_ref.rollout.response_length=48",
            "data.max_prompt_length=700",
            *words,
        ]
    )


@pytest.fixture(scope="module")
def rollouts() -> Iterator[SequenceGenerator]:
    with generator() as made:
        yield made


def test_a_batch_as_verls_trainers_have_it(rollouts: SequenceGenerator) -> None:
    given = sums()
    output = rollouts.generate_sequences(given)
    output.check_consistency()
    assert len(output) == ROWS * N
    shapes = {name: tuple(tensor.shape[1:]) for name, tensor in output.batch.items()}
    assert shapes == {
        **dict.fromkeys(("responses", "response_mask", "rollout_log_probs", "rm_scores"), (48,)),
        **dict.fromkeys(("input_ids", "attention_mask", "position_ids"), (748,)),
        "prompts": (700,),
    }
    mask = output.batch["response_mask"]
    assert torch.equal(mask, output.batch["attention_mask"][:, 700:])
    assert (output.batch["rollout_log_probs"][mask == 0] == 0).all()
    rewards = output.batch["rm_scores"].sum(1)
    assert set(rewards.tolist()) <= {0.0, 1.0} and rewards.sum() > 0
    # What a trainer does next.
    joined = given.union(output)
    joined.batch["token_level_rewards"] = joined.batch["rm_scores"]
    advantages = compute_advantage(joined, adv_estimator=AdvantageEstimator.GRPO, num_repeat=N)
    assert advantages.batch["advantages"].shape == mask.shape


def test_greedy_rows(rollouts: SequenceGenerator) -> None:
    given = sums()
    given.non_tensor_batch["__do_sample__"] = np.array([False] * len(given))
    one, two = (rollouts.generate_sequences(given).batch["responses"] for _ in range(2))
    assert torch.equal(one, two)
    assert torch.equal(one[::2], one[1::2])


def test_a_loop_that_edits_its_context_makes_more_rows(tmp_path: Any) -> None:
    (tmp_path / "twice.py").write_text(
        "from rollstream.agent.conversation import Conversation\n"
        "from rollstream.agent.single_turn import SingleTurnAgent\n"
        "class Twice(SingleTurnAgent):\n"
        "    async def run(self, sampling, **row):\n"
        "        first = await super().run(sampling, **row)\n"
        "        final = await super().run(sampling, **row)\n"
        "        first.is_snapshot = True\n"
        "        return [first, final]\n"
    )
    (tmp_path / "loops.yaml").write_text(f"- name: twice\n  _target_: {tmp_path / 'twice.py'}:Twice\n")
    words = [
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={tmp_path / 'loops.yaml'}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=twice",
    ]
    with generator(*words) as made:
        output = made.generate_sequences(sums())
    assert output.non_tensor_batch["row"].tolist() == [at for at in range(ROWS * N) for _ in range(2)]
    assert output.non_tensor_batch["is_snapshot"].tolist() == [True, False] * (ROWS * N)
    assert output.non_tensor_batch["uid"][:4].tolist() == ["u0"] * 4
    scores = output.batch["rm_scores"].sum(1)
    assert torch.equal(scores[::2], scores[1::2])  # a snapshot has the outcome's


def test_a_rollout_that_fails_is_an_error(rollouts: SequenceGenerator) -> None:
    with pytest.raises(GroupFailedError, match=r"row 2 failed.*max_prompt_length"):
        rollouts.generate_sequences(batch(["1 + 1 =", "1 " * 2000]))


def test_batches_at_once_are_not_mixed_up(
    rollouts: SequenceGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, create = [], AgentLoops.create

    def noted(self: AgentLoops, *args: Any, request_id: str) -> Any:
        ids.append(request_id)
        return create(self, *args, request_id=request_id)

    monkeypatch.setattr(AgentLoops, "create", noted)
    with ThreadPoolExecutor(2) as threads:
        left, right = threads.map(rollouts.generate_sequences, [sums(), sums()])
    assert len(left) == len(right) == ROWS * N
    assert len(set(ids)) == len(ids) == 2 * ROWS * N


def test_an_interrupted_batch_ends(rollouts: SequenceGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = threading.Event(), threading.Event()

    async def endless(self: RolloutWorker, *args: Any, **kwargs: Any) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    def interrupted(future: Any, timeout: Any) -> None:
        assert begun.wait(60)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(RolloutWorker, "run", endless)
        patched.setattr(Future, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rollouts.generate_sequences(sums())
    assert ended.wait(60)
    assert len(rollouts.generate_sequences(sums())) == ROWS * N


def test_what_a_closed_one_is_asked_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for ever, not for what was under way either."""
    begun = threading.Event()

    async def endless(self: RolloutWorker, *args: Any, **kwargs: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(RolloutWorker, "run", endless)
    made = generator()
    with ThreadPoolExecutor(1) as threads:
        under_way = threads.submit(made.generate_sequences, sums())
        assert begun.wait(60)
        made.close()
        with pytest.raises(GenerationStoppedError, match="was stopped"):
            under_way.result(60)
    with pytest.raises(GenerationStoppedError, match="was stopped"):
        made.generate_sequences(sums())
    with pytest.raises(GenerationStoppedError, match="was stopped"):
        made.update_weights("weights", 1)
    made.close()


def test_an_empty_batch_is_refused(rollouts: SequenceGenerator) -> None:
    with pytest.raises(DataError, match="no rows"):
        rollouts.generate_sequences(sums()[:0])
