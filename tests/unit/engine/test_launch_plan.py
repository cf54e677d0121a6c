"""How many replicas, with which devices."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.engine.devices import Devices
from rollstream.engine.launch_plan import LaunchRequest, ReplicaPlan, choose_server, plan_replicas
from rollstream.errors import ConfigError

GPUS = Devices("cuda", tuple("01234567"), ("CUDA_VISIBLE_DEVICES",))


def plan(request: LaunchRequest, devices: Devices | None = GPUS, server: Any = "sglang") -> list[ReplicaPlan]:
    return plan_replicas(
        server,
        request,
        devices,
        model_path="org/model",
        max_model_len=None,
        python="python",
        log_dir=Path("/logs"),
    )


sizes = st.integers(1, 4)


@given(st.integers(0, 8), st.none() | st.integers(0, 9), st.none() | st.integers(1, 9), sizes, sizes, sizes)
def test_a_plan_gives_every_replica_devices_of_its_own_or_says_why_not(
    found: int, asked: int | None, replicas: int | None, tp: int, pp: int, dp: int
) -> None:
    devices = Devices("cuda", GPUS.ids[:found], GPUS.variables) if found else None
    request = LaunchRequest(
        devices_per_node=asked,
        replicas=replicas,
        tensor_parallel=tp,
        pipeline_parallel=pp,
        data_parallel=dp,
    )
    used, each = found if asked is None else asked, tp * pp * dp
    possible = used <= found and (each == 1 if used == 0 else used % each == 0)
    if used and possible and replicas is not None:
        possible = replicas <= used // each
    if not possible:
        with pytest.raises(ConfigError):
            plan(request, devices)
        return
    plans = plan(request, devices)
    given_out = [device for one in plans for device in one.devices]
    assert len(given_out) == len(set(given_out))
    assert set(given_out) <= set(GPUS.ids[:used])
    assert [one.index for one in plans] == list(range(len(plans)))
    if used:
        assert {len(one.devices) for one in plans} == {each}
        assert len(plans) == (replicas or used // each)
    else:
        assert len(plans) == (replicas or 1)
        assert not given_out
    for one in plans:
        assert one.env.get("CUDA_VISIBLE_DEVICES") == (",".join(one.devices) if devices else None)


def test_both_numbers_are_named() -> None:
    with pytest.raises(ConfigError, match=r"n_gpus_per_node is 8, but 0 devices"):
        plan(LaunchRequest(devices_per_node=8), None)
    with pytest.raises(ConfigError, match=r"n_gpus_per_node is 9, but 8 devices"):
        plan(LaunchRequest(devices_per_node=9))
    with pytest.raises(ConfigError, match=r"8 devices .* do not divide.*size 3 x.*= 3 devices a replica"):
        plan(LaunchRequest(tensor_parallel=3))
    with pytest.raises(ConfigError, match=r"replicas is 5, but 8 devices are enough for 4"):
        plan(LaunchRequest(replicas=5, data_parallel=2))
    with pytest.raises(ConfigError, match=r"= 2 devices a replica, but 0 devices are found"):
        plan(LaunchRequest(tensor_parallel=2), None)
    with pytest.raises(ConfigError, match=r"trainer\.nnodes=2.*server_urls"):
        plan(LaunchRequest(nodes=2))


def test_rollstream_serve_takes_no_devices() -> None:
    (only,) = plan(LaunchRequest(), server="rollstream")
    assert (only.devices, dict(only.env)) == ((), {})
    assert len(plan(LaunchRequest(replicas=4), server="rollstream")) == 4
    with pytest.raises(ConfigError, match="runs on the CPU"):
        plan(LaunchRequest(devices_per_node=8), server="rollstream")
    with pytest.raises(ConfigError, match="in one piece"):
        plan(LaunchRequest(tensor_parallel=2), server="rollstream")


def test_the_users_environment_comes_last_and_ports_are_chosen_late() -> None:
    request = LaunchRequest(env={"A": "1", "CUDA_VISIBLE_DEVICES": "7"}, devices_per_node=1)
    (only,) = plan(request)
    assert only.env == {"A": "1", "CUDA_VISIBLE_DEVICES": "7"}
    assert only.command(4711)[-2:] == ["--port", "4711"]
    no_devices = plan(replace(request, devices_per_node=0, env={}))
    assert no_devices[0].env == {"CUDA_VISIBLE_DEVICES": ""}


def test_a_server_has_to_speak_the_engines_way() -> None:
    assert choose_server("sglang", "auto") == "sglang"
    assert choose_server("sglang", "rollstream") == "rollstream"
    assert choose_server("vllm", "auto") == choose_server("vllm", "vllm") == "vllm"
    for engine, server in [("vllm", "rollstream"), ("vllm", "sglang"), ("sglang", "vllm")]:
        with pytest.raises(ConfigError, match=rf"launch\.server={server}: engine '{engine}' speaks to"):
            choose_server(engine, server)
