"""What a lost actor says of why it is gone. The texts are those of a cluster that lost one."""

import pytest

from rollstream.engine.ray_package import is_death, is_of_the_node

ray = pytest.importorskip("ray")

from ray.core.generated.common_pb2 import ActorDiedErrorContext, NodeDeathInfo  # noqa: E402


def died(message: str, **context: object) -> Exception:
    error: Exception = ray.exceptions.ActorDiedError(
        ActorDiedErrorContext(error_message=message, actor_id=b"0" * 16, **context)
    )
    return error


@pytest.mark.parametrize(
    "error",
    [
        ray.exceptions.ActorUnavailableError("RpcError: Socket closed rpc_code: 14", b"0" * 16),
        ray.exceptions.NodeDiedError("the node is gone"),
        died("The actor died because its node has died. Node Id: 12"),
        died(
            "The actor is dead because its node was drained",
            node_death_info=NodeDeathInfo(reason=NodeDeathInfo.AUTOSCALER_DRAIN_PREEMPTED),
        ),
    ],
)
def test_nodes_that_go_take_actors_along(error: Exception) -> None:
    assert is_of_the_node(error) and is_death(error)


@pytest.mark.parametrize(
    "error",
    [
        ray.exceptions.ActorDiedError(),
        ray.exceptions.OutOfMemoryError("the node is running low on memory"),
        died("The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR"),
        TimeoutError(),
    ],
)
def test_what_may_be_the_fault_of_a_rollout(error: Exception) -> None:
    assert not is_of_the_node(error) and is_death(error)
