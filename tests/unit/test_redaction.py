"""What leaves the run directory has no secrets in it, and everything else."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from rollstream.config.load import compose, to_settings
from rollstream.errors import ConfigError
from rollstream.redaction import HIDDEN, find_secret, redact


@pytest.mark.parametrize(
    "tree",
    [
        {"api_key": "TELLNOBODY"},
        {"apiKey": "TELLNOBODY"},
        {"engine_kwargs": {"extra": {"headers": {"Authorization": "Bearer TELLNOBODY"}}}},
        {"env": {"HF_TOKEN": "TELLNOBODY", "MY_SECRET_2": "TELLNOBODY"}},
        {"credentials": {"user": "TELLNOBODY"}},
        {"keys": ["TELLNOBODY", "x"]},
        {"server_urls": ["https://user:TELLNOBODY@host:1/v1", "http://TELLNOBODY@h"]},
        {"args": [["--token", 1], {"x-api-key": "TELLNOBODY"}]},
        {"client-secret": "TELLNOBODY"},
        {"secretkey": "TELLNOBODY"},
        {"awsAccessKey": "TELLNOBODY"},
        {"db_pass": "TELLNOBODY"},
        {"pwd": "TELLNOBODY"},
        {"verl_overrides": ["+actor_rollout_ref.rollout.custom.engine_kwargs.api_key=TELLNOBODY"]},
        {"verl_overrides": ["++x.password=TELLNOBODY"]},
        {"verl_overrides": ["x.credentials.user=TELLNOBODY"]},
        {"verl_overrides": ["x=https://me:TELLNOBODY@host/v1"]},
        {"args": ["--api-key=TELLNOBODY"]},
        {"url": "https://h/v1?x=1&api_key=TELLNOBODY&y=2"},
        {"verl_overrides": ["x={a: 1, api_key: TELLNOBODY, b: 2}"]},
        {"verl_overrides": ['x={env: {"HF_TOKEN": "TELLNOBODY, TELLNOBODY"}}']},
    ],
)
def test_secrets_are_hidden_wherever_they_stand(tree: dict[str, Any]) -> None:
    hidden = redact(tree)
    assert "TELLNOBODY" not in str(hidden)
    assert HIDDEN in str(hidden)


def test_the_rest_of_an_address_stays() -> None:
    assert redact("https://me:pw@host:8000/v1?model=x") == "https://***@host:8000/v1?model=x"


@pytest.mark.parametrize(
    "word", ["data.prompt_key=question", "x={a: 1, prompt_key: q}", "a b = c", "x=", "--max-num-seqs=3"]
)
def test_words_without_secrets_stay_as_they_are(word: str) -> None:
    assert redact([word]) == [word]


def test_a_secret_is_found_by_its_path() -> None:
    tree = {"num_cpus": 1, "runtime_env": {"env_vars": {"A": "b", "OPENAI_API_KEY": "x"}}}
    assert find_secret(tree, "worker") == "worker.runtime_env.env_vars.OPENAI_API_KEY"
    assert find_secret({"a": ["x", "http://u:p@h"]}, "worker") == "worker.a"
    assert find_secret({"keys": {"a": "x"}}, "worker") == "worker.keys"
    assert find_secret({"env_vars": {"API_KEY": "", "TOKEN": None, "use_auth": True}}, "worker") is None
    assert find_secret({"num_cpus": 1, "resources": {"fast": 0.5}}, "worker") is None


@pytest.mark.parametrize(
    "key",
    [
        "custom_reward_function.reward_kwargs",
        "actor_rollout_ref.rollout.engine_kwargs",
        "data.apply_chat_template_kwargs",
        "gateway.env",
    ],
)
def test_a_secret_in_a_free_mapping_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ConfigError, match="api_key looks like a secret") as caught:
        to_settings(compose([f"+{key}.judge.api_key=TELLNOBODY"]))
    assert "TELLNOBODY" not in str(caught.value)


def test_a_rewards_column_and_token_are_no_secrets() -> None:
    to_settings(
        compose(["custom_reward_function.reward_kwargs={answer_key: label, stop_token: end, tolerance: 0.1}"])
    )


def test_the_defaults_have_no_secrets_and_stay_as_they_are() -> None:
    tree = OmegaConf.to_container(compose(), resolve=True)
    assert redact(tree) == tree


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    )
)
def test_any_tree_keeps_its_shape_and_is_hidden_once(tree: Any) -> None:
    hidden = redact(tree)
    assert redact(hidden) == hidden
    if isinstance(tree, dict):
        assert hidden.keys() == tree.keys()
