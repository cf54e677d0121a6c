"""The package Ray, imported when it is needed, and what its errors say of an actor."""

import re
from typing import Any

from rollstream.errors import ConfigError

_WHY_IT_DIED = re.compile(r"The actor (?:is dead|died) because[^.\n]*")
"""Of what Ray says of a dead actor, which fills a screen."""

_WITH_ITS_NODE = "The actor died because its node has died"
"""What Ray says of an actor whose machine is gone. Where memory was short it says something else."""

_FORGOTTEN = "Can't find actor"
"""What Ray says at the call of an actor that died some time ago."""


def import_ray() -> Any:
    """The package. Raises `ConfigError` when it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "generation.executor=ray and actor_rollout_ref.rollout.launch.where=ray need Ray, which is not "
            f"installed ({error}): pip install 'rollstream[ray]'"
        ) from error
    return ray


def cause_of(error: BaseException) -> BaseException:
    """The error as it was raised in the actor."""
    ray = import_ray()
    if isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, BaseException):
        cause: BaseException = error.cause
        cause.__cause__ = None
        cause.add_note(str(error)[-4000:])  # where in the actor
        return cause
    return error


def submit(method: Any, *args: Any, **kwargs: Any) -> Any:
    """`method.remote(*args, **kwargs)` of an actor's method: the reference to its answer.

    Raises:
        ActorDiedError: Ray has forgotten the dead actor. Ray itself raises a bare `Exception` for that, and at the
            call, where what it knows of a dead actor is raised at the reference (seen with 2.60).
    """
    try:
        return method.remote(*args, **kwargs)
    except Exception as error:
        if _FORGOTTEN not in str(error):
            raise
        raise import_ray().exceptions.ActorDiedError() from error


def is_placed(actor: Any) -> bool | None:
    """Whether Ray has found a node for an actor that does not answer yet; None if it does not say.

    Takes milliseconds. Source: an actor's address in Ray's own table is empty as long as it waits for room.
    """
    import_ray()
    try:
        from ray._private.state import state

        address = state.actor_table(actor._actor_id.hex())["Address"]["IPAddress"]
    except Exception:  # nothing of this is promised by Ray, and it is for a line of a log
        return None
    return bool(address)


def is_of_the_node(error: BaseException) -> bool:
    """Whether an actor was lost with its node, or with the way to it: what it did is not to blame."""
    exceptions = import_ray().exceptions
    if isinstance(error, exceptions.NodeDiedError | exceptions.ActorUnavailableError):
        return True
    if not isinstance(error, exceptions.ActorDiedError):
        return False
    return bool(error.preempted) or _WITH_ITS_NODE in str(error)


def is_death(error: BaseException) -> bool:
    """Whether the actor ended, or its node, or what it said got lost on the way; not what it said itself."""
    ray = import_ray()
    task_error = isinstance(error, ray.exceptions.RayTaskError)
    return isinstance(error, ray.exceptions.RayError | TimeoutError | StopAsyncIteration) and not task_error


def one_line(error: BaseException) -> str:
    """An error, for a line of a log."""
    if why := _WHY_IT_DIED.search(str(error)):
        return f"{type(error).__name__}: {why[0]}"
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:500]
