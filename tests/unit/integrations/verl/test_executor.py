"""What `executor=verl` says before it starts anything, and what it makes of a configuration."""

import importlib.util
from pathlib import Path

import pytest

from rollstream.config.load import compose, to_settings
from rollstream.demo import MODEL_PATH
from rollstream.errors import ConfigError
from rollstream.generation.plan import check_executor
from rollstream.generation.run import run_generation
from rollstream.integrations.verl.executor import check_own_servers
from rollstream.integrations.verl.recipe import VerlLoops, plain_setup


def words(run_dir: Path, *more: str) -> list[str]:
    return [
        f"actor_rollout_ref.model.path={MODEL_PATH}",
        "data.train_files=rows.jsonl",
        f"trainer.default_local_dir={run_dir}",
        "generation.executor=verl",
        *more,
    ]


def test_missing_packages_are_said_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    hidden = ("verl", "cachetools")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in hidden else real(name))
    with pytest.raises(ConfigError, match=r"verl.*cachetools.*pip install 'rollstream\[verl\]'"):
        run_generation(words(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_other_executors_ask_for_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_executor(to_settings(compose(words(tmp_path, "generation.executor=local"))))


@pytest.mark.parametrize(
    ("name", "word", "message"),
    [
        ("sglang", "generation.seed=3", r"has sglang.*generation\.seed.*name=vllm"),
        ("trtllm", "generation.seed=3", r"has trtllm.*generation\.seed"),
        ("vllm", "generation.seed=3", None),
        ("vllm", "actor_rollout_ref.rollout.extra_sampling.min_p=0.1", None),
        ("vllm", "actor_rollout_ref.rollout.extra_sampling.regex=a", r"extra_sampling\.regex"),
        ("trtllm", "actor_rollout_ref.rollout.extra_sampling.min_p=0.1", r"extra_sampling\.min_p"),
        ("vllm", "actor_rollout_ref.rollout.server_urls=[http://a:1]", r"server_urls is for rollstream's"),
        ("vllm", "actor_rollout_ref.rollout.engine_kwargs.timeout=3", r"engine_kwargs is for rollstream's"),
        ("vllm", "actor_rollout_ref.rollout.launch.where=ray", r"launch is for rollstream's"),
    ],
)
async def test_what_servers_of_verls_do_not_take_is_refused(
    tmp_path: Path, name: str, word: str, message: str | None
) -> None:
    override = f'generation.verl_overrides=["actor_rollout_ref.rollout.name={name}"]'
    settings = to_settings(compose(words(tmp_path, override, word)))
    setup = await plain_setup(settings, VerlLoops())
    if message is None:
        check_own_servers(settings, setup, name)
    else:
        with pytest.raises(ConfigError, match=message):
            check_own_servers(settings, setup, name)
