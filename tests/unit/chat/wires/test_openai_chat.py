from typing import Any

import pytest

from rollstream.chat.wires.exchange import read_tools
from rollstream.chat.wires.requests import RequestError
from rollstream.errors import ConfigError


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
