"""What replicas claim of a Ray cluster."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.engine.launch_plan import LaunchRequest
from rollstream.engine.ray_launch import claim, device_env, replica_resources
from rollstream.errors import ConfigError

nodes = st.lists(
    st.builds(lambda cpus, gpus: {"CPU": cpus, "GPU": gpus}, st.integers(1, 16), st.integers(0, 8)),
    min_size=1,
)


@given(nodes, st.none() | st.integers(0, 9), st.none() | st.integers(1, 9), st.integers(1, 4))
def test_a_claim_can_be_met_and_uses_what_is_asked_for(
    cluster: list[dict[str, float]], per_node: int | None, replicas: int | None, each: int
) -> None:
    request = LaunchRequest(devices_per_node=per_node, replicas=replicas, tensor_parallel=each)
    try:
        claims = claim("sglang", request, cluster)
    except ConfigError:
        return  # which refusals are right: `test_launch_plan`, and below
    room = sum(min(int(node[name] // amount) for name, amount in claims.bundle.items()) for node in cluster)
    assert 1 <= claims.count <= room
    assert claims.count == replicas or replicas is None
    takes = any(node["GPU"] for node in cluster) if per_node is None else per_node > 0
    assert claims.bundle.get("GPU", 0) == (each if takes else 0)
    if takes and replicas is None:
        used = claims.count * each
        assert used == (per_node or sum(int(node["GPU"]) // each * each for node in cluster))


EIGHTS = [{"CPU": 64.0, "GPU": 8.0}, {"CPU": 64.0, "GPU": 8.0}, {"CPU": 8.0}]


@pytest.mark.parametrize(
    ("request_", "cluster", "server", "why"),
    [
        ({"tensor_parallel": 16}, EIGHTS, "sglang", "8, 8, 0 devices: a replica is launched on one node"),
        (
            {"nodes": 3, "devices_per_node": 8},
            EIGHTS,
            "sglang",
            "n_gpus_per_node is 8 on trainer.nnodes=3 nodes, but",
        ),
        ({"nodes": 2}, EIGHTS, "vllm", "nnodes=2 needs trainer.n_gpus_per_node"),
        ({"devices_per_node": 6, "tensor_parallel": 4}, EIGHTS, "vllm", "do not divide"),
        ({"replicas": 5, "tensor_parallel": 4}, EIGHTS, "vllm", "enough for 4"),
        ({"devices_per_node": 1}, [{"CPU": 4.0}], "sglang", "the cluster has no devices"),
        ({"tensor_parallel": 2}, [{"CPU": 4.0}], "sglang", "run on CPUs: the cluster has no devices"),
        ({"devices_per_node": 8}, EIGHTS, "rollstream", "runs on the CPU"),
        ({"nodes": 2}, EIGHTS, "rollstream", r"set actor_rollout_ref\.rollout\.launch\.replicas"),
        ({"replicas": 9}, [{"CPU": 4.0}, {"CPU": 4.0}], "rollstream", r"9 replicas .* can hold \(8\)"),
        ({"actor_options": {"num_cpus": 33}}, EIGHTS, "sglang", r"can hold \(2\)"),
    ],
)
def test_what_a_cluster_cannot_hold_is_refused(
    request_: dict[str, Any], cluster: list[dict[str, float]], server: Any, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        claim(server, LaunchRequest(**request_), cluster)


def test_ascend_devices_and_further_resources_are_claimed() -> None:
    request = LaunchRequest(
        tensor_parallel=4, actor_options={"num_cpus": 2, "resources": {"fast": 1}, "memory": 5}
    )
    claims = claim("vllm", request, [{"CPU": 64.0, "NPU": 8.0, "fast": 9.0, "memory": 1e9}])
    assert (claims.count, claims.kind) == (2, "NPU")
    assert claims.bundle == {"NPU": 4.0, "CPU": 2.0, "fast": 1.0, "memory": 5.0}


@pytest.mark.parametrize(
    "options",
    [{"num_gpus": 1}, {"max_restarts": 3}, {"resources": {"GPU": 1}}, {"num_cpus": -1}, {"num_cpus": "2"}],
)
def test_options_that_are_not_the_users_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"ray_kwargs\.replica"):
        replica_resources(options)


def test_a_bundle_is_never_empty() -> None:
    assert replica_resources({"num_cpus": 0})


@pytest.mark.parametrize(
    ("kind", "environ", "expected"),
    [
        ("GPU", {"CUDA_VISIBLE_DEVICES": "3,1"}, {"CUDA_VISIBLE_DEVICES": "3,1"}),
        ("GPU", {}, {"CUDA_VISIBLE_DEVICES": "3,1"}),
        ("GPU", {"HIP_VISIBLE_DEVICES": "3,1"}, {"HIP_VISIBLE_DEVICES": "3,1"}),
        ("NPU", {}, {"ASCEND_RT_VISIBLE_DEVICES": "3,1"}),
    ],
)
def test_a_server_sees_the_devices_that_were_assigned(
    kind: str, environ: dict[str, str], expected: dict[str, str]
) -> None:
    assert device_env(kind, ["3", "1"], environ) == expected


def test_a_server_without_devices_sees_none() -> None:
    assert set(device_env("", [], {"CUDA_VISIBLE_DEVICES": "0"}).values()) == {""}
