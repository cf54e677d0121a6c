"""What is said of Ray is checked before a cluster is joined; secrets are refused, and never shown."""

import traceback

import pytest

from rollstream.config.load import compose, to_settings
from rollstream.errors import ConfigError

RAY = "generation.executor=ray"


@pytest.mark.parametrize(
    "given",
    [
        *("{bogus: 1}", "{num_cpus: two}", "{num_gpus: true}", "{memory: -1}", "{resources: [a]}"),
        *("{runtime_env: conda}", "{label_selector: {zone: 1}}", "{scheduling_strategy: NEAR}"),
    ],
)
def test_options_that_no_worker_can_have_are_named(given: str) -> None:
    name = given[1:].partition(":")[0]
    with pytest.raises(ConfigError, match=f"worker.{name}"):
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
