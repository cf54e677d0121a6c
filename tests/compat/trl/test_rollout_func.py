"""The plain `rollout_func`, on TRL's own `GRPOTrainer`."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from trl import GRPOTrainer

from rollstream.errors import ConfigError, EngineUnavailableError
from rollstream.integrations.trl import EnvRolloutFunction
from rollstream.integrations.trl.groups import EnvironmentGroups
from rollstream.integrations.trl.rows import env_reward
from rollstream.rollout.retry import RetryPolicy
from rollstream.training import weight_updates
from tests.compat.trl.parts import at_once, environment, load, numbers_of, rows, settings


def test_rows_that_cannot_be_told_apart_are_refused(tmp_path: Path) -> None:
    from datasets import concatenate_datasets

    data, env = rows(2), environment(tmp_path)
    EnvRolloutFunction(env, rows=concatenate_datasets([data, data]))  # the same twice is no matter
    other = data.map(lambda row: {"answer": row["answer"] + "0"})
    with pytest.raises(ConfigError, match="row 2 has the prompt of an earlier one"):
        EnvRolloutFunction(env, rows=concatenate_datasets([data, other]))


@pytest.mark.parametrize("engine", ["hf", "openvino"])
def test_rollouts_of_the_weights_of_each_step(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    model, tokenizer = load()
    dataset = rows(10)
    function = EnvRolloutFunction(environment(tmp_path, engine), rows=dataset)
    seen: list[dict[str, Any]] = []
    sampled = numbers_of(monkeypatch)

    def noting(prompts: Any, trainer: Any) -> Any:
        fields = function(prompts, trainer)
        seen.append(fields)
        return fields

    trainer = GRPOTrainer(
        model,
        reward_funcs=env_reward,
        args=settings(tmp_path, max_steps=3, learning_rate=3e-3),
        train_dataset=dataset,
        processing_class=tokenizer,
        rollout_func=noting,
    )
    differences = []
    plain = trainer._generate_and_score_completions

    def compare(inputs: Any) -> Any:
        output = plain(inputs)
        import torch

        with torch.no_grad():
            now, _, _ = trainer._get_per_token_logps_and_entropies(
                trainer.model,
                torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1),
                torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1),
                output["completion_ids"].size(1),
            )
        differences.append(
            float(((now - output["sampling_per_token_logps"]) * output["completion_mask"]).abs().max())
        )
        return output

    trainer._generate_and_score_completions = compare
    try:
        trainer.train()
    finally:
        function.close()
    assert len(seen) == 3 and max(differences) < 1e-3
    assert len(sampled) == len(set(sampled)) == 24
    assert all(set(fields["env_reward"]) <= {0.0, 1.0} for fields in seen)
    first = [tuple(ids) for ids in seen[0]["completion_ids"]]
    assert len(first) == 8


def test_settings_that_change_what_is_sampled_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    model, tokenizer = load()
    args = settings(tmp_path, max_steps=1)
    args.generation_kwargs = {"suppress_tokens": [5]}  # as a `GRPOConfig` has them
    function = EnvRolloutFunction(environment(tmp_path), rows=rows(10))
    trainer = GRPOTrainer(
        model,
        reward_funcs=env_reward,
        args=args,
        train_dataset=rows(10),
        processing_class=tokenizer,
        rollout_func=function,
    )
    with pytest.raises(ConfigError, match="generation_kwargs"):
        trainer.train()
    trainer.args.generation_kwargs = None
    tokenizer.chat_template = "{{ messages[0].content }} A:"
    with pytest.raises(ConfigError, match="another chat template"):
        trainer.train()
    function.close()


def trained(function: EnvRolloutFunction, folder: Path, **changed: Any) -> GRPOTrainer:
    """A trainer that has trained with it; it is closed."""
    model, tokenizer = load()
    trainer = GRPOTrainer(
        model,
        reward_funcs=env_reward,
        args=settings(folder, **changed),
        train_dataset=rows(10),
        processing_class=tokenizer,
        rollout_func=function,
    )
    try:
        trainer.train()
    finally:
        function.close()
    return trainer


def test_its_rollouts_have_the_environments_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    seen = at_once(monkeypatch)
    function = EnvRolloutFunction(environment(tmp_path, "hf", "generation.max_in_flight=3"), rows=rows(10))
    trained(function, tmp_path, max_steps=1)
    assert max(seen) == 3


def test_an_engine_that_is_away_at_an_update_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.setattr(weight_updates, "_AGAIN", RetryPolicy(max_attempts=1, delay=0.01, delay_max=0.01))
    function = EnvRolloutFunction(environment(tmp_path, "openvino"), rows=rows(10))
    plain, asked = EnvironmentGroups.update_weights, []

    async def away(self: EnvironmentGroups, source: str, version: int) -> None:
        asked.append(version)
        if len(asked) in (1, 2):
            raise EngineUnavailableError("restarts")
        await plain(self, source, version)

    monkeypatch.setattr(EnvironmentGroups, "update_weights", away)
    trainer = trained(function, tmp_path, max_steps=3)
    assert trainer.state.global_step == 3 and asked == [1, 1, 1, 2]
