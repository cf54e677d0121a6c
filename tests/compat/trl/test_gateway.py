"""Rollouts of an agent program in a training: each of its conversations is a row."""

from argparse import Namespace

import pytest

pytest.importorskip("trl")
pytest.importorskip("openvino_genai")
pytest.importorskip("reasoning_gym")
pytest.importorskip("agents", reason="openai-agents is not installed")

from examples.gateway.train import environment
from examples.training import load, train


@pytest.mark.slow
def test_an_agent_of_the_agents_sdk_is_trained() -> None:
    options = Namespace(steps=2, seed=0, curve=None)
    logged = train(options, *load(), environment, per_device_train_batch_size=16)
    assert [entry["step"] for entry in logged] == [1, 2]
    for entry in logged:
        assert 2 <= entry["rollstream/trajectories"] <= 3  # it is asked twice, or three times
        assert entry["rollstream/failed"] == 0 and 0 <= entry["reward"] <= 1
