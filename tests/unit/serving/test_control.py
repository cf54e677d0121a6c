"""SGLang's routes beside `/generate`, and `/metrics`: what clients of SGLang and vLLM read there."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollstream.engine.base import EngineLoad
from rollstream.engine.load import SGLANG_METRICS, VLLM_METRICS, read_metrics, read_sglang_loads
from rollstream.testing.scripted import ScriptedEngine
from tests.support.until import until
from tests.unit.serving.served import FOREVER, GENERATE, QUESTION, Client, served_model, serving


class BusyEngine(ScriptedEngine):
    said: EngineLoad | None = EngineLoad(3, 4, 0.5, 6)

    async def load(self) -> EngineLoad | None:
        return self.said


async def page(client: Client, path: str) -> bytes:
    async with client.session.get(client.url + path) as response:
        assert response.status == 200
        return await response.read()


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
    """By a request's own id, by that of a batch or a chat, and all of them; others are left alone."""
    engine = ScriptedEngine(latency=FOREVER)
    batch = {**GENERATE, "input_ids": [[5], [6]], "rid": "mine"}
    chat = {"messages": QUESTION, "rid": "mine", "n": 2}
    async with serving(engine) as client:
        for path, body, count, abort in (
            ("/generate", {**GENERATE, "rid": "a"}, 1, {"rid": "a"}),
            ("/generate", {**GENERATE, "rid": "a"}, 1, {"rid": "", "abort_all": True}),
            ("/generate", {**GENERATE, "rid": "a", "sampling_params": {"n": 2}}, 2, {"rid": "a"}),
            ("/generate", batch, 2, {"rid": "mine"}),
            ("/v1/chat/completions", chat, 2, {"rid": "mine"}),
        ):
            task = asyncio.create_task(client.answer(path, body))
            await until(lambda count=count: engine.in_flight == count)  # type: ignore[misc]
            await client.answer("/abort_request", {"rid": "b"})
            assert engine.in_flight == count
            await client.answer("/abort_request", abort)
            answer: Any = await task
            if path == "/generate":
                replies = answer if count > 1 else [answer]
                reasons = [reply["meta_info"]["finish_reason"]["type"] for reply in replies]
            else:
                reasons = [choice["finish_reason"] for choice in answer["choices"]]
                assert answer["id"] == "mine"
            assert reasons == ["abort"] * count


async def test_a_pause_over_http() -> None:
    engine = ScriptedEngine()
    async with serving(engine) as client:
        assert (await client.refused("/pause_generation", {"mode": "retract"}))["param"] == "mode"
        await client.answer("/pause_generation", b"")
        task = asyncio.create_task(client.post("/generate", GENERATE))
        while (await client.get("/get_load"))[1][0]["num_waiting_reqs"] == 0:
            pass
        assert (await client.get("/get_server_info"))[1]["status"] == "paused"
        assert not engine.requests
        await client.answer("/continue_generation", {})
        assert (await task)[0] == 200


async def test_weights_over_http(tmp_path: Path) -> None:
    update = "/update_weights_from_disk"
    engine = ScriptedEngine()
    async with serving(engine, weights=[tmp_path.parent]) as client:
        body = {"model_path": str(tmp_path), "weight_version": "3", "load_format": "auto"}
        assert (await client.answer(update, body))["success"]
        reply = await client.answer("/generate", GENERATE)
        assert reply["meta_info"]["weight_version"] == "3"
        answer = await client.answer("/v1/completions", {"prompt": "1"})
        assert answer["metadata"] == {"weight_version": "3"}
        assert (await client.get("/get_weight_version"))[1] == {"weight_version": "3"}
        assert (await client.get("/get_model_info"))[1]["model_path"] == str(tmp_path)
        wrong = [{**body, "weight_version": version} for version in ("step-3", "", -3, "-3", "1_0", "\u0663")]
        wrong += [{**body, "weight_version": version} for version in (2**63, "9" * 5000, True)]
        for bad in (*wrong, {}, {"model_path": f"{tmp_path}/nothing"}, {**body, "abort_all_requests": "all"}):
            await client.refused(update, bad)
        await client.answer(update, {"model_path": str(tmp_path)})
        assert (await client.get("/get_weight_version"))[1] == {"weight_version": "4"}


async def test_weights_come_from_the_folders_that_were_allowed(tmp_path: Path) -> None:
    update, good = "/update_weights_from_disk", tmp_path / "ok" / "step-1"
    good.mkdir(parents=True)
    (tmp_path / "ok" / "out").symlink_to("..")
    names = (
        good,
        tmp_path,
        good / ".." / "..",
        tmp_path / "ok" / "out",
        "someone/model",
        "/proc/self/cwd",
        "a\0",
    )
    for weights, statuses in ([tmp_path / "ok"], [200] + [403] * 6), ([], [403] * 7):
        async with serving(ScriptedEngine(), weights=weights) as client:
            answers = [await client.post(update, {"model_path": str(name)}) for name in names]
        assert [status for status, _ in answers] == statuses


async def test_an_update_may_abort_what_is_in_flight(tmp_path: Path) -> None:
    engine = ScriptedEngine(latency=FOREVER)
    async with serving(engine, weights=[tmp_path]) as client:
        asked = asyncio.create_task(client.answer("/generate", GENERATE))
        await until(lambda: engine.in_flight)
        body = {"model_path": str(tmp_path), "abort_all_requests": True}
        await client.answer("/update_weights_from_disk", body)
        reply: Any = await asked
        assert reply["meta_info"]["finish_reason"]["type"] == "abort"


async def test_a_cache_is_flushed_only_if_there_is_none() -> None:
    async with serving(ScriptedEngine()) as client:
        await client.answer("/flush_cache", {})
        assert (await client.get("/flush_cache"))[0] == 200
    async with serving(ScriptedEngine(), served_model(keeps_prefixes=True)) as client:
        assert "cannot flush" in (await client.refused("/flush_cache", {}))["message"]


async def test_metrics_count() -> None:
    engine = ScriptedEngine(latency=lambda one: FOREVER if one.request_id == "long" else 0.0)
    async with serving(engine) as client:
        for body in (GENERATE, {**GENERATE, "rid": "cut \ud83d"}, {}):
            await client.post("/generate", body)
        for path in ("/a", "/b"):
            await client.get(path)
        task = asyncio.create_task(client.post("/generate", {**GENERATE, "rid": "long"}))
        await until(lambda: engine.in_flight == 1)
        text = (await page(client, "/metrics")).decode()
        await client.post("/abort_request", {"abort_all": True})
        await task
    samples = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    assert {name: float(value) for name, value in samples} == {
        "rollstream_samples_running": 1,
        "rollstream_samples_waiting": 0,
        "rollstream_paused": 0,
        "rollstream_weight_version": 0,
        'rollstream_samples_total{finish_reason="length"}': 2,
        "rollstream_prompt_tokens_total": 2,
        "rollstream_generated_tokens_total": 4,
        "rollstream_replaced_surrogates_total": 1,
        'rollstream_http_requests_total{route="/generate",status="200"}': 2,
        'rollstream_http_requests_total{route="/generate",status="400"}': 1,
        'rollstream_http_requests_total{route="unknown",status="404"}': 2,
    }


async def test_clients_of_sglang_and_vllm_read_the_engines_load() -> None:
    engine = BusyEngine(latency=FOREVER)
    async with serving(engine) as client:
        metrics = await page(client, "/metrics")
        assert [read_metrics(metrics, names) for names in (SGLANG_METRICS, VLLM_METRICS)] == [engine.said] * 2
        for said in (EngineLoad(3, 4), None):
            engine.said = said
            assert read_metrics(await page(client, "/metrics"), VLLM_METRICS) == said
        engine.said = EngineLoad(3, 4)
        tasks = [asyncio.create_task(client.post("/generate", GENERATE)) for _ in range(7)]
        await until(lambda: engine.in_flight == 7)
        assert read_sglang_loads(await page(client, "/get_load")) == EngineLoad(3, 4)
        await client.post("/abort_request", {"rid": "", "abort_all": True})
        await asyncio.gather(*tasks)
