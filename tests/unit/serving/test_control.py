import asyncio
from dataclasses import replace
from pathlib import Path

from rollstream.testing.scripted import ScriptedEngine
from tests.unit.serving.served import eventually, served_model, serving

GENERATE = {"input_ids": [5], "sampling_params": {"max_new_tokens": 2}}
FOREVER = 1e6


async def test_health_is_the_engines() -> None:
    engine = ScriptedEngine()
    async with serving(engine) as client:
        for path in ("/health", "/health_generate"):
            assert (await client.get(path))[0] == 200
            engine.go_down()
            assert (await client.get(path))[0] == 503
            engine.come_back()
        engine.fail(lambda _: True, RuntimeError("bug"))
        assert (await client.get("/health_generate"))[0] == 500
    assert [request.sampling.max_tokens for request in engine.requests] == [1, 1]


async def test_the_server_says_what_it_is() -> None:
    engine = ScriptedEngine()
    engine.capabilities = replace(engine.capabilities, seeds=False, stop_strings=False, max_model_len=77)
    async with serving(engine) as client:
        _, model = await client.get("/get_model_info")
        _, server = await client.get("/get_server_info")
        _, models = await client.get("/v1/models")
        _, one = await client.get("/v1/models/demo")
    assert (model["weight_version"], model["vocab_size"], model["is_generation"]) == ("0", 512, True)
    assert server["enable_deterministic_inference"] is False
    assert server["skip_tokenizer_init"] is True
    assert (server["context_length"], server["engine"]) == (77, "scripted")
    assert server["capabilities"]["logprobs"] == "raw"
    assert models["data"] == [one]
    assert (one["id"], one["max_model_len"]) == ("demo", 77)


async def test_aborts_over_http() -> None:
    engine = ScriptedEngine(latency=FOREVER)
    async with serving(engine) as client:
        for abort in ({"rid": "a"}, {"rid": "", "abort_all": True}):
            task = asyncio.create_task(client.post("/generate", {**GENERATE, "rid": "a"}))
            await eventually(lambda: engine.in_flight == 1)
            assert (await client.post("/abort_request", {"rid": "b"}))[0] == 200
            assert engine.in_flight == 1
            assert (await client.post("/abort_request", abort))[0] == 200
            status, reply = await task
            assert (status, reply["meta_info"]["finish_reason"]["type"]) == (200, "abort")
        chat = {"messages": [{"role": "user", "content": "1"}], "rid": "mine", "n": 2}
        task = asyncio.create_task(client.post("/v1/chat/completions", chat))
        await eventually(lambda: engine.in_flight == 2)
        await client.post("/abort_request", {"rid": "mine"})
        _, answer = await task
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["abort", "abort"]
    assert answer["id"] == "mine"


async def test_a_pause_over_http() -> None:
    engine = ScriptedEngine()
    async with serving(engine) as client:
        assert (await client.refused("/pause_generation", {"mode": "retract"}))["param"] == "mode"
        assert (await client.post("/pause_generation", b""))[0] == 200
        task = asyncio.create_task(client.post("/generate", GENERATE))
        while (await client.get("/get_load"))[1][0]["num_waiting_reqs"] == 0:
            pass
        assert (await client.get("/get_server_info"))[1]["status"] == "paused"
        assert not engine.requests
        assert (await client.post("/continue_generation", {}))[0] == 200
        assert (await task)[0] == 200


async def test_weights_over_http(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with serving(engine) as client:
        body = {"model_path": str(tmp_path), "weight_version": "3", "load_format": "auto"}
        status, answer = await client.post("/update_weights_from_disk", body)
        assert (status, answer["success"]) == (200, True)
        _, reply = await client.post("/generate", GENERATE)
        assert reply["meta_info"]["weight_version"] == "3"
        _, answer = await client.post("/v1/completions", {"prompt": "1"})
        assert answer["metadata"] == {"weight_version": "3"}
        assert (await client.get("/get_weight_version"))[1] == {"weight_version": "3"}
        assert (await client.get("/get_model_info"))[1]["model_path"] == str(tmp_path)
        error = await client.refused("/update_weights_from_disk", {**body, "weight_version": "step-3"})
        assert "must be a number" in error["message"]
        await client.refused("/update_weights_from_disk", {})
        error = await client.refused("/update_weights_from_disk", {"model_path": "someone/model"})
        assert "there is no folder someone/model" in error["message"]
    fixed = ScriptedEngine(capabilities=replace(engine.capabilities, update_weights=False))
    async with serving(fixed) as client:
        status, answer = await client.post("/update_weights_from_disk", body)
    assert (status, answer["success"], "cannot update" in answer["message"]) == (400, False, True)


async def test_an_update_may_abort_what_is_in_flight(tmp_path: Path) -> None:
    engine = ScriptedEngine(latency=30.0)
    async with serving(engine) as client:
        asked = asyncio.create_task(client.post("/generate", GENERATE))
        while not engine.in_flight:
            await asyncio.sleep(0.01)
        body = {"model_path": str(tmp_path), "abort_all_requests": True}
        assert (await client.post("/update_weights_from_disk", body))[0] == 200
        _, reply = await asyncio.wait_for(asked, 10)
        assert reply["meta_info"]["finish_reason"]["type"] == "abort"
        await client.refused("/update_weights_from_disk", {**body, "abort_all_requests": "all of them"})


async def test_a_cache_is_flushed_only_if_there_is_none() -> None:
    async with serving(ScriptedEngine()) as client:
        assert (await client.post("/flush_cache", {}))[0] == 200
        assert (await client.get("/flush_cache"))[0] == 200
    async with serving(ScriptedEngine(), served_model(keeps_prefixes=True)) as client:
        assert "cannot flush" in (await client.refused("/flush_cache", {}))["message"]


async def test_metrics_count() -> None:
    engine = ScriptedEngine(latency=lambda one: FOREVER if one.request_id == "long" else 0.0)
    async with serving(engine) as client:
        for _ in range(2):
            await client.post("/generate", GENERATE)
        await client.post("/generate", {})
        for path in ("/a", "/b"):
            await client.get(path)
        task = asyncio.create_task(client.post("/generate", {**GENERATE, "rid": "long"}))
        await eventually(lambda: engine.in_flight == 1)
        _, text = await client.get("/metrics")
        await client.post("/abort_request", {"abort_all": True})
        await task
    samples = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    values = {name: float(value) for name, value in samples}
    assert values == {
        "rollstream_samples_running": 1,
        "rollstream_samples_waiting": 0,
        "rollstream_paused": 0,
        "rollstream_weight_version": 0,
        'rollstream_samples_total{finish_reason="length"}': 2,
        "rollstream_prompt_tokens_total": 2,
        "rollstream_generated_tokens_total": 4,
        'rollstream_http_requests_total{route="/generate",status="200"}': 2,
        'rollstream_http_requests_total{route="/generate",status="400"}': 1,
        'rollstream_http_requests_total{route="unknown",status="404"}': 2,
    }
