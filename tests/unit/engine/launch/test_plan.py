"""How many replicas, with which devices, by which commands; here and on a Ray cluster."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.demo import MODEL_PATH
from rollstream.engine.launch import plan as planning
from rollstream.engine.launch.devices import Devices, DeviceToolError
from rollstream.engine.launch.plan import (
    LaunchRequest,
    ReplicaPlan,
    ServerKind,
    choose_server,
    claim,
    count_replicas,
    launch_plan,
    replica_resources,
    server_words,
)
from rollstream.engine.registry import check_engine_config, create_engine
from rollstream.errors import ConfigError

TP, PP, DP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size"
CUDA = "CUDA_VISIBLE_DEVICES"


@pytest.fixture
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(planning, "machine_devices", lambda: Devices(tuple("01234567"), (CUDA,)))
    yield


def plan(model: str = "org/model", **request: Any) -> list[ReplicaPlan]:
    return launch_plan(
        "sglang",
        model_path=model,
        max_model_len=None,
        request=LaunchRequest(**{"python": sys.executable, **request}),
        log_dir=Path("/logs"),
    )


@pytest.mark.usefixtures("eight_gpus")
def test_each_replica_has_devices_of_its_own_and_the_users_environment_comes_last() -> None:
    plans = plan(arguments={TP: 2}, replicas=3, env={"A": "b"})
    assert [replica.index for replica in plans] == [0, 1, 2]
    assert [replica.devices for replica in plans] == [("0", "1"), ("2", "3"), ("4", "5")]
    assert plans[1].env == {CUDA: "2,3", "A": "b"}
    assert plans[1].command(4711)[-2:] == ["--port", "4711"]
    assert plan(devices_per_node=0)[0].env == dict.fromkeys(planning.VISIBLE, "")
    assert plan(devices_per_node=1, env={CUDA: "7"})[0].env == {CUDA: "7"}
    with pytest.raises(ConfigError):
        plan(nodes=2)


sizes = st.integers(1, 4)


@given(st.integers(0, 8), st.none() | st.integers(0, 9), st.none() | st.integers(1, 9), sizes, sizes, sizes)
def test_replicas_use_the_devices_there_are_or_it_is_refused(
    found: int, per_node: int | None, replicas: int | None, tp: int, pp: int, dp: int
) -> None:
    request = LaunchRequest(devices_per_node=per_node, replicas=replicas, arguments={TP: tp, PP: pp, DP: dp})
    used, each = found if per_node is None else per_node, tp * pp * dp
    possible = used <= found and (each == 1 if used == 0 else used % each == 0)
    if used and possible and replicas is not None:
        possible = replicas <= used // each
    if not possible:
        with pytest.raises(ConfigError):
            count_replicas("sglang", request, [found])
    elif used:
        assert count_replicas("sglang", request, [found]) == (replicas or used // each, each)
    else:
        assert count_replicas("sglang", request, [found]) == (replicas or 1, 0)


def test_rollstream_serve_takes_no_devices() -> None:
    plans = plan(str(MODEL_PATH), server="rollstream", replicas=4)
    assert [(replica.devices, dict(replica.env)) for replica in plans] == [((), {})] * 4
    assert "--log-dir /logs/replica-1" in " ".join(plans[1].words)
    for request in ({"devices_per_node": 8}, {"arguments": {TP: 2}}):
        with pytest.raises(ConfigError):
            plan(str(MODEL_PATH), server="rollstream", **request)


def test_a_server_has_to_speak_the_engines_way() -> None:
    assert choose_server("sglang", "auto") == "sglang"
    assert choose_server("sglang", "rollstream") == "rollstream"
    assert choose_server("vllm", "auto") == choose_server("vllm", "vllm") == "vllm"
    for engine, server in [("vllm", "rollstream"), ("vllm", "sglang"), ("sglang", "vllm")]:
        with pytest.raises(ConfigError):
            choose_server(engine, server)


def words(kind: ServerKind, *, host: str = "127.0.0.1", args: Any = (), **arguments: Any) -> str:
    request = LaunchRequest(arguments={"model_path": "org/model", **arguments}, args=dict(args))
    return " ".join(server_words(kind, request, python="PY", host=host, log_dir="/logs/replica-0"))


EVERYTHING: dict[str, Any] = {
    "tokenizer_path": "tok",
    "max_model_len": 4096,
    TP: 2,
    PP: 3,
    DP: 4,
    "gpu_memory_utilization": 0.85,
    "dtype": "bfloat16",
    "load_format": "safetensors",
    "trust_remote_code": True,
    "seeds": True,
}
SGLANG = "PY -m sglang.launch_server --model-path org/model"
VLLM = "PY -m vllm.entrypoints.openai.api_server --model org/model"
SERVE = "PY -m rollstream.cli serve --model org/model --host"


@pytest.mark.parametrize(
    ("kind", "arguments", "command"),
    [
        ("sglang", {"dtype": "auto", TP: 1, "seeds": False}, f"{SGLANG} --host 127.0.0.1"),
        ("vllm", {}, f"{VLLM} --host 127.0.0.1 --enable-scale-out"),
        (
            "sglang",
            {"lora_rank": 6},
            f"{SGLANG} --host 127.0.0.1 --enable-lora --max-lora-rank 6 --lora-target-modules all",
        ),
        (
            "vllm",
            {"sends_weights": True},
            f'{VLLM} --host 127.0.0.1 --weight-transfer-config {{"backend":"rollstream"}} --enable-scale-out',
        ),
        (
            "rollstream",
            {"max_model_len": 99},
            f"{SERVE} 127.0.0.1 --max-model-len 99 --log-dir /logs/replica-0 --exit-with-parent",
        ),
        # Other nodes have to reach it, without a key unless the user sets one.
        (
            "rollstream",
            {"host": "10.0.0.7"},
            f"{SERVE} 10.0.0.7 --log-dir /logs/replica-0 --insecure --exit-with-parent",
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
def test_the_servers_commands(kind: ServerKind, arguments: dict[str, Any], command: str) -> None:
    assert words(kind, **arguments) == command


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
    ("kind", "arguments", "key"),
    [
        ("sglang", {"args": {"port": 1}}, "launch.args.port"),
        ("vllm", {"args": {"model": "x"}}, "launch.args.model"),
        ("sglang", {"args": {"tp_size": 2}}, f"rollout.{TP}"),
        ("sglang", {"args": {"dp": 2}}, f"rollout.{DP}"),
        ("vllm", {"args": {"max-model-len": 2}}, "rollout.max_model_len"),
        ("rollstream", {"dtype": "float16"}, "rollout.dtype"),
        ("rollstream", {"gpu_memory_utilization": 0.5}, "rollout.gpu_memory_utilization"),
        ("vllm", {"lora_rank": 600}, "model.lora_rank"),
        ("rollstream", {"sends_weights": True}, "rollout.weight_transfer"),
    ],
)
def test_what_is_not_an_argument_or_an_option_there_is_refused(
    kind: ServerKind, arguments: dict[str, Any], key: str
) -> None:
    with pytest.raises(ConfigError, match=key):
        words(kind, **arguments)


def test_what_cannot_be_launched_shows_without_a_start(tmp_path: Path) -> None:
    def check(model_path: Any = MODEL_PATH, name: str = "sglang", **request: Any) -> None:
        check_engine_config(name, model_path=model_path, launch=LaunchRequest(**request))

    rollstream = {"server": "rollstream"}
    check(**rollstream)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"model_path": None, **rollstream}, r"actor_rollout_ref\.model\.path"),
        ({"model_path": "/no/such/model"}, "/no/such/model"),
        ({**rollstream, "python": "/no/python"}, r"launch\.python"),
        ({}, "'sglang'"),
        ({"model_path": "org/model", "devices_per_node": 99}, "n_gpus_per_node"),
        ({"name": "vllm", **rollstream}, "launch.server"),
    ]
    for request, key in wrong:
        with pytest.raises(ConfigError, match=key):
            check(**request)
    with pytest.raises(ConfigError, match="engine_kwargs"):
        create_engine(
            "sglang",
            model_path=MODEL_PATH,
            engine_kwargs={"x": 1},
            launch=LaunchRequest(**rollstream),
            log_dir=tmp_path,
        )
    assert not list(tmp_path.iterdir())


def test_a_broken_driver_is_no_machine_without_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Devices:
        raise DeviceToolError("Failed to initialize NVML")

    monkeypatch.setattr(planning, "machine_devices", broken)
    for wanted in (None, 8):
        with pytest.raises(DeviceToolError):
            plan(devices_per_node=wanted)
    assert len(plan(devices_per_node=0)) == len(plan(str(MODEL_PATH), server="rollstream")) == 1


# -- on Ray

nodes = st.lists(
    st.builds(lambda cpus, gpus: {"CPU": cpus, "GPU": gpus}, st.integers(1, 16), st.integers(0, 8)),
    min_size=1,
)


@given(nodes, st.none() | st.integers(0, 9), st.none() | st.integers(1, 9), st.integers(1, 4))
def test_a_claim_can_be_met_and_uses_what_is_asked_for(
    cluster: list[dict[str, float]], per_node: int | None, replicas: int | None, each: int
) -> None:
    request = LaunchRequest(devices_per_node=per_node, replicas=replicas, arguments={TP: each})
    try:
        claims = claim("sglang", request, cluster)
    except ConfigError:
        return  # which refusals are right: below
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
    ("request_", "cluster", "server", "key"),
    [
        ({"arguments": {TP: 16}}, EIGHTS, "sglang", "one node"),
        ({"nodes": 3, "devices_per_node": 8}, EIGHTS, "sglang", "n_gpus_per_node"),
        ({"nodes": 2}, EIGHTS, "vllm", "nnodes=2 needs trainer.n_gpus_per_node"),
        ({"devices_per_node": 6, "arguments": {TP: 4}}, EIGHTS, "vllm", "do not divide"),
        ({"replicas": 5, "arguments": {TP: 4}}, EIGHTS, "vllm", "enough for 4"),
        ({"devices_per_node": 1}, [{"CPU": 4.0}], "sglang", "n_gpus_per_node"),
        ({"arguments": {TP: 2}}, [{"CPU": 4.0}], "sglang", "CPUs"),
        ({"devices_per_node": 8}, EIGHTS, "rollstream", "CPU"),
        ({"nodes": 2}, EIGHTS, "rollstream", r"launch\.replicas"),
        ({"replicas": 9}, [{"CPU": 4.0}, {"CPU": 4.0}], "rollstream", r"\(8\)"),
        ({"actor_options": {"num_cpus": 33}}, EIGHTS, "sglang", r"\(2\)"),
    ],
)
def test_what_a_cluster_cannot_hold_is_refused(
    request_: dict[str, Any], cluster: list[dict[str, float]], server: Any, key: str
) -> None:
    with pytest.raises(ConfigError, match=key):
        claim(server, LaunchRequest(**request_), cluster)


def test_ascend_devices_and_further_resources_are_claimed() -> None:
    options = {"num_cpus": 2, "resources": {"fast": 1}, "memory": 5}
    request = LaunchRequest(arguments={TP: 4}, actor_options=options)
    claims = claim("vllm", request, [{"CPU": 64.0, "NPU": 8.0, "fast": 9.0, "memory": 1e9}])
    assert (claims.count, claims.devices) == (2, True)
    assert claims.bundle == {"NPU": 4.0, "CPU": 2.0, "fast": 1.0, "memory": 5.0}
    assert replica_resources({"num_cpus": 0})  # a bundle is never empty


@pytest.mark.parametrize(
    "options",
    [{"num_gpus": 1}, {"max_restarts": 3}, {"resources": {"GPU": 1}}, {"num_cpus": -1}, {"num_cpus": "2"}],
)
def test_options_that_are_not_the_users_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"ray_kwargs\.replica"):
        replica_resources(options)
