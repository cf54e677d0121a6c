import pytest

from rollstream.engine.detect import detect_server, read_answers
from rollstream.errors import ConfigError, EngineLostError
from rollstream.testing.stub_chat import ChatStub
from rollstream.testing.stub_server import StubModel, StubServer

MODELS = {"data": [{"id": "m", "root": "org/model"}, {"id": "adapter"}]}


@pytest.mark.parametrize(
    ("answers", "kind", "models", "tokenizer"),
    [
        (({"model_path": "/models/m", "tokenizer_path": "o/m"}, {}, MODELS), "sglang", "/models/m", "o/m"),
        (({"model_path": "/not/on/this/machine"}, {}, {}), "sglang", "/not/on/this/machine", None),
        (({}, {"version": "0.32"}, MODELS), "vllm", "m adapter", "org/model"),
        (({}, {"other": 1}, MODELS), "openai", "m adapter", None),
        (({}, {}, {"data": "?"}), "openai", "", None),
    ],
)
def test_kinds_by_what_servers_answer(answers: tuple, kind: str, models: str, tokenizer: str | None) -> None:  # type: ignore[type-arg]
    found = read_answers("u", ["u"], answers, None)
    assert (found.kind, found.models, found.tokenizer) == (kind, tuple(models.split()), tokenizer)
    assert read_answers("u", ["u"], answers, "vllm").kind == "vllm"


async def test_a_server_that_is_away_is_named_while_it_is_waited_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(EngineLostError, match="nothing answers for"):
        await detect_server(["http://127.0.0.1:9"], timeout=0.5)
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said.startswith("no server answers yet, it has 0.5 s: http://127.0.0.1:9")


async def test_servers_are_asked_with_or_without_v1() -> None:
    async with StubServer(model=StubModel("org/model")) as stub:
        found = await detect_server(["http://127.0.0.1:9/", stub.url + "/v1/"], timeout=60)
        assert found[:3] == (stub.url, ["http://127.0.0.1:9", stub.url], "sglang")
        assert found.tokenizer == "org/model"
    async with ChatStub(lambda body: "x", lists_models=False) as chat:
        with pytest.raises(ConfigError, match="name its kind"):
            await detect_server([chat.url], timeout=60)
        assert (await detect_server([chat.url], timeout=60, kind="openai")).models == ()
    with pytest.raises(ConfigError, match="did you mean 'sglang'"):
        await detect_server(["http://127.0.0.1:9"], timeout=60, kind="sglan")
