"""Weights that the stub of SGLang is sent, which receives them by the functions of torch that SGLang calls."""

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from aiohttp import web
from safetensors.torch import save_file
from torch.distributed import distributed_c10d

from rollstream.engine import sglang
from rollstream.engine.sglang import SGLangEngine
from rollstream.engine.weight_channel import WeightChannel
from rollstream.errors import EngineError
from rollstream.testing.stub_server import StubServer
from rollstream.trajectory import SamplingParams
from tests.support.engines import started

STATE = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.ones(1)}


class Receiving(StubServer):
    """One worker. Its group is made as by SGLang's `init_custom_process_group`."""

    def __init__(self) -> None:
        super().__init__()
        self.received: dict[str, Any] = {}
        self.told: list[str] = []
        self.fails_at = ""
        self._group: Any = None
        for path in (
            "/init_weights_update_group",
            "/update_weights_from_distributed",
            "/destroy_weights_update_group",
        ):
            self._routes[path] = self._change_group

    async def _change_group(self, request: web.BaseRequest) -> web.StreamResponse:
        self.told.append(request.path)
        query = orjson.loads(await request.read())
        try:
            await asyncio.to_thread(getattr(self, request.path[1:].partition("_")[0]), query)
        except (RuntimeError, ValueError) as error:
            return web.json_response({"success": False, "message": str(error)}, status=400)
        return web.json_response({"success": True, "message": ""})

    def init(self, query: dict[str, Any]) -> None:
        where = f"tcp://{query['master_address']}:{query['master_port']}"
        timeout, name = timedelta(seconds=20), query["group_name"]
        backend = distributed_c10d.Backend(query["backend"])
        store, rank, size = next(
            distributed_c10d.rendezvous(where, query["rank_offset"], query["world_size"], timeout=timeout)
        )
        store = distributed_c10d.PrefixStore(name, store)
        self._group, _ = distributed_c10d._new_process_group_helper(
            size, rank, [], backend, store, group_name=name, timeout=timeout
        )
        distributed_c10d._world.pg_group_ranks[self._group] = {i: i for i in range(size)}

    def update(self, query: dict[str, Any]) -> None:
        for name, dtype, shape in zip(query["names"], query["dtypes"], query["shapes"], strict=True):
            if name == self.fails_at:
                raise ValueError(f"no room for {name}")
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            torch.distributed.broadcast(tensor, src=0, group=self._group)
            self.received[name] = tensor
        self.weight_version = query.get("weight_version") or self.weight_version

    def destroy(self, query: dict[str, Any]) -> None:
        torch.distributed.destroy_process_group(self._group)


@pytest.fixture(autouse=True)
def parts_of_one_tensor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sglang, "_PART_BYTES", 8)
    yield
    assert not torch.distributed.is_initialized()


async def test_weights_arrive() -> None:
    async with Receiving() as server, started(SGLangEngine([server.url])) as engine:
        for version in (3, 4):
            await engine.update_weights(WeightChannel().put(None, STATE), version)
            assert server.received.keys() == STATE.keys()
            assert all(torch.equal(server.received.pop(name), tensor) for name, tensor in STATE.items())
            answer = await engine.generate([1], SamplingParams(4), request_id="a")
            assert answer.policy_versions == [(0, version)]
        assert [path.split("_")[0] for path in server.told] == ["/init", *["/update"] * 3, "/destroy"] * 2


async def test_a_server_that_fails_midway_has_no_weights_until_it_has_them_again() -> None:
    async with Receiving() as server, started(SGLangEngine([server.url])) as engine:
        await engine.update_weights(WeightChannel().put(None, STATE), 3)
        server.fails_at = "b"
        with pytest.raises(EngineError, match="no room for b"):
            await engine.update_weights(WeightChannel().put(None, {**STATE, "a": STATE["a"] + 1}), 4)
        assert not engine.ready
        server.fails_at = ""
        assert await engine.health()
        assert server.weight_version == "3" and torch.equal(server.received["a"], STATE["a"])


async def test_other_tensors_are_refused_where_the_model_is_here(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2, 3), "b": torch.ones(4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"vocab_size": 512}')
    async with Receiving() as server:
        kwargs = {"check_model": False}
        async with started(
            SGLangEngine([server.url], model_path=str(tmp_path), engine_kwargs=kwargs)
        ) as engine:
            with pytest.raises(EngineError, match="not known to it, c first"):
                await engine.update_weights(WeightChannel().put(None, STATE), 3)
        assert not server.told
