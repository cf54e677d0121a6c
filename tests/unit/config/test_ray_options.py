"""What is said of Ray is checked before a cluster is joined; secrets are refused, and never shown."""

import traceback

import pytest

from rollstream.config.load import compose, to_settings
from rollstream.errors import ConfigError

RAY = "generation.executor=ray"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{bogus: 1}", r"unknown key 'ray_kwargs\.worker\.bogus'; it takes num_cpus, "),
        ("{max_concurrency: 1}", r"unknown key 'ray_kwargs\.worker\.max_concurrency'"),
        ("{num_cpus: two}", r"worker\.num_cpus must be an integer or a number \(it is 'two'\)"),
        ("{num_cpus: null}", r"worker\.num_cpus must be an integer"),
        ("{num_gpus: true}", r"worker\.num_gpus must be an integer"),
        ("{memory: -1}", r"worker\.memory must be at least 0 \(it is -1\)"),
        ("{num_cpus: nan}", r"worker\.num_cpus must be .* nan"),
        ("{resources: [a]}", r"worker\.resources must be a mapping"),
        ("{resources: {GPU: 1}}", r"worker\.resources\.GPU: say ray_kwargs\.worker\.num_gpus"),
        ("{resources: {fast: much}}", r"worker\.resources\.fast must be an integer or a number"),
        ("{runtime_env: conda}", r"worker\.runtime_env must be a mapping"),
        ("{runtime_env: {env_vars: {A: 1}}}", r"env_vars must be texts by name: put numbers in quotes"),
        ("{label_selector: {zone: 1}}", r"worker\.label_selector\.zone must be a text"),
        ("{scheduling_strategy: NEAR}", r"must be one of DEFAULT, SPREAD \(it is 'NEAR'\)"),
        ("{accelerator_type: 100}", r"worker\.accelerator_type must be a text"),
    ],
)
def test_options_that_no_worker_can_have_are_named(given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        to_settings(compose([RAY, f"ray_kwargs.worker={given}"]))


def test_options_that_a_worker_can_have_are_taken() -> None:
    given = (
        "{num_cpus: 0.5, num_gpus: 1, memory: 1e9, resources: {fast: 0.1}, runtime_env: {env_vars: {A: b}}, "
        "accelerator_type: H100, scheduling_strategy: DEFAULT, label_selector: {zone: a}}"
    )
    worker = to_settings(compose([RAY, f"ray_kwargs.worker={given}"])).ray_kwargs.worker
    assert (worker["num_cpus"], worker["runtime_env"]) == (0.5, {"env_vars": {"A": "b"}})


@pytest.mark.parametrize("name", ["ray_init", "worker", "replica"])
@pytest.mark.parametrize(
    ("given", "where"),
    [
        ("{runtime_env: {env_vars: {OPENAI_API_KEY: TELLNOBODY}}}", "runtime_env.env_vars.OPENAI_API_KEY"),
        ("{runtime_env: {working_dir: 'https://u:TELLNOBODY@h/x.zip'}}", "runtime_env.working_dir"),
        ("{runtime_env: {pip: ['https://TELLNOBODY@h/x.whl']}}", "runtime_env.pip"),
        ("{_redis_password: TELLNOBODY, bogus: 1}", "_redis_password"),
    ],
)
def test_secrets_are_refused_and_not_shown(name: str, given: str, where: str) -> None:
    with pytest.raises(ConfigError, match=f"ray_kwargs.{name}.{where} looks like a secret") as caught:
        to_settings(compose([RAY, f"ray_kwargs.{name}={given}"]))
    assert "TELLNOBODY" not in "".join(traceback.format_exception_only(caught.value))
