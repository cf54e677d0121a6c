"""Whatever a client sends, it is answered or refused; nothing is a fault of the server."""

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.chat.wires.openai_chat import ChatRequest
from rollstream.serving.native import NativeRequest
from rollstream.serving.openai import CompletionRequest
from rollstream.testing.scripted import ScriptedEngine
from tests.unit.serving.served import serving

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 600),
    st.integers(-(2**63), 2**63),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["", "a", "auto", "user", "assistant", "tool", "demo", "<think>", "{"]),
    st.text(max_size=5),
)
KEYS = st.sampled_from(
    [
        "role",
        "content",
        "tool_calls",
        "function",
        "name",
        "arguments",
        "type",
        "text",
        "parameters",
        "n",
        "id",
    ]
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", "system"])},
        optional={"content": VALUES, "tool_calls": VALUES, "name": VALUES},
    ),
    max_size=3,
)


SAMPLING = (
    *("max_new_tokens", "temperature", "top_p", "top_k", "stop", "stop_token_ids", "n"),
    *("sampling_seed", "ignore_eos", "skip_special_tokens"),
)
TEXTS = st.text(max_size=9)
CHAT = st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": TEXTS}), min_size=1, max_size=2)


def spoilt(whole: dict[str, Any], names: tuple[str, ...]) -> Any:
    """A request that can be answered, with up to two of its parameters replaced by anything."""
    changes = st.dictionaries(st.sampled_from(names), VALUES, max_size=2)
    return st.builds(lambda good, bad: {**good, **bad}, st.fixed_dictionaries(whole), changes)


REQUESTS = st.one_of(
    st.tuples(
        st.just("/generate"),
        spoilt(
            {
                "input_ids": st.lists(st.integers(0, 511), min_size=1, max_size=4),
                "sampling_params": spoilt({"max_new_tokens": st.integers(1, 9)}, SAMPLING),
            },
            NativeRequest.__struct_fields__,
        ),
    ),
    st.tuples(
        st.just("/v1/completions"),
        spoilt({"prompt": TEXTS, "max_tokens": st.integers(1, 9)}, CompletionRequest.__struct_fields__),
    ),
    st.tuples(
        st.just("/v1/chat/completions"),
        spoilt({"messages": CHAT, "max_tokens": st.integers(1, 9)}, ChatRequest.__struct_fields__),
    ),
    st.tuples(
        st.just("/v1/chat/completions"), st.fixed_dictionaries({"messages": MESSAGES, "tools": VALUES})
    ),
    st.tuples(
        st.sampled_from(["/abort_request", "/update_weights_from_disk", "/continue_generation"]), VALUES
    ),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(REQUESTS, min_size=1, max_size=12))
def test_nothing_is_a_fault_of_the_server(requests: list[tuple[str, Any]]) -> None:
    async def ask() -> None:
        async with serving(ScriptedEngine(), max_queue=300) as client:
            for path, body in requests:
                status, answer = await client.post(path, body)
                assert status in (200, 400, 404), (path, body, status, answer)
                if status != 200:
                    assert answer["error"]["message"]

    asyncio.run(ask())
