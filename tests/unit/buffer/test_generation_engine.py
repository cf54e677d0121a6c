import pytest

from rollstream.buffer.generation_engine import _Answers, find_engine, kind_of
from rollstream.buffer.generator_settings import GeneratorSettings
from rollstream.errors import ConfigError
from rollstream.testing.stub_chat import ChatStub
from rollstream.testing.stub_server import StubServer
from tests.unit.buffer.test_generator_settings import STOCK


def test_kinds_by_what_servers_answer() -> None:
    assert kind_of(_Answers({"model_path": "m"}, {"version": "0.5"}, {"data": []})) == "sglang"
    assert kind_of(_Answers(None, {"version": "0.32"}, {"data": []})) == "vllm"
    assert kind_of(_Answers(None, None, {"data": []})) == "openai"
    assert kind_of(_Answers(None, {"other": 1}, None)) is None


async def test_servers_are_found_with_their_tokenizers() -> None:
    async with StubServer(model_path="org/model") as stub:
        found = await find_engine(GeneratorSettings.read({**STOCK, "remote_engine_url": stub.url}))
        assert (found.kind, found.tokenizer_path) == ("sglang", "org/model")
    async with StubServer(model_path="/not/on/this/machine") as stub:
        found = await find_engine(GeneratorSettings.read({**STOCK, "remote_engine_url": stub.url}))
        assert found.tokenizer_path is None
    async with ChatStub(lambda body: "x", lists_models=False) as chat:
        with pytest.raises(ConfigError, match="name its kind"):
            await find_engine(GeneratorSettings.read({**STOCK, "remote_engine_url": chat.url}))
        with pytest.raises(ConfigError, match="name one by the parameter model"):
            await find_engine(
                GeneratorSettings.read({**STOCK, "remote_engine_url": chat.url, "engine": "openai"})
            )
