"""What a configuration says of the replicas to launch."""

from pathlib import Path

import pytest

from rollstream.config.load import compose, to_settings
from rollstream.config.settings import Settings
from rollstream.demo import MODEL_PATH
from rollstream.errors import ConfigError
from rollstream.generation.command import launched_commands
from rollstream.generation.identity import launch_identity
from rollstream.rollout.setup import in_flight_limit, launch_request, launches_on_ray

ROLLOUT = "actor_rollout_ref.rollout"
SERVE = (f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.launch.server=rollstream")


def settings(*words: str) -> Settings:
    return to_settings(compose([f"actor_rollout_ref.model.path={MODEL_PATH}", *words]))


@pytest.mark.parametrize("words", [(f"{ROLLOUT}.name=openvino",), (f"{ROLLOUT}.server_urls=[http://a:1]",)])
def test_what_to_launch_is_refused_where_nothing_is_launched(words: tuple[str, ...]) -> None:
    given = settings(f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.launch.replicas=2", *words)
    with pytest.raises(ConfigError, match=r"launch\.\* \(replicas\)"):
        launch_request(given)


def test_layout_is_free_and_what_decides_the_data_is_not() -> None:
    plain = (f"{ROLLOUT}.name=sglang",)
    assert launch_identity(settings(*plain)) == {}
    for word in (
        f"{ROLLOUT}.tensor_model_parallel_size=2",
        f"{ROLLOUT}.gpu_memory_utilization=0.7",
        f"{ROLLOUT}.launch.replicas=3",
        f"{ROLLOUT}.launch.args={{max_running_requests: 9, log-level: debug}}",
        f"{ROLLOUT}.launch.env={{OMP_NUM_THREADS: 1}}",
        "trainer.n_gpus_per_node=4",
    ):
        assert launch_identity(settings(*plain, word)) == {}, word
    decides = launch_identity(
        settings(
            *plain,
            f"{ROLLOUT}.dtype=bfloat16",
            f"{ROLLOUT}.load_format=pt",
            f"{ROLLOUT}.launch.args={{quantization: fp8, kv_cache_dtype: fp8_e5m2}}",
        )
    )
    assert decides == {
        "launch.dtype": "bfloat16",
        "launch.load_format": "pt",
        "launch.args.quantization": "fp8",
        "launch.args.kv-cache-dtype": "fp8_e5m2",
    }
    serve = launch_identity(settings(*SERVE, f"{ROLLOUT}.launch.args={{engine_kwargs: {{num_threads: 1}}}}"))
    assert serve["launch.server"] == "rollstream"
    assert serve["launch.engine.kv_cache_precision"] == "f32"
    assert not any("num_threads" in key for key in serve)


@pytest.mark.parametrize(
    "word",
    [
        *("args={api_key: hush}", "args={admin-api-key: hush}", "args={hf_token: hush}"),
        *("args={api_key: [hush]}", "args={ssl_keyfile_password: hush}"),
        *("env={HF_TOKEN: hush}", "env={OPENAI_API_KEY: hush}", "env={AWS_SECRET_ACCESS_KEY: hush}"),
    ],
)
@pytest.mark.parametrize("more", [(), (f"{ROLLOUT}.server_urls=[http://a:1]",)])
def test_secrets_are_refused_and_not_repeated(word: str, more: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="looks like a secret") as raised:
        launch_request(settings(f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.launch.{word}", *more))
    assert "hush" not in str(raised.value)


RAY = "generation.executor=ray"
AUTO = "ray_kwargs.ray_init.address=auto"


@pytest.mark.parametrize(
    ("words", "environ", "where"),
    [
        ((), {}, "local"),
        ((), {"RAY_ADDRESS": "a:1"}, "local"),  # no workers there
        ((RAY,), {}, "local"),  # a cluster of this machine
        ((RAY, AUTO), {}, "ray"),
        ((RAY,), {"RAY_ADDRESS": "a:1"}, "ray"),
        ((RAY, "ray_kwargs.ray_init.address=local"), {"RAY_ADDRESS": "a:1"}, "local"),
        ((RAY, AUTO, f"{ROLLOUT}.launch.where=local"), {}, "local"),
        ((f"{ROLLOUT}.launch.where=ray",), {}, "ray"),
    ],
)
def test_servers_are_launched_where_the_run_has_gone(
    words: tuple[str, ...], environ: dict[str, str], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = settings(*SERVE, *words)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    request = launch_request(given)
    assert request is not None and request.where == where
    assert launches_on_ray(given) == (where == "ray")


def test_on_ray_the_commands_name_what_a_node_fills_in(tmp_path: Path) -> None:
    given = settings(*SERVE, f"{ROLLOUT}.launch.where=ray", "ray_kwargs.replica.num_cpus=2")
    (one,) = launched_commands(given, tmp_path)
    assert one["where"] == "ray"
    assert one["command"][:4] == ["<python>", "-m", "rollstream.cli", "serve"]
    assert one["command"][one["command"].index("--host") + 1] == "<address>"
    assert one["command"][one["command"].index("--log-dir") + 1] == "<logs>"
    request = launch_request(given)
    assert request is not None and request.actor_options == {"num_cpus": 2}


def test_what_a_replica_may_not_claim_is_refused_without_a_cluster(tmp_path: Path) -> None:
    given = settings(*SERVE, f"{ROLLOUT}.launch.where=ray", "ray_kwargs.replica.num_gpus=1")
    with pytest.raises(ConfigError, match=r"ray_kwargs\.replica\.num_gpus"):
        launched_commands(given, tmp_path)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((f"{ROLLOUT}.name=openvino",), 512),
        ((f"{ROLLOUT}.name=openvino", f"{ROLLOUT}.engine_kwargs.max_num_seqs=20"), 40),
        ((f"{ROLLOUT}.name=openvino", "generation.max_in_flight=7"), 7),
        ((f"{ROLLOUT}.name=sglang",), 256),
        ((f"{ROLLOUT}.name=hf",), 256),
    ],
)
def test_an_embedded_engine_has_twice_what_it_works_on_in_flight(
    words: tuple[str, ...], expected: int
) -> None:
    assert in_flight_limit(settings(*words)) == expected
