"""What may be said of Ray in a configuration. Pure: Ray itself is not asked."""

import math
from collections.abc import Mapping
from typing import Any

from rollstream.config.settings import RaySettings
from rollstream.errors import ConfigError
from rollstream.redaction import find_secret

WORKER_OPTIONS = (
    "num_cpus",
    "num_gpus",
    "memory",
    "resources",
    "accelerator_type",
    "label_selector",
    "scheduling_strategy",
    "runtime_env",
)
"""What the user may say of a worker's actor (`ray_kwargs.worker`). Its life, its name and how many calls it
takes at once are rollstream's."""

_AMOUNTS = ("num_cpus", "num_gpus", "memory")
_MAPPINGS = ("resources", "label_selector", "runtime_env")
_STRATEGIES = ("DEFAULT", "SPREAD")

_SAID_ELSEWHERE = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
"""Resources that have an option of their own: Ray refuses them among the others."""

_WORKER = "ray_kwargs.worker"


def check_ray(ray: RaySettings) -> None:
    """Raises `ConfigError`, naming the key, for what no cluster could do and for secrets."""
    for name in ("ray_init", "worker", "replica"):
        # Before any other message, which would show it.
        if (path := find_secret(getattr(ray, name), f"ray_kwargs.{name}")) is not None:
            raise ConfigError(
                f"{path} looks like a secret, and what is configured is written to the run directory. Set it "
                "in the environment that rollstream is started in, which workers on this machine inherit; on "
                "other machines in that of `ray start`"
            )
    for option in ray.worker:
        if option not in WORKER_OPTIONS:
            raise ConfigError(f"{_WORKER}.{option} is not yours to set: it takes {', '.join(WORKER_OPTIONS)}")
    given = ray.worker
    for option in _AMOUNTS:
        if option in given:
            _check_amount(f"{_WORKER}.{option}", given[option])
    for option in _MAPPINGS:
        _mapping_at(f"{_WORKER}.{option}", given.get(option, {}))
    for resource, amount in given.get("resources", {}).items():
        if resource in _SAID_ELSEWHERE:
            raise ConfigError(
                f"{_WORKER}.resources.{resource}: say {_WORKER}.{_SAID_ELSEWHERE[resource]} instead"
            )
        _check_amount(f"{_WORKER}.resources.{resource}", amount)
    _check_texts(f"{_WORKER}.label_selector", given.get("label_selector", {}))
    _check_texts(f"{_WORKER}.runtime_env.env_vars", given.get("runtime_env", {}).get("env_vars", {}))
    strategy, kind = given.get("scheduling_strategy", "SPREAD"), given.get("accelerator_type", "")
    if strategy not in _STRATEGIES:
        raise ConfigError(
            f"{_WORKER}.scheduling_strategy must be one of {', '.join(_STRATEGIES)} (it is {strategy!r})"
        )
    if not isinstance(kind, str):
        raise ConfigError(f"{_WORKER}.accelerator_type must be a text (it is {kind!r})")


def _mapping_at(key: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key} must be a mapping (it is {value!r})")
    return value


def _check_texts(key: str, value: Any) -> None:
    for name, text in _mapping_at(key, value).items():
        if not isinstance(text, str):
            raise ConfigError(f"{key}.{name} must be a text: put it in quotes (it is {text!r})")


def _check_amount(key: str, amount: Any) -> None:
    """Raises `ConfigError` unless Ray can take it as an amount of a resource."""
    is_number = isinstance(amount, int | float) and not isinstance(amount, bool)
    if not is_number or not 0 <= amount < math.inf:
        raise ConfigError(f"{key} must be a number of at least 0 (it is {amount!r})")
