"""The Python door: `run_generation` takes the forms of configuration that people have."""

import pytest
from omegaconf import OmegaConf

from rollstream.config.load import to_settings
from rollstream.errors import ConfigError
from rollstream.generation.run import as_config, run_generation


def test_forms_of_a_configuration() -> None:
    for given in (
        {"data": {"seed": 7}},
        OmegaConf.create({"data": {"seed": 7}}),
        ["data.seed=7"],
        as_config(["data.seed=7"]),
    ):
        assert to_settings(as_config(given)).data.seed == 7


def test_a_text_is_refused_as_a_whole() -> None:
    with pytest.raises(ConfigError, match=r"not the text 'run\.yaml'"):
        as_config("run.yaml")


def test_an_error_has_no_context_of_ours() -> None:
    with pytest.raises(ConfigError) as found:
        run_generation(["actor_rollout_ref.model.path=hdfs://host/model", "data.train_files=none.jsonl"])
    assert "hdfs" in str(found.value)
    assert found.value.__context__ is None
