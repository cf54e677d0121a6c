"""Further sampling parameters: one name for each, checked once, by the engines' own names on their wires."""

from typing import Any

import orjson
import pytest

from rollstream.engine import openai, sglang, vllm
from rollstream.engine.base import ChatPrompt
from rollstream.errors import DataError
from rollstream.sampling import SERVER_SAMPLING, check_extra, sampling_of_row
from rollstream.trajectory import SamplingParams

SCHEMA = {"type": "object", "properties": {"answer": {"type": "integer"}}}
SOUND: dict[str, Any] = {
    "frequency_penalty": -0.5,
    "grammar": 'root ::= "yes" | "no"',
    "json_schema": SCHEMA,
    "logit_bias": {15: -100, "16": 2.5},
    "min_p": 0.1,
    "min_tokens": 3,
    "presence_penalty": 2,
    "regex": "[0-9]+",
    "repetition_penalty": 1.1,
}


@pytest.mark.parametrize("name", SERVER_SAMPLING)
def test_each_parameter_has_a_check(name: str) -> None:
    assert check_extra({name: SOUND[name]}) is None
    for wrong in (None, [], True if name not in ("min_tokens",) else -1, float("nan")):
        assert str(check_extra({name: wrong})).startswith(f"{name} must be ")


def test_what_is_wrong_is_said() -> None:
    assert check_extra({"min_p": 1.5}) == "min_p must be from 0 to 1, not 1.5"
    assert "token ids" in str(check_extra({"logit_bias": {"yes": 1.0}}))
    assert check_extra({"json_schema": "{"}) is not None
    both = check_extra({"json_schema": "{}", "regex": "a"})
    assert both == "json_schema and regex cannot be asked for at once"
    assert check_extra({"an_engines_own": 1.0}) is None
    assert check_extra({"an_engines_own": float("inf")}) is not None


def test_sglang_gets_them_by_its_own_names() -> None:
    assert sglang.extra_params(SOUND) == {
        "ebnf": SOUND["grammar"],
        "min_new_tokens": 3,
        "json_schema": orjson.dumps(SCHEMA).decode(),
        "logit_bias": {"15": -100.0, "16": 2.5},
        **{name: SOUND[name] for name in SOUND if name.endswith("_penalty") or name in ("min_p", "regex")},
    }


@pytest.mark.parametrize("route", [vllm.GENERATE, vllm.COMPLETIONS])
def test_vllm_gets_them_by_its_own_names(route: vllm.Route) -> None:
    extra = {"json_schema": SCHEMA, "min_tokens": 3, "logit_bias": {15: 1}}
    body = vllm.request_body(route, [1], SamplingParams(4, extra=extra), "r", "m")
    params = body["sampling_params"] if route == vllm.GENERATE else body
    assert params["structured_outputs"] == {"json": orjson.dumps(SCHEMA).decode()}
    assert (params["min_tokens"], params["logit_bias"]) == (3, {"15": 1.0})
    assert "json_schema" not in params
    for name in ("grammar", "regex"):
        assert vllm.extra_params({name: SOUND[name]}) == {"structured_outputs": {name: SOUND[name]}}


def test_a_chat_endpoint_gets_a_schema_as_its_response_format() -> None:
    prompt = ChatPrompt([{"role": "user", "content": "?"}])
    sampling = SamplingParams(4, logprobs=False, extra={"json_schema": SCHEMA, "logit_bias": {5: 1}})
    fields = openai.request_fields("m", prompt, sampling, openai.ENGINE_KWARGS)
    assert fields["response_format"]["json_schema"]["schema"] == SCHEMA
    assert fields["logit_bias"] == {"5": 1.0}


def test_what_counts_tokens_or_follows_a_grammar_is_not_continued() -> None:
    goes_on = {name for name in SOUND if SamplingParams(4, extra={name: SOUND[name]}).can_be_continued}
    assert goes_on == {"logit_bias", "min_p"}


RUN = SamplingParams(64, seed=3, stop=("a",), extra={"min_p": 0.1})


def test_a_row_says_how_it_is_sampled() -> None:
    given = {"temperature": 0.2, "max_tokens": 8, "stop": ["x", "y"], "min_tokens": 2, "top_k": None}
    expected = SamplingParams(
        8, temperature=0.2, seed=3, stop=("x", "y"), extra={"min_p": 0.1, "min_tokens": 2}
    )
    assert sampling_of_row(RUN, given) == sampling_of_row(RUN, orjson.dumps(given).decode()) == expected
    assert sampling_of_row(RUN, {}) == RUN


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("hot", "sampling_params: "),
        (3, "must be a mapping"),
        ({"temprature": 1}, "has 'temprature'"),
        ({"seed": 1}, "has 'seed'"),
        ({"temperature": "hot"}, "temperature must be 0 or more"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"max_tokens": 65}, "more than the run's response_length 64"),
        ({"stop": "x"}, "stop must be a list of texts"),
        ({"min_p": 2}, "min_p must be from 0 to 1"),
    ],
)
def test_a_row_that_asks_for_nonsense_is_refused(given: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        sampling_of_row(RUN, given)
