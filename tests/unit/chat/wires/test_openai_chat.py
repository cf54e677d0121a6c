from typing import Any

import pytest

from rollstream.chat.wires.exchange import read_tools
from rollstream.chat.wires.openai_chat import ChatAnswer, Choice, read_chat
from rollstream.chat.wires.requests import RequestError
from rollstream.errors import ConfigError
from rollstream.trajectory import Completion

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
READ = {**CALL, "function": {"name": "add", "arguments": {"a": 1}}}


def test_tools_are_whole_and_differ() -> None:
    tool = {"type": "function", "function": {"name": "add", "strict": True, "parameters": {"type": "object"}}}
    assert read_tools([tool]) == [tool]
    with pytest.raises(ConfigError, match="more than one tool named add"):
        read_tools([tool, tool])
    with pytest.raises(ConfigError, match=r"tools\[1\]"):
        read_tools([tool, {"type": "web_search"}])


def test_there_may_be_many_tools_but_not_any_number() -> None:
    def tools(count: int) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": f"f{at}"}} for at in range(count)]

    assert len(read_tools(tools(4096))) == 4096
    with pytest.raises(RequestError) as refused:
        read_tools(tools(4097))
    assert refused.value.param == "tools"


def test_an_answer_whole_and_in_pieces() -> None:
    """Tokens without a text of their own are named by their ids, in vLLM's way."""
    message = {"role": "assistant", "content": "hm", "tool_calls": [READ]}
    completion = Completion([5, 6], [-0.5, -0.25], "stop", [(0, 3), (1, 4)], cached_prompt_tokens=1)
    answer = ChatAnswer("a", "m", [1, 2, 3], [Choice(message, completion)])
    how = {"logprobs": True, "return_token_ids": True, "stream": True}
    asked = read_chat({"messages": [{"role": "user", "content": "hi"}], **how})
    body = answer.body(asked)
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hm", "tool_calls": [CALL]}
    assert [one["token"] for one in choice["logprobs"]["content"]] == ["token_id:5", "token_id:6"]
    assert (choice["finish_reason"], choice["token_ids"], body["prompt_token_ids"]) == (
        "tool_calls",
        [5, 6],
        [1, 2, 3],
    )
    assert body["metadata"] == {"weight_version": "4"}
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    chunks = answer.chunks(asked)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [
        {"role": "assistant", "content": None},
        {"content": "hm"},
        {"tool_calls": [{"index": 0, **CALL}]},
        {},
    ]
    assert chunks[-1]["choices"][0]["logprobs"] == choice["logprobs"]
    assert all("usage" not in chunk for chunk in chunks)
