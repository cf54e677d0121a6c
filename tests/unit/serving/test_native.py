from dataclasses import replace
from typing import Any

from rollstream.engine.base import TopScores
from rollstream.testing.scripted import ScriptedEngine
from rollstream.trajectory import Completion, SamplingParams
from tests.unit.serving.served import END, saying, serving, tokenizer


def asking(**params: Any) -> dict[str, Any]:
    return {"input_ids": [5, 6, 7], "sampling_params": params}


async def test_one_prompt_of_ids() -> None:
    engine = saying(f"78{END}")
    async with serving(engine) as client:
        params = {
            "max_new_tokens": 9,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 7,
            "stop": "x",
            "stop_token_ids": [9],
            "ignore_eos": False,
            "sampling_seed": 5,
        }
        body = {"rid": "mine", "return_logprob": True, "return_text_in_logprobs": True, **asking(**params)}
        status, reply = await client.post("/generate", body)
    assert status == 200
    assert engine.requests[0].request_id == "mine"
    assert engine.requests[0].prompt_ids == [5, 6, 7]
    assert engine.requests[0].sampling == SamplingParams(9, 0.5, 0.9, 7, True, 5, ("x",), (9,))
    completion = engine.completions[0][1]
    meta = reply["meta_info"]
    assert (reply["text"], reply["output_ids"]) == ("78", completion.token_ids)
    assert meta.pop("e2e_latency") >= 0
    assert completion.logprobs is not None
    assert meta == {
        "id": "mine",
        "finish_reason": {"type": "stop", "matched": tokenizer().token_id(END)},
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "cached_tokens": 0,
        "weight_version": "0",
        "input_token_logprobs": [],
        "output_token_logprobs": [
            [logprob, token, text]
            for logprob, token, text in zip(
                completion.logprobs, completion.token_ids, ["7", "8", END], strict=True
            )
        ],
    }


async def test_defaults_are_sglangs() -> None:
    engine = ScriptedEngine()
    async with serving(engine) as client:
        status, reply = await client.post("/generate", {"text": "12"})
    assert status == 200
    assert engine.requests[0].prompt_ids == tokenizer().encode("12")
    assert engine.requests[0].sampling == SamplingParams(128, logprobs=False)
    assert "output_token_logprobs" not in reply["meta_info"]


async def test_a_batch_has_a_reply_for_each_prompt() -> None:
    async with serving(ScriptedEngine()) as client:
        replies = await client.answer("/generate", {"text": ["1", "23"], "rid": "group"})
    assert [reply["meta_info"]["id"] for reply in replies] == ["group_0", "group_1"]
    assert [reply["meta_info"]["prompt_tokens"] for reply in replies] == [1, 2]


async def test_samples_of_a_prompt_have_seeds_of_their_own() -> None:
    engine = ScriptedEngine()
    async with serving(engine) as client:
        _, replies = await client.post("/generate", asking(n=3, sampling_seed=7))
        _, alone = await client.post("/generate", asking(sampling_seed=7))
    assert [request.sampling.seed for request in engine.requests] == [7, 8, 9, 7]
    assert replies[0]["output_ids"] == alone["output_ids"]
    assert len({tuple(reply["output_ids"]) for reply in replies}) == 3


async def test_a_stream_has_the_same_replies_and_an_end() -> None:
    async with serving(ScriptedEngine()) as client:
        body = {"input_ids": [[5], [6]], "sampling_params": {"max_new_tokens": 2, "sampling_seed": 1}}
        replies = await client.answer("/generate", body)
        streamed = await client.events("/generate", body)
    assert [one["index"] for one in streamed] == [0, 1]
    assert [one["output_ids"] for one in streamed] == [one["output_ids"] for one in replies]


async def test_every_version_that_had_a_part_is_told() -> None:
    mixed = Completion([1, 2, 3], None, "length", [(0, 4), (2, 5)])
    async with serving(ScriptedEngine(lambda _: mixed)) as client:
        _, reply = await client.post("/generate", asking())
    assert reply["meta_info"]["weight_version"] == "5"
    assert reply["meta_info"]["weight_versions"] == [[0, 4], [2, 5]]


REFUSED: list[dict[str, Any]] = [
    {},
    {"text": "a", "input_ids": [1]},
    {"input_ids": []},
    {"input_ids": [[5], []]},
    {"text": ""},
    {"input_ids": [512]},
    {"input_ids": [-1]},
    {"input_ids": [2**80]},
    {"input_ids": ["a"]},
    {"input_ids": [1, [2]]},
    {"input_ids": [[1], 2]},
    {"input_ids": [True]},
    {"input_ids": "12"},
    {"text": ["a", 1]},
    {"text": [[1]]},
    asking(max_new_tokens=0),
    asking(temperature=-1),
    asking(top_p=0),
    asking(top_k=0),
    asking(n=0),
    asking(n=10**9),
    {**asking(n=40), "input_ids": [[5], [6]]},
    asking(stop=""),
    asking(frequency_penalty=1),
    asking(min_p=0.1),
    asking(regex="a+"),
    {**asking(), "sampling_params": [{}, {}]},
    {**asking(), "sampling_params": 5},
    {**asking(), "return_logprob": True, "logprob_start_len": 0},
    {**asking(), "return_logprob": True, "top_logprobs_num": 2},
    {**asking(), "image_data": "x"},
    {**asking(), "lora_path": "x"},
]


async def test_what_cannot_be_answered_is_a_400() -> None:
    engine = ScriptedEngine()
    async with serving(engine, max_queue=64) as client:
        for body in REFUSED:
            await client.refused("/generate", body)


class Scoring(ScriptedEngine):
    def __init__(self) -> None:
        super().__init__()
        self.capabilities = replace(self.capabilities, scores=True, score_top_k=3)

    async def score(self, ids: list[int], start: int = 1, top_k: int = 0) -> TopScores:
        places = range(len(ids) - start)
        values = [[-0.5 * at for at in range(top_k)] for _ in places]
        return TopScores([-float(token) for token in ids[start:]], [[*range(top_k)] for _ in places], values)


async def test_log_probs_of_a_prompt_are_sglangs() -> None:
    async with serving(Scoring()) as client:
        for start, entries in ((0, [[None, 5, None], [-6, 6, None], [-7, 7, None]]), (2, [])):
            body = {**asking(max_new_tokens=1), "return_logprob": True, "logprob_start_len": start}
            reply = await client.answer("/generate", body)
            assert reply["meta_info"]["input_token_logprobs"] == entries


async def test_the_likeliest_ids_of_a_prompts_places_are_sglangs() -> None:
    async with serving(Scoring()) as client:
        body = {**asking(max_new_tokens=1), "return_logprob": True, "logprob_start_len": 1}
        meta = (await client.answer("/generate", {**body, "top_logprobs_num": 2}))["meta_info"]
        assert meta["input_token_logprobs"] == [[None, 6, None], [-7, 7, None]]
        assert meta["input_top_logprobs"] == [None, [[0.0, 0, None], [-0.5, 1, None]]]
        for wrong in (
            {**body, "top_logprobs_num": 4},
            {**asking(), "return_logprob": True, "top_logprobs_num": 1},
        ):
            await client.refused("/generate", wrong)


async def test_a_harmless_start_of_log_probs_is_ignored() -> None:
    async with serving(ScriptedEngine()) as client:
        for start in (-1, 2, 3, 100):
            body = {**asking(), "return_logprob": True, "logprob_start_len": start}
            await client.answer("/generate", body)
        await client.answer("/generate", {**asking(), "logprob_start_len": 0})
