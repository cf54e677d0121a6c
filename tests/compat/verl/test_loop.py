"""rollstream's agent loops run by verl's own worker; its client is scripted, all else is real."""

import asyncio
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("verl")

from transformers import AutoTokenizer
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from rollstream.config.load import compose, to_settings
from rollstream.demo import MODEL_PATH
from rollstream.errors import ConfigError, GroupFailedError
from rollstream.integrations.verl import loop as loop_module
from rollstream.integrations.verl.compose import compose_verl
from rollstream.integrations.verl.stream import StreamingAgentLoopWorker
from rollstream.integrations.verl.worker import SampleCalls, to_trajectories
from rollstream.reward.custom import load_reward
from rollstream.rollout.validate import check_trajectories
from rollstream.rollout.worker import score_trajectories
from rollstream.trajectory import PromptRow
from tests.unit.store.export.artifacts import trajectory

ROW = {"raw_prompt": [{"role": "user", "content": "10 + 11 ="}], "data_source": "sums", "index": 0}
ANSWERS = (
    '<tool_call>\n{"name": "note", "arguments": {"key": "a", "content": "b"}}\n</tool_call>',
    '<tool_call>\n{"name": "deleteContext", "arguments": {"msg_id": 1}}\n</tool_call>',
    "21",
)


class ScriptedClient(LLMServerClient):  # type: ignore[misc]
    """Gives each conversation the same answers, turn by turn, with the turn as the weights' version."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.asked: dict[str, list[dict[str, Any]]] = {}
        self._tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)

    async def generate(self, request_id: str, **request: Any) -> TokenOutput:
        turns = self.asked.setdefault(request_id, [])
        turns.append(request)
        text = ANSWERS[min(len(turns), len(ANSWERS)) - 1]
        ids = [*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id]
        ids = ids[: request["sampling_params"]["max_tokens"]]
        return TokenOutput(
            token_ids=ids,
            log_probs=[-0.5] * len(ids),
            stop_reason="completed",
            extra_fields={"global_steps": len(turns)},
        )


def worker(
    tmp_path: Path,
    kind: type[Any],
    *,
    loop: str = "context_agent",
    options: str = "",
    use_v1: bool = True,
    estimator: str = "grpo",
) -> Any:
    (tmp_path / "loops.yaml").write_text(
        "- name: mine\n  _target_: rollstream.integrations.verl.loop.RollstreamLoop\n"
        f"  loop: {loop}\n{options}"
    )
    words = [
        f"actor_rollout_ref.model.path={MODEL_PATH}",
        "actor_rollout_ref.rollout.response_length=200",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={tmp_path / 'loops.yaml'}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=mine",
        "data.max_prompt_length=900",
        "data.train_files=none.parquet",
    ]
    config = compose_verl(to_settings(compose(words)))
    config.trainer.use_v1 = use_v1
    config.algorithm.adv_estimator = estimator
    return kind(config, ScriptedClient(config))


async def test_a_model_that_edits_its_context_gives_several_outputs(tmp_path: Path) -> None:
    made = worker(tmp_path, StreamingAgentLoopWorker)
    calls = SampleCalls()
    outputs = await made.run_sample(ROW, index=4, sampling_params={"temperature": 0.5}, calls=calls)
    assert [one.extra_fields["is_snapshot"] for one in outputs] == [True, False]
    (turns,) = made.llm_client.asked.values()
    assert {turn["sampling_params"]["temperature"] for turn in turns} == {0.5}
    found = to_trajectories(outputs, calls.calls, messages=ROW["raw_prompt"], decode=lambda ids: "")  # type: ignore[arg-type]
    check_trajectories(found, logprobs=True)
    sampled = sum(sum(one.response_mask) for one in found)
    assert sampled == sum(len(made.llm_client._tokenizer.encode(text)) + 1 for text in ANSWERS)
    snapshot, final = found
    assert "deleteContext" in str(snapshot.messages[-1]) and final.messages[-1]["content"] == "21"
    assert (snapshot.finish_reason, final.finish_reason) == ("stop", "stop")
    assert {one.reward for one in found} == {None}  # verl's to give


async def test_a_row_says_how_it_is_sampled(tmp_path: Path) -> None:
    made = worker(tmp_path, StreamingAgentLoopWorker)
    given = {"max_tokens": 5, "min_p": 0.1, "stop": ["."], "repetition_penalty": 1.0}
    await made.run_sample(ROW, index=0, sampling_params=given)
    (turns,) = made.llm_client.asked.values()
    asked = turns[0]["sampling_params"]
    assert (asked["max_tokens"], asked["min_p"], asked["stop"]) == (5, 0.1, ["."])


async def test_a_worker_that_could_not_be_made_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a trainer shows its rollouts a moment later may be there: a file, a tool's server."""
    made = worker(tmp_path, StreamingAgentLoopWorker)
    with monkeypatch.context() as patched:
        patched.setattr(loop_module, "load_agents", lambda settings: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await made.run_sample(ROW, index=0)
    assert await made.run_sample(ROW, index=0)


async def test_conversations_have_ids_of_their_own_whatever_the_rows_say(tmp_path: Path) -> None:
    made = worker(tmp_path, StreamingAgentLoopWorker)
    await asyncio.gather(*(made.run_sample(ROW, index=0, repeat=repeat) for repeat in (0, 1, 1)))
    assert len(made.llm_client.asked) == 3  # by them verl's balancer spreads conversations over servers
    assert {len(turns) for turns in made.llm_client.asked.values()} == {len(ANSWERS)}


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What verl's trainer puts into its queue, whose package is not installed here."""
    given: list[dict[str, Any]] = []

    async def batch_put(**what: Any) -> None:
        given.append(what)

    queue = ModuleType("transfer_queue")
    queue.init, queue.async_kv_batch_put = (lambda *_: None), batch_put  # type: ignore[attr-defined]
    queue.__getattr__ = lambda name: type(name, (), {})  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "transfer_queue", queue)
    if (importing := sys.modules.get("verl.trainer.ppo.v1.agent_loop_tq")) is not None:  # by an earlier test
        monkeypatch.setattr(importing, "tq", queue)
    return given


async def test_verls_trainer_puts_every_trajectory_into_its_queue(
    tmp_path: Path, put: list[dict[str, Any]]
) -> None:
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

    trainers_worker = AgentLoopWorkerTQ.__ray_metadata__.modified_class
    trajectory = {"step": 1, "sample_index": 0, "rollout_n": 0, "validate": False}
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    row = {**ROW, "uid": "u", "session_id": 1, "global_steps": 1}

    async def run(**how: Any) -> Any:
        made = worker(tmp_path, trainers_worker, **how)
        await made._run_agent_loop(dict(sampling), trajectory, agent_name="mine", **row)
        return put.pop()

    given = await run()
    assert given["keys"] == ["u_1_0", "u_1_1"]
    assert [tag["max_global_steps"] for tag in given["tags"]] == [2, 3]
    assert [len(ids) for ids in given["fields"]["responses"]] == [
        tag["response_len"] for tag in given["tags"]
    ]
    with pytest.raises(ConfigError, match=r"set trainer\.use_v1=true"):
        await run(use_v1=False)


async def test_a_snapshots_own_reward_counts_in_verls_training(
    tmp_path: Path, put: list[dict[str, Any]]
) -> None:
    import numpy as np
    import torch
    from verl import DataProto
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    trainers_worker = AgentLoopWorkerTQ.__ray_metadata__.modified_class
    (tmp_path / "reward.py").write_text("def compute_score(**row):\n    return 1.0\n")

    async def verls_reward(outputs: list[Any], kwargs: dict[str, Any]) -> None:
        outputs[-1].reward_score = 0.25  # its reward workers are actors

    async def run(loop: str, *, reward: bool = True, estimator: str = "grpo_vectorized") -> Any:
        loops = tmp_path / "own.yaml"
        loops.write_text(f"- name: strict\n  _target_: rollstream.agent.context.ContextAgent\n  {loop}\n")
        words = [f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loops}"]
        words += [f"custom_reward_function.path={tmp_path / 'reward.py'}"] if reward else []
        options = f"  overrides: [{', '.join(words)}]\n"
        made = worker(tmp_path, trainers_worker, loop="strict", options=options, estimator=estimator)
        row = {**ROW, "uid": "u", "session_id": 0, "global_steps": 1}
        made._compute_score = made._compute_score if reward else verls_reward
        info = {"step": 1, "sample_index": 0, "rollout_n": 0, "validate": False}
        await made._run_agent_loop({"temperature": 1.0, "logprobs": True}, info, agent_name="mine", **row)
        return put.pop()

    given = await run("context_penalty: 0.01")
    snapshot, final = (one.sum().item() for one in given["fields"]["rm_scores"])
    lengths = [tag["seq_len"] for tag in given["tags"]]
    assert snapshot == pytest.approx(-0.01 * lengths[0], rel=1e-5)
    assert final == 1.0
    by_verl = await run("context_penalty: 0.01", reward=False)
    assert [one.sum().item() for one in by_verl["fields"]["rm_scores"]] == [pytest.approx(snapshot), 0.25]
    (same, _) = (one.sum().item() for one in (await run("snapshot_scoring: own"))["fields"]["rm_scores"])
    assert same == 1.0
    for how in (
        {"loop": "context_penalty: 0.01", "estimator": "grpo"},
        {"loop": "snapshot_scoring: own", "reward": False},
        {"loop": "snapshot_scoring: none"},
    ):
        with pytest.raises(ConfigError):
            await run(**how)

    # Four trajectories of two rollouts, as verl's trainer makes advantages of them.
    rewards = torch.tensor([snapshot, 1.0, -0.5, 0.0])
    data = DataProto.from_dict(
        {"token_level_rewards": rewards[:, None], "response_mask": torch.ones(4, 1)},
        {"uid": np.array(["u"] * 4, dtype=object)},
    )
    keys = ["u_0_0", "u_0_1", "u_1_0", "u_1_1"]
    found = compute_advantage_for_multi_trajectories(data, keys, "grpo_vectorized", num_repeat=2)
    expected = (rewards - rewards.mean()) / rewards.std()
    assert found.batch["advantages"][:, 0].tolist() == pytest.approx(expected.tolist(), abs=1e-4)


async def test_a_rollout_that_fails_says_why(tmp_path: Path) -> None:
    made = worker(tmp_path, StreamingAgentLoopWorker)
    long = ROW | {"raw_prompt": [{"role": "user", "content": "1 " * 2000}]}
    with pytest.raises(GroupFailedError, match="max_prompt_length"):
        await made.run_sample(long, index=0)


async def test_step_rewards_stay_out_of_what_verl_makes_means_of(tmp_path: Path) -> None:
    """verl makes one array of each part of the reward, which lists of different lengths are none of."""
    (tmp_path / "steps.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info, trajectory):\n"
        "    turns = [*trajectory.generations()]\n"
        '    return {"score": 1.0, "acc": 0.5, "steps": [0.0] * len(turns)}\n'
    )
    reward = load_reward(str(tmp_path / "steps.py"))
    one, other = trajectory(reward=None), trajectory([1], [[2]], reward=None)
    for each in (one, other):
        row = PromptRow(0, "", [], "", None, {})
        await score_trajectories(reward, row, [each], decode=lambda ids: "", snapshots="outcome")
    reward.close()
    fields = [loop_module.to_output(each, {}).extra_fields for each in (one, other)]
    assert [each["reward_extra_info"] for each in fields] == [{"acc": 0.5}] * 2
    assert [each["steps"] for each in fields] == [[0.0, 0.0], [0.0]]
