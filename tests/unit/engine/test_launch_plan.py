"""How many replicas, with which devices, by which commands."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.engine.devices import Devices
from rollstream.engine.launch_plan import (
    LaunchRequest,
    ReplicaPlan,
    ServerKind,
    choose_server,
    plan_replicas,
    server_words,
)
from rollstream.errors import ConfigError

GPUS = Devices(tuple("01234567"), ("CUDA_VISIBLE_DEVICES",))


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
    devices = Devices(GPUS.ids[:found], GPUS.variables) if found else None
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


def test_several_machines_need_ray() -> None:
    with pytest.raises(ConfigError, match="nnodes"):
        plan(LaunchRequest(nodes=2))


def test_rollstream_serve_takes_no_devices() -> None:
    (only,) = plan(LaunchRequest(), server="rollstream")
    assert (only.devices, dict(only.env)) == ((), {})
    assert len(plan(LaunchRequest(replicas=4), server="rollstream")) == 4
    with pytest.raises(ConfigError, match="runs on the CPU"):
        plan(LaunchRequest(devices_per_node=8), server="rollstream")
    with pytest.raises(ConfigError, match="2 devices a replica, but these replicas run on CPUs"):
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


def words(
    kind: ServerKind, *, max_model_len: int | None = None, host: str = "127.0.0.1", **request: Any
) -> str:
    found = server_words(
        kind,
        LaunchRequest(**request),
        python="PY",
        model_path="org/model",
        max_model_len=max_model_len,
        host=host,
        log_dir="/logs/replica-0",
    )
    return " ".join(found)


EVERYTHING: dict[str, Any] = {
    "tokenizer_path": "tok",
    "max_model_len": 4096,
    "tensor_parallel": 2,
    "pipeline_parallel": 3,
    "data_parallel": 4,
    "gpu_memory_utilization": 0.85,
    "dtype": "bfloat16",
    "load_format": "safetensors",
    "trust_remote_code": True,
    "seeds": True,
}
SGLANG = "PY -m sglang.launch_server --model-path org/model"
VLLM = "PY -m vllm.entrypoints.openai.api_server --model org/model"
SERVE = "PY -m rollstream.cli serve --model org/model --host 127.0.0.1"


@pytest.mark.parametrize(
    ("kind", "asked", "command"),
    [
        ("sglang", {}, f"{SGLANG} --host 127.0.0.1"),
        ("vllm", {}, f"{VLLM} --host 127.0.0.1 --enable-scale-out"),
        (
            "rollstream",
            {"max_model_len": 99},
            f"{SERVE} --max-model-len 99 --log-dir /logs/replica-0 --exit-with-parent",
        ),
        # Other nodes have to reach it, without a key unless the user sets one.
        (
            "rollstream",
            {"host": "10.0.0.7"},
            f"{SERVE} --log-dir /logs/replica-0 --insecure --exit-with-parent".replace(
                "127.0.0.1", "10.0.0.7"
            ),
        ),
        (
            "sglang",
            EVERYTHING,
            f"{SGLANG} --tokenizer-path tok --host 127.0.0.1 --tp-size 2 --pp-size 3 --dp-size 4 "
            "--mem-fraction-static 0.85 --dtype bfloat16 --load-format safetensors --context-length 4096 "
            "--trust-remote-code --enable-deterministic-inference",
        ),
        (
            "vllm",
            EVERYTHING,
            f"{VLLM} --tokenizer tok --host 127.0.0.1 --tensor-parallel-size 2 --pipeline-parallel-size 3 "
            "--data-parallel-size 4 --gpu-memory-utilization 0.85 --dtype bfloat16 --load-format safetensors "
            "--max-model-len 4096 --trust-remote-code --enable-scale-out",
        ),
    ],
)
def test_the_servers_commands(kind: ServerKind, asked: dict[str, Any], command: str) -> None:
    assert words(kind, **asked) == command


def test_arguments_of_the_user() -> None:
    kwargs = {"num_threads": 1, "enable_prefix_caching": False}
    assert words("rollstream", args={"engine": "hf", "engine_kwargs": kwargs}).endswith(
        "--engine hf --engine-kwargs num_threads=1 enable_prefix_caching=false"
    )
    assert words("vllm", args={"enable_scale_out": False, "max_num_seqs": 64}).endswith(
        "--host 127.0.0.1 --max-num-seqs 64"
    )
    assert words("sglang", args={"json-model-override-args": {"a": 1}}).endswith(' {"a":1}')
    assert words("sglang", args={"cuda_graph_bs": [1, 2], "disable_radix_cache": True}).endswith(
        "--cuda-graph-bs 1 2 --disable-radix-cache"
    )


@pytest.mark.parametrize(
    ("kind", "asked", "message"),
    [
        ("sglang", {"args": {"port": 1}}, r"launch\.args\.port is not yours"),
        ("vllm", {"args": {"model": "x"}}, r"launch\.args\.model is not yours"),
        ("sglang", {"args": {"tp_size": 2}}, r"rollout\.tensor_model_parallel_size"),
        ("sglang", {"args": {"dp": 2}}, r"rollout\.data_parallel_size"),
        ("vllm", {"args": {"max-model-len": 2}}, r"rollout\.max_model_len"),
        *(
            ("rollstream", {name: 0.5}, rf"rollout\.{name}=0\.5.*engine_kwargs")
            for name in ("dtype", "load_format", "gpu_memory_utilization")
        ),
    ],
)
def test_what_is_not_an_argument_or_an_option_there_is_refused(
    kind: ServerKind, asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        words(kind, **asked)
