"""What of a run's configuration reaches its workers, and what they make of it."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rollstream.config.load import compose
from rollstream.demo import MODEL_PATH
from rollstream.errors import ConfigError
from rollstream.generation.execution import SetupRecipe, worker_config
from rollstream.trajectory import PromptRow, Rollout

ROLLOUT = "actor_rollout_ref.rollout"


def config(*words: str, workers: int = 3, urls: Any = None) -> Any:
    composed = compose([f"actor_rollout_ref.model.path={MODEL_PATH}", *words])
    return OmegaConf.create(worker_config(composed, workers, urls))


def test_workers_share_the_limits_of_an_endpoint() -> None:
    words = [f"{ROLLOUT}.name=openai", f"{ROLLOUT}.server_urls=[http://a:1]"]
    limits = f"{ROLLOUT}.engine_kwargs={{requests_per_minute: 100, tokens_per_minute: 7, concurrency: 100}}"
    kwargs = config(*words, limits).actor_rollout_ref.rollout.engine_kwargs
    assert kwargs == {"requests_per_minute": 33, "tokens_per_minute": 2, "concurrency": 100}
    assert config(*words).actor_rollout_ref.rollout.engine_kwargs == {}
    with pytest.raises(ConfigError, match=r"tokens_per_minute=7 is less than one for each of 8 workers"):
        config(*words, limits, workers=8)


def test_workers_are_told_the_urls_of_now_and_nothing_of_the_launch() -> None:
    urls = ["http://a:1"]
    words = [f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.launch.where=ray", f"{ROLLOUT}.launch.replicas=2"]
    given = config(*words, f"{ROLLOUT}.tensor_model_parallel_size=2", urls=lambda: urls)
    rollout = given.actor_rollout_ref.rollout
    assert rollout.server_urls == urls
    assert rollout.launch == compose().actor_rollout_ref.rollout.launch
    assert rollout.tensor_model_parallel_size == 1
    urls[:] = ["http://b:1", "http://c:1"]
    assert config(*words, urls=lambda: urls).actor_rollout_ref.rollout.server_urls == urls


@pytest.mark.slow
async def test_each_worker_has_a_transformers_engine_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    recipe = SetupRecipe(
        config_yaml=OmegaConf.to_yaml(
            config(
                f"{ROLLOUT}.name=hf",
                f"{ROLLOUT}.response_length=4",
                f"{ROLLOUT}.engine_kwargs={{num_threads: 1}}",
                "data.max_prompt_length=64",
            )
        ),
        loop_names=("single_turn_agent",),
        shows_images=False,
        data_sources=("test",),
        log_dir=str(tmp_path),
        follows=False,
    )
    built = [await recipe.build(number) for number in range(2)]
    try:
        assert built[0].engine is not built[1].engine
        for one in built:
            assert one.engine is not None and one.follow is None
            row = PromptRow(0, f"{0:032x}", [{"role": "user", "content": "1 + 1 ="}], "test")
            assert isinstance(await one.worker.run(row, 0), Rollout)
            assert one.counts.finished == 1
    finally:
        for one in built:
            await one.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["worker-0", "worker-1"]
