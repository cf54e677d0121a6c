"""What a stub server works on: turns, aborts, shares; and an answer that goes on where it was."""

import asyncio

import aiohttp

from rollstream.testing.stub_faults import Latency
from rollstream.testing.stub_server import StubServer
from rollstream.testing.stub_work import StubWork


async def test_turns_are_taken_in_order() -> None:
    work = StubWork(2)
    ended: list[str] = []

    async def one(name: str) -> None:
        await work.do(name, 0.02)
        ended.append(name)

    tasks = [asyncio.create_task(one(name)) for name in "abcde"]
    await asyncio.sleep(0)
    assert (work.running, work.waiting, work.names()) == (2, 3, list("abcde"))
    await asyncio.gather(*tasks)
    assert ended == list("abcde")
    assert (work.running, work.waiting) == (0, 0)


async def test_an_abort_gives_the_share_that_is_done_and_lets_the_next_one_in() -> None:
    work = StubWork(1)
    loop = asyncio.get_running_loop()
    began = loop.time()
    first, second, third = (asyncio.create_task(work.do(name, 60.0)) for name in "abc")
    await asyncio.sleep(0.3)
    assert work.abort("b")  # waits: nothing is done
    assert await second == 0.0
    assert work.abort("a")
    assert 0.29 / 60 <= await first <= (loop.time() - began) / 60
    await asyncio.sleep(0)
    assert work.names() == ["c"] and work.running == 1
    third.cancel()
    await asyncio.gather(third, return_exceptions=True)
    assert not work.abort("c")
    assert work.names() == []


async def test_ending_all_ends_those_that_wait_too() -> None:
    work = StubWork(1)
    tasks = [asyncio.create_task(work.do(name, float("inf"))) for name in "abc"]
    await asyncio.sleep(0)
    work.end_all()
    assert await asyncio.gather(*tasks) == [None, None, None]


async def test_an_answer_goes_on_from_the_tokens_that_stand_after_the_prompt() -> None:
    server = StubServer(lengths=Latency("fixed", 30), token_s=0.005, prompt_tokens=3)
    async with server, aiohttp.ClientSession(server.url) as client:
        loop = asyncio.get_running_loop()
        whole, _ = server.book.answer([1, 2, 3], None, 30)

        async def ask(ids: list[int], max_tokens: int) -> tuple[list[int], str, float]:
            began = loop.time()
            body = {
                "input_ids": ids,
                "sampling_params": {"max_new_tokens": max_tokens},
                "return_logprob": True,
            }
            async with client.post("/generate", json=body) as response:
                reply = await response.json()
            meta = reply["meta_info"]
            assert [entry[1] for entry in meta["output_token_logprobs"]] == reply["output_ids"]
            return reply["output_ids"], meta["finish_reason"]["type"], loop.time() - began

        ids, reason, seconds = await ask([1, 2, 3], 64)
        assert (ids, reason) == (whole, "stop")
        assert seconds >= 0.15
        ids, reason, seconds = await ask([1, 2, 3, *whole[:20]], 44)
        assert (ids, reason) == (whole[20:], "stop")
        assert seconds >= 0.05
        assert (await ask([1, 2, 3, *whole[:20]], 4))[:2] == (whole[20:24], "length")
        assert server.stats.tokens == 44
