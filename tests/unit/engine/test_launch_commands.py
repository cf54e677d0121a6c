"""The servers' command lines."""

from pathlib import Path
from typing import Any

import pytest

from rollstream.engine.launch_plan import ServerKind, ServerOptions, server_words
from rollstream.errors import ConfigError


def options(**changes: Any) -> ServerOptions:
    given: dict[str, Any] = {
        "model_path": "org/model",
        "tokenizer_path": None,
        "max_model_len": None,
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
        "data_parallel": 1,
        "gpu_memory_utilization": None,
        "dtype": "auto",
        "load_format": "auto",
        "trust_remote_code": False,
        "seeds": False,
        "log_dir": Path("/logs/replica-0"),
    }
    return ServerOptions(**(given | changes))


EVERYTHING = options(
    tokenizer_path="tok",
    max_model_len=4096,
    tensor_parallel=2,
    pipeline_parallel=3,
    data_parallel=4,
    gpu_memory_utilization=0.85,
    dtype="bfloat16",
    load_format="safetensors",
    trust_remote_code=True,
    seeds=True,
)


def words(kind: ServerKind, given: ServerOptions, **args: Any) -> str:
    return " ".join(server_words(kind, "PY", given, args))


def test_the_plain_commands() -> None:
    assert words("sglang", options()) == (
        "PY -m sglang.launch_server --model-path org/model --host 127.0.0.1"
    )
    assert words("vllm", options()) == (
        "PY -m vllm.entrypoints.openai.api_server --model org/model --host 127.0.0.1 --enable-scale-out"
    )
    assert words("rollstream", options()) == (
        "PY -m rollstream.cli serve --model org/model --host 127.0.0.1 --log-dir /logs/replica-0 "
        "--exit-with-parent"
    )
    # Other nodes have to reach it, without a key unless the user sets one.
    assert " --host 10.0.0.7 --insecure " in words("rollstream", options(host="10.0.0.7"))


def test_everything_that_can_be_asked_for() -> None:
    assert words("sglang", EVERYTHING) == (
        "PY -m sglang.launch_server --model-path org/model --tokenizer-path tok --host 127.0.0.1 --tp-size 2 "
        "--pp-size 3 --dp-size 4 --mem-fraction-static 0.85 --dtype bfloat16 --load-format safetensors "
        "--context-length 4096 --trust-remote-code --enable-deterministic-inference"
    )
    assert words("vllm", EVERYTHING) == (
        "PY -m vllm.entrypoints.openai.api_server --model org/model --tokenizer tok --host 127.0.0.1 "
        "--tensor-parallel-size 2 --pipeline-parallel-size 3 --data-parallel-size 4 "
        "--gpu-memory-utilization 0.85 --dtype bfloat16 --load-format safetensors --max-model-len 4096 "
        "--trust-remote-code --enable-scale-out"
    )
    assert "--max-model-len 99" in words("rollstream", options(max_model_len=99))


def test_arguments_of_the_user() -> None:
    kwargs = {"num_threads": 1, "enable_prefix_caching": False}
    assert words("rollstream", options(), engine="hf", engine_kwargs=kwargs).endswith(
        "--engine hf --engine-kwargs num_threads=1 enable_prefix_caching=false"
    )
    assert words("vllm", options(), enable_scale_out=False, max_num_seqs=64).endswith(
        "--host 127.0.0.1 --max-num-seqs 64"
    )
    assert server_words("sglang", "PY", options(), {"json-model-override-args": {"a": 1}})[-1] == '{"a":1}'
    assert words("sglang", options(), cuda_graph_bs=[1, 2], disable_radix_cache=True).endswith(
        "--cuda-graph-bs 1 2 --disable-radix-cache"
    )


@pytest.mark.parametrize(
    ("kind", "args", "message"),
    [
        ("sglang", {"port": 1}, r"launch\.args\.port is not yours"),
        ("vllm", {"model": "x"}, r"launch\.args\.model is not yours"),
        ("sglang", {"tp_size": 2}, r"rollout\.tensor_model_parallel_size"),
        ("vllm", {"max-model-len": 2}, r"rollout\.max_model_len"),
    ],
)
def test_what_has_a_key_of_its_own_is_not_an_argument(
    kind: ServerKind, args: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        server_words(kind, "PY", options(), args)


@pytest.mark.parametrize("name", ["dtype", "load_format", "gpu_memory_utilization"])
def test_rollstream_serve_says_what_it_cannot_do(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"rollout\.{name}=0\.5.*engine_kwargs"):
        words("rollstream", options(**{name: 0.5}))
